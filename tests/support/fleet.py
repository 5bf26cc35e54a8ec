"""A fleet of real processes on loopback, and callers who ask it, work and report over HTTP."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from loadtest.overload.http import Http
from tests.support.command import HEADGATE, environment
from tests.support.nodes import until
from tests.support.servers import free_port

TICK_S = 0.02


class Process:
    """One `headgate api` or `headgate controller`, ready."""

    def __init__(self, command: str, **settings: object) -> None:
        given = environment(**settings)
        self.running = subprocess.Popen([*HEADGATE, command], env=given, stdout=subprocess.PIPE, text=True)
        assert self.running.stdout is not None
        self.greeting = self.running.stdout.readline()

    def end(self) -> None:
        self.running.kill()
        self.running.communicate()


@contextmanager
def api(url: str, policies: Path, **settings: object) -> Iterator[str]:
    """An API node; where it is."""
    port = free_port()
    process = Process("api", redis_url=url, policies=policies, port=port, **settings)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.end()


@contextmanager
def controllers(url: str, **settings: object) -> Iterator[Callable[[], tuple[str, Process]]]:
    """Starts a controller whenever it is called: its name and its process."""
    started: list[Process] = []

    def start() -> tuple[str, Process]:
        process = Process("controller", redis_url=url, **settings)
        started.append(process)
        return process.greeting.split("controller ")[1].split()[0], process

    try:
        yield start
    finally:
        for process in started:
            process.end()


class Callers:
    """Ask one node after the other at a rate, whatever becomes of it, and report the work when it is done."""

    def __init__(self, nodes: list[str], *, rate: float, work: float, duration_s: float = 0.0, **ask: Any) -> None:
        self.work = work
        self.admitted: list[tuple[float, float]] = []
        """When requests were admitted (s), and their work."""
        self.asked = 0
        self._duration_s = duration_s
        self.settled: list[tuple[float, float]] = []
        """When work was reported (s), and how much."""
        self.refused = 0
        self._nodes = [Http(node) for node in nodes]
        self._rate = rate
        self._ask = json.dumps(ask).encode()

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Send requests for as long as the block lasts."""
        async with asyncio.TaskGroup() as group:
            flow = group.create_task(self._flow(group))
            try:
                yield
            finally:
                flow.cancel()
        for node in self._nodes:
            node.close()

    async def _flow(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        began_s, sent = loop.time(), 0
        while True:
            due = int((loop.time() - began_s) * self._rate)
            for number in range(sent, min(due, sent + 50)):  # a machine that was busy elsewhere makes no flood
                group.create_task(self._call(self._nodes[number % len(self._nodes)]))
            sent = due
            await asyncio.sleep(TICK_S)

    async def _call(self, node: Http) -> None:
        work, loop = self.work, asyncio.get_running_loop()
        self.asked += 1
        status, body = await node.post("/v1/acquire", self._ask)
        if status == 429:
            self.refused += 1
            return
        assert status == 200, body
        self.admitted.append((loop.time(), work))
        if self._duration_s:
            await asyncio.sleep(self._duration_s)  # the work itself
        report = {"reservation": json.loads(body)["reservation"], "work": work}
        status, body = await node.post("/v1/settle", json.dumps(report).encode())
        assert status == 200, body
        self.settled.append((loop.time(), work))

    async def work_rate(self, seconds: float) -> float:
        """Units per second that are reported from now on, over some seconds of traffic."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await until(lambda: loop.time() >= began_s + seconds, within_s=2 * seconds)
        return sum(work for at_s, work in self.settled if at_s >= began_s) / (loop.time() - began_s)


class Visitors:
    """Requests to one node, one by one, each with what it does if it may."""

    def __init__(self, node: str) -> None:
        self.granted = 0
        self.refused = 0
        self._node = Http(node)

    async def acquire(self, **ask: Any) -> tuple[int, dict[str, Any]]:
        """Ask; the status and the answer's body."""
        status, body = await self._node.post("/v1/acquire", json.dumps(ask).encode())
        assert status in (200, 429), body
        self.granted += status == 200
        self.refused += status == 429
        return status, json.loads(body)

    async def settle(self, granted: Mapping[str, Any], **told: Any) -> None:
        """Report the work of a granted request."""
        report = {"reservation": granted["reservation"], "work": 1.0, **told}
        status, body = await self._node.post("/v1/settle", json.dumps(report).encode())
        assert status == 200, body

    async def do(self, descriptor: Mapping[str, str], work: Callable[[], Awaitable[None]]) -> bool:
        """One request that does something real, if it may; how long that took, the reservation knows (Q8)."""
        status, answer = await self.acquire(descriptor=descriptor)
        if status == 200:
            await work()
            await self.settle(answer)
        return status == 200

    async def wait_a_turn(self) -> None:
        """Leave time between requests, so that they come at no more than fifty a second."""
        await asyncio.sleep(TICK_S)

    def leave(self) -> None:
        """Close the connections."""
        self._node.close()
