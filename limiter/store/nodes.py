"""How many nodes there are, so that each can hold its share of a limit when the store is away (B3).

Each node writes every second, by the store's clock, that it lives. Who has not done so for a few seconds is gone.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from os import urandom
from typing import Any

from redis.exceptions import ResponseError

from limiter.store.clock import StoreClock
from limiter.store.connect import Link
from limiter.store.errors import StoreError
from limiter.store.keys import NODES

log = logging.getLogger(__name__)

BEAT_S = 1.0
GONE_US = 5_000_000
TIMEOUT_S = 1.0
LEAVE_TIMEOUT_S = 0.25


class NodeRegistry:
    """This node among the others."""

    def __init__(self, link: Link, clock: StoreClock) -> None:
        self.name = urandom(8).hex()
        self._link = link
        self._clock = clock
        self._count = 1

    @property
    def count(self) -> int:
        """Nodes that live, this one included, as last seen: while the store is away it stays what it was."""
        return self._count

    async def run(self) -> None:
        """Beat until cancelled, then leave."""
        try:
            while True:
                try:
                    await self.beat()
                except (StoreError, ResponseError) as error:
                    log.debug("the nodes cannot be counted for now: %s", error)
                await asyncio.sleep(BEAT_S)
        finally:
            await self.leave()

    async def beat(self) -> None:
        """Say that this node lives, and count those that do."""
        seconds, microseconds = await self._call("TIME")
        now_us = int(seconds) * 1_000_000 + int(microseconds)
        self._clock.observe(now_us)
        await self._call("ZADD", NODES, now_us, self.name)
        # Also whoever was seen in the future: the store's clock has been set back since.
        await self._call("ZREMRANGEBYSCORE", NODES, "-inf", f"({now_us - GONE_US}")
        await self._call("ZREMRANGEBYSCORE", NODES, f"({now_us + GONE_US}", "+inf")
        self._count = max(1, int(await self._call("ZCARD", NODES)))

    async def leave(self) -> None:
        """Let the others know at once; should that fail, they will find out."""
        with suppress(StoreError, ResponseError):
            await self._call("ZREM", NODES, self.name, timeout_s=LEAVE_TIMEOUT_S)

    async def _call(self, *command: bytes | str | int, timeout_s: float = TIMEOUT_S) -> Any:
        return await self._link.call(NODES, *command, timeout_s=timeout_s)
