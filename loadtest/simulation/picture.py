"""The picture of a run: work, cap and refusals over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

from limiter.model.policy.choices import Mechanism
from loadtest.plot import Band, Chart, Line, Panel, render
from loadtest.simulation.flow import Point
from loadtest.simulation.scores import work_rates
from loadtest.simulation.workloads import COMMITTED, SECONDS, Workload

SHOWN_MAX = 4 * COMMITTED
LOOKS = {
    Mechanism.WORK: ("#8cc5ea", 5.0),
    Mechanism.REQUESTS: ("#e69f00", 2.8),
    Mechanism.AUTO: ("#7a0177", 1.4),
}

Points = Mapping[Mechanism, Sequence[Point]]


def picture(name: str, workload: Workload, points: Points) -> str:
    """One workload under several mechanisms, as SVG."""
    chart = Chart(
        title=f"{name}: {workload.asks}",
        subtitle=f"Limit {COMMITTED:g} work units per second; virtual time",
        x_unit="time (s)",
        bands=_bands(workload, points),
        panels=(_work_panel(points, SECONDS), _cap_panel(points), _charge_panel(points)),
    )
    return render(chart)


def _work_panel(points: Points, duration_s: float) -> Panel:
    limit = [(0.0, COMMITTED), (duration_s, COMMITTED)]
    return Panel(
        title=f"Admitted work, over the last second, shown up to {SHOWN_MAX:g}",
        unit="units/s",
        y_max=SHOWN_MAX,
        lines=(
            *(_line(mechanism, of, work_rates(of)) for mechanism, of in points.items()),
            Line(label="the limit", points=limit, colour="#222222", is_dashed=True),
        ),
    )


def _cap_panel(points: Points) -> Panel:
    steered = {mechanism: of for mechanism, of in points.items() if mechanism is not Mechanism.WORK}
    return Panel(
        title="Cap, where requests are counted",
        unit="requests/s",
        lines=[_line(mechanism, of, [point.cap for point in of], is_stepped=True) for mechanism, of in steered.items()],
    )


def _charge_panel(points: Points) -> Panel:
    charged = {mechanism: of for mechanism, of in points.items() if mechanism is not Mechanism.REQUESTS}
    return Panel(
        title="What a request is charged before its work is known, where work is counted",
        unit="units",
        lines=[
            _line(mechanism, of, [nan if point.counts_requests else point.charge for point in of], is_stepped=True)
            for mechanism, of in charged.items()
        ],
    )


def _line(mechanism: Mechanism, points: Sequence[Point], values: Sequence[float], *, is_stepped: bool = False) -> Line:
    pairs = [(point.at_s, value) for point, value in zip(points, values, strict=True)]
    colour, width = LOOKS[mechanism]
    return Line(label=str(mechanism), points=pairs, colour=colour, width=width, is_stepped=is_stepped)


def _bands(workload: Workload, points: Points) -> list[Band]:
    """The times when the controller slept, or else those when `auto` counted requests."""
    bands = [Band(from_x=from_s, to_x=to_s, label="controller asleep") for from_s, to_s in workload.flow.paused]
    if not bands and Mechanism.AUTO in points:
        stretches = _stretches(points[Mechanism.AUTO])
        bands = [Band(from_x=from_s, to_x=to_s, label="auto counts requests") for from_s, to_s in stretches]
    return bands


def _stretches(points: Sequence[Point]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    start: float | None = None
    for point in points:
        if point.counts_requests and start is None:
            start = point.at_s
        elif not point.counts_requests and start is not None:
            found.append((start, point.at_s))
            start = None
    return found if start is None else [*found, (start, points[-1].at_s)]
