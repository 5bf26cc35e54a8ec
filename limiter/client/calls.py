"""Operations on their way to the service: acquires at once, settles soon, both in batches.

An acquire goes out at once if no call is in flight. Otherwise it waits, with all others that arrive meanwhile, until a
call comes back, or until the one in flight has taken `BESIDE_S`: then another call goes out beside it, so that one
slow answer does not hold up everybody. Settles ride along with acquires, and go by themselves once the oldest has
waited `LINGER_S`.

A settle is sent again until it is answered, however long that takes; the service recognises a repeat. Progress of a
reservation that has not been sent yet is replaced by what comes after it, so a reservation waits at most once.

A call may take longer than its acquires can wait: a grant that comes too late is given back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec

from limiter.client.node_pool import NoAnswer, NodePool

BATCH_MAX = 256
"""Operations of one call: a node begins about as many without a pause."""
BATCH_BYTES = 400_000
"""Bytes of one call: a node takes a megabyte. One that is set to take less says so, and calls become shorter."""
BATCH_BYTES_LEAST = 2_000
CALLS_MAX = 8
BESIDE_S = 0.005
LINGER_S = 0.1
SETTLE_PATIENCE_S = 5.0
PROGRESS_EVERY_S = 0.1
"""Progress that comes faster is put together: the service hears the latest sum."""
RENEW_AT = 0.5
"""The part of its time to live after which an open reservation is renewed."""
SWEEP_S = 0.25
SWEEP_LEAST_S = 0.002
"""For less than a millisecond uvloop returns a handle that does not know when it is due."""
AGAIN_FIRST_S = 0.05
AGAIN_MAX_S = 2.0
NOT_DECIDED = 500
"""From this status on, nothing was decided: a settle is sent again."""
ASK_AGAIN = frozenset({401, 408, 413, 425, 429})
"""Answers that say nothing of the settle, which is sent again: the node does not know the API key, which has granted
(yet, or any more: keys are being exchanged); the batch was too long; something between client and node had no time."""
TOO_MUCH_AT_ONCE = 413
"""Answer to an acquire that a batch had no room for."""
LATE_S = 0.25
"""Time that a call has beyond the deadlines of its acquires, so that a late grant is heard of and given back."""

log = logging.getLogger("headgate")
encode = msgspec.json.Encoder().encode

Answer = tuple[int, Mapping[str, Any]]
Op = Literal["acquire", "settle"]


class Acquire:
    """One acquire on its way, or a settle whose sender waits for the answer."""

    __slots__ = ("body", "by_s", "expiry", "future", "is_alone", "is_kept", "op", "raw")

    def __init__(
        self, op: Op, body: dict[str, Any], by_s: float, future: asyncio.Future[Answer], *, is_kept: bool
    ) -> None:
        self.op = op
        self.body = body
        self.raw = encode({"op": op, **body})
        self.by_s = by_s
        self.future = future
        self.expiry: asyncio.TimerHandle | None = None
        self.is_alone = False
        """A batch had no room for it."""
        self.is_kept = is_kept
        """A grant that comes too late is not given back: its sender can still ask for it, under the same key."""


class Settlement:
    """Result of a reservation's work: the last word on it, sent until it is answered."""

    __slots__ = ("__weakref__", "copies", "final", "is_over", "is_waiting", "latency_ms", "outcome", "reservation",
                 "sent_s", "sent_work", "stop", "ttl_s", "work")  # fmt: skip

    def __init__(self, reservation: str, ttl_s: float = 60.0) -> None:
        self.reservation = reservation
        self.work = 0.0
        self.final = False
        self.latency_ms: float | None = None
        self.outcome = "ok"
        self.ttl_s = ttl_s
        self.sent_s = time.monotonic()
        """When the service last heard of it."""
        self.sent_work = 0.0
        self.stop = False
        """The service asks the work to stop: the debt has passed a bound."""
        self.is_waiting = False
        self.copies = 0
        """Copies that are under way: progress, and the settle that may overtake it."""
        self.is_over = False
        """The service has answered the last word."""

    def raw(self) -> bytes:
        """Return it as one operation of a batch."""
        body: dict[str, Any] = {"op": "settle", "reservation": self.reservation, "work": self.work}
        if not self.final:
            body["final"] = False
        if self.latency_ms is not None:
            body["latency_ms"] = self.latency_ms
        if self.outcome != "ok":
            body["outcome"] = self.outcome
        return encode(body)


Copy = tuple[Settlement, bool, bytes]
"""A settlement, whether this copy of it is final, and its bytes as they were sent."""


