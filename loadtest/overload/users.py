"""The load of an experiment, and its result second by second.

closed loop   so many users, each asks, waits for the answer, thinks, asks again: a spike is 3 users, then 1000 (S6)
open loop     requests arrive at a rate, whatever becomes of the others
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from loadtest.overload.http import Http
from loadtest.overload.user_calls import Ask, Call, call

WATCH_S = 0.1


@dataclass(frozen=True, slots=True)
class Phase:
    """For some time, so many users (closed loop) or requests per second (open loop)."""

    seconds: float
    users: int = 0
    rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Users of one kind, phase by phase."""

    phases: Sequence[Phase]
    choose: Callable[[Random], Ask]
    think_s: float = 2.0
    """The mean of a user's pause."""
    refused_s: float = 0.0
    """The mean of the pause after a refusal; 0: they think as after an answer."""
    is_even: bool = False
    """Pauses are all as long as their mean; otherwise exponential."""

    @property
    def seconds(self) -> float:
        """How long all phases take."""
        return sum(phase.seconds for phase in self.phases)

    def starts_s(self) -> list[float]:
        """When each phase begins."""
        return [sum(phase.seconds for phase in self.phases[:number]) for number in range(len(self.phases))]

    def users(self, now_s: float) -> int:
        """How many users there are at a time."""
        for phase, start_s in zip(reversed(self.phases), reversed(self.starts_s()), strict=True):
            if now_s >= start_s:
                return phase.users
        return 0

    def pause_s(self, draw: Random, *, is_refused: bool = False) -> float:
        """How long a user waits before the next request."""
        mean_s = self.refused_s if is_refused and self.refused_s else self.think_s
        return mean_s if self.is_even else draw.expovariate(1 / mean_s)

    def shortened(self, share: float) -> Crowd:
        """The same with less of everything, to see that it runs."""
        phases = [
            Phase(phase.seconds * share, users=round(phase.users * share + 0.499), rate=phase.rate * share)
            for phase in self.phases
        ]
        return replace(self, phases=phases, think_s=self.think_s * share, refused_s=self.refused_s * share)


def source(*names: object) -> Random:
    """Chance that depends on these names alone."""
    return Random("/".join(map(str, names)))  # noqa: S311


@dataclass(slots=True)
class Experiment:
    """Crowds that ask a backend, through Headgate or not. The same seed asks the same."""

    backend: Http
    headgate: Http | None
    seed: int = 1
    calls: list[Call] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    """How much later than due this process woke up, ten times per second."""
    _began_s: float = 0.0

    @property
    def stood_still_s(self) -> float:
        """The longest time in which nothing happened here at all: the calls of that time say nothing of control."""
        return max(self.lags_s, default=0.0)

    async def run(self, crowds: Iterable[Crowd], *, beside: Awaitable[None] | None = None) -> list[Call]:
        """Every call that was answered before the end; `beside` runs at the same time."""
        self._began_s = time.perf_counter()
        watch = asyncio.create_task(self._watch())
        others = [asyncio.ensure_future(beside)] if beside is not None else []
        try:
            await asyncio.gather(*(self._run(number, crowd) for number, crowd in enumerate(crowds)))
        finally:
            await _dismiss([watch, *others])
        return self.calls

    async def _run(self, number: int, crowd: Crowd) -> None:
        users: list[asyncio.Task[None]] = []
        try:
            for phase in crowd.phases:
                self._employ(users, crowd, number, phase.users)
                await self._pass(crowd, number, phase)
        finally:
            await _dismiss(users)

    async def _watch(self) -> None:
        """Notice a machine that stands still."""
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = time.perf_counter()
            self.lags_s.append(max(0.0, now_s - last_s - WATCH_S))
            last_s = now_s

    def _employ(self, users: list[asyncio.Task[None]], crowd: Crowd, number: int, wanted: int) -> None:
        """More users, or fewer; those who leave do so at once."""
        while len(users) < wanted:
            draw = source(self.seed, number, len(users))
            users.append(asyncio.create_task(self._user(crowd, draw)))
        while len(users) > wanted:
            users.pop().cancel()

    async def _user(self, crowd: Crowd, draw: Random) -> None:
        is_refused = False
        while True:
            await asyncio.sleep(crowd.pause_s(draw, is_refused=is_refused))
            is_refused = (await self._ask(crowd.choose(draw))).outcome == "refused"

    async def _pass(self, crowd: Crowd, number: int, phase: Phase) -> None:
        """Let the phase go by; in an open loop requests arrive meanwhile, at times that no delay of ours moves."""
        arrives_s = time.perf_counter()
        ends_s = arrives_s + phase.seconds
        draw = source(self.seed, number, "arrivals")
        arrivals: set[asyncio.Task[Call]] = set()
        while phase.rate and (arrives_s := arrives_s + draw.expovariate(phase.rate)) < ends_s:
            await asyncio.sleep(arrives_s - time.perf_counter())
            arrival = asyncio.create_task(self._ask(crowd.choose(draw)))
            arrivals.add(arrival)
            arrival.add_done_callback(arrivals.discard)
        await asyncio.sleep(max(0.0, ends_s - time.perf_counter()))
        await _dismiss(arrivals)

    async def _ask(self, ask: Ask) -> Call:
        self.calls.append(await call(ask, self.backend, self.headgate, experiment_began_s=self._began_s))
        return self.calls[-1]


async def _dismiss(tasks: Iterable[asyncio.Future[Any]]) -> None:
    dismissed = list(tasks)
    for task in dismissed:
        task.cancel()
    await asyncio.gather(*dismissed, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Moment:
    """The answers of one second of an experiment, or of a longer stretch."""

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
        seconds.setdefault(one.second, []).append(one)
    return [moment(second, seconds.get(second, [])) for second in range(max(seconds, default=-1) + 1)]


def moment(second: int, calls: Sequence[Call]) -> Moment:
    """One second, or any other set of calls."""
    served = [one for one in calls if one.outcome == "served"]
    count = sum(one.count for one in served)
    return Moment(
        second=second,
        served=count,
        refused=sum(one.count for one in calls if one.outcome == "refused"),
        failed=sum(one.count for one in calls if one.outcome == "failed"),
        p90_ms=percentile([(one.latency_ms, one.count) for one in served], 90),
        quality=sum(one.quality * one.count for one in served) / count if served else None,
    )


def percentile(values: Iterable[tuple[float, int]], p: float) -> float | None:
    """The nearest rank of values that occur so often."""
    ordered = sorted(values)
    rank = max(1, -(-round(p * sum(count for _, count in ordered)) // 100))
    for value, count in ordered:
        rank -= count
        if rank <= 0:
            return value
    return None
