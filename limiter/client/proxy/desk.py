"""The way of an operation through the proxy (G7). Callbacks, no coroutines: thousands may wait at once.

    proxy_busy       as many wait as may                     refused at once, before anything else
    lease            held for this descriptor, and no key    `limiter.client.lease.leasing`, `own_reservations`
    known refusal    the service has just said so            `known_refusals`
    adaptive         it refuses nearly everything            `limiter.client.adaptive`
    asked            with others, in a batch                 `limiter.client.calls`
    unavailable      no node answered in time

The proxy admits nothing by itself but from its leases. A request with an `Idempotency-Key` is never granted here: the
service remembers its decision, and this process, which may die, would not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from limiter.client.adaptive import AdaptiveThrottle
from limiter.client.calls import Answer, Calls, Op
from limiter.client.lease import holder
from limiter.client.lease.leasing import Key, Leasing, decides, key_of
from limiter.client.node_pool import NoAnswer, NodePool
from limiter.client.proxy.known_refusals import KnownRefusals
from limiter.client.proxy.own_reservations import OwnReservations, is_own
from limiter.client.restraint import Restraint
from limiter.client.retry_budget import RetryBudget
from limiter.client.throttled import WAIT_UNKNOWN_MS, is_refusal
from limiter.model.bucket.contract import AcquireRequest, Granted, Reason, Refused, Settled, SettleRequest
from limiter.model.policy.criticality import Criticality

SWEEP_S = 0.02
BUSY_AGAIN_MS = (500, 1500)
"""Those who are turned away come back spread over this time."""
AGAIN_MS = 1000
KEYS_MAX = 20_000
SETTLE_ROOM = 2
"""Settles have as much room again: they end something, and an acquire begins something."""


class NotAsked(Exception):
    """Nothing was decided: no room here, no answer from the service, or it does not accept this proxy."""

    def __init__(self, reason: str, detail: str, retry_after_ms: int = AGAIN_MS) -> None:
        super().__init__(detail)
        self.reason = reason
        self.retry_after_ms = retry_after_ms


Outcome = Answer | Granted | Refused | Settled | Exception
"""The service's answer, or a decision of the proxy's own."""
Answered = Callable[[Outcome], None]


@dataclass(frozen=True)
class Rules:
    """The proxy's settings, as far as decisions depend on them."""

    default_criticality: Criticality = Criticality.SHEDDABLE_PLUS
    queue_max: int = 10_000
    deadline_s: float = 1.0
    is_auto: bool = False
    target_by: str = "service"


