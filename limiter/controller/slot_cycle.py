"""The cycle of one slot under one lease: changed buckets → records → pure steps → changed values, written back.

read        buckets that were touched since they were last read; an idle one costs nothing
            and buckets whose overload control is due: throttles are released without requests, too
written     only values that moved: caps and charges by more than MOVE_MIN, changes of mechanism, overload control
kept        each bucket's state and reasoning, about once a second, in turns; less often with more than 10,000 active

Reading twice loses nothing and values are absolute, so a failed call is not repeated: the next cycle replaces it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from msgspec.structs import replace

from limiter.controller.overload_guard import Guard
from limiter.controller.plan import Plan, Terms
from limiter.model.bucket.bucket import Record
from limiter.model.control import kept_state, policy_memory, sampling, shares
from limiter.model.control.caps import MOVE_MIN, Reason
from limiter.model.control.cycle_step import HELD, NOTHING_KNOWN, Moved, State, step
from limiter.model.control.kept_state import REASONS_MAX
from limiter.model.control.policy_memory import PolicyMemory
from limiter.model.control.sampling import Counters, Seen
from limiter.model.overload.shedding import ShedOrder
from limiter.model.overload.signals import Report
from limiter.model.policy.limit import limit_of
from limiter.store.clock import StoreClock
from limiter.store.keys import Slot
from limiter.store.layout import read_plainly, read_record
from limiter.store.steering import Lease, Steer, Steering, SteerStatus

SAMPLE_MAX = 2048
"""Names in one sample, which bounds the time that the store spends on it."""

SAMPLES_MAX = 8
"""Samples in one cycle. The remaining names wait for the next cycle."""

LOOKED_MAX = 10_000
"""Buckets in one cycle. The others wait in the order in which they came: many active buckets have fair turns."""

FIRST_CYCLES = 10.0
"""Cycles after which a smoothed demand is trusted; before that it counts as unknown."""

TURNS = 10
"""Storing states is spread over so many cycles, each with a part of the buckets."""

STATES_MAX = 1_000
"""States stored in one cycle; those of more than ten times as many active buckets are stored less often."""

TELL_S = 1.0
TOLD_MAX = 64
"""Memories of limits that one call stores."""

FORGET_S = 60.0
"""A bucket that was not used for so long is dropped from memory; its state stays in the store."""


NEW = State()
"""Shared by all buckets of which nothing is known."""


class Bucket:
    """The controller's memory of one bucket."""

    __slots__ = ("demand", "guard", "is_heard", "reasons", "seen_us", "state", "terms", "turn")

    def __init__(self, name: str, terms: Terms, kept: kept_state.KeptState | None) -> None:
        self.terms = terms
        self.state = NEW if kept is None else kept.state
        self.reasons: tuple[Reason, ...] = () if kept is None else tuple(kept.reasons)
        self.seen_us = 0.0
        self.turn = crc32(name.encode()) % TURNS
        self.demand = NO_DEMAND
        self.is_heard = False
        """True once its policy's memory has learned from it."""
        self.guard = Guard(kept) if terms.sheds else None

    def adopt(self, terms: Terms) -> None:
        """Follow a changed policy."""
        if terms.overload is None:
            self.guard = None
        elif self.guard is None:
            self.guard = Guard(None)
        elif terms.overload != self.terms.overload:
            self.guard.reconsider()
        self.terms = terms

    @property
    def has_learned(self) -> bool:
        """True if the work of its requests is known, which is worth keeping after the bucket has expired (R15)."""
        state = self.state
        return state.caps.cost.is_known or state.moments.requests > 0

    def packed(self) -> bytes:
        """Return state and reasoning as bytes for the store."""
        guard = self.guard
        if guard is None:
            return kept_state.pack(self.state, self.reasons)
        return kept_state.pack(self.state, self.reasons, guard.state, guard.notes)


