"""Fields of a policy that are one of a few words."""

from __future__ import annotations

from enum import StrEnum


class Mechanism(StrEnum):
    """The unit that a policy's buckets count."""

    WORK = "work"
    REQUESTS = "requests"
    AUTO = "auto"
    """The better of the two for the bucket at the time (R10)."""


class Count(StrEnum):
    """The unit that a bucket of mechanism `work` counts (W16)."""

    WORK = "work"
    REQUESTS = "requests"
    """Each request takes one token times its weight, whatever its work."""


class Admit(StrEnum):
    """The balance that a request needs in a bucket (W13)."""

    MINIMUM = "minimum"
    COVERED = "covered"
    """The whole charge."""


class OnStoreFailure(StrEnum):
    """How to decide while the store cannot be reached (B3)."""

    OPEN = "open"
    CLOSED = "closed"
    LOCAL = "local"
    KNOWN = "known"
    """A quota continues from the last balance that the node knew; an unknown one is closed (F-S14)."""


class Rounding(StrEnum):
    """How the caller's own measure becomes units of work."""

    UP = "up"
    """To whole units: 1 byte is a unit of 2048 bytes."""
    NONE = "none"
