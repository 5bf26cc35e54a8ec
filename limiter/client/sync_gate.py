"""The same client for code without await: the calls run on an event loop in a thread of its own.

Threads share one client; the acquires of all threads are coalesced. After a fork the child has no such thread, so it
starts one of its own, with connections of its own; what the parent still has to settle, the parent settles. Settles
that wait when the process exits are sent before it ends.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from limiter.client.asking import NOT_ASKED_YET, Acquiring, CallOptions
from limiter.client.gate import Headgate
from limiter.client.grants import Grant
from limiter.client.lease import holder
from limiter.client.lease.leasing import HeldLease
from limiter.client.throttled import Throttled

if TYPE_CHECKING:
    from limiter.client.middleware.decorator import LimitedOptions
    from limiter.client.middleware.request_rules import Descriptor

log = logging.getLogger("headgate")

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

EXIT_PATIENCE_S = 2.0


class SyncAcquiring:
    """The result of `acquire`: call `.now()` for a grant, or use it as `with`, which settles by itself."""

    __slots__ = ("_acquiring", "_gate", "_grant", "_granted", "_on_refused")

    def __init__(
        self, gate: SyncHeadgate, acquiring: Acquiring, on_refused: Callable[[Throttled], object] | None = None
    ) -> None:
        self._gate = gate
        self._acquiring = acquiring
        self._grant: Grant | None = None
        self._granted: Grant | None = None
        self._on_refused = on_refused

    def now(self) -> Grant:
        """Ask, and return the grant. Settle it: nobody else does."""
        self._acquiring.is_used = True
        try:
            grant = self._gate.wait_for(self._ask())
        except BaseException:
            self._gate.later(self._give_back)
            raise
        if grant.refusal is not None and self._on_refused is not None:
            # On the caller's thread: on the client's it would hold up everybody.
            said = self._on_refused(cast("Throttled", grant.refusal))
            if inspect.iscoroutine(said):
                self._gate.wait_for(said)
        return grant

    def __bool__(self) -> bool:
        raise TypeError(NOT_ASKED_YET)

    async def _ask(self) -> Grant:
        self._granted = grant = await self._acquiring.grant()
        return grant

    def _give_back(self) -> None:
        """Settle what was granted after its caller had gone."""
        if self._granted is not None:
            self._granted.settle(0.0, outcome="cancelled")

    def __enter__(self) -> Grant:
        self._grant = self.now()
        return self._grant

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._grant is not None:
            self._grant.end(error)


class SyncLeased:
    """The result of `lease`: `with gate.lease({...}) as lease: grant = lease.try_acquire(1)`."""

    __slots__ = ("_arguments", "_gate", "_held")

    def __init__(self, gate: SyncHeadgate, arguments: tuple[str, Mapping[str, str], float]) -> None:
        self._gate = gate
        self._arguments = arguments
        self._held: HeldLease | None = None

    def __enter__(self) -> holder.Lease:
        self._held = self._gate.wait_for(self._begin())
        return self._held.lease

    async def _begin(self) -> HeldLease:
        return await self._gate.inner.parts().leasing.begin(*self._arguments)

    def __exit__(self, *_: object) -> None:
        held = self._held
        if held is not None and not held.lease.is_foreign:
            self._gate.wait_for(self._end(held))

    async def _end(self, held: HeldLease) -> None:
        await self._gate.inner.parts().leasing.end(held)


class SyncHeadgate:
    """A client for threads: `Headgate.sync(...)`, with the arguments of `Headgate`."""

    def __init__(self, make: Callable[[], Headgate]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inner: Headgate = make()
        _OPEN.add(self)

    @property
    def inner(self) -> Headgate:
        """The client that does the work, on its own loop."""
        self._running()
        return self._inner

    def _running(self) -> asyncio.AbstractEventLoop:
        """Return the loop; started at the first use, and again after a fork."""
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            return loop
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                if self._loop is not None:
                    self._inner = self._make()
                self._pid, self._loop = os.getpid(), asyncio.new_event_loop()
                # A child keeps the frames of its parent's threads, and with them all that the parent's loop uses. None
                # of it is closed there, which would tell the poller that both share.
                arguments = (self._loop, self._inner)
                self._thread = threading.Thread(target=_run, args=arguments, name="headgate-client", daemon=True)
                self._thread.start()
            return self._loop

    def forget_parent(self) -> None:
        """Begin afresh in a child process: a lock may be held there by a thread that it does not have."""
        self._lock = threading.Lock()

    def later(self, function: Callable[[], None]) -> None:
        """Call a function on the client's thread, unless the client is closed."""
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(function)

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's loop, and return its result; an interrupt cancels it."""
        loop = self._running()
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("this is the client's own thread, which would wait for itself; call from another one")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Throttled(reason="unavailable", status=503, detail="the client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def counts(self) -> dict[str, float]:
        """Return counts of this client, as `Headgate.counts` does."""
        return self._inner.counts()

    def probabilities(self) -> dict[str | None, float]:
        """Return probabilities of local rejections, as `Headgate.probabilities` does."""
        return self._inner.probabilities()

    def acquire(
        self, descriptor: Mapping[str, str], work: float | None = None, **options: Unpack[CallOptions]
    ) -> SyncAcquiring:
        """Ask for admission: `with gate.acquire({...}, work=3) as grant`, or `gate.acquire({...}).now()`; options as
        those of `Headgate.acquire`."""
        on_refused = options.get("on_refused") or self.inner.on_refused
        if not callable(on_refused):
            return SyncAcquiring(self, self.inner.acquire(descriptor, work, **options))
        options["on_refused"] = "degrade"
        return SyncAcquiring(self, self.inner.acquire(descriptor, work, **options), on_refused)

    def lease(self, descriptor: Mapping[str, str], *, namespace: str | None = None, weight: float = 1.0) -> SyncLeased:
        """Hold a lease on a descriptor, which threads may share."""
        return SyncLeased(self, self.inner.lease(descriptor, namespace=namespace, weight=weight).arguments)

    def limited(
        self,
        descriptor: Mapping[str, str] | Callable[..., Descriptor],
        work: float | Callable[..., float] | None = None,
        **options: Unpack[LimitedOptions],
    ) -> Callable[[F], F]:
        """Return a decorator for functions and generators; arguments as those of `headgate.limited`."""
        from limiter.client.middleware.decorator import limited

        return limited(self, descriptor, work, **options)

    def settle(
        self,
        reservation: str,
        work: float,
        *,
        final: bool = True,
        latency_ms: float | None = None,
        outcome: str = "ok",
        timeout_s: float = 5.0,
    ) -> dict[str, Any]:
        """Settle a reservation that came from elsewhere, as `Headgate.settle` does."""
        settling = self.inner.settle(
            reservation, work, final=final, latency_ms=latency_ms, outcome=outcome, timeout_s=timeout_s
        )
        return self.wait_for(settling)

    def flush(self, timeout_s: float = 5.0) -> int:
        """Send every settle that waits; returns how many are unanswered when the time is over."""
        return self.wait_for(self.inner.flush(timeout_s))

    def close(self, timeout_s: float = 5.0) -> None:
        """Give leases back, send what is to be settled, close the connections, end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None or self._pid != os.getpid() or not thread.is_alive():
            return
        closing = asyncio.run_coroutine_threadsafe(self._inner.close(timeout_s), loop)
        try:
            closing.result(timeout_s + 1.0)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout_s)
            self._inner = self._make()

    def __enter__(self) -> Self:
        self.wait_for(self.inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(loop: asyncio.AbstractEventLoop, _inner: Headgate) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()  # threads wait for some of them
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


_OPEN: weakref.WeakSet[SyncHeadgate] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Send what waits when the process ends in order."""
    for gate in list(_OPEN):
        try:
            gate.close(EXIT_PATIENCE_S)
        except Exception:
            log.exception("a client could not be closed in order")


def _after_fork() -> None:
    for gate in list(_OPEN):
        gate.forget_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
