"""A small service that burns CPU behind a bounded pool: the service that overload control protects in the experiments.

    capacity  = workers / cost of a request            an unbounded queue in front, so excess becomes waiting
    cost      = cost of its kind · (LEAST_COST + (1 − LEAST_COST) · quality)     cheaper work at lower quality (S4)
    of which  CPU_SHARE burns CPU, and the rest waits as for a database while the worker stays taken: what the backend
                can do is then given by its pool, and not by what else the machine has to do

With `--slows` it has no workers: answers take longer in proportion to the excess of the rate over a capacity (Q7).

`python -m loadtest.overload.backend` prints the port that it listens on.

POST /work?kind=cheap&quality=1   → {"queued_ms": …, "worked_ms": …}
POST /hang?seconds=10             nothing is answered for so long
GET  /load                        → {"utilisation": …, "queued": …}                 what G5's signals report
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import socket
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from loadtest.overload.backend_terms import BackendTerms, Slowing

COSTS_MS: Mapping[str, float] = {"cheap": 5.0, "expensive": 50.0}
CPU_SHARE = 0.25


def burn(iterations: int) -> float:
    """Use a core for a while, without holding the interpreter's lock; how long it took (s)."""
    began_s = time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", b"work", b"salt", max(1, iterations))
    return time.perf_counter() - began_s


def work(iterations: int, takes_s: float) -> float:
    """Burn CPU, then wait until the request has had a worker for as long as it takes; how long that was (s)."""
    began_s = time.perf_counter()
    time.sleep(max(0.0, takes_s - burn(iterations)))
    return time.perf_counter() - began_s


def calibrate() -> float:
    """Iterations per millisecond on this machine: the best of a few, for others may be using the core."""
    iterations = 20_000
    return max(iterations / (burn(iterations) * 1000) for _ in range(5))


class Works(Protocol):
    """A backend that does work."""

    costs_ms: Mapping[str, float]

    async def work(self, kind: str, quality: float) -> tuple[float, float]:
        """How long a request queued and how long it worked (ms)."""

    def load(self) -> dict[str, float]:
        """Utilisation, and how many requests are in."""

    def close(self) -> None:
        """End."""


@dataclass(slots=True)
class Pool:
    """A bounded number of workers, each burning CPU for one request at a time."""

    workers: int
    iterations_per_ms: float
    costs_ms: Mapping[str, float] = field(default_factory=lambda: COSTS_MS)
    queued: int = 0
    worked_s: float = 0.0
    _asked_s: float = 0.0
    _asked_worked_s: float = 0.0
    _threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(self.workers)
        self._asked_s = time.perf_counter()

    def cost_ms(self, kind: str, quality: float) -> float:
        """How long a request of a kind takes a worker at a quality."""
        return BackendTerms(costs_ms=self.costs_ms).cost_ms(kind, quality)

    async def work(self, kind: str, quality: float) -> tuple[float, float]:
        """Wait for a worker and use it: how long the request queued and how long it worked (ms)."""
        cost_ms = self.cost_ms(kind, quality)
        iterations = round(cost_ms * CPU_SHARE * self.iterations_per_ms)
        began_s = time.perf_counter()
        self.queued += 1
        try:
            takes_s = cost_ms / 1000
            worked_s = await asyncio.get_running_loop().run_in_executor(self._threads, work, iterations, takes_s)
        finally:
            self.queued -= 1
        self.worked_s += worked_s
        return (time.perf_counter() - began_s - worked_s) * 1000, worked_s * 1000

    def load(self) -> dict[str, float]:
        """The workers' utilisation since it was last asked, and how many requests wait or work."""
        now_s = time.perf_counter()
        busy_s, elapsed_s = self.worked_s - self._asked_worked_s, now_s - self._asked_s
        self._asked_s, self._asked_worked_s = now_s, self.worked_s
        return {"utilisation": busy_s / (elapsed_s * self.workers), "queued": self.queued}

    def close(self) -> None:
        """Let nobody wait any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)


@dataclass(slots=True)
class SlowingService:
    """No workers: each answer takes longer in proportion to the excess of the last second's requests (Q7)."""

    slows: Slowing
    costs_ms: Mapping[str, float] = field(default_factory=lambda: COSTS_MS)
    hung_until_s: float = 0.0
    queued: int = 0
    _recent_s: deque[float] = field(default_factory=deque)

    async def work(self, kind: str, quality: float) -> tuple[float, float]:
        """Wait as long as the load makes it, and until nothing hangs any more."""
        began_s = time.perf_counter()
        self._recent_s.append(began_s)
        takes_s = (self.slows.base_ms + self.slows.ms_per_excess * max(0.0, self._rate() - self.slows.capacity)) / 1000
        self.queued += 1
        try:
            await asyncio.sleep(takes_s)
            await asyncio.sleep(max(0.0, self.hung_until_s - time.perf_counter()))
        finally:
            self.queued -= 1
        return 0.0, (time.perf_counter() - began_s) * 1000

    def hang(self, seconds: float) -> None:
        """Answer nothing for so long."""
        self.hung_until_s = time.perf_counter() + seconds

    def load(self) -> dict[str, float]:
        """The last second's requests over the capacity, and how many are in."""
        return {"utilisation": self._rate() / self.slows.capacity, "queued": self.queued}

    def close(self) -> None:
        """Nothing is held."""

    def _rate(self) -> int:
        since_s = time.perf_counter() - 1.0
        while self._recent_s and self._recent_s[0] < since_s:
            self._recent_s.popleft()
        return len(self._recent_s)


