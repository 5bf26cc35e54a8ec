"""The behaviour of a user: acquire, work, settle; ask again as refusals say; try another node on a failure.

acquire ──200──► work ──► settle, at any node, until one answers
        ├─429──► wait as the answer says and ask again with the next attempt number, if the budget allows (G6)
        └─503, no answer──► the same question, under the same Idempotency-Key, to the next node (F-R7, F-R11)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import msgspec

from limiter.client.retry_budget import RetryBudget
from loadtest.locust.attempts import Attempt, Call
from loadtest.locust.draws import Ask
from loadtest.locust.retry_pause import retry_pause_s

SERVICE = "shop"
RETRIES_AT_FIRST = 3.0
"""A user is a small client."""
SETTLE_TRIES_MAX = 40
SETTLE_PAUSE_S = 0.25
SHUN_S = 1.0
"""How long a node that did not answer is avoided."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call. A status of 0: none came, and `failure` says why."""

    status: int
    body: bytes = b""
    retry_after: str | None = None
    failure: str = ""
    latency_ms: float = 0.0


class Transport(Protocol):
    """Sends one POST."""

    def __call__(self, node: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Return an answer in any case, even one that says that none came."""


class _Body(msgspec.Struct):
    """The fields of an answer that are used."""

    reservation: str = ""
    charged: float = 0.0
    degraded: bool = False
    reason: str = ""
    retry: str = "never"
    retry_after_ms: float | None = None


@dataclass(slots=True)
class Caller:
    """One user. Time, sleep, draws and transport are arguments, so that tests need no server."""

    nodes: Sequence[str]
    send: Transport
    tell: Callable[[Attempt], None]
    draws: Random
    sleep: Callable[[float], object]
    aside: Callable[[Callable[[], None]], object] = lambda work: work()
    """Runs a function while its user goes on: a settle that waits for the store must not hold up the next request."""
    now_s: Callable[[], float] = time.time
    work_ms_per_unit: float = 1.0
    budget: RetryBudget = field(default_factory=lambda: RetryBudget(burst=RETRIES_AT_FIRST))
    _shunned_until_s: dict[str, float] = field(default_factory=dict)

    def request(self, ask: Ask) -> None:
        """Carry out one request to its end."""
        self.budget.asked(self.now_s())
        attempt = 1
        while True:
            body = self._acquire(ask, attempt)
            if body is None:
                return
            if body.reservation:
                self._work_and_settle(ask, body)
                return
            pause_s = retry_pause_s(body.retry, retry_after_ms=body.retry_after_ms, retry_after_header=None)
            if pause_s is None or not self.budget.may_retry(attempt, self.now_s()):
                return
            self.sleep(pause_s)
            attempt += 1

    def _acquire(self, ask: Ask, attempt: int) -> _Body | None:
        """Return a decision of the first node that gives one; None if none does."""
        question = {
            "descriptor": {"service": SERVICE, "tenant": ask.tenant, "operation": ask.operation},
            "work": ask.estimate,
            "criticality": ask.criticality,
            "attempt": attempt,
        }
        headers = {"Idempotency-Key": f"{self.draws.getrandbits(96):024x}"}
        for number, node in enumerate(self._nodes_in_turn(), start=1):
            answer, body = self._post(node, "acquire", msgspec.json.encode(question), headers)
            if body.retry_after_ms is None and answer.retry_after is not None:
                body.retry_after_ms = 1000 * float(answer.retry_after)
            told = self._attempt(ask, "acquire", node, answer, body)
            told.work = body.charged if answer.status == 200 else 0.0
            told.demanded = ask.cost if attempt == 1 and number == 1 else 0.0
            told.is_retry = attempt > 1 and number == 1
            told.is_final = number == len(self.nodes)
            self.tell(told)
            if not told.is_failed:
                return body
        return None

    def _work_and_settle(self, ask: Ask, granted: _Body) -> None:
        self.sleep(ask.cost * self.work_ms_per_unit / 1000)
        done_s = self.now_s()
        self.aside(lambda: self._settle(ask, granted, done_s))

    def _settle(self, ask: Ask, granted: _Body, done_s: float) -> None:
        report = msgspec.json.encode({"reservation": granted.reservation, "work": ask.cost})
        for number in range(1, SETTLE_TRIES_MAX + 1):
            node = self._nodes_in_turn()[0]
            answer, body = self._post(node, "settle", report, {})
            told = self._attempt(ask, "settle", node, answer, body)
            told.is_final = number == SETTLE_TRIES_MAX or 400 <= answer.status < 500
            if answer.status == 200:
                # Even if the answer to an earlier attempt was lost: a settle counts once (F-R2).
                told.work = ask.cost - granted.charged
                told.settle_lag_ms = 1000 * (told.at_s - done_s)
            self.tell(told)
            if told.is_final or answer.status == 200:
                return
            self.sleep(SETTLE_PAUSE_S)

    def _post(self, node: str, call: Call, body: bytes, headers: dict[str, str]) -> tuple[Answer, _Body]:
        answer = self.send(node, f"/v1/{call}", body, {"Content-Type": "application/json", **headers})
        if answer.status == 0:
            self._shunned_until_s[node] = self.now_s() + SHUN_S
            return answer, _Body()
        return answer, msgspec.json.decode(answer.body, type=_Body)

    def _nodes_in_turn(self) -> list[str]:
        """Return all nodes in random order; those that failed to answer just now come last."""
        now_s = self.now_s()
        nodes = self.draws.sample(self.nodes, len(self.nodes))
        return sorted(nodes, key=lambda node: self._shunned_until_s.get(node, 0.0) > now_s)

    def _attempt(self, ask: Ask, call: Call, node: str, answer: Answer, body: _Body) -> Attempt:
        reason = answer.failure or body.reason
        return Attempt(
            at_s=self.now_s(),
            call=call,
            node=node,
            tenant=ask.tenant,
            criticality=ask.criticality,
            latency_ms=answer.latency_ms,
            status=answer.status,
            reason=reason if answer.status in (0, 200, 429) else f"{answer.status} {reason}".rstrip(),
            is_degraded=body.degraded,
        )
