"""Group commit: many callers' operations on one slot go to the store as one script call.

Operations that arrive while calls are in flight form the next call: an idle lane adds no latency, a busy one makes
large batches. A call carries a random id under which the script keeps its reply, so whatever goes wrong on the way,
sending the same call again applies it at most once (S1, S4, S6, S7).
"""

from __future__ import annotations

import asyncio
from binascii import b2a_base64
from collections import deque
from collections.abc import Sequence
from copy import copy
from os import urandom
from typing import Generic, NamedTuple, TypeVar

from redis.exceptions import NoScriptError

from limiter.store.clock import StoreClock
from limiter.store.connect import Link
from limiter.store.errors import StoreOutOfMemory, StoreRefused, StoreUnavailable
from limiter.store.keys import Slot
from limiter.store.layout import CallExpired, reply_time_us
from limiter.store.scripts import Script

OPERATIONS_MAX = 128
"""Operations in one call: bounds how long the store is busy with it."""

BUCKETS_MAX = 1024
"""Buckets in one call, for operations that touch many."""

WAITING_MAX = 16_384
"""Operations that may wait in one lane; beyond that the store is too slow for what is asked of it."""

TIMEOUT_MAX_S = 5.0
CALL_LIFETIME_US = 5_000_000
"""A copy of a call that reaches the store later than this is refused there. Half of the time that replies are kept
(REPLY_TTL_MS in lua/lib/call.lua), so a copy either finds the reply or does nothing."""

PAUSE_S = 0.005
"""Between attempts."""

OpT = TypeVar("OpT")
AnswerT = TypeVar("AnswerT")


class _Waiting(NamedTuple, Generic[OpT, AnswerT]):
    operation: OpT
    future: asyncio.Future[AnswerT]
    deadline_s: float


