"""Fields of a policy that are one of a few words."""

from __future__ import annotations

from enum import StrEnum


class Mechanism(StrEnum):
    """What a policy's buckets count."""

    WORK = "work"
    REQUESTS = "requests"
    AUTO = "auto"
    """Whichever suits the bucket at the time (R10)."""


class Count(StrEnum):
    """What a bucket of mechanism `work` counts (W16)."""

    WORK = "work"
    REQUESTS = "requests"
    """Each request takes one token times its weight, whatever its work."""


class Admit(StrEnum):
    """What a request has to find in a bucket (W13)."""

    MINIMUM = "minimum"
    COVERED = "covered"
    """As much as it will be charged."""


class OnStoreFailure(StrEnum):
    """What to answer while the store cannot (B3)."""

    OPEN = "open"
    CLOSED = "closed"
    LOCAL = "local"
    KNOWN = "known"
    """A quota goes on from the last balance that the node knew; what it does not know is closed (F-S14)."""