class Desk:
    """One proxy's decisions, on one event loop."""

    def __init__(self, pool: NodePool, rules: Rules, *, weight: float = 1.0) -> None:
        self._pool = pool
        self._rules = rules
        self.calls = Calls(pool, settles_max=rules.queue_max, is_repeatable=True)
        self.leasing = Leasing(pool, is_threaded=False, weight=weight)
        self.reservations = OwnReservations()
        self._known = KnownRefusals()
        self._keys: OrderedDict[str, None] = OrderedDict()
        """Keys of clients that were asked for: a repeat may have been granted, so it is never refused here."""
        self._restraint = Restraint(AdaptiveThrottle(is_always_answered=True))
        self.retries = RetryBudget()
        self.waiting = 0
        """Operations that have been asked for and not been answered."""
        self.decided: Counter[tuple[str, str]] = Counter()
        """Acquires by where they were decided and how."""
        self._asking: deque[_Asking] = deque()
        self._sweep_later: asyncio.TimerHandle | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def fill(self) -> float:
        """The part of the queue that is taken."""
        return min(1.0, self.waiting / self._rules.queue_max)

    # Acquires.

    def acquire(self, request: AcquireRequest, key: str | None, answered: Answered) -> None:
        """Decide, or ask; the answer may come before this returns."""
        if self.waiting >= self._rules.queue_max:
            self._decided("proxy", "busy", answered, _busy())
            return
        now_s = time.monotonic()
        criticality = request.criticality or self._rules.default_criticality
        what = key_of(request.namespace, request.descriptor)
        is_repeat = key is not None and key in self._keys
        if not request.dry_run and not is_repeat:
            outcome = None
            if self._rules.is_auto and key is None and not self.reservations.is_full:
                outcome = self._by_lease(what, request, criticality, now_s)
            if outcome is not None:
                self._decided("lease", "granted" if type(outcome) is Granted else "refused", answered, outcome)
                return
            known = self._known.find((what, criticality), request.work, now_s)
            if known is not None:
                self._decided("known", "refused", answered, (429, known))
                return
        asking = _Asking(self, "acquire", answered, now_s + self._rules.deadline_s)
        asking.body = _acquire_body(request, criticality, key)
        asking.is_kept = key is not None
        asking.attempt = request.attempt
        if not request.dry_run:
            self.retries.asked(now_s)
            asking.what = what
            asking.target = (request.namespace, request.descriptor.get(self._rules.target_by, ""), criticality)
            if not is_repeat and self._rejects(asking, now_s):
                self._decided("adaptive", "refused", answered, _rejected())
                return
        if key is not None:
            self._keys[key] = None
            if len(self._keys) > KEYS_MAX:
                self._keys.popitem(last=False)
        self._ask(asking)

    def _decided(self, where: str, how: str, answered: Answered, outcome: Outcome) -> None:
        self.decided[where, how] += 1
        answered(outcome)

    def _by_lease(self, what: Key, request: AcquireRequest, criticality: str, now_s: float) -> Granted | Refused | None:
        """Decide by a lease; None: the service has to be asked."""
        lease = self.leasing.lease_for(what, now_s)
        if lease is None:
            return None
        found = lease.try_acquire(request.work, criticality)
        if isinstance(found, holder.Grant):
            return self.reservations.grant(found, lease, request.ttl_ms, now_s)
        if not decides(found):
            return None
        after_ms = AGAIN_MS if found.retry_after_ms is None else max(1, round(found.retry_after_ms + 0.5))
        detail = f"the proxy's part of {found.policy or 'a limit'} has no room now"
        return Refused(found.policy, cast("Reason", found.reason), "after", after_ms, (), detail)

    def _rejects(self, asking: _Asking, now_s: float) -> bool:
        """Return whether the request is rejected without asking: for its target, or for its own limits (G3)."""
        return self._restraint.rejects(asking.what, asking.target, now_s, random.random, is_promised=False)

    def learn(self, asking: _Asking, reason: str | None, share: float = 0.0, *, is_decided: bool = True) -> None:
        """Note how a request ended; `reason` None: granted."""
        if asking.what is not None:
            now_s = time.monotonic()
            self._restraint.learn(asking.what, asking.target, now_s, reason, share, is_decided=is_decided)

    def note(self, asking: _Asking, body: Mapping[str, Any]) -> None:
        """Remember a refusal that holds for a while."""
        if asking.what is not None:
            asker = (asking.what, asking.target[2])
            self._known.note(asker, asking.body.get("work"), body, time.monotonic())

    # Settles, and what is passed on.

    def settle(self, request: SettleRequest, answered: Answered) -> None:
        """Settle here what was granted here, and send on the rest; answered when the service has answered."""
        if is_own(request.reservation):
            try:
                answered(self.reservations.settle(request, time.monotonic()))
            except Exception as error:
                answered(error)
            return
        if self.waiting >= self._rules.queue_max * SETTLE_ROOM:
            answered(_busy())
            return
        asking = _Asking(self, "settle", answered, time.monotonic() + self._rules.deadline_s)
        asking.body = _settle_body(request)
        asking.is_kept = True
        self._ask(asking)

    def pass_on(self, path: str, body: bytes, answered: Answered) -> None:
        """Send a request as it is, and pass on the answer: leases of clients, reports of load. They may be repeated."""
        if self.waiting >= self._rules.queue_max:
            answered(_busy())
            return
        task = self._loop.create_task(self._pass_on(path, body, answered))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass_on(self, path: str, body: bytes, answered: Answered) -> None:
        self.waiting += 1
        outcome: Outcome
        try:
            by_s = time.monotonic() + self._rules.deadline_s
            outcome = _seen(await self._pool.post(path, body, by_s=by_s, is_repeatable=True))
        except NoAnswer as error:
            outcome = _unavailable(str(error))
        except Exception as error:
            outcome = error
        finally:
            self.waiting -= 1
        answered(outcome)

    # Asking the service.

    def _ask(self, asking: _Asking) -> None:
        self.waiting += 1
        self._asking.append(asking)
        if self._sweep_later is None:
            self._sweep_later = self._loop.call_later(SWEEP_S, self._sweep)
        asking.send(self.calls)

    def _sweep(self) -> None:
        """Answer those whose deadline has passed. All deadlines are equally far away: the oldest end first."""
        now_s = time.monotonic()
        asking = self._asking
        while asking and (asking[0].is_over or asking[0].by_s <= now_s):
            asking.popleft().give_up()
        self._sweep_later = self._loop.call_later(SWEEP_S, self._sweep) if asking else None

    def retry_in_s(self, asking: _Asking, body: Mapping[str, Any]) -> float | None:
        """Return when another attempt may follow an answer without a decision; None: not at all (G6).

        A request that is an attempt after the first already is retried by the one who sent it: only one layer retries.
        """
        now_s = time.monotonic()
        retry = body.get("retry", "after")
        wait_s = 0.0 if retry == "now" else (body.get("retry_after_ms") or WAIT_UNKNOWN_MS) / 1000
        if retry == "never" or now_s + wait_s >= asking.by_s or asking.attempt != 1 + asking.retried:
            return None
        return wait_s if self.retries.may_retry(asking.attempt, now_s) else None

    async def close(self, timeout_s: float = 2.0) -> None:
        """Give leases back, send what waits, end the rest."""
        await self.leasing.close()
        await self.calls.flush(timeout_s)
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        if self._sweep_later is not None:
            self._sweep_later.cancel()
        await self.calls.close()
        await self._pool.close()


