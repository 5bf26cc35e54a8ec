"""A backend that slows down when it is asked too much, and the controllers that keep it from that. Virtual time.

    latency = base + slope · max(0, rate − capacity)      the rate over the last second; ± a little by a draw (Q7)

Time moves in slices, as the controller's cycle does. What is admitted in a slice is settled when its latency has
passed, so a controller hears of an overload as late as a real one would. Nothing sleeps; one seed, one result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Protocol

from limiter.model.overload import expectations, utilisation
from limiter.model.overload.expectations import ExpectationParams, ExpectationSample, ExpectationState
from limiter.model.overload.utilisation import UtilisationParams, UtilisationSample, UtilisationState
from limiter.model.policy.criticality import RANKS, Criticality

SLICE_S = 0.1
TOLD = 20
"""So many latencies stand for all that were admitted in a slice."""

Offered = Mapping[Criticality, float]
"""Requests a second, by class."""


@dataclass(slots=True)
class Backend:
    """Can do `capacity` requests a second; beyond that it degrades in proportion to the excess."""

    draw: Random
    capacity: float = 3000.0
    base_ms: float = 170.0
    slope_ms: float = 0.1
    spread: float = 0.01
    _admitted: deque[float] = field(default_factory=lambda: deque(maxlen=round(1 / SLICE_S)))

    def serve(self, admitted: float) -> list[float]:
        """Take a slice's requests; the latencies (ms) that stand for them."""
        self._admitted.append(admitted)
        rate = sum(self._admitted) / (len(self._admitted) * SLICE_S)
        latency_ms = self.base_ms + self.slope_ms * max(0.0, rate - self.capacity)
        return [latency_ms * self.draw.gauss(1.0, self.spread) for _ in range(TOLD)]

    @property
    def utilisation(self) -> float:
        """How much of what it can do it was asked in the last slice."""
        return self._admitted[-1] / SLICE_S / self.capacity if self._admitted else 0.0


class Throttle(Protocol):
    """What decides which share of a class is refused, and learns from what was settled."""

    @property
    def overloaded(self) -> bool:
        """As callers are told."""

    def refusal_share(self, criticality: Criticality) -> float:
        """The share of a class's requests to refuse now."""

    def learn(self, sample: ExpectationSample, load: float) -> None:
        """Hear what was settled in a slice, and how busy the backend is."""


class ByExpectations:
    """The controller of `limiter.model.overload.expectations`."""

    def __init__(self, params: ExpectationParams) -> None:
        self.params = params
        self.state: ExpectationState = expectations.start(params)

    @property
    def overloaded(self) -> bool:
        """As callers are told."""
        return self.state.overloaded

    def refusal_share(self, criticality: Criticality) -> float:
        """Q4."""
        return expectations.refusal_share(self.state.throttle, RANKS[criticality])

    def learn(self, sample: ExpectationSample, load: float) -> None:
        """Step."""
        self.state = expectations.step(self.state, sample, self.params)


class OnOff(ByExpectations):
    """As one would first write it: refuse everybody while the last interval was bad, nobody while it was not."""

    def learn(self, sample: ExpectationSample, load: float) -> None:
        """Step, and then overrule the throttle."""
        super().learn(sample, load)
        if self.state.reason is not None:
            bad = expectations.missed_share(self.state.intervals[-1:]) > self.params.threshold
            throttle = self.params.throttle_max if bad else 0.0
            self.state = ExpectationState(throttle=throttle, overloaded=bad, intervals=self.state.intervals[-1:])


class ByUtilisation:
    """The controller of `limiter.model.overload.utilisation`, told once a second."""

    def __init__(self, params: UtilisationParams, report_s: float = 1.0) -> None:
        self.params = params
        self.state = UtilisationState()
        self._every = round(report_s / SLICE_S)
        self._loads: list[float] = []

    @property
    def overloaded(self) -> bool:
        """As callers are told."""
        return self.state.overloaded

    def refusal_share(self, criticality: Criticality) -> float:
        """G5."""
        return utilisation.refusal_share(self.state.level, RANKS[criticality], RANKS)

    def learn(self, sample: ExpectationSample, load: float) -> None:
        """Step, with a report if one is due."""
        self._loads.append(load)
        loads = {}
        if len(self._loads) == self._every:
            loads = {"load": math.fsum(self._loads) / self._every}
            self._loads.clear()
        self.state = utilisation.step(self.state, UtilisationSample(sample.elapsed_s, loads), self.params)


