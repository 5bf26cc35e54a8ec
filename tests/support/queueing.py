"""A backend, its load and one bucket with overload control, in virtual time: nothing sleeps, one seed gives one result.

Requests are admitted and settled by the reference model of the scripts, and steered by the step of the controller,
every 100 ms, as in production.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from random import Random
from typing import Any, Protocol

from limiter.model.bucket import bucket, in_flight
from limiter.model.bucket.bucket import HISTOGRAM_STEPS, Flags, Params, Record, histogram_step
from limiter.model.bucket.in_flight import InFlightTerms
from limiter.model.overload import shedding
from limiter.model.overload.overload_block import Overload, ResponseRules
from limiter.model.overload.overload_control import Reason, step
from limiter.model.overload.overload_state import OverloadParams, OverloadState, overload_params
from limiter.model.overload.shedding import CLASS_NUMBERS, CLASSES, OverloadTerms, Shedding, State
from limiter.model.overload.signals import Report, add
from limiter.model.policy.criticality import Criticality

CYCLE_S = 0.1
START_S = 1_790_000_000
SLOT_S = 10.0

Rates = Mapping[Criticality, float]
Service = Callable[[Random], float]


class Backend(Protocol):
    """Anything that answers."""

    def finish_s(self, now_s: float, quality: float) -> float:
        """When a request that comes now is answered."""


class Queue:
    """Some workers and one endless queue. `hangs`: from when to when nobody is answered."""

    def __init__(
        self, workers: int, service: Service, seed: int, *, hangs: tuple[float, float] = (math.inf, math.inf)
    ) -> None:
        self.draw = Random(seed)
        self.free_s = [0.0] * workers
        self.service = service
        self.hangs = hangs

    def finish_s(self, now_s: float, quality: float) -> float:
        """Queue up; full quality takes the whole service time, none a fifth of it."""
        begin_s, end_s = self.hangs
        start_s = max(now_s, self.free_s[0])
        if begin_s <= start_s < end_s:
            start_s = end_s
        done_s = start_s + self.service(self.draw) * (0.2 + 0.8 * quality)
        if start_s < begin_s < done_s:
            done_s += end_s - begin_s
        heapreplace(self.free_s, done_s)
        return done_s


class Delay:
    """A delay that load has no part in."""

    def __init__(self, seconds: Callable[[float], float], seed: int, *, spread: float = 0.1) -> None:
        self.draw, self.seconds, self.spread = Random(seed), seconds, spread

    def finish_s(self, now_s: float, quality: float) -> float:
        """Wait, and not for others."""
        return now_s + self.seconds(now_s) * self.draw.lognormvariate(0, self.spread)


class Degrading:
    """Q7: `capacity` requests per second in 170 ms; beyond that slower in proportion to the excess."""

    def __init__(self, seed: int, *, spread: float, capacity: float = 300.0, outliers: float = 0.001) -> None:
        self.draw, self.spread, self.capacity, self.outliers = Random(seed), spread, capacity, outliers
        self.came_s: list[float] = []
        self.first = 0

    def finish_s(self, now_s: float, quality: float) -> float:
        """Answer, later the more came in the last second."""
        self.came_s.append(now_s)
        while self.came_s[self.first] < now_s - 1:
            self.first += 1
        excess = max(0.0, len(self.came_s) - self.first - self.capacity)
        latency_s = (0.17 + 0.3 * excess / self.capacity) * max(0.05, self.draw.gauss(1, self.spread))
        return now_s + latency_s * (10 if self.draw.random() < self.outliers else 1)


def exponential(mean_s: float) -> Service:
    """Service times that vary as much as they last."""
    return lambda draw: draw.expovariate(1 / mean_s)


def constant(mean_s: float) -> Service:
    """Service times that do not vary."""
    return lambda draw: mean_s


@dataclass
class Second:
    """What happened in one second."""

    latencies_s: list[float] = field(default_factory=list)
    admitted: list[int] = field(default_factory=lambda: [0] * 4)
    refused: list[int] = field(default_factory=lambda: [0] * 4)
    state: State = State.CALM
    quality: float = 1.0
    limit: float = 0.0


@dataclass
class Seconds:
    """Some seconds of a run."""

    of: list[Second]

    def __getitem__(self, part: slice) -> "Seconds":
        return Seconds(self.of[part])

    @property
    def served(self) -> float:
        """Answers per second."""
        return sum(len(second.latencies_s) for second in self.of) / len(self.of)

    @property
    def admitted(self) -> float:
        """Requests per second that were let in."""
        return sum(sum(second.admitted) for second in self.of) / len(self.of)

    def percentile_s(self, p: float = 90) -> float:
        """Of all answers."""
        latencies_s = sorted(latency for second in self.of for latency in second.latencies_s)
        return latencies_s[max(0, math.ceil(p / 100 * len(latencies_s)) - 1)]

    def refused_share(self, criticality: Criticality | None = None) -> float:
        """Of those that asked."""
        numbers = range(4) if criticality is None else [CLASS_NUMBERS[criticality]]
        refused = sum(second.refused[number] for second in self.of for number in numbers)
        return refused / max(1, refused + sum(second.admitted[number] for second in self.of for number in numbers))


class Bucket:
    """One bucket: its record, and the controller's state of it."""

    def __init__(self, block: Mapping[str, Any], *, partitions: int = 1, now_s: float = 0.0) -> None:
        self.overload = Overload.model_validate(block)
        self.params: OverloadParams = overload_params(self.overload, partitions=partitions)
        timing = self.overload.response_time
        targets_ms = shedding.NO_CLASS if timing is None else timing.targets_by_class()
        is_published = timing is not None and timing.rules is ResponseRules.PUBLISHED
        initial = 0.0 if timing is None or timing.degrade == "only" else 5 * timing.initial / partitions
        flags = Flags.OVERLOAD | Flags.IN_FLIGHT
        self.terms = Params(
            flags=flags | (Flags.HISTOGRAM if is_published else Flags.NONE),
            committed=1.0,
            capacity=1.0,
            debt_max=1.0,
            overload=OverloadTerms(targets_ms, initial),
            in_flight=InFlightTerms(length_us=max(SLOT_S, 8 * max(targets_ms) / 1000) * 1e6, in_work=self._is_work()),
        )
        self.record: Record = bucket.fresh(self.terms, _us(now_s))
        self.state = OverloadState()
        self.reasons: list[Reason] = []
        self.reports: tuple[Report, ...] = ()
        self.since_us = _us(now_s)
        self.writes = 0

    def _is_work(self) -> bool:
        timing = self.overload.response_time
        return timing is not None and timing.counted_in == "work"

    @property
    def known(self) -> Shedding:
        """The record's part that overload control goes by."""
        assert self.record.shedding is not None
        return self.record.shedding

    @property
    def in_flight(self) -> float:
        """Open reservations."""
        assert self.record.slots is not None
        return self.record.slots.count

    def asks(
        self,
        now_s: float,
        criticality: Criticality,
        *,
        draw: float = 1.0,
        charge: float = 1.0,
        expected_ms: float = 1e9,
    ) -> bool:
        """Ask for one request; whether it is let in."""
        bucket.refill(self.record, _us(now_s))
        number, slots = CLASS_NUMBERS[criticality], self.record.slots
        assert slots is not None
        assert self.terms.in_flight is not None
        refused, ahead = shedding.turns_away(
            self.known, number, draw, in_flight=slots.count, expected_ms=expected_ms, over_committed=False
        )
        self.known.ahead[number] = ahead
        shedding.ask(self.known, number, 1.0, refused=refused)
        if not refused:
            shedding.take(self.known, number, 1.0)
            self.record.admitted += 1
            self.record.work_charged += charge
            in_flight.add(slots, self.terms.in_flight, charge if self.terms.in_flight.in_work else 1.0, 60e6)
        return not refused

    def settle(
        self, now_s: float, asked_s: float, criticality: Criticality, *, expected_ms: float = 200.0, charge: float = 1.0
    ) -> None:
        """Settle what was asked at a time."""
        bucket.refill(self.record, _us(now_s))
        number, latency_ms = CLASS_NUMBERS[criticality], (now_s - asked_s) * 1000
        assert self.terms.overload is not None
        assert self.terms.in_flight is not None
        shedding.count(
            self.known,
            number,
            latency_ms=latency_ms,
            expected_ms=expected_ms,
            target_ms=self.terms.overload.targets_ms[number],
        )
        if latency_ms > expected_ms:
            self.record.missed += 1
        if self.record.histogram:
            self.record.histogram[number * HISTOGRAM_STEPS + histogram_step(latency_ms)] += 1
        assert self.record.slots is not None
        in_flight.free(self.record.slots, charge if self.terms.in_flight.in_work else 1.0, _us(asked_s))

    def report(self, now_s: float, load: float) -> None:
        """A service says how busy it is."""
        self.reports = add(self.reports, Report(b"host-1", _us(now_s), {"load": load}))

    def cycle(self, now_s: float) -> None:
        """One cycle of the controller."""
        now_us = _us(now_s)
        self.state, order, reasons = step(
            self.state, self.record, self.reports, self.params, now_us=now_us, since_us=self.since_us
        )
        self.since_us = now_us
        self.reasons += reasons
        if order is not None:
            self.writes += 1
            shedding.obey(self.known, order, rate_max=2.0**53, now_us=now_us)


