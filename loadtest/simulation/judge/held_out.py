"""Scenarios beside the grid that no law was tuned on (R12–R16): demand, costs and callers that misbehave, a fleet in
trouble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan, sin, tau
from typing import Any

from loadtest.simulation.flow import Flow, Retries, Users, World, steady
from loadtest.simulation.judge.cases import Case, Figures, Line, Played, Table, mean_of, of, within
from loadtest.simulation.judge.limiters import LAWS, OURS, limiter, share_text
from loadtest.simulation.scores import FlowScore, score
from loadtest.simulation.steered import Steered


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOut:
    """A scenario beside the grid: C = 300 and cost 3 unless it says otherwise."""

    flow: Flow
    rate: float = 300.0
    warm_s: float = 20.0
    owed: tuple[float, float] | None = None
    """Bounds of the share of C, for the product's laws."""
    auto_owed: tuple[float, float] | None = None
    """The same for `auto` alone, where a cap cannot do it."""
    of_possible: bool = False
    """True if the bounds are of the possible work, not of C: demand may be below the limit."""
    policy: tuple[tuple[str, Any], ...] = ()
    cost: float = 3.0
    partitions: int = 1


FULL = (0.95, 1.02)
LIMIT = (0.0, 1.05)


def _held(seconds: float = 80.0, demand: float = 3.0, cost: float = 3.0, rate: float = 300.0, **more: Any) -> Flow:
    flow = Flow(seconds=seconds, demand=steady(demand * rate / cost), cost=steady(cost), shape="uniform")
    return replace(flow, **more)


def _alternating(period_s: float, factor: float) -> Callable[[float], float]:
    return lambda now_s: 3.0 if now_s % (2 * period_s) < period_s else 3.0 * factor


def _drifting(now_s: float) -> float:
    """Costs ×4 up and down in 60 s."""
    part = now_s % 60 / 30
    return 3.0 * float(4.0 ** (part if part < 1 else 2 - part))


