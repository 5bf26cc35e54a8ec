"""R12's grid: what share of the limit is admitted, whatever requests cost and however long they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan
from statistics import median

from loadtest.simulation.flow import Flow, World, steady
from loadtest.simulation.judge.cases import Case, Figures, Line, Played, Table, within
from loadtest.simulation.judge.limiters import LAWS, OURS, limiter, share_text
from loadtest.simulation.scores import score

DURATIONS_S = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
COSTS = (0.05, 1.0, 2.0, 5.0, 10.0, 50.0, 500.0)
RATES = (100.0, 1000.0)
DEMAND = 3.0
ADMISSIONS = {"constant": 200, "uniform": 4000, "pareto": 3000}
"""Over how many admissions a share is taken: chance alone moves it by the coefficient of variation ÷ √n. With
1000 admissions of uniform costs that is as much as the limit owes."""
BOUNDS = {"constant": (0.95, 1.02), "uniform": (0.95, 1.02), "pareto": (0.90, 1.05)}
FAR = {"constant": (0.95, 1.02), "uniform": (0.95, 1.02), "pareto": (0.85, 1.12)}
"""Bounds that hold for every cell, chance or not."""
BY_CHANCE = {"constant": 0, "uniform": 0, "pareto": 2}
"""Cells of 98 that may miss the bounds."""


class Grid(Table):
    """R12: durations × costs × C under three shapes of costs, demand at three times the limit."""

    title = "Caps: R12's grid, 98 cells of durations × costs × C, demand 3× the limit"
    heads = ("worst cells", "median", "within", "wobble, median (most)", "worst at (C, cost, duration)")

    def cases(self, seeds: Sequence[int], *, brief: bool) -> list[Case]:
        """Every cell for ours, an eighth of them for the yardsticks; in brief a few for each shape."""
        found = []
        for seed in seeds[:1]:
            for shape in ADMISSIONS:
                for number, cell in enumerate(_cells()):
                    laws: tuple[str, ...] = LAWS if number % 8 == 3 else OURS
                    if brief:
                        laws = ("requests",) if number % 11 == 3 and shape != "pareto" else ()
                    found += [Case("r12", f"{shape} {cell}", law, seed) for law in laws]
        return found

    def play(self, case: Case) -> Figures:
        """One cell."""
        shape, rate, cost, duration_s = _cell(case.scenario)
        per_s = rate / cost
        warm_s = max(20 * duration_s, 10.0)
        seconds = warm_s + max(ADMISSIONS[shape] / per_s, 10 * duration_s, 20.0)
        flow = Flow(
            seconds=seconds,
            demand=steady(DEMAND * per_s),
            cost=steady(cost),
            shape=shape,
            duration_s=duration_s,
        )
        points = World(flow, limiter(case.law, rate=rate, cost=cost), case.seed).run()
        return score(points, rate, from_s=warm_s)._asdict()

    def lines(self, played: Played) -> list[Line]:
        """A row for each shape and law."""
        return [line for shape in ADMISSIONS for law in LAWS if (line := self._line(played, shape, law)) is not None]

    def _line(self, played: Played, shape: str, law: str) -> Line | None:
        shares = {
            case.scenario: figures["share"]
            for case, figures in played.items()
            if case.law == law and case.scenario.startswith(shape)
        }
        if not shares:
            return None
        low, high = BOUNDS[shape]
        missed = {scenario: share for scenario, share in shares.items() if not within(low, share, high)}
        far = [share for share in shares.values() if not within(FAR[shape][0], share, FAR[shape][1])]
        wobbles = [figures["wobble"] for case, figures in played.items() if case.scenario in shares and case.law == law]
        wobbles = [wobble for wobble in wobbles if not isnan(wobble)]
        worst = sorted(missed, key=lambda scenario: -abs(shares[scenario] - 1))[:3]
        allowed = BY_CHANCE[shape] * len(shares) / 98
        owed = f"{low:.0%} to {high:.0%}" + (", 2 of 98 may miss" if BY_CHANCE[shape] else "")
        return Line(
            f"{shape} costs",
            law,
            (
                f"{min(shares.values()):.1%} to {max(shares.values()):.1%}",
                share_text(median(shares.values())),
                f"{len(shares) - len(missed)} of {len(shares)}",
                f"{median(wobbles):.2f} ({max(wobbles):.2f})" if wobbles else "–",
                "; ".join(f"{scenario.split(' ', 1)[1]}: {shares[scenario]:.0%}" for scenario in worst),
            ),
            owed if law in OURS else "",
            (len(missed) <= allowed and not far) if law in OURS else None,
        )


def _cells() -> Iterator[str]:
    for rate in RATES:
        for cost in COSTS:
            for duration_s in DURATIONS_S:
                yield f"{rate:g}, {cost:g}, {duration_s:g} s"


def _cell(scenario: str) -> tuple[str, float, float, float]:
    shape, cell = scenario.split(" ", 1)
    rate, cost, duration = cell.removesuffix(" s").split(", ")
    return shape, float(rate), float(cost), float(duration)
