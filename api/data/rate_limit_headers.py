"""`RateLimit`, `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers), and the older sets.

    q = units per w seconds            w = whole seconds that the capacity takes to refill, or a quota's period
    r = units left, 0 in debt          t = whole seconds until it is full, or until a refused request would pass

Policies in shadow are left out. The older sets have one limit: the one that refused, otherwise the tightest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import Literal

from api.data.answer import header
from limiter.model.bucket.contract import LimitState

HeaderSet = Literal["draft", "legacy", "x", "none"]
INTEGER_MAX = 999_999_999_999_999  # of a structured field


def lines(limits: Sequence[LimitState], headers: HeaderSet) -> bytes:
    """Return the header lines for these limits, in one of the sets."""
    if headers == "draft":
        return draft(limits)
    told = [limit for limit in limits if not limit.shadow]
    if not told or headers == "none":
        return b""
    tightest = min(told, key=lambda limit: (limit.passed, limit.balance / limit.capacity if limit.capacity else 0.0))
    prefix = "ratelimit" if headers == "legacy" else "x-ratelimit"
    quota, _ = _quota(tightest.capacity, tightest.rate, tightest.window_s)
    return (
        header(f"{prefix}-limit", str(quota))
        + header(f"{prefix}-remaining", str(_integer(tightest.balance)))
        + header(f"{prefix}-reset", str(reset_s(tightest)))
    )


def reset_s(limit: LimitState) -> int:
    """Return whole seconds until this limit is full, or admits the request; never too few."""
    return int(-(-limit.reset_ms // 1000)) if limit.reset_ms > 0 else 0


def draft(limits: Sequence[LimitState]) -> bytes:
    """Return the header lines of the draft, with all limits."""
    if len(limits) == 1 and not limits[0].shadow:  # nearly all
        (limit,) = limits
        name, policy = policy_item(limit.policy, limit.capacity, limit.rate, limit.window_s)
        return b"ratelimit: %b;r=%d;t=%d\r\nratelimit-policy: %b\r\n" % (name, _left(limit), reset_s(limit), policy)
    told = [limit for limit in limits if not limit.shadow]
    if not told:
        return b""
    named = [policy_item(limit.policy, limit.capacity, limit.rate, limit.window_s) for limit in told]
    states = [
        b"%b;r=%d;t=%d" % (name, _left(limit), reset_s(limit)) for limit, (name, _) in zip(told, named, strict=True)
    ]
    return b"ratelimit: %b\r\nratelimit-policy: %b\r\n" % (
        b", ".join(states),
        b", ".join([policy for _, policy in named]),
    )


def _left(limit: LimitState) -> int:
    balance = limit.balance
    return int(balance) if 0 <= balance <= INTEGER_MAX else _integer(balance)


@lru_cache(maxsize=4096)
def policy_item(policy: str, capacity: float, rate: float, window_s: float) -> tuple[bytes, bytes]:
    """Return a policy's name, and its item of `RateLimit-Policy`."""
    name = _string(policy).encode()
    quota, window = _quota(capacity, rate, window_s)
    return name, b"%b;q=%d;w=%d" % (name, quota, window)


def _quota(capacity: float, rate: float, window_s: float) -> tuple[int, int]:
    window = max(1, _integer(ceil(window_s)))
    return _integer(rate * window if rate > 0 else capacity), window


def _integer(value: float) -> int:
    return int(value) if 0 <= value <= INTEGER_MAX else 0 if value < 0 else INTEGER_MAX


def _string(text: str) -> str:
    """Return a structured-field string. Names of policies need no escaping; other characters are made harmless
    (F-H5)."""
    printable = "".join(character for character in text if " " <= character <= "~")
    return '"' + printable.replace("\\", "\\\\").replace('"', '\\"') + '"'
