"""Keep-alive HTTP for a thousand users in one process: a connection each, as many as are in use at once."""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

import httptools


class HttpFailure(Exception):
    """The other side went away before it answered."""


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        # uvloop's transport is none of asyncio's classes.
        self._transport, self.is_open = cast("asyncio.WriteTransport", transport), True

    def data_received(self, data: bytes) -> None:
        """A part of an answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._body += body

    def on_message_complete(self) -> None:
        """The whole answer."""
        answer, self._answer = self._answer, None
        body, self._body = bytes(self._body), bytearray()
        status = self._parser.get_status_code()
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        if answer is not None and not answer.done():
            answer.set_result((status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody answers any more."""
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(HttpFailure(str(exc or "the connection was closed")))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; status and body of the answer."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Give up."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class Http:
    """One server. Connections that are not in use are kept for the next request."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body; HttpFailure if there is no answer."""
        connection = await self._connection()
        lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
        try:
            answer = await connection.ask("\r\n".join((*lines, "", "")).encode() + body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        try:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        except OSError as error:
            raise HttpFailure(str(error)) from error
        return connection

    def close(self) -> None:
        """Close what is not in use."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
