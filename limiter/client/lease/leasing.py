"""Leases that renew themselves, and descriptors that are leased because they are asked for often (P9, B8).

The holder of a lease decides without I/O (`limiter.client.lease.holder`); this module sends its requests. A request is
sent again, the same, every 300 ms until one copy is answered. When the service does not answer at all, the holder goes
on until its lease ends, and comes back by itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from limiter.client.lease import holder
from limiter.client.lease.holder import REPEAT_AFTER_S, Lease
from limiter.client.node_pool import NoAnswer, NodePool

log = logging.getLogger("headgate")

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Namespace and sorted descriptor."""

COPIES_MAX = 3
PATIENCE_S = 2.0
ASKED_MAX = 1024
ASKED_OFTEN_PER_S = 20.0
"""From this pace on a descriptor is leased: its renewals cost a call per second, its acquires twenty."""
SELDOM_PER_S = 5.0
LOOK_S = 1.0
SELDOM_S = 10.0
OPEN_S = 60.0
"""A lease with grants that nobody has settled is kept for longer: what they settle later would be lost with it."""
NOT_LENT_S = 30.0
"""A descriptor that could not be leased is not tried again for this time."""

NOT_DECIDED = 500
"""From this status on, nothing was decided."""
LOOKS_MAX = 3
"""A lease that still lends nothing after so many requests is given up."""
_HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()

encode = msgspec.json.Encoder().encode


def key_of(namespace: str, descriptor: Mapping[str, str]) -> Key:
    return namespace, tuple(sorted(descriptor.items()))


