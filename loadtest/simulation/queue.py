"""One worker with an endless queue, users who wait for it, and response-time control (S). Virtual time, seeded.

    users    so many think for 2 s on average, ask, wait for the answer or are refused, and think again
    worker   takes a request for 20 ms, in order: it can do 50 a second
    control  `limiter.model.overload.response_time`, told every 0.1 s, by the tokens of its neighbour `shedding`

The experiments of `loadtest.overload` do the same with real processes, in minutes; this takes a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, histogram_step
from limiter.model.overload import response_time, shedding
from limiter.model.overload.response_time import ClassSample, ResponseTimeParams, ResponseTimeSample, ResponseTimeState
from limiter.model.overload.shedding import CLASS_NUMBERS, CLASSES, Shedding, ShedOrder
from limiter.model.policy.criticality import Criticality
from loadtest.overload.users import percentile

TICK_S = 0.01
TICKS_PER_CYCLE = 10
TICKS_PER_SECOND = 100
THINK_S = 2.0
SERVICE_S = 0.02
RATE_MAX = 1e6


class Waiting(NamedTuple):
    """A request in the queue, or at the worker."""

    finishes_s: float
    arrived_s: float
    criticality: Criticality


@dataclass(slots=True)
class Second:
    """What happened in one second."""

    latencies_s: list[float] = field(default_factory=list)
    admitted: dict[Criticality, int] = field(default_factory=lambda: dict.fromkeys(Criticality, 0))
    refused: dict[Criticality, int] = field(default_factory=lambda: dict.fromkeys(Criticality, 0))
    waiting: int = 0

    @property
    def served(self) -> int:
        """Answers given."""
        return len(self.latencies_s)


def p90_s(seconds: Sequence[Second]) -> float:
    """Of all answers given in these seconds."""
    return percentile([latency for second in seconds for latency in second.latencies_s], 90) or 0.0


def refused_share(seconds: Sequence[Second], criticality: Criticality) -> float:
    """Of all that asked in these seconds."""
    refused = sum(second.refused[criticality] for second in seconds)
    return refused / max(1, refused + sum(second.admitted[criticality] for second in seconds))


class Simulation:
    """One worker, its users and its control; without parameters there is none."""

    def __init__(self, params: ResponseTimeParams | None, classes: Sequence[Criticality], *, seed: int) -> None:
        self._params = params
        self._classes = classes
        self._draw = Random(seed)  # noqa: S311
        self._state = ResponseTimeState()
        self._known = Shedding()
        self._thinking: list[float] = []
        """When each user that thinks will ask, the soonest first."""
        self._queue: deque[Waiting] = deque()
        self._free_s = 0.0
        self._tick = 0
        self._settled = {criticality: [0.0] * HISTOGRAM_STEPS for criticality in classes}
        self._told = dict.fromkeys(classes, 0.0)

    def run(self, seconds: int, *, users: int) -> list[Second]:
        """Let time pass with so many users; nobody leaves."""
        for _ in range(users - len(self._thinking) - len(self._queue)):
            self._think()
        return [self._second() for _ in range(seconds)]

    def _second(self) -> Second:
        second = Second()
        for _ in range(TICKS_PER_SECOND):
            self._answer(second)
            while self._thinking and self._thinking[0] <= self._now_s:
                heappop(self._thinking)
                self._ask(self._draw.choice(self._classes), second)
            self._tick += 1
            shedding.refill(self._known, TICK_S * 1e6)
            if self._params is not None and self._tick % TICKS_PER_CYCLE == 0:
                self._control(self._params)
        second.waiting = len(self._queue)
        return second

    @property
    def _now_s(self) -> float:
        return self._tick * TICK_S

    def _think(self) -> None:
        heappush(self._thinking, self._now_s + self._draw.expovariate(1 / THINK_S))

    def _answer(self, second: Second) -> None:
        while self._queue and self._queue[0].finishes_s <= self._now_s:
            done = self._queue.popleft()
            latency_s = done.finishes_s - done.arrived_s
            self._think()
            second.latencies_s.append(latency_s)
            self._settled[done.criticality][histogram_step(latency_s * 1000)] += 1

    def _ask(self, criticality: Criticality, second: Second) -> None:
        number = CLASS_NUMBERS[criticality]
        refused = shedding.turns_away(self._known, number, draw=1.0)
        if refused:
            second.refused[criticality] += 1
            self._told[criticality] += 1
            self._think()
            return
        shedding.take(self._known, number, 1.0)
        second.admitted[criticality] += 1
        self._free_s = max(self._free_s, self._now_s) + SERVICE_S
        self._queue.append(Waiting(self._free_s, self._now_s, criticality))

    def _control(self, params: ResponseTimeParams) -> None:
        samples = {name: ClassSample(tuple(self._settled[name]), self._told[name]) for name in self._classes}
        self._state = response_time.step(self._state, ResponseTimeSample(TICK_S * TICKS_PER_CYCLE, samples), params)
        a, b, c, d = (self._state.classes[name].rate if name in self._state.classes else 0.0 for name in CLASSES)
        shedding.obey(self._known, ShedOrder(rates=(a, b, c, d)), rate_max=RATE_MAX)
        self._settled = {criticality: [0.0] * HISTOGRAM_STEPS for criticality in self._classes}
        self._told = dict.fromkeys(self._classes, 0.0)
