"""The registry of live processes: nodes, which divide limits among them while the store is away (B3), and controllers.

Each process writes its name every BEAT_S, with the store's time. One that misses a few beats counts as gone.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from os import urandom
from typing import Any

from redis.exceptions import ResponseError

from limiter.store.clock import StoreClock, time_us
from limiter.store.keys import CONTROLLERS, NODES
from limiter.store.link.connect import Link
from limiter.store.store_errors import StoreError

log = logging.getLogger(__name__)

BEAT_S = 1.0
GONE_US = 5_000_000
TIMEOUT_S = 1.0
LEAVE_TIMEOUT_S = 0.25


async def controllers_seen(link: Link, now_us: int, *, within_s: float, timeout_s: float = TIMEOUT_S) -> int:
    """Return the number of controllers that reported within an interval before a time of the store."""
    since_us = now_us - round(within_s * 1e6)
    return int(await link.call(CONTROLLERS, "ZCOUNT", CONTROLLERS, since_us, "+inf", timeout_s=timeout_s))


class NodeRegistry:
    """This process among the others of its kind."""

    def __init__(
        self, link: Link, clock: StoreClock, *, key: bytes = NODES, name: str | None = None, gone_us: int = GONE_US
    ) -> None:
        self.name = name or urandom(8).hex()
        self._link = link
        self._clock = clock
        self._key = key
        self._gone_us = gone_us
        self._members = frozenset({self.name})

    @property
    def members(self) -> frozenset[str]:
        """Names of the live processes, this one included. While the store is away, those of the last look."""
        return self._members

    @property
    def count(self) -> int:
        """Number of live processes."""
        return len(self._members)

    async def run(self) -> None:
        """Beat until cancelled, then leave."""
        try:
            while True:
                try:
                    await self.beat()
                except (StoreError, ResponseError) as error:
                    log.debug("the registry of live processes cannot be read for now: %s", error)
                await asyncio.sleep(BEAT_S)
        finally:
            await self.leave()

    async def beat(self) -> None:
        """Register this process, and read which others live."""
        now_us = time_us(await self._call("TIME"))
        self._clock.observe(now_us)
        await self._call("ZADD", self._key, now_us, self.name)
        # Also members seen in the future: the store's clock has been set back since.
        await self._call("ZREMRANGEBYSCORE", self._key, "-inf", f"({now_us - self._gone_us}")
        await self._call("ZREMRANGEBYSCORE", self._key, f"({now_us + self._gone_us}", "+inf")
        found: list[bytes] = await self._call("ZRANGE", self._key, 0, -1)
        self._members = frozenset({self.name, *(name.decode("utf-8", "replace") for name in found)})

    async def leave(self) -> None:
        """Remove this process at once; should that fail, the others notice after a few beats."""
        with suppress(StoreError, ResponseError):
            await self._call("ZREM", self._key, self.name, timeout_s=LEAVE_TIMEOUT_S)

    async def _call(self, *command: bytes | str | int, timeout_s: float = TIMEOUT_S) -> Any:
        return await self._link.call(self._key, *command, timeout_s=timeout_s)