@dataclass(slots=True)
class Second:
    """What happened in one second."""

    offered: float = 0.0
    admitted: dict[Criticality, float] = field(default_factory=dict)
    settled: float = 0.0
    missed: float = 0.0
    overloaded: bool = False

    @property
    def admitted_in_all(self) -> float:
        """Requests of all classes."""
        return math.fsum(self.admitted.values())


@dataclass(slots=True)
class Outcome:
    """A run, second by second."""

    seconds: list[Second]

    def transitions(self) -> int:
        """How often the backend was called overloaded and then not, or the other way round."""
        states = [second.overloaded for second in self.seconds]
        return sum(before != after for before, after in pairwise(states))

    def since(self, start_s: int) -> Outcome:
        """The rest of the run."""
        return Outcome(self.seconds[start_s:])

    def admitted_mean(self) -> float:
        """Requests a second."""
        return math.fsum(second.admitted_in_all for second in self.seconds) / len(self.seconds)

    def admitted_of(self, criticality: Criticality) -> float:
        """Requests of a class a second."""
        return math.fsum(second.admitted.get(criticality, 0.0) for second in self.seconds) / len(self.seconds)

    def missed_share(self) -> float:
        """Of all that were settled."""
        settled = math.fsum(second.settled for second in self.seconds)
        return math.fsum(second.missed for second in self.seconds) / settled if settled else 0.0


class Simulation:
    """One backend, one throttle, one load."""

    def __init__(self, throttle: Throttle, offered: Offered, *, expected_ms: float, seed: int) -> None:
        self._throttle = throttle
        self._offered = offered
        self._expected_ms = expected_ms
        self._draw = Random(seed)  # noqa: S311
        self._backend = Backend(self._draw)
        self._due: dict[int, list[tuple[float, float]]] = {}
        self._now = 0

    def run(self, seconds: int) -> Outcome:
        """Let time pass."""
        return Outcome([self._second() for _ in range(seconds)])

    def _second(self) -> Second:
        second = Second()
        for _ in range(round(1 / SLICE_S)):
            self._slice(second)
            self._now += 1
        return second

    def _slice(self, second: Second) -> None:
        admitted, refused = 0.0, 0.0
        for name, rate in self._offered.items():
            share = self._throttle.refusal_share(name)
            asked, passed = self._admit(rate, share)
            second.offered += asked
            second.admitted[name] = second.admitted.get(name, 0.0) + passed
            admitted += passed
            refused += asked - passed if share < 1 else 0.0
        self._serve(admitted)
        sample = self._settle()._replace(admitted=admitted, refused=refused)
        second.settled += sample.settled
        second.missed += sample.missed
        self._throttle.learn(sample, self._backend.utilisation)
        second.overloaded = self._throttle.overloaded

    def _admit(self, rate: float, refused_share: float) -> tuple[float, float]:
        """How many of a class ask, and how many of them pass."""
        asked = _about(rate * SLICE_S, rate * SLICE_S, self._draw)
        share = 1 - refused_share
        return asked, min(asked, _about(asked * share, asked * share * (1 - share), self._draw))

    def _serve(self, admitted: float) -> None:
        for latency_ms in self._backend.serve(admitted):
            settled_at = self._now + math.ceil(latency_ms / 1000 / SLICE_S)
            self._due.setdefault(settled_at, []).append((latency_ms, admitted / TOLD))

    def _settle(self) -> ExpectationSample:
        settled = [(latency_ms, count) for latency_ms, count in self._due.pop(self._now, []) if count]
        return ExpectationSample(
            elapsed_s=SLICE_S,
            settled=math.fsum(count for _, count in settled),
            missed=math.fsum(count for latency_ms, count in settled if latency_ms > self._expected_ms),
            slack_min_ms=min((self._expected_ms - latency_ms for latency_ms, _ in settled), default=math.inf),
        )


def _about(mean: float, variance: float, draw: Random) -> float:
    """A count with this mean and variance: near enough to Poisson's and Bernoulli's for hundreds of requests."""
    return float(max(0, round(draw.gauss(mean, math.sqrt(variance))))) if mean > 0 else 0.0
