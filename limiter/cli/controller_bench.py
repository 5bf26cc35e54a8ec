"""Cost of the controller's cycle: its own processor time and the store's, over many buckets at once.

Every bucket is used before each cycle. Buckets at their limit refuse a part and do now more and now less than their
rate, so that their caps move in every cycle; the others stay within their limits.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import redis

from limiter.controller.plan import make_plans
from limiter.controller.slot_cycle import LOOKED_MAX, SlotCycle
from limiter.model.bucket.operations import Acquire, Charge, Lot, Settle, Want
from limiter.model.overload.shedding import CLASS_NUMBERS
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.reading import read_policy_set
from limiter.store.keys import Slot, bucket_name
from limiter.store.link.connect import Link
from limiter.store.scripts import AcquireScript, SettleScript
from limiter.store.steering import Steering

CYCLE_S = 0.1
TTL_US = 60_000_000
BATCH = 64
WARM_UP_CYCLES = 12
RATE = 100.0
DEADLINE_US = 4_000_000_000_000_000
POLICY = {
    "name": "steered", "per": ["customer"], "rate": RATE, "mechanism": "requests", "charge": "learned", "burst": 1,
}  # fmt: skip


GUARDED = {"name": "steered", "per": ["customer"], "rate": 1e6, "overload": {"response_time": {"target_ms": 1000}}}
TURNS = 2


class Turns(NamedTuple):
    """The cost of following many active buckets with overload control, a part of them in each cycle."""

    bucket_us: float
    """Processor time of the controller, a bucket and cycle."""
    turn_s: float
    """Time in which every bucket has had its turn, by a controller that does nothing else."""
    bucket_bytes: float
    """Memory of the controller for each bucket."""


class Cost(NamedTuple):
    """The median cost of a cycle."""

    wall_us: float
    own_us: float
    """Processor time of the controller."""
    store_us: float
    """Processor time of the store."""


class ControllerBench:
    """A slot with buckets, used and cycled in turn."""

    def __init__(self, client: redis.Redis, link: Link, namespace: str, *, policy: Mapping[str, Any] = POLICY) -> None:
        self._client = client
        self._slot = Slot(namespace)
        self._plan = make_plans(read_policy_set({"policies": [{**policy, "namespace": namespace}]}))[namespace]
        self._limit = self._plan.terms["steered"].limit
        self._steering = Steering(link, lease_ms=60_000, timeout_s=60.0)
        self._acquire, self._settle = AcquireScript(), SettleScript()
        self._calls = 0
        self._used_s = 0.0
        self._chance = Random(1)  # noqa: S311  the same costs in every run
        for script in (self._acquire, self._settle):
            client.script_load(script.source)

    async def measure(self, buckets: int, *, cycles: int, limited: float = 0.25, active: bool = True) -> Cost:
        """Return the cost of a cycle over this many buckets, with a part at their limit; or with none used since the
        last."""
        lease = await self._steering.take(self._slot)
        assert lease is not None
        cycle = SlotCycle(self._steering, self._slot, lease, self._plan, cycle_s=CYCLE_S)
        costs = []
        for number in range(WARM_UP_CYCLES + cycles):
            if active or number < WARM_UP_CYCLES - 2:
                self._use(buckets, limited)
            store_s, own_s, began_s = self._store_s(), time.process_time(), time.perf_counter()
            looked = await cycle.run()
            wall_s, own_s = time.perf_counter() - began_s, time.process_time() - own_s
            assert looked == buckets or not active
            costs.append((wall_s * 1e6, own_s * 1e6, (self._store_s() - store_s) * 1e6))
        await self._steering.release(self._slot)
        return Cost(*(median(column) for column in zip(*costs[WARM_UP_CYCLES:], strict=True)))

    async def measure_turns(self, buckets: int) -> Turns:
        """Return the cost of buckets of which each has a request in flight, so that none is ever at rest."""
        lease = await self._steering.take(self._slot)
        assert lease is not None
        cycle = SlotCycle(self._steering, self._slot, lease, self._plan, cycle_s=CYCLE_S)
        before = _memory_bytes()
        looked = 0
        for first in range(0, buckets, LOOKED_MAX):
            numbers = range(first, min(first + LOOKED_MAX, buckets))
            self._run(self._acquire, [self._ask(bucket_name("steered", [f"c{number}"])) for number in numbers])
            looked += await cycle.run()
        while looked < buckets:
            looked += await cycle.run()
        grown = _memory_bytes() - before
        own_s, waited_s, looked = 0.0, 0.0, 0
        while looked < TURNS * buckets:
            began_s, own_before_s = time.perf_counter(), time.process_time()
            looked += await cycle.run()
            own_s += time.process_time() - own_before_s
            waited_s += max(CYCLE_S, time.perf_counter() - began_s)
        assert len(cycle.buckets) == buckets
        await self._steering.release(self._slot)
        return Turns(own_s * 1e6 / looked, waited_s * buckets / looked, grown / buckets)

    def _use(self, buckets: int, limited: float) -> None:
        """Send a request to each bucket, and some more to those at their limit; the work is about what the rates
        allow."""
        now_s = time.perf_counter()
        work, self._used_s = RATE * min(now_s - self._used_s, 1.0), now_s
        every = round(1 / limited)
        for first in range(0, buckets, BATCH):
            numbers = range(first, min(first + BATCH, buckets))
            names = {bucket_name("steered", [f"c{number}"]): number % every == 0 for number in numbers}
            self._run(self._acquire, [self._ask(name) for name, more in names.items() for _ in range(3 if more else 1)])
            works = [work * (self._chance.uniform(0.2, 1.8) if more else 0.5) for more in names.values()]
            self._run(self._settle, list(map(self._report, names, works)))

    def _ask(self, name: str) -> Acquire:
        limit = self._limit
        want = Want(name, limit.terms, limit.minimums[Criticality.CRITICAL], limit.charge, limit.how_unsaid)
        lot = Lot(CLASS_NUMBERS[Criticality.CRITICAL], 0.5) if limit.sheds else None
        return Acquire((want,), lot=lot, ttl_us=TTL_US)

    def _report(self, name: str, work: float) -> Settle:
        self._calls += 1
        charges = (Charge(name, 1.0, 1.0, self._limit.terms, in_requests=True),)
        name = f"{self._calls}"
        return Settle(reservation=name, charges=charges, work=work, acquired_us=1, deadline_us=DEADLINE_US)

    def _run(self, script: AcquireScript | SettleScript, operations: list[Acquire] | list[Settle]) -> None:
        for first in range(0, len(operations), BATCH):
            self._calls += 1
            some = operations[first : first + BATCH]
            call = script.call(self._slot.prefix, b"%d" % self._calls, some)  # type: ignore[arg-type]
            self._client.execute_command("EVALSHA", script.sha, *call)  # type: ignore[no-untyped-call]

    def _store_s(self) -> float:
        info = self._client.info("cpu")
        return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])


def _memory_bytes() -> float:
    """Return the resident memory of this process."""
    gc.collect()
    return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
