"""Workloads to look at: what clients do, second by second, under each mechanism.

Each is written for a limit of COMMITTED units per second and says in a line what it asks of a limiter. A policy lets a
second's worth gather, in either unit, so that no mechanism is better for being let do more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from limiter.model.policy.choices import Mechanism
from loadtest.simulation.flow import Flow, Over, Point, Retries, World, steady
from loadtest.simulation.scores import FlowScore, score
from loadtest.simulation.steered import Steered

COMMITTED = 100.0
"""Work units per second."""

SECONDS = 40.0
CHANGE_S = 20.0
"""When a workload becomes another, if it does."""
WARM_UP_S = 10.0
"""The first seconds, in which every mechanism has to find out what requests cost, are not compared."""
DURATION_S = 0.05


@dataclass(frozen=True, slots=True)
class Workload:
    """A flow, and what it asks of a limiter."""

    asks: str
    flow: Flow


def policy_of(mechanism: Mechanism) -> dict[str, Any]:
    """The policy of all workloads; all but the mechanism is the same."""
    gathers = {} if mechanism is Mechanism.REQUESTS else {"capacity": "1s", "charge": "learned"}
    gathers |= {} if mechanism is Mechanism.WORK else {"burst": "1s"}
    return {"rate": COMMITTED, "mechanism": str(mechanism), **gathers}


def play(workload: Workload, mechanism: Mechanism, *, seed: int = 1) -> list[Point]:
    """One workload under one mechanism, cycle by cycle."""
    return World(workload.flow, Steered(policy_of(mechanism)), seed).run()


def scored(workload: Workload, mechanism: Mechanism, *, seed: int = 1) -> FlowScore:
    """The figures of a workload under a mechanism, once that has found out what requests cost."""
    return score(play(workload, mechanism, seed=seed), COMMITTED, from_s=WARM_UP_S)


def _flow(rate: float | Over, cost: float | Over = 1.0, **more: Any) -> Flow:
    """Requests per second and the work of each, both perhaps over time."""
    demand = rate if callable(rate) else steady(rate)
    return Flow(
        seconds=SECONDS,
        demand=demand,
        cost=cost if callable(cost) else steady(cost),
        durations="exponential",
        **{"duration_s": DURATION_S, **more},
    )


def _changing(before: float, after: float) -> Over:
    return lambda now_s: before if now_s < CHANGE_S else after


def _spike(low: float, high: float) -> Over:
    return lambda now_s: high if CHANGE_S <= now_s < CHANGE_S + 5 else low


def _bursts(rate: float, on_s: float, every_s: float) -> Callable[[float], float]:
    return lambda now_s: rate if now_s % every_s < on_s else 0.0


WORKLOADS = {
    "steady-small": Workload("200 requests/s of 1 unit: 100 of them fit", _flow(200)),
    "steady-large": Workload("20 requests/s of 50 units: 2 of them fit", _flow(20, 50)),
    "steady-long": Workload("30 requests/s of 10 units that take 2 s: 10 of them fit", _flow(30, 10, duration_s=2.0)),
    "under-limit": Workload("60 requests/s of 1 unit: all of them fit", _flow(60)),
    "cost-up": Workload("200 requests/s, of 1 unit and from 20 s on of 50", _flow(200, _changing(1, 50))),
    "cost-down": Workload("200 requests/s, of 50 units and from 20 s on of 1", _flow(200, _changing(50, 1))),
    "bursty": Workload("400 requests/s of 1 unit for a second, then four of silence", _flow(_bursts(400, 1, 5))),
    "pareto": Workload("100 requests/s of 3 units on average, few of them of hundreds", _flow(100, 3, shape="pareto")),
    "retry-storm": Workload(
        "80 requests/s of 1 unit, 400 from 20 to 25 s, and each refused one comes three times more",
        _flow(_spike(80, 400), retries=Retries(most=3)),
    ),
    "paused": Workload(
        "60 requests/s of 1 unit, and 600 while the controller sleeps, from 20 to 25 s",
        _flow(_spike(60, 600), paused=((20.0, 25.0),)),
    ),
    "paused-cost": Workload(
        "200 requests/s, of 1 unit and from 20 s on of 10, while the controller sleeps to 25 s",
        _flow(200, _changing(1, 10), paused=((20.0, 25.0),)),
    ),
    "lost-samples": Workload(
        "costs go from 1 unit to 10, and every second sample gets lost", _flow(200, _changing(1, 10), unsampled=0.5)
    ),
}
