"""Reports of load on their way into the store (G5). The controller reads them with `Steering.signals`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from redis.exceptions import NoScriptError

from limiter.store.connect import Link
from limiter.store.keys import Slot
from limiter.store.scripts import SignalScript

TIMEOUT_S = 1.0


class Signals:
    """Keeps what sources report. Raises `StoreError` where the store does not answer in time."""

    def __init__(self, link: Link, *, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._script = SignalScript()

    async def report(self, slots: Sequence[Slot], bucket: str, source: str, loads: Mapping[str, float]) -> None:
        """Keep a report in every partition that has such a bucket. A repeat changes nothing but its time."""
        await asyncio.gather(*(self._report(slot, bucket, source, loads) for slot in slots))

    async def _report(self, slot: Slot, bucket: str, source: str, loads: Mapping[str, float]) -> None:
        script = self._script
        call = script.call(slot.prefix, bucket, source, loads)
        try:
            await self._link.call(slot.prefix, "EVALSHA", script.sha, *call, timeout_s=self._timeout_s)
        except NoScriptError:
            await self._link.call(slot.prefix, "EVAL", script.source, *call, timeout_s=self._timeout_s)
