"""The data plane: a request's bytes in, its answer out. Both lanes use only this.

headers, body ── authenticate ──► decode ──► engine ──► render ──► answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from time import thread_time
from typing import Protocol

import msgspec
from msgspec import Struct

from api.data import decode, render
from api.data.answer import JSON, Answer
from api.data.auth import Doorkeeper, Forbidden, Unauthenticated, check_namespace
from api.data.counts import Requests
from api.data.decode import AcquireOperation, BadRequest, SettleOperation
from api.data.request_stage import Stage
from api.data.turns import Turns
from limiter.api_keys import Principal, read_keys
from limiter.engine.decider import Arrived, Decider
from limiter.engine.lender import Lender
from limiter.engine.operation import Operation
from limiter.engine.request_errors import NotDecided
from limiter.engine.settler import Correction, SettleArrived
from limiter.model.bucket.lease_contract import Lent, Returned
from limiter.runtime.told import Told
from limiter.settings import Settings

_Leasing = Callable[[Principal, bytes], Awaitable[Lent | Returned]]
_encode = msgspec.json.Encoder().encode

LEASINGS_MAX = 1024
"""Requests for leases in progress in one process."""

PORTION_FIRST = 16
PORTION_MAX = 128
PORTION_S = 0.002
"""Operations of a batch that are begun in one turn of the loop: others want their turn too. Twice as many after a
portion that took no longer than this of the processor, half as many after one that did."""
BEGIN_MAX_S = 0.5
"""Processor time to begin the operations of a batch, or the deadline where that is less; the others are refused. A
thousand take some milliseconds, unless thousands of policies have to be looked at for each (F-H10)."""
BUCKETS_MAX = 16_384
"""Buckets that the acquires of one batch ask together. A thousand operations have room for sixteen policies each."""


class Reply(Protocol):
    """The sender of a request: takes its answer, once."""

    def take(self, answer: Answer) -> None:
        """Take any answer."""

    def take_plain(self, status: int, head: bytes, body: bytes) -> None:
        """Take a decision or a settle, as in nearly all cases: 200 or 429, header lines, body."""


class Sends(Protocol):
    """A connection that sends its answers together."""

    def send(self) -> None:
        """Send the answers that are ready."""


class Headers(Struct):
    """The headers that are used here; None if absent."""

    authorization: bytes | None = None
    content_type: bytes | None = None
    content_encoding: bytes | None = None
    idempotency_key: bytes | None = None
    request_id: bytes | None = None
    traceparent: bytes | None = None
    admitted: Principal | None = None
    """The caller of these headers, once identified: keys do not change while the process lives."""


_Arrived = tuple[Headers, bytes, Reply]


class Plane:
    """Answers acquires, settles and batches, without coroutines: the answer goes to a `Reply`."""

    def __init__(self, decider: Decider, settings: Settings) -> None:
        self.decider = decider
        self.doorkeeper = Doorkeeper(read_keys(settings.api_keys))
        self._deadline_s = settings.deadline_ms / 1000
        self.turns = Turns(self._deadline_s)
        self.requests: Requests = {}
        self.busy_batches = 0
        self._acquires: Stage[_Arrived] = Stage(self._begin_acquires, hurries=True)
        self._settles: Stage[_Arrived] = Stage(self._begin_settles, hurries=True)
        self.outbox: Stage[Sends] = Stage(_send_all)
        """Connections with answers to send. Rendering all answers first and then sending them all is faster than
        alternating between our code and the system's."""
        self._desk = _Desk(render.Renderer(settings.rate_limit_headers), self.outbox)
        self.paths: dict[bytes, Callable[[Headers, bytes, Reply], None]] = {
            b"/v1/acquire": self.acquire,
            b"/v1/settle": self.settle,
            b"/v1/batch": self.batch,
            b"/v1/leases": self._leasing(self._lend),
            b"/v1/leases/renew": self._leasing(self._renew),
            b"/v1/leases/return": self._leasing(self._give_back),
        }
        self._leasings: set[asyncio.Task[None]] = set()

    async def answer(self, path: bytes, headers: Headers, body: bytes) -> Answer:
        """Return the answer to a request on one of the paths, for callers in a coroutine."""
        told: Told[Answer] = Told()
        self.paths[path](headers, body, Awaited(told))
        return await told.future

    def acquire(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """Handle `POST /v1/acquire`."""
        self._acquires.put((headers, body, reply))

    def settle(self, headers: Headers, body: bytes, reply: Reply) -> None:
        """Handle `POST /v1/settle`."""
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
        """Handle `POST /v1/batch`."""
        try:
            principal = self._admit(headers)
        except Exception as error:
            reply.take(render.failure(error))
        else:
            self.turns.ask(partial(self._begin_batch, principal, body, reply), partial(self._too_busy, reply))

    def _leasing(self, serve: _Leasing) -> Callable[[Headers, bytes, Reply], None]:
        """Return what serves a request for a lease: one call to the store, within the node's deadline."""

        def begin(headers: Headers, body: bytes, reply: Reply) -> None:
            if len(self._leasings) >= LEASINGS_MAX:
                self._too_busy(reply)
                return
            task = asyncio.get_running_loop().create_task(self._serve_lease(serve, headers, body, reply))
            self._leasings.add(task)
            task.add_done_callback(self._leasings.discard)

        return begin

    async def _serve_lease(self, serve: _Leasing, headers: Headers, body: bytes, reply: Reply) -> None:
        try:
            principal = headers.admitted or self._admit(headers)
            answer = Answer(200, JSON, _encode(await serve(principal, body)))
        except Exception as error:
            answer = render.failure(error)
        reply.take(answer)

    async def _lend(self, principal: Principal, body: bytes) -> Lent:
        request = decode.lease(body)
        check_namespace(principal, request.namespace)
        return await self._lender.lend(request)

    async def _renew(self, principal: Principal, body: bytes) -> Lent:
        return await self._lender.renew(decode.renew(body), namespace=principal.namespace)

    async def _give_back(self, principal: Principal, body: bytes) -> Returned:
        return await self._lender.give_back(decode.give_back(body), namespace=principal.namespace)

    @property
    def _lender(self) -> Lender:
        lender = self.decider.lender
        assert lender is not None, "a node that serves has a store of leases"
        return lender

    def _too_busy(self, reply: Reply) -> None:
        self.busy_batches += 1
        detail = "this node has more to decide than it can in time; nothing was done"
        reply.take(render.failure(NotDecided("node_busy", detail)))

    def begun_too_late(self, batch: _Batch, left: Iterable[int]) -> None:
        """Refuse the operations of a batch that took too long to begin."""
        self.busy_batches += 1
        answer = render.failure(NotDecided("node_busy", _TOO_LATE))
        for at in left:
            batch.put(at, answer)

    def _begin_batch(self, principal: Principal, body: bytes, reply: Reply) -> int:
        try:
            operations = decode.batch(body)
        except Exception as error:
            reply.take(render.failure(error))
            return 0
        batch = _Batch(self, principal, operations, reply, min(self._deadline_s, BEGIN_MAX_S))
        # Not at once: who hands out turns must count these first.
        asyncio.get_running_loop().call_soon(batch.begin)
        return len(operations)

    def _admit(self, headers: Headers) -> Principal:
        principal = self.doorkeeper.admit(headers.authorization, "use")
        decode.check_json(headers.content_type, headers.content_encoding)
        headers.admitted = principal
        return principal

    def admits(self, headers: Headers) -> bool:
        """True if a body with these headers is worth waiting for: its sender may send it, and says that it is JSON."""
        try:
            return bool(headers.admitted or self._admit(headers))
        except (Unauthenticated, Forbidden, BadRequest):
            return False

    def begin_operations(self, principal: Principal, batch: _Batch, some: Iterable[int], room: int) -> int:
        """Some operations of a batch, by their place in it; returns how many more buckets its acquires may ask."""
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
        room = self.decider.begin(acquires, batch, room)
        self.decider.settler.begin(settles, batch)
        return room


_TOO_LATE = "this node could not begin the whole batch in time; nothing was done for this operation"


class _Desk:
    """Answers single acquires and settles, each on its own connection."""

    def __init__(self, renderer: render.Renderer, outbox: Stage[Sends]) -> None:
        self._renderer = renderer
        self._outbox = outbox

    def answer(self, operations: Sequence[Operation]) -> None:
        """Render all of them, then send all."""
        with self._outbox:
            self._renderer.answer(operations)

    def answer_settles(self, operations: Sequence[Correction]) -> None:
        """Render all settles, then send all."""
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


class Awaited:
    """Takes an answer for a caller in a coroutine."""

    __slots__ = ("_told",)

    def __init__(self, told: Told[Answer]) -> None:
        self._told = told

    def take(self, answer: Answer) -> None:
        self._told(answer)

    def take_plain(self, status: int, head: bytes, body: bytes) -> None:
        self._told(Answer(status, head, body))


class _Batch:
    """A batch on its way: its operations are begun in portions, and answered in order once all have been.

    Those that could not be begun in time are refused: a request takes a bounded time, whatever it asks for.
    """

    __slots__ = (
        "_answers", "_begun", "_left", "_left_s", "_plane", "_portion", "_principal", "_reply", "_room", "operations",
    )  # fmt: skip

    def __init__(
        self,
        plane: Plane,
        principal: Principal,
        operations: Sequence[decode.Operation | BadRequest],
        reply: Reply,
        left_s: float,
    ) -> None:
        self.operations = operations
        self._plane = plane
        self._principal = principal
        self._reply = reply
        self._answers: list[Answer | None] = [None] * len(operations)
        self._left = len(operations)
        self._begun = 0
        self._portion = PORTION_FIRST
        self._room = BUCKETS_MAX
        self._left_s = left_s

    def begin(self) -> None:
        """Begin the next portion."""
        if not self.operations:
            self._reply.take(render.batch(()))
            return
        begin, count = self._begun, len(self.operations)
        if self._left_s < 0:
            self._plane.begun_too_late(self, range(begin, count))
            return
        self._begun = upto = min(begin + self._portion, count)
        if upto < count:
            asyncio.get_running_loop().call_soon(self.begin)
        began_s = thread_time()
        self._room = self._plane.begin_operations(self._principal, self, range(begin, upto), self._room)
        took_s = thread_time() - began_s
        self._left_s -= took_s
        self._portion = min(PORTION_MAX, 2 * self._portion) if took_s <= PORTION_S else max(1, self._portion // 2)

    def answer(self, operations: Sequence[Operation]) -> None:
        """Take decided acquires."""
        for operation in operations:
            self.put(operation.place, render.decision_body(operation))

    def answer_settles(self, operations: Sequence[Correction]) -> None:
        """Take concluded settles."""
        for operation in operations:
            self.put(operation.place, render.settled(operation))

    def put(self, at: int, answer: Answer) -> None:
        """Take the answer of one operation."""
        self._answers[at] = answer
        self._left -= 1
        self._plane.turns.done()
        if self._left == 0:
            self._reply.take(render.batch([answer for answer in self._answers if answer is not None]))
