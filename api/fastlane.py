"""The fast lane: acquires, settles and batches answered beneath the framework.

    bytes ── httptools ──► POST /v1/acquire | /v1/settle | /v1/batch, HTTP/1.1, a length, nothing odd
               │                 └► the data plane ──► bytes
               └─ anything else ──► uvicorn's protocol, with every byte of the request, for the rest of the connection

The bytes of a request are kept until it is known whose it is, so that handing over loses nothing, and whatever is
not understood here is refused there, in the same words. Requests of one connection are served one after another:
answers come in order (H6), and while one is being served the next ones wait in the buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.utils import get_remote_addr, is_ssl
from uvicorn.server import ServerState

from api import limits
from api.answer import Answer
from api.guard import FAREWELL_S, GuardedProtocol, wire
from api.plane import Headers, Plane

WAITING_BYTES_MAX = 65_536
"""How much may wait behind a request that is being served, before reading pauses."""

HEAD_END = b"\r\n\r\n"

Handler = Callable[[Headers, bytes], Awaitable[Answer]]

# Where a header goes: the first four into `Headers`, then the length; those of `ODD` are not for this lane.
_PLACES = {b"authorization": 0, b"content-type": 1, b"content-encoding": 2, b"idempotency-key": 3, b"content-length": 4}
_ODD = 5
_PLACES.update(dict.fromkeys([b"transfer-encoding", b"expect", b"upgrade", b"trailer"], _ODD))
_NO_HEADERS: list[bytes | None] = [None] * 5


class FastLane(asyncio.Protocol):
    """One connection, until something comes that is not for this lane."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._plane: Plane = app_state["plane"]
        self._body_max_bytes: int = app_state["body_max_bytes"]
        self._parser: Any = httptools.HttpRequestParser(self)
        self._access_logger = logging.getLogger("uvicorn.access")
        self._access_log = self._access_logger.hasHandlers()
        self._transport: asyncio.Transport
        self._client: tuple[str, int] | None = None

        self._waiting = bytearray()  # the request that is arriving, and what came behind one that is being served
        self._fed = 0  # bytes of it that the parser has seen
        self._body_at = 0  # where its body begins; 0 while the head is arriving
        self._body_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._slow: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._idle_since_s = 0.0
        self._read_paused = self._write_paused = False
        self._draining = self._half_closed = self._closed = False
        self._forget()

    def _forget(self) -> None:
        """Be ready for the next request's head."""
        self._url = b""
        self._headers = _NO_HEADERS.copy()
        self._header_count = 0
        self._odd = self._head_done = self._keep_alive = False
        self._fed = self._body_at = self._body_bytes = 0

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        if self._access_log:
            self._client = get_remote_addr(self._transport)
        self._idle_since_s = self._loop.time()
        self._idle = self._loop.call_later(self._config.timeout_keep_alive, self._look_whether_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """End. What is being served runs to its end, and nobody hears of it (H9)."""
        self._closed = True
        self._leave()
        self._waiting.clear()

    def _leave(self) -> None:
        self._state.connections.discard(self)
        self._parser = None  # it refers to us: without this, only the garbage collector would part us
        self._arrived()
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def eof_received(self) -> bool:
        """The client will send no more; if it still waits for an answer it gets it."""
        self._half_closed = self._task is not None and not is_ssl(self._transport)
        return self._half_closed

    def shutdown(self) -> None:
        """The server is ending: answer what is on its way, then close."""
        self._draining = True
        if self._task is None:
            self._loop.call_later(FAREWELL_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._task is None and not self._waiting:
            self._transport.close()

    def _look_whether_idle(self) -> None:
        """One timer for the whole connection: it looks how long nothing has been asked, and sets itself anew."""
        left_s = self._config.timeout_keep_alive - (self._loop.time() - self._idle_since_s)
        if self._task is None and not self._waiting and left_s <= 0:
            self._transport.close()
        else:
            self._idle = self._loop.call_later(max(left_s, 0.1), self._look_whether_idle)

    def pause_writing(self) -> None:
        """The client does not read: serve no more until it does."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """It reads again."""
        self._write_paused = False
        if self._task is None and self._waiting and not self._closed:
            self._consume(self._waiting)

    # Reading

    def data_received(self, data: bytes) -> None:
        """Take what came: serve it if it is a whole request, else keep it."""
        if self._waiting or self._task is not None or self._write_paused:
            self._waiting += data
            if self._task is not None or self._write_paused:
                self._pause_reading()
                return
            self._consume(self._waiting)
        else:
            self._consume(data)

    def _pause_reading(self) -> None:
        if len(self._waiting) > WAITING_BYTES_MAX and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()

    def _consume(self, data: bytes | bytearray) -> None:
        """Serve the request at the start of what has come; keep it while it is not whole."""
        if not self._body_at:
            end = data.find(HEAD_END, max(0, self._fed - len(HEAD_END) + 1))
            upto = len(data) if end < 0 else end + len(HEAD_END)
            understood = self._feed(data[self._fed : upto])
            self._fed = upto
            if not understood or self._head_done == (end < 0) or (end >= 0 and not self._is_ours()):
                self._hand_over(data)
                return
            if end < 0:
                if upto > limits.HEAD_BYTES_MAX:
                    self._hand_over(data)
                else:
                    self._keep(data)
                return
            self._body_at = upto
        whole = self._body_at + self._body_bytes
        if len(data) < whole:
            self._keep(data)
            return
        body = bytes(data[self._body_at : whole])
        self._parser.feed_data(body)
        self._start(body)
        self._keep_rest(data, whole)

    def _keep(self, data: bytes | bytearray) -> None:
        """The request is not whole yet."""
        if data is not self._waiting:
            self._waiting = bytearray(data)
        if self._half_closed:
            self._transport.close()
            return
        self._resume_reading()
        if self._slow is None:
            self._slow = self._loop.call_later(self._app_state["body_timeout_s"], self._too_slow)

    def _keep_rest(self, data: bytes | bytearray, served: int) -> None:
        if data is self._waiting:
            del self._waiting[:served]
        elif len(data) > served:
            self._waiting = bytearray(data[served:])
        self._pause_reading()

    def _arrived(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _too_slow(self) -> None:
        self._transport.write(wire(limits.too_slow(), self._state.default_headers))
        self._transport.close()

    # Parsing

    def _feed(self, data: bytes | bytearray) -> bool:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        return True

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._header_count += 1
        place = _PLACES.get(name.lower())
        if place is None:
            return
        if place == _ODD or self._headers[place] is not None:
            self._odd = True
        else:
            self._headers[place] = value

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._head_done = True

    def _is_ours(self) -> bool:
        if self._odd or self._url not in self._plane.paths or self._header_count > limits.HEADERS_MAX:
            return False
        if self._parser.get_method() != b"POST" or self._parser.get_http_version() != "1.1":
            return False
        self._keep_alive = self._parser.should_keep_alive()
        length = self._headers[4]
        self._body_bytes = int(length) if length else 0
        return self._fed <= limits.HEAD_BYTES_MAX and self._body_bytes <= self._body_max_bytes

    def _hand_over(self, data: bytes | bytearray) -> None:
        """Let uvicorn's protocol have the connection, from the first byte of this request on."""
        self._leave()
        protocol = GuardedProtocol(self._config, self._state, self._app_state, self._loop)
        protocol.draining = self._draining
        protocol.connection_made(self._transport)
        self._transport.set_protocol(protocol)
        received = bytes(data)
        self._waiting.clear()
        self._resume_reading()
        protocol.data_received(received)
        if self._half_closed and not protocol.eof_received():
            self._transport.close()

    # Serving

    def _start(self, body: bytes) -> None:
        self._arrived()
        handle: Handler = self._plane.paths[self._url]
        headers = Headers(*self._headers[:4])
        task = self._loop.create_task(self._serve(handle, headers, body, self._url, self._keep_alive))
        self._task = task
        self._state.tasks.add(task)
        self._forget()

    async def _serve(self, handle: Handler, headers: Headers, body: bytes, url: bytes, keep_alive: bool) -> None:
        task = self._task
        try:
            answer = await handle(headers, body)
        finally:
            self._task = None
            if task is not None:
                self._state.tasks.discard(task)
        self._state.total_requests += 1
        if not self._closed:
            self._answer(answer, url, keep_alive)

    def _answer(self, answer: Answer, url: bytes, keep_alive: bool) -> None:
        if self._access_log:
            self._log(url, answer.status)
        last = not keep_alive or ((self._draining or self._half_closed) and not self._waiting)
        self._transport.write(
            b"".join(
                (
                    STATUS_LINE[answer.status],
                    common_headers(self._state.default_headers),
                    answer.head,
                    b"content-length: %d\r\n" % len(answer.body),
                    limits.CLOSE if last else b"",
                    b"\r\n",
                    answer.body,
                )
            )
        )
        if last:
            self._transport.close()
            return
        self._idle_since_s = self._loop.time()
        if not self._waiting:
            self._resume_reading()
        elif not self._write_paused:
            self._consume(self._waiting)

    def _log(self, url: bytes, status: int) -> None:
        client = ":".join(map(str, self._client)) if self._client else ""
        self._access_logger.info('%s - "%s %s HTTP/%s" %d', client, "POST", url.decode("ascii"), "1.1", status)


_common: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")


def common_headers(default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """uvicorn's own headers as lines. It makes a new list every second; between, the lines stay the same."""
    global _common
    if _common[0] is not default_headers:
        _common = (default_headers, b"".join([b"%b: %b\r\n" % pair for pair in default_headers]))
    return _common[1]
