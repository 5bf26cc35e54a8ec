"""What can be wrong with a request that a limit has no part in. Each becomes one kind of HTTP answer."""

from __future__ import annotations

from limiter.model.contract import Settled


class RequestError(Exception):
    """The request cannot be served as it is."""


class UnknownReservation(RequestError):
    """No reservation of ours, or one that is long over (R6): 404."""


class SettledOtherwise(RequestError):
    """Settled before with another amount (R3): 409."""

    def __init__(self, first: Settled) -> None:
        super().__init__(f"this reservation was settled before with {first.work:g} units of work")
        self.first = first


class IdempotencyConflict(RequestError):
    """The idempotency key was used with other parameters (R8): 409."""


class NotDecided(RequestError):
    """No decision could be made: the store is away and a policy says `closed`, or a record is damaged (S11): 503."""

    def __init__(self, reason: str, detail: str, *, policy: str | None = None, retry_after_ms: int = 1000) -> None:
        super().__init__(detail)
        self.reason = reason
        self.policy = policy
        self.retry_after_ms = retry_after_ms
