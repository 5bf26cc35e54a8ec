"""Refusals that are repeated for a moment without the store, and counted there later (`limiter.model.bucket.refusals`).

    refused by the store ──► remembered ──► repeated to callers that ask as much ──► counted in the store's next call

Repeated refusals are reported with the next call on their slot, or separately once the memory of them has ended, so
that statistics, controller and usage see every refusal. Each is reported at most once: a lost one stays uncounted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from limiter.engine.operation import ASKS_MORE, Operation
from limiter.engine.shape import Shape, at_rate
from limiter.model.bucket.contract import Refused
from limiter.model.bucket.decision import PlainRefusal, plain_refusal, refusal
from limiter.model.bucket.operations import LEARNED, REFUSING, TOO_LARGE, BucketAnswer, Verdict
from limiter.model.bucket.refusals import Refusals, Remembered
from limiter.store.batcher import Batcher
from limiter.store.flush import TOLD, Asking
from limiter.store.keys import Slot
from limiter.store.store_errors import StoreBusy

_BLOCKED = Verdict.BLOCKED
_ONE = (True,)


class Heard:
    """The buckets' answers to the request that was refused, and the refusal made of them."""

    __slots__ = ("answers", "now_us", "refused", "rows", "shape")

    def __init__(
        self,
        shape: Shape,
        rows: Sequence[bytes],
        answers: Sequence[BucketAnswer] | None,
        now_us: int,
        refused: Refused | PlainRefusal,
    ) -> None:
        self.shape = shape
        self.rows = rows
        self.answers = answers
        self.now_us = now_us
        self.refused = refused


class _Telling(Asking):
    """An operation that reports refusals to the store. Nobody waits for an answer."""

    __slots__ = ("_refused", "_repeater")

    def __init__(self, repeater: Repeater, refused: Remembered[Slot], deadline_s: float) -> None:
        super().__init__(deadline_s)
        self._repeater = repeater
        self._refused = refused
        self.buckets, self.rows = refused.buckets, refused.answer.rows
        self.asks = [(REFUSING if refuses else 0, 0.0, 0.0) for refuses in refused.refusing]
        self.flags, self.requests = TOLD, float(refused.count)
        self.lot = self.idempotency = None
        refused.count = 0

    def tell(self, answer: Any) -> None:
        """Receive the outcome: a report that was not even sent is kept for another time."""
        if not self.is_over:
            self.is_over = True
            if isinstance(answer, StoreBusy) and not self.is_sent:
                self._repeater.put_back(self._refused, int(self.requests))


