"""Nodes as the engine will have them: buckets over a link, closed at the end."""

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from limiter.store.buckets import Buckets
from limiter.store.link.connect import Link, open_link
from limiter.store.link.wire import Replied

PATIENT_S = 5.0
"""A deadline long enough for everything that repairs itself."""


@asynccontextmanager
async def node(url: str, *, calls_max: int = 2) -> AsyncIterator[Buckets]:
    """A node's buckets on the store at `url`."""
    link = await open_link(url)
    buckets = Buckets(link, calls_max=calls_max)
    try:
        yield buckets
    finally:
        try:
            await asyncio.wait_for(buckets.drain(), timeout=2 * PATIENT_S)
        finally:
            await link.aclose()


async def until(condition: Callable[[], object], *, within_s: float = 10.0) -> None:
    """Let the event loop run until something is so; fail when it is not within the time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Watched:
    """A link to a real store that keeps the script calls it was given, and can hold them back."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._open = asyncio.Event()
        self._open.set()
        self.calls: list[tuple[bytes | str | float, ...]] = []
        self.in_flight = 0
        self.in_flight_max = 0

    @property
    def names(self) -> list[bytes | str | float]:
        """The commands of the calls so far."""
        return [command[0] for command in self.calls]

    @property
    def heads(self) -> list[tuple[float, float, int]]:
        """ARGV[1] of the calls so far: now_us, expires_us, number of buckets."""
        return [unpack_head(command) for command in self.calls if command[0] in ("EVAL", "EVALSHA")]

    def hold(self) -> None:
        """Send nothing on until released."""
        self._open.clear()

    def release(self) -> None:
        """Send on what was held, and whatever comes."""
        self._open.set()

    async def call(self, key: bytes, *command: bytes | str | float, timeout_s: float) -> Any:
        """Send once to the store."""
        self.calls.append(command)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            await self._open.wait()
            return await self._link.call(key, *command, timeout_s=timeout_s)
        finally:
            self.in_flight -= 1

    def send(self, key: bytes, packed: bytes, replied: Replied, *, deadline_s: float) -> bool:
        """Refuse, so that every call goes by `call`, which is watched."""
        return False

    def listen(self, channel: bytes) -> AsyncGenerator[bytes]:
        """The messages that are published on a channel."""
        return self._link.listen(channel)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._link.aclose()


def unpack_head(command: tuple[bytes | str | float, ...]) -> tuple[float, float, int]:
    """The numbers in the first argument behind the keys of a script call."""
    head = command[3 + int(command[2])]
    assert isinstance(head, bytes)
    now_us, expires_us, buckets = struct.unpack("<ddH", head)
    return now_us, expires_us, buckets
