"""Refusals that the service has just given, repeated while they hold (G7).

A bucket that lacks room for a request lacks it for every request of at least the same work and the same class, until
the time that the refusal named. That time is bounded here: a settle, an edited policy or another node's slice may make
room earlier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import ceil
from typing import Any

from limiter.client.leasing import Key

HOLDS_MAX_S = 1.0
KNOWN_MAX = 4096
THAT_HOLD = frozenset({"work", "request_rate", "quota"})
"""Reasons that depend on the balance alone. Shares are drawn for each request, places are freed by settles."""

Asker = tuple[Key, str]
"""Namespace, descriptor and class of a request."""


class KnownRefusals:
    """The latest refusal of each descriptor and class. Time is an argument."""

    def __init__(self) -> None:
        self._known: OrderedDict[Asker, tuple[float, float | None, Mapping[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, asker: Asker, work: float | None, body: Mapping[str, Any], now_s: float) -> None:
        """Remember a refusal, if it holds for a while."""
        wait_ms = body.get("retry_after_ms") or 0
        if body.get("reason") not in THAT_HOLD or body.get("retry") != "after" or wait_ms <= 0:
            return
        self._known[asker] = now_s + min(wait_ms / 1000, HOLDS_MAX_S), work, {**body, "until_s": now_s + wait_ms / 1000}
        self._known.move_to_end(asker)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def find(self, asker: Asker, work: float | None, now_s: float) -> dict[str, Any] | None:
        """Return the refusal that a request would get, with the time that is left; None: ask."""
        known = self._known.get(asker)
        if known is None:
            return None
        holds_until_s, refused_work, body = known
        if now_s >= holds_until_s:
            del self._known[asker]
            return None
        is_as_large = work is None if refused_work is None else work is not None and work >= refused_work
        if not is_as_large:
            return None
        answer = dict(body)
        answer["retry_after_ms"] = max(1, ceil((answer.pop("until_s") - now_s) * 1000 - 1e-6))
        return answer
