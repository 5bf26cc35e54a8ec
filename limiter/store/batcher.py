"""Group commit: many callers' operations on one slot go to the store as one script call.

Operations that arrive while calls are in flight form the next call: an idle lane adds no latency, a busy one makes
large batches. A call carries a random id under which the script keeps its reply, so whatever goes wrong on the way,
sending the same call again applies it at most once (F-S1, F-S4, F-S6, F-S7).
"""

from __future__ import annotations

import asyncio
import logging
import time
from binascii import b2a_base64
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Generic

from redis.exceptions import AskError, NoScriptError, ResponseError

from limiter.model.tally import CallTally
from limiter.store import flush
from limiter.store.clock import StoreClock, time_us
from limiter.store.errors import StoreBusy, StoreOutOfMemory, StoreRefused, StoreUnavailable
from limiter.store.flush import Batch, Waiting, WaitT
from limiter.store.ids import RandomIds
from limiter.store.keys import Slot
from limiter.store.layout import CallExpired, reply_time_us
from limiter.store.link.connect import Link
from limiter.store.link.deadline import Deadline
from limiter.store.link.server_connection import pack
from limiter.store.scripts import Script, arguments

log = logging.getLogger(__name__)

WORTH_ANOTHER = 20
"""Operations that are worth another call beside one that is under way: while the store decides on some, the node works
for others. Fewer cost more than they gain, more leave both waiting for each other (measured: docs/decisions/0006)."""

WAITING_MAX = 16_384
"""Operations that may wait in one lane, however fast the store is."""

CALL_WEIGHT = 0.3
"""Of the last call in how long calls take."""

TIMEOUT_MAX_S = 5.0
CALL_LIFETIME_US = 5_000_000
"""A copy of a call that reaches the store later than this is refused there. Half of the time that replies are kept
(REPLY_TTL_MS in lua/lib/begin.lua), so a copy either finds the reply or does nothing."""

CALL_ID_SIZE = 12
PAUSE_S = 0.005
"""Between attempts."""

DRAIN_LOOK_S = 0.001
"""Between one look whether anything is in flight and the next, while a node ends."""