class _Asking:
    """One operation on its way to the service and back."""

    __slots__ = ("_answered", "_desk", "_future", "attempt", "body", "by_s", "is_kept", "is_over", "op", "retried",
                 "target", "what")  # fmt: skip

    def __init__(self, desk: Desk, op: Op, answered: Answered, by_s: float) -> None:
        self._desk = desk
        self._answered = answered
        self._future: asyncio.Future[Answer] | None = None
        self.op: Op = op
        self.by_s = by_s
        self.body: dict[str, Any] = {}
        self.attempt = 1
        self.retried = 0
        self.is_kept = False
        """It goes on after its deadline: its sender will repeat it under the same key."""
        self.is_over = False
        self.what: Key | None = None
        self.target: tuple[str, str, str] = ("", "", "")

    def send(self, calls: Calls) -> None:
        """Send it with the next batch."""
        self._future = calls.ask(self.body, self.by_s, self.op, is_kept=self.is_kept)
        self._future.add_done_callback(self._came_back)

    def give_up(self) -> None:
        """Answer at the deadline. A grant that comes later is given back, unless its sender can still ask for it."""
        if self.is_over:
            return
        self._desk.learn(self, None, is_decided=False)
        self._finish(_unavailable("no node of the service answered in time"))
        if self._future is not None and not self.is_kept:
            self._future.cancel()

    def _came_back(self, future: asyncio.Future[Answer]) -> None:
        error = None if future.cancelled() else future.exception()
        if self.is_over:
            return
        if future.cancelled() or error is not None:
            self._desk.learn(self, None, is_decided=False)
            self._finish(_unavailable(str(error or "the proxy is stopping")))
            return
        status, body = future.result()
        if self.op == "acquire" and not self._take(status, body):
            return
        self._finish(_seen((status, body)))

    def _take(self, status: int, body: Mapping[str, Any]) -> bool:
        """Learn from the answer to an acquire; returns whether it is the last word."""
        if status >= 500:
            wait_s = self._desk.retry_in_s(self, body)
            if wait_s is not None:
                self.retried += 1
                self.attempt += 1
                self.body["attempt"] = self.attempt
                asyncio.get_running_loop().call_later(wait_s, self._send_again)
                return False
            self._desk.learn(self, None, is_decided=False)
        elif status == 200:
            self._desk.learn(self, None, body.get("drawn_share") or 0.0)
        elif is_refusal(status, body):
            self._desk.learn(self, body.get("reason"), body.get("drawn_share") or 0.0)
            self._desk.note(self, body)
        return True

    def _send_again(self) -> None:
        if not self.is_over:
            self.send(self._desk.calls)

    def _finish(self, outcome: Outcome) -> None:
        self.is_over = True
        self._desk.waiting -= 1
        if self.op == "acquire":
            self._desk.decided["service", _how(outcome)] += 1
        self._answered(outcome)


def _how(outcome: Outcome) -> str:
    if not isinstance(outcome, tuple):
        return "undecided"
    status, body = outcome
    if status == 200:
        return "granted"
    return "refused" if is_refusal(status, body) else "undecided" if status >= 500 else "malformed"


def _acquire_body(request: AcquireRequest, criticality: str, key: str | None) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    body: dict[str, Any] = {"descriptor": request.descriptor, "criticality": criticality}
    if request.namespace != "default":
        body["namespace"] = request.namespace
    if request.work is not None:
        body["work"] = request.work
    if request.expected_latency_ms is not None:
        body["expected_latency_ms"] = request.expected_latency_ms
    if request.attempt != 1:
        body["attempt"] = request.attempt
    if request.ttl_ms != 60_000:
        body["ttl_ms"] = request.ttl_ms
    if request.dry_run:
        body["dry_run"] = True
    body["idempotency_key"] = f"{random.getrandbits(96):024x}" if key is None else key
    return body


def _settle_body(request: SettleRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"reservation": request.reservation, "work": request.work}
    if not request.final:
        body["final"] = False
    if request.latency_ms is not None:
        body["latency_ms"] = request.latency_ms
    if request.outcome != "ok":
        body["outcome"] = request.outcome
    return body


def _seen(answer: Answer) -> Outcome:
    """Return the service's answer. That it does not know this proxy's key is no fault of a client."""
    if answer[0] == 401:
        return NotAsked("proxy_key", "the service does not accept the proxy's API key")
    return answer


def _busy() -> NotAsked:
    again_ms = random.randint(*BUSY_AGAIN_MS)  # noqa: S311
    return NotAsked("proxy_busy", "as many requests as the proxy keeps are waiting for their answers", again_ms)


def _unavailable(why: str) -> NotAsked:
    return NotAsked("unavailable", f"no decision: {why}")


def _rejected() -> Refused:
    detail = "the service refuses nearly all requests like this one, so the proxy asks it only for some"
    return Refused("", cast("Reason", "adaptive"), "after", AGAIN_MS, (), detail)
