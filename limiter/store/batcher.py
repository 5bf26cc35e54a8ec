"""Group commit: the operations of many callers on one slot go to the store as one script call.

Operations that arrive while calls are in flight form the next call: an idle lane adds no latency, a busy one makes
large batches. A call carries a random id under which the script keeps its reply. Whatever goes wrong on the way,
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
from limiter.store.call_layout import CallExpired, reply_time_us
from limiter.store.clock import StoreClock, time_us
from limiter.store.flush import Batch, Waiting, WaitT
from limiter.store.ids import RandomIds
from limiter.store.keys import Slot
from limiter.store.link.connect import Link
from limiter.store.link.deadline import Deadline
from limiter.store.link.server_connection import pack
from limiter.store.scripts import Script, arguments
from limiter.store.store_errors import StoreBusy, StoreOutOfMemory, StoreRefused, StoreUnavailable

log = logging.getLogger(__name__)

WORTH_ANOTHER = 20
"""Waiting operations that justify a second call beside one in flight: the store decides on some while the node works
for others. With fewer, the second call costs more than it gains; with more, node and store wait for each other
(measured: docs/decisions/0006)."""

WAITING_MAX = 16_384
"""Operations that may wait in one lane, however fast the store is."""

CALL_WEIGHT = 0.3
"""Weight of the newest call in the moving average of call duration."""

TIMEOUT_MAX_S = 5.0
CALL_LIFETIME_US = 5_000_000
"""A copy of a call that reaches the store later than this is refused there. Half of the time that replies are kept
(REPLY_TTL_MS in lua/lib/begin.lua), so a copy either finds the reply or does nothing."""

CALL_ID_SIZE = 12
PAUSE_S = 0.005
"""Pause between attempts to send a call."""

DRAIN_LOOK_S = 0.001
"""How often a node that is stopping looks whether anything is still in flight."""


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
        """Takes each batch with its reply and the store's time. The engine puts a faster function of its own here."""

    def start(self, slot: Slot, waiting: WaitT) -> None:
        """Queue one operation. It receives its answer, or StoreUnavailable if there is none by its deadline."""
        lane = self._join(slot, [waiting], waiting.deadline_s)
        if not lane.scheduled and self._may_call(lane):
            lane.scheduled = True
            # Not at once, so that operations started later in this turn of the loop join the same call.
            asyncio.get_running_loop().call_soon(self._start, lane)

    def start_many(self, slot: Slot, joining: Sequence[WaitT], *, deadline_s: float) -> None:
        """Queue all operations of one turn of the loop; they share one deadline."""
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
        """Allow a first call always, and a second one beside it only for WORTH_ANOTHER operations."""
        return not lane.calls or (lane.calls < self._calls_max and len(lane.waiting) >= WORTH_ANOTHER)

    def _room(self, lane: _Lane[WaitT], deadline_s: float) -> int:
        """Return how many more operations may wait. One whose turn would come after its deadline is refused at once."""
        left_s = deadline_s - asyncio.get_running_loop().time()
        turns = left_s / lane.call_s * self._calls_max if lane.call_s > 0 else WAITING_MAX
        return max(0, min(WAITING_MAX, int(turns * flush.OPERATIONS_MAX)) - len(lane.waiting))

    @property
    def waiting(self) -> int:
        """Number of operations that no call carries yet."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    async def drain(self) -> None:
        """Wait until no call is in flight and no operation is waiting."""
        while self._lanes or self._tasks:
            if self._tasks:
                await asyncio.wait(self._tasks)
            else:
                await asyncio.sleep(DRAIN_LOOK_S)  # a lane is about to start, or its call is on the wire

    def _start(self, lane: _Lane[WaitT]) -> None:
        lane.scheduled = False
        try:
            packed = self._script.take(lane.waiting)
        except Exception as error:  # an operation that cannot be packed must not block the others
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
        """Send the call without a coroutine, as nearly all are. Return False if nothing was sent and `go_on` has to."""
        if not self._clock.is_set:
            return False
        now_s = asyncio.get_running_loop().time()
        packed = pack("EVALSHA", self._script.sha, *self._arguments(call))
        # The first attempt takes half of the time, so that a second one is possible if its connection turns out dead.
        attempt_s = now_s + (call.deadline_s - now_s) / 2
        return self._link.send(call.lane.prefix, packed, call.replied, deadline_s=attempt_s)

    def replied(self, call: _Call[WaitT], reply: Any) -> None:
        """Handle the reply to a call that `_send_at_once` sent: pass on the answers, or continue in `go_on`."""
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
        """Continue the call in a coroutine, under the same id: repairs take time."""
        task = asyncio.get_running_loop().create_task(self._flush(call, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self, call: _Call[WaitT], error: Exception | None) -> None:
        try:
            reply, now_us = await self._send(call, error)
        except asyncio.CancelledError:  # the loop is closing; nobody may be left waiting
            for waiting in (*call.batch, *call.lane.waiting):
                waiting.tell(StoreUnavailable("the node is ending"))
            raise
        except ResponseError as failed:  # no error that the scripts give on purpose; to callers, the store has failed
            log.error("the store answers %s with an error: %s", self._script.name, failed)
            for waiting in call.batch:
                waiting.tell(StoreUnavailable(f"the store answers with an error: {failed}"))
        except Exception as failed:  # whatever it is, callers wait for it
            for waiting in call.batch:
                waiting.tell(copy(failed))
        else:
            self._tell(call.batch, reply, now_us)
        finally:
            self._landed(call)

    def _tell(self, batch: Sequence[WaitT], reply: bytes, now_us: int) -> None:
        try:
            self.tell(batch, reply, now_us)
        except Exception as error:  # the reply cannot be read; callers that still wait must learn of it
            log.exception("a reply of the store cannot be read")
            for waiting in batch:
                waiting.tell(copy(error))

    def _landed(self, call: _Call[WaitT]) -> None:
        """Record a finished call in the tallies, and start the lane's next one."""
        lane, took_s = call.lane, time.perf_counter() - call.began_s
        self.tally.operations.observe(len(call.batch))
        self.tally.seconds.observe(took_s)
        lane.call_s += CALL_WEIGHT * (took_s - lane.call_s)
        lane.calls -= 1
        self._deadlines.trim()
        if not lane.waiting:
            self._forget_if_idle(lane)
        elif not lane.scheduled and self._may_call(lane):
            self._start(lane)

    async def _send(self, call: _Call[WaitT], error: Exception | None) -> tuple[bytes, int]:
        """Send one call until it is answered: again, under the same id, after every error that time allows to
        repair."""
        loop, prefix = asyncio.get_running_loop(), call.lane.prefix
        command: tuple[bytes | str, bytes] = ("EVALSHA", self._script.sha)
        lost = False
        while True:
            left_s = call.deadline_s - loop.time()
            if left_s <= 0:
                raise StoreUnavailable("no answer from the store in time")
            timeout_s = left_s if lost else left_s / 2  # half of the time, as in _send_at_once
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
                continue  # a redirect that came over the wire; the link follows it in the next attempt
            except CallExpired as expired:
                self._clock.observe(expired.now_us)
                call.arguments = None
            except StoreOutOfMemory:
                raise
            except StoreUnavailable as failed:
                lost = lost or not isinstance(failed, StoreRefused)
                await asyncio.sleep(min(PAUSE_S, left_s))

    async def _learn_the_time(self, prefix: bytes, timeout_s: float) -> None:
        """Ask the store for its time: every call carries an expiry by the store's clock."""
        self._clock.observe(time_us(await self._link.call(prefix, "TIME", timeout_s=timeout_s)))

    def _arguments(self, call: _Call[WaitT]) -> list[bytes | int]:
        """Return KEYS and ARGV, the same for every attempt."""
        if call.arguments is None:
            expires_us = self._clock.now_us() + CALL_LIFETIME_US
            call.arguments = arguments(call.lane.prefix, call.flush_id, call.packed, expires_us=expires_us)
        return call.arguments

    def _forget_if_idle(self, lane: _Lane[WaitT]) -> None:
        """Remove an idle lane: namespaces are client text, so lanes would accumulate without bound."""
        if not lane.waiting and not lane.calls and not lane.scheduled:
            self._lanes.pop(lane.slot, None)


