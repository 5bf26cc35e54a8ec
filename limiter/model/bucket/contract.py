"""Requests and answers of the data plane, as values.

The API decodes bodies straight into the requests and encodes the answers; the engine turns one into the other.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from limiter.model.numbers import DIMENSIONS_MAX, NUMBER_MAX
from limiter.model.policy.criticality import Criticality

TEXT_MAX = 1024
TTL_MAX_MS = 86_400_000
RESERVATION_MAX = 131_072
ATTEMPT_MAX = 1_000

Work = Annotated[float, Meta(ge=0, le=NUMBER_MAX)]
Milliseconds = Annotated[float, Meta(ge=0, le=NUMBER_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Descriptor = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=64)], Text], Meta(min_length=1, max_length=DIMENSIONS_MAX)
]


class AcquireRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for admission. `work` is the caller's estimate; without it the policies' charge applies."""

    descriptor: Descriptor
    namespace: Text = "default"
    work: Work | None = None
    criticality: Criticality | None = None
    expected_latency_ms: Milliseconds | None = None
    attempt: Annotated[int, Meta(ge=1, le=ATTEMPT_MAX)] = 1
    ttl_ms: Annotated[int, Meta(ge=1, le=TTL_MAX_MS)] = 60_000
    dry_run: bool = False

    gone: ClassVar[dict[str, str]] = {
        "lease": "no such field: POST /v1/leases lends a part of every limit that covers a descriptor"
    }
    """Removed fields, each with the message to a caller that still sends it."""


class SettleRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Report the real cost: of all work (final), or of the work so far."""

    reservation: Annotated[str, Meta(max_length=RESERVATION_MAX)]
    work: Work
    final: bool = True
    latency_ms: Milliseconds | None = None
    outcome: Annotated[str, Meta(max_length=64)] = "ok"

    gone: ClassVar[dict[str, str]] = {"requests": "no such field: an acquire is for one request, as leases are gone"}


SIGNALS_MAX = 16
SOURCE_MAX = 64
SIGNAL_NAME_MAX = 64


class SignalRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A service's load (G5). Without a key, for every bucket of the policy."""

    source: Annotated[str, Meta(min_length=1, max_length=SOURCE_MAX)]
    """The reporting source: its next report replaces this one."""
    signals: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=SIGNAL_NAME_MAX)], Work],
        Meta(min_length=1, max_length=SIGNALS_MAX),
    ]
    """Loads by name, in the unit of the policy's target for each."""
    namespace: Text = "default"
    policy: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """None: for every policy of the namespace that has targets for load."""
    key: Annotated[dict[Annotated[str, Meta(min_length=1, max_length=64)], Text], Meta(max_length=32)] | None = None
    """The bucket, by the dimensions that the policy is split by."""


class SignalsTaken(Struct, frozen=True):
    """The place of a stored report."""

    bucket: str
    """The bucket's name; the policy's for all of its buckets."""
    partitions: int
    """Number of partitions."""
    signals: dict[str, float]


class LimitState(Struct, frozen=True):
    """One policy's part in a decision, with the resulting state of its bucket."""

    policy: str
    mechanism: Literal["work", "requests", "quota"]
    balance: float
    capacity: float
    rate: float
    """Refill per second; 0 for a quota."""
    shadow: bool = False
    passed: bool = True
    """True if this policy alone would have admitted the request."""
    window_s: float = 0.0
    """The limit's period: a quota's window, or the time that the capacity takes to refill."""
    reset_ms: float = 0.0
    """When the balance will be enough for a request, or full again."""


StateName = Literal["calm", "degraded", "recovering", "overloaded"]


class Granted(Struct, frozen=True):
    """The request is admitted."""

    reservation: str
    charged: float
    expires_in_ms: int
    limits: tuple[LimitState, ...]
    overloaded: bool = False
    quality: float = 1.0
    degraded: bool = False
    replayed: bool = False
    covered: bool = True
    """False where no policy covers the request, so that nothing was charged (P7)."""
    state: StateName | None = None
    """State of the protected service (S8); None where no limit has overload control."""
    refused_share: float | None = None
    """Share of the requests of this class that overload control refuses."""
    drawn_share: float | None = None
    """Share of the requests of this class that is refused by draw; None if none is."""


Reason = Literal["work", "request_rate", "quota", "overload", "request_too_large", "denied", "blocked", "in_flight"]


class Refused(Struct, frozen=True):
    """The request is refused: by which limit, why, and whether and when to retry (B1, G6)."""

    policy: str
    reason: Reason
    retry: Literal["after", "never"]
    retry_after_ms: int
    limits: tuple[LimitState, ...]
    detail: str
    degraded: bool = False
    replayed: bool = False
    overloaded: bool = False
    state: StateName | None = None
    refused_share: float | None = None
    drawn_share: float | None = None


Decision = Granted | Refused


class Settled(Struct, frozen=True):
    """The effect of the settle, or of the first one if this is a repeat."""

    work: float
    adjusted: float
    """Work debited (or, below zero, given back) beyond the charge: charged + adjusted + uncollected = work, unless the
    settle came late or within the policy's threshold."""
    stop: bool
    duplicate: bool
    late: bool
    limits: tuple[LimitState, ...]
    uncollected: float = 0.0
    """Work beyond the debt bound, which no bucket was charged for (W5)."""
    expires_in_ms: int = 0
    """After progress: time until the reservation expires (W14)."""
