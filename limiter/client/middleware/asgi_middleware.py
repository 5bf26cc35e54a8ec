"""ASGI middleware: asks before the application works, settles when its answer was sent (`from headgate.asgi import …`).

    app.add_middleware(HeadgateMiddleware, gate=gate, descriptor={"service": "shop", "customer": "header:x-customer"})

The way of a request:

    enter     the moment it came in, and its class                          `limiter.client.request_context`
    rules     whether it is limited, by which descriptor, for which work    `request_rules`
    acquire   or an answer with the refusal                                 `refusal_answer`
    work      measured, reported while the answer streams, settled          `measured_work`

A `Throttled` that escapes from the application came from a layer below: its caller is told not to retry (G6). Added by
`add_middleware`, this stands inside the handler that makes 500 of exceptions, so it sees them.

The application finds the grant in `request.state.headgate`, `scope["headgate"]` or `headgate.present_grant()`. The
middleware settles when the last byte of the answer was handed to the server; with `settle="cpu"` when the application
has returned, background tasks included. When the application shuts down, the gate is closed: what waits is settled.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from time import monotonic_ns
from typing import Any, Unpack

from limiter.client.gate import Headgate
from limiter.client.grants import Grant, outcome_of
from limiter.client.middleware.cost import CpuTimed
from limiter.client.middleware.framework_routes import django_route, is_django, starlette_route
from limiter.client.middleware.measured_work import (
    MeasuredWork,
    SettleRule,
    check_settle,
    working_under,
)
from limiter.client.middleware.refusal_answer import RefusalAnswer, passed_on_answer, refusal_answer, throttled_in
from limiter.client.middleware.request_rules import (
    AcquireOptions,
    DescriptorRule,
    EdgeRule,
    IncomingRequest,
    RequestRules,
    WorkRule,
    within_bounds,
)
from limiter.client.request_context import enter
from limiter.client.throttled import Throttled

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CLOSE = {"type": "websocket.close", "code": 1013, "reason": "refused"}
"""Try again later: for a WebSocket that may not work now."""


class AsgiRequest(IncomingRequest):
    """An ASGI scope as rules see it. The method of a WebSocket is `WEBSOCKET`."""

    def __init__(self, scope: Scope, app: Any) -> None:
        self.raw = scope
        self._app = app
        self.method = scope.get("method", "WEBSOCKET")
        path, prefix = scope["path"], scope.get("root_path", "")
        self.path = path.removeprefix(prefix) or "/" if path.startswith(f"{prefix}/") else path
        self.client = (scope.get("client") or (None,))[0]
        self.query_string = scope.get("query_string", b"").decode("latin-1")

    def header(self, name: str) -> str | None:
        wanted = name.lower().encode("latin-1")
        return next((value.decode("latin-1") for known, value in self.raw["headers"] if known == wanted), None)

    @property
    def route(self) -> str | None:
        app = self.raw.get("app", self._app)
        if is_django(app):
            return django_route(self.path)
        routes = getattr(app, "routes", None)
        return None if routes is None else starlette_route(routes, self.raw)


class HeadgateMiddleware:
    """Limits the requests of an ASGI application.

    `descriptor`, `work`, `edge` and `criticality` (the class of requests that name none) are described in
    `request_rules`, `settle` in `measured_work`. Further options go to `gate.acquire`: `namespace`, `on_refused`,
    `wait_s`, `deadline_ms` and so on. Add it with `add_middleware(HeadgateMiddleware, gate=gate, descriptor=…)`.
    """

    def __init__(
        self,
        app: App,
        gate: Headgate,
        *,
        descriptor: DescriptorRule,
        work: WorkRule = None,
        settle: SettleRule = None,
        edge: EdgeRule = None,
        criticality: str | None = None,
        **acquire: Unpack[AcquireOptions],
    ) -> None:
        self.app = app
        self._gate = gate
        self._rules = RequestRules(descriptor, work=work, edge=edge, criticality=criticality, options=acquire)
        self._settle = check_settle(settle)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        else:
            came_ns = monotonic_ns()
            request = AsgiRequest(scope, self.app)
            with enter(came_ns, criticality=self._rules.class_of(request)):
                await self._serve(request, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the application's life on; at its end, what waits is settled."""

        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown."):
                await self._gate.close()
            await send(message)

        await self.app(scope, receive, closing)

    async def _serve(self, request: AsgiRequest, receive: Receive, send: Send) -> None:
        scope = request.raw
        exchange_of = _WebSocket if scope["type"] == "websocket" else _Http
        try:
            grant = await self._ask(request)
        except Throttled as refusal:
            await exchange_of.refuse(scope, receive, send, refusal_answer(refusal))
            return
        work = MeasuredWork(grant, request, self._settle)
        scope["headgate"] = work.grant
        scope.setdefault("state", {})["headgate"] = work.grant
        exchange = exchange_of(work, receive, send, ends_work=self._settle != "cpu")
        try:
            with working_under(work.grant):
                await self._run(work, scope, exchange)
        except BaseException as error:
            work.end(exchange.failed(error))
            if throttled_in(error) is None or not await exchange.pass_on(scope):
                raise
        else:
            exchange.end()

    async def _ask(self, request: AsgiRequest) -> Grant | None:
        asked = self._rules.asks(request)
        if asked is None:
            return None
        work, descriptor = asked
        if inspect.isawaitable(descriptor):
            descriptor = await descriptor
        if not descriptor:
            return None
        return await self._gate.acquire(within_bounds(descriptor), work, **self._rules.options)

    async def _run(self, work: MeasuredWork, scope: Scope, exchange: _Exchange) -> None:
        running: Any = self.app(scope, exchange.receive, exchange.send)
        if work.needs_cpu and inspect.iscoroutine(running):
            work.cpu = running = CpuTimed(running)
        await running


