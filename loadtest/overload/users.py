"""The load of an experiment, and its result second by second.

closed loop   so many users, each asks, waits for the answer, thinks, asks again: a spike is 3 users, then 1000 (S6)
open loop     requests arrive at a rate, whatever becomes of the others
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from loadtest.overload.calls import Ask, Call, call
from loadtest.overload.http import Http

WATCH_S = 0.1


@dataclass(frozen=True, slots=True)
class Phase:
    """For some time, so many users (closed loop) or requests a second (open loop)."""

    seconds: float
    users: int = 0
    rate: float = 0.0


@dataclass(slots=True)
class Experiment:
    """Who asks what, of whom. The same seed asks the same."""

    backend: Http
    headgate: Http | None
    choose: Callable[[Random], Ask]
    think_s: float = 1.0
    """The mean of a user's pause, which is exponential; after a refusal as well."""
    seed: int = 1
    calls: list[Call] = field(default_factory=list)
    stood_still_s: float = 0.0
    """The longest time in which nothing happened here at all: what came of that says nothing."""
    _began_s: float = 0.0

    async def run(self, phases: Iterable[Phase]) -> list[Call]:
        """Every call that was answered before the end."""
        self._began_s = time.perf_counter()
        users: list[asyncio.Task[None]] = []
        watch = asyncio.create_task(self._watch())
        try:
            for phase in phases:
                self._employ(users, phase.users)
                await self._pass(phase)
        finally:
            await _dismiss([*users, watch])
        return self.calls

    async def _watch(self) -> None:
        """Notice a machine that stands still."""
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = time.perf_counter()
            self.stood_still_s = max(self.stood_still_s, now_s - last_s - WATCH_S)
            last_s = now_s

    def _employ(self, users: list[asyncio.Task[None]], number: int) -> None:
        """More users, or fewer; who leaves does so at once."""
        while len(users) < number:
            users.append(asyncio.create_task(self._user(Random(f"{self.seed}/{len(users)}"))))  # noqa: S311
        while len(users) > number:
            users.pop().cancel()

    async def _user(self, draw: Random) -> None:
        while True:
            await asyncio.sleep(draw.expovariate(1 / self.think_s))
            await self._ask(self.choose(draw))

    async def _pass(self, phase: Phase) -> None:
        """Let the phase go by; in an open loop requests arrive meanwhile, at times that no delay of ours moves."""
        arrives_s = time.perf_counter()
        ends_s = arrives_s + phase.seconds
        draw = Random(f"{self.seed}/arrivals")  # noqa: S311
        arrivals: set[asyncio.Task[None]] = set()
        while phase.rate and (arrives_s := arrives_s + draw.expovariate(phase.rate)) < ends_s:
            await asyncio.sleep(arrives_s - time.perf_counter())
            arrival = asyncio.create_task(self._ask(self.choose(draw)))
            arrivals.add(arrival)
            arrival.add_done_callback(arrivals.discard)
        await asyncio.sleep(max(0.0, ends_s - time.perf_counter()))
        await _dismiss(arrivals)

    async def _ask(self, ask: Ask) -> None:
        self.calls.append(await call(ask, self.backend, self.headgate, experiment_began_s=self._began_s))


async def _dismiss(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Moment:
    """What was answered in one second of an experiment."""

    second: int
    served: int
    refused: int
    failed: int
    p90_ms: float | None
    quality: float | None

    @property
    def refused_share(self) -> float:
        """Of all that were answered."""
        answered = self.served + self.refused + self.failed
        return self.refused / answered if answered else 0.0


def by_second(calls: Iterable[Call]) -> list[Moment]:
    """The result over time: a call belongs to the second in which it was answered."""
    seconds: dict[int, list[Call]] = {}
    for one in calls:
        seconds.setdefault(int(one.began_s + one.latency_ms / 1000), []).append(one)
    return [moment(second, seconds.get(second, [])) for second in range(max(seconds, default=-1) + 1)]


def moment(second: int, calls: Sequence[Call]) -> Moment:
    """One second, or any other set of calls."""
    served = [one for one in calls if one.outcome == "served"]
    return Moment(
        second=second,
        served=len(served),
        refused=sum(one.outcome == "refused" for one in calls),
        failed=sum(one.outcome == "failed" for one in calls),
        p90_ms=percentile([one.latency_ms for one in served], 90),
        quality=sum(one.quality for one in served) / len(served) if served else None,
    )


def percentile(values: Iterable[float], p: float) -> float | None:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(p * len(ordered)) // 100) - 1)] if ordered else None
