"""Buckets of one policy in a store that is only memory, decided and steered by the code that runs in production.

    ask, settle    limiter.model.ledger.ledger, the reference of the scripts
    look           limiter.controller.slot_cycle.SlotCycle, one for each partition, on records packed and unpacked as in
                   the store; limiter.controller.balance.Balance, where a limit is divided over partitions

Three things make it fast, and a test compares each with the reference used plainly. The ledger's records are changed in
place: nobody asks for a dry run here. Requests that come at the same moment and are alike may be asked for together
(`ask_many`): the reference decides on the first, and the others pass as long as the balance that each finds is enough.
Those that overload control turns away are counted together, once a cycle. Time is virtual: the store says what time it
is, and the controller believes it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, TypeVar

from limiter.controller.balance import Balance
from limiter.controller.plan import Plan, make_plans
from limiter.controller.slot_cycle import SlotCycle
from limiter.model.bucket.admission import part_of_minimum
from limiter.model.bucket.bucket import Params, Record, advance, fresh, keep, refill
from limiter.model.bucket.operations import Acquire, AcquireAnswer, Charge, Lot, Settle, Verdict, Want
from limiter.model.control.stewardship import Lease, Steer, SteerStatus
from limiter.model.ledger.correction import Tombstone, settle_bucket
from limiter.model.ledger.judgement import commit, commit_class, commit_place
from limiter.model.ledger.ledger import Ledger
from limiter.model.overload import shedding
from limiter.model.overload.signals import Report
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy_set
from limiter.store.call_layout import LeaseLost
from limiter.store.clock import StoreClock
from limiter.store.keys import Slot
from limiter.store.layout import pack_record
from limiter.store.scripts import Sampled
from limiter.store.steering import Steering

CYCLE_S = 0.1
TOUCHED_US = 200_000
AGE_MAX_US = 50_000
"""A record that was brought to now longer ago is asked itself whom it turns away."""
BALANCE_S = 0.5
TTL_US = 60_000_000
NAMESPACE = "default"
BUCKET = "judged"
BEGIN_US = 1_700_000_000_000_000
"""Virtual time begins at a time that a store's clock might show."""

CLASSES = tuple(Criticality)
CRITICAL = CLASSES.index(Criticality.CRITICAL)

T = TypeVar("T")


class Ticket(NamedTuple):
    """A reservation: so many requests that were granted together."""

    acquired_us: int
    charge: float
    """Of each."""
    in_requests: bool
    class_number: int
    partition: int
    requests: int = 1
    weight: float = 1.0
    expected_ms: float = math.nan
    name: str = ""
    """Of a reservation that reports progress; what is settled once needs none."""


class StoreLost(Exception):
    """The store does not answer."""


class MemorySlot(Ledger):
    """One slot of the store."""

    def _draft(self, bucket: str, params: Params, now_us: int) -> Record:
        record = self.records.get(bucket)
        if record is None:
            return fresh(params, now_us)
        advance(record, params, now_us)
        return record

    def _found(self, charge: Charge, now_us: int) -> dict[str, Record]:
        record = self.records.get(charge.bucket)
        if record is not None:
            refill(record, now_us)
            return {charge.bucket: record}
        assert charge.params is not None
        return {charge.bucket: fresh(charge.params, now_us)}

    def ask(self, operation: Acquire, now_us: int) -> AcquireAnswer:
        """Decide on one request."""
        want = operation.wants[0]
        return self._decide(operation, {want.bucket: self._draft(want.bucket, want.params, now_us)}, now_us)

    def let_in(self, operation: Acquire, now_us: int) -> float:
        """Count a request that overload control lets in and whose bucket has more than enough: what it was charged."""
        want, lot = operation.wants[0], operation.lot
        assert lot is not None
        record = self.records[want.bucket]
        refill(record, now_us)
        verdict, taken = commit(
            record, want.params, Verdict.PASSED, want.charge, granted=True, requests=1.0, counted=1.0, now_us=now_us
        )
        self._touch(want.bucket, record)
        commit_place(record, want.params, verdict, taken, operation)
        commit_class(record, verdict, lot, requests=1.0)
        return taken

    def settle_once(self, operation: Settle, now_us: int) -> None:
        """Settle a reservation that nobody will settle again."""
        charge = operation.charges[0]
        record = self.records.get(charge.bucket)
        if now_us > operation.deadline_us + operation.late_us:
            return
        if record is None:
            self.settle([operation], now_us)
            self.tombstones.clear()
            return
        refill(record, now_us)
        mark = Tombstone(accounted=[charge.charge], uncollected=[0.0], deadline_us=float(operation.deadline_us))
        mark.late = now_us > mark.deadline_us
        self._touch(charge.bucket, record)
        settle_bucket(record, mark, 0, operation, now_us)
        self._move_places(operation, {charge.bucket: record}, mark.deadline_us, renewed=False)

    def forget_expired(self, now_us: int) -> None:
        """Move the times to live of records, and drop those whose time has passed."""
        for name, record in list(self.records.items()):
            if record.kept_until_s and record.kept_until_s < now_us / 1e6:
                del self.records[name]
            elif record.updated_us > now_us - TOUCHED_US:
                keep(record, now_us)


