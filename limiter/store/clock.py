"""The store's clock: its `TIME` command, and an estimate between replies."""

from __future__ import annotations

import time

GUESS_MIN_US = 1_577_836_800_000_000
"""The year 2020. A node's clock that shows an earlier time is certainly wrong, and calendar code has no such dates."""


def time_us(reply: tuple[bytes, bytes]) -> int:
    """The store's time from its answer to `TIME`: seconds, and microseconds beyond."""
    seconds, microseconds = reply
    return int(seconds) * 1_000_000 + int(microseconds)


class StoreClock:
    """An estimate of the store's time from the last reply, carried on by this node's monotonic clock (F-T4).

    The node's own wall clock plays no part, so a node whose clock is wrong behaves like any other.
    """

    __slots__ = ("_observed_us", "_offset_us")

    def __init__(self) -> None:
        self._offset_us: int | None = None
        self._observed_us = 0

    def observe(self, now_us: int) -> None:
        """Take the store's time from a reply that has just arrived."""
        self._observed_us = observed_us = time.monotonic_ns() // 1000
        self._offset_us = now_us - observed_us

    @property
    def observed_s(self) -> float:
        """When the last reply arrived, by this node's monotonic clock; 0 before the first."""
        return self._observed_us / 1e6

    @property
    def is_set(self) -> bool:
        """True once a reply has arrived."""
        return self._offset_us is not None

    def guess_us(self) -> int:
        """The store's time, or this node's own before the first reply: for decisions without a store."""
        return self.now_us() or max(time.time_ns() // 1000, GUESS_MIN_US)

    def now_us(self) -> int:
        """The store's time, or 0 before the first reply."""
        return 0 if self._offset_us is None else time.monotonic_ns() // 1000 + self._offset_us