class _Call(Generic[WaitT]):
    """One batch on its way to the store and back. All attempts to send it carry the same id."""

    __slots__ = ("_batcher", "arguments", "batch", "began_s", "deadline_s", "flush_id", "lane", "packed")

    def __init__(self, batcher: Batcher[WaitT], lane: _Lane[WaitT], packed: Batch[WaitT], flush_id: bytes) -> None:
        self._batcher = batcher
        self.lane = lane
        self.packed = packed
        self.batch = packed.operations
        self.flush_id = flush_id
        self.deadline_s = max([waiting.deadline_s for waiting in packed.operations])
        self.arguments: list[bytes | int] | None = None
        self.began_s = time.perf_counter()  # the resolution of the loop's clock may be milliseconds

    def replied(self, reply: Any) -> None:
        """Receive the store's reply, or the exception that stands for it."""
        self._batcher.replied(self, reply)


class _Lane(Generic[WaitT]):
    """The operations that wait for one slot, the number of calls in flight to it, and their average duration."""

    __slots__ = ("call_s", "calls", "prefix", "scheduled", "slot", "waiting")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.prefix = slot.prefix
        self.waiting: deque[WaitT] = deque()
        self.calls = 0
        self.call_s = 0.0
        self.scheduled = False


class _Deadlines:
    """One timer for all waiting operations: a timer for each would cost half as much as the call.

    Nearly all deadlines are set in the order in which they expire; the few that are not get a timer of their own.
    """

    __slots__ = ("_looks_s", "_queue", "_timer")

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()
        self._timer: Deadline | None = None
        self._looks_s = 0.0

    def watch(self, joining: Sequence[Waiting]) -> None:
        """Make these operations give up at their deadline, which is the same for all of them."""
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
        """Forget operations that have been answered."""
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