class Batcher(Generic[OpT, AnswerT]):
    """Sends operations through one script, grouped by slot."""

    def __init__(self, link: Link, script: Script[OpT, AnswerT], clock: StoreClock, *, calls_max: int = 2) -> None:
        self._link = link
        self._script = script
        self._clock = clock
        self._calls_max = calls_max
        self._lanes: dict[Slot, _Lane[OpT, AnswerT]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, slot: Slot, operation: OpT, *, timeout_s: float) -> AnswerT:
        """Have one operation applied; StoreUnavailable if there is no answer in time.

        The caller may be cancelled at any moment: the call goes on without it (R16).
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[AnswerT] = loop.create_future()
        deadline_s = loop.time() + min(timeout_s, TIMEOUT_MAX_S)
        lane = self._lanes.get(slot)
        if lane is None:
            self._lanes[slot] = lane = _Lane(slot)
        elif len(lane.waiting) >= WAITING_MAX:
            raise StoreRefused("too many operations are waiting for the store")
        lane.waiting.append(_Waiting(operation, future, deadline_s))
        if lane.calls < self._calls_max and not lane.scheduled:
            lane.scheduled = True
            # Not at once: whoever else asks in this turn of the loop comes along.
            loop.call_soon(self._start, lane)
        timer = loop.call_at(deadline_s, _give_up, future)
        try:
            return await future
        finally:
            timer.cancel()

    async def drain(self) -> None:
        """Wait for the calls in flight, and for what waits behind them."""
        while self._lanes or self._tasks:
            if self._tasks:
                await asyncio.wait(self._tasks)
            else:
                await asyncio.sleep(0)  # a lane is about to start

    def _start(self, lane: _Lane[OpT, AnswerT]) -> None:
        lane.scheduled = False
        batch = self._take(lane)
        if not batch:
            self._forget_if_idle(lane)
            return
        lane.calls += 1
        task = asyncio.get_running_loop().create_task(self._flush(lane, batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if lane.waiting and lane.calls < self._calls_max:
            self._start(lane)

    def _take(self, lane: _Lane[OpT, AnswerT]) -> list[_Waiting[OpT, AnswerT]]:
        """The next batch: in order, without those that gave up, one set of parameters a bucket."""
        batch: list[_Waiting[OpT, AnswerT]] = []
        known: dict[str, object] = {}
        waiting, demands = lane.waiting, self._script.demands
        while waiting and len(batch) < OPERATIONS_MAX and len(known) < BUCKETS_MAX:
            if waiting[0].future.done():
                waiting.popleft()
                continue
            wanted = demands(waiting[0].operation)
            if not all(_agree(known.get(bucket, params), params) for bucket, params in wanted):
                break
            known.update(wanted)
            batch.append(waiting.popleft())
        return batch

    async def _flush(self, lane: _Lane[OpT, AnswerT], batch: list[_Waiting[OpT, AnswerT]]) -> None:
        try:
            answers = await self._send(lane.slot, batch)
        except asyncio.CancelledError:  # the loop is closing: nobody may be left waiting
            for waiting in (*batch, *lane.waiting):
                waiting.future.cancel()
            raise
        except Exception as error:  # whatever it is, somebody waits for it
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(copy(error))
        else:
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.future.done():
                    waiting.future.set_result(answer)
        finally:
            lane.calls -= 1
            if not lane.scheduled:
                self._start(lane)

    async def _send(self, slot: Slot, batch: Sequence[_Waiting[OpT, AnswerT]]) -> Sequence[AnswerT]:
        """Send one call until it is answered: again, with the same id, after whatever can be repaired in time."""
        loop = asyncio.get_running_loop()
        operations = [waiting.operation for waiting in batch]
        deadline_s = max(waiting.deadline_s for waiting in batch)
        prefix, flush_id = slot.prefix, b2a_base64(urandom(12), newline=False)
        command: tuple[bytes | str, bytes] = ("EVALSHA", self._script.sha)
        arguments: list[bytes | int] | None = None
        lost = False
        while True:
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                raise StoreUnavailable("no answer from the store in time")
            # The first attempt leaves time for a second one, should its connection turn out to be dead.
            timeout_s = left_s if lost else left_s / 2
            try:
                if arguments is None:
                    arguments = await self._arguments(prefix, flush_id, operations, timeout_s=timeout_s)
                reply = await self._link.call(prefix, *command, *arguments, timeout_s=timeout_s)
                self._clock.observe(reply_time_us(reply))
                return self._script.answers(reply, operations)
            except NoScriptError:
                command = ("EVAL", self._script.source)
            except CallExpired as expired:
                self._clock.observe(expired.now_us)
                arguments = None
            except StoreOutOfMemory:
                raise
            except StoreUnavailable as error:
                lost = lost or not isinstance(error, StoreRefused)
                await asyncio.sleep(min(PAUSE_S, left_s))

    async def _arguments(
        self, prefix: bytes, flush_id: bytes, operations: list[OpT], *, timeout_s: float
    ) -> list[bytes | int]:
        """KEYS and ARGV. Every call has an expiry by the store's clock, so that clock must be known first."""
        if not self._clock.is_set:
            seconds, microseconds = await self._link.call(prefix, "TIME", timeout_s=timeout_s)
            self._clock.observe(int(seconds) * 1_000_000 + int(microseconds))
        expires_us = self._clock.now_us() + CALL_LIFETIME_US
        return self._script.call(prefix, flush_id, operations, expires_us=expires_us)

    def _forget_if_idle(self, lane: _Lane[OpT, AnswerT]) -> None:
        """Namespaces are client text: lanes must not gather."""
        if not lane.waiting and not lane.calls and not lane.scheduled:
            self._lanes.pop(lane.slot, None)


class _Lane(Generic[OpT, AnswerT]):
    """What waits for one slot, and how many calls are on their way there."""

    __slots__ = ("calls", "scheduled", "slot", "waiting")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.waiting: deque[_Waiting[OpT, AnswerT]] = deque()
        self.calls = 0
        self.scheduled = False


def _agree(known: object, params: object) -> bool:
    return known is params or known == params


def _give_up(future: asyncio.Future[AnswerT]) -> None:
    if not future.done():
        future.set_exception(StoreUnavailable("no answer from the store in time"))
