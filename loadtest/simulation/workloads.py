"""What clients do: how many requests a second, of how much work, and what else goes wrong.

Each is written for a limit of COMMITTED units a second and says in a line what it asks of a limiter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

COMMITTED = 100.0
"""Work units a second, of each tenant."""

WORK_MAX = 512.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Requests of one tenant: independent of one another, at a rate that may change, each with its work."""

    tenant: str = "a"
    rate: Callable[[float], float]
    """Requests a second at a time (s)."""
    rate_max: float
    work: Callable[[float, Random], float]
    """Work units of a request at a time (s), and a source of draws."""

    def arrivals(self, until_s: float, draw: Random) -> Iterator[tuple[float, float]]:
        """Time (s) and work of each request."""
        at_s = draw.expovariate(self.rate_max)
        while at_s < until_s:
            # What comes at the highest rate is thinned to the rate of the moment.
            if draw.random() * self.rate_max < self.rate(at_s):
                yield at_s, self.work(at_s, draw)
            at_s += draw.expovariate(self.rate_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Streams, and what goes wrong meanwhile."""

    name: str
    asks: str
    """What it asks of a limiter, in a line."""
    streams: tuple[Stream, ...]
    duration_s: float = 40.0
    change_s: float = 20.0
    """When it becomes another, if it does."""
    retries: int = 0
    """How often a refused request comes again."""
    paused: tuple[float, float] = (0.0, 0.0)
    """From when to when (s) the controller does nothing."""
    lost: float = 0.0
    """Share of the controller's samples that never arrive."""


def _constant(value: float) -> Callable[[float], float]:
    return lambda _: value


def _always(work: float) -> Callable[[float, Random], float]:
    return lambda _at_s, _draw: work


def _changing(before: float, after: float, at: float = 20.0) -> Callable[[float, Random], float]:
    return lambda at_s, _draw: before if at_s < at else after


def _pareto(shape: float, least: float) -> Callable[[float, Random], float]:
    return lambda _at_s, draw: min(least * draw.paretovariate(shape), WORK_MAX)


def _bursts(rate: float, *, on_s: float, every_s: float) -> Callable[[float], float]:
    return lambda at_s: rate if at_s % every_s < on_s else 0.0


def _spike(low: float, high: float, *, from_s: float, to_s: float) -> Callable[[float], float]:
    return lambda at_s: high if from_s <= at_s < to_s else low


def _flood(work: Callable[[float, Random], float], rate: float = 200.0) -> tuple[Stream, ...]:
    return (Stream(rate=_constant(rate), rate_max=rate, work=work),)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="steady-small",
            asks="200 requests/s of 1 unit: 100 of them fit (R8)",
            streams=_flood(_always(1.0)),
        ),
        Workload(
            name="steady-large",
            asks="20 requests/s of 50 units: 2 of them fit (R8)",
            streams=_flood(_always(50.0), 20.0),
        ),
        Workload(
            name="under-limit",
            asks="60 requests/s of 1 unit: all of them fit",
            streams=_flood(_always(1.0), 60.0),
        ),
        Workload(
            name="cost-up",
            asks="200 requests/s, of 1 unit and from 20 s on of 50",
            streams=_flood(_changing(1.0, 50.0)),
        ),
        Workload(
            name="cost-down",
            asks="200 requests/s, of 50 units and from 20 s on of 1",
            streams=_flood(_changing(50.0, 1.0)),
        ),
        Workload(
            name="bursty",
            asks="400 requests/s of 1 unit for a second, then four of silence",
            streams=(Stream(rate=_bursts(400.0, on_s=1.0, every_s=5.0), rate_max=400.0, work=_always(1.0)),),
        ),
        Workload(
            name="pareto",
            asks="100 requests/s of 1 unit and more, few of them of hundreds",
            streams=_flood(_pareto(1.5, 1.0), 100.0),
        ),
        Workload(
            name="two-tenants",
            asks="one tenant within its limit, beside one that floods its own",
            streams=(
                Stream(tenant="a", rate=_constant(80.0), rate_max=80.0, work=_always(1.0)),
                Stream(tenant="b", rate=_constant(150.0), rate_max=150.0, work=_always(3.0)),
            ),
        ),
        Workload(
            name="retry-storm",
            asks="80 requests/s of 1 unit, 400 from 20 to 25 s, and each refused one comes three times more",
            streams=(
                Stream(rate=_spike(80.0, 400.0, from_s=20.0, to_s=25.0), rate_max=400.0, work=_always(1.0)),
            ),
            retries=3,
        ),
        Workload(
            name="paused",
            asks="60 requests/s of 1 unit, and 600 while the controller sleeps, from 20 to 25 s",
            streams=(Stream(rate=_spike(60.0, 600.0, from_s=20.0, to_s=25.0), rate_max=600.0, work=_always(1.0)),),
            paused=(20.0, 25.0),
        ),
        Workload(
            name="paused-cost",
            asks="200 requests/s, of 1 unit and from 20 s on of 10, while the controller sleeps to 25 s",
            streams=_flood(_changing(1.0, 10.0)),
            paused=(20.0, 25.0),
        ),
        Workload(
            name="lost-samples",
            asks="costs go from 1 unit to 10, and every second sample gets lost",
            streams=_flood(_changing(1.0, 10.0)),
            lost=0.5,
        ),
    )
}  # fmt: skip
