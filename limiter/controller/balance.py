"""Shares of the limits that a namespace's partitions divide: they follow demand (B5).

    demand of each partition → limiter.model.control.shares → lower, wait until that is confirmed → raise

Only who owns every partition of the namespace moves shares: then no write but its own can arrive any more (F-P7).
What the records hold when it begins is what is held; what it sends without an answer counts as whatever is worse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import nan

from redis.exceptions import ResponseError

from limiter.controller.cycle import SlotCycle
from limiter.controller.plan import Plan, Terms
from limiter.model.bucket.bucket import Record
from limiter.model.control import shares
from limiter.model.control.shares import Held, Write
from limiter.store.errors import StoreError
from limiter.store.layout import LeaseLost
from limiter.store.steering import Steer, SteerStatus


class Balance:
    """One namespace's shares."""

    def __init__(self, plan: Plan, *, cycle_s: float) -> None:
        self._plan = plan
        self._cycle_s = cycle_s
        self._cycles: Sequence[SlotCycle] = ()
        self._held: dict[str, list[Held]] = {}

    async def run(self, cycles: Sequence[SlotCycle]) -> None:
        """Look once at the demand in all partitions, and move what ought to move."""
        if [id(cycle) for cycle in cycles] != [id(cycle) for cycle in self._cycles]:
            self._cycles, self._held = cycles, {}  # other leases: others may have written since
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
        """The most that each partition may hold now, as far as is known here."""
        held = self._held.get(bucket)
        return shares.at(held, asyncio.get_running_loop().time()) if held else []

    def _terms(self, bucket: str) -> Terms:
        terms = self._plan.find(bucket)
        assert terms is not None
        return terms

    def _demand(self) -> dict[str, list[float]]:
        """Work units a second that are asked for in each partition, of the buckets that need shares.

        As it was when a partition was last looked at: that its store is silent since then is no lack of demand (F-P8).
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
        """What each partition holds of some buckets; those that exist in none are left alone."""
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
        """Write shares everywhere at once, and note what is known to be done."""
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
        """The buckets of a slot whose share is certainly the new one."""
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
        """Let go of what nobody needs, once all that was lent has ended."""
        ended = [bucket for bucket, held in self._held.items() if all(lent.until_s <= now_s for lent in held)]
        for bucket in ended:
            if bucket not in demand:
                del self._held[bucket]