def application(pool: Works) -> Starlette:
    """The service."""

    async def serve(request: Request) -> JSONResponse:
        kind, quality = request.query_params.get("kind", "cheap"), _number(request, "quality", 1.0)
        if kind not in pool.costs_ms or quality is None or not 0 <= quality <= 1:
            return JSONResponse({"detail": f"kind is one of {', '.join(pool.costs_ms)}; quality is in [0, 1]"}, 422)
        queued_ms, worked_ms = await pool.work(kind, quality)
        return JSONResponse({"queued_ms": queued_ms, "worked_ms": worked_ms})

    async def hang(request: Request) -> JSONResponse:
        seconds = _number(request, "seconds", 0.0)
        if seconds is None or not isinstance(pool, SlowingService):
            return JSONResponse({"detail": "a number of seconds, for a backend that slows down"}, 422)
        pool.hang(seconds)
        return JSONResponse({})

    async def load(_: Request) -> JSONResponse:
        return JSONResponse(pool.load())

    routes = [Route("/work", serve, methods=["POST"]), Route("/hang", hang, methods=["POST"]), Route("/load", load)]
    return Starlette(routes=routes)


def _number(request: Request, name: str, default: float) -> float | None:
    try:
        return float(request.query_params.get(name, default))
    except ValueError:
        return None


def server(application: Starlette) -> uvicorn.Server:
    """A server for it."""
    return uvicorn.Server(uvicorn.Config(application, log_level="warning", access_log=False))


def listen(port: int = 0) -> socket.socket:
    """A socket on this machine; 0 is any free port."""
    listener = socket.create_server(("127.0.0.1", port), backlog=4096)
    listener.setblocking(False)
    return listener


def main() -> None:
    """Run as a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--costs", nargs="+", default=[], help="of each kind of request, in ms: cheap=5")
    parser.add_argument("--slows", nargs=3, type=float, help="capacity, base_ms and ms_per_excess")
    given = parser.parse_args()
    costs_ms = {kind: float(cost_ms) for kind, _, cost_ms in (cost.partition("=") for cost in given.costs)} or COSTS_MS
    pool: Works
    if given.slows:
        capacity, base_ms, ms_per_excess = given.slows
        pool = SlowingService(Slowing(capacity=capacity, base_ms=base_ms, ms_per_excess=ms_per_excess), costs_ms)
    else:
        pool = Pool(given.workers, calibrate(), costs_ms)
    listener = listen(given.port)
    print(listener.getsockname()[1], flush=True)
    try:
        asyncio.run(server(application(pool)).serve(sockets=[listener]))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
