"""Expectations: a backend that slows down with the excess over what it can do (Q7, Q9, Q10), and silence (Q8).

laws      ideal, damped           the product's two modes
          published …             the same by the published rules
          on-off                  everybody or nobody, by the last second

Ten seconds at half load come first, so that the bucket was seen healthy; then the load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadtest.simulation.backends import Backend, Delay, Fifo, Slowing
from loadtest.simulation.distributions import Draw, exponential, spread
from loadtest.simulation.gates import Guarded
from loadtest.simulation.judge.cases import Case, Figures, Line, Played, Table, mean_of, of, within
from loadtest.simulation.service import Gate, Rates, Traffic, World
from loadtest.simulation.yardsticks import OnOff

CAPACITY = 1000.0
SLOPE_S = 0.0003
"""A backend of 3000 requests per second with a third of the slope (Q7), scaled down."""
EXPECTED_S = 0.2
HEALTHY_S = 10
SECONDS = 80
SETTLED_S = 45
OUTLIERS = 0.001
THRESHOLD = 0.05
MOST = 1.15
"""Of the capacity: who lets in more has not brought the backend back under."""

MIXES: dict[str, tuple[float, float, float, float]] = {
    "four classes": (0.05, 0.25, 0.3, 0.4),
    "critical": (0.0, 1.0, 0.0, 0.0),
    "sheddable": (0.0, 0.0, 0.0, 1.0),
}
SPREADS = (0.01, 0.1, 0.5)
TIMES = (0.8, 2.0, 10.0)
OURS = ("ideal", "damped")

Owed = Literal["load", "left", "overloaded", "show"]


def gate(law: str, expected_s: float, seed: int, *, hasty: float = 0.0) -> Gate:
    """A gate of a law."""
    if law == "on-off":
        return OnOff(expected_s, allowed=THRESHOLD)
    terms: dict[str, Any] = {"expected_latency_ms": expected_s * 1000, "mode": law.removeprefix("published ")}
    if law.startswith("published "):
        terms["rules"] = "published"
    if hasty:
        terms["expected_min_ms"] = expected_s * 1000
    block = {"expectations": terms, "outcomes": ["error"]}
    return Guarded(block, seed=seed, hasty=hasty)


def noise(variation: float) -> Draw:
    """About 1: nearly normal where it is small, with a tail where it is not."""
    if variation < 0.3:
        return lambda chance: max(0.01, chance.gauss(1.0, variation))
    return spread(1.0, variation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One scenario; the backend slows down with the excess unless it says another."""

    traffic: Traffic
    spread: float = 0.1
    expected_s: float = EXPECTED_S
    seconds: int = SECONDS
    from_s: int = SETTLED_S
    to_s: int = SECONDS
    possible: float = CAPACITY
    owes: Owed = "load"
    make: Callable[[int], Backend] | None = None
    hasty: float = 0.0
    capacity: float = CAPACITY

    def backend(self, seed: int) -> Backend:
        """The backend that requests are let in to."""
        if self.make is not None:
            return self.make(seed)
        slope_s = SLOPE_S * CAPACITY / self.capacity
        return Slowing(noise(self.spread), seed, outliers=OUTLIERS, capacity=self.capacity, slope_s=slope_s)


def _load(
    mix: tuple[float, float, float, float], times: float, *, healthy_s: float = HEALTHY_S, capacity: float = CAPACITY
) -> Rates:
    before = [part * capacity * 0.5 for part in mix]
    after = [part * capacity * times for part in mix]
    return lambda now_s: before if now_s < healthy_s else after


def _grid() -> dict[str, Scene]:
    return {
        f"{times:g}×, {mix}, spread {variation:.0%}": Scene(
            traffic=Traffic(rates=_load(parts, times)), spread=variation, owes="left" if times < 1 else "load"
        )
        for times in TIMES
        for mix, parts in MIXES.items()
        for variation in SPREADS
    }


def _scenes() -> dict[str, Scene]:
    critical = MIXES["critical"]
    few: Rates = lambda _: (0.0, 25.0, 0.0, 0.0)  # noqa: E731
    return {
        **_grid(),
        "2×, 3000/s, critical, spread 1%": Scene(
            traffic=Traffic(rates=_load(critical, 2.0, capacity=3000.0)), spread=0.01, capacity=3000.0, possible=3000.0,
            seconds=40, from_s=25, to_s=40,
        ),
        "2×, never seen healthy, spread 10%": Scene(
            traffic=Traffic(rates=_load(critical, 2.0, healthy_s=0.0)), owes="show"
        ),
        "10×, never seen healthy, spread 10%": Scene(
            traffic=Traffic(rates=_load(critical, 10.0, healthy_s=0.0)), owes="show"
        ),
        "2×, controller replaced every 10 s": Scene(
            traffic=Traffic(rates=_load(critical, 2.0), stops=tuple(range(10, 80, 10)))
        ),
        "2×, store emptied at 40 s": Scene(traffic=Traffic(rates=_load(critical, 2.0), emptied=(40.0,)), owes="show"),
        "2×, controller gone from 40 s on": Scene(
            traffic=Traffic(rates=_load(critical, 2.0), paused=lambda now_s: now_s >= 40), from_s=55, owes="show"
        ),
        "0.8×, one in ten claims to expect 1 ms": Scene(
            traffic=Traffic(rates=_load(critical, 0.8)), owes="left", hasty=0.1
        ),
        "0.5×, hangs from 60 to 70 s": Scene(
            traffic=Traffic(rates=few), seconds=120, from_s=62, to_s=70, owes="overloaded", expected_s=1.0,
            possible=25.0, make=lambda seed: Fifo(10, exponential(0.2), seed, pauses=((60.0, 70.0),)),
        ),
        "0.5×, all answers are fast errors from 60 to 90 s": Scene(
            traffic=Traffic(rates=few, fails=lambda now_s: 60 <= now_s < 90), seconds=120, from_s=64, to_s=90,
            owes="overloaded", expected_s=1.0, possible=25.0, make=lambda seed: Fifo(10, exponential(0.2), seed),
        ),
        "0.5/s, 5 % take ten times as long": Scene(
            traffic=Traffic(rates=lambda _: (0.0, 0.5, 0.0, 0.0)), seconds=600, from_s=0, to_s=600, owes="left",
            expected_s=0.5, possible=0.5, make=lambda seed: Delay(spread(0.1, 0.1), seed, outliers=0.05),
        ),
    }  # fmt: skip


