"""Holders of slices in virtual time: a network that loses, doubles, delays and reorders, holders that die, pause and
are cut off, a store whose clock steps, and a meter that watches all that is admitted and all that could be.

The store is the reference model (`Ledger`), the holders are the client's own (`limiter.client.lease.holder.Lease`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from limiter.client.lease.holder import Grant, Lease
from limiter.model.bucket.bucket import Flags, Params, Record, refill
from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk, LeaseKind, LeaseWant
from limiter.model.bucket.lending import LendStatus, LendTerms, Said, Used
from limiter.model.bucket.operations import COVERED, Acquire, AcquireStatus, Want
from limiter.model.ledger.ledger import Ledger

LEASE_S = 3.0
EPOCH_S = 1_790_000_000.0
BUCKET = "limit"


@dataclass
class Meter:
    """A bucket of the limit's rate and capacity from which all that is admitted is taken: below zero, some window of w
    seconds has seen more than capacity + rate · w. After a change of policy the larger terms hold until every holder
    has heard."""

    rate: float
    capacity: float
    grace_s: float = LEASE_S + 1.5
    left: float = math.nan
    at_s: float = 0.0
    worst: float = 0.0
    """The most that was ever admitted beyond the limit."""
    terms: list[tuple[float, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin(0.0, self.rate, self.capacity)

    def begin(self, t: float, rate: float, capacity: float) -> None:
        """The limit is used for the first time from now on: it is full."""
        self.rate, self.capacity, self.left, self.at_s = rate, capacity, capacity, t
        self.terms = [(-math.inf, rate, capacity)]

    def change(self, t: float, rate: float, capacity: float) -> None:
        """Other terms from now on."""
        self.room(t)
        self.terms.append((t, rate, capacity))

    def room(self, t: float) -> float:
        """What may still be admitted at this moment."""
        edges = {t}
        for since, _, _ in self.terms:
            edges |= {edge for edge in (since, since + self.grace_s) if self.at_s < edge < t}
        for edge in sorted(edges):
            if edge > self.at_s:
                rate, capacity = self._in_force((self.at_s + edge) / 2)
                self.left = min(capacity, self.left + (edge - self.at_s) * rate)
                self.at_s = edge
        return self.left

    def _in_force(self, t: float) -> tuple[float, float]:
        rate = capacity = 0.0
        for i, (since, term_rate, term_capacity) in enumerate(self.terms):
            until = self.terms[i + 1][0] if i + 1 < len(self.terms) else math.inf
            if since <= t <= until + self.grace_s:
                rate, capacity = max(rate, term_rate), max(capacity, term_capacity)
        return rate, capacity

    def add(self, t: float, work: float) -> float:
        """Count what was admitted: how much is beyond the limit by now."""
        self.left = self.room(t) - work
        self.worst = max(self.worst, -self.left)
        return -self.left


class Holder:
    """A client somewhere, with a clock of its own."""

    is_idle = True

    def __init__(
        self,
        world: World,
        name: str,
        demand: float | Callable[[float], float],
        *,
        drift: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        self.world = world
        self.weight = weight
        self.name = name
        self.demand = demand
        self.drift = drift
        self.paused_until = self.cut_until = -1.0
        self.alive = True
        self.admitted = self.refused = 0.0
        self.lease = Lease(now_ns=self.clock_ns(world.t))

    @property
    def key(self) -> str:
        """The lease's name in the store; a new one each time it begins again."""
        return self.lease.holder

    def clock_ns(self, t: float) -> int:
        """This host's monotonic clock."""
        return int((t * (1.0 + self.drift) + 1000.0) * 1e9)

    def begin_again(self) -> None:
        """The store knows nothing of the lease any more."""
        self.lease = Lease(now_ns=self.clock_ns(self.world.t))

    def could_admit(self, t: float) -> float:
        """What this holder could grant at this moment."""
        now_ns = self.clock_ns(t)
        if not self.alive or now_ns >= self.lease.deadline_ns or not self.lease.slices:
            return 0.0
        one = self.lease.slices[0]
        one.refill(now_ns)
        return max(0.0, one.balance)


