"""The cost of leases: a renewal against an acquire, in the store's time, and decisions that a holder makes alone."""

from __future__ import annotations

import time
from typing import NamedTuple

import redis

from limiter.client.lease.holder import Grant, Lease
from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.leases import LeaseAsk, LeaseWant
from limiter.model.bucket.lending import LendTerms, Said, Used
from limiter.model.bucket.operations import Acquire, Want
from limiter.store.keys import Slot
from limiter.store.scripts import AcquireScript, LendScript

BEGIN_US = 1_790_000_000_000_000
TERMS = Params(committed=1e6, capacity=1e6, debt_max=1e9)
LENDS = Params(flags=Flags.LENDS, committed=1e6, capacity=1e6, debt_max=1e9, lending=LendTerms(0.0, 4.0, 3e6))


class StoreCost(NamedTuple):
    """Microseconds of the store for one call."""

    acquire: float
    general: float
    """An acquire that takes no short way, as all of them were before there was one."""
    renew_few: float
    renew_many: float


class LeaseBench:
    """Renewals of few and of many holders beside acquires, in turns."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._acquire, self._lend = AcquireScript(), LendScript()
        self._prefix = Slot("bench-leases").prefix
        client.script_load(self._acquire.source)
        client.script_load(self._lend.source)
        self._numbers: dict[str, int] = {}
        self._calls = 0

    def round(self, calls: int, *, few: int, many: int) -> StoreCost:
        """Return what a call costs the store, by its own account."""
        self._renew("few", few, few)  # every holder has a lease
        self._renew("many", many, many)
        return StoreCost(
            self._measured(lambda: self._acquires(calls), calls),
            self._measured(lambda: self._acquires(calls, is_general=True), calls),
            self._measured(lambda: self._renew("few", few, calls), calls),
            self._measured(lambda: self._renew("many", many, calls), calls),
        )

    def _measured(self, run: object, calls: int) -> float:
        assert callable(run)
        before = self._spent_us()
        run()
        return (self._spent_us() - before) / calls

    def _spent_us(self) -> float:
        stats = self._client.info("commandstats")
        assert isinstance(stats, dict)
        return float(stats.get("cmdstat_evalsha", {}).get("usec", 0.0))

    def _acquires(self, calls: int, *, is_general: bool = False) -> None:
        operation = Acquire((Want("general" if is_general else "reads", TERMS, 1.0, 2.0),))
        for _ in range(calls):
            self._calls += 1
            now_us = -(BEGIN_US + self._calls) if is_general else 0  # below zero: the general form decides
            call = self._acquire.call(self._prefix, b"%d" % self._calls, [operation], now_us=now_us)
            self._client.execute_command("EVALSHA", self._acquire.sha, *call)  # type: ignore[no-untyped-call]

    def _renew(self, bucket: str, holders: int, calls: int) -> None:
        for at in range(calls):
            lease = f"{bucket}-{at % holders}"
            number = self._numbers[lease] = self._numbers.get(lease, 0) + 1
            said = Said(held=0.5 / holders, wanted=1e6 / holders)
            used = Used(requests=float(number), charged=float(number))
            ask = LeaseAsk(lease, float(number), (LeaseWant(bucket, LENDS, said),), taken=number - 1.0, used=used)
            call = self._lend.call(self._prefix, ask)
            self._client.execute_command("EVALSHA", self._lend.sha, *call)  # type: ignore[no-untyped-call]


def local_decisions(count: int) -> tuple[float, float, float]:
    """Return decisions per second of the processor: bare, with a grant and its settle; and the 99th percentile (µs)."""
    lease = Lease()
    lease.ask()
    plain = {
        "policy": "x",
        "mechanism": "work",
        "share": 1.0,
        "rate": 1e9,
        "capacity": 1e12,
        "tokens": 1e12,
        "moved": 0,
    }
    assert lease.take({"number": 1, "expires_in_ms": 600_000, "slices": [plain]})
    began_ns = time.process_time_ns()
    for _ in range(count):
        lease.allow(1.0)
    bare = count / (time.process_time_ns() - began_ns) * 1e9
    began_ns = time.process_time_ns()
    for _ in range(count):
        grant = lease.try_acquire(1.0)
        if isinstance(grant, Grant):
            grant.settle(2.0)
    settled = count / (time.process_time_ns() - began_ns) * 1e9
    took_ns = []
    for _ in range(min(count, 100_000)):
        began_ns = time.perf_counter_ns()
        grant = lease.try_acquire(1.0)
        if isinstance(grant, Grant):
            grant.settle(2.0)
        took_ns.append(time.perf_counter_ns() - began_ns)
    return bare, settled, sorted(took_ns)[len(took_ns) * 99 // 100] / 1000
