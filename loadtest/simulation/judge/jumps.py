"""Costs that change at once (R8, R12)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from loadtest.simulation.flow import Flow, World, steady
from loadtest.simulation.judge.cases import Case, Figures, Line, Played, Table, median_of
from loadtest.simulation.judge.grid import DEMAND
from loadtest.simulation.judge.limiters import LAWS, limiter
from loadtest.simulation.scores import score

JUMP_S = 40.0
"""Before the jump, at least."""
AFTER_S = 60.0
JUMPS: dict[str, tuple[float, float]] = {
    "×20 up": (5.0, 20.0),
    "×20 down": (100.0, 0.05),
    "×2 up": (10.0, 2.0),
    "to a half": (10.0, 0.5),
}
"""Cost before, and by how much it changes; C = 1000, so that there are 10 requests per second and more."""
JUMP_DURATIONS_S = (0.01, 0.1, 1.0, 10.0)


class Jumps(Table):
    """Costs that change at once."""

    title = "Caps: costs that jump, C = 1000, uniform costs, demand 3× the limit; medians over the seeds"
    heads = ("above, s of C", "unused, s of C", "settled after")

    def cases(self, seeds: Sequence[int], *, brief: bool) -> list[Case]:
        """Every jump at every duration."""
        rows = [f"{jump}, {duration_s:g} s" for jump in JUMPS for duration_s in JUMP_DURATIONS_S]
        rows += [f"controller gone 5 s, ×20 up, {duration_s:g} s" for duration_s in (0.1, 1.0)]
        if brief:
            return [Case("jumps", row, "requests", seed) for row in rows[1:7:5] for seed in seeds[:1]]
        return [Case("jumps", row, law, seed) for row in rows for law in LAWS[:-1] for seed in seeds]

    def play(self, case: Case) -> Figures:
        """One of them."""
        *paused, jump, duration = case.scenario.split(", ")
        (before, factor), duration_s = JUMPS[jump], float(duration.removesuffix(" s"))
        at_s = max(JUMP_S, 20 * duration_s)
        flow = Flow(
            seconds=at_s + max(AFTER_S, 20 * duration_s),
            # Demand stays three times what fits after the jump, and before it too.
            demand=steady(DEMAND * 1000.0 / min(before, before * factor)),
            cost=lambda now_s: before if now_s < at_s else before * factor,
            shape="uniform",
            duration_s=duration_s,
            paused=((at_s, at_s + 5.0),) if paused else (),
        )
        points = World(flow, limiter(case.law, rate=1000.0, cost=before), case.seed).run()
        return score(points, 1000.0, from_s=at_s)._asdict()

    def lines(self, played: Played) -> list[Line]:
        """A row for each jump, duration and law."""
        return [
            self._line(played, scenario, law)
            for scenario in dict.fromkeys(case.scenario for case in played)
            for law in dict.fromkeys(case.law for case in played if case.scenario == scenario)
        ]

    def _line(self, played: Played, scenario: str, law: str) -> Line:
        settled_s = median_of(played, scenario, law, "settled_s")
        is_owed = law == "requests" and "×20" in scenario and "gone" not in scenario and "10 s" not in scenario
        return Line(
            scenario,
            law,
            (
                f"{median_of(played, scenario, law, 'above_s'):.1f}",
                f"{median_of(played, scenario, law, 'below_s'):.1f}",
                "–" if isnan(settled_s) else f"{settled_s:.1f} s",
            ),
            "settled within 10 s" if is_owed else "",
            settled_s <= 10 if is_owed else None,
        )
