"""Users in real time who think, ask, wait for one slow worker or are refused, and think again."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Protocol

SERVICE_S = 0.02
THINK_S = 2.0


class Worker:
    """One worker with an endless queue: 50 requests per second, or what the machine lets it do."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self.latencies: list[tuple[float, float]] = []
        """When each was answered, and after how long."""

    async def work(self) -> None:
        """Wait for the worker, and be served."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with self._one_at_a_time:
            await asyncio.sleep(SERVICE_S)
        now_s = loop.time()
        self.latencies.append((now_s, now_s - asked_s))


class Doing(Protocol):
    """Asks on behalf of users."""

    async def do(self, descriptor: Mapping[str, str], work: Callable[[], Awaitable[None]], /) -> bool:
        """One request that does something real, if it may."""


async def use(callers: Doing, worker: Worker, *, users: int, seconds: float) -> None:
    """Let so many users go on for so long."""

    async def live(draw: Random) -> None:
        while True:
            await asyncio.sleep(draw.expovariate(1 / THINK_S))
            await callers.do({"service": "orders"}, worker.work)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(live(Random(number))) for number in range(users)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
