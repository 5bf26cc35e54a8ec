"""Bodies as they go out: field names, order, and what is left out when it says nothing."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from api.data.field_problems import FieldProblem
from limiter.model.bucket.contract import Reason

Mechanism = Literal["work", "requests", "quota"]


class Limit(Struct, frozen=True, omit_defaults=True):
    """One policy's part in a decision, with the state its bucket is left in."""

    policy: str
    mechanism: Mechanism
    balance: float
    capacity: float
    rate: float
    passed: bool = True
    """Present, and false, where this policy would not have let the request through."""
    shadow: bool = False
    """Present, and true, where this policy only watches."""


class GrantedAnswer(Struct, frozen=True):
    """Go ahead, and settle with the reservation."""

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


class SettledAnswer(Struct, frozen=True):
    """What the settle did, or what the first one did."""

    work: float
    adjusted: float
    uncollected: float
    stop: bool
    duplicate: bool
    late: bool
    expires_in_ms: int
    limits: list[Limit]


class Problem(Struct, frozen=True, omit_defaults=True):
    """Why not (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    reason: str
    policy: str | None = None
    retry_after_ms: int | None = None
    errors: tuple[FieldProblem, ...] = ()
    """What is wrong, field by field."""
    first: SettledAnswer | None = None
    """What the first settle did."""
    request_id: str | None = None
    """The `x-request-id` that was sent, or one that was made: it is in the log, where anything was logged."""


class RefusedAnswer(Struct, frozen=True, omit_defaults=True):
    """Over a limit: which one, why, and whether and when to come back (RFC 9457)."""

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
    """Present, and true, where the store had no part in it."""
    overloaded: bool = False
    """Present, and true, where what the limits protect is overloaded: slow down (Q6)."""
