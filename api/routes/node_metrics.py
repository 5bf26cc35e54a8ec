"""What this process shows of itself when it is scraped: its own numbers, or those of all processes beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Metric

from api.data.plane import Plane
from limiter.engine.engine import Engine
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
            own = None
        else:
            own = list(exposition.families(self._readings()))  # here, and not in the thread: nobody counts meanwhile
        # In a thread: to add up many processes' numbers takes milliseconds, in which decisions would wait.
        return await asyncio.to_thread(self._encode, own, named, accept)

    def _encode(self, own: list[Metric] | None, named: list[Reading], accept: str) -> tuple[bytes, str]:
        if own is None:
            assert self.shelf is not None
            own = processes.merged(self.shelf.directory)
        return exposition.encode([*own, *exposition.families([exposition.info(), *named])], accept)

    def _readings(self) -> Iterator[Reading]:
        yield from readings.node(self._engine)
        yield from readings.http(self._plane.requests, busy_batches=self._plane.busy_batches)
