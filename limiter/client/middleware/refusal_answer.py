"""Answers to requests that were refused: a problem (RFC 9457) with the headers that say when to come again.

429   over a limit           Retry-After, RateLimit, RateLimit-Policy (as far as known), Headgate-Retry
403   denied                 Headgate-Retry, and Retry-After where a block ends
503   nobody could decide    Headgate-Retry, and Retry-After if there is a time
503   a layer below refused  Headgate-Retry: never, so that of all layers only the one above the refusal retries (G6)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from math import ceil
from typing import Any, NamedTuple

import msgspec

from limiter.client.middleware.outgoing import RETRY_HEADER
from limiter.client.throttled import OVER_LIMIT, UNAVAILABLE, Throttled

PASSED_ON = frozenset({OVER_LIMIT, 403, UNAVAILABLE})
INTEGER_MAX = 999_999_999_999_999  # of a structured field

encode = msgspec.json.Encoder().encode


class RefusalAnswer(NamedTuple):
    """A whole answer over HTTP."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def refusal_answer(refusal: Throttled) -> RefusalAnswer:
    """Return the answer to a request that this layer refuses. The list of limits stays out of the body: callers may be
    strangers, and the headers say what they need."""
    status = refusal.status if refusal.status in PASSED_ON else UNAVAILABLE
    # "now" means another node of Headgate, which the callers of this application know nothing of.
    retry = "after" if refusal.retry == "now" else refusal.retry
    body = {
        "type": refusal.body.get("type", "about:blank"),
        "title": refusal.body.get("title", HTTPStatus(status).phrase),
        "status": status,
        "detail": str(refusal),
        "reason": refusal.reason,
        "policy": refusal.policy,
        "retry": retry,
        "retry_after_ms": refusal.retry_after_ms,
    }
    headers = rate_limit_headers(refusal) if status == OVER_LIMIT else []
    if retry == "after" and refusal.retry_after_ms is not None:
        headers.append(("retry-after", str(ceil(refusal.retry_after_ms / 1000))))
    return _answer(status, body, headers, retry)


def passed_on_answer() -> RefusalAnswer:
    """Return the answer where a layer below refused, and this one has given up: the callers are not to retry."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(UNAVAILABLE).phrase,
        "status": UNAVAILABLE,
        "detail": "a service that this one needs has refused; it was asked again as often as is allowed",
        "reason": "refused_below",
        "retry": "never",
    }
    return _answer(UNAVAILABLE, body, [], "never")


def _answer(status: int, body: Mapping[str, Any], headers: list[tuple[str, str]], retry: str) -> RefusalAnswer:
    raw = encode({name: value for name, value in body.items() if value not in (None, "")})
    whole = [("content-type", "application/problem+json"), ("content-length", str(len(raw)))]
    return RefusalAnswer(status, [*whole, *headers, (RETRY_HEADER.lower(), retry)], raw)


def throttled_in(error: BaseException) -> Throttled | None:
    """Return the refusal that an exception is, or that a group of exceptions holds."""
    if isinstance(error, Throttled):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := throttled_in(one)) is not None), None)
    return None


def rate_limit_headers(refusal: Throttled) -> list[tuple[str, str]]:
    """Return `RateLimit` and `RateLimit-Policy` for the limits that the service named."""
    limits: Sequence[Mapping[str, Any]] = [one for one in refusal.body.get("limits", ()) if not one.get("shadow")]
    if not limits:
        return []
    return [
        ("ratelimit", ", ".join(_state(one, refusal) for one in limits)),
        ("ratelimit-policy", ", ".join(_policy(one) for one in limits)),
    ]


def _state(limit: Mapping[str, Any], refusal: Throttled) -> str:
    item = f"{_name(limit)};r={_integer(limit['balance'])}"
    if not limit.get("passed", True):
        until_ms = refusal.retry_after_ms if refusal.retry != "never" else None
        return item if until_ms is None else f"{item};t={ceil(until_ms / 1000)}"
    if limit["mechanism"] == "quota" or limit["rate"] <= 0:
        return item
    return f"{item};t={_integer(ceil((limit['capacity'] - limit['balance']) / limit['rate']))}"


def _policy(limit: Mapping[str, Any]) -> str:
    if limit["mechanism"] == "quota" or limit["rate"] <= 0:
        return f"{_name(limit)};q={_integer(limit['capacity'])}"  # its period is not in the answer
    window_s = max(1, ceil(limit["capacity"] / limit["rate"]))
    return f"{_name(limit)};q={_integer(limit['rate'] * window_s)};w={window_s}"


def _name(limit: Mapping[str, Any]) -> str:
    """Return the policy's name as a structured field's string."""
    printable = "".join(one for one in limit["policy"] if " " <= one <= "~")
    return '"' + printable.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _integer(value: float) -> int:
    return int(min(max(value, 0.0), INTEGER_MAX))
