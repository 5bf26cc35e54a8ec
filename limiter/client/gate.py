"""The client library's face: ask before the work, settle afterwards (`from headgate import Headgate, Throttled`).

The way of an acquire, each step where it is told:

    settles_waiting   too many settles are unsent: nothing new begins                  `limiter.client.calls`
    lease             decided here, if a lease is held for the descriptor              `limiter.client.lease.leasing`
    adaptive          rejected here, if the service refuses nearly everything anyway   `limiter.client.restraint`
    call              sent with others, repeated under its key, on another node        `limiter.client.calls`,
                                                                                       `limiter.client.node_pool`
    away              no node answers, or none has time                                `limiter.client.service_away`
    refused           raise, wait, degrade, or the caller's own function               below
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import secrets
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from limiter.client.adaptive import AdaptiveThrottle
from limiter.client.asking import Acquiring, Asked, GateOptions, Line, check_asked, check_bounds
from limiter.client.calls import Answer, Calls, reservation_in, running_loop
from limiter.client.client_metrics import count
from limiter.client.grants import ByLease, Grant, NoSettler, check_grant, grant_by, plain_number
from limiter.client.lease import holder
from limiter.client.lease.leasing import Key, Leased, Leasing, decides
from limiter.client.load_reports import LoadReporter
from limiter.client.node_pool import NoAnswer, NodePool
from limiter.client.request_context import current
from limiter.client.restraint import Restraint, Target
from limiter.client.retry_budget import RetryBudget
from limiter.client.service_away import Away, ServiceAway
from limiter.client.throttled import (
    WAIT_UNKNOWN_MS,
    Misused,
    Refused,
    Throttled,
    check_refused,
    drawn_share,
    is_refusal,
    pause_s,
)

if TYPE_CHECKING:
    from limiter.client.middleware.decorator import LimitedOptions
    from limiter.client.middleware.request_rules import Descriptor
    from limiter.client.sync_gate import SyncHeadgate

F = TypeVar("F", bound=Callable[..., Any])

URL = "http://127.0.0.1:8080"
ROOM_SOON = frozenset({"work", "request_rate", "quota", "in_flight", "settles_waiting"})
"""Refusals that say when there will be room, so that waiting for it is no retry."""
NO_NODE = frozenset({"unavailable", "node_busy", "not_ready", "stopping"})
"""Answers without a decision that another node might have made."""
ADAPTIVE_WAIT_MS = 1000.0
LOAD_PATIENCE_S = 2.0


class Parts:
    """Connections, queues and leases of one event loop."""

    def __init__(
        self, pool: NodePool, *, settles_max: int, is_repeatable: bool, is_auto: bool, is_threaded: bool
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.pool = pool
        self.calls = Calls(pool, settles_max=settles_max, is_repeatable=is_repeatable)
        self.leasing = Leasing(pool, is_threaded=is_threaded)
        self.is_auto = is_auto
        self.lines: dict[Key, Line] = {}
        self.load: LoadReporter | None = None
        self.pid = os.getpid()
        self._prefix = secrets.token_hex(9)
        self._keys = 0

    def idempotency_key(self) -> str:
        """Return a key that no other client uses, whatever the program does to the random module."""
        self._keys += 1
        return f"{self._prefix}{self._keys:x}"


class Headgate:
    """A client of the service, for one event loop. `Headgate.sync(...)` is the same for code without await."""

    def __init__(
        self,
        nodes: str | Sequence[str] | None = None,
        *,
        api_key: str | None = None,
        namespace: str = "default",
        on_refused: Refused = "raise",
        wait_s: float = 10.0,
        unavailable: Away = "local",
        local: Literal["off", "auto"] = "off",
        deadline_ms: float = 500.0,
        repeat: bool = True,
        adaptive: AdaptiveThrottle | bool = True,
        retries: RetryBudget | None = None,
        target_by: str = "service",
        settles_max: int = 10_000,
        connections_max: int = 16,
        tls: ssl.SSLContext | None = None,
        report_load: bool | Mapping[str, Any] = False,
    ) -> None:
        if local not in ("off", "auto"):
            raise ValueError(f"local is off or auto, not {local!r}")
        check_refused(on_refused)
        check_bounds(wait_s=wait_s, deadline_ms=deadline_ms, settles_max=settles_max, connections_max=connections_max)
        if not isinstance(adaptive, bool | AdaptiveThrottle):
            raise TypeError(f"adaptive is True, False or an AdaptiveThrottle, not {adaptive!r}")
        found = nodes or os.environ.get("HEADGATE_URL", URL)
        self._urls = [found] if isinstance(found, str) else list(found)
        self._api_key = api_key
        self._namespace = namespace
        self.on_refused: Refused = on_refused
        self._wait_s = wait_s
        self._deadline_s = deadline_ms / 1000
        self._repeats = repeat
        self._is_auto = local == "auto"
        self.is_threaded = False
        """Leases are shared by threads."""
        self._settles_max = settles_max
        self._connections_max = connections_max
        self._tls = tls
        self._target_by = target_by
        self._parts: Parts | None = None
        self._away = ServiceAway(unavailable)
        by_target = adaptive if isinstance(adaptive, AdaptiveThrottle) else AdaptiveThrottle()
        self._restraint = None if adaptive is False else Restraint(by_target)
        self._report_load = report_load
        self._now_s, self._draw = time.monotonic, random.random
        self._retries = retries or RetryBudget()
        self.granted = self.refused = self.rejected = self.decided_locally = self.undecided = 0
        """Grants; refusals by the service; rejections without asking it; decisions by leases; those without the
        service."""
        # Made to refuse what is wrong at once: an address, an option.
        NodePool(self._urls)
        self._load_reporter()

    @classmethod
    def sync(cls, nodes: str | Sequence[str] | None = None, **options: Unpack[GateOptions]) -> SyncHeadgate:
        """Return a client for code without await, for any number of threads; arguments as those of `Headgate`."""
        from limiter.client.sync_gate import SyncHeadgate

        def make() -> Headgate:
            gate = cls(nodes, **options)
            gate.is_threaded = True
            return gate

        return SyncHeadgate(make)

    # Opening and closing.

    def parts(self) -> Parts:
        """Return what belongs to the running loop; made at the first use."""
        parts = self._parts
        if parts is not None and parts.loop is not (loop := running_loop()):
            if loop is None:
                return parts  # somebody looks at it from another thread
            if parts.loop.is_running() and parts.pid == os.getpid():
                raise RuntimeError("this client belongs to an event loop of another thread; make one per loop, or one "
                                   "of Headgate.sync(...) for all threads")  # fmt: skip
            parts = None
        if parts is None:
            pool = NodePool(self._urls, api_key=self._api_key, connections_max=self._connections_max, tls=self._tls)
            self._parts = parts = Parts(
                pool,
                settles_max=self._settles_max,
                is_repeatable=self._repeats,
                is_auto=self._is_auto,
                is_threaded=self.is_threaded,
            )
            parts.load = self._load_reporter()
            if parts.load is not None:
                parts.load.start()
        return parts

    def _load_reporter(self) -> LoadReporter | None:
        """Return what reports the load of this process, if the program wants that (G5)."""
        if self._report_load is False:
            return None
        given = {} if self._report_load is True else dict(self._report_load)
        options = {"of": "threads" if self.is_threaded else "loop", "namespace": self._namespace} | given
        return LoadReporter(self._send_load, **options)

    async def _send_load(self, path: str, body: dict[str, Any]) -> None:
        by_s = time.monotonic() + LOAD_PATIENCE_S
        status, answer = await self.parts().pool.post_json(path, body, by_s=by_s)
        if status >= 400:
            raise Misused(status, answer)

    async def __aenter__(self) -> Self:
        self.parts()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def flush(self, timeout_s: float = 5.0) -> int:
        """Send every settle that waits; returns how many are unanswered when the time is over."""
        return 0 if self._parts is None else await self._parts.calls.flush(timeout_s)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Give leases back, send what is to be settled, close the connections."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        try:
            if parts.load is not None:
                await parts.load.stop()
            await parts.leasing.close()
            await parts.calls.flush(timeout_s)
            await parts.calls.close(timeout_s)
        finally:
            await parts.pool.close()

    def counts(self) -> dict[str, float]:
        """Return counts since this client was made, and what is going on now (`limiter.client.client_metrics`)."""
        return count(self, self._parts, self._retries)

    def probabilities(self) -> dict[str | None, float]:
        """Return, by class, the highest probability with which a request for one of its targets is rejected here."""
        return {} if self._restraint is None else self._restraint.probabilities(self._now_s())

    # Asking.

    def acquire(
        self,
        descriptor: Mapping[str, str],
        work: float | None = None,
        *,
        namespace: str | None = None,
        criticality: str | None = None,
        expected_latency_ms: float | None = None,
        ttl_ms: int | None = None,
        on_refused: Refused | None = None,
        wait_s: float | None = None,
        deadline_ms: float | None = None,
    ) -> Acquiring:
        """Ask for admission: `async with gate.acquire({...}, work=3) as grant`, or `grant = await gate.acquire({...})`.

        `work` is the estimate; without it, each policy's own charge applies. `criticality` is the class; without it,
        that of the present request (`headgate.criticality`). `ttl_ms` is for how long a reservation stands without a
        word; open grants are renewed by themselves, so it only matters for a process that dies. Raises `Throttled`,
        unless `on_refused` says otherwise.
        """
        if on_refused is None:
            on_refused = self.on_refused
        else:
            check_refused(on_refused)
        check_asked(descriptor, work, criticality)
        if work is not None:
            work = plain_number(work)
        body: dict[str, Any] = {"descriptor": dict(descriptor)}
        namespace = self._namespace if namespace is None else namespace
        if namespace != "default":
            body["namespace"] = namespace
        criticality = current() if criticality is None else criticality
        given = {"work": work, "criticality": criticality, "expected_latency_ms": expected_latency_ms, "ttl_ms": ttl_ms}
        body.update({name: value for name, value in given.items() if value is not None})
        deadline_s = self._deadline_s if deadline_ms is None else deadline_ms / 1000
        asked = Asked(
            descriptor,
            namespace,
            body,
            by_s=time.monotonic() + deadline_s,
            on_refused=on_refused,
            wait_s=self._wait_s if wait_s is None else wait_s,
        )
        return Acquiring(lambda: self._acquire(asked, deadline_s))

    def lease(self, descriptor: Mapping[str, str], *, namespace: str | None = None, weight: float = 1.0) -> Leased:
        """Hold a lease on a descriptor: `async with gate.lease({...}) as lease`, then `lease.try_acquire(1)` decides
        at once."""
        return Leased(
            lambda: self.parts().leasing, (self._namespace if namespace is None else namespace, descriptor, weight)
        )

    def limited(
        self,
        descriptor: Mapping[str, str] | Callable[..., Descriptor],
        work: float | Callable[..., float] | None = None,
        **options: Unpack[LimitedOptions],
    ) -> Callable[[F], F]:
        """Return a decorator for coroutine functions and asynchronous generators; arguments as those of
        `headgate.limited`."""
        from limiter.client.middleware.decorator import limited

        return limited(self, descriptor, work, **options)

    async def settle(
        self,
        reservation: str,
        work: float,
        *,
        final: bool = True,
        latency_ms: float | None = None,
        outcome: str = "ok",
        timeout_s: float = 5.0,
    ) -> dict[str, Any]:
        """Settle a reservation that came from elsewhere, such as a gateway's header, and return the service's
        answer."""
        body = {"reservation": reservation, "work": work, "final": final, "outcome": outcome}
        if latency_ms is not None:
            body["latency_ms"] = latency_ms
        try:
            status, answer = await self.parts().pool.post_json("/v1/settle", body, by_s=time.monotonic() + timeout_s)
        except NoAnswer as error:
            raise Throttled(reason="unavailable", status=503, detail=str(error)) from None
        if status == 200:
            return dict(answer)
        raise Throttled.of_answer(status, answer) if status >= 500 else Misused(status, answer)

    # Deciding.

    async def _acquire(self, asked: Asked, deadline_s: float) -> Grant:
        if asked.on_refused == "wait":
            return await self._wait(asked, deadline_s)
        try:
            return await self._decide(asked)
        except Throttled as refusal:
            if asked.on_refused == "raise":
                raise
            if callable(asked.on_refused):
                said = asked.on_refused(refusal)
                if inspect.isawaitable(said):
                    await said
            return Grant(NoSettler(), 0.0, asked.entered_ns, answer={"quality": 0.0}, refusal=refusal)

    async def _wait(self, asked: Asked, deadline_s: float) -> Grant:
        """Ask, and ask again when there may be room, at most until the caller's time is over.

        Where others wait already, stand behind them."""
        until_s = time.monotonic() + asked.wait_s
        lines = self.parts().lines
        line = lines.get(asked.key)
        refusal: Throttled | None = None
        if line is None:
            try:
                return await self._decide(asked)
            except Throttled as first:
                refusal = first
            if refusal.retry == "never":
                raise refusal
            line = lines.setdefault(asked.key, Line(refusal))
        due_s = time.monotonic() + pause_s(refusal)
        line.waiting += 1
        try:
            try:
                async with asyncio.timeout(asked.wait_s):
                    await line.lock.acquire()
            except TimeoutError:
                # A copy: one exception raised by everybody in the line would keep the frames of all of them.
                raise refusal or copy(line.refusal) from None
            try:
                return await self._ask_first(asked, line, refusal, due_s, until_s, deadline_s)
            finally:
                line.lock.release()
        finally:
            line.waiting -= 1
            if not line.waiting and lines.get(asked.key) is line:
                del lines[asked.key]

    async def _ask_first(
        self, asked: Asked, line: Line, refusal: Throttled | None, due_s: float, until_s: float, deadline_s: float
    ) -> Grant:
        """Ask as the first of a line, each time when room was promised."""
        asked.is_first_in_line = True
        while True:
            now_s = time.monotonic()
            if refusal is not None:
                if refusal.retry == "never" or due_s > until_s or not self._may_wait(asked, refusal, now_s):
                    raise refusal
                await asyncio.sleep(max(0.0, due_s - now_s))
            asked.by_s = time.monotonic() + deadline_s
            try:
                return await self._decide(asked)
            except Throttled as again:
                refusal = line.refusal = again
            due_s = time.monotonic() + pause_s(refusal)

    def _may_wait(self, asked: Asked, refusal: Throttled, now_s: float) -> bool:
        """Return whether asking once more is allowed: for room that was promised it is, otherwise the budget
        decides."""
        if refusal.reason in ROOM_SOON or refusal.local:
            return True
        if not self._retries.may_retry(asked.attempt, now_s):
            return False
        asked.attempt += 1
        return True

    async def _decide(self, asked: Asked) -> Grant:
        """Grant, or raise the refusal."""
        parts = self.parts()
        if parts.calls.is_full:
            detail = "too many settles are still to be sent, so nothing new begins; the service does not answer them"
            raise Throttled(
                reason="settles_waiting", retry_after_ms=WAIT_UNKNOWN_MS, status=503, local=True, detail=detail
            )
        now_s = time.monotonic()
        lease = parts.leasing.lease_for(asked.key, now_s) if parts.is_auto else None
        if lease is not None:
            grant = self._decide_by(lease, asked)
            if grant is not None:
                return grant
        target = self._target(asked)
        if not asked.is_counted:
            asked.is_counted = True
            self._retries.asked(now_s)
        restraint = self._restraint
        if restraint is not None:
            now_s = self._now_s()
            if restraint.is_away(now_s, self._draw()):
                detail = "no node has decided lately, so this request was not sent"
                return self._without_service(asked, Throttled(reason="unavailable", status=503, detail=detail))
            if restraint.rejects(asked.key, target, now_s, self._draw, is_promised=asked.is_first_in_line):
                self.rejected += 1
                detail = "nearly all such requests of this client were refused lately, so this one was not sent"
                raise Throttled(reason="adaptive", retry_after_ms=ADAPTIVE_WAIT_MS, local=True, detail=detail)
        return await self._ask(parts, asked, target)

    def _decide_by(self, lease: holder.Lease, asked: Asked) -> Grant | None:
        """Decide by a lease; None: the service has to be asked."""
        found = lease.try_acquire(asked.body.get("work"), asked.body.get("criticality"))
        if isinstance(found, holder.Grant):
            self.decided_locally += 1
            answer = {"quality": lease.quality, "state": lease.state}
            return Grant(ByLease(found), found.charged, asked.entered_ns, answer=answer, local=True)
        if not decides(found):
            return None
        self.decided_locally += 1
        self.refused += 1
        raise Throttled(reason=found.reason, policy=found.policy, retry_after_ms=found.retry_after_ms, local=True)

    def _target(self, asked: Asked) -> Target:
        """Return what is protected, for a class: refusals because of overload count for all callers of it."""
        return asked.namespace, asked.descriptor.get(self._target_by, ""), asked.body.get("criticality")

    def _learn(
        self, asked: Asked, target: Target, reason: str | None, share: float = 0.0, *, is_decided: bool = True
    ) -> None:
        """Note how a request that was sent ended; `reason` None: granted."""
        if self._restraint is not None:
            self._restraint.learn(asked.key, target, self._now_s(), reason, share, is_decided=is_decided)

    async def _ask(self, parts: Parts, asked: Asked, target: Target) -> Grant:
        """Ask the service; where a node has no time, another one, as far as deadline and budget allow."""
        body = dict(asked.body)
        if self._repeats:
            body["idempotency_key"] = parts.idempotency_key()
        while True:
            if asked.attempt > 1:
                body["attempt"] = asked.attempt
            try:
                status, answer = await self._answer(parts, body, asked.by_s)
                check_grant(status, answer)
            except NoAnswer as error:
                self._learn(asked, target, None, is_decided=False)
                return self._without_service(asked, Throttled(reason="unavailable", status=503, detail=str(error)))
            except BaseException:
                self._learn(asked, target, "given_up")
                raise
            if status < 500:
                self._away.answered()
            share = drawn_share(answer)
            if status == 200:
                self._learn(asked, target, None, share)
                return self._grant(parts, asked, answer)
            if is_refusal(status, answer):
                self.refused += 1
                refusal = Throttled.of_answer(status, answer)
                self._learn(asked, target, refusal.reason, share)
                raise refusal
            if status < 500:
                self._learn(asked, target, None)
                raise Misused(status, answer)
            refusal = Throttled.of_answer(status, answer)
            if not await self._may_repeat(asked, target, refusal):
                self._learn(asked, target, None, is_decided=False)
                if refusal.reason in NO_NODE or status != 503:
                    return self._without_service(asked, refusal)
                raise refusal

    async def _may_repeat(self, asked: Asked, target: Target, refusal: Throttled) -> bool:
        """Wait for another attempt after an answer without a decision, if there is time and budget for one."""
        now_s = time.monotonic()
        wait_s = 0.0 if refusal.retry == "now" else (refusal.retry_after_ms or WAIT_UNKNOWN_MS) / 1000
        if refusal.retry == "never" or now_s + wait_s >= asked.by_s:
            return False
        if not self._retries.may_retry(asked.attempt, now_s):
            return False
        asked.attempt += 1
        try:
            await asyncio.sleep(wait_s)
        except BaseException:
            self._learn(asked, target, "given_up")
            raise
        return True

    @staticmethod
    async def _answer(parts: Parts, body: dict[str, Any], by_s: float) -> Answer:
        """Return the answer, in time. What is granted to a caller that no longer waits goes back."""
        future = parts.calls.ask(body, by_s)
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                # The answer and the cancellation came in the same turn of the loop.
                if reservation := reservation_in(*future.result()):
                    parts.calls.give_back(reservation)
            else:
                future.cancel()  # a coroutine that is thrown away cancels nothing by itself
            raise

    def _grant(self, parts: Parts, asked: Asked, answer: Mapping[str, Any]) -> Grant:
        grant = grant_by(answer, parts.calls, asked.entered_ns)
        self.granted += 1
        has_quota = any(one.get("mechanism") == "quota" for one in grant.limits)
        self._away.granted(asked.key, grant.charged, time.monotonic(), has_quota=has_quota)
        return grant

    def _without_service(self, asked: Asked, refusal: Throttled) -> Grant:
        """Decide without the service, as the policy of a lease says, otherwise as this client was told."""
        self.undecided += 1
        work = max(0.0, asked.body.get("work", 1.0))
        if not self._away.admits(asked.key, work, time.monotonic(), mode=self._mode(asked)):
            raise refusal
        return Grant(NoSettler(), work, asked.entered_ns, answer={"degraded": True})

    def _mode(self, asked: Asked) -> Away | None:
        """Return what the policies of a held lease say about a service that does not answer."""
        lease = None if self._parts is None else self._parts.leasing.known(asked.key)
        mode = None if lease is None else lease.on_service_failure
        return mode if mode in ("open", "closed", "local") else None  # type: ignore[return-value]
