"""Requests with costs and durations under a limit of work: the world of caps (R), in virtual time.

    demand ──► limiter ──► works for a while, does so much, settles ──► every 100 ms the controller looks

Time moves in slices of 10 ms. Few requests are asked for one by one at their own times, many together at the end of
their slice: a bucket holds at least ten slices' worth of tokens. Settles of a slice that were granted together are told
together. What is admitted counts with the work that it will do, at the time of its admission, settled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from loadtest.simulation.distributions import COSTS, Draw, poisson
from loadtest.simulation.steered import CYCLE_S, Steered, Ticket

SLICE_S = 0.01
SLICES = round(CYCLE_S / SLICE_S)
FEW = 3.0
"""Up to so many requests in a slice come one by one."""

Over = Callable[[float], float]
"""A value over time (s)."""

Stretch = tuple[float, float]
"""From and to (s)."""


def steady(value: float) -> Over:
    """The same at all times."""
    return lambda _: value


class Limiter(Protocol):
    """Decides which requests of a flow go ahead."""

    def ask(self, now_s: float, class_number: int = 1, partition: int = 0, *, weight: float = 1.0) -> Ticket | None:
        """A ticket for one request, if it may go ahead."""

    def ask_many(self, now_s: float, asked: int, partition: int = 0) -> Ticket | None:
        """How many of so many may go ahead."""

    def settle(
        self, now_s: float, ticket: Ticket, work: float, *, latency_s: float = 0.0, squares: float = 0.0
    ) -> None:
        """Report what they did."""

    def report(self, now_s: float, ticket: Ticket, work: float) -> None:
        """Report what one has done so far."""

    def look(self, now_s: float) -> None:
        """One cycle of the controller."""

    def standing(self) -> tuple[float, float, bool]:
        """Cap (requests per second), charge, and whether requests are counted now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """A closed loop: those who are not being served ask again after a while."""

    count: int
    retry_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Refused requests that come again."""

    most: int
    """How often."""
    after_s: Stretch = (0.05, 0.2)
    budget: float = 1.0
    """Retries that clients allow themselves, as a share of first attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Requests that ask a limit, and the trouble they meet."""

    seconds: float
    demand: Over
    """First attempts per second."""
    cost: Over
    """Mean work of a request that is admitted now."""
    shape: str = "constant"
    duration_s: float = 0.05
    durations: str = "fixed"
    """Fixed, exponential, or proportional: to the work."""
    users: Users | None = None
    retries: Retries | None = None
    partitions: Callable[[float], tuple[float, ...]] | None = None
    """How demand divides over partitions at a time, where it does."""
    kinds: tuple[tuple[float, float], ...] = ()
    """Kinds of requests: weight in the policy, and true work as a multiple of the cost; each is as frequent."""
    reports_s: float = 0.0
    """Every so often a request reports progress; 0: never."""
    told_s: float = 0.0
    """Settles are told in batches, every so often; 0: at once."""
    lost: float = 0.0
    """Share of the callers that never settle."""
    hangs: tuple[Stretch, ...] = ()
    """Stretches in which nobody ends."""
    paused: tuple[Stretch, ...] = ()
    """Stretches in which the controller does nothing."""
    unsampled: float = 0.0
    """Share of the controller's cycles that are lost."""
    stops: tuple[float, ...] = ()
    """When the controller is replaced, in order."""
    crashes: tuple[float, ...] = ()
    """When it is replaced without having kept anything."""
    store_lost: tuple[Stretch, ...] = ()
    """Stretches in which the store does not answer."""
    emptied: tuple[float, ...] = ()
    """When the store loses all it has."""
    new_keys: tuple[float, ...] = ()
    """When another key of the same policy begins to ask in place of the one before."""


class Point(NamedTuple):
    """One cycle."""

    at_s: float
    asked: int
    first: int
    """Of those, first attempts."""
    refused: int
    admitted: int
    work: float
    """True work of the admitted."""
    cost: float
    cap: float
    charge: float
    counts_requests: bool


@dataclass(slots=True)
class _Open:
    """Requests of one admission that end together."""

    ticket: Ticket
    requests: int = 0
    work: float = 0.0
    squares: float = 0.0
    since_s: float = 0.0