class HeldLease:
    """A lease and the task that renews it."""

    def __init__(self, pool: NodePool, lease: Lease) -> None:
        self.lease = lease
        self._pool = pool
        self._renewing: asyncio.Task[None] | None = None
        self.is_refused = False
        """A policy does not lend, or the lease was revoked."""
        self.renewals = 0
        self.failures = 0

    async def begin(self) -> None:
        """Ask for the lease, then keep it up in the background."""
        await self._ask_once()
        if not self.is_refused:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def end(self) -> None:
        """Give back what is left."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        if self.lease.token is None or self.is_refused or self.lease.is_foreign:
            return
        path, body = self.lease.give_back()
        try:
            await self._send(path, body)
        except NoAnswer:
            log.warning("a lease could not be given back; it ends by itself")

    @property
    def has_open_grants(self) -> bool:
        """Return whether grants are to be settled yet, as far as their holders still have them."""
        return self.lease.settles < self.lease.requests

    @property
    def is_useless(self) -> bool:
        """Return whether nothing could be lent, and further requests have not changed that."""
        slices = self.lease.slices
        is_empty = not slices or any(one.capacity <= 0 and not one.is_quota for one in slices)
        return self.lease.number > LOOKS_MAX and is_empty

    async def _renew(self) -> None:
        while not self.is_refused:
            await asyncio.sleep(self.lease.renew_in_ms / 1000)
            await self._ask_once()

    async def _ask_once(self) -> None:
        """Ask, again and again if need be, until an answer to this request is taken or it is clear that there is
        none."""
        if self.lease.is_foreign:
            self.lease.begin_again()
        path, body = self.lease.ask()
        while True:
            try:
                status, answer = await self._send(path, body)
            except NoAnswer:
                if await self._gave_up():
                    return
                continue
            self.renewals += 1
            if status == 200:
                if not self._take(answer):
                    await self._gave_up()
                return
            reason = answer.get("reason", "")
            if status == 404 or (status == 409 and reason == "lease_outdated"):
                self.lease.begin_again()
                path, body = self.lease.ask()
            elif status >= NOT_DECIDED:
                if await self._gave_up():
                    return
            else:
                self.is_refused = True
                log.info("nothing is lent to this client: %s %s", status, answer.get("detail", reason))
                return

    def _take(self, answer: Mapping[str, Any]) -> bool:
        """Take over what the service lends; False for an answer that no node has sent, after which another is asked
        for from the start."""
        try:
            self.lease.take(answer)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("an answer to a lease's request could not be read: %r", error)
            self.lease.begin_again()
            return False
        return True

    async def _gave_up(self) -> bool:
        """Wait after a failure; returns True for a first request: another is made later, which says what is wanted by
        then."""
        self.failures += 1
        await asyncio.sleep(REPEAT_AFTER_S)
        if self.lease.number > 1:
            return False
        self.lease.begin_again()
        return True

    async def _send(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Send a request and, every 300 ms, another copy of it, until one is answered."""
        raw, by_s = encode(body), time.monotonic() + PATIENCE_S
        copies: set[asyncio.Task[tuple[int, Any]]] = set()
        try:
            while True:
                if len(copies) < COPIES_MAX and time.monotonic() < by_s:
                    post = self._pool.post(path, raw, by_s=by_s, is_repeatable=True)
                    copies.add(asyncio.get_running_loop().create_task(post))
                done, copies = await asyncio.wait(copies, timeout=REPEAT_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    if not one.cancelled() and one.exception() is None:
                        return one.result()
                if done and not copies:
                    raise NoAnswer(was_sent=True, why="no copy of a lease's request was answered")
        finally:
            for one in copies:
                one.cancel()


class Asked:
    """How often one descriptor is asked for."""

    __slots__ = ("count", "not_before_s", "often_s", "since_s")

    def __init__(self, now_s: float) -> None:
        self.count = 0
        self.since_s = now_s
        self.often_s = now_s
        """When it was last asked for often enough to keep a lease."""
        self.not_before_s = 0.0


class Leasing:
    """All leases of one client: those that the program asked for, and those that pay by themselves."""

    def __init__(self, pool: NodePool, *, is_threaded: bool, weight: float = 1.0) -> None:
        self._pool = pool
        self._is_threaded = is_threaded
        self._weight = weight
        """That of leases which are taken because they pay: for a proxy, which stands for many clients."""
        self._held: dict[Key, HeldLease] = {}
        """Leases of `auto`, by what they are for."""
        self._asked: OrderedDict[Key, Asked] = OrderedDict()
        self._explicit: set[HeldLease] = set()
        self._beginning: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """Leases that decide at present."""
        return sum(held.lease.token is not None for held in (*self._held.values(), *self._explicit))

    def _new(self, namespace: str, descriptor: Mapping[str, str], weight: float = 1.0) -> HeldLease:
        lock = threading.Lock() if self._is_threaded or not _HAS_GIL else None
        return HeldLease(self._pool, Lease(descriptor, namespace=namespace, weight=weight, lock=lock))

    async def begin(self, namespace: str, descriptor: Mapping[str, str], weight: float) -> HeldLease:
        """Lease a descriptor because the program says so."""
        held = self._new(namespace, descriptor, weight)
        self._explicit.add(held)
        try:
            await held.begin()
        except BaseException:
            self._explicit.discard(held)
            raise
        return held

    async def end(self, held: HeldLease) -> None:
        self._explicit.discard(held)
        await held.end()

    def lease_for(self, key: Key, now_s: float) -> Lease | None:
        """Return the lease that decides for a descriptor, if there is one; counts how often it is asked for."""
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = Asked(now_s)
            if len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
        asked.count += 1
        elapsed_s = now_s - asked.since_s
        if elapsed_s >= LOOK_S:
            self._judge(key, asked, asked.count / elapsed_s, now_s)
        held = self._held.get(key)
        if held is None or held.is_refused or held.lease.token is None or held.lease.is_foreign:
            return None
        return held.lease

    def known(self, key: Key) -> Lease | None:
        """Return the lease of a descriptor, also one that has ended."""
        held = self._held.get(key)
        return None if held is None or held.lease.token is None else held.lease

    def _judge(self, key: Key, asked: Asked, per_s: float, now_s: float) -> None:
        asked.count, asked.since_s = 0, now_s
        self._asked.move_to_end(key)
        if per_s >= SELDOM_PER_S:
            asked.often_s = now_s
        if key not in self._held and per_s >= ASKED_OFTEN_PER_S and now_s >= asked.not_before_s:
            asked.not_before_s = now_s + NOT_LENT_S
            held = self._held[key] = self._new(key[0], dict(key[1]), self._weight)
            self._spawn(held.begin(), self._beginning)
            if self._watching is None:
                self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Give back what is seldom asked for, or could not be lent."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            for key, held in list(self._held.items()):
                asked = self._asked.get(key)
                idle_s = OPEN_S if asked is None else now_s - asked.often_s
                is_seldom = idle_s >= (OPEN_S if held.has_open_grants else SELDOM_S)
                if is_seldom or held.is_refused or held.is_useless:
                    del self._held[key]
                    self._spawn(held.end(), self._ending)

    @staticmethod
    def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def close(self) -> None:
        """Give everything back."""
        tasks = [*self._beginning, *([self._watching] if self._watching is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)
        leases = [*self._held.values(), *self._explicit]
        self._held.clear()
        self._explicit.clear()
        await asyncio.gather(*(held.end() for held in leases), return_exceptions=True)


class Leased:
    """The result of `lease`: `async with gate.lease({...}) as lease: grant = lease.try_acquire(1)`."""

    __slots__ = ("_held", "_leasing", "arguments")

    def __init__(self, leasing: Callable[[], Leasing], arguments: tuple[str, Mapping[str, str], float]) -> None:
        self._leasing = leasing
        self.arguments = arguments
        self._held: HeldLease | None = None

    async def __aenter__(self) -> Lease:
        self._held = await self._leasing().begin(*self.arguments)
        return self._held.lease

    async def __aexit__(self, *_: object) -> None:
        if self._held is not None:
            await self._leasing().end(self._held)


def decides(answer: holder.Refusal) -> bool:
    """Return whether a lease's refusal is final; otherwise the service is asked."""
    return answer.reason in ("work", "request_rate", "overload", "in_flight")