class Demand(NamedTuple):
    """Demand for a divided limit in one partition, admitted or not (B5)."""

    counters: Counters | None = None
    rate: float = 0.0
    """Work units per second, smoothed from zero."""
    cycles: float = 0.0
    """Cycles that the average covers."""

    def followed(self, counters: Counters, work_per_request: float, *, cycle_s: float) -> Demand:
        """Return the demand after a reading; a refused request counts with the work of an average one."""
        sample = None if self.counters is None else sampling.difference(self.counters, counters)
        if sample is None:
            return self._replace(counters=counters)
        asked = (sample.work + sample.refused * work_per_request) / sample.elapsed_s
        cycles = sample.elapsed_s / cycle_s
        return Demand(counters, shares.follow(self.rate, asked, cycles=cycles), self.cycles + cycles)

    def at(self, now_us: float, *, cycle_s: float) -> float:
        """Return work units per second at a time, without requests since the last reading; NaN if unknown (F-P8)."""
        if self.counters is None:
            return 0.0
        idle_cycles = max(0.0, (now_us - self.counters.read_us) / 1e6 / cycle_s - 1)
        cycles = self.cycles + idle_cycles
        if cycles < FIRST_CYCLES:
            return math.nan
        rate = shares.follow(self.rate, 0.0, cycles=idle_cycles) if idle_cycles else self.rate
        return rate / shares.weight(cycles)


NO_DEMAND = Demand()


