"""Decisions while no node of the service answers (B3).

open     granted
closed   refused
local    each descriptor goes on at the pace at which this client was granted work before, as all other clients do, so
         that the sum stays about what it was. A descriptor under a quota is refused: what is left of it nobody knows
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Literal

Away = Literal["open", "closed", "local"]

REMEMBERED_MAX = 4096
SMOOTH_S = 10.0
"""Time over which the pace is averaged."""
BURST_S = 1.0
"""A descriptor may use the pace of this time at once."""


class _Pace:
    """Work per second that one descriptor was granted, and a bucket of that rate."""

    __slots__ = ("balance", "has_quota", "rate", "updated_s")

    def __init__(self, now_s: float) -> None:
        self.rate = 0.0
        self.balance = 0.0
        self.has_quota = False
        self.updated_s = now_s

    def granted(self, work: float, now_s: float) -> None:
        """Average the pace: an exponential window, so idle time lowers it."""
        self.rate = self.rate * _fading(now_s - self.updated_s) + work / SMOOTH_S
        self.updated_s = now_s


def _fading(elapsed_s: float) -> float:
    return max(0.0, 1.0 - elapsed_s / SMOOTH_S) if elapsed_s < SMOOTH_S / 2 else 0.5 ** (2.0 * elapsed_s / SMOOTH_S)


class ServiceAway:
    """One client's memory of what it was granted."""

    def __init__(self, mode: Away) -> None:
        if mode not in ("open", "closed", "local"):
            raise ValueError(f"unavailable is open, closed or local, not {mode!r}")
        self.mode: Away = mode
        self._paces: OrderedDict[Hashable, _Pace] = OrderedDict()
        self._away_since_s: float | None = None

    def answered(self) -> None:
        """Note that the service is there."""
        self._away_since_s = None

    def granted(self, key: Hashable, work: float, now_s: float, *, has_quota: bool) -> None:
        """Remember what the service granted."""
        if self.mode != "local":
            return
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = _Pace(now_s)
            if len(self._paces) > REMEMBERED_MAX:
                self._paces.popitem(last=False)
        else:
            self._paces.move_to_end(key)
        pace.granted(work, now_s)
        pace.has_quota = has_quota

    def admits(self, key: Hashable, work: float, now_s: float, *, mode: Away | None = None) -> bool:
        """Decide without the service; `mode` where a policy has said its own."""
        mode = mode or self.mode
        if mode != "local":
            return mode == "open"
        if self._away_since_s is None:
            self._away_since_s = now_s
            for known in self._paces.values():
                known.rate *= _fading(now_s - known.updated_s)
                known.balance, known.updated_s = max(1.0, known.rate * BURST_S), now_s
        pace = self._paces.get(key)
        if pace is None:
            return not self._paces  # a client that never heard of the service cannot know any pace
        if pace.has_quota:
            return False
        pace.balance = min(pace.balance + (now_s - pace.updated_s) * pace.rate, max(1.0, pace.rate * BURST_S))
        pace.updated_s = now_s
        if pace.balance <= 0.0:
            return False
        pace.balance -= work
        return True
