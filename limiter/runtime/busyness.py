"""How busy this process is (G7): the share of one processor that it used of late.

A node answers on one event loop, which uses one processor at most: at 1.0 it cannot do more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_S = 1.0
"""The share is measured over intervals of at least this length."""


class Busyness:
    """Measures when it is asked; between two questions nothing runs."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._begun_s, self._begun_cpu_s = clock(), cpu_clock()
        self._share = 0.0

    def share(self) -> float:
        """Return the share of a processor in the last whole interval, or so far in the first."""
        elapsed_s = self._clock() - self._begun_s
        if elapsed_s <= 0:
            return self._share
        share = min(1.0, (self._cpu_clock() - self._begun_cpu_s) / elapsed_s)
        if elapsed_s >= INTERVAL_S:
            self._begun_s, self._begun_cpu_s, self._share = self._clock(), self._cpu_clock(), share
        return self._share or share