class _Exchange:
    """Messages between a server and an application, and what they say about the work."""

    def __init__(self, work: MeasuredWork, receive: Receive, send: Send, *, ends_work: bool) -> None:
        self._work = work
        self._receive = receive
        self._send = send
        self._ends_work = ends_work
        """The work is over when the answer is."""
        self._has_begun = False
        self._is_complete = False
        self._is_left = False
        """The client has gone."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"].endswith(".disconnect") and not self._is_complete:
            self.left()
        return message

    async def send(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # since version 2.4 of ASGI: nobody is there any more
            self.left()
            raise
        if not self._is_left:
            self.note(message)

    def left(self) -> None:
        """Note that the client has gone."""
        self._is_left = True

    def note(self, message: Message) -> None:
        """Note a message that was sent."""
        raise NotImplementedError

    async def pass_on(self, scope: Scope) -> bool:
        """Tell the client that a layer below refused, so that it does not retry; False: it is too late for that."""
        raise NotImplementedError

    def complete(self) -> None:
        self._is_complete = True
        if self._ends_work:
            self._work.end_by_status()

    def failed(self, error: BaseException) -> str:
        """Return the outcome of an exchange whose application has failed."""
        return "cancelled" if self._is_left else outcome_of(error)

    def end(self) -> None:
        """Settle what is not settled: the application has returned."""
        if self._is_complete:
            self._work.end_by_status()
        else:
            self._work.end("cancelled" if self._is_left else "error")


class _Http(_Exchange):
    def note(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self._has_begun = True
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", ())]
            self._work.answered(message["status"], headers)
        elif kind == "http.response.body":
            more = message.get("more_body", False)
            self._work.sent(len(message.get("body", b"")), more=more)
            if not more:
                self.complete()
        elif kind == "http.response.pathsend":  # the server sends a file by itself
            self._work.sent(int(self._work.header("content-length") or 0), more=False)
            self.complete()

    async def pass_on(self, scope: Scope) -> bool:
        if not self._has_begun:
            await _send_answer(self._send, "http", passed_on_answer())
        return not self._has_begun

    @staticmethod
    async def refuse(scope: Scope, receive: Receive, send: Send, answer: RefusalAnswer) -> None:
        await _send_answer(send, "http", answer)


class _WebSocket(_Exchange):
    """A WebSocket: its work lasts until either side leaves."""

    def note(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.accept":
            self._has_begun = True
        elif kind == "websocket.send":
            body = message.get("bytes")
            self._work.sent(len(message["text"].encode() if body is None else body), more=True)
        elif kind == "websocket.close":
            self.complete()

    def left(self) -> None:
        super().left()
        self.complete()

    def failed(self, error: BaseException) -> str:
        return "ok" if self._is_complete else outcome_of(error)

    async def pass_on(self, scope: Scope) -> bool:
        if self._is_complete:
            return False
        if self._has_begun:
            await self._send(CLOSE)
        else:
            await _refuse_socket(scope, self._send, passed_on_answer())
        return True

    @staticmethod
    async def refuse(scope: Scope, receive: Receive, send: Send, answer: RefusalAnswer) -> None:
        await receive()  # websocket.connect
        await _refuse_socket(scope, send, answer)


async def _refuse_socket(scope: Scope, send: Send, answer: RefusalAnswer) -> None:
    """Answer the handshake of a WebSocket, if the server can; otherwise close it, which most servers make a 403."""
    if "websocket.http.response" in (scope.get("extensions") or {}):
        await _send_answer(send, "websocket.http", answer)
    else:
        await send(CLOSE)


async def _send_answer(send: Send, kind: str, answer: RefusalAnswer) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    await send({"type": f"{kind}.response.start", "status": answer.status, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": answer.body})
