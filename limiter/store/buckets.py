"""The shared buckets of one store: what the engine talks to."""

from __future__ import annotations

from collections.abc import Callable

from limiter.model.operations import Acquire, AcquireAnswer, AcquireStatus, Settle, SettleAnswer
from limiter.store.batcher import Batcher
from limiter.store.clock import StoreClock
from limiter.store.connect import Link
from limiter.store.keys import Slot
from limiter.store.scripts import AcquireScript, SettleScript


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
        return await self._acquires.run(slot, operation, timeout_s=timeout_s)

    async def acquire_at(self, slot: Slot, plan: Callable[[int], Acquire], *, timeout_s: float) -> AcquireAnswer:
        """The same for an operation that depends on the calendar: `plan` makes it for a time of the store's (us).

        The node only guesses that time. Where a quota's window has turned meanwhile, or nothing is known yet, the
        script says so and does nothing, and the operation is made anew for the time in the answer (P4, T4).
        """
        answer = await self.acquire(slot, plan(self.clock.now_us()), timeout_s=timeout_s)
        if answer.status is AcquireStatus.WINDOW:
            answer = await self.acquire(slot, plan(answer.now_us), timeout_s=timeout_s)
        return answer

    async def settle(self, slot: Slot, operation: Settle, *, timeout_s: float) -> SettleAnswer:
        """Correct what an acquire charged, once; or debit a long request as it goes."""
        return await self._settles.run(slot, operation, timeout_s=timeout_s)

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        await self._acquires.drain()
        await self._settles.drain()