class MemoryClock(StoreClock):
    """Virtual time, as the store says it."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store

    def now_us(self) -> int:
        """The store's time."""
        return self._store.now_us


class MemoryStore(Steering):
    """A store in memory, as the controller sees it. While it is lost every call fails."""

    def __init__(self, partitions: int) -> None:
        self.owner = b"controller"
        self.slots = [MemorySlot() for _ in range(partitions)]
        self.now_us = BEGIN_US
        self.is_lost = False
        self.memory: dict[tuple[int, str], bytes] = {}
        """The policies' memories, by partition and limit (R15)."""
        self.reports: dict[str, tuple[Report, ...]] = {}

    def _slot(self, slot: Slot) -> MemorySlot:
        if self.is_lost:
            raise StoreLost
        return self.slots[slot.partition]

    async def take(self, slot: Slot) -> Lease | None:
        """Own the slot."""
        return self._slot(slot).take(self.owner, 2_000)

    async def sample(self, slot: Slot, lease: Lease, count: int) -> Sampled:
        """Names of what changed."""
        names = self._slot(slot).sample(lease, count)
        if names is None:
            raise LeaseLost
        return Sampled(self.now_us, names)

    async def raw_records(self, slot: Slot, names: Sequence[str]) -> dict[str, bytes]:
        """Records as bytes."""
        records = self._slot(slot).records
        return {name: pack_record(records[name]) for name in names if name in records}

    async def states(self, slot: Slot, names: Sequence[str]) -> dict[str, bytes]:
        """The states that the controller kept."""
        states = self._slot(slot).states
        return {name: states[name] for name in names if name in states}

    async def memories(self, slot: Slot, limits: Sequence[str]) -> dict[str, bytes]:
        """The memories of some limits."""
        self._slot(slot)
        return {limit: self.memory[slot.partition, limit] for limit in limits if (slot.partition, limit) in self.memory}

    async def keep_memory(self, slot: Slot, limit: str, memory: bytes, *, life_s: int) -> None:
        """Keep the memory of a limit."""
        self._slot(slot)
        self.memory[slot.partition, limit] = memory

    async def signals(self, slot: Slot, names: Sequence[str]) -> dict[str, tuple[Report, ...]]:
        """The loads that services reported."""
        return {name: self.reports[name] for name in names if name in self.reports}

    async def steer(self, slot: Slot, lease: Lease, rows: Sequence[Steer]) -> list[SteerStatus]:
        """Set what was decided."""
        statuses = self._slot(slot).steer(lease, rows, self.now_us)
        if statuses is None:
            raise LeaseLost
        return statuses


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the store's."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store

    def time(self) -> float:
        """Virtual seconds."""
        return (self._store.now_us - BEGIN_US) / 1e6


