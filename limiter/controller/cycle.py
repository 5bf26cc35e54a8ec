"""The cycle of one slot under one lease: what changed → records → pure steps → what moved, written back.

read        only buckets that were touched since they were read last; an idle one costs nothing
            and those whose overload control has something to do by now: throttles are released while nobody asks, too
written     only what moved: caps and charges by more than MOVE_MIN, changes of mechanism, overload control
kept        each bucket's state and reasoning, about once a second, in turns

Reading twice loses nothing and values are absolute, so a call that fails is not repeated: the next cycle does as well.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection
from typing import NamedTuple
from zlib import crc32

from msgspec.structs import replace

from limiter.controller.overload import Guard
from limiter.controller.plan import Plan, Terms
from limiter.model.bucket.bucket import Record
from limiter.model.control import kept_state, sampling, shares
from limiter.model.control.caps import Reason
from limiter.model.control.cycle import HELD, Moved, State, step
from limiter.model.control.kept_state import REASONS_MAX
from limiter.model.control.sampling import Counters
from limiter.model.overload.shedding import ShedOrder
from limiter.model.overload.signals import Report
from limiter.store.clock import StoreClock
from limiter.store.keys import Slot
from limiter.store.layout import read_record
from limiter.store.steering import Lease, Steer, Steering, SteerStatus

SAMPLE_MAX = 2048
"""Names in one sample: bounds how long the store is busy with it."""

SAMPLES_MAX = 8
"""Samples in one cycle. What is left waits for the next."""

MOVE_MIN = 1e-3
"""Relative: what moves by less is not written."""

FIRST_CYCLES = 10.0
"""Before a demand was followed for so long it is not known."""

TURNS = 10
"""States are kept in turns, a part of the buckets each cycle."""

FORGET_S = 60.0
"""A bucket that nobody touched for so long is no longer held in memory; its state in the store lives on."""


class Bucket:
    """What the controller holds of one bucket."""

    __slots__ = ("demand", "guard", "reasons", "seen_us", "state", "terms", "turn")

    def __init__(self, name: str, terms: Terms, kept: kept_state.KeptState | None) -> None:
        self.terms = terms
        self.state = State() if kept is None else kept.state
        self.reasons: deque[Reason] = deque(() if kept is None else kept.reasons, REASONS_MAX)
        self.seen_us = 0.0
        self.turn = crc32(name.encode()) % TURNS
        self.demand = Demand()
        self.guard = Guard(kept) if terms.sheds else None

    def adopt(self, terms: Terms) -> None:
        """Go by a changed policy."""
        if terms.overload is None:
            self.guard = None
        elif self.guard is None:
            self.guard = Guard(None)
        elif terms.overload != self.terms.overload:
            self.guard.reconsider()
        self.terms = terms

    def packed(self) -> bytes:
        """State and reasoning, as they are kept."""
        guard = self.guard
        if guard is None:
            return kept_state.pack(self.state, self.reasons)
        return kept_state.pack(self.state, self.reasons, guard.state, guard.notes)


class Demand(NamedTuple):
    """How much of a divided limit is asked for in one partition, admitted or not (B5)."""

    counters: Counters | None = None
    rate: float = 0.0
    """Work units a second, smoothed, beginning with none."""
    cycles: float = 0.0
    """For how long it has been followed."""

    def followed(self, counters: Counters, work_per_request: float, *, cycle_s: float) -> Demand:
        """The demand after a reading; what was refused counts as if it had done what others do."""
        sample = None if self.counters is None else sampling.difference(self.counters, counters)
        if sample is None:
            return self._replace(counters=counters)
        asked = (sample.work + sample.refused * work_per_request) / sample.elapsed_s
        cycles = sample.elapsed_s / cycle_s
        return Demand(counters, shares.follow(self.rate, asked, cycles=cycles), self.cycles + cycles)

    def at(self, now_us: float, *, cycle_s: float) -> float:
        """Work units a second at a time until which nobody else has asked. NaN while there is no telling yet (F-P8)."""
        if self.counters is None:
            return 0.0
        idle_cycles = max(0.0, (now_us - self.counters.read_us) / 1e6 / cycle_s - 1)
        cycles = self.cycles + idle_cycles
        if cycles < FIRST_CYCLES:
            return math.nan
        rate = shares.follow(self.rate, 0.0, cycles=idle_cycles) if idle_cycles else self.rate
        return rate / shares.weight(cycles)


class SlotCycle:
    """One slot, steered for as long as the lease holds."""

    def __init__(self, steering: Steering, slot: Slot, lease: Lease, plan: Plan, *, cycle_s: float) -> None:
        self.slot = slot
        self.lease = lease
        self.clock = StoreClock()
        self.buckets: dict[str, Bucket] = {}
        self.lock = asyncio.Lock()
        """Held while values are decided and written: a cap must not be set by a share that has moved meanwhile."""
        self._steering = steering
        self._plan = plan
        self._cycle_s = cycle_s
        self._unread: dict[str, None] = {}
        self._known_us = 0.0
        self.read_us = 0.0
        """When (the store's time) it was last known what had changed; 0 before the first time."""
        self._dirty: list[set[str]] = [set() for _ in range(TURNS)]
        self._turn = 0
        self._swept_us = 0.0
        self._watched: dict[str, float] = {}
        """Buckets whose overload control is not at rest, and when (us) it has something to do."""

    @property
    def is_watching(self) -> bool:
        """Whether there is something to do soon even if nobody asks for anything."""
        return bool(self._watched)

    def adopt(self, plan: Plan) -> None:
        """Go by changed policies from now on; what they no longer steer is forgotten."""
        self._plan = plan
        for name, bucket in list(self.buckets.items()):
            terms = plan.find(name)
            if terms is None:
                self._forget(name)
            else:
                bucket.adopt(terms)
                self._watch(name, bucket.guard, at_once=True)

    async def run(self) -> int:
        """One cycle; how many buckets were looked at. `LeaseLost`, and what the store raises, pass through."""
        async with self.lock:
            now_us, is_drained = await self._sample()
            touched = dict(self._unread)
            names = list(touched | dict.fromkeys(self._overdue(now_us)))
            await self._recall([name for name in names if name not in self.buckets])
            raws = await self._steering.raw_records(self.slot, names) if names else {}
            reports = await self._reports(names)
            self._unread.clear()
            self.read_us = now_us
            due = self._due(is_idle=not names)
            rows = self._decide(names, raws, touched, reports, now_us, due)
            rows += [self._kept(name, now_us) for name in due if name not in raws and name in self.buckets]
            if is_drained:
                self._known_us = now_us
            await self._write(rows, due)
            self._sweep(now_us)
            return len(names)

    async def flush(self) -> None:
        """Store what is not stored yet, for the next owner."""
        async with self.lock:
            names = set().union(*self._dirty)
            rows = [self._kept(name, self.clock.now_us()) for name in names if name in self.buckets]
            if rows:
                await self._steering.steer(self.slot, self.lease, rows)

    async def give(self, rows: list[Steer]) -> list[SteerStatus]:
        """Write shares; the caller holds no lock."""
        async with self.lock:
            return await self._steering.steer(self.slot, self.lease, rows)

    async def records(self, names: list[str]) -> dict[str, Record]:
        """The records of some buckets as they are now."""
        return await self._steering.records(self.slot, names)

    async def _sample(self) -> tuple[int, bool]:
        """Take the names of what changed: the store's time, and whether all were taken, so that the others rested."""
        for _ in range(SAMPLES_MAX):
            sampled = await self._steering.sample(self.slot, self.lease, SAMPLE_MAX)
            self.clock.observe(sampled.now_us)
            buckets, find = self.buckets, self._plan.find
            # What is held has terms; it need not be looked up again.
            steered = [name for name in sampled.names if name in buckets or find(name) is not None]
            self._unread |= dict.fromkeys(steered)
            # The same name may stand there twice and comes once: a few fewer do not mean that there are no more.
            if len(sampled.names) < SAMPLE_MAX // 2:
                return sampled.now_us, True
        return sampled.now_us, False

    async def _recall(self, names: list[str]) -> None:
        """Continue with buckets from where their last owner stopped."""
        if not names:
            return
        kept = await self._steering.states(self.slot, names)
        for name in names:
            terms = self._plan.find(name)
            if terms is not None:
                self.buckets[name] = Bucket(name, terms, kept_state.unpack(kept.get(name)))

    def _overdue(self, now_us: float) -> list[str]:
        """Buckets that have to be looked at whether anybody touched them or not."""
        return [name for name, due_us in self._watched.items() if due_us <= now_us]

    async def _reports(self, names: list[str]) -> dict[str, tuple[Report, ...]]:
        """What services say of their load (G5), to those of the buckets that listen."""
        buckets = self.buckets
        listening = [name for name in names if name in buckets and buckets[name].terms.limit.listens]
        return await self._steering.signals(self.slot, listening) if listening else {}

    async def _write(self, rows: list[Steer], due: set[str]) -> None:
        if not rows:
            return
        try:
            statuses = await self._steering.steer(self.slot, self.lease, rows)
        except BaseException:
            for name in due:
                self._mark(name)
            for name in [row.bucket for row in rows if row.overload is not None]:
                self._reconsider(name)
            raise
        for row, status in zip(rows, statuses, strict=True):
            if status is not SteerStatus.DONE:
                self._forget(row.bucket)

    def _decide(
        self,
        names: list[str],
        raws: dict[str, bytes],
        touched: Collection[str],
        reports: dict[str, tuple[Report, ...]],
        now_us: int,
        due: set[str],
    ) -> list[Steer]:
        """Step every bucket that was read: what to write. The hot loop: some microseconds a bucket."""
        rows: list[Steer] = []
        buckets = self.buckets
        for name in names:
            raw = raws.get(name)
            record = None if raw is None else read_record(raw)
            bucket = buckets.get(name)
            if record is None or bucket is None:  # gone, or its policy went while it was read
                self._forget(name)
                continue
            moved = self._steered(bucket, record, now_us) if name in touched else HELD
            order = None if bucket.guard is None else self._shed(name, bucket, record, reports.get(name, ()), now_us)
            bucket.seen_us = now_us
            is_due = name in due
            if not is_due:
                self._dirty[bucket.turn].add(name)
            if is_due or moved is not HELD or order is not None:
                row = _row(name, bucket, record, moved, order, now_us, is_due=is_due)
                if row is not None:
                    rows.append(row)
        return rows

    def _steered(self, bucket: Bucket, record: Record, now_us: int) -> Moved:
        """Step the cap, the charge and the mechanism."""
        terms = bucket.terms
        bucket.state, moved = step(
            bucket.state, record, terms.control, now_us=now_us, since_us=self._known_us, cycle_s=self._cycle_s
        )
        if terms.partitions > 1:
            self._follow_demand(bucket, record, now_us)
        if moved.reason is not None:
            bucket.reasons.append(moved.reason)
        return moved

    def _shed(
        self, name: str, bucket: Bucket, record: Record, reports: tuple[Report, ...], now_us: int
    ) -> ShedOrder | None:
        """Step overload control."""
        guard, params = bucket.guard, bucket.terms.overload
        assert guard is not None
        assert params is not None
        order = guard.step(record, reports, params, now_us=now_us, since_us=self._known_us)
        self._watch(name, guard)
        return order

    def _watch(self, name: str, guard: Guard | None, *, at_once: bool = False) -> None:
        """Remember when overload control of a bucket has something to do, if ever."""
        due_us = math.inf if guard is None else 0.0 if at_once else guard.due_us
        if due_us < math.inf:
            self._watched[name] = due_us
        else:
            self._watched.pop(name, None)

    def _follow_demand(self, bucket: Bucket, record: Record, now_us: int) -> None:
        counters = sampling.read(record, now_us)
        if counters is not None:
            work_per_request = bucket.state.load.work_per_request or 1.0
            if bucket.terms.limit.counts:
                # What is divided are requests: those that were charged, whatever work is settled.
                counters, work_per_request = replace(counters, settles=0.0), 1.0
            bucket.demand = bucket.demand.followed(counters, work_per_request, cycle_s=self._cycle_s)

    def _due(self, *, is_idle: bool) -> set[str]:
        """The buckets whose state is to be kept in this cycle: a part of them, or all where nothing else happens."""
        if is_idle:
            due = set().union(*self._dirty)
            self._dirty = [set() for _ in range(TURNS)]
            return due
        self._turn = (self._turn + 1) % TURNS
        due, self._dirty[self._turn] = self._dirty[self._turn], set()
        return due

    def _kept(self, name: str, now_us: int) -> Steer:
        bucket = self.buckets[name]
        return Steer(name, bucket.terms.limit.params(now_us), state=bucket.packed())

    def _reconsider(self, name: str) -> None:
        """It is not known whether an order of overload control was set: compare, and set it again."""
        bucket = self.buckets.get(name)
        if bucket is not None and bucket.guard is not None:
            bucket.guard.reconsider()
            self._watch(name, bucket.guard, at_once=True)

    def _mark(self, name: str) -> None:
        bucket = self.buckets.get(name)
        if bucket is not None:
            self._dirty[bucket.turn].add(name)

    def _forget(self, name: str) -> None:
        bucket = self.buckets.pop(name, None)
        self._watched.pop(name, None)
        if bucket is not None:
            self._dirty[bucket.turn].discard(name)

    def _sweep(self, now_us: int) -> None:
        """Let go of what nobody uses, now and then."""
        if now_us - self._swept_us < FORGET_S / 4 * 1e6:
            return
        self._swept_us = now_us
        oldest_us = now_us - FORGET_S * 1e6
        for name in [name for name, bucket in self.buckets.items() if bucket.seen_us < oldest_us]:
            self._forget(name)


def _row(
    name: str, bucket: Bucket, record: Record, moved: Moved, order: ShedOrder | None, now_us: int, *, is_due: bool
) -> Steer | None:
    """What is to be written of a bucket; None if nothing is."""
    cap, charge, requests_for = moved.cap, moved.charge, moved.requests_for
    if cap is not None and requests_for is None and abs(cap - record.rate) <= MOVE_MIN * record.rate:
        cap = None
    if charge is not None and abs(charge - (record.charge or bucket.terms.limit.charge)) <= MOVE_MIN * charge:
        charge = None
    if cap is None and charge is None and requests_for is None and order is None and not is_due:
        return None
    state = bucket.packed() if is_due else None
    return Steer(name, bucket.terms.limit.params(now_us), cap, charge, requests_for, None, 0, state, order)
