"""Exceptions where a program may not go on: `Throttled` for every refusal, `Misused` for its own mistakes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal

Retry = Literal["now", "after", "never"]

OVER_LIMIT = 429
UNAVAILABLE = 503
REFUSED_FOR_GOOD = frozenset({"denied", "blocked", "uncovered"})
"""Refusals that come as 403, beside those of an API key that may not acquire."""


WAIT_LEAST_MS = 5.0
WAIT_UNKNOWN_MS = 100.0


class HeadgateError(Exception):
    """Base of all exceptions of this library."""


class Throttled(HeadgateError):
    """The request may not work now: it is over a limit, denied, or nobody could decide.

    `reason` is the service's own (`work`, `request_rate`, `quota`, `overload`, `in_flight`, `request_too_large`,
    `denied`, `blocked`, …) or one of the library's: `adaptive` (this client is refused so often that it no longer asks
    each time), `unavailable` (no node answered in time), `settles_waiting` (too many settles are still to be sent).
    """

    def __init__(
        self,
        *,
        reason: str,
        policy: str = "",
        retry: Retry = "after",
        retry_after_ms: float | None = None,
        status: int = OVER_LIMIT,
        local: bool = False,
        refused_share: float = 0.0,
        detail: str = "",
        body: Mapping[str, Any] | None = None,
    ) -> None:
        self.reason = reason
        self.policy = policy
        self.retry: Retry = retry
        self.retry_after_ms = retry_after_ms
        self.status = status
        self.local = local
        """Decided in this process, without asking the service."""
        self.refused_share = refused_share
        """The share of this class that overload control refuses, where it does."""
        self.body = dict(body or {})
        """The whole answer: a problem (RFC 9457), empty where there was none."""
        super().__init__(detail or f"refused{f' by {policy}' if policy else ''}: {reason}")

    @classmethod
    def of_answer(cls, status: int, body: Mapping[str, Any]) -> Throttled:
        """Read a refusal, or an answer without a decision (503)."""
        return cls(
            reason=body.get("reason", "unavailable"),
            policy=body.get("policy", ""),
            retry=body.get("retry", "after" if status == UNAVAILABLE else "never"),
            retry_after_ms=body.get("retry_after_ms"),
            status=status,
            refused_share=body.get("refused_share") or 0.0,
            detail=body.get("detail", ""),
            body=body,
        )


class Misused(HeadgateError):
    """The service does not accept this call as it is: a wrong field, a missing or wrong API key. A repeat changes
    nothing."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        self.reason = str(body.get("reason", "malformed"))
        self.body = dict(body)
        errors = "; ".join(f"{one.get('field')}: {one.get('found')}" for one in body.get("errors", ()))
        super().__init__(f"{status} {self.reason}: {body.get('detail', '')}{f' ({errors})' if errors else ''}")


def is_refusal(status: int, body: Mapping[str, Any]) -> bool:
    """Return whether an answer is a decision against the request."""
    return status == OVER_LIMIT or (status == 403 and body.get("reason") in REFUSED_FOR_GOOD)


def pause_s(refusal: Throttled | None) -> float:
    """Return for how long a refused request waits before it asks again; a little longer than it was told, unevenly."""
    if refusal is None:
        return 0.0
    wait_ms = WAIT_UNKNOWN_MS if refusal.retry_after_ms is None else refusal.retry_after_ms
    return max(WAIT_LEAST_MS, wait_ms) / 1000 * random.uniform(1.0, 1.1)  # noqa: S311
