"""A connection without coroutines: commands go out, and each reply goes to the sender of its command, in order.

It begins as a redis-py connection, opened and authenticated as its URL says; then its transport changes its protocol.
The hot path uses it (`limiter.store.batcher`): a task, streams and a timer for every call cost as much as the call.

* a command is written once, at once; a sender that is told of a lost connection does not know whether it ran;
* a reply only ever goes to the sender of its command: with the first reply missing at its deadline the connection ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import hiredis
from redis._parsers.base import BaseParser
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import InvalidResponse, ResponseError

from limiter.store.link.deadline import Deadline
from limiter.store.store_errors import StoreUnavailable

Replied = Callable[[Any], None]
"""Receives the reply, or the exception that it stands for."""


class Wire(asyncio.Protocol):
    """One connection that several calls share."""

    def __init__(
        self, connection: AbstractConnection, where: str, meaning: Callable[[ResponseError], Exception]
    ) -> None:
        self._where = where
        self._meaning = meaning
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=BaseParser.parse_error)
        self._waiting: deque[tuple[float, Replied]] = deque()
        self._timer: Deadline | None = None
        self.is_open = True
        self._is_retired = False
        # The writer is kept: it would close its transport when it is collected.
        self._writer: asyncio.StreamWriter = connection._writer  # type: ignore[assignment]  # noqa: SLF001
        connection._reader = connection._writer = None  # noqa: SLF001  the transport is this object's now
        self._transport = cast("asyncio.Transport", self._writer.transport)
        self._transport.set_protocol(self)

    def send(self, packed: bytes, replied: Replied, *, deadline_s: float) -> None:
        """Send a command. Without its reply by the deadline (loop time) the connection is given up."""
        self._waiting.append((deadline_s, replied))
        self._transport.write(packed)
        if self._timer is None:
            self._timer = Deadline(deadline_s, self._look)

    def data_received(self, data: bytes) -> None:
        """Receive replies, or parts of them."""
        reader, waiting = self._reader, self._waiting
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                if not waiting:
                    self.close("it sent a reply without a command")
                    return
                _, replied = waiting.popleft()
                replied(self._meaning(reply) if isinstance(reply, ResponseError) else reply)
        except InvalidResponse as error:
            self.close(f"it sent what is no reply: {error}")
        if self._is_retired and not waiting:
            self.close("it is not used any more")

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection, by the server or by us."""
        self._end(str(exc) if exc else "the connection was closed")

    def eof_received(self) -> bool:
        """Handle the server's half of a close."""
        return False

    def retire(self) -> None:
        """End once the last reply has arrived; nothing more is sent."""
        self._is_retired = True
        if not self._waiting:
            self.close("it is not used any more")

    def close(self, why: str) -> None:
        """End at once. Senders that still wait receive StoreUnavailable."""
        if self.is_open:
            self._transport.abort()
            self._end(why)

    def _look(self) -> None:
        """Check the oldest command, and set the one timer that serves all again."""
        self._timer = None
        if not self._waiting:
            return
        oldest_s, _ = self._waiting[0]
        if oldest_s <= self._loop.time():
            self.close("it did not answer in time")
        else:
            self._timer = Deadline(oldest_s, self._look)

    def _end(self, why: str) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, deque()
        for _, replied in waiting:
            replied(StoreUnavailable(f"{self._where}: {why}"))