class Repeater:
    """The refusals that one node repeats."""

    def __init__(self, acquires: Batcher[Asking], *, keep_s: float, deadline_s: float) -> None:
        self.refusals: Refusals[Slot] = Refusals(keep_s)
        self._acquires = acquires
        self._deadline_s = deadline_s
        self._timer: asyncio.TimerHandle | None = None

    def find(self, operation: Operation, now_s: float) -> bool:
        """Refuse an operation whose buckets are known, if a remembered refusal applies; return whether one did."""
        found = self.refusals.find(operation.slot, operation.buckets, operation.asks, now_s)
        if found is None or operation.flags & ASKS_MORE or found.answer.shape is not operation.shape:
            return False
        heard: Heard = found.answer
        if found.asks == operation.asks:
            operation.outcome, operation.remembered = heard.refused, found
        else:
            operation.outcome = _refusal(operation, heard)
        operation.is_over = True
        self.refusals.repeat(found)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.refusals.keep_s, self._tell_all)
        return True

    def hear_plain(self, operation: Operation, refused: PlainRefusal, now_s: float) -> None:
        """Remember a refusal by the only limit."""
        sent_s = operation.deadline_s - self._deadline_s
        until_s = min(now_s + self.refusals.keep_s, sent_s + refused.wait_us / 1e6)
        found: Remembered[Slot] = Remembered(operation.slot, operation.buckets, operation.asks, _ONE, until_s)
        found.answer = Heard(operation.shape, operation.rows, None, operation.now_us, refused)
        self.refusals.remember(found, now_s)

    def hear(
        self, operation: Operation, answers: Sequence[BucketAnswer], now_us: int, refused: Refused, now_s: float
    ) -> None:
        """The store refused: remember it where the buckets alone decided, and will for a while."""
        if operation.flags & ASKS_MORE or operation.limits is not operation.shape or not self.refusals.keep_s:
            return
        refusing = [answer.verdict is _BLOCKED for answer in answers]
        if any(answer.verdict > _BLOCKED for answer in answers) or any(how & TOO_LARGE for how, _, _ in operation.asks):
            return
        if any(limit.terms.block for limit in operation.limits):  # the store has to count, and block in time (W17)
            return
        waits = [(state.reset_ms, at) for at, state in enumerate(refused.limits) if not (state.passed or state.shadow)]
        wait_ms, binding = max(waits)
        sent_s = operation.deadline_s - self._deadline_s
        until_s = min(now_s + self.refusals.keep_s, sent_s + wait_ms / 1e3)
        found: Remembered[Slot] = Remembered(
            operation.slot, operation.buckets, operation.asks, refusing, until_s, binding
        )
        found.answer = Heard(operation.shape, operation.rows, answers, now_us, refused)
        self.refusals.remember(found, now_s)

    def tell_along(self, slot: Slot, operations: list[Any], now_s: float) -> None:
        """Add unreported refusals of a slot to its next call, if it asks the same bucket or their memory has ended.

        The rest waits for the timer: reported with every call, it would cost the store as much as asking it.
        """
        asked = {bucket for operation in operations for bucket in operation.buckets}
        for key, refused in list(self.refusals.untold.items()):
            ended = refused.until_s <= now_s or refused.buckets[refused.binding] in asked
            if ended and refused.place == slot:
                del self.refusals.untold[key]
                operations.append(_Telling(self, refused, now_s + self._deadline_s))

    def tell_all(self) -> None:
        """Report all unreported refusals now."""
        deadline_s = asyncio.get_running_loop().time() + self._deadline_s
        for refused in self.refusals.take_untold():
            self._acquires.start(refused.place, _Telling(self, refused, deadline_s))

    def begin_anew(self) -> None:
        """Forget all refusals, because the policies have changed, and report those that are unreported.

        A report carries the old terms: after the next acquire it would put the bucket back on them.
        """
        self.refusals.forget_all()
        if self.refusals.untold:
            self.tell_all()

    def _tell_all(self) -> None:
        self._timer = None
        self.tell_all()

    def put_back(self, refused: Remembered[Slot], count: int) -> None:
        """Count refusals again that could not be reported."""
        refused.count += count
        self.refusals.untold[id(refused)] = refused
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(1.0, self._tell_all)

    def stop(self) -> None:
        """Report what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.tell_all()


def _refusal(operation: Operation, heard: Heard) -> Refused | PlainRefusal:
    """Return the refusal of a request that asks for more than the one that was refused."""
    if isinstance(heard.refused, PlainRefusal):
        was = heard.refused
        params = at_rate(was.limit, operation.request.descriptor).terms
        how, _, charge = ask = operation.asks[0]
        if how & LEARNED:
            return was
        return plain_refusal(
            was.limit, params, ask, charge, was.balance, was.rate, was.capacity, in_requests=was.in_requests,
            retried=was.never,
        )  # fmt: skip
    assert heard.answers is not None
    wants = operation.wants(heard.now_us)
    answers = [
        answer if answer.in_requests or wanted.how & LEARNED else answer.but(charge=wanted.charge)
        for answer, wanted in zip(heard.answers, wants, strict=True)
    ]
    retried = operation.buckets if heard.refused.retry == "never" else ()
    return refusal(operation.limits, wants, answers, requests=1.0, now_us=heard.now_us, retried=retried)
