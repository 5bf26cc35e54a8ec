"""How well a limit was kept, and how well it was used.

level = max(0, level − C · elapsed) + work         a bucket that leaks at the committed rate
above = what does not fit into one capacity        work beyond the limit, and what the limit's burst forgives
within = admitted − above
possible = what a limiter that knew each request's work beforehand would have admitted at best
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadtest.simulation.world import Point, Run

WINDOW_S = 1.0
WARM_UP_S = 10.0
"""What every mechanism has to find out first is not compared."""


class Score(NamedTuple):
    """Work units of one run, of all tenants."""

    possible: float
    within: float
    above: float

    @property
    def used(self) -> float:
        """Share of the possible work that was admitted within the limit."""
        return self.within / self.possible if self.possible else 1.0

    @property
    def excess(self) -> float:
        """Work above the limit, as a share of the possible."""
        return self.above / self.possible if self.possible else 0.0

    @property
    def worth(self) -> float:
        """What a run is compared by: work above the limit counts against work within it."""
        return self.used - self.excess


def score(run: Run, *, committed: float, capacity: float, from_s: float = WARM_UP_S) -> Score:
    """Both measures of a run, from a time on."""
    possible = within = above = 0.0
    for tenant, admissions in run.admissions.items():
        beyond = work_above(admissions, committed=committed, capacity=capacity, from_s=from_s)
        above += beyond
        within += sum(work for at_s, work in admissions if at_s > from_s) - beyond
        possible += work_possible(run.points[tenant], committed=committed, capacity=capacity, from_s=from_s)
    return Score(possible, within, above)


def work_above(
    admissions: Sequence[tuple[float, float]], *, committed: float, capacity: float, from_s: float = 0.0
) -> float:
    """Work that no bucket of this rate and capacity would have let pass."""
    level = above = last_s = 0.0
    for at_s, work in admissions:
        level = max(0.0, level - (at_s - last_s) * committed) + work
        last_s = at_s
        if level > capacity:
            above += level - capacity if at_s > from_s else 0.0
            level = capacity
    return above


def work_possible(points: Sequence[Point], *, committed: float, capacity: float, from_s: float = 0.0) -> float:
    """Work that could have been admitted of what was offered, were it divisible."""
    balance, possible, last_s = capacity, 0.0, 0.0
    for point in points:
        balance += (point.at_s - last_s) * committed
        last_s = point.at_s
        taken = min(balance, point.offered)
        possible += taken if point.at_s > from_s else 0.0
        balance = min(balance - taken, capacity)
    return possible


def work_rates(points: Sequence[Point]) -> list[float]:
    """Admitted work a second, over the last WINDOW_S before each point."""
    count = max(1, round(WINDOW_S / (points[1].at_s - points[0].at_s)))
    return [
        sum(point.admitted for point in points[max(0, i - count + 1) : i + 1]) / WINDOW_S for i in range(len(points))
    ]


def settled_after_s(points: Sequence[Point], *, from_s: float, value: float, within: float) -> float:
    """How long after a moment the cap came to within a share of a value, and stayed there; infinite if never."""
    outside = [point.at_s for point in points if point.at_s > from_s and not abs(point.cap - value) <= within * value]
    if outside and outside[-1] >= points[-1].at_s:
        return float("inf")
    return max(0.0, (outside[-1] if outside else from_s) - from_s)
