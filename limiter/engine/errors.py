"""What can be wrong with a request that a limit has no part in. Each becomes one kind of HTTP answer."""

from __future__ import annotations

from limiter.model.bucket.contract import Settled


class RequestError(Exception):
    """The request cannot be served as it is."""


class UnknownReservation(RequestError):
    """No reservation of ours, or one that is long over (F-R6): 404."""


class SettledOtherwise(RequestError):
    """Settled before with another amount (F-R3): 409."""

    def __init__(self, first: Settled) -> None:
        super().__init__(f"this reservation was settled before with {first.work:g} units of work")
        self.first = first


class UnfitField(RequestError):
    """A field that is well formed, but does not fit the policies in force: 422."""

    def __init__(self, field: str, *, found: str, allowed: str) -> None:
        super().__init__(f"{field}: found {found}; allowed: {allowed}")
        self.field = field
        self.found = found
        self.allowed = allowed


class Uncovered(RequestError):
    """No policy covers the request, and what is not covered is refused here (P7): 403, for no limit was reached."""


class TooManyLimits(RequestError):
    """More policies cover the request than can be decided on at once: 422."""


class IdempotencyConflict(RequestError):
    """The idempotency key was used with other parameters (F-R8): 409."""


class NotDecided(RequestError):
    """No decision could be made: the store is away and a policy says `closed`, or a record is damaged (F-S11): 503."""

    def __init__(self, reason: str, detail: str, *, policy: str | None = None, retry_after_ms: int = 1000) -> None:
        super().__init__(detail)
        self.reason = reason
        self.policy = policy
        self.retry_after_ms = retry_after_ms
