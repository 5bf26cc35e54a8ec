"""An experiment in virtual time: the same crowds, a backend of the workbench, and the product's own decisions.

    crowds ──► buckets in memory, decided and steered by the code of production ──► backend ──► settle
               (loadtest.simulation.steered)

Nothing sleeps and nothing is drawn but from the seed, so a run gives the same calls every time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from random import Random
from typing import NamedTuple

from limiter.model.overload.shedding import CLASS_NUMBERS
from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.user_calls import Ask, Call, Like, from_tally, like
from loadtest.overload.users import Crowd, source
from loadtest.overload.variant import Variant
from loadtest.simulation.backends import Pending, Slowing
from loadtest.simulation.steered import CYCLE_S, Steered, Ticket

NOISE = 0.01
"""Of the answers of a backend that slows down: standard deviation over mean."""


class Point(NamedTuple):
    """The state of overload control in one cycle of one bucket, as its record says it."""

    at_s: float
    bucket: str
    quality: float
    limits: tuple[float, ...]
    """In flight, for each class; 0: not limited."""
    rates: tuple[float, ...]
    """Requests per second, for each class; 0: not limited."""
    in_flight: float
    state: int


class _User(NamedTuple):
    """A user of a crowd; a request that arrives by itself has none."""

    crowd: int
    number: int


class _Held(NamedTuple):
    """A request that was let in."""

    user: _User | None
    ask: Ask
    quality: float
    bucket: Steered
    ticket: Ticket


class Workers(Pending):
    """Workers and one queue in order of arrival; a request takes one for what its kind and its quality cost."""

    def __init__(self, terms: BackendTerms, seed: int) -> None:
        super().__init__()
        self._terms, self._free_s = terms, [0.0] * terms.workers
        self._chance = source("backend", seed)

    def admit(self, now_s: float, ticket: object) -> None:
        """Take a request."""
        assert isinstance(ticket, _Held)
        took_s = self._terms.cost_ms(ticket.ask.kind, ticket.quality) / 1000
        if not self._terms.is_even:
            took_s *= self._chance.expovariate(1.0)
        done_s = max(self._free_s[0], now_s) + took_s
        heapreplace(self._free_s, done_s)
        self._push(done_s, now_s, ticket)


def backend_of(terms: BackendTerms, seed: int) -> Workers | Slowing:
    """The backend of an experiment."""
    if terms.slows is None:
        return Workers(terms, seed)
    return Slowing(
        lambda chance: max(0.01, chance.gauss(1.0, NOISE)),
        seed,
        capacity=terms.slows.capacity,
        base_s=terms.slows.base_ms / 1000,
        slope_s=terms.slows.ms_per_excess / 1000,
        pauses=() if terms.hangs is None else (terms.hangs,),
    )


@dataclass(slots=True)
class VirtualTime:
    """One variant of an experiment."""

    variant: Variant
    terms: BackendTerms
    crowds: Sequence[Crowd]
    seed: int = 1
    points: list[Point] = field(default_factory=list)
    _backend: Workers | Slowing = field(init=False)
    _buckets: dict[str, Steered] = field(default_factory=dict)
    _asks: list[tuple[float, int, _User]] = field(default_factory=list)
    _tally: Counter[Like] = field(default_factory=Counter)
    _draws: dict[_User, Random] = field(default_factory=dict)
    _there: list[int] = field(default_factory=list)
    _arrivals: list[tuple[float, int]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self._backend = backend_of(self.terms, self.seed)
        self._there = [0] * len(self.crowds)

    @property
    def seconds(self) -> float:
        """How long the crowds are there."""
        return max(crowd.seconds for crowd in self.crowds)

    def run(self) -> list[Call]:
        """Let time pass."""
        open_loops = [source(self.seed, number, "arrivals") for number in range(len(self.crowds))]
        for cycle in range(round(self.seconds / CYCLE_S)):
            from_s, to_s = cycle * CYCLE_S, (cycle + 1) * CYCLE_S
            self._come(from_s)
            self._arrive(from_s, open_loops)
            self._pass(to_s)
            for name, bucket in self._buckets.items():
                bucket.look(to_s)
                self._note(to_s, name, bucket)
        return from_tally(self._tally)

    def _come(self, now_s: float) -> None:
        """More users; those who are too many leave when their turn comes."""
        for index, crowd in enumerate(self.crowds):
            wanted = crowd.users(now_s + 1e-9)
            for number in range(self._there[index], wanted):
                user = _User(index, number)
                draw = self._draws.setdefault(user, source(self.seed, index, number))
                # Nobody knows when the others began: a user's first pause ends at any time of it.
                self._later(now_s + crowd.pause_s(draw) * (draw.random() if crowd.is_even else 1.0), user)
            self._there[index] = wanted

    def _arrive(self, from_s: float, draws: Sequence[Random]) -> None:
        """Requests of an open loop in this cycle."""
        found = []
        for index, (crowd, draw) in enumerate(zip(self.crowds, draws, strict=True)):
            rate = _rate(crowd, from_s + 1e-9)
            at_s = from_s
            while rate and (at_s := at_s + draw.expovariate(rate)) < from_s + CYCLE_S:
                found.append((at_s, index))
        self._arrivals = sorted(found, reverse=True)

    def _pass(self, to_s: float) -> None:
        """Everything that happens until the end of a cycle, in order."""
        while True:
            done_s = self._backend.next_s
            user_s = self._asks[0][0] if self._asks else math.inf
            arrival_s = self._arrivals[-1][0] if self._arrivals else math.inf
            next_s = min(done_s, user_s, arrival_s)
            if next_s > to_s:
                return
            if done_s == next_s:
                self._answer()
            elif user_s == next_s:
                now_s, _, user = heappop(self._asks)
                if user.number < self._there[user.crowd]:
                    self._ask(now_s, self.crowds[user.crowd].choose(self._draws[user]), user)
            else:
                now_s, index = self._arrivals.pop()
                self._ask(now_s, self.crowds[index].choose(self._draw_of(index)), None)

    def _draw_of(self, index: int) -> Random:
        return self._draws.setdefault(_User(index, -1), source(self.seed, index, "kinds"))

    def _later(self, at_s: float, user: _User) -> None:
        self._count += 1
        heappush(self._asks, (at_s, self._count, user))

    def _bucket(self, ask: Ask) -> tuple[str, Steered]:
        name = ask.kind if self.variant.per else ""
        if name not in self._buckets:
            document = {key: value for key, value in self.variant.policy.items() if key not in ("name", "match", "per")}
            self._buckets[name] = Steered(document, seed=self.seed + len(self._buckets))
        return name, self._buckets[name]

    def _ask(self, now_s: float, ask: Ask, user: _User | None) -> None:
        _, bucket = self._bucket(ask)
        ticket = bucket.ask(now_s, CLASS_NUMBERS[ask.criticality])
        if ticket is not None:
            record = bucket.record()
            quality = 1.0 if record is None or record.shedding is None else record.shedding.quality
            self._backend.admit(now_s, _Held(user, ask, quality, bucket, ticket))
            return
        self._tally[like(int(now_s), ask, "refused", 0.0, 1.0)] += 1
        self._think(now_s, user, is_refused=True)

    def _answer(self) -> None:
        done = self._backend.pop()
        held, latency_s = done.ticket, done.at_s - done.since_s
        assert isinstance(held, _Held)
        held.bucket.settle(done.at_s, held.ticket, 1.0, latency_s=latency_s)
        if held.user is None or held.user.number < self._there[held.user.crowd]:
            self._tally[like(int(done.at_s), held.ask, "served", latency_s * 1000, held.quality)] += 1
            self._think(done.at_s, held.user, is_refused=False)

    def _think(self, now_s: float, user: _User | None, *, is_refused: bool) -> None:
        if user is not None:
            pause_s = self.crowds[user.crowd].pause_s(self._draws[user], is_refused=is_refused)
            self._later(now_s + pause_s, user)

    def _note(self, now_s: float, name: str, bucket: Steered) -> None:
        record = bucket.record()
        if record is not None and record.shedding is not None:
            shed = record.shedding
            in_flight = 0.0 if record.slots is None else record.slots.count
            self.points.append(
                Point(now_s, name, shed.quality, tuple(shed.limits), tuple(shed.rates), in_flight, int(shed.state))
            )


def _rate(crowd: Crowd, now_s: float) -> float:
    for phase, start_s in zip(reversed(crowd.phases), reversed(crowd.starts_s()), strict=True):
        if now_s >= start_s:
            return phase.rate
    return 0.0
