"""The metrics of an API process: its own numbers, or those of all processes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Metric

from api.data.plane import Plane
from api.routes.metrics.named_policies import NamedPolicies
from limiter.engine.engine import Engine
from limiter.metrics import catalogue, exposition, processes, readings
from limiter.metrics.processes import Shelf
from limiter.metrics.readings import Reading, plain


class NodeMetrics:
    """The metrics of an API process. `directory` is where the processes of this machine share theirs."""

    def __init__(self, engine: Engine, plane: Plane, directory: Path | None) -> None:
        self._engine = engine
        self._plane = plane
        self._named = NamedPolicies(engine)
        self.shelf = None if directory is None else Shelf(directory, self._readings)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return the answer to a scrape, and its content type."""
        named = await self._named.read()
        if self.shelf is not None:
            self.shelf.flush()
            own = None
        else:
            own = list(exposition.families(self._readings()))  # not in the thread: nothing is counted meanwhile
        # In a thread: adding up the numbers of many processes takes milliseconds, in which decisions would wait.
        return await asyncio.to_thread(self._encode, own, named, accept)

    def _encode(self, own: list[Metric] | None, named: list[Reading], accept: str) -> tuple[bytes, str]:
        if own is None:
            assert self.shelf is not None
            own = processes.merged(self.shelf.directory)
        return exposition.encode([*own, *exposition.families([exposition.info(), *named])], accept)

    def _readings(self) -> Iterator[Reading]:
        yield from node(self._engine)
        yield from readings.http(self._plane.requests, busy_batches=self._plane.busy_batches)


def node(engine: Engine) -> Iterator[Reading]:
    """Yield the readings of one API process."""
    decider = engine.decider
    yield from readings.decisions(decider.decisions)
    yield readings.leases(engine.lender.tally)
    yield from readings.settles(decider.settles)
    yield from readings.reservations(decider.expiries, engine.now_us(), engine.policies)
    yield from readings.store_calls(engine.call_tallies)
    yield readings.unanswered({"acquire": decider.decisions.unanswered, "settle": decider.settles.unanswered})
    yield plain(catalogue.STORE_UP, engine.store_is_up)
    yield plain(catalogue.BREAKER_OPEN, decider.store_is_shunned)
    yield plain(catalogue.STORE_LOSS, engine.loss is not None)
    yield plain(catalogue.STORE_OUT_OF_MEMORY, engine.store_is_out_of_memory)
    yield plain(catalogue.QUOTA_OWED, decider.remainders.owing)
    yield plain(catalogue.READY, not engine.troubles())
    yield plain(catalogue.NODES, engine.nodes)
    yield plain(catalogue.POLICIES, len(engine.policies.policies))
    yield plain(catalogue.POLICIES_REVISION, engine.revision)
