"""The worker: knows the policies and the other controllers, and keeps a task for each slot that it should own.

    preferred owner      try for the lease, and cycle while it lasts
    no longer preferred  store all states, and give the lease back
    lease lost           noticed by the next call; drop everything known of the slot, and try for the lease again
    store unavailable    keep trying; all values in the records stay in force

Any number of controllers may run: one that is paused or cut off does no harm (F-P7).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import ResponseError

from limiter.controller.balance import Balance
from limiter.controller.ownership import BEATS_A_LEASE, GONE_AFTER_LEASE, preferred
from limiter.controller.plan import Plan, describe, plan_steps
from limiter.controller.slot_cycle import SlotCycle
from limiter.model.tally import CYCLE_SECONDS, Histogram
from limiter.runtime.pauses import with_pauses
from limiter.store import keys
from limiter.store.call_layout import LeaseLost
from limiter.store.clock import StoreClock
from limiter.store.keys import Slot
from limiter.store.link.connect import Link
from limiter.store.policies.policy_store import PolicyStore, StoredPolicies
from limiter.store.registry import NodeRegistry
from limiter.store.steering import LEASE_MS, Steering
from limiter.store.store_errors import StoreError

log = logging.getLogger(__name__)

CYCLE_MS = 100
IDLE_S = 1.0
"""Longest time between two cycles of an idle slot."""
RETRIES_A_LEASE = 8
"""Attempts per lease time to take a slot that another controller still owns."""
LOG_EVERY_S = 10.0
BALANCE_CYCLES = 5
"""Cycles between two adjustments of the shares."""
START_WAIT_S = 2.0

TROUBLE = (StoreError, ResponseError)


@dataclass(slots=True)
class Stats:
    """Counts of a controller's actions since it started."""

    cycles: int = 0
    buckets: int = 0
    """Buckets read, each counted once per cycle."""
    slips: int = 0
    """Cycles that ended after the next one should have begun."""
    leases_taken: int = 0
    leases_lost: int = 0
    failures: int = 0
    """Cycles that ended with an error of the store."""
    cycle_seconds: Histogram = field(default_factory=lambda: Histogram(CYCLE_SECONDS))


