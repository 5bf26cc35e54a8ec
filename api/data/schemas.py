"""Bodies as they go out: field names, order, and what is left out when it says nothing."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from api.data.field_problems import FieldProblem
from limiter.model.bucket.contract import Reason, StateName

Mechanism = Literal["work", "requests", "quota"]


class Limit(Struct, frozen=True, omit_defaults=True):
    """One policy's part in a decision, with the resulting state of its bucket."""

    policy: str
    mechanism: Mechanism
    balance: float
    capacity: float
    rate: float
    passed: bool = True
    """Present, and false, if this policy would not have admitted the request."""
    shadow: bool = False
    """Present, and true, if this policy is in shadow."""


class GrantedAnswer(Struct, frozen=True):
    """The request is admitted; settle with the reservation."""

    granted: bool
    reservation: str
    charged: float
    expires_in_ms: int
    limits: list[Limit]
    overloaded: bool
    quality: float
    degraded: bool
    covered: bool
    """False where no policy covers the request: nothing was charged, and nothing limits it."""
    state: StateName | UnsetType = UNSET
    """State of the protected service; present where a limit has overload control."""
    refused_share: float | UnsetType = UNSET
    """Present beside it: the share of this class's requests that overload control refuses."""
    drawn_share: float | UnsetType = UNSET
    """Present where requests of this class are drawn: the share that is refused, whatever their number (Q4, G5)."""


class SettledAnswer(Struct, frozen=True):
    """The effect of the settle, or of the first one if this is a repeat."""

    work: float
    adjusted: float
    uncollected: float
    stop: bool
    duplicate: bool
    late: bool
    expires_in_ms: int
    limits: list[Limit]


class Problem(Struct, frozen=True, omit_defaults=True):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    reason: str
    policy: str | None = None
    retry: Literal["now", "after"] | None = None
    """`now`: ask another node; `after`: ask again later."""
    retry_after_ms: int | None = None
    errors: tuple[FieldProblem, ...] = ()
    """The faults, field by field."""
    first: SettledAnswer | None = None
    """The effect of the first settle."""
    request_id: str | None = None
    """The `x-request-id` that was sent, or one that was made; log lines of this request have it."""


class RefusedAnswer(Struct, frozen=True, omit_defaults=True):
    """Over a limit: which one, why, and whether and when to retry (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    granted: bool
    policy: str
    reason: Reason
    retry: Literal["after", "never"]
    retry_after_ms: int
    limits: list[Limit]
    violated_policies: list[str] = field(name="violated-policies")
    degraded: bool = False
    """Present, and true, if it was decided without the store."""
    overloaded: bool = False
    """Present, and true, where what the limits protect is overloaded: slow down (Q6)."""
    state: StateName | None = None
    """State of the protected service; present where a limit has overload control."""
    refused_share: float | None = None
    """Present beside it: the share of this class's requests that overload control refuses."""
    drawn_share: float | None = None
    """Present where requests of this class are drawn: the share that is refused, whatever their number (Q4, G5)."""