SCENES = _scenes()
BRIEF = ("2×, critical, spread 10%",)
PUBLISHED = ("2×, critical, spread 10%", "10×, critical, spread 10%", "0.8×, critical, spread 10%")
"""Scenarios that show what the published rules do, which the product runs where a policy says so."""


class Expectations(Table):
    """Q9, Q10 and their neighbours."""

    title = (
        "Expectations: 1000 requests/s, 200 ms expected, one outlier in 1000; 10 s at 0.5× first; means over the seeds"
    )
    heads = ("admitted of capacity", "missed", "refused", "by class", "wobble", "overloaded")

    def cases(self, seeds: Sequence[int], *, brief: bool) -> list[Case]:
        """Every scenario with the first seed: a run is thousands of requests per second."""
        if brief:
            return [Case("q9", name, law, seeds[0]) for name in BRIEF for law in OURS]
        found = [Case("q9", name, law, seeds[0]) for name in SCENES for law in (*OURS, "on-off")]
        return found + [Case("q9", name, f"published {law}", seeds[0]) for name in PUBLISHED for law in OURS]

    def play(self, case: Case) -> Figures:
        """One of them."""
        scene = SCENES[case.scenario]
        chosen = gate(case.law, scene.expected_s, case.seed, hasty=scene.hasty)
        backend = scene.backend(case.seed)
        seen = World(scene.traffic, chosen, backend, case.seed, scene.seconds, scene.expected_s).run()
        from_s, to_s = scene.from_s, scene.to_s
        figures = {
            "admitted": seen.admitted_rate(from_s, to_s) / scene.possible,
            "missed": seen.missed(from_s, to_s - 5),
            "refused": seen.refused_share(from_s, to_s),
            "wobble": seen.wobble(from_s, to_s),
            "overloaded": sum(seen.overloaded[from_s:to_s]) / (to_s - from_s),
        }
        return figures | {f"refused {number}": seen.refused_share(from_s, to_s, number) for number in range(4)}

    def lines(self, played: Played) -> list[Line]:
        """A row for each scenario and law."""
        return [
            self._line(played, scenario, law)
            for scenario in dict.fromkeys(case.scenario for case in played)
            for law in dict.fromkeys(case.law for case in played if case.scenario == scenario)
        ]

    def _line(self, played: Played, scenario: str, law: str) -> Line:
        shares = [f"{mean_of(played, scenario, law, f'refused {number}'):.0%}" for number in range(4)]
        owed, holds = owes(played, scenario, law)
        return Line(
            scenario,
            law,
            (
                f"{mean_of(played, scenario, law, 'admitted'):.1%}",
                f"{mean_of(played, scenario, law, 'missed'):.1%}",
                f"{mean_of(played, scenario, law, 'refused'):.2%}",
                " ".join(shares) if "four" in scenario else "",
                f"{mean_of(played, scenario, law, 'wobble'):.2f}",
                f"{mean_of(played, scenario, law, 'overloaded'):.0%}",
            ),
            owed,
            holds,
            _better(played, scenario, law),
        )


def owes(played: Played, scenario: str, law: str) -> tuple[str, bool | None]:
    """The figures that a scenario owes, in words, and whether they hold."""
    scene = SCENES[scenario]
    if law not in OURS:
        return "", None
    refused, admitted = (mean_of(played, scenario, law, name) for name in ("refused", "admitted"))
    if scene.owes == "left":
        return "at most 0.1 % refused", refused <= 0.001
    if scene.owes == "overloaded":
        return "overloaded all the time", mean_of(played, scenario, law, "overloaded") > 0.99
    if scene.owes == "show" or (law == "damped" and scene.spread > 0.1):
        return "", None
    least = 0.90 if law == "ideal" else 0.75
    return f"{least:.0%} to {MOST:.0%} served", within(least, admitted, MOST)


def _better(played: Played, scenario: str, law: str) -> str:
    """The yardstick where it serves as much with fewer misses, or more with as many."""
    if law not in OURS or SCENES[scenario].owes != "load" or not of(played, scenario, "on-off", "missed"):
        return ""
    served = mean_of(played, scenario, "on-off", "admitted") - mean_of(played, scenario, law, "admitted")
    missed = mean_of(played, scenario, "on-off", "missed") - mean_of(played, scenario, law, "missed")
    is_better = (served > 0.01 and missed < 0.01) or (served > -0.01 and missed < -0.02)
    return "better: on-off" if is_better else ""
