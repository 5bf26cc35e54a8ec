"""Reports of load, written into the store (G5). The controller reads them with `Steering.signals`.

A report for all buckets of a policy is one call for each partition, a thousand at most. Decisions need the connections
and the node's time more than reports do:

    IN_FLIGHT_MAX   calls of all reports at once, and EACH_MAX of one report; the rest wait their turn
    WAITING_MAX     calls that may wait in all; a report that would exceed it is refused
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from limiter.store.keys import Slot
from limiter.store.link.connect import Link
from limiter.store.link.script_calls import run_script
from limiter.store.scripts import SignalScript

TIMEOUT_S = 1.0
IN_FLIGHT_MAX = 4
EACH_MAX = 2
WAITING_MAX = 4096
"""About half a second of calls, so that a report is answered within a second (F-H10)."""


class TooManyReports(Exception):
    """More reports are waiting than this node can write to the store within a second."""


class Signals:
    """Writes the reports of sources. Raises `StoreError` if the store does not answer in time."""

    def __init__(self, link: Link, *, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._script = SignalScript()
        self._turns = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._waiting = 0

    async def report(self, slots: Sequence[Slot], bucket: str, source: str, loads: Mapping[str, float]) -> None:
        """Write a report into each of the partitions. A repeat changes nothing but its time."""
        if self._waiting and self._waiting + len(slots) > WAITING_MAX:
            raise TooManyReports(f"{self._waiting} calls of other reports are waiting for the store")
        self._waiting += len(slots)
        left = (slot for slot in slots)
        workers = [
            asyncio.create_task(self._work(left, bucket, source, loads)) for _ in range(min(EACH_MAX, len(slots)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            self._waiting -= len(slots)

    async def _work(self, left: Iterator[Slot], bucket: str, source: str, loads: Mapping[str, float]) -> None:
        """Write a report into the remaining partitions, one after the other."""
        for slot in left:
            async with self._turns:
                await self._report(slot, bucket, source, loads)

    async def _report(self, slot: Slot, bucket: str, source: str, loads: Mapping[str, float]) -> None:
        script = self._script
        call = script.call(slot.prefix, bucket, source, loads)
        await run_script(self._link, slot.prefix, script, call, timeout_s=self._timeout_s)