HELD_OUT: dict[str, HoldOut] = {
    "nine small, one large": HoldOut(flow=_held(shape="bimodal", duration_s=1.0, seconds=120), owed=FULL),
    "costs ×5 in bursts of 3 s, 1 s": HoldOut(
        flow=_held(cost=3.0, demand=6.0, duration_s=1.0, seconds=140), auto_owed=(0.90, 1.05)
    ),
    "costs ×5 in bursts of 3 s, 10 s": HoldOut(
        flow=_held(cost=3.0, demand=6.0, duration_s=10.0, seconds=260), warm_s=80, auto_owed=(0.90, 1.05)
    ),
    "costs ×5 in bursts of 30 s, 10 s": HoldOut(
        flow=_held(cost=3.0, demand=6.0, duration_s=10.0, seconds=320), warm_s=80, auto_owed=(0.90, 1.05)
    ),
    "costs drift ×4 in 60 s, 1 s": HoldOut(flow=_held(demand=8.0, duration_s=1.0, seconds=200), owed=(0.90, 1.08)),
    "work goes with duration, 1 s": HoldOut(
        flow=_held(shape="pareto", duration_s=1.0, durations="proportional", seconds=160), owed=(0.90, 1.05)
    ),
    "demand in waves, 1 s": HoldOut(flow=_held(duration_s=1.0, seconds=200), owed=(0.95, 1.02), of_possible=True),
    "demand 0.9, 1 s": HoldOut(
        flow=_held(demand=0.9, duration_s=1.0, seconds=120), owed=(0.97, 1.02), of_possible=True
    ),
    "demand 1.2, 1 s": HoldOut(flow=_held(demand=1.2, duration_s=1.0, seconds=120), owed=FULL),
    "demand 50, 1 s": HoldOut(flow=_held(demand=50.0, duration_s=1.0), owed=FULL),
    "closed loop, 2 s": HoldOut(
        flow=_held(users=Users(count=500, retry_s=1.0), duration_s=2.0, seconds=120), owed=FULL
    ),
    "exponential durations, 2 s": HoldOut(
        flow=_held(duration_s=2.0, durations="exponential", seconds=120), warm_s=40, owed=FULL
    ),
    "retries ×3, 1 s": HoldOut(flow=_held(duration_s=1.0, retries=Retries(most=3)), owed=FULL),
    "retries ×3 within a budget of 10 %": HoldOut(
        flow=_held(duration_s=1.0, retries=Retries(most=3, budget=0.1)), owed=FULL
    ),
    "half of the callers crash, 1 s": HoldOut(flow=_held(duration_s=1.0, lost=0.5), owed=FULL),
    "nobody settles for 60 s, 1 s": HoldOut(
        flow=_held(duration_s=1.0, seconds=100, hangs=((20.0, 80.0),)), owed=FULL
    ),
    "settles told every 2 s": HoldOut(flow=_held(duration_s=0.1, told_s=2.0), owed=FULL),
    "progress every 1 s, 10 s": HoldOut(
        flow=_held(duration_s=10.0, reports_s=1.0, seconds=320, cost=30.0), warm_s=200, owed=FULL, cost=30.0,
    ),
    "reads weigh 1, writes 3, 1 s": HoldOut(
        flow=_held(duration_s=1.0, seconds=160, kinds=((1.0, 1.0), (3.0, 1.0)), cost=1.5, rate=300.0), owed=FULL,
        policy=(("weights", {"operation": {"read": 1.0, "write": 3.0}}),), cost=3.0,
    ),
    "four partitions, demand 8:4:2:1, 1 s": HoldOut(
        flow=_held(duration_s=1.0, seconds=160, partitions=lambda _: (8 / 15, 4 / 15, 2 / 15, 1 / 15)),
        warm_s=60, owed=FULL, partitions=4,
    ),
    "controller replaced every 10 s": HoldOut(
        flow=_held(duration_s=1.0, seconds=100, stops=tuple(range(10, 100, 10))), owed=FULL
    ),
    "controller crashes every 10 s": HoldOut(
        flow=_held(duration_s=1.0, seconds=100, crashes=tuple(range(10, 100, 10))), owed=FULL
    ),
    "every second cycle lost": HoldOut(flow=_held(duration_s=1.0, unsampled=0.5), owed=FULL),
    "store away 5 s in 20": HoldOut(
        flow=_held(duration_s=1.0, seconds=100, store_lost=((30, 35), (50, 55), (70, 75))), owed=(0.6, 1.02)
    ),
    "store emptied at 40 s": HoldOut(flow=_held(duration_s=1.0, seconds=120, emptied=(40.0,)), owed=(0.90, 1.08)),
    "1 request in 10 s": HoldOut(
        flow=_held(rate=10.0, cost=100.0, duration_s=1.0, seconds=4000), rate=10.0, cost=100.0, warm_s=400, owed=FULL
    ),
    "5000 units a request, C = 100": HoldOut(
        flow=_held(rate=100.0, cost=5000.0, duration_s=0.1, shape="constant", seconds=6000), rate=100.0, cost=5000.0,
        warm_s=1000, owed=(0.90, 1.05),
    ),
    "burst 10 %, 10 rps, demand 1.2": HoldOut(
        flow=_held(rate=100.0, cost=10.0, demand=1.2, duration_s=0.1, seconds=160), rate=100.0, cost=10.0
    ),
    "burst 1 s, 10 rps, demand 1.2": HoldOut(
        flow=_held(rate=100.0, cost=10.0, demand=1.2, duration_s=0.1, seconds=160), rate=100.0, cost=10.0,
        policy=(("burst", "1s"),), owed=(0.95, 1.05),
    ),
    "100 000 per second, Pareto": HoldOut(
        flow=_held(rate=100_000.0, cost=1.0, shape="pareto", duration_s=0.1, seconds=40), rate=100_000.0, cost=1.0,
        owed=FULL,
    ),
    "cold: 500 units, 10 s, F unknown": HoldOut(
        flow=_held(rate=100.0, cost=500.0, demand=300.0, duration_s=10.0, seconds=60, shape="constant"), rate=100.0,
        cost=500.0, warm_s=0.0,
    ),
    "cold, but the policy knows: 500 units, 10 s": HoldOut(
        flow=_held(
            rate=100.0, cost=500.0, demand=300.0, duration_s=10.0, seconds=260, shape="constant", new_keys=(200.0,)
        ),
        rate=100.0, cost=500.0, warm_s=200.0,
    ),
    "cold: 500 units, 10 s, F declared": HoldOut(
        flow=_held(rate=100.0, cost=500.0, demand=300.0, duration_s=10.0, seconds=60, shape="constant"), rate=100.0,
        cost=500.0, warm_s=0.0, policy=(("max_work", 500.0), ("steering", {"initial": "C/F"})),
    ),
}  # fmt: skip


