"""Errors of a request that have nothing to do with its limits. Each becomes one kind of HTTP answer."""

from __future__ import annotations

from typing import Literal

from limiter.model.bucket.contract import Settled


class RequestError(Exception):
    """The request cannot be served in this form."""


class UnknownReservation(RequestError):
    """No node of this installation made the reservation, or it can no longer be settled (F-R6): 404."""


class SettledOtherwise(RequestError):
    """Settled before with another amount (F-R3): 409."""

    def __init__(self, first: Settled) -> None:
        super().__init__(f"this reservation was settled before with {first.work:g} units of work")
        self.first = first


class LocalNotAllowed(RequestError):
    """A policy lends no part of its limit (P9): 403, naming it."""

    def __init__(self, policy: str, detail: str) -> None:
        super().__init__(detail)
        self.policy = policy


class UnknownLease(RequestError):
    """Nobody here made the lease, it ended long ago, or other policies cover its descriptor now: 404."""


class OutdatedLease(RequestError):
    """A request with a larger number was answered before: 409. Nothing was done."""


class ClosedLease(RequestError):
    """The lease was given back or revoked: 409. Nothing more is lent under it."""


class UnfitField(RequestError):
    """A field that is well formed but does not fit the policies in force: 422."""

    def __init__(self, field: str, *, found: str, allowed: str) -> None:
        super().__init__(f"{field}: found {found}; allowed: {allowed}")
        self.field = field
        self.found = found
        self.allowed = allowed


class Uncovered(RequestError):
    """No policy covers the request, and this service refuses uncovered requests (P7): 403, as no limit was reached."""


class TooManyLimits(RequestError):
    """More policies cover the request than can be decided at once: 422."""


class TooMuchAtOnce(RequestError):
    """The operations of a batch ask more buckets than are asked for one request: 413 for those that come too late."""


class IdempotencyConflict(RequestError):
    """The idempotency key was used with other parameters (F-R8): 409."""


class NotDecided(RequestError):
    """No decision could be made: the store is away and a policy says `closed`, or a record is damaged (F-S11): 503."""

    def __init__(self, reason: str, detail: str, *, policy: str | None = None, retry_after_ms: int = 1000) -> None:
        super().__init__(detail)
        self.reason = reason
        self.policy = policy
        self.retry_after_ms = retry_after_ms

    @property
    def retry(self) -> Literal["now", "after"]:
        """`now`: this node has too much to do, and another may not; `after`: elsewhere the answer is the same (G6)."""
        return "now" if self.reason == "node_busy" else "after"
