"""uvicorn's HTTP protocol with limits on a request's head, timeouts for idle and stalled clients, and clean endings.

    bytes ──► buffer ──► one request at a time ──► the parser ──► served, answered ──► the next

It adds: problem+json for bytes that are no HTTP, 431 and 408 (F-H1), answers in order even when garbage follows a
request (F-H6), an answer for a client that has closed its sending side, an end for a client that does not read its
answers (F-H1), and a shutdown in which a connection that looks idle may still bring a request that is on its way
(F-H8).

While a request is being served, the bytes behind it stay unparsed, and beyond a bound they are not even read: a parsed
request takes a hundred times its bytes (F-H12). So the parser is fed up to the end of one request and no further. Every
request ends with an empty line, or as many bytes after it as its head said.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.data import request_limits as limits
from api.data.answer import Answer
from api.data.counts import NO_ROUTE, count
from api.data.request_ids import identified
from api.transport.access import UNKNOWN, log_request

HEAD_END = b"\r\n\r\n"
WAITING_BYTES_MAX = 65_536
"""Bytes that may wait behind a request that is being served, before reading pauses."""

_OVERLAP = len(HEAD_END) - 1
_BLANK = re.compile(rb"[\r\n]*+")

UPGRADES_MAX = 100
"""Requests of one connection that ask for another protocol, and are answered without it; then the connection ends
(F-H11)."""

FAREWELL_S = 0.5
"""How long a connection that looks idle, or whose client does not read, stays open in a shutdown."""


class HeadTooLarge(Exception):
    """The head is too large."""


class NoHost(Exception):
    """There is not exactly one `Host`."""


class NotAProxy(Exception):
    """CONNECT is for proxies."""


class TooManyChunks(Exception):
    """The body has too many chunks."""


class NotAlone(Exception):
    """A second request where only one can be: this class and the parser disagree on the end of the first."""


def wire(answer: Answer, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a last answer as bytes."""
    answer = identified(answer, None)
    common = b"".join([b"%b: %b\r\n" % pair for pair in default_headers])
    length = b"content-length: %d\r\n" % len(answer.body)
    return b"".join([STATUS_LINE[answer.status], common, answer.head, length, limits.CLOSE, b"\r\n", answer.body])