class SlotCycle:
    """One slot, steered while the lease lasts."""

    def __init__(self, steering: Steering, slot: Slot, lease: Lease, plan: Plan, *, cycle_s: float) -> None:
        self.slot = slot
        self.lease = lease
        self.clock = StoreClock()
        self.buckets: dict[str, Bucket] = {}
        self.lock = asyncio.Lock()
        """Held while values are computed and written: a cap must not be based on a share that has moved meanwhile."""
        self._steering = steering
        self._plan = plan
        self._cycle_s = cycle_s
        self._unread: dict[str, bool] = {}
        """Buckets that wait for their turn, in order; True if used, False if only their overload control is due."""
        self._known_us = 0.0
        self.read_us = 0.0
        """Time, by the store's clock, of the last sample whose records were read; 0 before the first."""
        self._dirty: list[dict[str, None]] = [{} for _ in range(TURNS)]
        """Buckets whose state changed since it was stored, by turn; the one that waits longest is first."""
        self._turn = 0
        self._swept_us = 0.0
        self._watched: dict[str, float] = {}
        """Buckets whose overload control is not at rest, and the time (us) at which it is next due."""
        self._memories: dict[str, PolicyMemory] = {}
        """Values learned from the buckets of each limit, by the prefix of their names (R15)."""
        self._untold: dict[str, None] = {}
        """Limits whose memory changed since it was stored."""
        self._told_us = 0.0

    @property
    def is_watching(self) -> bool:
        """True if a bucket's overload control is due soon even without requests."""
        return bool(self._watched)

    def adopt(self, plan: Plan) -> None:
        """Follow changed policies from now on; forget buckets that they no longer steer."""
        self._plan = plan
        for name, bucket in list(self.buckets.items()):
            terms = plan.find(name)
            if terms is None:
                self._forget(name)
            else:
                bucket.adopt(terms)
                self._watch(name, bucket.guard, at_once=True)

    async def run(self) -> int:
        """Run one cycle; return the number of buckets read. `LeaseLost` and the store's errors pass through."""
        async with self.lock:
            now_us, is_drained = await self._sample()
            names = self._turns(now_us)
            touched = {name for name in names if self._unread[name]}
            await self._recall([name for name in names if name not in self.buckets])
            raws = await self._steering.raw_records(self.slot, names) if names else {}
            reports = await self._reports(names)
            self._take(names)
            self.read_us = now_us
            due = self._due(is_idle=not names)
            rows = self._decide(names, raws, touched, reports, now_us, due)
            rows += [self._kept(name, now_us) for name in due if name not in raws and name in self.buckets]
            if is_drained and not self._unread:
                self._known_us = now_us
            await self._write(rows, due)
            await self._tell(now_us)
            self._sweep(now_us)
            return len(names)

    async def flush(self) -> None:
        """Store all unsaved states and memories for the next owner."""
        async with self.lock:
            names = set().union(*self._dirty)
            rows = [self._kept(name, self.clock.now_us()) for name in names if name in self.buckets]
            if rows:
                await self._steering.steer(self.slot, self.lease, rows)
            self._told_us = 0.0
            await self._tell(self.clock.now_us())

    async def _tell(self, now_us: float) -> None:
        """Store the memories of policies that changed, about once per second."""
        if not self._untold or now_us - self._told_us < TELL_S * 1e6:
            return
        self._told_us = now_us
        for limit in list(self._untold)[:TOLD_MAX]:
            del self._untold[limit]
            packed = policy_memory.pack(self._memories[limit])
            await self._steering.keep_memory(self.slot, limit, packed, life_s=policy_memory.LIFE_S)

    async def give(self, rows: list[Steer]) -> list[SteerStatus]:
        """Write shares. The caller must not hold the lock."""
        async with self.lock:
            return await self._steering.steer(self.slot, self.lease, rows)

    async def records(self, names: list[str]) -> dict[str, Record]:
        """Return the current records of some buckets."""
        return await self._steering.records(self.slot, names)

    async def _sample(self) -> tuple[int, bool]:
        """Take the names of changed buckets; return the store's time, and True if no names are left (others rested)."""
        for _ in range(SAMPLES_MAX):
            sampled = await self._steering.sample(self.slot, self.lease, SAMPLE_MAX)
            self.clock.observe(sampled.now_us)
            buckets, find = self.buckets, self._plan.find
            # A bucket in memory has terms, so the plan is not searched again.
            steered = [name for name in sampled.names if name in buckets or find(name) is not None]
            self._unread |= dict.fromkeys(steered, True)
            # A name listed twice is returned once: slightly fewer names do not mean that none are left.
            if len(sampled.names) < SAMPLE_MAX // 2:
                return sampled.now_us, True
        return sampled.now_us, False

    async def _recall(self, names: list[str]) -> None:
        """Load the states that the last owner stored for some buckets."""
        if not names:
            return
        kept = await self._steering.states(self.slot, names)
        limits = [limit for limit in dict.fromkeys(map(limit_of, names)) if limit not in self._memories]
        if limits:
            found = await self._steering.memories(self.slot, limits)
            self._memories |= {limit: policy_memory.unpack(found.get(limit)) for limit in limits}
        for name in names:
            terms = self._plan.find(name)
            if terms is not None:
                self.buckets[name] = Bucket(name, terms, kept_state.unpack(kept.get(name)))

    def _overdue(self, now_us: float) -> list[str]:
        """Return buckets whose overload control is due, used or not."""
        return [name for name, due_us in self._watched.items() if due_us <= now_us]

    def _turns(self, now_us: float) -> list[str]:
        """Return the buckets whose turn it is: of those that were used or are due, the first that came."""
        for name in self._overdue(now_us):
            self._unread.setdefault(name, False)
        return list(islice(self._unread, LOOKED_MAX))

    def _take(self, names: list[str]) -> None:
        """Remove buckets that were read from those that wait."""
        if len(names) == len(self._unread):
            self._unread.clear()
            return
        for name in names:
            del self._unread[name]

    async def _reports(self, names: list[str]) -> dict[str, tuple[Report, ...]]:
        """Return the load reports of services (G5) for the buckets that use them."""
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
        """Step every bucket that was read; return the values to write. The hot loop: some microseconds per bucket."""
        rows: list[Steer] = []
        buckets = self.buckets
        for name in names:
            raw, bucket = raws.get(name), buckets.get(name)
            record = None if raw is None else read_plainly(raw) or read_record(raw)
            if record is None or bucket is None:  # expired, or its policy was removed during the read
                self._forget(name)
                continue
            moved = self._steered(bucket, record, now_us) if name in touched else HELD
            order = None
            if bucket.guard is not None and isinstance(record, Record):  # one with overload control has a trailer
                order = self._shed(name, bucket, record, reports.get(name, ()), now_us)
            bucket.seen_us = now_us
            is_due = name in due
            if is_due or moved.charges or (moved.charge is not None and not bucket.is_heard):
                self._hear(bucket, record, moved)
            if not is_due:
                self._dirty[bucket.turn][name] = None
            if is_due or moved is not HELD or order is not None:
                row = _row(name, bucket, record, moved, order, now_us, is_due=is_due)
                if row is not None:
                    rows.append(row)
        return rows

    def _steered(self, bucket: Bucket, record: Seen, now_us: int) -> Moved:
        """Step the cap, the charge and the mechanism."""
        terms = bucket.terms
        bucket.state, moved = step(
            bucket.state,
            record,
            terms.control,
            now_us=now_us,
            since_us=self._known_us,
            cycle_s=self._cycle_s,
            memory=self._memories.get(terms.limit.bucket, NOTHING_KNOWN),
        )
        if terms.partitions > 1:
            self._follow_demand(bucket, record, now_us)
        if moved.reason is not None:
            bucket.reasons = (*bucket.reasons, moved.reason)[-REASONS_MAX:]
        return moved

    def _hear(self, bucket: Bucket, record: Seen, moved: Moved) -> None:
        """Add a bucket's learned values to its policy's memory."""
        if not bucket.has_learned:
            return
        bucket.is_heard, limit = True, bucket.terms.limit.bucket
        memory = self._memories.setdefault(limit, PolicyMemory())
        charges = {entry.id: entry.charge for entry in record.learned} | dict(moved.charges)
        charge = record.charge if moved.charge is None else moved.charge
        memory.hear(work=bucket.state.caps.cost.work, charge=charge, charges=charges.items())
        self._untold[limit] = None

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
        """Note when overload control of a bucket is next due, if ever."""
        due_us = math.inf if guard is None else 0.0 if at_once else guard.due_us
        if due_us < math.inf:
            self._watched[name] = due_us
        else:
            self._watched.pop(name, None)

    def _follow_demand(self, bucket: Bucket, record: Seen, now_us: int) -> None:
        counters = sampling.read(record, now_us)
        if counters is not None:
            # A bucket that is not steered learns no cost: there the mean charge stands for it.
            charge = counters.work_charged / counters.admitted if counters.admitted > 0 else 1.0
            work_per_request = bucket.state.caps.cost.work or bucket.state.moments.mean or charge
            if bucket.terms.limit.counts:
                # Requests are divided here, so charged requests count and settled work does not.
                counters, work_per_request = replace(counters, settles=0.0), 1.0
            bucket.demand = bucket.demand.followed(counters, work_per_request, cycle_s=self._cycle_s)

    def _due(self, *, is_idle: bool) -> set[str]:
        """Return the buckets whose state is stored in this cycle: a part of them, or all in an idle cycle."""
        if is_idle:
            due = set().union(*self._dirty)
            for dirty in self._dirty:
                dirty.clear()
            return due
        self._turn = (self._turn + 1) % TURNS
        dirty = self._dirty[self._turn]
        due = set(islice(dirty, STATES_MAX))
        if len(due) == len(dirty):
            dirty.clear()
        for name in due if dirty else ():
            del dirty[name]
        return due

    def _kept(self, name: str, now_us: int) -> Steer:
        bucket = self.buckets[name]
        return Steer(name, bucket.terms.limit.params(now_us), state=bucket.packed(), lasts=bucket.has_learned)

    def _reconsider(self, name: str) -> None:
        """Have overload control compare and set its order again, because the last write is unconfirmed."""
        bucket = self.buckets.get(name)
        if bucket is not None and bucket.guard is not None:
            bucket.guard.reconsider()
            self._watch(name, bucket.guard, at_once=True)

    def _mark(self, name: str) -> None:
        bucket = self.buckets.get(name)
        if bucket is not None:
            self._dirty[bucket.turn][name] = None

    def _forget(self, name: str) -> None:
        bucket = self.buckets.pop(name, None)
        self._watched.pop(name, None)
        if bucket is not None:
            self._dirty[bucket.turn].pop(name, None)

    def _sweep(self, now_us: int) -> None:
        """Drop unused buckets from memory from time to time."""
        if now_us - self._swept_us < FORGET_S / 4 * 1e6:
            return
        self._swept_us = now_us
        oldest_us = now_us - FORGET_S * 1e6
        for name in [name for name, bucket in self.buckets.items() if bucket.seen_us < oldest_us]:
            self._forget(name)


def _row(
    name: str, bucket: Bucket, record: Seen, moved: Moved, order: ShedOrder | None, now_us: int, *, is_due: bool
) -> Steer | None:
    """Return the values to write for a bucket; None if there are none."""
    cap, charge, requests_for = moved.cap, moved.charge, moved.requests_for
    if charge is not None and abs(charge - (record.charge or bucket.terms.limit.charge)) <= MOVE_MIN * charge:
        charge = None
    charges = moved.charges
    if cap is None and charge is None and requests_for is None and order is None and not charges and not is_due:
        return None
    state, lasts = (bucket.packed(), bucket.has_learned) if is_due else (None, False)
    params = bucket.terms.limit.params(now_us)
    return Steer(name, params, cap, charge, requests_for, None, 0, state, order, charges, lasts)
