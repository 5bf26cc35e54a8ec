"""Exceptions where a program may not go on: `Throttled` for every refusal, `Misused` for its own mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Literal, cast

Retry = Literal["now", "after", "never"]

RETRIES = ("now", "after", "never")

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

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Be copied and pickled whole: pools of processes and task queues send exceptions to each other."""
        return _same, (type(self), self.args, self.__dict__.copy())

    @classmethod
    def of_answer(cls, status: int, body: Mapping[str, Any]) -> Throttled:
        """Read a refusal, or an answer without a decision (503)."""
        retry = body.get("retry")
        if retry not in RETRIES:
            retry = "after" if status == UNAVAILABLE else "never"
        return cls(
            reason=_text(body.get("reason")) or "unavailable",
            policy=_text(body.get("policy")),
            retry=cast("Retry", retry),
            retry_after_ms=_number(body.get("retry_after_ms")),
            status=status,
            refused_share=_number(body.get("refused_share")) or 0.0,
            detail=_text(body.get("detail")),
            body=body,
        )


class Misused(HeadgateError):
    """The service does not accept this call as it is: a wrong field, a missing or wrong API key. A repeat changes
    nothing."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        self.reason = str(body.get("reason", "malformed"))
        self.body = dict(body)
        # The detail names the first mistake.
        listed = body.get("errors")
        named = [one for one in listed[1:] if isinstance(one, Mapping)] if isinstance(listed, list) else []
        more = "; ".join(f"{one.get('field')}: {one.get('found')}" for one in named)
        super().__init__(f"{status} {self.reason}: {body.get('detail', '')}{f' ({more})' if more else ''}")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Be copied and pickled whole."""
        return _same, (type(self), self.args, self.__dict__.copy())


def _same(kind: type[HeadgateError], arguments: tuple[Any, ...], fields: Mapping[str, Any]) -> HeadgateError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


def _text(value: object) -> str:
    """Return a text of an answer; empty where something else came."""
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    """Return a number of an answer; None where something else came."""
    return value if isinstance(value, int | float) and 0 <= value < inf else None


Refused = Literal["raise", "wait", "degrade"] | Callable[[Throttled], object]
"""The lot of a refused request: the exception; waiting, at most `wait_s`; a falsy grant; or a function of the
caller's, which is called with the exception before the falsy grant is returned, and may raise its own."""


def check_refused(on_refused: object) -> None:
    if on_refused not in ("raise", "wait", "degrade") and not callable(on_refused):
        raise ValueError(f"on_refused is raise, wait, degrade or a function, not {on_refused!r}")


def is_refusal(status: int, body: Mapping[str, Any]) -> bool:
    """Return whether an answer is a decision against the request."""
    return status == OVER_LIMIT or (status == 403 and _text(body.get("reason")) in REFUSED_FOR_GOOD)


def drawn_share(body: Mapping[str, Any]) -> float:
    """Return the share that the service refuses by draw, as an answer says; 0 if it says nothing."""
    return _number(body.get("drawn_share")) or 0.0


def pause_s(refusal: Throttled | None) -> float:
    """Return for how long a refused request waits before it asks again; a little longer than it was told, unevenly."""
    if refusal is None:
        return 0.0
    wait_ms = WAIT_UNKNOWN_MS if refusal.retry_after_ms is None else refusal.retry_after_ms
    return max(WAIT_LEAST_MS, wait_ms) / 1000 * random.uniform(1.0, 1.1)  # noqa: S311
