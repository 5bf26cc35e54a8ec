"""The data plane: a request's bytes in, its answer out. Both lanes call this and nothing else.

headers, body ── who? ──► decode ──► engine ──► render ──► answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct

from api.data import decode, render
from api.data.answer import Answer
from api.data.auth import Doorkeeper, Forbidden, check_namespace
from api.data.counts import Requests
from api.data.decode import AcquireOperation, BadRequest, SettleOperation
from api.data.stage import Stage
from api.data.turns import Turns
from limiter.api_keys import Principal, read_keys
from limiter.engine.decider import Arrived, Decider
from limiter.engine.errors import NotDecided
from limiter.engine.operation import Operation
from limiter.engine.settler import Correction, SettleArrived
from limiter.runtime.told import Told
from limiter.settings import Settings

PORTION = 128
"""Operations of a batch that are begun in one turn of the loop: others want their turn too."""


class Reply(Protocol):
    """Whoever asked: takes the answer, once."""

    def take(self, answer: Answer) -> None:
        """Any answer."""

    def take_plain(self, status: int, head: bytes, body: bytes) -> None:
        """A decision or a settle, in nearly all cases: 200 or 429, header lines, body."""


class Sends(Protocol):
    """A connection that sends its answers together."""

    def send(self) -> None:
        """Send those that are ready."""


class Headers(Struct):
    """The headers that mean something here; None where there is none."""

    authorization: bytes | None = None
    content_type: bytes | None = None
    content_encoding: bytes | None = None
    idempotency_key: bytes | None = None
    request_id: bytes | None = None
    traceparent: bytes | None = None
    admitted: Principal | None = None
    """Who asks with these headers, once that was found out: keys stay the same for as long as the process lives."""


_Arrived = tuple[Headers, bytes, Reply]


class Plane:
    """Answers acquires, settles and batches. No coroutines: whoever asks says where the answer goes."""

    def __init__(self, decider: Decider, settings: Settings) -> None:
        self.decider = decider
        self.doorkeeper = Doorkeeper(read_keys(settings.api_keys))
        self.turns = Turns(settings.deadline_ms / 1000)
        self.requests: Requests = {}
        self.busy_batches = 0
        self._acquires: Stage[_Arrived] = Stage(self._begin_acquires, hurries=True)
        self._settles: Stage[_Arrived] = Stage(self._begin_settles, hurries=True)
        self.outbox: Stage[Sends] = Stage(_send_all)
        """Connections with answers to send: to make all of them first and then to send them all is faster than to
        change between our code and the system's for each."""
        self._desk = _Desk(render.Renderer(settings.rate_limit_headers), self.outbox)
        self.paths: dict[bytes, Callable[[Headers, bytes, Reply], None]] = {
            b"/v1/acquire": self.acquire,
            b"/v1/settle": self.settle,
            b"/v1/batch": self.batch,
        }

    async def answer(self, path: bytes, headers: Headers, body: bytes) -> Answer:
        """The answer to a request on one of the paths, for who would rather wait for it."""
        told: Told[Answer] = Told()
        self.paths[path](headers, body, _Awaited(told))
        return await told.future

    def acquire(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """`POST /v1/acquire`."""
        self._acquires.put((headers, body, reply))

    def settle(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """`POST /v1/settle`."""
        self._settles.put((headers, body, reply))

    def _begin_acquires(self, arrived: list[_Arrived]) -> None:
        asked: list[Arrived] = []
        for headers, body, reply in arrived:
            try:
                principal = headers.admitted or self._admit(headers)
                request = decode.acquire(body)
                key = headers.idempotency_key
                idempotency_key = None if key is None else decode.idempotency_key(key)
                if principal.namespace is not None:
                    check_namespace(principal, request.namespace)
            except Exception as error:
                reply.take(render.failure(error))
            else:
                asked.append((request, reply, idempotency_key, principal.max_criticality))
        self.decider.begin(asked, self._desk)

    def _begin_settles(self, arrived: list[_Arrived]) -> None:
        asked: list[SettleArrived] = []
        for headers, body, reply in arrived:
            try:
                principal = headers.admitted or self._admit(headers)
                asked.append((decode.settle(body), reply, principal.namespace))
            except Exception as error:
                reply.take(render.failure(error))
        self.decider.settler.begin(asked, self._desk)

    def batch(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """`POST /v1/batch`."""
        try:
            principal = self._admit(headers)
        except Exception as error:
            reply.take(render.failure(error))
        else:
            self.turns.ask(partial(self._begin_batch, principal, body, reply), partial(self._too_busy, reply))

    def _too_busy(self, reply: Reply) -> None:
        self.busy_batches += 1
        detail = "this node has more to decide than it can in time; nothing was done"
        reply.take(render.failure(NotDecided("node_busy", detail)))

    def _begin_batch(self, principal: Principal, body: bytes, reply: Reply) -> int:
        try:
            operations = decode.batch(body)
        except Exception as error:
            reply.take(render.failure(error))
            return 0
        batch = _Batch(self, principal, operations, reply)
        # Not at once: who hands out turns must count these first.
        asyncio.get_running_loop().call_soon(batch.begin)
        return len(operations)

    def _admit(self, headers: Headers) -> Principal:
        principal = self.doorkeeper.admit(headers.authorization, "use")
        decode.check_json(headers.content_type, headers.content_encoding)
        headers.admitted = principal
        return principal

    def begin_operations(self, principal: Principal, batch: _Batch, some: Iterable[int]) -> None:
        """Some operations of a batch, by their place in it."""
        acquires: list[Arrived] = []
        settles: list[SettleArrived] = []
        for at in some:
            operation = batch.operations[at]
            if type(operation) is AcquireOperation:
                try:
                    check_namespace(principal, operation.namespace)
                except Forbidden as error:
                    batch.put(at, render.failure(error))
                else:
                    acquires.append((operation, at, operation.idempotency_key, principal.max_criticality))
            elif type(operation) is SettleOperation:
                settles.append((operation, at, principal.namespace))
            else:
                assert isinstance(operation, BadRequest)
                batch.put(at, render.failure(operation))
        self.decider.begin(acquires, batch)
        self.decider.settler.begin(settles, batch)


class _Desk:
    """Where acquires and settles that came alone are answered: each at its own connection."""

    def __init__(self, renderer: render.Renderer, outbox: Stage[Sends]) -> None:
        self._renderer = renderer
        self._outbox = outbox

    def answer(self, operations: Sequence[Operation]) -> None:
        """Render all of them, then send all."""
        with self._outbox:
            self._renderer.answer(operations)

    def answer_settles(self, operations: Sequence[Correction]) -> None:
        """The same for settles."""
        with self._outbox:
            for operation in operations:
                answer = render.settled(operation)
                if answer.status == 200:
                    operation.place.take_plain(200, answer.head, answer.body)
                else:
                    operation.place.take(answer)


def _send_all(connections: list[Sends]) -> None:
    for connection in connections:
        connection.send()


class _Awaited:
    """Takes an answer for who waits in a coroutine."""

    __slots__ = ("_told",)

    def __init__(self, told: Told[Answer]) -> None:
        self._told = told

    def take(self, answer: Answer) -> None:
        """Pass it on."""
        self._told(answer)

    def take_plain(self, status: int, head: bytes, body: bytes) -> None:
        """Pass it on."""
        self._told(Answer(status, head, body))


class _Batch:
    """A batch on its way: its operations are begun in portions, and answered in order once all have been."""

    __slots__ = ("_answers", "_begun", "_left", "_plane", "_principal", "_reply", "operations")

    def __init__(
        self, plane: Plane, principal: Principal, operations: Sequence[decode.Operation | BadRequest], reply: Reply
    ) -> None:
        self.operations = operations
        self._plane = plane
        self._principal = principal
        self._reply = reply
        self._answers: list[Answer | None] = [None] * len(operations)
        self._left = len(operations)
        self._begun = 0

    def begin(self) -> None:
        """Begin the next portion."""
        if not self.operations:
            self._reply.take(render.batch(()))
            return
        begin, upto = self._begun, min(self._begun + PORTION, len(self.operations))
        self._begun = upto
        if upto < len(self.operations):
            asyncio.get_running_loop().call_soon(self.begin)
        self._plane.begin_operations(self._principal, self, range(begin, upto))

    def answer(self, operations: Sequence[Operation]) -> None:
        """Acquires are decided."""
        for operation in operations:
            self.put(operation.place, render.decision_body(operation))

    def answer_settles(self, operations: Sequence[Correction]) -> None:
        """Settles are told."""
        for operation in operations:
            self.put(operation.place, render.settled(operation))

    def put(self, at: int, answer: Answer) -> None:
        """One operation is answered."""
        self._answers[at] = answer
        self._left -= 1
        self._plane.turns.done()
        if self._left == 0:
            self._reply.take(render.batch([answer for answer in self._answers if answer is not None]))