@dataclass(slots=True)
class _Tally:
    asked: int = 0
    first: int = 0
    refused: int = 0
    admitted: int = 0
    work: float = 0.0


@dataclass(slots=True)
class World:
    """A flow under a limiter."""

    flow: Flow
    limiter: Limiter
    seed: int
    points: list[Point] = field(default_factory=list)
    _chance: Random = field(init=False)
    _trouble: Random = field(init=False)
    _draw: Draw = field(init=False)
    _ends: dict[int, list[_Open]] = field(default_factory=dict)
    _progress: dict[int, list[tuple[_Open, float]]] = field(default_factory=dict)
    _again: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _tally: _Tally = field(default_factory=_Tally)
    _open: int = 0
    _first: float = 0.0
    _retried: float = 0.0
    _names: int = 0
    _due: set[int] = field(default_factory=set)
    """Cycles in which somebody ends, reports or comes again."""

    def __post_init__(self) -> None:
        # What requests cost and when they come is drawn apart from what a limiter changes, as far as that goes.
        self._chance = Random(f"arrivals {self.seed}")  # noqa: S311
        self._trouble = Random(f"trouble {self.seed}")  # noqa: S311
        self._draw = COSTS[self.flow.shape](1.0)

    def run(self) -> list[Point]:
        """Let time pass."""
        for cycle in range(round(self.flow.seconds / CYCLE_S)):
            arriving = self._arriving(cycle)
            if arriving or cycle in self._due or self.flow.users is not None:
                for number in range(cycle * SLICES, (cycle + 1) * SLICES):
                    self._slice(number, arriving)
            now_s = (cycle + 1) * CYCLE_S
            self._control(cycle, now_s)
            self._note(now_s)
        return self.points

    def _arriving(self, cycle: int) -> dict[int, list[int]]:
        """First attempts of a cycle, by slice and partition; nothing for most cycles of a slow bucket."""
        flow, from_s = self.flow, cycle * CYCLE_S
        if flow.users is not None:
            return {}
        mean = flow.demand(from_s) * CYCLE_S
        parts = flow.partitions(from_s) if flow.partitions is not None else (1.0,)
        found: dict[int, list[int]] = {}
        for partition, part in enumerate(parts):
            if mean * part > FEW * SLICES:
                for number in range(cycle * SLICES, (cycle + 1) * SLICES):
                    counts = found.setdefault(number, [0] * len(parts))
                    counts[partition] = poisson(mean * part / SLICES, self._chance)
            else:
                for _ in range(poisson(mean * part, self._chance)):
                    number = cycle * SLICES + int(self._chance.random() * SLICES)
                    found.setdefault(number, [0] * len(parts))[partition] += 1
        return found

    def _slice(self, number: int, arriving: dict[int, list[int]]) -> None:
        from_s = number * SLICE_S
        for ended in self._ends.pop(number, ()):
            self._open -= ended.requests
            took_s = from_s - ended.since_s
            self.limiter.settle(from_s, ended.ticket, ended.work, latency_s=took_s, squares=ended.squares)
        for unended, work in self._progress.pop(number, ()):
            self.limiter.report(from_s, unended.ticket, work)
        counts = arriving.get(number, ())
        if self.flow.users is not None:
            idle = max(0, self.flow.users.count - self._open)
            counts = [poisson(idle / self.flow.users.retry_s * SLICE_S, self._chance)]
        for partition, count in enumerate(counts):
            if count:
                self._tally.first += count
                self._first += count
                self._ask(number, count, 1, partition)
        for count, attempt in self._again.pop(number, ()):
            self._ask(number, count, attempt, 0)

    def _ask(self, number: int, count: int, attempt: int, partition: int) -> None:
        """So many requests in a slice."""
        self._tally.asked += count
        from_s = number * SLICE_S
        granted = 0
        if count > FEW and not self.flow.kinds:
            ticket = self.limiter.ask_many(from_s + SLICE_S, count, partition)
            if ticket is not None:
                granted = ticket.requests
                self._begin(from_s + SLICE_S, ticket, 1.0)
        else:
            for at_s in sorted([from_s + SLICE_S * self._chance.random() for _ in range(count)]):
                weight, times = self._chance.choice(self.flow.kinds) if self.flow.kinds else (1.0, 1.0)
                ticket = self.limiter.ask(at_s, partition=partition, weight=weight)
                if ticket is not None:
                    granted += 1
                    self._begin(at_s, ticket, times)
        self._tally.admitted += granted
        if granted < count:
            self._refused(number, count - granted, attempt)

    def _refused(self, number: int, count: int, attempt: int) -> None:
        self._tally.refused += count
        retries = self.flow.retries
        if retries is None or attempt > retries.most:
            return
        count = min(count, int(retries.budget * self._first - self._retried)) if retries.budget < 1 else count
        for _ in range(count):
            self._retried += 1
            later = max(1, round(self._chance.uniform(*retries.after_s) / SLICE_S))
            self._again.setdefault(number + later, []).append((1, attempt + 1))
            self._due.add((number + later) // SLICES)

    def _begin(self, at_s: float, ticket: Ticket, times: float) -> None:
        """Work of what was admitted: how much, how long, and whether anybody will ever say so."""
        flow, draw, chance = self.flow, self._draw, self._chance
        mean = flow.cost(at_s) * times
        self._open += ticket.requests
        works = [mean * draw(chance) for _ in range(ticket.requests)]
        self._tally.work += sum(works) * ticket.weight
        if flow.lost:
            works = [work for work in works if self._trouble.random() >= flow.lost]
        if flow.durations == "fixed":
            self._end(at_s, flow.duration_s, ticket, works)
            return
        for work in works:
            if flow.durations == "exponential":
                self._end(at_s, chance.expovariate(1.0) * flow.duration_s, ticket, [work])
            else:
                self._end(at_s, flow.duration_s * work / mean, ticket, [work])

    def _end(self, at_s: float, took_s: float, ticket: Ticket, works: list[float]) -> None:
        if not works:
            return
        flow = self.flow
        end_s = at_s + took_s
        for from_s, to_s in flow.hangs:
            if from_s <= end_s < to_s:
                end_s = to_s
        if flow.told_s:
            end_s = (int(end_s / flow.told_s) + 1) * flow.told_s
        number = int(end_s / SLICE_S) + 1
        if flow.reports_s:
            self._names += 1
            ticket = ticket._replace(name=str(self._names))
        ended = _Open(
            ticket._replace(requests=len(works)),
            len(works),
            sum(works),
            sum([work * work for work in works]),
            at_s,
        )
        self._ends.setdefault(number, []).append(ended)
        self._due.add(number // SLICES)
        if flow.reports_s:
            for step in range(1, int(took_s / flow.reports_s) + 1):
                done = min(1.0, step * flow.reports_s / took_s)
                at = int((at_s + step * flow.reports_s) / SLICE_S) + 1
                if at < number:
                    self._progress.setdefault(at, []).append((ended, ended.work * done))
                    self._due.add(at // SLICES)

    def _control(self, cycle: int, now_s: float) -> None:
        flow, limiter = self.flow, self.limiter
        if isinstance(limiter, Steered):
            self._disturb(limiter, now_s)
        if flow.unsampled and self._trouble.random() < flow.unsampled:
            return
        if not any(from_s <= now_s < to_s for from_s, to_s in flow.paused):
            limiter.look(now_s)

    def _disturb(self, limiter: Steered, now_s: float) -> None:
        """Let go wrong in the fleet whatever is due in this cycle."""
        flow = self.flow
        limiter.store.is_lost = any(from_s <= now_s < to_s for from_s, to_s in flow.store_lost)
        for at_s in flow.stops:
            if now_s - CYCLE_S < at_s <= now_s:
                limiter.end()
                limiter.begin()
        for at_s in flow.crashes:
            if now_s - CYCLE_S < at_s <= now_s:
                limiter.begin()
        for at_s in flow.new_keys:
            if now_s - CYCLE_S < at_s <= now_s:
                limiter.new_key()
        for at_s in flow.emptied:
            if now_s - CYCLE_S < at_s <= now_s:
                limiter.empty_store()

    def _note(self, now_s: float) -> None:
        tally, self._tally = self._tally, _Tally()
        cap, charge, counts_requests = self.limiter.standing()
        self.points.append(
            Point(
                now_s,
                tally.asked,
                tally.first,
                tally.refused,
                tally.admitted,
                tally.work,
                self.flow.cost(now_s),
                cap,
                charge,
                counts_requests,
            )
        )
