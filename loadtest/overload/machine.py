"""The machine during a run on a real backend: a claim that fails on a busy machine is a claim about the machine.

lag           how much later than due the users' process woke up, ten times per second
waiting       share of the time in which some process waited for a core (Linux: /proc/pressure/cpu)
fit           nothing stood still for longer than STILL_MAX_S, and nine of ten lags were below LAG_MAX of the target
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.overload.users import percentile

STILL_MAX_S = 2.0
LAG_MAX = 0.1
PRESSURE = Path("/proc/pressure/cpu")


class Machine(NamedTuple):
    """What the machine did meanwhile."""

    cores: int
    load: float
    """Load average over a minute, at the end."""
    waiting: float
    """Share of the time; below 0 where the system does not tell."""
    stood_still_s: float
    lag_s: float
    """The 90th percentile."""

    def is_fit(self, target_s: float) -> bool:
        """Whether response times that were measured say something of the control."""
        return self.stood_still_s <= STILL_MAX_S and self.lag_s <= LAG_MAX * target_s

    def __str__(self) -> str:
        """Say it in a few words."""
        waiting = "" if self.waiting < 0 else f", some process waited for a core {self.waiting:.0%} of the time"
        return (
            f"{self.cores} cores, load {self.load:.1f}{waiting}, "
            f"lag {1000 * self.lag_s:.0f} ms, longest standstill {self.stood_still_s:.2f} s"
        )


class Watch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._began_s, self._waited_us = time.monotonic(), _waited_us()

    def seen(self, lags_s: Sequence[float]) -> Machine:
        """The machine from the beginning until now."""
        elapsed_us = (time.monotonic() - self._began_s) * 1e6
        now_us = _waited_us()
        waiting = -1.0 if now_us is None or self._waited_us is None else (now_us - self._waited_us) / elapsed_us
        return Machine(
            cores=len(os.sched_getaffinity(0)),
            load=round(os.getloadavg()[0], 1),
            waiting=round(min(1.0, waiting), 3),
            stood_still_s=round(max(lags_s, default=0.0), 3),
            lag_s=round(percentile([(lag_s, 1) for lag_s in lags_s], 90) or 0.0, 4),
        )


def _waited_us() -> int | None:
    try:
        return int(PRESSURE.read_text().split("\n", 1)[0].rpartition("total=")[2])
    except (OSError, ValueError):
        return None
