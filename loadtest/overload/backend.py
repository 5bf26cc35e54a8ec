"""A small service that burns CPU behind a bounded pool: what overload control protects in the experiments.

    capacity  = workers / cost of a request            an unbounded queue in front, so excess becomes waiting
    stages    = one pool for all kinds, or a pool for each (S5)
    cost      = cost of its kind · (LEAST_COST + (1 − LEAST_COST) · quality)     cheaper work at lower quality (S4)
    of which  CPU_SHARE burns CPU, and the rest waits as for a database while the worker stays taken: what the backend
                can do is then given by its pool, and not by what else the machine has to do

`python -m loadtest.overload.backend` prints the port that it listens on.

POST /work?kind=cheap&quality=1   → {"queued_ms": …, "worked_ms": …}
GET  /load                        → {"utilisation": …, "queued": …}                 what G5's signals report
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

COSTS_MS: Mapping[str, float] = {"cheap": 5.0, "expensive": 50.0}
LEAST_COST = 0.2
"""What remains of the cost at quality 0."""
CPU_SHARE = 0.25


def burn(iterations: int) -> float:
    """Use a core for a while, without holding the interpreter's lock; how long it took (s)."""
    began_s = time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", b"work", b"salt", max(1, iterations))
    return time.perf_counter() - began_s


def work(iterations: int, takes_s: float) -> float:
    """Burn CPU, then wait until the request has had a worker for as long as it takes; how long that was (s)."""
    burnt_s = burn(iterations)
    time.sleep(max(0.0, takes_s - burnt_s))
    return max(burnt_s, takes_s)


def calibrate() -> float:
    """Iterations a millisecond on this machine: the best of a few, for others may be using the core."""
    iterations = 20_000
    return max(iterations / (burn(iterations) * 1000) for _ in range(5))


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
    is_staged: bool = False
    """Whether each kind of request has workers and a queue of its own."""
    _stages: dict[str, ThreadPoolExecutor] = field(init=False)

    def __post_init__(self) -> None:
        shared = None if self.is_staged else ThreadPoolExecutor(self.workers)
        self._stages = {kind: shared or ThreadPoolExecutor(self.workers) for kind in self.costs_ms}
        self._asked_s = time.perf_counter()

    def cost_ms(self, kind: str, quality: float) -> float:
        """How long a request of a kind takes a worker at a quality."""
        return self.costs_ms[kind] * (LEAST_COST + (1 - LEAST_COST) * quality)

    async def work(self, kind: str, quality: float) -> tuple[float, float]:
        """Wait for a worker and use it: how long the request queued and how long it worked (ms)."""
        cost_ms = self.cost_ms(kind, quality)
        iterations = round(cost_ms * CPU_SHARE * self.iterations_per_ms)
        began_s = time.perf_counter()
        self.queued += 1
        try:
            stage, takes_s = self._stages[kind], cost_ms / 1000
            worked_s = await asyncio.get_running_loop().run_in_executor(stage, work, iterations, takes_s)
        finally:
            self.queued -= 1
        self.worked_s += worked_s
        return (time.perf_counter() - began_s - worked_s) * 1000, worked_s * 1000

    def load(self) -> dict[str, float]:
        """The workers' utilisation since it was last asked, and how many requests wait or work."""
        now_s = time.perf_counter()
        busy_s, elapsed_s = self.worked_s - self._asked_worked_s, now_s - self._asked_s
        self._asked_s, self._asked_worked_s = now_s, self.worked_s
        workers = self.workers * len(set(self._stages.values()))
        return {"utilisation": busy_s / (elapsed_s * workers), "queued": self.queued}

    def close(self) -> None:
        """Let nobody wait any more."""
        for threads in self._stages.values():
            threads.shutdown(wait=True, cancel_futures=True)


def application(pool: Pool) -> Starlette:
    """The service."""

    async def serve(request: Request) -> JSONResponse:
        kind, quality = request.query_params.get("kind", "cheap"), _quality(request)
        if kind not in pool.costs_ms or quality is None:
            return JSONResponse({"detail": f"kind is one of {', '.join(pool.costs_ms)}; quality is in [0, 1]"}, 422)
        queued_ms, worked_ms = await pool.work(kind, quality)
        return JSONResponse({"queued_ms": queued_ms, "worked_ms": worked_ms})

    async def load(_: Request) -> JSONResponse:
        return JSONResponse(pool.load())

    return Starlette(routes=[Route("/work", serve, methods=["POST"]), Route("/load", load)])


def _quality(request: Request) -> float | None:
    try:
        quality = float(request.query_params.get("quality", "1"))
    except ValueError:
        return None
    return quality if 0 <= quality <= 1 else None


def server(application: Starlette) -> uvicorn.Server:
    """What answers for it."""
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
    parser.add_argument("--cheap-ms", type=float, default=COSTS_MS["cheap"])
    parser.add_argument("--expensive-ms", type=float, default=COSTS_MS["expensive"])
    parser.add_argument("--staged", action="store_true", help="workers and a queue for each kind of request")
    given = parser.parse_args()
    costs_ms = {"cheap": given.cheap_ms, "expensive": given.expensive_ms}
    pool = Pool(given.workers, calibrate(), costs_ms, is_staged=given.staged)
    listener = listen(given.port)
    print(listener.getsockname()[1], flush=True)
    try:
        asyncio.run(server(application(pool)).serve(sockets=[listener]))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
