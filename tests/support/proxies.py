"""The proxy in a thread or as a process, a service that never answers, and one that writes down what it is asked."""

import asyncio
import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import uvloop

from api.server import bind_to, url_of
from limiter.cli.proxy_command import ProxyOptions, serve_proxy
from limiter.client.proxy.desk import Rules
from limiter.model.policy.criticality import Criticality
from tests.support.command import HEADGATE, environment
from tests.support.servers import free_port

HOST = "127.0.0.1"
PATIENT_S = 20.0


class ProxyProcess:
    """One proxy on a port of its own; it can be killed and started again there."""

    def __init__(self, upstream: str, *options: str) -> None:
        self.port = free_port()
        self._command = [*HEADGATE, "proxy", "--upstream", upstream, "--port", str(self.port), *options]
        self._process: subprocess.Popen[str] | None = None

    @property
    def base(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it listens."""
        self._process = subprocess.Popen(self._command, env=environment(), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert f": proxy at {self.base}," in line, line

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal, and return its status."""
        assert self._process is not None
        self._process.send_signal(number)
        status = self._process.wait(PATIENT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return status

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=PATIENT_S, trust_env=False, **options)

    @property
    def is_running(self) -> bool:
        return self._process is not None


class LiveProxy:
    """One proxy in a thread of its own."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._sockets = bind_to(HOST, 0, "")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)

    @property
    def base(self) -> str:
        return url_of(self._sockets, "http")

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(PATIENT_S)

    def stop(self) -> None:
        """End it in order."""
        if self._thread.is_alive():
            assert self._loop is not None
            assert self._serving is not None
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(PATIENT_S)
            assert not self._thread.is_alive()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=PATIENT_S, trust_env=False, **options)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = self._loop.create_task(serve_proxy(self._options, self._sockets, self._started.set))
        with suppress(asyncio.CancelledError):
            await self._serving


@contextmanager
def proxied(
    upstream: str,
    *,
    default_criticality: Criticality = Criticality.SHEDDABLE_PLUS,
    queue_max: int = 10_000,
    deadline_s: float = 10.0,
    is_auto: bool = False,
    **options: Any,
) -> Iterator[LiveProxy]:
    """A proxy in front of these nodes, in a thread."""
    rules = Rules(default_criticality, queue_max, deadline_s, is_auto)
    proxy = LiveProxy(ProxyOptions(tuple(upstream.split(",")), rules=rules, **options))
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


@contextmanager
def proxy_process(upstream: str, *options: str) -> Iterator[ProxyProcess]:
    """A proxy in front of these nodes, as a process; killed at the end."""
    proxy = ProxyProcess(upstream, *options)
    proxy.start()
    try:
        yield proxy
    finally:
        if proxy.is_running:
            proxy.kill()


@contextmanager
def silent_node() -> Iterator[str]:
    """The address of a service that accepts connections and answers nothing."""
    with socket.create_server((HOST, 0), backlog=128) as listening:
        yield f"http://{HOST}:{listening.getsockname()[1]}"


class RecordingNode:
    """A service that grants everything, and keeps the operations that it was asked for."""

    def __init__(self) -> None:
        self.operations: list[dict[str, Any]] = []
        self.authorizations: set[str | None] = set()
        self.answers: list[tuple[int, dict[str, Any]]] = []
        """Given to the next operations, instead of grants."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            """One connection."""

            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.authorizations.add(self.headers["authorization"])
                if self.path == "/v1/batch":
                    told = [outer.take(one) for one in body["operations"]]
                    results = [
                        answer if "status" in answer else {"status": status, **answer} for status, answer in told
                    ]
                    self._send(200, {"results": results})
                else:
                    key = {} if self.headers["idempotency-key"] is None else {
                        "idempotency_key": self.headers["idempotency-key"]
                    }  # fmt: skip
                    self._send(*outer.take({"op": self.path.rpartition("/")[2], **body, **key}))

            def do_GET(self) -> None:
                self._send(200, {"status": "ok"})

            def _send(self, status: int, answer: dict[str, Any]) -> None:
                raw = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def base(self) -> str:
        return f"http://{HOST}:{self._server.server_address[1]}"

    def take(self, operation: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the answer to one operation."""
        self.operations.append(operation)
        if self.answers:
            return self.answers.pop(0)
        if operation["op"] == "settle":
            return 200, {"work": operation["work"], "adjusted": 0.0, "uncollected": 0.0, "stop": False,
                         "duplicate": False, "late": False, "expires_in_ms": 0, "limits": []}  # fmt: skip
        return 200, {"granted": True, "reservation": f"r{len(self.operations)}", "charged": 1.0,
                     "expires_in_ms": 60_000, "limits": [], "overloaded": False, "quality": 1.0, "degraded": False,
                     "covered": True}  # fmt: skip


@contextmanager
def recording_node() -> Iterator[RecordingNode]:
    node = RecordingNode()
    node._thread.start()
    try:
        yield node
    finally:
        node._server.shutdown()
        node._server.server_close()
