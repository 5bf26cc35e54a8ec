"""The shared buckets of one store: what the engine talks to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from limiter.model.operations import Acquire, AcquireAnswer, AcquireStatus, Settle, SettleAnswer
from limiter.store.batcher import Batcher
from limiter.store.clock import StoreClock
from limiter.store.connect import Link
from limiter.store.keys import Slot
from limiter.store.scripts import AcquireScript, SettleScript

BUCKETS_PER_OPERATION_MAX = 255
FINGERPRINT_SIZE = 16


class Buckets:
    """Acquires and settles, batched."""

    def __init__(self, link: Link, *, calls_max: int = 2) -> None:
        self.clock = StoreClock()
        self._acquires: Batcher[Acquire, AcquireAnswer] = Batcher(
            link, AcquireScript(), self.clock, calls_max=calls_max
        )
        self._settles: Batcher[Settle, SettleAnswer] = Batcher(link, SettleScript(), self.clock, calls_max=calls_max)

    async def acquire(self, slot: Slot, operation: Acquire, *, timeout_s: float) -> AcquireAnswer:
        """Admit or refuse, over all the operation's buckets or none."""
        _check_acquire(operation)
        return await self._acquires.run(slot, operation, timeout_s=timeout_s)

    async def acquire_at(self, slot: Slot, plan: Callable[[int], Acquire], *, timeout_s: float) -> AcquireAnswer:
        """The same for an operation that depends on the calendar: `plan` makes it for a time of the store's (us).

        The node only guesses that time. Where a quota's window has turned meanwhile, or nothing is known yet, the
        script says so and does nothing, and the operation is made anew for the time in the answer (P4, T4).
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        answer = await self.acquire(slot, plan(self.clock.now_us()), timeout_s=timeout_s)
        if answer.status is AcquireStatus.WINDOW:
            answer = await self.acquire(slot, plan(answer.now_us), timeout_s=deadline_s - loop.time())
        return answer

    async def settle(self, slot: Slot, operation: Settle, *, timeout_s: float) -> SettleAnswer:
        """Correct what an acquire charged, once; or debit a long request as it goes."""
        _check_settle(operation)
        return await self._settles.run(slot, operation, timeout_s=timeout_s)

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        await self._acquires.drain()
        await self._settles.drain()


# Many callers share a call: what one of them gets wrong must stop here, before it stops the others.


def _check_acquire(operation: Acquire) -> None:
    if not 1 <= len(operation.wants) <= BUCKETS_PER_OPERATION_MAX:
        raise ValueError(f"an acquire takes 1 to {BUCKETS_PER_OPERATION_MAX} buckets, not {len(operation.wants)}")
    for want in operation.wants:
        if not (math.isfinite(want.charge) and want.charge >= 0 and math.isfinite(want.minimum)):
            raise ValueError(f"{want.bucket}: charge and minimum must be finite, and the charge not negative")
    if not 0 < operation.requests < math.inf:
        raise ValueError(f"requests must be positive, not {operation.requests}")
    if operation.idempotency is not None and len(operation.idempotency.fingerprint) != FINGERPRINT_SIZE:
        raise ValueError(f"a fingerprint has {FINGERPRINT_SIZE} bytes")


def _check_settle(operation: Settle) -> None:
    if not 1 <= len(operation.charges) <= BUCKETS_PER_OPERATION_MAX:
        raise ValueError(f"a settle takes 1 to {BUCKETS_PER_OPERATION_MAX} buckets, not {len(operation.charges)}")
    for charge in operation.charges:
        if not (math.isfinite(operation.work * charge.weight) and math.isfinite(charge.charge)):
            raise ValueError(f"{charge.bucket}: work, weight and charge must be finite")
    if not (operation.work >= 0 and 0 <= operation.requests < math.inf):
        raise ValueError("work and requests must not be negative")
