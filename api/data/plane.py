"""The data plane: a request's bytes in, its answer out. Both lanes call this and nothing else.

headers, body ── who? ──► decode ──► engine ──► render ──► answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from api.data import decode, render
from api.data.answer import Answer
from api.data.auth import Doorkeeper, Forbidden, check_namespace
from api.data.counts import Requests
from api.data.decode import AcquireOperation, BadRequest, Operation, SettleOperation
from api.data.stage import Stage
from api.data.turns import Turns
from limiter.api_keys import Principal, read_keys
from limiter.engine.decider import Asked
from limiter.engine.errors import NotDecided
from limiter.model.bucket.contract import Decision, Settled, SettleRequest
from limiter.runtime.told import Done, Told
from limiter.settings import Settings

PORTION = 128
"""Operations of a batch that are begun in one turn of the loop: others want their turn too."""

Reply = Callable[[Answer], None]


class Decides(Protocol):
    """What the data plane needs of the engine."""

    def start_acquires(self, asked: Iterable[Asked]) -> None:
        """May these requests go ahead?"""

    def start_settle(self, request: SettleRequest, done: Done[Settled], *, namespace: str | None) -> None:
        """Correct what was charged."""


class Sends(Protocol):
    """A connection that sends its answers together."""

    def send(self) -> None:
        """Send those that are ready."""


class Headers(NamedTuple):
    """The headers that mean something here; None where there is none."""

    authorization: bytes | None = None
    content_type: bytes | None = None
    content_encoding: bytes | None = None
    idempotency_key: bytes | None = None
    request_id: bytes | None = None
    traceparent: bytes | None = None


_Arrived = tuple[Headers, bytes, Reply]


class Plane:
    """Answers acquires, settles and batches. No coroutines: whoever asks says where the answer goes."""

    def __init__(self, engine: Decides, settings: Settings) -> None:
        self.engine = engine
        self.doorkeeper = Doorkeeper(read_keys(settings.api_keys))
        self.renderer = render.Renderer(settings.rate_limit_headers)
        self.turns = Turns(settings.deadline_ms / 1000)
        self.requests: Requests = {}
        self.busy_batches = 0
        self._acquires: Stage[_Arrived] = Stage(self._begin_acquires)
        self._settles: Stage[_Arrived] = Stage(self._begin_settles)
        self._decisions = Stage(self._render_decisions)
        self.decisions_in_batches = Stage(_render_in_batches)
        self._settlements = Stage(self._render_settlements)
        self.outbox: Stage[Sends] = Stage(_send_all)
        """Connections with answers to send: to make all of them first and then to send them all is faster than to
        change between our code and the system's for each."""
        self.paths: dict[bytes, Callable[[Headers, bytes, Reply], None]] = {
            b"/v1/acquire": self.acquire,
            b"/v1/settle": self.settle,
            b"/v1/batch": self.batch,
        }

    async def answer(self, path: bytes, headers: Headers, body: bytes) -> Answer:
        """The answer to a request on one of the paths, for who would rather wait for it."""
        told: Told[Answer] = Told()
        self.paths[path](headers, body, told)
        return await told.future

    def acquire(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """`POST /v1/acquire`."""
        self._acquires.put((headers, body, reply))

    def settle(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """`POST /v1/settle`."""
        self._settles.put((headers, body, reply))

    def _begin_acquires(self, arrived: list[_Arrived]) -> None:
        asked: list[Asked] = []
        for headers, body, reply in arrived:
            try:
                principal = self._admit(headers)
                request = decode.acquire(body)
                key = headers.idempotency_key
                idempotency_key = None if key is None else decode.idempotency_key(key)
                if principal.namespace is not None:
                    check_namespace(principal, request.namespace)
            except Exception as error:
                reply(render.failure(error))
            else:
                asked.append((request, partial(self._decided, reply), idempotency_key, principal.max_criticality))
        self.engine.start_acquires(asked)

    def _begin_settles(self, arrived: list[_Arrived]) -> None:
        asked: list[tuple[SettleRequest, Principal, Reply]] = []
        for headers, body, reply in arrived:
            try:
                principal = self._admit(headers)
                asked.append((decode.settle(body), principal, reply))
            except Exception as error:
                reply(render.failure(error))
        for request, principal, reply in asked:
            self._settle(principal, request, reply)

    def _decided(self, reply: Reply, outcome: Decision | Exception) -> None:
        self._decisions.put((reply, outcome))

    def _render_decisions(self, decisions: list[tuple[Reply, Decision | Exception]]) -> None:
        with self.outbox:
            for reply, outcome in decisions:
                reply(self.renderer.decision(outcome))

    def _render_settlements(self, settlements: list[tuple[Reply, Settled | Exception]]) -> None:
        with self.outbox:
            for reply, outcome in settlements:
                reply(render.settled(outcome))

    def batch(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """`POST /v1/batch`."""
        try:
            principal = self._admit(headers)
        except Exception as error:
            reply(render.failure(error))
        else:
            self.turns.ask(partial(self._begin_batch, principal, body, reply), partial(self._too_busy, reply))

    def _too_busy(self, reply: Reply) -> None:
        self.busy_batches += 1
        detail = "this node has more to decide than it can in time; nothing was done"
        reply(render.failure(NotDecided("node_busy", detail)))

    def _begin_batch(self, principal: Principal, body: bytes, reply: Reply) -> int:
        try:
            operations = decode.batch(body)
        except Exception as error:
            reply(render.failure(error))
            return 0
        batch = _Batch(self, principal, operations, reply)
        # Not at once: who hands out turns must count these first.
        asyncio.get_running_loop().call_soon(batch.begin)
        return len(operations)

    def _admit(self, headers: Headers) -> Principal:
        principal = self.doorkeeper.admit(headers.authorization, "use")
        decode.check_json(headers.content_type, headers.content_encoding)
        return principal

    def begin_operations(
        self, principal: Principal, operations: Iterable[tuple[Operation | BadRequest, _Place]]
    ) -> None:
        """Some operations of a batch, each with its place in it."""
        asked: list[Asked] = []
        for operation, place in operations:
            if type(operation) is AcquireOperation:
                try:
                    check_namespace(principal, operation.namespace)
                except Forbidden as error:
                    place.put(render.failure(error))
                else:
                    asked.append((operation, place.decided, operation.idempotency_key, principal.max_criticality))
            elif type(operation) is SettleOperation:
                self._settle(principal, operation, place.put)
            else:
                assert isinstance(operation, BadRequest)
                place.put(render.failure(operation))
        self.engine.start_acquires(asked)

    def _settle(self, principal: Principal, request: SettleRequest, reply: Reply) -> None:
        self.engine.start_settle(request, partial(self._settled, reply), namespace=principal.namespace)

    def _settled(self, reply: Reply, outcome: Settled | Exception) -> None:
        self._settlements.put((reply, outcome))


def _render_in_batches(decisions: list[tuple[_Place, Decision | Exception]]) -> None:
    for place, outcome in decisions:
        place.put(render.decision_body(outcome))


def _send_all(connections: list[Sends]) -> None:
    for connection in connections:
        connection.send()


class _Batch:
    """A batch on its way: its operations are begun in portions, and answered in order once all have been."""

    __slots__ = ("_answers", "_begun", "_left", "_operations", "_plane", "_principal", "_reply")

    def __init__(
        self, plane: Plane, principal: Principal, operations: Sequence[Operation | BadRequest], reply: Reply
    ) -> None:
        self._plane = plane
        self._principal = principal
        self._operations = operations
        self._reply = reply
        self._answers: list[Answer | None] = [None] * len(operations)
        self._left = len(operations)
        self._begun = 0

    def begin(self) -> None:
        """Begin the next portion."""
        if not self._operations:
            self._reply(render.batch(()))
            return
        begin, upto = self._begun, min(self._begun + PORTION, len(self._operations))
        self._begun = upto
        if upto < len(self._operations):
            asyncio.get_running_loop().call_soon(self.begin)
        places = ((self._operations[at], _Place(self, at)) for at in range(begin, upto))
        self._plane.begin_operations(self._principal, places)

    def decided(self, place: _Place, outcome: Decision | Exception) -> None:
        """An acquire is decided, and to be rendered."""
        self._plane.decisions_in_batches.put((place, outcome))

    def put(self, at: int, answer: Answer) -> None:
        """One operation is answered."""
        self._answers[at] = answer
        self._left -= 1
        self._plane.turns.done()
        if self._left == 0:
            self._reply(render.batch([answer for answer in self._answers if answer is not None]))


class _Place:
    """Where in its batch an operation stands."""

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: _Batch, at: int) -> None:
        self._batch = batch
        self._at = at

    def decided(self, outcome: Decision | Exception) -> None:
        """An acquire is decided."""
        self._batch.decided(self, outcome)

    def put(self, answer: Answer) -> None:
        """The answer is there."""
        self._batch.put(self._at, answer)
