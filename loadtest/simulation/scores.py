"""How well a limit of work was kept, and how well it was used: figures of a run of `flow`.

share     true work admitted ÷ (C · time)
possible  what a limiter that knew every cost beforehand would have admitted of what was asked, as such a share
above_s   work beyond the limit and its burst (a second, or three requests), in seconds of C
below_s   limit left unused while somebody was refused, in seconds of C
wobble    standard deviation of the cap ÷ its mean
settled_s until the cap stays within a tenth of where it ends
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, isnan, nan
from statistics import fmean, pstdev
from typing import NamedTuple

from loadtest.simulation.flow import Point
from loadtest.simulation.steered import CYCLE_S

NEAR = 0.1
LAST_PART = 5
ROOM = 3.0


class FlowScore(NamedTuple):
    """Figures of a run."""

    share: float
    possible: float
    above_s: float
    below_s: float
    refused: float
    """Share of all that asked."""
    wobble: float
    settled_s: float
    admitted: int
    seconds: float

    @property
    def used(self) -> float:
        """Work within the limit, as a share of what was possible."""
        return (self.share - self.above_s / self.seconds) / self.possible if self.possible else 1.0

    @property
    def excess(self) -> float:
        """Work above the limit, as a share of what was possible."""
        return self.above_s / self.seconds / self.possible if self.possible else 0.0


def score(points: Sequence[Point], committed: float, *, from_s: float = 0.0) -> FlowScore:
    """The figures of a run, from a time on."""
    late = [point for point in points if point.at_s > from_s + 1e-9]
    span_s = len(late) * CYCLE_S
    asked = sum(point.asked for point in late)
    above_s, below_s = deviations(late, committed)
    caps = [point.cap for point in late if not isnan(point.cap)]
    return FlowScore(
        sum(point.work for point in late) / (committed * span_s),
        possible_share(late, committed),
        above_s,
        below_s,
        sum(point.refused for point in late) / asked if asked else 0.0,
        pstdev(caps) / fmean(caps) if caps else nan,
        settled_after_s(caps) if len(caps) == len(late) else nan,
        sum(point.admitted for point in late),
        span_s,
    )


def deviations(points: Sequence[Point], committed: float) -> tuple[float, float]:
    """Seconds of C above the limit and left unused: a bucket that leaks at C, a second or three requests deep."""
    level = above = below = 0.0
    least = -committed * CYCLE_S
    for point in points:
        level += point.work + least
        most = max(committed, ROOM * point.cost)
        if level > most:
            above += level - most
            level = most
        if level < least:
            below += least - level if point.refused else 0.0
            level = least
    return above / committed, below / committed


def possible_share(points: Sequence[Point], committed: float) -> float:
    """The most that a bucket of a second's burst, and with debt, could have admitted of the first attempts."""
    balance = possible = 0.0
    for point in points:
        balance = min(balance + committed * CYCLE_S, committed)
        if balance > 0 and point.first:
            taken = min(point.first, ceil(balance / point.cost)) * point.cost
            possible += taken
            balance -= taken
    return possible / (committed * len(points) * CYCLE_S) if points else 0.0


def settled_after_s(caps: Sequence[float]) -> float:
    """How long until the cap stayed within a tenth of its mean in the last part."""
    if not caps:
        return inf
    last = fmean(caps[-max(1, len(caps) // LAST_PART) :])
    outside = [number for number, cap in enumerate(caps) if abs(cap / last - 1) > NEAR]
    return (outside[-1] + 1) * CYCLE_S if outside else 0.0


def work_rates(points: Sequence[Point], *, window_s: float = 1.0) -> list[float]:
    """Admitted work per second, over a window before each point."""
    count = max(1, round(window_s / CYCLE_S))
    return [sum(point.work for point in points[max(0, i - count + 1) : i + 1]) / window_s for i in range(len(points))]


def near_after_s(points: Sequence[Point], *, from_s: float, value: float, within: float) -> float:
    """How long after a moment the cap came to within a share of a value, and stayed there; infinite if never."""
    outside = [point.at_s for point in points if point.at_s > from_s and not abs(point.cap - value) <= within * value]
    if outside and outside[-1] >= points[-1].at_s:
        return inf
    return max(0.0, (outside[-1] if outside else from_s) - from_s)
