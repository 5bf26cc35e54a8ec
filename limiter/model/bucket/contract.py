"""What callers ask and what they are answered: the data plane's requests and answers as values.

The API decodes bodies straight into the requests and encodes the answers; the engine turns one into the other.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from limiter.model.numbers import NUMBER_MAX
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields.kinds import DIMENSIONS_MAX

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
    """May I work? `work` is the caller's estimate; without it the policies' charge applies."""

    descriptor: Descriptor
    namespace: Text = "default"
    work: Work | None = None
    criticality: Criticality | None = None
    expected_latency_ms: Milliseconds | None = None
    attempt: Annotated[int, Meta(ge=1, le=ATTEMPT_MAX)] = 1
    ttl_ms: Annotated[int, Meta(ge=1, le=TTL_MAX_MS)] = 60_000
    dry_run: bool = False

    gone: ClassVar[dict[str, str]] = {
        "lease": "no such field: leases broke request limits; lending a part of a limit gets a route of its own"
    }
    """Fields that there were once, each with what a caller who still sends it is told."""


class SettleRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """This is what it really cost: in all (final), or so far."""

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
    """How busy a service is (G5). Without a key, for every bucket of the policy."""

    policy: Annotated[str, Meta(min_length=1, max_length=64)]
    source: Annotated[str, Meta(min_length=1, max_length=SOURCE_MAX)]
    """Who reports: its next report takes the place of this one."""
    signals: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=SIGNAL_NAME_MAX)], Work],
        Meta(min_length=1, max_length=SIGNALS_MAX),
    ]
    """Loads by name, in the unit of the policy's target for each."""
    namespace: Text = "default"
    key: Annotated[dict[Annotated[str, Meta(min_length=1, max_length=64)], Text], Meta(max_length=32)] | None = None
    """The bucket, by the dimensions that the policy is split by."""


class SignalsTaken(Struct, frozen=True):
    """Where a report was put."""

    bucket: str
    """Its name; the policy's for all of them."""
    partitions: int
    """In how many partitions."""
    signals: dict[str, float]


class LimitState(Struct, frozen=True):
    """One policy's part in a decision, with the state its bucket is left in."""

    policy: str
    mechanism: Literal["work", "requests", "quota"]
    balance: float
    capacity: float
    rate: float
    """Refill a second; for a quota 0."""
    shadow: bool = False
    passed: bool = True
    """Whether this policy by itself would have let the request through."""
    window_s: float = 0.0
    """How long the limit's period is: a quota's window, or the time that the capacity takes to refill."""
    reset_ms: float = 0.0
    """When the balance will next be what a request needs, or be full again."""


class Granted(Struct, frozen=True):
    """Go ahead."""

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


Reason = Literal["work", "request_rate", "quota", "overload", "request_too_large", "denied", "blocked"]


class Refused(Struct, frozen=True):
    """Over a limit: which one, why, and whether and when to come back (B1, G6)."""

    policy: str
    reason: Reason
    retry: Literal["after", "never"]
    retry_after_ms: int
    limits: tuple[LimitState, ...]
    detail: str
    degraded: bool = False
    replayed: bool = False
    overloaded: bool = False


Decision = Granted | Refused


class Settled(Struct, frozen=True):
    """What the settle did, or what the first one did."""

    work: float
    adjusted: float
    """What was debited (or, below zero, given back) beyond the charge: charged + adjusted + uncollected = work, unless
    the settle came late or within the policy's threshold."""
    stop: bool
    duplicate: bool
    late: bool
    limits: tuple[LimitState, ...]
    uncollected: float = 0.0
    """Work beyond the debt bound, which nobody pays for (W5)."""
    expires_in_ms: int = 0
    """After progress: how long until the reservation expires (W14)."""
