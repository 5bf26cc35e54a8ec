"""Requests for leases and their answers, as values (B8, P9).

POST /v1/leases           LeaseRequest    the first request: what the holder expects to be asked for
POST /v1/leases/renew     RenewRequest    what it did, holds, owes and wants
POST /v1/leases/return    ReturnRequest   what it did, has left and owes
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from limiter.model.bucket.contract import RESERVATION_MAX, Descriptor, StateName, Text, Work

HOLDER_MAX = 128
WEIGHT_MAX = 1_000_000
NUMBER_MAX = 2**53
SLICES_MAX = 255

Holder = Annotated[str, Meta(min_length=1, max_length=HOLDER_MAX)]
Token = Annotated[str, Meta(min_length=1, max_length=RESERVATION_MAX)]
Number = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
Taken = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
PolicyName = Annotated[str, Meta(min_length=1, max_length=64)]
Mechanism = Literal["work", "requests", "quota"]


class UsedSoFar(Struct, frozen=True, forbid_unknown_fields=True):
    """Sums since the lease began; they only grow, so that a lost or repeated request counts nothing twice."""

    requests: Work = 0.0
    """Requests that the holder was asked for, refused ones included."""
    refused: Work = 0.0
    charged: Work = 0.0
    """Work charged for those that were granted."""
    work: Work = 0.0
    """Work that was settled."""
    work_squared: Work = 0.0
    settles: Work = 0.0
    answered: Work = 0.0
    late: Work = 0.0
    """Answers that took longer than expected."""
    seconds: Work = 0.0
    """Time that all answers took together."""


NOTHING_USED = UsedSoFar()


class HeldSlice(Struct, frozen=True, forbid_unknown_fields=True):
    """A slice as its holder has it when it asks."""

    policy: PolicyName
    mechanism: Text | None = None
    """Tells the slices of a policy with a rate and a quota apart."""
    held: Work = 0.0
    """Share of the rate that the holder has limited itself to; of a quota: tokens that it keeps."""
    tokens: Work = 0.0
    """Of a return: what is given back."""
    debt: Work = 0.0
    moved: Work = 0.0
    """Debt that the holder knows to be the bucket's by now, in all."""
    refused: Work = 0.0
    """Requests that this slice refused, since the lease began."""
    spent: Work = 0.0
    """Of a quota: all that was spent in this period."""
    period: Work = 0.0
    """Of a quota: the period that `held` and `spent` are of, as the last answer said it."""


Slices = Annotated[list[HeldSlice], Meta(max_length=SLICES_MAX)]


class LeaseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for a part of every limit that covers a descriptor."""

    descriptor: Descriptor
    holder: Holder
    """A random id of the holder's own: it makes a repeated request the same lease."""
    namespace: Text = "default"
    work_rate: Work | None = None
    """Work per second that the holder expects to be asked for; None if it cannot tell."""
    request_rate: Work | None = None
    weight: Annotated[float, Meta(ge=1, le=WEIGHT_MAX)] = 1.0
    """How many holders this one stands for."""
    slices: Slices = []
    """Debt of a lease that has ended."""


class RenewRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for the next part; the same request again is answered the same."""

    lease: Token
    number: Number
    taken: Taken = 0
    """The last answer that the holder took over."""
    work_rate: Work | None = None
    request_rate: Work | None = None
    used: UsedSoFar = NOTHING_USED
    slices: Slices = []


class ReturnRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Give a lease back."""

    lease: Token
    number: Number
    taken: Taken = 0
    used: UsedSoFar = NOTHING_USED
    slices: Slices = []


class LentSlice(Struct, frozen=True):
    """A part of one limit, until the lease ends."""

    policy: str
    mechanism: Mechanism
    counts_requests: bool
    """True if each request takes `weight` tokens, whatever its work."""
    share: float
    """Part of the rate."""
    rate: float
    capacity: float
    tokens: float
    """Units that this answer adds to the holder's balance."""
    moved: float
    """Debt of the holder's that the bucket has taken over, in all."""
    charge: float
    """Work of a request without an estimate."""
    weight: float
    """Units of this limit for a unit of work, or for a request."""
    minimums: dict[str, float]
    """The balance that a request of each class needs."""
    debt_max: float
    admit: Literal["covered"] = "covered"
    period: float | UnsetType = UNSET
    """Of a quota: which period this is; say it in the next request."""
    ends_in_ms: float | UnsetType = UNSET
    """Of a quota: when the period ends, and its tokens with it."""


class LentOverload(Struct, frozen=True):
    """Overload control for a holder, by class; a class that is not limited is left out."""

    in_flight: dict[str, float]
    """Requests in flight, of all classes together, from which on a class is refused."""
    refused_share: dict[str, float]
    rate: dict[str, float]
    """Requests per second."""
    late_after_ms: dict[str, float]
    """Answers that take longer are late."""


class Lent(Struct, frozen=True, omit_defaults=False):
    """The slices of a holder until its lease ends."""

    lease: str
    id: str
    """The lease in lists; it gives no rights."""
    number: int
    expires_in_ms: int
    """From when the request was sent."""
    renew_in_ms: int
    charge: float
    """Work of a request without an estimate: the largest of the policies'."""
    slices: tuple[LentSlice, ...]
    quality: float = 1.0
    state: StateName = "calm"
    on_service_failure: Literal["local", "open", "closed"] = "local"
    """The strictest of the policies' wishes for when the service cannot be reached and the lease has ended."""
    overload: LentOverload | UnsetType = UNSET


class Returned(Struct, frozen=True):
    """A lease was given back."""

    id: str
    returned: bool
    """False if it was over before: then nothing was given back."""


class LeaseView(Struct, frozen=True):
    """A lease, as lists show it."""

    id: str
    namespace: str
    partition: int
    holder: str
    weight: float
    number: int
    revoked: bool
    expires_in_ms: int
    slices: list[LeaseViewSlice]


class LeaseViewSlice(Struct, frozen=True):
    """One bucket's part in a lease, as lists show it."""

    policy: str
    bucket: str
    share: float
    capacity_share: float
    given: float
    """Of a quota: what was handed out in this period and not taken back."""


class LeaseList(Struct, frozen=True):
    """The leases of a partition."""

    leases: list[LeaseView]


class Revoked(Struct, frozen=True):
    """Nothing more is lent under this lease."""

    id: str
    expires_in_ms: int
    """When what is lent comes back at the latest."""
