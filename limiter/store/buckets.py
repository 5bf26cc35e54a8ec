"""The shared buckets of one store: what the engine talks to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from limiter.model.bucket.operations import Acquire, AcquireAnswer, AcquireStatus, Settle, SettleAnswer
from limiter.model.tally import CallTally
from limiter.runtime.told import Done
from limiter.store.batcher import Batcher, Waiting
from limiter.store.clock import StoreClock
from limiter.store.keys import Slot
from limiter.store.link.connect import Link
from limiter.store.scripts import AcquireScript, SettleScript

BUCKETS_PER_OPERATION_MAX = 255
FINGERPRINT_SIZE = 16
AMOUNT_MAX = 2.0**53

_WINDOW = AcquireStatus.WINDOW


class Buckets:
    """Acquires and settles, batched."""

    def __init__(self, link: Link, *, calls_max: int = 2) -> None:
        self.clock = StoreClock()
        self._acquires: Batcher[Acquire, AcquireAnswer] = Batcher(
            link, AcquireScript(), self.clock, calls_max=calls_max
        )
        self._settles: Batcher[Settle, SettleAnswer] = Batcher(link, SettleScript(), self.clock, calls_max=calls_max)

    @property
    def call_tallies(self) -> dict[str, CallTally]:
        """What was sent to the store, by operation."""
        return {"acquire": self._acquires.tally, "settle": self._settles.tally}

    async def acquire(self, slot: Slot, operation: Acquire, *, timeout_s: float) -> AcquireAnswer:
        """Admit or refuse, over all the operation's buckets or none."""
        check_acquire(operation)
        return await self._acquires.run(slot, operation, timeout_s=timeout_s)

    def start_acquire(
        self,
        slot: Slot,
        plan: Callable[[int], Acquire],
        done: Done[AcquireAnswer],
        *,
        deadline_s: float,
    ) -> None:
        """The same without a coroutine, for an operation that depends on the calendar.

        `plan` makes it for a time of the store's (us). The node only guesses that time, before the first reply by its
        own clock. Where a quota's window is another one, the script says so and does nothing, and the operation is
        made anew for the time in the answer (P4, F-T4). `done` is told the answer, or why there is none, until the
        deadline (in the loop's time).
        """

        def answered(answer: AcquireAnswer | Exception) -> None:
            if type(answer) is AcquireAnswer and answer.status is _WINDOW:
                self._acquires.start(slot, plan(answer.now_us), done, deadline_s=deadline_s)
            else:
                done(answer)

        operation = plan(self.clock.guess_us())
        check_acquire(operation)
        self._acquires.start(slot, operation, answered, deadline_s=deadline_s)

    def start_acquires(
        self, slot: Slot, asked: Sequence[Waiting[Acquire, AcquireAnswer]], *, deadline_s: float
    ) -> None:
        """The same for many at once, each sound and made for the time that the caller guesses: WINDOW is an answer too.

        What is sound is said below; whoever makes them by policies has made them so.
        """
        self._acquires.start_many(slot, asked, deadline_s=deadline_s)

    async def settle(self, slot: Slot, operation: Settle, *, timeout_s: float) -> SettleAnswer:
        """Correct what an acquire charged, once; or debit a long request as it goes."""
        _check_settle(operation)
        return await self._settles.run(slot, operation, timeout_s=timeout_s)

    def start_settle(self, slot: Slot, operation: Settle, done: Done[SettleAnswer], *, deadline_s: float) -> None:
        """The same without a coroutine; the deadline is in the loop's time."""
        _check_settle(operation)
        self._settles.start(slot, operation, done, deadline_s=deadline_s)

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        await self._acquires.drain()
        await self._settles.drain()


# Many callers share a call: what one of them gets wrong must stop here, before it stops the others.


def check_acquire(operation: Acquire) -> None:
    """ValueError unless the acquire is sound."""
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


def _check_settle(operation: Settle) -> None:
    if not 1 <= len(operation.charges) <= BUCKETS_PER_OPERATION_MAX:
        raise ValueError(f"a settle takes 1 to {BUCKETS_PER_OPERATION_MAX} buckets, not {len(operation.charges)}")
    for charge in operation.charges:
        if not (0 <= charge.charge <= AMOUNT_MAX and 0 <= charge.weight <= AMOUNT_MAX and charge.bucket.isascii()):
            raise ValueError(f"{charge.bucket!r}: a bad name, charge {charge.charge} or weight {charge.weight}")
    if not (0 <= operation.work <= AMOUNT_MAX and 0 <= operation.requests <= AMOUNT_MAX):
        raise ValueError(f"a bad amount of work {operation.work} or requests {operation.requests}")
    if not (0 < operation.acquired_us <= operation.deadline_us < AMOUNT_MAX and operation.reservation.isascii()):
        raise ValueError(f"{operation.reservation!r}: a bad name, time or deadline")