def _over_time(name: str, held: HoldOut) -> HoldOut:
    """Scenarios whose cost or demand changes all the time."""
    flow = held.flow
    if name.startswith("costs ×5 in bursts of 30"):
        flow = replace(flow, cost=_alternating(30.0, 5.0))
    elif name.startswith("costs ×5"):
        flow = replace(flow, cost=_alternating(3.0, 5.0))
    elif name.startswith("costs drift"):
        flow = replace(flow, cost=_drifting)
    elif name.startswith("demand in waves"):
        flow = replace(flow, demand=lambda now_s: 100.0 * (2.1 + 1.9 * sin(tau * now_s / 40)))
    return replace(held, flow=flow)


HELD_OUT = {name: _over_time(name, held) for name, held in HELD_OUT.items()}


class HeldOut(Table):
    """Scenarios that no law was tuned on."""

    title = "Caps: hold-out scenarios, C = 300 and uniform costs of 3 unless said; means over the seeds"
    heads = ("admitted of C", "possible", "above, s of C", "unused, s of C", "refused", "wobble")

    def cases(self, seeds: Sequence[int], *, brief: bool) -> list[Case]:
        """Every scenario under every law that can play it."""
        if brief:
            names = ("half of the callers crash, 1 s", "controller replaced every 10 s", "reads weigh 1, writes 3, 1 s")
            return [Case("held-out", name, "requests", seeds[0]) for name in names]
        return [
            Case("held-out", name, law, seed)
            for name, held in HELD_OUT.items()
            for law in LAWS
            if law != "static" or held.partitions == 1
            for seed in (seeds if law in OURS else seeds[:1])
        ]

    def play(self, case: Case) -> Figures:
        """One of them."""
        held = HELD_OUT[case.scenario]
        policy = dict(held.policy) if case.law != "static" else {}
        if case.law == "work":
            policy = {name: value for name, value in policy.items() if name not in ("burst", "steering")}
        limited = limiter(case.law, rate=held.rate, cost=held.cost, partitions=held.partitions, **policy)
        points = World(held.flow, limited, case.seed).run()
        if isinstance(limited, Steered):
            limited.close()
        return score(points, held.rate, from_s=held.warm_s)._asdict()

    def lines(self, played: Played) -> list[Line]:
        """A row for each scenario and law."""
        found = []
        for scenario in dict.fromkeys(case.scenario for case in played):
            laws = list(dict.fromkeys(case.law for case in played if case.scenario == scenario))
            found += [self._line(played, scenario, law, laws) for law in laws]
        return found

    def _line(self, played: Played, scenario: str, law: str, laws: list[str]) -> Line:
        held = HELD_OUT[scenario]
        figures = FlowScore._make(mean_of(played, scenario, law, name) for name in FlowScore._fields)
        owed = held.auto_owed if law == "auto" and held.auto_owed else held.owed
        value = figures.share / figures.possible if held.of_possible else figures.share
        is_owed = law in OURS and owed is not None
        return Line(
            scenario,
            law,
            (
                share_text(figures.share),
                share_text(figures.possible),
                f"{figures.above_s:.1f}",
                f"{figures.below_s:.1f}",
                share_text(figures.refused),
                "–" if isnan(figures.wobble) else f"{figures.wobble:.2f}",
            ),
            f"{owed[0]:.0%} to {owed[1]:.0%}{' of the possible' if held.of_possible else ''}"
            if is_owed and owed
            else "",
            within(owed[0], value, owed[1]) if is_owed and owed else None,
            self._better(played, scenario, law, laws) if law in OURS else "",
        )

    def _better(self, played: Played, scenario: str, law: str, laws: list[str]) -> str:
        """Yardsticks nearer to what was possible without going beyond the limit further."""
        mine = _miss(played, scenario, law)
        others = [other for other in laws if other != law and _miss(played, scenario, other) < mine - 0.02]
        return f"better: {', '.join(others)}" if others else ""


def _miss(played: Played, scenario: str, law: str) -> float:
    """How far from the limit, or from what was possible below it."""
    shares, possible = of(played, scenario, law, "share"), of(played, scenario, law, "possible")
    return sum(abs(share - min(1.0, most)) for share, most in zip(shares, possible, strict=True)) / len(shares)
