"""Response times: a target for the 90th percentile, on backends and loads of many kinds (S6, S8, S9, S12).

laws      in_flight    the product's default rule
          published    S2 and S3 to the letter          on-off       everybody or nobody
          rules: published    the same as the product runs them
          gradient     limits that follow response times and know no target; a target that they meet is met by chance
          vegas

What a scenario owes is in `scenes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, nan
from statistics import fmean

from loadtest.simulation.gates import Guarded
from loadtest.simulation.judge.cases import Case, Figures, Line, Played, Table, mean_of, of, within
from loadtest.simulation.judge.scenes import SCENES
from loadtest.simulation.service import Gate, World
from loadtest.simulation.yardsticks import Gradient, OnOff, Published, Vegas

LAW = "in_flight"
PRODUCT_PUBLISHED = "rules: published"
LAWS = (LAW, "published", "on-off", "gradient", "vegas")
ALLOWED = 0.1


def gate(law: str, target_s: float, classes: Sequence[int], seed: int, *, partitions: int = 1) -> Gate:
    """A gate of a law."""
    if law == LAW:
        return Guarded({"response_time": {"target_ms": target_s * 1000}}, seed=seed, partitions=partitions)
    if law == PRODUCT_PUBLISHED:
        return Guarded({"response_time": {"target_ms": target_s * 1000, "rules": "published"}}, seed=seed)
    if law == "published":
        return Published(target_s, classes)
    if law == "on-off":
        return OnOff(target_s, allowed=ALLOWED)
    return Gradient() if law == "gradient" else Vegas(seed)


PUBLISHED = ("2×, 50/s, T 1 s", "spike to 1000 users, constant, T 1 s", "two classes alike, 2×")
"""Scenarios that show the published rules as the product runs them, beside the letter of them."""
BRIEF = ("2×, 50/s, T 1 s", "0.8×, 50/s, T 1 s", "two classes alike, 2×", "delay 1.3 of the target")


class ResponseTimes(Table):
    """S9 and its neighbours."""

    title = "Response times: 90th percentile at a target; means over the seeds"
    heads = ("p90 ÷ target", "served of the possible", "refused", "by class", "first peak", "settled after", "wobble")

    def cases(self, seeds: Sequence[int], *, brief: bool) -> list[Case]:
        """The product's law with every seed, yardsticks with the first."""
        if brief:
            return [Case("s9", name, LAW, seed) for name in BRIEF for seed in seeds[:1]]
        found = [
            Case("s9", name, law, seed)
            for name in SCENES
            for law in LAWS
            for seed in (seeds if law == LAW else seeds[:1])
        ]
        return found + [Case("s9", name, PRODUCT_PUBLISHED, seeds[0]) for name in PUBLISHED]

    def play(self, case: Case) -> Figures:
        """One of them."""
        scene = SCENES[case.scenario]
        chosen = gate(case.law, scene.target_s, scene.classes, case.seed, partitions=scene.partitions)
        world = World(scene.traffic, chosen, scene.backend(case.seed), case.seed, scene.seconds, scene.target_s)
        seen, from_s, to_s = world.run(), scene.from_s, scene.to_s or scene.seconds
        figures = {
            "p90": seen.percentile_s(from_s, to_s) / scene.target_s,
            "served": seen.served(from_s, to_s) / scene.possible,
            "refused": seen.refused_share(from_s, to_s),
            "peak": seen.peak_s(0, scene.seconds) / scene.target_s,
            "settled_s": seen.settled_after_s(scene.target_s, 0, to_s),
            "wobble": seen.wobble(from_s, to_s),
        }
        return figures | {f"refused {number}": seen.refused_share(from_s, to_s, number) for number in scene.classes}

    def lines(self, played: Played) -> list[Line]:
        """A row for each scenario and law."""
        return [
            self._line(played, scenario, law)
            for scenario in dict.fromkeys(case.scenario for case in played)
            for law in dict.fromkeys(case.law for case in played if case.scenario == scenario)
        ]

    def _line(self, played: Played, scenario: str, law: str) -> Line:
        scene = SCENES[scenario]
        settled = of(played, scenario, law, "settled_s")
        by_class = [f"{mean_of(played, scenario, law, f'refused {number}'):.1%}" for number in scene.classes]
        owed, holds = owes(played, scenario) if law == LAW else ("", None)
        return Line(
            scenario,
            law,
            (
                _number(mean_of(played, scenario, law, "p90")),
                f"{mean_of(played, scenario, law, 'served'):.1%}",
                f"{mean_of(played, scenario, law, 'refused'):.2%}",
                " ".join(by_class) if len(by_class) > 1 else "",
                _number(mean_of(played, scenario, law, "peak")),
                "never" if inf in settled else f"{fmean(settled):.0f} s",
                _number(mean_of(played, scenario, law, "wobble")),
            ),
            owed,
            holds,
            _better(played, scenario) if law == LAW else "",
        )


def owes(played: Played, scenario: str) -> tuple[str, bool | None]:
    """The figures that a scenario owes, in words, and whether they hold."""
    scene = SCENES[scenario]
    refused = mean_of(played, scenario, LAW, "refused")
    if scene.owes in ("leave", "end"):
        return "at most 0.1 % refused", refused <= 0.001
    if scene.owes == "slow":
        return "at most 2 % refused", refused <= 0.02
    if scene.owes == "show":
        return "", None
    p90, served = mean_of(played, scenario, LAW, "p90"), mean_of(played, scenario, LAW, "served")
    holds = within(0.9, p90, 1.1) and served >= 0.97
    if scene.is_fifo and scene.target_s >= 0.5:
        return "0.9 to 1.1, 97 %, peak 3", holds and mean_of(played, scenario, LAW, "peak") <= 3
    return "0.9 to 1.1, 97 %", holds


def _better(played: Played, scenario: str) -> str:
    """Yardsticks that serve as much with shorter times, or more within the target; where nobody need be refused, those
    that refuse fewer."""
    scene = SCENES[scenario]

    def figure(law: str, name: str) -> float:
        found = of(played, scenario, law, name)
        return fmean(found) if found else nan

    found = []
    for law in LAWS[1:]:
        p90, served, refused = (figure(law, name) - figure(LAW, name) for name in ("p90", "served", "refused"))
        if isnan(served):
            continue
        if scene.owes in ("leave", "slow", "end"):
            is_better = refused < -0.0005
        else:
            is_shorter = served > -0.005 and p90 < -0.05
            is_better = is_shorter or (served > 0.01 and figure(law, "p90") <= max(1.1, figure(LAW, "p90")))
        if is_better:
            found.append(law)
    return f"better: {', '.join(found)}" if found else ""


def _number(value: float) -> str:
    return "–" if isnan(value) else f"{value:.2f}"
