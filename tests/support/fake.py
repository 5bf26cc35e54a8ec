"""A server that says what a test wants it to say, for answers that real servers give only rarely or no more."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import hiredis

HOST = "127.0.0.1"


class FakeServer:
    """Answers each command with the reply, in wire form, that `replies` has for its name; else with an error."""

    def __init__(self, replies: Mapping[str, bytes]) -> None:
        self.replies = dict(replies)
        self.seen: list[list[bytes]] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        assert self._server is not None, "not started"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._handle, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        parser = hiredis.Reader()
        try:
            while chunk := await reader.read(65_536):
                parser.feed(chunk)
                while command := parser.gets():
                    self.seen.append(command)
                    name = command[0].decode().upper()
                    writer.write(self.replies.get(name, b"-ERR unknown command '%b'\r\n" % command[0]))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()


def bulk(text: str) -> bytes:
    """A string as a reply."""
    return b"$%d\r\n%b\r\n" % (len(text.encode()), text.encode())
