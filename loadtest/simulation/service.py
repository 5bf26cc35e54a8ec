"""Requests through a gate to a backend that slows down under load: the world of overload control (S, Q), virtual time.

    users or arrivals ──► gate ──► backend ──► answers, settled at once or told later ──► every 100 ms the gate looks

A gate decides who goes ahead: the product's (`gates.py`) or a yardstick's (`yardsticks.py`). Nothing sleeps, and
nothing is drawn but from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Protocol

from loadtest.simulation.backends import Backend
from loadtest.simulation.distributions import poisson
from loadtest.simulation.gates import Guarded
from loadtest.simulation.steered import CRITICAL, CYCLE_S

CLASS_COUNT = 4

Rates = Callable[[float], Sequence[float]]
"""Requests per second of each class at a time (s), the most critical first."""


class Gate(Protocol):
    """Decides which requests go ahead."""

    @property
    def overloaded(self) -> bool:
        """As callers are told."""

    def ask(self, now_s: float, class_number: int) -> object | None:
        """A ticket for a request that may go ahead."""

    def settle(self, now_s: float, ticket: object, latency_s: float, *, failed: bool) -> None:
        """Hear how long it took."""

    def look(self, now_s: float) -> None:
        """One cycle of whatever steers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Users who think, ask, wait or are refused, and think again. Nobody leaves while waiting."""

    users: Callable[[float], int]
    mix: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 0.0)
    think_s: float = 2.0
    refused_s: float = 0.0
    """How long they wait after a refusal; 0: they think as usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Refused requests come again."""

    tries: int = 4
    """In all."""
    after_s: float = 0.5
    budget: float = math.inf
    """Retries as a share of first attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests, and the trouble between them and the gate."""

    rates: Rates | None = None
    closed: Closed | None = None
    again: Again | None = None
    lost: float = 0.0
    """Share of the answers that are never settled."""
    told_s: float = 0.0
    """Settles are told in batches, every so often; 0: at once."""
    fails: Callable[[float], bool] | None = None
    """True for the times (s) at which answers are errors."""
    paused: Callable[[float], bool] | None = None
    """True for the times (s) at which the controller sleeps."""
    every: int = 1
    """The controller looks every so many cycles."""
    stops: tuple[float, ...] = ()
    """When the controller is replaced, in order; this and the rest only where the product is the gate."""
    crashes: tuple[float, ...] = ()
    """When it is replaced without having kept anything in order."""
    emptied: tuple[float, ...] = ()
    """When the store loses all it has."""


class Seen:
    """A run, second by second."""

    def __init__(self, seconds: int) -> None:
        self.latencies_s: list[list[float]] = [[] for _ in range(seconds + 1)]
        """By the second of the answer."""
        self.admitted = [[0] * CLASS_COUNT for _ in range(seconds + 1)]
        self.refused = [[0] * CLASS_COUNT for _ in range(seconds + 1)]
        self.in_time = [0] * (seconds + 1)
        """Of those admitted in a second, how many were answered within what is expected, without an error."""
        self.overloaded = [False] * (seconds + 1)

    def served(self, from_s: int, to_s: int) -> float:
        """Answers per second."""
        return sum(map(len, self.latencies_s[from_s:to_s])) / (to_s - from_s)

    def admitted_rate(self, from_s: int, to_s: int) -> float:
        """Requests let in per second."""
        return sum(map(sum, self.admitted[from_s:to_s])) / (to_s - from_s)

    def refused_share(self, from_s: int, to_s: int, class_number: int | None = None) -> float:
        """Of all that asked, or of one class."""
        numbers = range(CLASS_COUNT) if class_number is None else (class_number,)
        refused = sum(second[number] for second in self.refused[from_s:to_s] for number in numbers)
        admitted = sum(second[number] for second in self.admitted[from_s:to_s] for number in numbers)
        return refused / max(1, refused + admitted)

    def percentile_s(self, from_s: int, to_s: int, percentile: float = 90.0) -> float:
        """Of all answers of these seconds."""
        latencies = sorted([latency for second in self.latencies_s[from_s:to_s] for latency in second])
        if not latencies:
            return math.nan
        return latencies[min(len(latencies) - 1, max(0, math.ceil(percentile / 100 * len(latencies)) - 1))]

    def peak_s(self, from_s: int, to_s: int) -> float:
        """The highest 90th percentile of a single second."""
        found = [self.percentile_s(at, at + 1) for at in range(from_s, to_s) if self.latencies_s[at]]
        return max(found, default=math.nan)

    def missed(self, from_s: int, to_s: int) -> float:
        """Share of the admitted that were answered too late, with an error, or not at all."""
        admitted = sum(map(sum, self.admitted[from_s:to_s]))
        return 1 - sum(self.in_time[from_s:to_s]) / admitted if admitted else 0.0

    def settled_after_s(
        self, target_s: float, from_s: int, to_s: int, *, window_s: int = 5, most: float = 1.25
    ) -> float:
        """Seconds until the percentile over a window stays below `most` of the target; infinite if it never does."""
        for at in range(to_s - window_s, from_s - 1, -1):
            value = self.percentile_s(at, at + window_s)
            if value > most * target_s:
                return math.inf if at >= to_s - window_s else float(at + 1 - from_s)
        return 0.0

    def wobble(self, from_s: int, to_s: int) -> float:
        """Standard deviation ÷ mean of the requests let in per second."""
        counts = [sum(second) for second in self.admitted[from_s:to_s]]
        mean = sum(counts) / len(counts)
        return math.sqrt(sum((count - mean) ** 2 for count in counts) / len(counts)) / mean if mean else 0.0


@dataclass(slots=True)
class World:
    """Traffic through a gate to a backend."""

    traffic: Traffic
    gate: Gate
    backend: Backend
    seed: int
    seconds: int
    expected_s: float
    seen: Seen = field(init=False)
    _chance: Random = field(init=False)
    _trouble: Random = field(init=False)
    _asks: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Time, a number that makes it unique, class, attempt: users who think, and retries."""
    _held: list[tuple[object, float, bool]] = field(default_factory=list)
    _count: int = 0
    _users: int = 0
    _wanted: int = 0
    _first: float = 0.0
    _retried: float = 0.0

    def __post_init__(self) -> None:
        self._chance = Random(f"arrivals {self.seed}")  # noqa: S311
        self._trouble = Random(f"trouble {self.seed}")  # noqa: S311
        self.seen = Seen(self.seconds)

    def run(self) -> Seen:
        """Let time pass."""
        for cycle in range(round(self.seconds / CYCLE_S)):
            self._cycle(cycle)
        return self.seen

    def _cycle(self, cycle: int) -> None:
        from_s, to_s = cycle * CYCLE_S, (cycle + 1) * CYCLE_S
        second = int(from_s + 1e-9)
        arrivals = self._arrivals(from_s)
        arrivals.reverse()
        backend, asks = self.backend, self._asks
        while True:
            next_s = arrivals[-1][0] if arrivals else math.inf
            is_again = bool(asks) and asks[0][0] < next_s
            ask_s = asks[0][0] if is_again else next_s
            done_s = backend.next_s
            if done_s <= ask_s:
                if done_s > to_s:
                    break
                self._answer()
            elif ask_s > to_s:
                break
            elif is_again:
                ask_s, _, class_number, attempt = heappop(asks)
                self._ask(ask_s, class_number, attempt, second)
            else:
                ask_s, class_number = arrivals.pop()
                self._ask(ask_s, class_number, 1, second)
        self._look(cycle, from_s, to_s)
        self.seen.overloaded[second] |= self.gate.overloaded

    def _arrivals(self, from_s: float) -> list[tuple[float, int]]:
        """Requests of the cycle that depend on nobody's answer."""
        traffic, chance = self.traffic, self._chance
        if traffic.closed is not None:
            self._wanted = traffic.closed.users(from_s)
            while self._users < self._wanted:
                self._users += 1
                self._later(from_s + chance.expovariate(1 / traffic.closed.think_s), self._drawn_class(), 1)
        if traffic.rates is None:
            return []
        found = [
            (from_s + CYCLE_S * chance.random(), number)
            for number, rate in enumerate(traffic.rates(from_s))
            for _ in range(poisson(rate * CYCLE_S, chance))
        ]
        found.sort()
        return found

    def _drawn_class(self) -> int:
        assert self.traffic.closed is not None
        mix = self.traffic.closed.mix
        drawn = self._chance.random() * sum(mix)
        for number, part in enumerate(mix):
            drawn -= part
            if drawn < 0:
                return number
        return CRITICAL

    def _later(self, at_s: float, class_number: int, attempt: int) -> None:
        self._count += 1
        heappush(self._asks, (at_s, self._count, class_number, attempt))

    def _ask(self, now_s: float, class_number: int, attempt: int, second: int) -> None:
        closed = self.traffic.closed
        if closed is not None and self._users > self._wanted:
            self._users -= 1
            return
        self._first += attempt == 1
        ticket = self.gate.ask(now_s, class_number)
        if ticket is not None:
            self.seen.admitted[second][class_number] += 1
            self.backend.admit(now_s, ticket)
            return
        self.seen.refused[second][class_number] += 1
        if closed is not None:
            think_s = closed.refused_s or closed.think_s
            self._later(now_s + self._chance.expovariate(1 / think_s), self._drawn_class(), 1)
        again = self.traffic.again
        if again is not None and attempt < again.tries and self._retried < again.budget * self._first:
            self._retried += 1
            self._later(now_s + again.after_s * attempt * self._chance.uniform(0.5, 1.5), class_number, attempt + 1)

    def _answer(self) -> None:
        done = self.backend.pop()
        now_s, latency_s, traffic, seen = done.at_s, done.at_s - done.since_s, self.traffic, self.seen
        failed = traffic.fails is not None and traffic.fails(now_s)
        if not traffic.lost or self._trouble.random() >= traffic.lost:
            if traffic.told_s:
                self._held.append((done.ticket, latency_s, failed))
            else:
                self.gate.settle(now_s, done.ticket, latency_s, failed=failed)
        if now_s < self.seconds:
            seen.latencies_s[int(now_s)].append(latency_s)
        if latency_s <= self.expected_s and not failed:
            seen.in_time[int(done.since_s)] += 1
        if traffic.closed is not None:
            if self._users > self._wanted:
                self._users -= 1
            else:
                think_s = traffic.closed.think_s
                self._later(now_s + self._chance.expovariate(1 / think_s), self._drawn_class(), 1)

    def _look(self, cycle: int, from_s: float, to_s: float) -> None:
        traffic = self.traffic
        if traffic.told_s and int(to_s / traffic.told_s + 1e-6) != int(from_s / traffic.told_s + 1e-6):
            held, self._held = self._held, []
            for ticket, latency_s, failed in held:
                self.gate.settle(to_s, ticket, latency_s, failed=failed)
        if isinstance(self.gate, Guarded):
            self._disturb(self.gate, from_s, to_s)
        if (cycle + 1) % traffic.every == 0 and not (traffic.paused is not None and traffic.paused(to_s)):
            self.gate.look(to_s)

    def _disturb(self, gate: Guarded, from_s: float, to_s: float) -> None:
        """Let go wrong in the fleet whatever is due in this cycle."""
        for times, in_order in ((self.traffic.stops, True), (self.traffic.crashes, False)):
            if any(from_s < at_s <= to_s for at_s in times):
                gate.replace_controller(in_order=in_order)
        if any(from_s < at_s <= to_s for at_s in self.traffic.emptied):
            gate.empty_store()
