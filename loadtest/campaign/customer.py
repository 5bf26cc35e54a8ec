"""A well-behaved customer: acquires, reports progress, settles, repeats, and keeps its own accounts.

    python -m loadtest.campaign.customer <orders>

It is a process of its own that does nothing else. Between its calls it asks a server that does nothing, and now and
then it computes for some milliseconds: the time of these shows how busy the machine is just then, which
distinguishes a slow node from a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random

import msgspec

NAMESPACE = "good"
CUSTOMERS = ("good-1", "good-2", "good-3")
EVERY_S = 0.05
COMPUTE_EVERY_S = 1.0
COMPUTE_S = 0.03
"""Processor time: more than a scheduler grants a process for having slept."""
TIMEOUT_S = 30.0
TRIES_MAX = 20
NOTHING = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Orders(msgspec.Struct):
    """The orders of the customer."""

    ports: list[int]
    key: str
    seed: str
    seconds: float
    report: str


class Call(msgspec.Struct):
    """One call and its duration."""

    at_s: float
    port: int
    """0: the server that does nothing."""
    took_s: float


class Share(msgspec.Struct):
    """Elapsed time divided by processor time: 4 if a process gets a quarter of a core."""

    at_s: float
    stretch: float


class Report(msgspec.Struct):
    """The customer's calls and accounts."""

    calls: list[Call]
    shares: list[Share]
    spent: dict[str, float]
    """Work that each bucket must have been charged, to the last unit."""
    grants: int
    complaints: list[str]


class Customer:
    """Makes one call at a time, to one node after another."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._draw = Random(f"{orders.seed}.customer")  # noqa: S311
        self._connections: dict[int, HTTPConnection] = {}
        self._calls: list[Call] = []
        self._shares: list[Share] = []
        self._complaints: list[str] = []
        self._spent = dict.fromkeys(CUSTOMERS, 0.0)
        self._grants = 0

    def run(self) -> Report:
        """Run until the time is over."""
        idle_port = serve_nothing()
        end_s = time.monotonic() + self._orders.seconds
        while time.monotonic() < end_s and len(self._complaints) < 20:
            if not self._shares or time.monotonic() > self._shares[-1].at_s + COMPUTE_EVERY_S:
                self._shares.append(share())
            self._time(0, idle_port, "GET", "/", None, {})
            for port in self._orders.ports:
                self._deal(port)
            time.sleep(EVERY_S)
        return Report(self._calls, self._shares, self._spent, self._grants, self._complaints)

    def _deal(self, port: int) -> None:
        """Make one acquire and its settle, perhaps at the other node."""
        draw, customer = self._draw, self._draw.choice(CUSTOMERS)
        self._grants += 1
        once = {"Idempotency-Key": f"{self._orders.seed}-{self._grants}"}
        charged = draw.randrange(1, 9)
        body = {"namespace": NAMESPACE, "descriptor": {"customer": customer}, "work": charged, "ttl_ms": 600_000}
        granted = self._ask(port, "/v1/acquire", body, once)
        if granted is None:
            return
        if draw.random() < 0.1:
            self._spent[customer] += charged  # never settled: the estimate stays charged
            return
        port = draw.choice(self._orders.ports)
        work = draw.randrange(20)
        tell: dict[str, object] = {"reservation": granted["reservation"], "work": work}
        if draw.random() < 0.2 and self._ask(port, "/v1/settle", tell | {"final": False}, {}) is None:
            return
        self._spent[customer] += work
        for _ in range(1 if draw.random() < 0.8 else 2):
            self._ask(port, "/v1/settle", tell, {})

    def _ask(self, port: int, path: str, body: dict[str, object], headers: dict[str, str]) -> dict[str, str] | None:
        """Return a node's answer; ask again as long as it could not decide."""
        for _ in range(TRIES_MAX):
            status, content = self._time(port, port, "POST", path, json.dumps(body).encode(), headers)
            if status == 200:
                found: dict[str, str] = json.loads(content)
                return found
            if status not in (0, 503):
                break
            time.sleep(EVERY_S)
        self._complaints.append(f"{path} on port {port} answered {status}: {content[:500]!r}")
        return None

    def _time(
        self, known_as: int, port: int, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        connection = self._connections.setdefault(port, HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S))
        own = {"Content-Type": "application/json", "Authorization": f"Bearer {self._orders.key}"}
        began_s = time.monotonic()
        try:
            connection.request(method, path, body, own | headers)
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, HTTPException) as error:
            connection.close()  # the next call opens it again
            status, content = 0, repr(error).encode()
        self._calls.append(Call(began_s, known_as, time.monotonic() - began_s))
        return status, content


def share() -> Share:
    """Compute for a moment, and measure how long it took."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    while time.process_time() < began_cpu_s + COMPUTE_S:
        pass
    ended_s = time.monotonic()
    return Share(ended_s, (ended_s - began_s) / (time.process_time() - began_cpu_s))


def serve_nothing() -> int:
    """Start a server in a thread, whose answers cost nothing; return its port."""
    ready = threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Nothing, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    ready.wait(TIMEOUT_S)
    return ports[0]


class _Nothing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"\r\n\r\n"):
            self._transport.write(NOTHING)


def main(orders: str) -> None:
    """Run as ordered, and write the report."""
    told = msgspec.json.decode(orders, type=Orders)
    Path(told.report).write_bytes(msgspec.json.encode(Customer(told).run()))


if __name__ == "__main__":
    main(sys.argv[1])
