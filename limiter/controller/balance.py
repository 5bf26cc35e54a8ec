"""Shares of the limits that a namespace's partitions divide: they follow demand (B5).

    demand of each partition → limiter.model.control.shares → lower, wait until that is confirmed → raise

Only a controller that owns every partition of the namespace moves shares: then no other controller's write can
arrive any more (F-P7). It begins with the shares in the records. A write without an answer counts as done or as not
done, whichever is worse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import nan

from redis.exceptions import ResponseError

from limiter.controller.plan import Plan, Terms
from limiter.controller.slot_cycle import SlotCycle
from limiter.model.bucket.bucket import Record
from limiter.model.control import shares
from limiter.model.control.shares import Held, Write
from limiter.store.call_layout import LeaseLost
from limiter.store.steering import Steer, SteerStatus
from limiter.store.store_errors import StoreError


class Balance:
    """One namespace's shares."""

    def __init__(self, plan: Plan, *, cycle_s: float) -> None:
        self._plan = plan
        self._cycle_s = cycle_s
        self._cycles: Sequence[SlotCycle] = ()
        self._held: dict[str, list[Held]] = {}

    async def run(self, cycles: Sequence[SlotCycle]) -> None:
        """Read the demand of all partitions once, and move the shares that are off."""
        if [id(cycle) for cycle in cycles] != [id(cycle) for cycle in self._cycles]:
            self._cycles, self._held = cycles, {}  # the leases are new: another controller may have written since
        demand = self._demand()
        await self._learn([bucket for bucket in demand if bucket not in self._held])
        now_s = asyncio.get_running_loop().time()
        wanted: dict[str, list[float]] = {}
        for bucket, rates in demand.items():
            held = self._held.get(bucket)
            if held is not None:
                goal = shares.target(shares.at(held, now_s), rates)
                if shares.is_due(held, goal, now_s):
                    wanted[bucket] = goal
        await self._send({bucket: shares.lowers(self._held[bucket], goal, now_s) for bucket, goal in wanted.items()})
        now_s = asyncio.get_running_loop().time()
        await self._send({bucket: shares.raises(self._held[bucket], goal, now_s) for bucket, goal in wanted.items()})
        self._forget(demand, now_s)

    def shares(self, bucket: str) -> list[float]:
        """Return the most that each partition may hold now, as far as this controller knows."""
        held = self._held.get(bucket)
        return shares.at(held, asyncio.get_running_loop().time()) if held else []

    def _terms(self, bucket: str) -> Terms:
        terms = self._plan.find(bucket)
        assert terms is not None
        return terms

    def _demand(self) -> dict[str, list[float]]:
        """Return the demand in each partition, in work units per second, for the buckets that need shares.

        A partition counts as it was last read: a store that is silent since then is no lack of demand (F-P8).
        """
        found: dict[str, list[float]] = {}
        unasked = [0.0 if cycle.read_us else nan for cycle in self._cycles]
        for partition, cycle in enumerate(self._cycles):
            for name, bucket in cycle.buckets.items():
                if bucket.terms.partitions > 1:
                    rates = found.setdefault(name, unasked.copy())
                    rates[partition] = bucket.demand.at(cycle.read_us, cycle_s=self._cycle_s)
        return {
            name: rates
            for name, rates in found.items()
            if shares.is_needed(rates, committed=self._terms(name).limit.terms.committed)
        }

    async def _learn(self, buckets: list[str]) -> None:
        """Read the shares of some buckets in each partition; skip buckets that exist in none."""
        if not buckets:
            return
        found = await asyncio.gather(*(cycle.records(buckets) for cycle in self._cycles))
        now_s = asyncio.get_running_loop().time()
        for bucket in buckets:
            records = [records.get(bucket) for records in found]
            if any(record is not None for record in records):
                self._held[bucket] = [
                    self._read(record, cycle.clock.now_us(), now_s)
                    for record, cycle in zip(records, self._cycles, strict=True)
                ]

    def _read(self, record: Record | None, now_us: int, now_s: float) -> Held:
        count = len(self._cycles)
        if record is None or record.share_partitions != count or now_us >= record.share_until_us:
            return Held(1.0 / count, now_s)
        return Held(record.share, now_s + (record.share_until_us - now_us) / 1e6)

    async def _send(self, writes: dict[str, list[Write]]) -> None:
        """Write shares to all partitions at once, and record which writes are confirmed."""
        now_s = asyncio.get_running_loop().time()
        to_slots: list[dict[str, Write]] = [{} for _ in self._cycles]
        for bucket, some in writes.items():
            for write in some:
                to_slots[write.partition][bucket] = write
        done = await asyncio.gather(
            *(self._give(cycle, writes) for cycle, writes in zip(self._cycles, to_slots, strict=True))
        )
        for bucket, some in writes.items():
            sure = [write for write in some if bucket in done[write.partition]]
            unsure = [write for write in some if bucket not in done[write.partition]]
            held = shares.unconfirmed(self._held[bucket], unsure, now_s)
            self._held[bucket] = shares.confirmed(held, sure, now_s)

    async def _give(self, cycle: SlotCycle, writes: dict[str, Write]) -> set[str]:
        """Write shares to one slot; return the buckets whose write is confirmed."""
        rows = [
            Steer(bucket, self._terms(bucket).limit.terms, share=write.share, share_for_us=round(write.for_s * 1e6))
            for bucket, write in writes.items()
        ]
        if not rows:
            return set()
        try:
            statuses = await cycle.give(rows)
        except (StoreError, ResponseError, LeaseLost):
            return set()
        return {row.bucket for row, status in zip(rows, statuses, strict=True) if status is SteerStatus.DONE}

    def _forget(self, demand: dict[str, list[float]], now_s: float) -> None:
        """Forget buckets that no longer need shares, once all their lent shares have ended."""
        ended = [bucket for bucket, held in self._held.items() if all(lent.until_s <= now_s for lent in held)]
        for bucket in ended:
            if bucket not in demand:
                del self._held[bucket]