class Calls:
    """The batches of one loop."""

    def __init__(self, pool: NodePool, *, settles_max: int, is_repeatable: bool) -> None:
        self._pool = pool
        self._is_repeatable = is_repeatable
        self._settles_max = settles_max
        self._acquires: deque[Acquire] = deque()
        self._settles: deque[Settlement] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._last_sent_s = 0.0
        self._start_soon: asyncio.Handle | None = None
        self._start_later: asyncio.TimerHandle | None = None
        self._start_later_s = 0.0
        self._open: list[weakref.ref[Settlement]] = []
        self._sweep_later: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._is_closed = False
        self._again_s = 0.0
        self._pause_s = AGAIN_FIRST_S
        self._unsettled = 0
        self._batch_bytes = BATCH_BYTES
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_urgent = False
        self.batches = 0
        self.acquires = 0
        self.settles = 0
        self.settles_repeated = 0
        self.settles_refused = 0
        """Settles that the service will never take: the reservation is unknown, or the key may not settle."""

    @property
    def is_full(self) -> bool:
        """Return whether as many settles as are kept wait for their answers; then nothing new may begin."""
        return self._unsettled >= self._settles_max

    @property
    def unsettled(self) -> int:
        """Settles that have not been answered yet."""
        return self._unsettled

    # What is open.

    def keep(self, settlement: Settlement) -> None:
        """Renew a reservation until it is settled, or its grant is gone."""
        self._open.append(weakref.ref(settlement))
        wait_s = settlement.ttl_s * RENEW_AT / 2
        if wait_s < SWEEP_S:
            self._sweep_within(wait_s)
        elif self._sweep_later is None:
            self._sweep_later = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep_within(self, wait_s: float) -> None:
        wait_s = max(SWEEP_LEAST_S, wait_s)
        if self._sweep_later is not None:
            if self._sweep_later.when() <= self._loop.time() + wait_s:
                return
            self._sweep_later.cancel()
        self._sweep_later = self._loop.call_later(wait_s, self._sweep)

    def progress(self, settlement: Settlement) -> None:
        """Report progress, unless the service has just heard of it; the next sweep does not forget it."""
        if time.monotonic() - settlement.sent_s >= PROGRESS_EVERY_S:
            self.report(settlement)

    def _sweep(self) -> None:
        self._sweep_later = None
        now_s = time.monotonic()
        again_s = SWEEP_S
        self._open = [known for known in self._open if (one := known()) is not None and not one.final]
        for known in self._open:
            one = known()
            if one is None:
                continue
            again_s = min(again_s, one.ttl_s * RENEW_AT / 2)
            if one.work > one.sent_work or now_s - one.sent_s > one.ttl_s * RENEW_AT:
                self.report(one)
        if self._open:
            self._sweep_within(again_s)

    # Asking.

    def ask(
        self, body: dict[str, Any], by_s: float, op: Op = "acquire", *, is_kept: bool = False
    ) -> asyncio.Future[Answer]:
        """Send an acquire. Its future fails with NoAnswer when the time is over; cancel it to give the acquire up. What
        is granted after that is given back, unless it is kept for a repeat of its sender's."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        acquire = Acquire(op, body, by_s, future, is_kept=is_kept)
        acquire.expiry = self._loop.call_later(max(0.0, by_s - time.monotonic()), self._expire, acquire)
        self._acquires.append(acquire)
        self._look()
        return future

    def _expire(self, acquire: Acquire) -> None:
        if not acquire.future.done():
            why = self._pool.failure or "no answer in time"
            acquire.future.set_exception(NoAnswer(was_sent=True, why=why))

    def report(self, settlement: Settlement) -> None:
        """Send a settle or progress soon. A settlement that waits already goes out with its present values."""
        if threading.get_ident() != self._thread or self._is_closed:
            self._elsewhere(self.report, settlement)
            return
        if settlement.is_waiting or settlement.is_over:
            return
        settlement.is_waiting = True
        if not settlement.copies:
            self._unsettled += 1
            self._empty.clear()
        self._settles.append(settlement)
        self._look()

    def settle(self, settlement: Settlement, work: float, outcome: str, latency_ms: float | None = None) -> None:
        """Send the last word on a reservation soon."""
        if threading.get_ident() != self._thread:
            self._elsewhere(self.settle, settlement, work, outcome, latency_ms)
            return
        settlement.work, settlement.outcome, settlement.latency_ms = work, outcome, latency_ms
        settlement.final = True
        self.report(settlement)

    def give_back(self, reservation: str) -> None:
        """Settle a reservation that nobody will work under."""
        self.settle(Settlement(reservation), 0.0, "cancelled")

    def _elsewhere(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop's thread. A child process has none: there its parent settles."""
        if os.getpid() != self._pid:
            return
        if not self._is_closed:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)
                return
        log.warning("a grant was settled after its client was closed; what it was charged stays")

    async def flush(self, timeout_s: float) -> int:
        """Send every settle that waits, at once; returns how many are still unanswered when the time is over."""
        self._is_urgent = True
        self._again_s = 0.0
        try:
            self._look()
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        finally:
            self._is_urgent = False
        return self._unsettled

    async def close(self, timeout_s: float = 0.0) -> None:
        """Wait for the calls that are under way, settle what they granted too late, and end the rest."""
        until_s = time.monotonic() + timeout_s
        if self._under_way and timeout_s > 0:
            await asyncio.wait(set(self._under_way), timeout=timeout_s)
            await self.flush(max(0.0, until_s - time.monotonic()))
        self._is_closed = True
        for handle in (self._start_soon, self._start_later, self._sweep_later):
            if handle is not None:
                handle.cancel()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._fail(list(self._acquires), [], NoAnswer(was_sent=False, why="the client was closed"))
        if self._unsettled:
            log.warning("%d settles were not answered before the client was closed", self._unsettled)

    # Sending.

    def _look(self) -> None:
        """Start a call in this turn of the loop, or know when to look again."""
        if self._start_soon is not None:
            return
        wait_s = self._wait_s(time.monotonic())
        if wait_s is None:
            return
        loop = self._loop
        if wait_s <= 0.0:
            self._start_soon = loop.call_soon(self._start)
        elif self._start_later is None or self._start_later_s > loop.time() + wait_s:
            if self._start_later is not None:
                self._start_later.cancel()
            # Kept here, because uvloop's handle of a time shorter than a millisecond does not know when it is due.
            self._start_later_s = loop.time() + wait_s
            self._start_later = loop.call_later(wait_s, self._awake)

    def _wait_s(self, now_s: float) -> float | None:
        """Return how long nothing has to go out; None: not before something changes."""
        if len(self._under_way) >= CALLS_MAX:
            return None
        if self._acquires:
            return self._last_sent_s + BESIDE_S - now_s if self._under_way else 0.0
        if not self._settles:
            return None
        if now_s < self._again_s:
            return self._again_s - now_s
        if self._is_urgent or len(self._settles) >= BATCH_MAX:
            return self._last_sent_s + BESIDE_S - now_s if self._under_way else 0.0
        # By half of it, so that none is older than LINGER_S when it is sent.
        return LINGER_S / 2 if self._start_later is None else None

    def _awake(self) -> None:
        self._start_later = None
        self._start()

    def _start(self) -> None:
        self._start_soon = None
        if len(self._under_way) >= CALLS_MAX or self._is_closed:
            return
        now_s = time.monotonic()
        acquires, settles = self._take(now_s)
        if acquires or settles:
            self._last_sent_s = now_s
            task = self._loop.create_task(self._call(acquires, settles))
            self._under_way.add(task)
            task.add_done_callback(self._came_back)
        self._look()

    def _take(self, now_s: float) -> tuple[list[Acquire], list[Copy]]:
        """Take the next call's operations from the queues: acquires first, as far as count and bytes allow."""
        acquires: list[Acquire] = []
        room = self._batch_bytes
        while self._acquires and room > 0 and len(acquires) < BATCH_MAX:
            if self._acquires[0].is_alone and acquires:
                break
            acquire = self._acquires.popleft()
            if not acquire.future.done():
                acquires.append(acquire)
                room -= len(acquire.raw)
                if acquire.is_alone:
                    return acquires, []
        settles: list[Copy] = []
        while self._settles and room > 0 and len(acquires) + len(settles) < BATCH_MAX and now_s >= self._again_s:
            settlement = self._settles.popleft()
            settlement.is_waiting = False
            settlement.copies += 1
            settlement.sent_s, settlement.sent_work = now_s, settlement.work
            raw = settlement.raw()
            settles.append((settlement, settlement.final, raw))
            room -= len(raw)
        return acquires, settles

    def _came_back(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call to the service failed unexpectedly", exc_info=error)
        if self._acquires or self._settles:
            self._start() if self._acquires else self._look()

    async def _call(self, acquires: list[Acquire], settles: list[Copy]) -> None:
        self.batches += 1
        self.acquires += len(acquires)
        self.settles += len(settles)
        try:
            results = await self._post(acquires, settles)
        except NoAnswer as error:
            self._fail(acquires, settles, error)
            return
        except BaseException:
            self._fail(acquires, settles, NoAnswer(was_sent=True, why="the call was given up"))
            raise
        for acquire, (status, body) in zip(acquires, results, strict=False):
            self._tell(acquire, status, body)
        again = sum(
            self._settled(one, is_final, status, body)
            for (one, is_final, _), (status, body) in zip(settles, results[len(acquires) :], strict=True)
        )
        if settles:
            self._pace(is_failing=again == len(settles))

    async def _post(self, acquires: list[Acquire], settles: list[Copy]) -> list[Answer]:
        """Return an answer for each operation."""
        count = len(acquires) + len(settles)
        is_repeatable = self._is_repeatable or not acquires
        if acquires:
            first_s = min(one.by_s for one in acquires)
            by_s = max(one.by_s for one in acquires) + LATE_S
        else:
            first_s = by_s = time.monotonic() + SETTLE_PATIENCE_S
        if count == 1 and acquires:
            body = dict(acquires[0].body)
            key = body.pop("idempotency_key", None)
            headers = None if key is None else {"idempotency-key": key}
            return [
                await self._pool.post(
                    f"/v1/{acquires[0].op}",
                    encode(body),
                    by_s=by_s,
                    first_s=first_s,
                    is_repeatable=is_repeatable,
                    headers=headers,
                )
            ]
        operations = b",".join([*(one.raw for one in acquires), *(raw for _, _, raw in settles)])
        status, answer = await self._pool.post(
            "/v1/batch",
            b'{"operations":[%b]}' % operations,
            by_s=by_s,
            first_s=first_s,
            is_repeatable=is_repeatable,
        )
        if status == TOO_MUCH_AT_ONCE:
            self._batch_bytes = max(BATCH_BYTES_LEAST, self._batch_bytes // 2)
        if status != 200:
            return [(status, answer)] * count
        return _results(answer, count)

    def _tell(self, acquire: Acquire, status: int, body: Mapping[str, Any]) -> None:
        if acquire.expiry is not None:
            acquire.expiry.cancel()
        if acquire.future.done():
            if not acquire.is_kept and (reservation := reservation_in(status, body)):
                self.give_back(reservation)
        elif status == TOO_MUCH_AT_ONCE and not acquire.is_alone:
            acquire.is_alone = True
            acquire.expiry = self._loop.call_later(max(0.0, acquire.by_s - time.monotonic()), self._expire, acquire)
            self._acquires.append(acquire)
        else:
            acquire.future.set_result((status, body))

    def _fail(self, acquires: list[Acquire], settles: list[Copy], error: NoAnswer) -> None:
        for acquire in acquires:
            if acquire.expiry is not None:
                acquire.expiry.cancel()
            if not acquire.future.done():
                acquire.future.set_exception(error)
        for one, _, _ in settles:
            self._again(one)
        if settles:
            self._pace(is_failing=True)

    def _settled(self, settlement: Settlement, is_final: bool, status: int, body: Mapping[str, Any]) -> bool:
        """Take over the answer to a settle; returns whether it has to be sent again."""
        if status >= NOT_DECIDED or status in ASK_AGAIN:
            self._again(settlement)
            return True
        if status == 200:
            settlement.stop |= bool(body.get("stop"))
        elif is_final and not settlement.is_over:
            self.settles_refused += 1
            log.warning("a settle was not taken: %s %s", status, body.get("reason", ""))
        settlement.is_over |= is_final
        self._landed(settlement)
        return False

    def _landed(self, settlement: Settlement) -> None:
        """Note that a copy is no longer under way."""
        settlement.copies -= 1
        if not settlement.copies and not settlement.is_waiting:
            self._unsettled -= 1
            if not self._unsettled:
                self._empty.set()

    def _again(self, settlement: Settlement) -> None:
        """Put a settle back in line, unless its last word was answered; a newer word waits already."""
        self.settles_repeated += 1
        if not settlement.is_waiting and not settlement.is_over:
            settlement.is_waiting = True
            self._settles.append(settlement)
        self._landed(settlement)

    def _pace(self, *, is_failing: bool) -> None:
        """Pause settles while they fail, longer each time; go on at once after an answer."""
        if not is_failing:
            self._again_s, self._pause_s = 0.0, AGAIN_FIRST_S
            return
        self._again_s = time.monotonic() + self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311
        self._pause_s = min(AGAIN_MAX_S, self._pause_s * 2)


def _results(answer: Mapping[str, Any], count: int) -> list[Answer]:
    """Return the answers to the operations of a batch."""
    results = answer.get("results")
    if not isinstance(results, list) or len(results) != count:
        found = f"{len(results)} results" if isinstance(results, list) else "no results"
        raise NoAnswer(was_sent=True, why=f"{found} for {count} operations")
    answers: list[Answer] = []
    for one in results:
        status = one.pop("status", None) if isinstance(one, dict) else None
        if not isinstance(status, int):
            raise NoAnswer(was_sent=True, why="a result of a batch without its status")
        answers.append((status, one))
    return answers


def reservation_in(status: int, body: Mapping[str, Any]) -> str:
    """Return the reservation that an answer grants; empty if it grants none."""
    reservation = body.get("reservation") if status == 200 else None
    return reservation if isinstance(reservation, str) else ""


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop of this thread, if it runs one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
