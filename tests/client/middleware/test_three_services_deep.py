"""Three services in a row, each with a middleware: the edge's class decides at the leaf, one layer retries (G4, G6).

edge (FastAPI)  ──►  middle (FastAPI, or Flask on threads)  ──►  leaf (Starlette), the only one that is short
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import flask
import httpx
import pytest
import requests
from fastapi import FastAPI, Response
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from headgate import CarryingExecutor, Headgate, SyncHeadgate, carry
from headgate.asgi import HeadgateMiddleware
from headgate.wsgi import HeadgateMiddleware as WsgiMiddleware
from limiter.client.middleware.outgoing import async_httpx_hooks, passed_on, requests_adapter, retry_of
from limiter.client.request_context import current
from tests.support.live import LiveApi
from tests.support.web_apps import serving_asgi, serving_wsgi

ATTEMPTS = 3
INNER = {"service": "inner", "customer": "header:x-customer"}
LEAF = {"service": "leaf", "customer": "header:x-customer"}


class Calls:
    """Calls that each service saw, attempts included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = {"edge": 0, "middle": 0, "leaf": 0}
        self.classes: list[str | None] = []

    def count(self, service: str) -> None:
        with self._lock:
            self.counts[service] += 1

    def counting(self, service: str, app: Any) -> Any:
        """Count the requests that reach a service, refused ones included."""

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self.count(service)
            await app(scope, receive, send)

        return counted


def leaf(headgate: LiveApi, calls: Calls) -> Any:
    async def page(request: Request) -> PlainTextResponse:
        calls.classes.append(current())
        return PlainTextResponse("from the leaf")

    app = Starlette(routes=[Route("/{path}", page)])
    app.add_middleware(HeadgateMiddleware, gate=Headgate(headgate.base), descriptor=LEAF)
    return calls.counting("leaf", app)


def layer(headgate: LiveApi, name: str, below: str, calls: Calls, **rules: Any) -> Any:
    """A service that calls the one below in a task of its own, and retries as that one allows."""
    app = FastAPI()

    @app.get("/{path}")
    async def page(path: str, customer: str) -> Response:
        async with httpx.AsyncClient(event_hooks=async_httpx_hooks(), trust_env=False, timeout=20.0) as client:

            async def ask() -> httpx.Response:
                return await client.get(f"{below}/{path}?customer={customer}", headers={"x-customer": customer})

            for _ in range(ATTEMPTS):
                answer = await asyncio.create_task(ask())
                if answer.is_success or retry_of(answer.headers) in (None, "never"):
                    break
        if answer.is_success:
            return Response(answer.text)
        return Response(status_code=503, headers=passed_on(answer.headers))

    app.add_middleware(HeadgateMiddleware, gate=Headgate(headgate.base), descriptor=INNER, **rules)
    return calls.counting(name, app)


def threaded_layer(gate: SyncHeadgate, below: str, calls: Calls, pool: CarryingExecutor) -> Any:
    """The same on threads, with the call in a thread of a pool or in one of its own."""
    app = flask.Flask("middle")

    @app.get("/<path>")
    def page(path: str) -> Any:
        calls.count("middle")
        customer = flask.request.args["customer"]

        def ask() -> requests.Response:
            with requests.Session() as session:
                session.trust_env = False
                session.mount("http://", requests_adapter())
                address = f"{below}/{path}?customer={customer}"
                return session.get(address, headers={"x-customer": customer}, timeout=20.0)

        for _ in range(ATTEMPTS):
            answer = pool.submit(ask).result() if path == "browse" else in_a_thread(ask)
            if answer.ok or retry_of(answer.headers) in (None, "never"):
                break
        return answer.text if answer.ok else ("", 503, passed_on(answer.headers))

    app.wsgi_app = WsgiMiddleware(app.wsgi_app, gate, descriptor=INNER)  # type: ignore[method-assign]
    return app


def in_a_thread(ask: Callable[[], requests.Response]) -> requests.Response:
    answers: list[requests.Response] = []

    def run() -> None:
        answers.append(ask())

    thread = threading.Thread(target=carry(run))
    thread.start()
    thread.join()
    return answers[0]


@contextmanager
def three_services(headgate: LiveApi, calls: Calls, middle: str, edge: Any) -> Iterator[str]:
    with ExitStack() as stack:
        below = stack.enter_context(serving_asgi(leaf(headgate, calls)))
        if middle == "tasks":
            between = stack.enter_context(serving_asgi(layer(headgate, "middle", below, calls)))
        else:
            gate = stack.enter_context(Headgate.sync(headgate.base))
            pool = stack.enter_context(CarryingExecutor(2))
            between = stack.enter_context(serving_wsgi(threaded_layer(gate, below, calls, pool)))
        yield stack.enter_context(serving_asgi(layer(headgate, "edge", between, calls, edge=edge)))


MIDDLE = pytest.mark.parametrize("middle", ["tasks", "threads"])


def use_up(headgate: LiveApi, customer: str, work: float) -> None:
    """Leave the leaf's bucket, of 100, with that much less."""
    with Headgate.sync(headgate.base) as gate:
        gate.acquire({"service": "leaf", "customer": customer}, work=work, criticality="critical_plus").now().settle()


@MIDDLE
def test_g4_three_services_deep_the_leaf_sheds_by_the_class_of_the_edge(
    middle: str, headgate: LiveApi, customer: str, client: httpx.Client
) -> None:
    calls = Calls()
    use_up(headgate, customer, 70)  # sheddable needs 50, critical anything
    edge = {"/checkout": "critical", "*": "sheddable"}
    stranger = {"x-customer": customer, "headgate-criticality": "critical_plus"}
    with three_services(headgate, calls, middle, edge) as url:
        checkout = client.get(f"{url}/checkout", params={"customer": customer}, headers=stranger)
        browse = client.get(f"{url}/browse", params={"customer": customer}, headers=stranger)
    assert (checkout.status_code, checkout.text) == (200, "from the leaf")
    assert (browse.status_code, browse.headers["headgate-retry"]) == (503, "never")
    assert calls.classes == ["critical"]


@MIDDLE
def test_g6_in_a_stack_of_three_only_the_layer_above_the_refusal_retries(
    middle: str, headgate: LiveApi, customer: str, client: httpx.Client
) -> None:
    calls = Calls()
    use_up(headgate, customer, 150)
    with three_services(headgate, calls, middle, "critical") as url:
        answer = client.get(f"{url}/checkout", params={"customer": customer}, headers={"x-customer": customer})
    assert (answer.status_code, answer.headers["headgate-retry"]) == (503, "never")
    assert calls.counts == {"edge": 1, "middle": 1, "leaf": ATTEMPTS}
