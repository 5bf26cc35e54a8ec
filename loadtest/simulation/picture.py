"""The picture of a run: work, cap and refusals over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

from limiter.model.policy.choices import Mechanism
from loadtest.plot import Band, Chart, Line, Panel, render
from loadtest.simulation.score import work_rates
from loadtest.simulation.workloads import COMMITTED
from loadtest.simulation.world import Point, Run

SHOWN_MAX = 4 * COMMITTED
LOOKS = {
    Mechanism.WORK: ("#8cc5ea", 5.0),
    Mechanism.REQUESTS: ("#e69f00", 2.8),
    Mechanism.AUTO: ("#7a0177", 1.4),
}

Points = Mapping[Mechanism, Sequence[Point]]


def picture(runs: dict[Mechanism, Run], tenant: str) -> str:
    """One workload under several mechanisms, as SVG."""
    workload = next(iter(runs.values())).workload
    points = {mechanism: run.points[tenant] for mechanism, run in runs.items()}
    chart = Chart(
        title=f"{workload.name}: {workload.asks}",
        subtitle=f"Limit {COMMITTED:g} work units a second; tenant {tenant}; virtual time",
        x_unit="time (s)",
        bands=_bands(runs, tenant),
        panels=(_work_panel(points, workload.duration_s), _cap_panel(points), _charge_panel(points)),
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


def _bands(runs: dict[Mechanism, Run], tenant: str) -> list[Band]:
    """When the controller slept, and when `auto` counted requests."""
    workload = next(iter(runs.values())).workload
    bands = []
    if workload.paused[1]:
        bands.append(Band(from_x=workload.paused[0], to_x=workload.paused[1], label="controller asleep"))
    if Mechanism.AUTO in runs and not bands:
        points = runs[Mechanism.AUTO].points[tenant]
        bands += [Band(from_x=start, to_x=end, label="auto counts requests") for start, end in _stretches(points)]
    return bands


def _stretches(points: list[Point]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    start: float | None = None
    for point in points:
        if point.counts_requests and start is None:
            start = point.at_s
        elif not point.counts_requests and start is not None:
            found.append((start, point.at_s))
            start = None
    return found if start is None else [*found, (start, points[-1].at_s)]