def _us(now_s: float) -> int:
    return round((START_S + now_s) * 1e6)


class World:
    """One backend, one bucket or several that divide it, and a load."""

    def __init__(
        self,
        backend: Backend,
        block: Mapping[str, Any],
        *,
        seed: int,
        partitions: int = 1,
        expected_ms: float = 200.0,
        charges: Callable[[Random], float] = lambda draw: 1.0,
    ) -> None:
        self.draw = Random(seed)
        self.backend = backend
        self.buckets = [Bucket(block, partitions=partitions) for _ in range(partitions)]
        self.expected_ms = expected_ms
        self.charges = charges
        self.open: list[tuple[float, int, float, Criticality, Bucket, float]] = []
        self.cycles = self.numbered = 0
        self.is_controlled = True
        self.loses = 0.0
        """The share of requests that are never settled."""

    @property
    def bucket(self) -> Bucket:
        """The only one."""
        return self.buckets[0]

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.cycles * CYCLE_S

    def run(self, seconds: int, rates: Rates | Callable[[float], Rates]) -> Seconds:
        """Let time pass with so many requests per second."""
        return Seconds([self._second(rates) for _ in range(seconds)])

    def _second(self, rates: Rates | Callable[[float], Rates]) -> Second:
        second = Second()
        for _ in range(round(1 / CYCLE_S)):
            offered = rates(self.now_s) if callable(rates) else rates
            self._slice(second, offered)
        known = self.bucket.known
        second.state, second.quality, second.limit = State(int(known.state)), known.quality, known.limits[0]
        return second

    def _slice(self, second: Second, offered: Rates) -> None:
        begin_s, end_s = self.now_s, (self.cycles + 1) * CYCLE_S
        arrivals = [
            (begin_s + CYCLE_S * self.draw.random(), name)
            for name, rate in offered.items()
            for _ in range(poisson(rate * CYCLE_S, self.draw))
        ]
        for at_s, criticality in sorted(arrivals):
            self._answer(second, at_s)
            self._ask(second, at_s, criticality)
        self._answer(second, end_s)
        self.cycles += 1
        if self.is_controlled:
            for one in self.buckets:
                one.cycle(end_s)

    def _ask(self, second: Second, at_s: float, criticality: Criticality) -> None:
        one, number = self.draw.choice(self.buckets), CLASS_NUMBERS[criticality]
        charge = self.charges(self.draw)
        if not one.asks(at_s, criticality, draw=self.draw.random(), charge=charge):
            second.refused[number] += 1
            return
        second.admitted[number] += 1
        self.numbered += 1
        finish_s = self.backend.finish_s(at_s, one.known.quality)
        if self.draw.random() >= self.loses:
            heappush(self.open, (finish_s, self.numbered, at_s, criticality, one, charge))

    def _answer(self, second: Second, until_s: float) -> None:
        while self.open and self.open[0][0] <= until_s:
            finish_s, _, at_s, criticality, one, charge = heappop(self.open)
            one.settle(finish_s, at_s, criticality, expected_ms=self.expected_ms, charge=charge)
            second.latencies_s.append(finish_s - at_s)


def poisson(mean: float, draw: Random) -> int:
    """How many come where so many are expected."""
    if mean <= 0:
        return 0
    if mean > 60:
        return max(0, round(draw.gauss(mean, math.sqrt(mean))))
    least, count, product = math.exp(-mean), 0, draw.random()
    while product > least:
        product *= draw.random()
        count += 1
    return count


__all__ = ["CLASSES", "Bucket", "Degrading", "Delay", "Queue", "Seconds", "World", "constant", "exponential"]