class Batcher(Generic[WaitT]):
    """Sends operations through one script, grouped by slot."""

    def __init__(self, link: Link, script: Script[WaitT], clock: StoreClock, *, calls_max: int = 2) -> None:
        self._link = link
        self._script = script
        self._clock = clock
        self._calls_max = calls_max
        self._lanes: dict[Slot, _Lane[WaitT]] = {}
        self._deadlines = _Deadlines()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = RandomIds(CALL_ID_SIZE)
        self.tally = CallTally()
        self.tell: Callable[[Sequence[WaitT], bytes, int], None] = script.tell
        """Is given each batch with its reply and the store's time; whoever makes the operations may do it better."""

    def start(self, slot: Slot, waiting: WaitT) -> None:
        """Have one operation applied; it is told the answer, or StoreUnavailable if there is none by its deadline."""
        lane = self._join(slot, [waiting], waiting.deadline_s)
        if not lane.scheduled and self._may_call(lane):
            lane.scheduled = True
            # Not at once: whoever else asks in this turn of the loop comes along.
            asyncio.get_running_loop().call_soon(self._start, lane)

    def start_many(self, slot: Slot, joining: Sequence[WaitT], *, deadline_s: float) -> None:
        """The same for all who ask in one turn of the loop; the deadline is the same for them."""
        lane = self._join(slot, joining, deadline_s)
        if not lane.scheduled and self._may_call(lane):
            self._start(lane)

    def _join(self, slot: Slot, joining: Sequence[WaitT], deadline_s: float) -> _Lane[WaitT]:
        lane = self._lanes.get(slot)
        if lane is None:
            self._lanes[slot] = lane = _Lane(slot)
        room = len(joining) if len(lane.waiting) < flush.OPERATIONS_MAX else self._room(lane, deadline_s)
        admitted = joining if room >= len(joining) else joining[:room]
        lane.waiting.extend(admitted)
        self._deadlines.watch(admitted)
        for waiting in joining[room:]:
            waiting.tell(StoreBusy("too many operations are waiting for the store"))
        return lane

    def _may_call(self, lane: _Lane[WaitT]) -> bool:
        """One call is always worth while; another beside it only for some operations at once."""
        return not lane.calls or (lane.calls < self._calls_max and len(lane.waiting) >= WORTH_ANOTHER)

    def _room(self, lane: _Lane[WaitT], deadline_s: float) -> int:
        """For how many there is room: a turn that would only come after the deadline is better refused at once."""
        left_s = deadline_s - asyncio.get_running_loop().time()
        turns = left_s / lane.call_s * self._calls_max if lane.call_s > 0 else WAITING_MAX
        return max(0, min(WAITING_MAX, int(turns * flush.OPERATIONS_MAX)) - len(lane.waiting))

    async def drain(self) -> None:
        """Wait for the calls in flight, and for what waits behind them."""
        while self._lanes or self._tasks:
            if self._tasks:
                await asyncio.wait(self._tasks)
            else:
                await asyncio.sleep(DRAIN_LOOK_S)  # a lane is about to start, or its call is on the wire

    def _start(self, lane: _Lane[WaitT]) -> None:
        lane.scheduled = False
        try:
            packed = self._script.take(lane.waiting)
        except Exception as error:  # what is wrong with the first one must not keep the others waiting
            log.exception("an operation cannot be packed")
            lane.waiting.popleft().tell(error)
            self._start(lane)
            return
        if not packed.operations:
            self._forget_if_idle(lane)
            return
        lane.calls += 1
        call = _Call(self, lane, packed, b2a_base64(self._ids.next(), newline=False))
        if not self._send_at_once(call):
            self.go_on(call)
        if lane.waiting and self._may_call(lane):
            self._start(lane)

    def _send_at_once(self, call: _Call[WaitT]) -> bool:
        """The way of nearly all calls; False where a coroutine has to go on, and nothing was sent."""
        if not self._clock.is_set:
            return False
        now_s = asyncio.get_running_loop().time()
        packed = pack("EVALSHA", self._script.sha, *self._arguments(call))
        # The first attempt leaves time for a second one, should its connection turn out to be dead.
        attempt_s = now_s + (call.deadline_s - now_s) / 2
        return self._link.send(call.lane.prefix, packed, call.replied, deadline_s=attempt_s)

    def replied(self, call: _Call[WaitT], reply: Any) -> None:
        """What came of a call that was sent at once: answers, or a reason to go on."""
        if type(reply) is not bytes:
            if not isinstance(reply, Exception):
                reply = ResponseError(f"a reply of {type(reply).__name__}")
            self.go_on(call, reply)
            return
        try:
            now_us = reply_time_us(reply)
        except Exception as error:
            self.go_on(call, error)
            return
        self._clock.observe(now_us)
        self._tell(call.batch, reply, now_us)
        self._landed(call)

    def go_on(self, call: _Call[WaitT], error: Exception | None = None) -> None:
        """In a coroutine, with the same id: repairs take time."""
        task = asyncio.get_running_loop().create_task(self._flush(call, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self, call: _Call[WaitT], error: Exception | None) -> None:
        try:
            reply, now_us = await self._send(call, error)
        except asyncio.CancelledError:  # the loop is closing: nobody may be left waiting
            for waiting in (*call.batch, *call.lane.waiting):
                waiting.tell(StoreUnavailable("the node is ending"))
            raise
        except ResponseError as failed:  # nothing that the scripts or we are made for: to callers, a store that fails
            log.error("the store answers %s with an error: %s", self._script.name, failed)
            for waiting in call.batch:
                waiting.tell(StoreUnavailable(f"the store answers with an error: {failed}"))
        except Exception as failed:  # whatever it is, somebody waits for it
            for waiting in call.batch:
                waiting.tell(copy(failed))
        else:
            self._tell(call.batch, reply, now_us)
        finally:
            self._landed(call)

    def _tell(self, batch: Sequence[WaitT], reply: bytes, now_us: int) -> None:
        try:
            self.tell(batch, reply, now_us)
        except Exception as error:  # a reply that cannot be read: whoever still waits must hear of it
            log.exception("a reply of the store cannot be read")
            for waiting in batch:
                waiting.tell(copy(error))

    def _landed(self, call: _Call[WaitT]) -> None:
        """Count the call, and let the lane go on."""
        lane, took_s = call.lane, time.perf_counter() - call.began_s
        self.tally.operations.observe(len(call.batch))
        self.tally.seconds.observe(took_s)
        lane.call_s += CALL_WEIGHT * (took_s - lane.call_s)
        lane.calls -= 1
        self._deadlines.trim()
        if not lane.scheduled and (not lane.waiting or self._may_call(lane)):
            self._start(lane)

    async def _send(self, call: _Call[WaitT], error: Exception | None) -> tuple[bytes, int]:
        """Send one call until it is answered: again, with the same id, after whatever can be repaired in time."""
        loop, prefix = asyncio.get_running_loop(), call.lane.prefix
        command: tuple[bytes | str, bytes] = ("EVALSHA", self._script.sha)
        lost = False
        while True:
            left_s = call.deadline_s - loop.time()
            if left_s <= 0:
                raise StoreUnavailable("no answer from the store in time")
            timeout_s = left_s if lost else left_s / 2  # as for what is sent at once
            try:
                if error is not None:
                    met, error = error, None
                    raise met
                if not self._clock.is_set:
                    await self._learn_the_time(prefix, timeout_s)
                reply = await self._link.call(prefix, *command, *self._arguments(call), timeout_s=timeout_s)
                now_us = reply_time_us(reply)
                self._clock.observe(now_us)
                return reply, now_us
            except NoScriptError:
                command = ("EVAL", self._script.source)
            except AskError:
                continue  # by a wire: the link follows it
            except CallExpired as expired:
                self._clock.observe(expired.now_us)
                call.arguments = None
            except StoreOutOfMemory:
                raise
            except StoreUnavailable as failed:
                lost = lost or not isinstance(failed, StoreRefused)
                await asyncio.sleep(min(PAUSE_S, left_s))

    async def _learn_the_time(self, prefix: bytes, timeout_s: float) -> None:
        """Every call has an expiry by the store's clock, so that clock must be known first."""
        self._clock.observe(time_us(await self._link.call(prefix, "TIME", timeout_s=timeout_s)))

    def _arguments(self, call: _Call[WaitT]) -> list[bytes | int]:
        """KEYS and ARGV, the same for every attempt."""
        if call.arguments is None:
            expires_us = self._clock.now_us() + CALL_LIFETIME_US
            call.arguments = arguments(call.lane.prefix, call.flush_id, call.packed, expires_us=expires_us)
        return call.arguments

    def _forget_if_idle(self, lane: _Lane[WaitT]) -> None:
        """Namespaces are client text: lanes must not gather."""
        if not lane.waiting and not lane.calls and not lane.scheduled:
            self._lanes.pop(lane.slot, None)


class _Call(Generic[WaitT]):
    """A batch on its way to the store and back, under one id whatever happens to it."""

    __slots__ = ("_batcher", "arguments", "batch", "began_s", "deadline_s", "flush_id", "lane", "packed")

    def __init__(self, batcher: Batcher[WaitT], lane: _Lane[WaitT], packed: Batch[WaitT], flush_id: bytes) -> None:
        self._batcher = batcher
        self.lane = lane
        self.packed = packed
        self.batch = packed.operations
        self.flush_id = flush_id
        self.deadline_s = max([waiting.deadline_s for waiting in packed.operations])
        self.arguments: list[bytes | int] | None = None
        self.began_s = time.perf_counter()  # the loop's own time may count in milliseconds

    def replied(self, reply: Any) -> None:
        """The store's reply has come, or will not."""
        self._batcher.replied(self, reply)


class _Lane(Generic[WaitT]):
    """What waits for one slot, how many calls are on their way there, and how long they take."""

    __slots__ = ("call_s", "calls", "prefix", "scheduled", "slot", "waiting")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.prefix = slot.prefix
        self.waiting: deque[WaitT] = deque()
        self.calls = 0
        self.call_s = 0.0
        self.scheduled = False


class _Deadlines:
    """One timer for all who wait: a timer each would cost as much as half the call.

    Nearly all deadlines come in the order in which they were set; the few that do not get a timer of their own.
    """

    __slots__ = ("_looks_s", "_queue", "_timer")

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()
        self._timer: Deadline | None = None
        self._looks_s = 0.0

    def watch(self, joining: Sequence[Waiting]) -> None:
        """See to it that they give up in time; all of them have one deadline."""
        if not joining:
            return
        queue, deadline_s = self._queue, joining[0].deadline_s
        if queue and deadline_s < queue[-1].deadline_s:
            for waiting in joining:
                Deadline(deadline_s, waiting.give_up)
            return
        queue.extend(joining)
        if self._timer is None or self._looks_s > deadline_s:
            self._look_at(deadline_s)

    def _look_at(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._looks_s = Deadline(when_s, self._look), when_s

    def trim(self) -> None:
        """Forget those that were answered."""
        queue = self._queue
        while queue and queue[0].is_over:
            queue.popleft()

    def _look(self) -> None:
        loop, queue = asyncio.get_running_loop(), self._queue
        now_s = loop.time()
        while queue and (queue[0].is_over or queue[0].deadline_s <= now_s):
            queue.popleft().give_up()
        self._timer = None
        if queue:
            self._look_at(queue[0].deadline_s)