class Steered:
    """One policy's bucket, in one partition or divided over several."""

    def __init__(
        self, document: Mapping[str, Any], *, partitions: int = 1, seed: int = 1, cycle_s: float = CYCLE_S
    ) -> None:
        spread: dict[str, Any] = {"partitions": partitions, "partition_by": ["shard"]} if partitions > 1 else {}
        policies = read_policy_set({"policies": [{"name": BUCKET, **document}], "namespaces": {NAMESPACE: spread}})
        self._limit = Limit(policies.policies[0], partitions=partitions)
        self._params = self._limit.params(BEGIN_US)
        self.store = MemoryStore(partitions)
        self._plan = make_plans(policies).get(NAMESPACE) or Plan(NAMESPACE, partitions, {})
        self._cycle_s = cycle_s
        self._chance = Random(f"draws {seed}")  # noqa: S311
        self._wants = [self._want(criticality) for criticality in CLASSES]
        self._asks = [Acquire((want,), ttl_us=TTL_US) for want in self._wants]
        self._expected_ms = [self._limit.expected_ms(None, {}, criticality) for criticality in CLASSES]
        self._draws = self._limit.sheds
        self._turned_away = [0] * len(CLASSES)
        self._loop = VirtualLoop(self.store) if partitions > 1 else None
        self._cycles: list[SlotCycle] = []
        self._balance = Balance(self._plan, cycle_s=cycle_s)
        self._balanced_s = 0.0
        self.begin()

    def _want(self, criticality: Criticality) -> Want:
        limit = self._limit
        return Want(BUCKET, self._params, limit.minimums[criticality], limit.charge, limit.how_unsaid)

    def _weighing(self, class_number: int, weight: float) -> Acquire:
        """A request whose kind weighs more or less than others, as a node would ask for it (W12, W16)."""
        want = self._wants[class_number]
        counted = weight if self._limit.weighs_requests else 1.0
        return Acquire((want.but(charge=want.charge * weight, weight=counted),), ttl_us=TTL_US)

    def begin(self) -> None:
        """A controller begins, with what the store has of the last one."""
        self._cycles = []
        for slot in self._plan.slots:
            lease = run(self.store.take(slot))
            assert lease is not None
            cycle = SlotCycle(self.store, slot, lease, self._plan, cycle_s=self._cycle_s)
            cycle.clock = MemoryClock(self.store)
            self._cycles.append(cycle)
        self._balance = Balance(self._plan, cycle_s=self._cycle_s)

    def end(self) -> None:
        """The controller stops in order: it keeps what it knows. Without this, it has crashed."""
        for cycle in self._cycles:
            run(cycle.flush())

    def empty_store(self) -> None:
        """The store loses all that it has, and is there again at once."""
        for slot in self.store.slots:
            slot.records.clear()
            slot.states.clear()
            slot.tombstones.clear()
            slot.touched.clear()
        self.store.memory.clear()

    def new_key(self) -> None:
        """Another key of the policy asks from now on, of which only the policy's memory knows anything (R15)."""
        self.end()
        for slot in self.store.slots:
            slot.records.clear()
            slot.states.clear()
        self.begin()

    def close(self) -> None:
        """Give back what the loop holds."""
        if self._loop is not None:
            self._loop.close()

    def record(self, partition: int = 0) -> Record | None:
        """The bucket's record, once anybody has asked."""
        return self.store.slots[partition].records.get(BUCKET)

    @property
    def overloaded(self) -> bool:
        """True while callers are told to slow down."""
        record = self.record()
        return record is not None and record.shedding is not None and record.shedding.state == shedding.State.OVERLOADED

    def standing(self) -> tuple[float, float, bool]:
        """Cap of all partitions (requests per second; NaN while work counts), charge, and whether requests count."""
        records = [record for record in map(self.record, range(len(self.store.slots))) if record is not None]
        counts = bool(records) and all(record.counts_requests for record in records)
        cap = sum(record.rate for record in records) if counts else math.nan
        return cap, records[0].charge if records else 0.0, counts

    def ask(
        self,
        now_s: float,
        class_number: int = CRITICAL,
        partition: int = 0,
        *,
        weight: float = 1.0,
        requested_ms: float | None = None,
    ) -> Ticket | None:
        """A ticket for one request if it may go ahead; `requested_ms` is how soon it says to expect its answer."""
        if self.store.is_lost:
            return None
        expected_ms = self._expected_ms[class_number]
        if requested_ms is not None:
            expected_ms = self._limit.expected_ms(requested_ms, {}, CLASSES[class_number])
        now_us = BEGIN_US + int(now_s * 1e6)
        operation = self._asks[class_number] if weight == 1 else self._weighing(class_number, weight)
        if self._draws:
            lot = Lot(class_number, self._chance.random(), expected_ms)
            operation = operation.but(lot=lot)
            if self._is_known(now_us):
                if self._turns_away(lot):
                    self._turned_away[class_number] += 1
                    return None
                charge = self.store.slots[0].let_in(operation, now_us)
                return Ticket(now_us, charge, False, class_number, 0, 1, weight, expected_ms)
        answer = self.store.slots[partition].ask(operation, now_us)
        if not answer.granted:
            return None
        part = answer.buckets[0]
        return Ticket(now_us, part.charge, part.in_requests, class_number, partition, 1, weight, expected_ms)

    def _is_known(self, now_us: int) -> bool:
        """True if the record says at once whether it lets a request in: there is enough work left, and neither time
        nor tokens have to move first."""
        record = self.record()
        return (
            record is not None
            and len(self.store.slots) == 1
            and now_us - record.updated_us <= AGE_MAX_US
            and not record.counts_requests
            and record.balance > record.capacity / 2
            and record.shedding is not None
            and not any(record.shedding.rates)
        )

    def _turns_away(self, lot: Lot) -> bool:
        """True if overload control turns a request away, by a limit or a share."""
        record = self.record()
        assert record is not None
        assert record.shedding is not None
        turn = shedding.turns_away(
            record.shedding,
            lot.class_number,
            lot.draw,
            in_flight=0.0 if record.slots is None else record.slots.count,
            expected_ms=lot.expected_ms,
            over_committed=False,
        )
        record.shedding.ahead[lot.class_number] = turn.ahead
        return turn.is_refused

    def count_turned_away(self, now_us: int) -> None:
        """Count those who were turned away as the reference would have, one by one."""
        record = self.record()
        for number, requests in enumerate(self._turned_away):
            if requests and record is not None:
                many, params = float(requests), self._params
                verdict = Verdict.TURNED_AWAY
                commit(record, params, verdict, 0.0, granted=False, requests=many, counted=many, now_us=now_us)
                commit_class(record, verdict, Lot(number, 0.0), requests=many)
                self._turned_away[number] = 0

    def ask_many(self, now_s: float, asked: int, partition: int = 0) -> Ticket | None:
        """How many of so many alike requests go ahead that come at the same moment, in a policy without overload."""
        assert not self._draws
        first = self.ask(now_s, CRITICAL, partition)
        if asked == 1 or self.store.is_lost:
            return first
        record = self.record(partition)
        assert record is not None
        want, more, charge = self._wants[CRITICAL], 0, 0.0
        if first is not None:
            part = record.capacity / want.params.whole_capacity
            minimum = part_of_minimum(want.minimum, part=part, capacity=record.capacity)
            charge = want.charge if first.in_requests else first.charge
            each = 1.0 if first.in_requests else charge
            more = min(asked - 1, 1 + math.floor((record.balance - minimum) / each) if record.balance >= minimum else 0)
        now_us = BEGIN_US + int(now_s * 1e6)
        for verdict, requests in ((Verdict.PASSED, more), (Verdict.BLOCKED, asked - 1 - more)):
            if requests:
                many, all_of_it = float(requests), charge * requests
                commit(
                    record, want.params, verdict, all_of_it, granted=True, requests=many, counted=many, now_us=now_us
                )
        return first if first is None else first._replace(requests=1 + more)

    def settle(
        self, now_s: float, ticket: Ticket, work: float, *, latency_s: float = math.nan, squares: float = 0.0
    ) -> None:
        """Report the work of granted requests; `squares` is the sum of the squares of what each of them did."""
        if self.store.is_lost:
            return
        slot, many = self.store.slots[ticket.partition], ticket.requests
        operation, now_us = self._settle(ticket, work, latency_s, final=True), BEGIN_US + int(now_s * 1e6)
        if ticket.name:
            slot.settle([operation], now_us)
            slot.tombstones.pop(ticket.name)
        else:
            slot.settle_once(operation, now_us)
        if many > 1:
            # A settle of many squares their mean: the rest of what each would have added.
            slot.records[BUCKET].work_squared += squares - work * work / many

    def report(self, now_s: float, ticket: Ticket, work: float) -> None:
        """Report progress: the work so far."""
        if not self.store.is_lost:
            operation = self._settle(ticket, work, math.nan, final=False)
            self.store.slots[ticket.partition].settle([operation], BEGIN_US + int(now_s * 1e6))

    def _settle(self, ticket: Ticket, work: float, latency_s: float, *, final: bool) -> Settle:
        weight, charge = ticket.weight, ticket.charge * ticket.requests
        return Settle(
            reservation=ticket.name,
            charges=(Charge(BUCKET, charge, weight, self._params, ticket.in_requests),),
            work=work,
            acquired_us=ticket.acquired_us,
            deadline_us=ticket.acquired_us + TTL_US,
            final=final,
            requests=float(ticket.requests),
            latency_ms=latency_s * 1000,
            expected_ms=ticket.expected_ms,
            class_number=ticket.class_number,
        )

    def look(self, now_s: float) -> None:
        """One cycle of the controller. A store that is lost costs the cycle, nothing else."""
        self.store.now_us = now_us = BEGIN_US + round(now_s * 1e6)
        self.count_turned_away(now_us)
        for slot in self.store.slots:
            slot.forget_expired(now_us)
        try:
            for cycle in self._cycles:
                run(cycle.run())
            if self._loop is not None and now_s - self._balanced_s >= BALANCE_S - 1e-9:
                self._balanced_s = now_s
                self._loop.run_until_complete(self._balance.run(self._cycles))
        except StoreLost:
            return


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("the store in memory makes nobody wait")