class Patience:
    """The time limit for a client that does not read its answers; then the connection is closed.

    It runs while writing is paused, and after closing until everything is sent, since closing waits for the client.
    """

    __slots__ = ("_limit_s", "_loop", "_timer", "_transport")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """Start the timer: the client does not read."""
        if self._timer is None:
            self._transport = transport
            self._timer = self._loop.call_later(self._limit_s, transport.abort)

    def end(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._transport = None

    def shorten(self, limit_s: float) -> None:
        """Use a shorter limit from now on, also for a client that stalls already."""
        self._limit_s = min(self._limit_s, limit_s)
        if self._transport is not None:
            transport = self._transport
            self.end()
            self.begin(transport)


class Flow(FlowControl):
    """uvicorn's flow control, except that reading stays paused while enough bytes are waiting."""

    enough_waits = False

    def resume_reading(self) -> None:
        """Resume reading, if there is room."""
        if not self.enough_waits:
            super().resume_reading()


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    flow: Flow

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.draining = self._half_closed = False
        self._waiting = bytearray()  # bytes that the parser has not read
        self._last_fed = b""  # up to three bytes of a head or a chunked body, in which its end may begin
        self._arriving = False  # a request has begun and has not ended
        self._in_head = False
        self._head_bytes = self._header_count = self._parameter_count = 0
        self._unparsed_bytes = 0  # bytes that the parser may be buffering
        self._body_left = 0  # bytes left of a body of known length
        self._chunks: int | None = None  # number of chunks of a chunked body
        self._keeps_alive = False
        self._upgrades = 0
        self._has_no_host = False
        self._refusal: Answer | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._arrival_s = float(app_state.get("body_timeout_s", 10.0))
        self._patience = Patience(self.loop, self._arrival_s)

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; a connection that sends nothing is closed in time."""
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel every timer, and all requests that were still to be served (F-H9)."""
        self._unset_keepalive_if_required()
        self._arrived()
        self._patience.end()
        self._waiting.clear()
        self.flow.read_paused = False  # there is nothing left to resume
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Note that the client will send no more. A pending answer is still sent, then the connection ends."""
        if not self._busy or self._arriving or self.scheme == "https":
            return None
        self._half_closed = True
        self._note_whether_last()
        return True

    def shutdown(self) -> None:
        """Finish the running request; close an idle connection only after a moment."""
        self.drain()
        if self._busy:
            self._note_whether_last()

    def drain(self) -> None:
        """Answer once more, with less patience: the server is ending."""
        self.draining = True
        self._patience.shorten(FAREWELL_S)
        self.loop.call_later(FAREWELL_S, self._close_if_idle)

    def _note_whether_last(self) -> None:
        """Mark the next answer as the last, if the connection is ending and nothing follows."""
        if (self.draining or self._half_closed) and len(self._waiting) <= self._body_left:
            self.cycle.keep_alive = False
        elif not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read."""
        super().pause_writing()
        self._patience.begin(self.transport)

    def resume_writing(self) -> None:
        """Continue: the client reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._patience.end()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that has been idle for too long."""
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._patience.begin(self.transport)

    @property
    def _busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _close_if_idle(self) -> None:
        if not self._busy and not self._arriving:
            self._close()

    # Reading

    def data_received(self, data: bytes) -> None:
        """Serve the data, or keep it while another request is being served."""
        if self._refusal is None and not self.transport.is_closing():
            self._waiting += data
            self._pump()

    def _pump(self) -> None:
        """Feed the parser until a request is complete; the next one waits until this one is answered."""
        while self._waiting and (self._arriving or not self._busy):
            if self._arriving or not self._skip_blank_lines():
                piece = self._next_piece()
                self._feed(piece)
                self._last_fed = (self._last_fed + piece[-_OVERLAP:])[-_OVERLAP:] if self._ends_with_line else b""
        self._hold_reading()

    @property
    def _ends_with_line(self) -> bool:
        """True if an empty line may end what is arriving: its head, or a body in chunks."""
        return self._arriving and not self._body_left

    def _skip_blank_lines(self) -> bool:
        """Drop empty lines between requests: they are no sign of life, and the connection stays idle (F-H13)."""
        blank = _BLANK.match(self._waiting)
        assert blank is not None
        del self._waiting[: blank.end()]
        return not self._waiting

    def _next_piece(self) -> bytes:
        """Take no more than up to the possible end of the request."""
        size = min(self._body_left, len(self._waiting)) if self._body_left else self._up_to_empty_line()
        piece = bytes(self._waiting[:size])
        del self._waiting[:size]
        return piece

    def _up_to_empty_line(self) -> int:
        across = (self._last_fed + self._waiting[:_OVERLAP]).find(HEAD_END)
        if across >= 0:
            return across + len(HEAD_END) - len(self._last_fed)
        within = self._waiting.find(HEAD_END)
        return within + len(HEAD_END) if within >= 0 else len(self._waiting)

    def _hold_reading(self) -> None:
        held, self.flow.enough_waits = self.flow.enough_waits, len(self._waiting) > WAITING_BYTES_MAX
        if self.flow.enough_waits:
            self.flow.pause_reading()
        elif held and not (self._busy and len(self.cycle.body) > HIGH_WATER_LIMIT):
            self.flow.resume_reading()

    def _feed(self, piece: bytes) -> None:
        self._unparsed_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._ignore_upgrade()
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._unparsed_bytes > limits.HEAD_BYTES_MAX and self._refusal is None:
            self._refuse(limits.head_too_large())

    def _ignore_upgrade(self) -> None:
        """Read a request again without its upgrade, at which the parser would stop. No other protocol is supported."""
        self._upgrades += 1
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        try:
            self.parser.feed_data(self._without_upgrade())
        except (httptools.HttpParserUpgrade, httptools.HttpParserError):
            self.send_400_response("")

    def _without_upgrade(self) -> bytes:
        """Return the head of the request that asked for an upgrade, without that header."""
        lines = [b"%b %b HTTP/1.1" % (self.scope["method"].encode(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() != b"upgrade"]
                lines += [b"connection: " + b",".join(kept)] if kept else []
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        if self._upgrades > UPGRADES_MAX:
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Note that a request begins to arrive."""
        if self._busy:
            raise NotAlone
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._arrived()
        self._arriving = self._in_head = True
        self._head_bytes = self._header_count = self._body_left = 0
        self._parameter_count = 1
        self._chunks = None
        self._arrival = self.loop.call_later(self._arrival_s, self._not_arrived)

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        super().on_url(url)
        self._parameter_count += url.count(b"&")
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; lines after the body are ignored, whatever they say (F-H14)."""
        self._header_count += 1
        if self._in_head:
            super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        self._unparsed_bytes = 0
        if self._is_head_too_large:
            raise HeadTooLarge

    @property
    def _is_head_too_large(self) -> bool:
        return (
            self._head_bytes > limits.HEAD_BYTES_MAX
            or self._header_count > limits.HEADERS_MAX
            or self._parameter_count > limits.PARAMETERS_MAX
        )

    def on_headers_complete(self) -> None:
        """Begin to serve the request: its head is complete."""
        self._unparsed_bytes = 0
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise NotAProxy
            self.scope["method"] = self.parser.get_method().decode("ascii")
            self._arrived()
            return
        if self.parser.get_http_version() == "1.1" and [name for name, _ in self.headers].count(b"host") != 1:
            self._has_no_host = True
            raise NoHost
        self._in_head = False
        for name, value in self.headers:
            if name == b"content-length":
                self._body_left = int(value)
            elif name == b"transfer-encoding":
                self._chunks = 0
        super().on_headers_complete()
        self._keeps_alive = self.cycle.keep_alive
        self._note_whether_last()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unparsed_bytes = 0
        if self._chunks is None:
            self._body_left -= len(body)
        else:
            self._chunks += 1
            if self._chunks > limits.CHUNKS_MAX:
                raise TooManyChunks
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        if self._in_head:  # because of an upgrade the parser reads no more of it
            return
        self._arrived()
        self._arriving = False
        self._unparsed_bytes = 0
        self._note_whether_last()
        super().on_message_complete()

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _not_arrived(self) -> None:
        self._arrival = None
        if self._in_head:
            self._refuse(limits.too_slow())
        elif not self._busy:  # answered long ago, and the rest of the body never came
            self._close()

    # Refusing

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser, or one of our limits within it, refused."""
        if self._has_no_host:
            self._refuse(limits.no_host())
        elif self._chunks is not None and self._chunks > limits.CHUNKS_MAX:
            self._refuse(limits.too_many_chunks())
        elif self._arriving and self._is_head_too_large:
            self._refuse(limits.head_too_large())
        else:
            self._refuse(limits.not_http())

    def _refuse(self, answer: Answer) -> None:
        """Send an error after the answers before it, and close."""
        self._arrived()
        self._refusal = answer
        self._waiting.clear()
        if not self._busy:
            self._send_refusal()
        elif self._arriving:  # its body broke off: this is its answer, unless it has one already
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self._close()
            else:
                self._send_refusal()

    def on_response_complete(self) -> None:
        """Serve the next request, or send the error that waited for this answer."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._waiting.clear()
            self._patience.begin(self.transport)
        elif self._refusal is not None:
            self._send_refusal()
        else:
            self._pump()
            self._end_if_due()

    def _end_if_due(self) -> None:
        """Close a connection that is ending, if the bytes that followed brought no further request."""
        idle = not self._busy and not self._arriving
        if (self.draining and idle) or (self._half_closed and (idle or self._arriving)):
            self._close()

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        answer = self._refusal
        count(self.app_state["plane"].requests, NO_ROUTE, answer.status)
        if self.app_state["access_log"]:
            log_request(self.client, (UNKNOWN, UNKNOWN), answer.status, (answer.headers, answer.body), took_s=0.0)
        self.transport.write(wire(self._refusal, self.server_state.default_headers))
        self._close()
