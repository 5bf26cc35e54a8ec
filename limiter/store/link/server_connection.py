"""One server of the store, and the connections to it.

Built on redis-py's `Connection`, below its client and pools: a large call costs much less time, and these promises are
easier to keep without retries, health checks and metrics in between:

* a command is written at most once, and never after its deadline;
* a connection whose reply was not read to the end, for whatever reason, is closed and never used again (F-R16);
* no wait outlasts the deadline; connecting may, and then serves a later call.

Calls without a coroutine (`send`) share one connection beside those, the wire.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, SSLConnection
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from limiter.store.link.deadline import TimeoutAt
from limiter.store.link.wire import Replied, Wire
from limiter.store.store_errors import StoreOutOfMemory, StoreRefused, StoreUnavailable

Argument = bytes | str | int | float

LISTEN_PING_S = 2.0
"""A subscription that is silent for this long is sent a PING, and given up without an answer in the same time."""

REWIRE_S = 0.1
"""Pause after a failed attempt to connect the wire."""

# Answers that mean "not now", given before anything was executed.
TURNED_AWAY = (BusyLoadingError, ClusterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
TURNED_AWAY_PREFIXES = ("BUSY ", "MISCONF ", "NOAUTH ", "NOPERM ", "NOREPLICAS ", "WRONGPASS ")


def pack(*command: Argument) -> bytes:
    """Encode a command for the wire; in C, which matters with hundreds of arguments."""
    packed: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]  # the stub knows one-tuples only
    return packed


ASKING = pack("ASKING")


class ServerConnection:
    """One server, a stack of idle connections, and a bound on their number."""

    def __init__(self, where: str, connection: Callable[[], AbstractConnection], *, max_connections: int) -> None:
        self.where = where  # for messages
        self._new_connection = connection
        self._permits = asyncio.Semaphore(max_connections)
        self._idle: list[AbstractConnection] = []
        self._connecting: set[asyncio.Task[AbstractConnection]] = set()
        self._listening: set[AbstractConnection] = set()
        self._wire: Wire | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rewire_s = 0.0
        self._generation = 0
        self._closed = False

    async def call(self, packed: bytes, *, deadline_s: float, asking: bool = False) -> Any:
        """Send one packed command once and return its reply. `deadline_s` is in the event loop's time."""
        if asyncio.get_running_loop().time() >= deadline_s:
            raise StoreRefused(f"no time left to ask {self.where}")
        sent = False
        try:
            with TimeoutAt(deadline_s):
                connection = await self._take()
                sent = True
                return await self._exchange(connection, packed, asking=asking)
        except TimeoutError:
            doing = "answer" if sent else "accept a connection"
            raise _failure(sent)(f"{self.where} did not {doing} in time") from None
        except ResponseError as error:
            if isinstance(error, ReadOnlyError):
                await self.drop()  # a demoted primary; behind a virtual address a new connection may find the new one
            raise _translated(error, self.where) from None
        except (RedisError, OSError) as error:
            # A status code distinguishes the server's own answer (LOADING, NOAUTH …) from a lost connection.
            answered = getattr(error, "status_code", None) is not None
            raise _failure(sent and not answered)(f"{self.where}: {error}") from error

    def send(self, packed: bytes, replied: Replied, *, deadline_s: float) -> bool:
        """Send one packed command once, at once; `replied` receives the reply, or what `call` would raise.

        Returns False without sending if no wire is open; then one is opened for later calls.
        """
        wire = self._wire
        if wire is None or not wire.is_open:
            self._rewire()
            return False
        wire.send(packed, replied, deadline_s=deadline_s)
        return True

    def _rewire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._closed and now_s >= self._rewire_s:
            self._rewire_s = now_s + REWIRE_S
            self._run(self._connect_wire())

    async def _connect_wire(self) -> None:
        generation = self._generation
        connecting = asyncio.create_task(self._connect())
        self._connecting.add(connecting)
        try:
            connection = await connecting
        except (RedisError, OSError):
            return  # the next call meets the same error and reports it
        finally:
            self._connecting.discard(connecting)
        if self._closed or generation != self._generation or (self._wire is not None and self._wire.is_open):
            await close(connection)
        else:
            self._wire = Wire(connection, self.where, self._meaning)

    def _meaning(self, error: ResponseError) -> Exception:
        """Return the exception that an error reply on the wire stands for."""
        if isinstance(error, ReadOnlyError):
            self._run(self.drop())
        return _translated(error, self.where)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exchange(self, connection: AbstractConnection, packed: bytes, *, asking: bool) -> Any:
        generation = self._generation
        reusable = False
        try:
            await connection.send_packed_command(ASKING + packed if asking else packed, check_health=False)
            if asking:
                await _read_asking(connection)
            reply = await connection.read_response()
            reusable = True
            return reply
        except ResponseError:
            reusable = True  # an error is a whole reply too
            raise
        finally:
            if reusable and generation == self._generation and not self._closed:
                self._idle.append(connection)
            else:
                await close(connection)
            self._permits.release()

    async def _take(self) -> AbstractConnection:
        """Return a connection, together with the permit to use it."""
        await self._permits.acquire()
        connection: AbstractConnection | None = None
        try:
            while self._idle:
                connection = self._idle.pop()
                # Readable while idle: closed by the server, or out of step.
                if not await connection.can_read() and not _is_lost(connection):
                    return connection
                await close(connection)
            if self._closed:
                raise StoreRefused(f"the link to {self.where} is closed")
            connecting = asyncio.create_task(self._connect())
        except BaseException:
            if connection is not None:  # taken from the stack, so nobody else will close it
                await close(connection)
            self._permits.release()
            raise
        self._connecting.add(connecting)
        return await self._connected(connecting)

    async def _connected(self, connecting: asyncio.Task[AbstractConnection]) -> AbstractConnection:
        """Wait for a connection being made. A caller that stops waiting leaves it, and the permit, to later calls."""
        try:
            connection = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(self._keep)
            if was_closed(connecting):
                raise StoreRefused(f"the link to {self.where} is closed") from None
            raise
        except BaseException:
            self._connecting.discard(connecting)
            self._permits.release()
            raise
        self._connecting.discard(connecting)
        return connection

    async def _connect(self) -> AbstractConnection:
        connection = self._new_connection()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await close(connection)
            raise
        return connection

    def _keep(self, connected: asyncio.Task[AbstractConnection]) -> None:
        self._connecting.discard(connected)
        if not connected.cancelled() and connected.exception() is None:
            self._idle.append(connected.result())
        self._permits.release()

    async def listen(self, channel: bytes) -> AsyncGenerator[bytes]:
        """Subscribe over a connection of its own: yield an empty message once subscribed, then each one published."""
        if self._closed:
            raise StoreRefused(f"the link to {self.where} is closed")
        connection = self._new_connection()
        self._listening.add(connection)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_packed_command(pack("SUBSCRIBE", channel), check_health=False)
            async with aclosing(_pushed(connection)) as pushed:
                async for kind, content in pushed:
                    if kind in (b"subscribe", b"message"):
                        yield content if kind == b"message" else b""
        except ResponseError:
            raise
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error
        finally:
            self._listening.discard(connection)
            await close(connection)

    async def drop(self) -> None:
        """Drop all connections: idle ones now, others after their reply. Later calls connect again."""
        self._generation += 1
        if self._wire is not None:
            self._wire.retire()
            self._wire = None
        idle, self._idle = self._idle, []
        for connection in idle:
            await close(connection)

    async def aclose(self) -> None:
        """Close for good. Calls under way may still finish."""
        self._closed = True
        for connecting in list(self._connecting):
            connecting.cancel()
        await asyncio.gather(*self._connecting, *self._tasks, return_exceptions=True)
        for connection in list(self._listening):
            await close(connection)
        await self.drop()