class Seldom:
    """Logs the first message at once, then at most one per LOG_EVERY_S, with the number of repetitions."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._last_s = float("-inf")
        self._untold = 0

    def log(self, text: str, *arguments: object) -> None:
        """Log the message, unless one was logged less than LOG_EVERY_S ago."""
        now_s = asyncio.get_running_loop().time()
        self._untold += 1
        if now_s - self._last_s < LOG_EVERY_S:
            return
        times = f" ({self._untold} times since this was last said)" if self._untold > 1 else ""
        log.log(self._level, text + times, *arguments)
        self._last_s, self._untold = now_s, 0


class Keeper:
    """One slot that this controller should own: takes the lease, and cycles while it lasts."""

    def __init__(self, steering: Steering, slot: Slot, plan: Plan, pace: Pace) -> None:
        self.slot = slot
        self.cycle: SlotCycle | None = None
        self._steering = steering
        self._plan = plan
        self._pace = pace

    def adopt(self, plan: Plan) -> None:
        """Go by changed policies from now on."""
        self._plan = plan
        if self.cycle is not None:
            self.cycle.adopt(plan)

    async def run(self) -> None:
        """Run until cancelled; then store all unsaved states, and give the slot back."""
        loop = asyncio.get_running_loop()
        interval_s = self._pace.cycle_s
        next_s = loop.time()
        try:
            while True:
                looked = await self._turn()
                longest_s = self._pace.retry_s if self.cycle is None else self._pace.idle_s
                is_busy = looked or (self.cycle is not None and self.cycle.is_watching)
                interval_s = self._pace.cycle_s if is_busy else min(2 * interval_s, longest_s)
                next_s += interval_s
                late_s = loop.time() - next_s
                if late_s > 0:
                    self._pace.slipped(self.slot, interval_s + late_s, looked)
                    next_s = loop.time()
                await asyncio.sleep(max(0.0, -late_s))
        finally:
            await self._give_back()

    async def _turn(self) -> int:
        """Try for the lease or run a cycle; return the number of buckets read, or 1 if the next turn should be soon."""
        stats = self._pace.stats
        try:
            if self.cycle is None:
                return await self._take()
            began_s = time.perf_counter()
            looked = await self.cycle.run()
        except LeaseLost:
            self.cycle = None
            stats.leases_lost += 1
            log.warning("%s: another controller took over, or the lease ended", _shown(self.slot))
            return 0
        except TROUBLE as error:
            stats.failures += 1
            self._pace.troubles.log("%s cannot be steered for now: %s", _shown(self.slot), error)
            return 1  # tried again soon
        stats.cycles += 1
        stats.cycle_seconds.observe(time.perf_counter() - began_s)
        stats.buckets += looked
        return looked

    async def _take(self) -> int:
        """Try to take the lease, which is free once the last owner is gone or has handed over."""
        lease = await self._steering.take(self.slot)
        if lease is None:
            return 0
        self._pace.stats.leases_taken += 1
        self.cycle = SlotCycle(self._steering, self.slot, lease, self._plan, cycle_s=self._pace.cycle_s)
        return 1

    async def _give_back(self) -> None:
        cycle, self.cycle = self.cycle, None
        if cycle is None:
            return
        with suppress(*TROUBLE, LeaseLost):
            await cycle.flush()
        with suppress(*TROUBLE):
            await self._steering.release(self.slot)


class Pace:
    """Intervals between cycles, and the counts and logs about them."""

    def __init__(self, *, cycle_s: float, lease_s: float) -> None:
        self.cycle_s = cycle_s
        self.idle_s = max(cycle_s, min(IDLE_S, lease_s / 2))
        self.retry_s = max(cycle_s, lease_s / RETRIES_A_LEASE)
        self.stats = Stats()
        self.troubles = Seldom(logging.WARNING)
        self._slips = Seldom(logging.WARNING)

    def slipped(self, slot: Slot, took_s: float, buckets: int) -> None:
        """Count and log a cycle that took longer than its interval."""
        self.stats.slips += 1
        text = "%s: a cycle over %d buckets took %.0f ms, longer than %.0f ms"
        self._slips.log(text, _shown(slot), buckets, took_s * 1000, self.cycle_s * 1000)


class Controller:
    """One of any number of controllers on a store."""

    def __init__(self, link: Link, *, cycle_ms: int = CYCLE_MS, lease_ms: int = LEASE_MS) -> None:
        self.name = _own_name()
        self.plans: dict[str, Plan] = {}
        self._policies = PolicyStore(link)
        self._steering = Steering(link, owner=self.name.encode(), lease_ms=lease_ms)
        self._pace = Pace(cycle_s=cycle_ms / 1000, lease_s=lease_ms / 1000)
        gone_us = round(lease_ms * 1000 * GONE_AFTER_LEASE)
        self._registry = NodeRegistry(link, StoreClock(), key=keys.CONTROLLERS, name=self.name, gone_us=gone_us)
        self._beat_s = lease_ms / 1000 / BEATS_A_LEASE
        self._keepers: dict[Slot, tuple[Keeper, asyncio.Task[None]]] = {}
        self._balances: dict[str, Balance] = {}
        self._changed = asyncio.Event()
        self._loaded = asyncio.Event()

    @property
    def stats(self) -> Stats:
        """Counts of its actions since it started."""
        return self._pace.stats

    @property
    def owned(self) -> list[Slot]:
        """Slots whose lease it holds, as far as it knows."""
        # A copy, because a scrape reads this in another thread while slots are added and removed.
        return sorted(slot for slot, (keeper, _) in list(self._keepers.items()) if keeper.cycle is not None)

    async def run(self, on_started: Callable[[str], None] = lambda _: None) -> None:
        """Steer until cancelled, then hand everything over. `on_started` receives a line about the steered policies."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._policies.watch(self._take))
            group.create_task(self._assign())
            group.create_task(self._balance())
            with suppress(TimeoutError):
                async with asyncio.timeout(START_WAIT_S):
                    await self._loaded.wait()
            on_started(describe(self.plans) if self._loaded.is_set() else "nothing yet: the store does not answer")

    async def _take(self, stored: StoredPolicies) -> None:
        """Follow these policies from now on; cycles continue while the plans are made."""
        self.plans = await with_pauses(plan_steps(stored.policies, self.plans))
        self._balances = {
            name: Balance(plan, cycle_s=self._pace.cycle_s) for name, plan in self.plans.items() if plan.is_divided
        }
        for slot, (keeper, _) in self._keepers.items():
            if slot.namespace in self.plans:
                keeper.adopt(self.plans[slot.namespace])
        self._loaded.set()
        self._changed.set()

    async def _assign(self) -> None:
        """Send heartbeats, read those of other controllers, and keep the slots that this one should own."""
        try:
            while True:
                self._changed.clear()
                try:
                    await self._registry.beat()
                except TROUBLE as error:
                    self._pace.troubles.log("the other controllers cannot be seen for now: %s", error)
                await self._keep(self._own_slots())
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._beat_s):
                        await self._changed.wait()
        finally:
            await self._keep({})
            await self._registry.leave()

    def _own_slots(self) -> dict[Slot, Plan]:
        members = self._registry.members
        own = [plan for name, plan in self.plans.items() if preferred(name, members) == self.name]
        return {slot: plan for plan in own for slot in plan.slots}

    async def _keep(self, wanted: dict[Slot, Plan]) -> None:
        """Keep a task for each of these slots, and for no others."""
        leaving = [self._keepers.pop(slot) for slot in self._keepers.keys() - wanted.keys()]
        for _, task in leaving:
            task.cancel()
        for slot in wanted.keys() - self._keepers.keys():
            keeper = Keeper(self._steering, slot, wanted[slot], self._pace)
            task = asyncio.create_task(keeper.run(), name=f"slot {_shown(slot)}")
            task.add_done_callback(_log_failure)
            self._keepers[slot] = keeper, task
        await asyncio.gather(*(task for _, task in leaving), return_exceptions=True)
        for slot in [slot for slot, (_, task) in self._keepers.items() if task.done()]:
            del self._keepers[slot]  # it failed, which was logged; the next round starts another

    async def _balance(self) -> None:
        """Adjust the shares of every namespace of which this controller owns all partitions."""
        while True:
            await asyncio.sleep(BALANCE_CYCLES * self._pace.cycle_s)
            for name in list(self._balances):
                try:
                    await self._balance_one(name)
                except TROUBLE as error:
                    self._pace.troubles.log("shares of %s stay as they are for now: %s", name, error)
                except Exception:  # after any error, caps must still be steered
                    log.exception("shares of %s could not be moved", name)

    async def _balance_one(self, name: str) -> None:
        balance = self._balances.get(name)  # policies may have changed during the namespaces before
        if balance is None:
            return
        cycles = [self._cycle(slot) for slot in self.plans[name].slots]
        owned = [cycle for cycle in cycles if cycle is not None]
        if len(owned) == len(cycles):
            await balance.run(owned)

    def _cycle(self, slot: Slot) -> SlotCycle | None:
        kept = self._keepers.get(slot)
        return None if kept is None else kept[0].cycle


def _own_name() -> str:
    """Return a unique name that identifies this process to an operator."""
    return f"{keys.encode(socket.gethostname())}-{os.getpid()}-{os.urandom(3).hex()}"


def _shown(slot: Slot) -> str:
    return f"{slot.namespace}/{slot.partition}"


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed and is restarted", task.get_name(), exc_info=task.exception())
