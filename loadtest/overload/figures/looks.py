"""Lines, bands and rows that the figures have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

from limiter.model.policy.criticality import Criticality
from loadtest.overload.study import Results, Study, over_time, p90_s
from loadtest.overload.user_calls import Call
from loadtest.overload.users import Moment, by_second
from loadtest.plot import COLOURS, Band, Line, Panel

OURS, WITHOUT, PUBLISHED, FIXED = COLOURS
TARGET = "#222222"
HIGH, LOW = Criticality.CRITICAL, Criticality.SHEDDABLE
NINETIETH = "p90: how long nine of ten answers took at most"


def timed(target_s: float, **more: object) -> dict[str, Any]:
    """An overload block that keeps response times at a target."""
    return {"response_time": {"target_ms": 1000 * target_s, **more}}


def published(target_s: float, **more: object) -> dict[str, Any]:
    """The same by the published rules, with the published parameters."""
    return timed(target_s, rules="published", **more)


def target_line(study: Study) -> Line:
    """The target as a dashed line."""
    points = [(0.0, study.target_s), (study.seconds, study.target_s)]
    return Line(label="target", points=points, colour=TARGET, is_dashed=True, width=1.2)


def users_bands(study: Study) -> list[Band]:
    """The busy phases of the first crowd, named by how many users there are."""
    crowd = study.crowds[0]
    ends = [*crowd.starts_s(), crowd.seconds]
    stretches = zip(crowd.phases, pairwise(ends), strict=True)
    return [
        Band(from_x=start, to_x=end, label=f"{phase.users} users")
        for phase, (start, end) in stretches
        if phase.users > crowd.phases[0].users
    ]


def refused_percent(one: Moment) -> float:
    """The share that was refused, for a picture."""
    return 100 * one.refused_share


def served(one: Moment) -> float:
    """Requests served in a second."""
    return float(one.served)


def per_second(one: Moment, seconds: float) -> str:
    """Requests served per second, for a table."""
    return f"{one.served / seconds:.0f}" if one.served >= 10 * seconds else f"{one.served / seconds:.1f}"


def lines_of(
    results: Results,
    colours: Sequence[str],
    value: Callable[[Moment], float | None],
    choose: Callable[[Call], bool] = lambda _: True,
) -> list[Line]:
    """A line for each variant."""
    return [
        Line(label=label, points=over_time(filter(choose, run.calls), value), colour=colour)
        for (label, run), colour in zip(results.items(), colours, strict=True)
    ]


def p90_panel(study: Study, results: Results, colours: Sequence[str], *, y_max: float = float("inf")) -> Panel:
    """Response times of each variant over time, and the target."""
    lines = [*lines_of(results, colours, p90_s), target_line(study)]
    is_cut = any(value > y_max for line in lines for _, value in line.points)
    shown = f", shown up to {y_max:g} s" if is_cut else ""
    return Panel(title=NINETIETH + shown, unit="s", lines=lines, y_max=y_max)


def wobble(calls: Iterable[Call], from_s: float, to_s: float) -> float:
    """Standard deviation ÷ mean of the 90th percentiles of single seconds."""
    found = [one.p90_ms for one in by_second(calls) if from_s <= one.second < to_s and one.p90_ms is not None]
    return pstdev(found) / fmean(found) if found else 0.0
