"""The ASGI middleware in real FastAPI and Starlette applications, before a real Headgate."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from headgate import Grant, Headgate, Throttled, present_grant
from headgate.asgi import HeadgateMiddleware, MeasuredWork
from limiter.client.request_context import current
from tests.support import eventually
from tests.support.live import LiveApi
from tests.support.servers import free_port
from tests.support.settles import Settled
from tests.support.web_apps import serving_asgi

PAGES = {"service": "pages", "customer": "header:x-customer"}
INNER = {"service": "inner", "customer": "header:x-customer"}


class Service:
    """A FastAPI application that shows what it knows, and fails as it is asked to."""

    def __init__(self, gate: Headgate) -> None:
        self.app = FastAPI()
        self.gate = gate
        self.ran = threading.Event()
        self.go_on = threading.Event()
        router = APIRouter(prefix="/items")
        endpoints: dict[str, Callable[..., Any]] = {
            "/class": self.criticality,
            "/healthz": self.healthz,
            "/tokens": self.tokens,
            "/in-thread": self.in_thread,
            "/fail": self.fail,
            "/slow": self.slow,
            "/unavailable": self.unavailable,
            "/below": self.below,
            "/stream": self.stream,
            "/background": self.background,
        }
        for path, endpoint in endpoints.items():
            self.app.get(path)(endpoint)
        router.get("/{item}")(self.item)
        self.app.include_router(router, prefix="/v1")

    async def healthz(self) -> str:
        return "well"

    async def criticality(self) -> str | None:
        return current()

    async def item(self, item: str) -> str:
        return item

    async def tokens(self, request: Request, used: float) -> float:
        grant = request.scope["headgate"]
        assert request.state.headgate is grant
        assert isinstance(grant, Grant)
        grant.settle(work=used)
        return grant.charged

    def in_thread(self, used: float, grant: Annotated[Grant, Depends(present_grant)]) -> str | None:
        present_grant().settle(work=used)
        return current()

    async def fail(self) -> None:
        raise ValueError("broken")

    async def slow(self) -> None:
        raise TimeoutError

    async def unavailable(self) -> Response:
        return Response(status_code=503)

    async def below(self) -> None:
        raise Throttled(reason="work", policy="secret-policy-of-below", retry="after", retry_after_ms=100.0)

    async def stream(self, pieces: int) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(pieces):
                yield b"x" * 1000

        return StreamingResponse(body())

    async def background(self, tasks: BackgroundTasks) -> str:
        tasks.add_task(self.wait)
        return "done"

    def wait(self) -> None:
        self.ran.set()
        assert self.go_on.wait(20.0)


@contextmanager
def serving(headgate: LiveApi, descriptor: Any = PAGES, **options: Any) -> Iterator[tuple[str, Service]]:
    gate = Headgate(headgate.base)
    service = Service(gate)
    service.app.add_middleware(HeadgateMiddleware, gate=gate, descriptor=descriptor, **options)
    with serving_asgi(service.app) as url:
        yield url, service


def test_a_refused_request_gets_a_problem_and_the_headers_that_say_when_to_come_again(
    headgate: LiveApi, customer: str, client: httpx.Client
) -> None:
    headers = {"x-customer": customer}
    with serving(headgate, work={"/healthz": 0, "*": 11}) as (url, _):
        assert client.get(f"{url}/class", headers=headers).status_code == 200, "a bucket may go into debt"
        refused = client.get(f"{url}/class", headers=headers)
        assert client.get(f"{url}/healthz", headers=headers).status_code == 200, "it is not asked for"
    assert refused.status_code == 429
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["headgate-retry"] == "after"
    assert int(refused.headers["retry-after"]) > 60
    assert refused.headers["ratelimit"].startswith('"pages";r=0;t=')
    assert refused.headers["ratelimit-policy"].startswith('"pages";q=')
    problem = refused.json()
    assert (problem["status"], problem["reason"], problem["policy"]) == (429, "work", "pages")
    assert "limits" not in problem, "a stranger need not know all limits"


def test_a_denied_request_is_forbidden(headgate: LiveApi, client: httpx.Client) -> None:
    with serving(headgate, {"service": "banned"}) as (url, _):
        answer = client.get(f"{url}/class")
    assert (answer.status_code, answer.json()["reason"]) == (403, "denied")


def test_where_nobody_can_decide_the_answer_is_503(client: httpx.Client) -> None:
    gate = Headgate(f"http://127.0.0.1:{free_port()}", unavailable="closed", deadline_ms=100)
    app = HeadgateMiddleware(Starlette(), gate, descriptor={"service": "pages"})
    with serving_asgi(app) as url:
        answer = client.get(url)
    assert (answer.status_code, answer.json()["reason"]) == (503, "unavailable")
    assert answer.headers["headgate-retry"] == "after"


@pytest.mark.parametrize("path", ["tokens", "in-thread"])
def test_what_the_application_settles_is_the_debt(
    path: str, headgate: LiveApi, customer: str, client: httpx.Client, balance: Callable[..., float]
) -> None:
    with serving(headgate, work=2) as (url, _):
        answer = client.get(f"{url}/{path}", params={"used": 50}, headers={"x-customer": customer})
        assert answer.status_code == 200
        eventually(lambda: balance() == pytest.approx(-40, abs=0.1))
        assert client.get(f"{url}/class", headers={"x-customer": customer}).status_code == 429


def test_a_request_that_is_not_asked_for_has_a_grant_all_the_same(
    headgate: LiveApi, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def never(request: Any, work: MeasuredWork) -> float:
        raise AssertionError(f"{request.path} is not to be settled")

    with caplog.at_level(logging.ERROR), serving(headgate, work={"*": None}, settle=never) as (url, _):
        assert client.get(f"{url}/tokens", params={"used": 5}).json() == 0
    assert not caplog.records


def test_settling_by_bytes_counts_the_body_that_was_sent(
    headgate: LiveApi, customer: str, client: httpx.Client, balance: Callable[..., float]
) -> None:
    with serving(headgate, settle="bytes") as (url, _):
        answer = client.get(f"{url}/stream", params={"pieces": 30}, headers={"x-customer": customer})
        assert len(answer.content) == 30_000
        eventually(lambda: balance() == pytest.approx(10 - 30_000, abs=0.1))


@pytest.mark.parametrize("settle", ["latency", "cpu", None, lambda request, work: float(work.status + work.cpu_ms)])
def test_the_work_is_what_the_rule_measures(
    settle: Any, headgate: LiveApi, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving(headgate, settle=settle, work=3) as (url, _):
        assert client.get(f"{url}/class", headers={"x-customer": customer}).status_code == 200
        work, outcome, latency_ms = last_settled()
    assert outcome == "ok"
    if settle is None:
        assert work == 3
    elif callable(settle):
        assert 200 < work < 5000
    else:
        assert work > 0
    assert settle != "latency" or work < latency_ms, (
        "latency counts from where the request came in, work from the grant"
    )


def test_a_function_that_settles_and_fails_leaves_the_charge(
    headgate: LiveApi, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    def broken(request: Any, work: MeasuredWork) -> float:
        raise KeyError(work.header("content-type"))

    with serving(headgate, settle=broken, work=3) as (url, _):
        assert client.get(f"{url}/class", headers={"x-customer": customer}).status_code == 200
        assert last_settled().work == 3


@pytest.mark.parametrize(("path", "outcome"), [("fail", "error"), ("slow", "timeout"), ("unavailable", "error")])
def test_a_failure_of_the_application_is_the_outcome(
    path: str, outcome: str, headgate: LiveApi, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving(headgate) as (url, _):
        assert client.get(f"{url}/{path}", headers={"x-customer": customer}).status_code >= 500
        assert last_settled().outcome == outcome


def test_a_mistake_of_the_caller_is_no_failure_of_the_application(
    headgate: LiveApi, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving(headgate) as (url, _):
        assert client.get(f"{url}/nowhere", headers={"x-customer": customer}).status_code == 404
        assert last_settled().outcome == "ok"


def test_g6_a_refusal_of_a_layer_below_tells_the_callers_above_not_to_retry(
    headgate: LiveApi, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving(headgate) as (url, _):
        answer = client.get(f"{url}/below", headers={"x-customer": customer})
        assert last_settled().outcome == "error"
    assert (answer.status_code, answer.headers["headgate-retry"]) == (503, "never")
    assert "retry-after" not in answer.headers
    assert "secret" not in answer.text


def test_the_work_is_settled_when_the_answer_was_sent_and_background_tasks_go_on(
    headgate: LiveApi, customer: str, client: httpx.Client, last_settled: Callable[[], Settled]
) -> None:
    with serving(headgate) as (url, service):
        client.get(f"{url}/background", headers={"x-customer": customer})
        assert service.ran.wait(20.0)
        assert last_settled().outcome == "ok"
        service.go_on.set()


def test_g4_the_class_of_the_header_reaches_the_application(
    headgate: LiveApi, customer: str, client: httpx.Client
) -> None:
    headers = {"x-customer": customer, "headgate-criticality": "critical_plus"}
    with serving(headgate, INNER) as (url, _):
        assert client.get(f"{url}/class", headers=headers).json() == "critical_plus"
        assert client.get(f"{url}/class", headers={"x-customer": customer}).json() is None
        assert client.get(f"{url}/in-thread", params={"used": 1}, headers=headers).json() == "critical_plus"
    with serving(headgate, INNER, edge={"/class": "sheddable"}, criticality="critical") as (url, _):
        assert client.get(f"{url}/class", headers=headers).json() == "sheddable"
        assert client.get(f"{url}/in-thread", params={"used": 1}, headers=headers).json() == "critical"


def test_routes_of_fastapi_and_starlette_are_named_by_their_patterns(headgate: LiveApi, client: httpx.Client) -> None:
    seen: list[dict[str, str]] = []

    async def noting(request: Any) -> dict[str, str] | None:
        seen.append({"route": request.route or "", "method": request.method})
        return None

    with serving(headgate, noting) as (url, _):
        assert client.get(f"{url}/v1/items/17").json() == "17"
        client.get(f"{url}/class")
        client.get(f"{url}/nowhere")
        client.delete(f"{url}/class")

    async def page(request: Any) -> Response:
        return PlainTextResponse("page")

    routes = [Mount("/shop/{id}", routes=[Route("/carts/{cart:int}", page)]), Route("/{rest:path}", page)]
    gate = Headgate(headgate.base)
    with serving_asgi(HeadgateMiddleware(Starlette(routes=routes), gate, descriptor=noting)) as url:
        client.get(f"{url}/shop/7/carts/3")
        client.get(f"{url}/a/b")
    assert [one["route"] for one in seen] == [
        "/v1/items/{item}", "/class", "", "", "/shop/{id}/carts/{cart}", "/{rest}",
    ]  # fmt: skip
    assert seen[3]["method"] == "DELETE"


def test_a_client_that_leaves_in_the_middle_pays_for_what_it_was_sent(
    headgate: LiveApi, customer: str, last_settled: Callable[[], Settled]
) -> None:
    sent = 0
    gate = Headgate(headgate.base)

    async def endless(request: Any) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                yield b"x" * 10_000
                sent += 10_000
                await asyncio.sleep(0)

        return StreamingResponse(body())

    app = Starlette(routes=[Route("/", endless)])
    app.add_middleware(HeadgateMiddleware, gate=gate, descriptor=PAGES, settle="bytes")
    with serving_asgi(app) as url, httpx.Client(trust_env=False) as client:
        with client.stream("GET", url, headers={"x-customer": customer}) as answer:
            next(answer.iter_raw())
        work, outcome, _ = last_settled()
    assert outcome == "cancelled"
    assert 10_000 <= work <= sent + 10_000


def test_a_stream_reports_its_progress_while_it_is_sent(
    headgate: LiveApi, customer: str, balance: Callable[..., float]
) -> None:
    go_on = threading.Event()
    gate = Headgate(headgate.base)

    async def paused(request: Any) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(2):
                yield b"x" * 4000
            await asyncio.to_thread(go_on.wait, 20.0)

        return StreamingResponse(body())

    app = Starlette(routes=[Route("/", paused)])
    app.add_middleware(HeadgateMiddleware, gate=gate, descriptor=PAGES, settle="bytes")
    with (
        serving_asgi(app) as url,
        httpx.Client(trust_env=False, timeout=20.0) as client,
        client.stream("GET", url, headers={"x-customer": customer}) as answer,
    ):
        eventually(lambda: balance() == pytest.approx(10 - 8000, abs=0.1))
        go_on.set()
        answer.read()


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    async for text in socket.iter_text():
        if text == "below":
            raise Throttled(reason="work")
        await socket.send_text(text)


async def too_early(socket: WebSocket) -> None:
    raise Throttled(reason="work")


@contextmanager
def sockets(headgate: LiveApi, **options: Any) -> Iterator[str]:
    app = Starlette(routes=[WebSocketRoute("/", echo), WebSocketRoute("/early", too_early)])
    app.add_middleware(HeadgateMiddleware, gate=Headgate(headgate.base), descriptor=PAGES, **options)
    with serving_asgi(app) as url:
        yield url.replace("http", "ws")


def test_a_websocket_is_asked_for_when_it_opens_and_settled_when_it_closes(
    headgate: LiveApi, customer: str, settled: list[Settled], last_settled: Callable[[], Settled]
) -> None:
    headers = {"x-customer": customer}
    with sockets(headgate, work={"WEBSOCKET /": 11, "GET /": 0}, settle="bytes") as url:
        with connect(url, additional_headers=headers, proxy=None) as socket:
            socket.send("x" * 700)
            assert len(socket.recv()) == 700
            assert not settled
        assert last_settled()[:2] == (700, "ok")
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers, proxy=None)
    answer = refused.value.response
    assert (answer.status_code, answer.headers["headgate-retry"]) == (429, "after")
    assert json.loads(answer.body)["reason"] == "work"


def test_g6_a_refusal_from_below_ends_a_websocket(
    headgate: LiveApi, customer: str, last_settled: Callable[[], Settled]
) -> None:
    headers = {"x-customer": customer}
    with sockets(headgate) as url:
        with pytest.raises(InvalidStatus) as refused:
            connect(f"{url}/early", additional_headers=headers, proxy=None)
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["headgate-retry"] == "never"
        with connect(url, additional_headers=headers, proxy=None) as socket:
            socket.send("below")
            with pytest.raises(ConnectionClosedError) as closed:
                socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
        assert last_settled().outcome == "error"


class Wire:
    """An ASGI server of one request, as the test plays it."""

    def __init__(self, *received: Message, fails_after: int | None = None) -> None:
        self._received = list(received)
        self.sent: list[Message] = []
        self._fails_after = fails_after

    async def receive(self) -> Message:
        return self._received.pop(0) if self._received else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.sent) == self._fails_after:
            raise OSError("nobody is there")
        self.sent.append(message)


def http(customer: str, **more: Any) -> dict[str, Any]:
    headers = [(b"x-customer", customer.encode())]
    return {"type": "http", "method": "GET", "path": "/", "headers": headers, "query_string": b"", **more}


async def test_a_server_that_says_on_sending_that_nobody_is_there_is_heard(
    headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        for _ in range(5):
            await send({"type": "http.response.body", "body": b"x" * 100, "more_body": True})

    async with Headgate(headgate.base) as gate:
        limited = HeadgateMiddleware(app, gate, descriptor=PAGES, settle="bytes")
        wire = Wire(fails_after=3)
        with pytest.raises(OSError, match="nobody is there"):
            await limited(http(customer), wire.receive, wire.send)
    assert [one[:2] for one in settled] == [(200, "cancelled")]


@pytest.mark.parametrize("has_left", [True, False])
async def test_an_answer_that_was_never_given_is_a_failure_unless_the_client_left(
    has_left: bool, headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if has_left:
            await receive()

    async with Headgate(headgate.base) as gate:
        wire = Wire()
        await HeadgateMiddleware(app, gate, descriptor=PAGES)(http(customer), wire.receive, wire.send)
    assert [one.outcome for one in settled] == ["cancelled" if has_left else "error"]


async def test_a_cancelled_request_is_settled_as_cancelled(
    headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    is_working = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_working.set()
        await asyncio.Event().wait()

    async with Headgate(headgate.base) as gate:
        wire = Wire()
        limited = HeadgateMiddleware(app, gate, descriptor=PAGES, settle="cpu")
        running = asyncio.ensure_future(limited(http(customer), wire.receive, wire.send))
        await is_working.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [one.outcome for one in settled] == ["cancelled"]


async def test_a_file_that_the_server_sends_by_itself_counts_by_its_length(
    headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4096")]})
        await send({"type": "http.response.pathsend", "path": "/file"})

    async with Headgate(headgate.base) as gate:
        wire = Wire()
        await HeadgateMiddleware(app, gate, descriptor=PAGES, settle="bytes")(http(customer), wire.receive, wire.send)
    assert [one[:2] for one in settled] == [(4096, "ok")]


async def test_where_the_server_cannot_answer_a_websocket_it_is_closed(headgate: LiveApi) -> None:
    async with Headgate(headgate.base) as gate:
        limited = HeadgateMiddleware(Starlette(), gate, descriptor={"service": "banned"})
        wire = Wire({"type": "websocket.connect"})
        await limited({"type": "websocket", "path": "/", "headers": []}, wire.receive, wire.send)
    assert wire.sent == [{"type": "websocket.close", "code": 1013, "reason": "refused"}]


async def test_nothing_of_a_request_is_left_for_the_next_one(headgate: LiveApi, customer: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert current() == "critical"

    async with Headgate(headgate.base) as gate:
        wire = Wire()
        await HeadgateMiddleware(app, gate, descriptor=PAGES, edge="critical")(http(customer), wire.receive, wire.send)
        assert current() is None
        assert present_grant().charged == 0


def test_when_the_application_ends_what_waits_is_settled(
    headgate: LiveApi, customer: str, client: httpx.Client, balance: Callable[..., float]
) -> None:
    lived = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, str]]:
        lived.append("began")
        yield {"shared": "by all"}
        lived.append("ended")

    async def page(request: Any) -> Response:
        request.state.headgate.settle(work=6)
        return JSONResponse(request.state.shared)

    app = Starlette(routes=[Route("/", page)], lifespan=lifespan)
    app.add_middleware(HeadgateMiddleware, gate=Headgate(headgate.base), descriptor=PAGES)
    with serving_asgi(app, lifespan="on") as url:
        assert client.get(url, headers={"x-customer": customer}).json() == "by all"
    assert lived == ["began", "ended"]
    assert balance() == pytest.approx(4, abs=0.1), "at once: it was flushed"


def test_a_refusal_may_be_passed_through_to_be_degraded(headgate: LiveApi, customer: str, client: httpx.Client) -> None:
    async def page(request: Any) -> Response:
        grant: Grant = request.state.headgate
        return JSONResponse([bool(grant), grant.quality])

    app = Starlette(routes=[Route("/", page)])
    app.add_middleware(
        HeadgateMiddleware, gate=Headgate(headgate.base), descriptor=PAGES, work=11, on_refused="degrade"
    )
    with serving_asgi(app) as url:
        answers = [client.get(url, headers={"x-customer": customer}).json() for _ in range(2)]
    assert answers == [[True, 1.0], [False, 0.0]]


def test_a_rule_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="unknown option wait; acquire has namespace, expected_latency_ms, "):
        HeadgateMiddleware(Starlette(), Headgate(), descriptor=PAGES, wait=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="settle is latency, cpu, bytes, a function or None, not 'tokens'"):
        HeadgateMiddleware(Starlette(), Headgate(), descriptor=PAGES, settle="tokens")  # type: ignore[arg-type]