class World:
    """One limit, its holders and its plain callers."""

    def __init__(
        self,
        rate: float,
        capacity: float,
        *,
        seed: int,
        loss: float = 0.0,
        doubles: float = 0.0,
        slow: float = 0.0,
        bound: float = 0.0,
        need: float = 1.0,
        latency_s: tuple[float, float] = (0.0005, 0.02),
        repeat_s: float = 0.3,
        is_strict: bool = True,
        checks_potential: bool = True,
        slack: float = 1.0,
        partitions: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.partitions, self.share = partitions, 1.0 / partitions
        self.params = Params(
            flags=Flags.LENDS | (Flags.DIVIDED if partitions > 1 else Flags.LENDS),
            committed=rate * partitions,
            capacity=capacity * partitions,
            debt_max=60 * rate * partitions,
            partitions=partitions,
            lending=LendTerms(bound * partitions, need, LEASE_S * 1e6),
        )
        self.ledger = Ledger()
        self.meter = Meter(rate * slack, capacity + bound)
        self.slack = slack
        self.loss, self.doubles, self.slow, self.latency_s, self.repeat_s = loss, doubles, slow, latency_s, repeat_s
        self.is_strict, self.checks_potential = is_strict, checks_potential
        self.t = 0.0
        self.clock_offset = 0.0
        self.holders: dict[str, Holder] = {}
        self.violations: list[tuple[float, str, float]] = []
        self.plain_admitted = 0.0
        self.calls = self.leaps = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    # Time.

    def now_us(self) -> int:
        """The store's clock."""
        return int((self.t + self.clock_offset + EPOCH_S) * 1e6)

    def at(self, t: float, event: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._events, (t, self._count, event, args))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.t, _, event, args = heapq.heappop(self._events)
            event(*args)
        self.t = until

    # The network.

    def _delay(self) -> float:
        if self.slow and self.random.random() < self.slow:
            return self.random.uniform(0.05, 4.0)
        return self.random.uniform(*self.latency_s)

    def _send(self, holder: Holder, ask: LeaseAsk) -> None:
        if self.t < holder.cut_until:
            return
        for _ in range(2 if self.random.random() < self.doubles else 1):
            if self.random.random() >= self.loss:
                self.at(self.t + self._delay(), self._arrive, holder, ask)

    def _arrive(self, holder: Holder, ask: LeaseAsk) -> None:
        self.calls += 1
        ask = ask._replace(wants=tuple(want._replace(params=self.params) for want in ask.wants))
        answer = self.ledger.lend(ask, self.now_us())
        self.check()
        if ask.kind is LeaseKind.RENEW and self.random.random() >= self.loss:
            for _ in range(2 if self.random.random() < self.doubles else 1):
                self.at(self.t + self._delay(), self._answered, holder, ask, answer)

    def _answered(self, holder: Holder, ask: LeaseAsk, answer: LeaseAnswer) -> None:
        if self.t < holder.cut_until or not holder.alive or ask.lease != holder.key:
            return
        if self.t < holder.paused_until:
            self.at(holder.paused_until + 1e-4, self._answered, holder, ask, answer)
        elif answer.status is LendStatus.LENT:
            holder.lease.take(body_of(ask, answer), holder.clock_ns(self.t))
            self.check()
        elif answer.status is LendStatus.UNKNOWN and ask.number == holder.lease.number:
            holder.begin_again()

    # Holders.

    def join(self, holder: Holder) -> None:
        """A holder begins to ask."""
        self.holders[holder.name] = holder
        holder.lease = Lease(now_ns=holder.clock_ns(self.t))
        self.at(self.t, self._renew, holder)
        self.at(self.t + self._gap(holder), self._want, holder)

    def _renew(self, holder: Holder) -> None:
        if not holder.alive:
            return
        if self.t < holder.paused_until:
            self.at(holder.paused_until + self.random.random() * 1e-3, self._renew, holder)
            return
        ask = ask_of(holder, holder.lease.request(holder.clock_ns(self.t)), self.params)
        self._send(holder, ask)
        if self.repeat_s:
            self.at(self.t + self.repeat_s, self._repeat, holder, ask)
        self.at(self.t + self.random.uniform(0.9, 1.1), self._renew, holder)

    def _repeat(self, holder: Holder, ask: LeaseAsk) -> None:
        lease = holder.lease
        is_latest = ask.lease == holder.key and lease.number == ask.number and lease.taken != ask.number
        if holder.alive and self.t >= holder.paused_until and is_latest:
            self._send(holder, ask)
            self.at(self.t + self.repeat_s, self._repeat, holder, ask)

    def die(self, holder: Holder) -> None:
        """A holder ends without a word."""
        holder.alive = False
        self.holders.pop(holder.name, None)

    def give_back(self, holder: Holder) -> None:
        """A holder ends in order."""
        if not holder.alive or self.t < holder.paused_until or not holder.lease.slices:
            return
        body = holder.lease.returned(holder.clock_ns(self.t))
        self.die(holder)
        self._send(holder, ask_of(holder, body, self.params, kind=LeaseKind.RETURN))

    def demand_of(self, holder: Holder) -> float:
        """Requests a second that it is asked for."""
        return holder.demand(self.t) if callable(holder.demand) else holder.demand

    def _gap(self, holder: Holder) -> float:
        demand = self.demand_of(holder)
        gap = self.random.expovariate(demand) if demand > 0 else 0.5
        holder.is_idle = gap > 0.3 or demand <= 0  # look again soon: the demand may have changed
        return min(gap, 0.3)

    def _want(self, holder: Holder) -> None:
        if not holder.alive:
            return
        if self.t < holder.paused_until:
            self.at(holder.paused_until + self.random.random() * 1e-3, self._want, holder)
            return
        if not holder.is_idle and self.demand_of(holder) > 0:
            self.acquire(holder, 1.0)
        self.at(self.t + self._gap(holder), self._want, holder)

    def acquire(self, holder: Holder, work: float) -> bool:
        """One local decision."""
        if holder.lease.try_acquire(work, _now=lambda: holder.clock_ns(self.t)):
            holder.admitted += work
            self._admitted(work)
            return True
        holder.refused += work
        return False

    # Plain callers.

    def plain_stream(self, demand: float | Callable[[float], float]) -> None:
        """Callers without a lease."""

        def tick() -> None:
            rate = demand(self.t) if callable(demand) else demand
            if rate > 0:
                self.plain(1.0)
            self.at(self.t + (self.random.expovariate(rate) if rate > 0 else 0.5), tick)

        self.at(self.t, tick)

    def plain(self, work: float) -> bool:
        """One decision of the bucket itself."""
        acquire = Acquire((Want(BUCKET, self.params, 0.0, work, COVERED),))
        granted = self.ledger.acquire([acquire], self.now_us())[0].status is AcquireStatus.GRANTED
        if granted:
            self.plain_admitted += work
            self._admitted(work)
        return granted

    def change(self, rate: float, capacity: float) -> None:
        """Other terms of the policy, of the whole limit where it is divided."""
        self.params = replace(self.params, committed=rate, capacity=capacity, debt_max=60 * rate)
        self._changed()

    def move_share(self, share: float) -> None:
        """The controller gives this partition another share of the limit."""
        record = self.ledger.records.get(BUCKET)
        if record is not None and self.partitions > 1:
            record.share, record.share_partitions = share, self.partitions
            record.share_until_us = math.inf  # its end is another test's
            self.share = share
            self._changed()

    def _changed(self) -> None:
        terms = self.params
        assert terms.lending is not None
        # A bucket that nobody has asked yet is made full, by the new terms: no capacity of before is kept.
        heard = self.meter.change if BUCKET in self.ledger.records else self.meter.begin
        self.plain(0.0)
        heard(self.t, terms.committed * self.share * self.slack, (terms.capacity + terms.lending.bound) * self.share)

    # Watching.

    def _admitted(self, work: float) -> None:
        over = self.meter.add(self.t, work)
        if self.is_strict and over > self._tolerance:
            self.violations.append((self.t, "admitted", over))

    @property
    def _tolerance(self) -> float:
        """The store's clock counts whole microseconds."""
        return 1e-6 * self.meter.capacity + 4e-6 * max(rate for _, rate, _ in self.meter.terms)

    def bucket(self) -> Record | None:
        """The limit's record as it would be now."""
        record = self.ledger.records.get(BUCKET)
        if record is None:
            return None
        draft = replace(record, lent=None if record.lent is None else replace(record.lent))
        refill(draft, self.now_us())
        return draft

    def check(self) -> None:
        """All that could be admitted at this moment fits into the limit: stronger than what was."""
        if not (self.checks_potential and self.is_strict):
            return
        record = self.bucket()
        left = 0.0 if record is None else max(0.0, record.balance)
        left += sum(holder.could_admit(self.t) for holder in self.holders.values())
        room = self.meter.room(self.t)
        if left > room + self._tolerance:
            self.violations.append((self.t, "possible", left - room))

    def drain_all(self) -> None:
        """Everybody grants all that it can, at one moment."""
        holders = list(self.holders.values())
        self.random.shuffle(holders)
        for holder in holders:
            left = holder.could_admit(self.t)
            if self.t >= holder.paused_until and left > 1e-9:
                self.acquire(holder, left)
        record = self.bucket()
        if record is not None and record.balance > 1e-9:
            self.plain(record.balance)
        self.check()


def ask_of(holder: Holder, body: dict[str, Any], params: Params, *, kind: LeaseKind = LeaseKind.RENEW) -> LeaseAsk:
    """A holder's request, as the node hands it to the store."""
    wanted = body.get("work_rate", -1.0)
    said = body["slices"][0] if body["slices"] else {}
    held = said.get("tokens" if kind is LeaseKind.RETURN else "held", 0.0)
    ask = Said(held=held, wanted=wanted, debt=said.get("debt", 0.0), moved=said.get("moved", 0.0))
    used = Used(**body["used"])
    want = LeaseWant(BUCKET, params, ask, refused=used.refused)
    taken, weight = body["taken"], holder.weight
    return LeaseAsk(holder.key, body["number"], (want,), taken=taken, weight=weight, used=used, kind=kind)


def body_of(ask: LeaseAsk, answer: LeaseAnswer) -> dict[str, Any]:
    """An answer, as the node renders it."""
    (one,) = answer.slices
    row = {"policy": BUCKET, "mechanism": "work", "rate": one.rate, "capacity": one.capacity, "tokens": one.tokens,
           "share": one.share, "moved": one.moved}  # fmt: skip
    return {"lease": ask.lease, "number": ask.number, "expires_in_ms": LEASE_S * 1000, "slices": [row]}


def hostile(seed: int, *, leaps: bool = False) -> World:
    """A small random world in which everything that can go wrong does; run to its end.

    Some worlds are one partition of a divided limit; rates and capacities below are that partition's.
    """
    draw = random.Random(seed * 7919 + 13)
    rate = math.exp(draw.uniform(math.log(5), math.log(2000)))
    capacity = max(2.0, rate * draw.choice([0.02, 0.1, 0.5, 0.5, 1.0, 3.0]))
    drifts, is_bad = draw.random() < 0.3, draw.random() < 0.7
    world = World(
        rate,
        capacity,
        seed=seed,
        loss=draw.choice([0, 0.02, 0.1, 0.3]) * is_bad,
        doubles=draw.choice([0, 0.05, 0.3]) * is_bad,
        slow=draw.choice([0, 0.02, 0.2]) * is_bad,
        bound=0.0 if draw.random() < 0.8 else draw.uniform(1, capacity),
        latency_s=draw.choice([(0.0002, 0.002), (0.0005, 0.02), (0.01, 0.3)]),
        repeat_s=0.3 if seed % 2 else 0.0,
        is_strict=not leaps,
        slack=1 + 3e-4 * drifts,
        partitions=draw.choice([1, 1, 1, 2, 4]),
    )

    def demand() -> float:
        kind = draw.random()
        if kind < 0.2:
            return 0.0
        return min(60.0, rate * draw.uniform(0.01, 0.2)) if kind < 0.5 else min(120.0, rate * draw.uniform(0.3, 2))

    def join() -> None:
        name = f"h{draw.random()}"
        world.join(Holder(world, name, demand(), drift=draw.uniform(-3e-4, 3e-4) * drifts))

    def some(action: Callable[[Holder], None]) -> Callable[[], None]:
        def act() -> None:
            if world.holders:
                action(world.holders[draw.choice(sorted(world.holders))])

        return act

    def change() -> None:
        world.change(
            world.params.committed * math.exp(draw.uniform(-1.5, 1.0)),
            max(2.0 * world.partitions, world.params.capacity * math.exp(draw.uniform(-1.0, 0.7))),
        )

    def move_share() -> None:
        world.move_share(max(0.02, min(1.0, world.share * math.exp(draw.uniform(-0.7, 0.7)))))

    def pause(holder: Holder) -> None:
        length = draw.choice([0.2, 1.0, 2.9, 3.5, 8.0]) * draw.uniform(0.8, 1.2)
        holder.paused_until = max(holder.paused_until, world.t + length)

    def cut(holder: Holder) -> None:
        holder.cut_until = max(holder.cut_until, world.t + draw.uniform(0.5, 7.0))

    def owe(holder: Holder) -> None:
        """Work that cost far more than was charged."""
        if holder.alive and world.t >= holder.paused_until and holder.lease.slices:
            grant = holder.lease.try_acquire(0.0, _now=lambda: holder.clock_ns(world.t))
            if isinstance(grant, Grant):
                grant.settle(world.params.capacity * world.share * draw.uniform(0, 0.5))

    def step_back() -> None:
        world.clock_offset -= draw.choice([0.2, 0.9, 1.5, 10.0, 3600.0]) * draw.random()

    def leap() -> None:
        world.leaps += 1
        world.clock_offset += draw.choice([0.2, 2.0, 10.0, 3600.0]) * draw.random()

    acts: list[tuple[float, Callable[[], None]]] = [
        (1.0, some(world.die)), (2.0, some(pause)), (1.5, some(world.give_back)), (2.0, some(cut)), (2.0, join),
        (0.7, change if draw.random() < 0.4 else world.check), (0.7, step_back if draw.random() < 0.4 else world.check),
        (6.0, world.drain_all), (3.0, world.check), (0.5, some(owe)),
        (0.7 if world.partitions > 1 else 0.0, move_share),
    ]  # fmt: skip
    if leaps:
        acts.append((0.7, leap))
    pace = draw.choice([0.7, 3.0, 8.0])

    def event() -> None:
        draw.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()
        world.at(world.t + draw.expovariate(pace), event)

    for _ in range(draw.randint(1, 8)):
        world.at(draw.random() * draw.choice([0.01, 1, 5]), join)
    if draw.random() < 0.7:
        world.plain_stream(demand())
    world.at(0.3, event)
    world.run(draw.uniform(8, 25))
    world.drain_all()
    return world


YEAR_US = 31_536_000_000_000


def spend_a_quota(seed: int, *, is_calm: bool = False) -> tuple[float, float]:
    """Ten holders spend a quota of 1,000 units; how much they spent together, and what the store has left."""
    draw = random.Random(seed)
    begin_us = int(EPOCH_S * 1e6)
    params = Params(
        flags=Flags.QUOTA | Flags.LENDS,
        capacity=1000.0,
        debt_max=0.0,
        window_start_us=begin_us - YEAR_US // 2,
        window_end_us=begin_us + YEAR_US // 2,
        lending=LendTerms(lease_us=LEASE_S * 1e6),
    )
    ledger, t, spent, lost = Ledger(), 0.0, 0.0, 0.0 if is_calm else draw.choice([0.0, 0.05, 0.3])
    leases = [Lease(now_ns=0) for _ in range(10)]
    late: list[tuple[Lease, LeaseAsk]] = []
    while t < 60.0:
        t += 0.05
        now_ns, now_us = int(t * 1e9), begin_us + int(t * 1e6)
        for number, lease in enumerate(leases):
            spent += sum(bool(lease.try_acquire(1.0, _now=now_ns.__int__)) for _ in range(draw.randint(0, 3)))
            if draw.random() < 0.05:
                ask = _quota_ask(lease, lease.request(now_ns), params, LeaseKind.RENEW)
                late.append((lease, ask))
                if draw.random() >= lost:
                    _serve(ledger, lease, ask, now_us, now_ns, is_answered=draw.random() >= lost)
            if not is_calm and draw.random() < 0.003:
                if draw.random() < 0.5 and lease.slices:
                    ledger.lend(_quota_ask(lease, lease.returned(now_ns), params, LeaseKind.RETURN), now_us)
                leases[number] = Lease(now_ns=now_ns)  # it died, or has returned; another comes
        if late and draw.random() < 0.05:
            _serve(ledger, *draw.choice(late), now_us, now_ns, is_answered=draw.random() < 0.5)
    record = ledger.records["month"]
    return spent, record.balance


def _quota_ask(lease: Lease, body: dict[str, Any], params: Params, kind: LeaseKind) -> LeaseAsk:
    said = body["slices"][0] if body["slices"] else {}
    ask = Said(said.get("held", 0.0), body.get("work_rate", 20.0), said.get("spent", 0.0), said.get("period", 0.0))
    wants = (LeaseWant("month", params, ask),)
    return LeaseAsk(lease.holder, body["number"], wants, taken=body["taken"], used=Used(**body["used"]), kind=kind)


def _serve(ledger: Ledger, lease: Lease, ask: LeaseAsk, now_us: int, now_ns: int, *, is_answered: bool) -> None:
    answer = ledger.lend(ask, now_us)
    if not is_answered or ask.lease != lease.holder:
        return
    if answer.status is LendStatus.UNKNOWN and ask.number == lease.number:
        lease.begin_again(now_ns)
    elif answer.status is LendStatus.LENT:
        (one,) = answer.slices
        ends_in_ms = (one.moved - now_us) / 1000
        row = {
            "policy": "month",
            "mechanism": "quota",
            "tokens": one.tokens,
            "moved": 0.0,
            "period": one.moved,
            "ends_in_ms": ends_in_ms,
        }
        lease.take({"lease": "token", "number": ask.number, "expires_in_ms": LEASE_S * 1000, "slices": [row]}, now_ns)
