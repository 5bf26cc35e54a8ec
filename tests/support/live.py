"""The API as it runs, in a thread of its own, and a client that sends exactly the bytes it is given."""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import httptools
import httpx
import uvloop

from api.server import serve
from limiter.settings import Settings

Lane = Literal["fast", "plain"]
LANES: tuple[Lane, ...] = ("fast", "plain")
HOST = "127.0.0.1"
GIVE_UP_S = 20.0

POLICIES = """
policies:
  - {name: reads, match: {service: orders, operation: "read*"}, per: [customer], rate: 100, capacity: 500ms}
  - {name: slow, match: {service: slow}, per: [customer], rate: 1/d, capacity: 10, max_debt: 100}
  - {name: allowance, match: {plan: "*"}, per: [customer], quota: {work: 1000, period: month}}
  - {name: hits, match: {service: hits}, per: [customer], mechanism: requests, rate: 0.001, burst: 3,
     steering: {initial: C}}
  - {name: trial, match: {trial: "*"}, per: [customer], rate: 1/d, capacity: 1, shadow: true}
  - {name: busy, match: {service: busy}, per: [customer], rate: 100, capacity: 500ms,
     overload: {expectations: {}, response_time: {}, utilisation: {target: 80%}}}
  - {name: crowd, match: {service: crowd}, rate: 1000, overload: {utilisation: {}}}
  - {name: tokens, match: {service: tokens}, per: [customer], rate: 6000/m, capacity: 30s, max_debt: 60s}
  - {name: daily, match: {service: daily}, per: [customer], rate: 5000/d, capacity: 100}
  - {name: bounded, match: {service: bounded}, per: [customer], rate: 1/d, capacity: 1000, max_work: 150}
  - {name: limited, match: {service: limited}, per: [customer], rate: 1/d, capacity: 1000, max_request: 40,
     weights: {operation: {write: 3}}}
  - {name: covered, match: {service: covered}, per: [customer], rate: 1/d, capacity: 50, admit: covered}
  - {name: blocking, match: {service: blocking}, per: [customer], rate: 1/d, capacity: 1,
     block: {after: 3, in: 1m, for: 10m}}
  - {name: places, match: {service: places}, per: [customer], rate: 1000, in_flight: 2}
  - {name: lent, match: {service: lent}, per: [customer], rate: 100, capacity: 100, local: {allowed: true}}
  - {name: portions, match: {service: lent, pack: "*"}, per: [customer], quota: {work: 1000, period: month},
     local: {allowed: true}}
  - {name: lent-hits, match: {service: lent, hits: "*"}, per: [customer], count: requests, rate: 50, in_flight: 20,
     local: {allowed: true, lease_s: 2}}
  - {name: watched, match: {service: lent}, per: [customer], rate: 1, shadow: true}
  - {name: kept, match: {kept: "*"}, per: [customer], rate: 100}
  - {name: tenant, namespace: tenant1, match: {}, per: [customer], rate: 1/d, capacity: 10}
"""


class LiveApi:
    """One server."""

    def __init__(self, settings: Settings, url: str) -> None:
        self.settings = settings
        self._url = url
        self._address: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def base(self) -> str:
        return self._address.result(GIVE_UP_S)

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    def start(self) -> None:
        self._thread.start()
        assert self.base

    def stop(self) -> None:
        """Ask it to end in order, and wait."""
        self.begin_to_stop()
        self._thread.join(GIVE_UP_S)
        assert not self.running

    def begin_to_stop(self) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        assert self._serving is not None
        if not self._serving.cancelling():
            self._serving.cancel()

    def tasks(self) -> int:
        """The number of tasks that it has now."""
        counted: Future[int] = Future()
        self.loop.call_soon_threadsafe(lambda: counted.set_result(len(asyncio.all_tasks(self.loop))))
        return counted.result(GIVE_UP_S)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=GIVE_UP_S, trust_env=False, **options)

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except Exception as error:
            if self._address.done():
                raise
            self._address.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.create_task(serve(self.settings, self._url, on_started=self._address.set_result))
        with suppress(asyncio.CancelledError):
            await self._serving


@contextmanager
def live(url: str, policies: Path | None, *, lane: Lane = "fast", **settings: Any) -> Iterator[LiveApi]:
    """A server with these settings, on a free port."""
    given = {"port": 0, "fast_lane": lane == "fast", "policies": policies, "deadline_ms": 2000} | settings
    api = LiveApi(Settings(**given), url)
    api.start()
    try:
        yield api
    finally:
        api.stop()


@dataclass
class Reply:
    """One answer, as it came."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class _Replies:
    """Collects answers from a stream of bytes."""

    def __init__(self) -> None:
        self.all: list[Reply] = []
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[str, str]] = []

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.all.append(Reply())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.all[-1].headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.all[-1].status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.all[-1].body += body

    def on_message_complete(self) -> None:
        self.all[-1].complete = True


class Wire:
    """A connection, byte by byte."""

    def __init__(self, api: LiveApi, context: ssl.SSLContext | None = None, *, buffer_bytes: int = 0) -> None:
        plain = socket.socket()
        plain.settimeout(GIVE_UP_S)
        if buffer_bytes:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        plain.connect((HOST, api.port))
        self.socket = context.wrap_socket(plain, server_hostname=HOST) if context else plain
        self.socket.settimeout(GIVE_UP_S)
        self._replies = _Replies()
        self._taken = 0
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        """Send each part in a packet of its own, as far as that can be had."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                self.socket.sendall(part)

    def receive(self, count: int = 1) -> list[Reply]:
        """The next answers, complete; fewer if the connection ends before."""
        while not self.closed and sum(reply.complete for reply in self._replies.all) < self._taken + count:
            self._read()
        replies = self._replies.all[self._taken : self._taken + count]
        self._taken += len(replies)
        return replies

    def receive_all(self) -> list[Reply]:
        """All answers until the server closes."""
        while not self.closed:
            self._read()
        replies = self._replies.all[self._taken :]
        self._taken += len(replies)
        return replies

    def _read(self) -> None:
        try:
            data = self.socket.recv(65_536)
        except ConnectionResetError:
            data = b""
        if data:
            self._replies.feed(data)
        else:
            self.closed = True


LAST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def exchange(api: LiveApi, *parts: bytes, last: bytes = LAST) -> list[Reply]:
    """Send bytes, then a request that ends the connection; every answer."""
    with Wire(api) as wire:
        wire.send(*parts, last)
        return wire.receive_all()


def request(
    path: str = "/v1/acquire",
    body: bytes | dict[str, Any] = b"",
    *,
    method: str = "POST",
    headers: Iterable[tuple[str, str]] = (),
    version: str = "1.1",
    typed: bool = True,
) -> bytes:
    """A request as bytes, with its length, and as JSON unless it is to have no type, or has one among its headers."""
    headers = list(headers)
    if typed and "content-type" not in [name.lower() for name, _ in headers]:
        headers.insert(0, ("Content-Type", "application/json"))
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = [f"{method} {path} HTTP/{version}", "Host: x", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode("latin-1") + content


def ask(customer: str, service: str = "slow", **fields: Any) -> dict[str, Any]:
    """The body of an acquire."""
    return {"descriptor": {"service": service, "operation": "read", "customer": customer}, **fields}


def without_id(problem: dict[str, Any]) -> dict[str, Any]:
    """A problem's body without the id of its request, which no two share."""
    return {name: value for name, value in problem.items() if name != "request_id"}


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """An acquire whose body comes in chunks."""
    head = (
        b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


def statuses(replies: Sequence[Reply]) -> list[int]:
    return [reply.status for reply in replies]
