"""What this process shows of itself when it is scraped: its own numbers, or those of all processes beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Metric

from api.plane import Plane
from limiter.engine import Engine
from limiter.metrics import exposition, processes, readings
from limiter.metrics.named import NamedPolicies
from limiter.metrics.processes import Shelf
from limiter.metrics.readings import Reading


class NodeMetrics:
    """The metrics of an API process. `directory`: where the processes of this machine leave theirs for each other."""

    def __init__(self, engine: Engine, plane: Plane, directory: Path | None) -> None:
        self._engine = engine
        self._plane = plane
        self._named = NamedPolicies(engine)
        self.shelf = None if directory is None else Shelf(directory, self._readings)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """The answer to a scrape, and its content type."""
        named = await self._named.read()
        if self.shelf is not None:
            self.shelf.flush()
        # In a thread: to add up many processes' numbers takes milliseconds, in which decisions would wait.
        return await asyncio.to_thread(self._encode, named, accept)

    def _encode(self, named: list[Reading], accept: str) -> tuple[bytes, str]:
        return exposition.encode([*self._own(), *exposition.families([exposition.info(), *named])], accept)

    def _own(self) -> list[Metric]:
        if self.shelf is not None:
            return processes.merged(self.shelf.directory)
        return list(exposition.families(self._readings()))

    def _readings(self) -> Iterator[Reading]:
        yield from readings.node(self._engine)
        yield from readings.http(self._plane.requests, busy_batches=self._plane.busy_batches)
