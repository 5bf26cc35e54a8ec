"""The proxy's data plane: requests read and answers rendered exactly as a node does it (G7).

The lanes of `api.transport` serve it as they serve a node's; only the decisions come from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import msgspec

from api.data import decode, render
from api.data.answer import JSON, PROBLEM, RETRY, Answer
from api.data.auth import Doorkeeper, Forbidden, Unauthenticated
from api.data.counts import Requests
from api.data.decode import AcquireOperation, BadRequest, SettleOperation
from api.data.plane import Awaited, Headers, Reply, Sends
from api.data.rate_limit_headers import HeaderSet, lines
from api.data.request_stage import Stage
from limiter.api_keys import KeyEntry, Principal
from limiter.client.proxy.desk import Desk, NotAsked, Outcome
from limiter.client.proxy.own_reservations import SettledBefore, UnknownHere
from limiter.engine.request_errors import NotDecided, SettledOtherwise, UnknownReservation
from limiter.model.bucket.contract import Granted, LimitState, Refused, Settled
from limiter.model.bucket.decision import YEAR_MS, YEAR_S
from limiter.runtime.told import Told

PLAIN = frozenset({200, 429})
PASSED_ON = ("/v1/leases", "/v1/leases/renew", "/v1/leases/return", "/v1/signals")
_encode = msgspec.json.Encoder().encode


def entry_of(key: str) -> KeyEntry:
    """Return what has to be known of the one key that clients send."""
    return KeyEntry(Principal("client", "caller"), hashlib.sha256(key.encode()).digest())


class ProxyPlane:
    """Answers the data plane's calls by a desk. Has the parts of `api.data.plane.Plane` that its lanes use."""

    def __init__(self, desk: Desk, client_keys: Sequence[KeyEntry], header_set: HeaderSet) -> None:
        self.desk = desk
        self._doorkeeper = Doorkeeper(client_keys)
        self._header_set: HeaderSet = header_set
        self._renderer = render.Renderer(header_set)
        self.requests: Requests = {}
        self.outbox: Stage[Sends] = Stage(_send_all)
        self.paths: dict[bytes, Callable[[Headers, bytes, Reply], None]] = {
            b"/v1/acquire": self.acquire,
            b"/v1/settle": self.settle,
            b"/v1/batch": self.batch,
            **{path.encode(): partial(self.pass_on, path) for path in PASSED_ON},
        }

    async def answer(self, path: bytes, headers: Headers, body: bytes) -> Answer:
        """Return the answer to a request on one of the paths."""
        told: Told[Answer] = Told()
        self.paths[path](headers, body, Awaited(told))
        return await told.future

    def admits(self, headers: Headers) -> bool:
        """True if a body with these headers is worth waiting for."""
        try:
            self._admit(headers)
        except (Unauthenticated, Forbidden, BadRequest):
            return False
        return True

    def _admit(self, headers: Headers) -> None:
        self._doorkeeper.admit(headers.authorization, "use")
        decode.check_json(headers.content_type, headers.content_encoding)

    def acquire(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """Handle `POST /v1/acquire`."""
        try:
            self._admit(headers)
            request = decode.acquire(body)
            key = decode.idempotency_key(headers.idempotency_key)
        except Exception as error:
            reply.take(render.failure(error))
        else:
            self.desk.acquire(request, key, partial(self._tell, reply))

    def settle(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """Handle `POST /v1/settle`."""
        try:
            self._admit(headers)
            request = decode.settle(body)
        except Exception as error:
            reply.take(render.failure(error))
        else:
            self.desk.settle(request, partial(self._tell, reply))

    def batch(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """Handle `POST /v1/batch`: its operations go their ways, and are answered together."""
        try:
            self._admit(headers)
            operations = decode.batch(body)
        except Exception as error:
            reply.take(render.failure(error))
            return
        if not operations:
            reply.take(render.batch(()))
            return
        together = _Together(len(operations), reply)
        for at, operation in enumerate(operations):
            if isinstance(operation, AcquireOperation):
                self.desk.acquire(operation, operation.idempotency_key, partial(self._put, together, at))
            elif isinstance(operation, SettleOperation):
                self.desk.settle(operation, partial(self._put, together, at))
            else:
                together.put(at, render.failure(operation))

    def pass_on(self, path: str, headers: Headers, body: bytes, reply: Reply) -> None:
        """Hand a request to the service as it is."""
        try:
            self._admit(headers)
        except Exception as error:
            reply.take(render.failure(error))
        else:
            self.desk.pass_on(path, body, partial(self._tell, reply))

    def _tell(self, reply: Reply, outcome: Outcome) -> None:
        answer = self.rendered(outcome)
        if answer.status in PLAIN and answer.error is None:
            reply.take_plain(answer.status, answer.head, answer.body)
        else:
            reply.take(answer)

    def _put(self, together: _Together, at: int, outcome: Outcome) -> None:
        together.put(at, self.rendered(outcome))

    def rendered(self, outcome: Outcome) -> Answer:
        """Return an outcome as an answer."""
        try:
            if isinstance(outcome, tuple):
                return self._passed_on(*outcome)
            if isinstance(outcome, Granted | Refused):
                return self._renderer.decision(outcome)
            if isinstance(outcome, Settled):
                return Answer(200, JSON, render.settled_body(outcome))
            return render.failure(_known(outcome))
        except Exception as error:
            return render.failure(error)

    def _passed_on(self, status: int, body: Any) -> Answer:
        """Render what the service has answered. Calls of many clients share one answer, so it came without headers."""
        if status < 400:
            return Answer(status, JSON + self._limit_lines(body), _encode(body))
        body = _with_status(status, body)
        head = PROBLEM + self._limit_lines(body)
        retry = body.get("retry")
        if retry in RETRY:
            head += RETRY[retry]
        if retry == "after" or status == 503:
            head += b"retry-after: %d\r\n" % ceil((body.get("retry_after_ms") or 0) / 1000)
        return Answer(status, head, _encode(body))

    def _limit_lines(self, body: dict[str, Any]) -> bytes:
        """Return the `RateLimit` lines. A quota is left out: its window is in no body."""
        if "granted" not in body:
            return b""
        wait_ms = YEAR_MS if body.get("retry") == "never" else body.get("retry_after_ms") or 0
        limits = [_limit(one, wait_ms) for one in body.get("limits", ()) if one["mechanism"] != "quota"]
        return lines(limits, self._header_set)


def _limit(row: dict[str, Any], wait_ms: float) -> LimitState:
    rate, capacity, balance, passed = row["rate"], row["capacity"], row["balance"], row.get("passed", True)
    return LimitState(
        row["policy"], row["mechanism"], balance, capacity, rate, row.get("shadow", False), passed,
        min(YEAR_S, capacity / rate) if rate > 0 else 0.0,
        min(YEAR_MS, (capacity - balance) / rate * 1e3 if passed and rate > 0 else wait_ms),
    )  # fmt: skip


def _with_status(status: int, body: Any) -> dict[str, Any]:
    """Return a problem as a call of its own gets it: with its status, and without the id of the proxy's call."""
    if not isinstance(body, dict):
        return {"type": render.BLANK, "title": "", "status": status, "detail": "", "reason": "unknown"}
    first = {name: body[name] for name in ("type", "title") if name in body}
    return first | {"status": status} | {name: it for name, it in body.items() if name not in (*first, "request_id")}


def _known(outcome: Any) -> Exception:
    """Return the exception that a node would have raised."""
    if isinstance(outcome, NotAsked):
        return NotDecided(outcome.reason, str(outcome), retry_after_ms=outcome.retry_after_ms)
    if isinstance(outcome, UnknownHere):
        return UnknownReservation(str(outcome))
    if isinstance(outcome, SettledBefore):
        return SettledOtherwise(outcome.first)
    assert isinstance(outcome, Exception)
    return outcome


def _send_all(connections: list[Sends]) -> None:
    for connection in connections:
        connection.send()


class _Together:
    """The answers of one batch, sent once all are there."""

    __slots__ = ("_answers", "_left", "_reply")

    def __init__(self, count: int, reply: Reply) -> None:
        self._answers: list[Answer | None] = [None] * count
        self._left = count
        self._reply = reply

    def put(self, at: int, answer: Answer) -> None:
        self._answers[at] = answer
        self._left -= 1
        if not self._left:
            self._reply.take(render.batch([answer for answer in self._answers if answer is not None]))
