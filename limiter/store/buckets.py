"""The shared buckets of one store, as the engine uses them."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from limiter.model.bucket.operations import Acquire, AcquireAnswer, Settle, SettleAnswer
from limiter.model.tally import CallTally
from limiter.runtime.told import conclude
from limiter.store.batcher import TIMEOUT_MAX_S, Batcher
from limiter.store.clock import StoreClock
from limiter.store.flush import Asking, Settling, Waiting
from limiter.store.keys import Slot
from limiter.store.link.connect import Link
from limiter.store.scripts import AcquireScript, SettleScript

BUCKETS_PER_OPERATION_MAX = 255
FINGERPRINT_SIZE = 16
AMOUNT_MAX = 2.0**53

AnswerT = TypeVar("AnswerT")


class Buckets:
    """Acquires and settles, batched. The engine queues its operations in the batchers; others can await one here."""

    def __init__(self, link: Link, *, calls_max: int = 2) -> None:
        self.clock = StoreClock()
        self.acquires: Batcher[Asking] = Batcher(link, AcquireScript(), self.clock, calls_max=calls_max)
        self.settles: Batcher[Settling] = Batcher(link, SettleScript(), self.clock, calls_max=calls_max)

    @property
    def call_tallies(self) -> dict[str, CallTally]:
        """The tallies of calls to the store, by operation."""
        return {"acquire": self.acquires.tally, "settle": self.settles.tally}

    async def acquire(self, slot: Slot, operation: Acquire, *, timeout_s: float) -> AcquireAnswer:
        """Admit or refuse: all buckets of the operation or none. Raises StoreUnavailable without an answer in time.

        If the caller is cancelled, the call goes on without it (F-R16).
        """
        check_acquire(operation)
        asking = _AwaitedAcquire(timeout_s)
        asking.take_over(operation)
        self.acquires.start(slot, asking)
        return await asking.answer()

    async def settle(self, slot: Slot, operation: Settle, *, timeout_s: float) -> SettleAnswer:
        """Correct the charge of an acquire, once, or debit a long request in progress."""
        check_settle(operation)
        settling = _AwaitedSettle(timeout_s)
        settling.take_over(operation)
        self.settles.start(slot, settling)
        return await settling.answer()

    async def drain(self) -> None:
        """Wait until no call is in flight."""
        await self.acquires.drain()
        await self.settles.drain()


class _Awaited(Waiting, Generic[AnswerT]):
    """An operation whose answer is awaited as a future."""

    __slots__ = ()
    future: asyncio.Future[AnswerT]

    def __init__(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(loop.time() + min(timeout_s, TIMEOUT_MAX_S))
        self.future = loop.create_future()  # type: ignore[misc]  # a slot of each of the two classes below

    async def answer(self) -> AnswerT:
        """Return the store's answer, or raise the exception that came instead."""
        try:
            return await self.future
        finally:
            self.is_over = True

    @property
    def is_gone(self) -> bool:
        """True if it was answered, or its caller stopped waiting."""
        return self.is_over or self.future.cancelled()

    def tell(self, answer: AnswerT | Exception) -> None:
        """Set the result or the exception of the future."""
        self.is_over = True
        conclude(self.future, answer)


class _AwaitedAcquire(_Awaited[AcquireAnswer], Asking):
    __slots__ = ("future",)


class _AwaitedSettle(_Awaited[SettleAnswer], Settling):
    __slots__ = ("future",)


# Many callers share a call: an invalid operation must be rejected here, before it fails the others.


def check_acquire(operation: Acquire) -> None:
    """Raise ValueError if the acquire is invalid."""
    count = len(operation.wants)
    if not 1 <= count <= BUCKETS_PER_OPERATION_MAX:
        raise ValueError(f"an acquire takes 1 to {BUCKETS_PER_OPERATION_MAX} buckets, not {count}")
    if count > 1 and len({want.bucket for want in operation.wants}) < count:
        raise ValueError("an acquire takes each bucket once")
    for want in operation.wants:
        if not (0 <= want.charge <= AMOUNT_MAX and -AMOUNT_MAX <= want.minimum <= AMOUNT_MAX and want.bucket.isascii()):
            raise ValueError(f"{want.bucket!r}: a bad name, charge {want.charge} or minimum {want.minimum}")
    if not 0 < operation.requests <= AMOUNT_MAX:
        raise ValueError(f"requests must be positive, not {operation.requests}")
    if operation.idempotency is None:
        return
    if operation.dry_run:
        raise ValueError("a dry run takes no idempotency key: it decides nothing that could be repeated")
    if len(operation.idempotency.fingerprint) != FINGERPRINT_SIZE:
        raise ValueError(f"a fingerprint has {FINGERPRINT_SIZE} bytes")


def check_settle(operation: Settle) -> None:
    """Raise ValueError if the settle is invalid."""
    if not 1 <= len(operation.charges) <= BUCKETS_PER_OPERATION_MAX:
        raise ValueError(f"a settle takes 1 to {BUCKETS_PER_OPERATION_MAX} buckets, not {len(operation.charges)}")
    for charge in operation.charges:
        if not (0 <= charge.charge <= AMOUNT_MAX and 0 <= charge.weight <= AMOUNT_MAX and charge.bucket.isascii()):
            raise ValueError(f"{charge.bucket!r}: a bad name, charge {charge.charge} or weight {charge.weight}")
    if not (0 <= operation.work <= AMOUNT_MAX and 0 <= operation.requests <= AMOUNT_MAX):
        raise ValueError(f"a bad amount of work {operation.work} or requests {operation.requests}")
    if not (0 < operation.acquired_us <= operation.deadline_us < AMOUNT_MAX and operation.reservation.isascii()):
        raise ValueError(f"{operation.reservation!r}: a bad name, time or deadline")
