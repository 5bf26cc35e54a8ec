"""A loopback TCP proxy that misbehaves on demand, for tests of what the network does to us.

    async with Proxy(server.port) as proxy:
        link = await open_link(proxy.url)
        proxy.drop_next_reply()      # the request is executed, the client sees a reset

Switches work at any time, on connections that are already open too.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Literal, Self

HOST = "127.0.0.1"
CHUNK_BYTES = 65_536

Mode = Literal["pass", "stall", "hold"]


class Proxy:
    """Forwards `port` to `target_port`, and counts.

    `mode`      pass: forward; stall: forward nothing in either direction until it passes again;
                hold: keep requests back until `release_held`, even when their client is gone meanwhile
    `delay_s`   how long each chunk waits before it is forwarded, in either direction
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.delay_s = 0.0
        self.port = 0
        self.connections = 0  # accepted so far
        self.requests = 0  # chunks from clients so far: one command is one, unless it is large
        self._mode: Mode = "pass"
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._released = asyncio.Event()
        self._cut_after_bytes: int | None = None
        self._resets_all = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = mode
        if mode == "stall":
            self._flowing.clear()
        else:
            self._flowing.set()
        if mode == "hold":
            self._released.clear()

    def cut_after_reply_bytes(self, count: int) -> None:
        """Forward `count` more bytes of replies, over all connections, then reset the one that brought the last."""
        self._cut_after_bytes = count

    def drop_next_reply(self, *, and_reset_all: bool = False) -> None:
        """Let the next request be executed and reset its connection, or every one, instead of answering."""
        self.cut_after_reply_bytes(0)
        self._resets_all = and_reset_all

    def release_held(self) -> None:
        """Deliver the requests held back, in order, and hold no more."""
        self.mode = "pass"
        self._released.set()

    def reset_all(self) -> None:
        """Reset every connection that clients have open."""
        for client in list(self._clients):
            _reset(client)

    async def refuse(self) -> None:
        """Refuse new connections; those that are open stay."""
        assert self._server is not None
        self._server.close()

    async def accept(self) -> None:
        """Accept new connections (again), on the same port."""
        self._server = await asyncio.start_server(self._handle, HOST, self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._clients.add(client)
        try:
            self.connections += 1
            await self._serve(reader, client)
        except (OSError, asyncio.CancelledError):
            pass  # either side went away, or the test is over
        finally:
            self._tasks.discard(task)
            self._clients.discard(client)
            await _close(client)

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        answers, server = await asyncio.open_connection(HOST, self.target_port)
        replies = asyncio.create_task(self._forward_replies(answers, client))
        try:
            await self._forward_requests(reader, server)
        finally:
            replies.cancel()
            server.close()  # before anything that a cancellation could interrupt
            await asyncio.gather(replies, return_exceptions=True)
            await _close(server)

    async def _forward_requests(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while chunk := await _read(reader):
            self.requests += 1
            if self._mode == "hold":
                await self._released.wait()
            await asyncio.sleep(self.delay_s)
            await self._flowing.wait()
            server.write(chunk)
            await server.drain()

    async def _forward_replies(self, answers: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while chunk := await _read(answers):
            await asyncio.sleep(self.delay_s)
            await self._flowing.wait()
            if self._cut_after_bytes is not None and len(chunk) >= self._cut_after_bytes:
                chunk, self._cut_after_bytes = chunk[: self._cut_after_bytes], None
                client.write(chunk)
                await client.drain()
                _reset(client)
                if self._resets_all:
                    self.reset_all()
                return
            if self._cut_after_bytes is not None:
                self._cut_after_bytes -= len(chunk)
            client.write(chunk)
            await client.drain()
        client.close()  # the server hung up: so do we


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(CHUNK_BYTES)
    except OSError:
        return b""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, not FIN: the peer sees "connection reset"."""
    connection: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()
