"""Criticality and refusals between real HTTP clients and a real server."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import httpx
import pytest
import requests

from limiter.client.middleware.outgoing import (
    aiohttp_trace,
    async_httpx_hooks,
    httpx_hooks,
    outgoing_headers,
    passed_on,
    requests_adapter,
    retry_of,
)
from limiter.client.request_context import CRITICALITY_HEADER, criticality, current, enter, from_header
from limiter.client.retry_budget import RetryBudget

Call = Callable[..., str]
"""Get a URL, perhaps with headers, and return the body."""


class Echo(BaseHTTPRequestHandler):
    """Answers with the class that it was sent; /moved redirects to it."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = (self.headers.get(CRITICALITY_HEADER) or "none").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def by_httpx(url: str, **headers: str) -> str:
    with httpx.Client(event_hooks=httpx_hooks(), trust_env=False, follow_redirects=True) as client:
        return client.get(url, headers=headers).text


def by_async_httpx(url: str, **headers: str) -> str:
    async def get() -> str:
        hooks = async_httpx_hooks()
        async with httpx.AsyncClient(event_hooks=hooks, trust_env=False, follow_redirects=True) as client:
            return (await client.get(url, headers=headers)).text

    return asyncio.run(get())


def by_requests(url: str, **headers: str) -> str:
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", requests_adapter(pool_maxsize=1))
        return session.get(url, headers=headers, timeout=10).text


def by_aiohttp(url: str, **headers: str) -> str:
    async def get() -> str:
        async with (
            aiohttp.ClientSession(trace_configs=[aiohttp_trace()]) as session,
            session.get(url, headers=headers) as answer,
        ):
            return await answer.text()

    return asyncio.run(get())


CLIENTS = [by_httpx, by_async_httpx, by_requests, by_aiohttp]


@pytest.mark.parametrize("call", CLIENTS)
def test_g4_a_call_carries_the_class_of_the_request_that_makes_it(echo: str, call: Call) -> None:
    assert call(echo) == "none"
    with criticality("sheddable_plus"):
        assert call(echo) == "sheddable_plus"
        assert call(f"{echo}moved") == "sheddable_plus"
        with criticality("sheddable"):
            assert call(echo) == "sheddable"
    assert call(echo) == "none"


@pytest.mark.parametrize("call", CLIENTS)
def test_g4_a_call_that_sets_the_header_itself_keeps_it(echo: str, call: Call) -> None:
    with criticality("sheddable"):
        assert call(echo, **{CRITICALITY_HEADER.lower(): "critical"}) == "critical"


def test_g4_one_client_sends_the_class_of_each_of_its_calls(echo: str) -> None:
    async def get(client: httpx.AsyncClient, name: str) -> tuple[str, str]:
        with criticality(name):
            return name, (await client.get(echo)).text

    async def main() -> list[tuple[str, str]]:
        async with httpx.AsyncClient(event_hooks=async_httpx_hooks(), trust_env=False) as client:
            return await asyncio.gather(*(get(client, name) for name in ("critical", "sheddable") * 4))

    assert all(name == sent for name, sent in asyncio.run(main()))


def test_headers_for_other_clients() -> None:
    assert outgoing_headers() == {}
    with criticality("critical_plus"):
        assert outgoing_headers() == {"Headgate-Criticality": "critical_plus"}


def test_the_hooks_import_no_http_client_before_they_are_used() -> None:
    program = (
        "import sys, limiter.client.middleware.outgoing; print({'httpx', 'requests', 'aiohttp'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"Headgate-Retry": "never"}, "never"),
        ({"headgate-retry": " After "}, "after"),
        (httpx.Headers({"headgate-retry": "now"}), "now"),
        (requests.structures.CaseInsensitiveDict({"HEADGATE-RETRY": "never"}), "never"),
        ({"Headgate-Retry": "soon"}, None),
        ({"Retry-After": "3"}, None),
        ({}, None),
    ],
)
def test_g6_an_answer_says_whether_to_retry(headers: dict[str, str], word: str | None) -> None:
    assert retry_of(headers) == word


class Layer:
    """One of several services, each calling the next; retries as its budget and the answer allow."""

    def __init__(self, below: httpx.AsyncClient | None) -> None:
        self.below = below
        self.budget = RetryBudget(burst=0)
        self.calls = 0
        self.classes: set[str | None] = set()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        enter(criticality=from_header(request.headers.get(CRITICALITY_HEADER)))
        self.calls += 1
        self.classes.add(current())
        if self.below is None:
            return httpx.Response(503, headers={"Headgate-Retry": "after"})
        self.budget.asked(self.calls)
        attempt = 1
        while True:
            answer = await self.below.get("http://below/")
            word = retry_of(answer.headers)
            if word not in ("now", "after") or not self.budget.may_retry(attempt, self.calls):
                return httpx.Response(503, headers=passed_on(answer.headers))
            attempt += 1

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self.answer), event_hooks=async_httpx_hooks())


async def test_g6_in_a_stack_of_three_only_the_layer_above_the_refusal_retries() -> None:
    leaf = Layer(None)
    async with leaf.client() as to_leaf:
        middle = Layer(to_leaf)
        async with middle.client() as to_middle:
            top = Layer(to_middle)
            async with top.client() as to_top:
                for _ in range(1000):
                    answer = await asyncio.create_task(to_top.get("http://top/"))
                    assert retry_of(answer.headers) == "never"
    assert (top.calls, middle.calls) == (1000, 1000)
    assert top.budget.retries == 0
    assert 1000 < leaf.calls <= 1100, "1.1 calls per request"


async def test_g4_three_services_deep_the_leaf_knows_the_class_of_the_edge() -> None:
    leaf = Layer(None)
    async with leaf.client() as to_leaf:
        middle = Layer(to_leaf)
        async with middle.client() as to_middle, Layer(to_middle).client() as to_top:
            await asyncio.create_task(to_top.get("http://top/", headers={CRITICALITY_HEADER: "sheddable"}))
    assert leaf.classes == {"sheddable"}