def was_closed(task: asyncio.Task[Any]) -> bool:
    """True if a wait for `task` ended because closing the link cancelled it, and not because the waiter was
    cancelled."""
    us = asyncio.current_task()
    return task.cancelled() and us is not None and not us.cancelling()


async def _pushed(connection: AbstractConnection) -> AsyncGenerator[tuple[bytes, bytes]]:
    """Yield kind and content of each message on a subscribed connection, for as long as it is alive."""
    asked = False
    while True:
        reply: Any = await connection.read_response(timeout=LISTEN_PING_S)
        if reply is not None:
            asked = False
            yield reply[0], reply[-1]
        elif asked:
            raise RedisConnectionError("the subscription has fallen silent")
        else:
            asked = True
            await connection.send_packed_command(pack("PING"), check_health=False)


def _is_lost(connection: AbstractConnection) -> bool:
    """True if its transport has ended: on Python 3.12, writing to it then raises AttributeError instead of OSError."""
    writer = connection._writer  # noqa: SLF001  no public way to ask
    return writer is None or writer.transport.is_closing()


async def close(connection: AbstractConnection) -> None:
    """Close a connection at once. Closing a TLS one would wait for its peer's close_notify, and the peer may be
    gone."""
    writer = connection._writer if isinstance(connection, SSLConnection) else None  # noqa: SLF001  no way to abort
    if writer is not None:
        writer.transport.abort()
    await connection.disconnect(nowait=True)


async def _read_asking(connection: AbstractConnection) -> None:
    try:
        await connection.read_response()
    except ResponseError as error:
        # The reply to the command itself is still to come, so the connection must end, not only the call.
        raise RedisConnectionError(f"ASKING was answered with {error}") from error


def _failure(may_have_run: bool) -> type[StoreUnavailable]:
    return StoreUnavailable if may_have_run else StoreRefused


def _translated(error: ResponseError, where: str) -> Exception:
    """Translate server errors that mean "not now" into ours; return others as they are."""
    text = str(error)
    if "@user_script" in text:  # raised half way through a script: neither refused nor in doubt
        return error
    if isinstance(error, OutOfMemoryError):
        return StoreOutOfMemory(f"{where} is out of memory: {text}")
    if isinstance(error, TURNED_AWAY) or text.startswith(TURNED_AWAY_PREFIXES):
        return StoreRefused(f"{where} cannot serve now: {text}")
    return error
