"""The fast lane: acquires, settles and batches answered beneath the framework.

    bytes ── httptools ──► POST /v1/acquire | /v1/settle | /v1/batch, HTTP/1.1, a length, nothing unusual
      │                 └► the data plane ──► bytes
      └─ anything else ──► uvicorn's protocol, with every byte of the request, for the rest of the connection

The bytes of a request are kept until it is known which lane serves it, so that handing over loses nothing, and a
request that is not understood here is refused there, in the same words. Requests of one connection are served one
after another: answers come in order (F-H6), and while one is being served the next ones wait in the buffer.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, NamedTuple, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.utils import get_remote_addr, is_ssl
from uvicorn.server import ServerState

from api.data import request_limits as limits
from api.data.answer import Answer
from api.data.counts import NO_ROUTE, count
from api.data.plane import Headers, Plane
from api.data.request_ids import identified
from api.transport.access import log_request
from api.transport.guard import FAREWELL_S, HEAD_END, WAITING_BYTES_MAX, GuardedProtocol, Patience, wire
from api.transport.tracing import RequestSpan, Tracing

# The place of each header: the first ones in `Headers`, then the length, and the host, which is required. A request
# with one of `ODD` goes to the other lane.
_PLACES = {
    b"authorization": 0, b"content-type": 1, b"content-encoding": 2, b"idempotency-key": 3, b"x-request-id": 4,
    b"content-length": 6, b"host": 7,
}  # fmt: skip
_TRACEPARENT, _LENGTH, _HOST, _ODD = 5, 6, 7, 8
_PLACES.update(dict.fromkeys([b"transfer-encoding", b"expect", b"upgrade", b"trailer", b"sec-fetch-site"], _ODD))
_TRACED_PLACES = _PLACES | {b"traceparent": _TRACEPARENT}
_NO_HEADERS: list[bytes | None] = [None] * 8

BLANK = b"\r\n"
ANSWERS_KEPT_MAX = 64
HEADS_KEPT_MAX = 1024
HEAD_KEPT_BYTES_MAX = 2048


class Head(NamedTuple):
    """A parsed head of a request."""

    path: bytes
    headers: Headers
    keep_alive: bool
    body_bytes: int
    is_plain: bool = False
    """True if the connection stays open, and no id was sent that the answer has to carry."""


_NO_HEAD = Head(b"", Headers(), False, 0)


class Heads:
    """Parsed heads: a client sends the same one again and again, and looking it up is cheaper than parsing."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: dict[bytes, Head] = {}

    def find(self, raw: bytes | bytearray) -> Head | None:
        """Return the parsed form of a head seen before."""
        return self.known.get(bytes(raw))

    def keep(self, raw: bytes | bytearray, head: Head) -> None:
        """Keep a parsed head; the number kept is bounded."""
        if len(raw) <= HEAD_KEPT_BYTES_MAX:
            if len(self.known) >= HEADS_KEPT_MAX:
                self.known.clear()
            self.known[bytes(raw)] = head


class FastLane(asyncio.Protocol):
    """One connection, until a request arrives that is not for this lane."""

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
        self._heads: Heads = app_state.setdefault("heads", Heads())
        self._known_heads = self._heads.known
        self._tracing: Tracing | None = app_state["tracing"]
        self._places = _PLACES if self._tracing is None else _TRACED_PLACES
        self._span: RequestSpan | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._access_log: bool = app_state["access_log"]
        self._began_s = 0.0
        self._transport: asyncio.Transport
        self._client: tuple[str, int] | None = None

        self._waiting = bytearray()  # the request that is arriving, and bytes behind one that is being served
        self._fed = 0  # bytes of it that the parser has read
        self._body_at = 0  # offset of its body; 0 while the head is arriving
        self._body_bytes = 0
        self._busy = False  # a request waits for its answer
        self._serving = _NO_HEAD
        self._pumping = False
        self._slow: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._idle_since_s = 0.0
        self._read_paused = self._write_paused = False
        self._patience = Patience(self._loop, app_state["body_timeout_s"])
        self._outgoing: list[bytes] = []  # answers that go out in the next turn
        self._draining = self._half_closed = self._closed = self._close_after = False
        self._is_odd = self._access_log or self._tracing is not None
        """True if an answer needs more than sending its bytes: it is logged, traced, or the last one."""
        self._forget()

    def _forget(self) -> None:
        """Reset for the next request's head."""
        self._head: Head | None = None
        self._fed = self._body_at = 0
        self._url = b""
        self._headers = _NO_HEADERS.copy()
        self._header_count = 0
        self._odd = self._head_done = self._keep_alive = False

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        if self._access_log:
            self._client = get_remote_addr(self._transport)
        self._idle_since_s = self._loop.time()
        self._idle = self._loop.call_later(self._config.timeout_keep_alive, self._look_whether_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up. The request being served runs to its end, and its answer is dropped (F-H9)."""
        self._closed = self._is_odd = True
        self._leave()
        self._waiting.clear()

    def _leave(self) -> None:
        self._state.connections.discard(self)
        self._parser = None  # it refers to this object: a cycle that only the garbage collector would free
        self._arrived()
        self._patience.end()
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def eof_received(self) -> bool:
        """Note that the client will send no more; a pending answer is still sent."""
        if is_ssl(self._transport):
            return False
        if self._outgoing and not self._busy:
            self._close_after = True  # the last answer is ready and goes out in a moment
        self._half_closed = self._busy or bool(self._outgoing)
        self._is_odd = self._is_odd or self._half_closed
        return self._half_closed

    def shutdown(self) -> None:
        """Answer the request on its way, then close: the server is ending."""
        self._draining = self._is_odd = True
        self._patience.shorten(FAREWELL_S)
        if not self._busy:
            self._loop.call_later(FAREWELL_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._busy and not self._waiting:
            self.send()
            self._close()

    def _close(self) -> None:
        """Close once everything is sent, or the client has not read for too long."""
        self._transport.close()
        self._patience.begin(self._transport)

    def _look_whether_idle(self) -> None:
        """Check how long the connection has been idle, and set its one timer again."""
        left_s = self._config.timeout_keep_alive - (self._loop.time() - self._idle_since_s)
        if not self._busy and not self._waiting and left_s <= 0:
            self._close()
        else:
            self._idle = self._loop.call_later(max(left_s, 0.1), self._look_whether_idle)

    def pause_writing(self) -> None:
        """Serve no more until the client reads again, and close the connection after a while."""
        self._write_paused = True
        self._patience.begin(self._transport)

    def resume_writing(self) -> None:
        """Continue: the client reads again."""
        self._write_paused = False
        if not self._transport.is_closing():
            self._patience.end()
        self._pump()

    # Reading

    def data_received(self, data: bytes) -> None:
        """Serve a whole request; keep a part of one."""
        if self._closed:
            return  # the last answer said so
        if self._waiting or self._busy or self._write_paused:
            self._waiting += data
            if self._busy or self._write_paused:
                self._pause_reading()
                return
        else:
            end = data.find(HEAD_END) + len(HEAD_END)
            head = self._known_heads.get(data[:end])
            if head is not None and len(data) == end + head.body_bytes:  # nearly all: alone, whole, with a known head
                self._start(head, data[end:])
                return
            self._consume(data)
        self._pump()

    def _pump(self) -> None:
        """Serve waiting requests one after another, until one has to wait for its answer."""
        if self._pumping:
            return
        self._pumping = True
        while self._waiting and not (self._busy or self._write_paused or self._closed):
            if not self._consume(self._waiting):
                break
            if len(self._outgoing) >= ANSWERS_KEPT_MAX:
                self.send()  # if the client does not read, the rest waits as bytes (F-H12)
        self._pumping = False

    def _pause_reading(self) -> None:
        if len(self._waiting) > WAITING_BYTES_MAX and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()

    def _consume(self, data: bytes | bytearray) -> bool:
        """Serve the request at the start of the data; keep it, and return False, while it is incomplete."""
        head = self._head or self._consume_head(data)
        if head is None:
            return False
        whole = self._body_at + head.body_bytes
        if len(data) < whole:
            if self._plane.admits(head.headers):
                self._keep(data)
            else:  # the other lane refuses it at once, and keeps nothing of it (F-H12)
                self._hand_over(data)
            return False
        body = bytes(data[self._body_at : whole])
        if self._fed:
            self._parser.feed_data(body)
        self._keep_rest(data, whole)
        self._start(head, body)
        return True

    def _consume_head(self, data: bytes | bytearray) -> Head | None:
        if not self._fed and data[0] in BLANK:  # an empty line is no request; the other lane handles it
            self._hand_over(data)
            return None
        end = data.find(HEAD_END, max(0, self._fed - len(HEAD_END) + 1))
        upto = len(data) if end < 0 else end + len(HEAD_END)
        if end >= 0 and not self._fed:
            known = self._heads.find(data[:upto])
            if known is not None:
                self._head, self._body_at = known, upto
                return known
        understood = self._feed(data[self._fed : upto])
        is_new, self._fed = not self._fed, upto
        head = self._understood() if understood and end >= 0 and self._head_done else None
        if head is not None:
            self._head, self._body_at = head, upto
            # A head with an id of its own will not come again.
            if is_new and head.headers.request_id is None and head.headers.traceparent is None:
                self._heads.keep(data[:upto], head)
        elif not understood or end >= 0 or self._head_done or upto > limits.HEAD_BYTES_MAX:
            self._hand_over(data)
        else:
            self._keep(data)
        return head

    def _keep(self, data: bytes | bytearray) -> None:
        """Keep an incomplete request."""
        if data is not self._waiting:
            self._waiting = bytearray(data)
        if self._half_closed:
            self.send()
            self._close()
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
        self.send()
        answer = limits.too_slow()
        count(self._plane.requests, NO_ROUTE, answer.status)
        self._transport.write(wire(answer, self._state.default_headers))
        self._close()

    # Parsing

    def _feed(self, data: bytes | bytearray) -> bool:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        return True

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header."""
        self._header_count += 1
        place = self._places.get(name.lower())
        if place is None:
            return
        if place == _ODD or self._headers[place] is not None:
            self._odd = self._odd or place != _TRACEPARENT
        else:
            self._headers[place] = value

    def on_headers_complete(self) -> None:
        """Note that the head is complete. A request without a body gives the parser nothing more to report."""
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()

    def _understood(self) -> Head | None:
        """Return the parsed head; None if it is not for this lane."""
        if self._odd or self._url not in self._plane.paths or self._header_count > limits.HEADERS_MAX:
            return None
        if self._parser.get_method() != b"POST" or self._parser.get_http_version() != "1.1":
            return None
        if self._headers[_HOST] is None:
            return None
        length = self._headers[_LENGTH]
        body_bytes = int(length) if length else 0
        if self._fed > limits.HEAD_BYTES_MAX or body_bytes > self._body_max_bytes:
            return None
        headers = _headers_of(*self._headers[:_LENGTH])
        is_plain = self._keep_alive and headers.request_id is None
        return Head(self._url, headers, self._keep_alive, body_bytes, is_plain)

    def _hand_over(self, data: bytes | bytearray) -> None:
        """Hand the connection to uvicorn's protocol, from the first byte of this request on."""
        self.send()
        self._leave()
        protocol = GuardedProtocol(self._config, self._state, self._app_state, self._loop)
        protocol.connection_made(self._transport)
        if self._draining:
            protocol.drain()
        if self._write_paused:  # by the last answer of this lane
            protocol.pause_writing()
        self._transport.set_protocol(protocol)
        received = bytes(data)
        self._waiting.clear()
        self._resume_reading()
        protocol.data_received(received)
        if self._half_closed and not protocol.eof_received():
            self._transport.close()

    # Serving

    def _start(self, head: Head, body: bytes) -> None:
        if self._slow is not None:
            self._arrived()
        self._busy, self._serving = True, head
        if self._fed:
            self._forget()
        else:  # the parser has not read it
            self._head, self._body_at = None, 0
        if self._tracing is not None:
            self._span = self._tracing.begin("POST", head.headers.traceparent)
        if self._access_log:
            self._began_s = monotonic()  # the loop's time counts milliseconds, and stands still within a turn
        self._plane.paths[head.path](head.headers, body, self)

    def take(self, answer: Answer) -> None:
        """Send the answer to the request that is being served, and go on with the next."""
        sent_id = self._serving.headers.request_id
        if answer.status >= 400 or sent_id is not None or answer.error is not None:
            answer = identified(answer, sent_id)
        self._take(answer.status, answer.head, answer.body)

    def take_plain(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a plain answer, 200 or 429, without making an object of it."""
        head, state = self._serving, self._state
        if not head.is_plain or self._is_odd or self._waiting or self._outgoing:
            self.take(Answer(status, lines, body))
            return
        self._busy = False
        state.total_requests += 1
        requests, key = self._plane.requests, (head.path, status)
        requests[key] = requests.get(key, 0) + 1
        self._outgoing.append(
            b"%b%b%bcontent-length: %d\r\n\r\n%b"
            % (
                STATUS_LINE[status],
                _common[1] if _common[0] is state.default_headers else common_headers(state.default_headers),
                lines,
                len(body),
                body,
            )
        )
        self._plane.outbox.put(self)
        self._idle_since_s = self._loop.time()
        if self._read_paused:
            self._resume_reading()

    def _take(self, status: int, lines: bytes, body: bytes) -> None:
        self._busy = False
        state, head = self._state, self._serving
        state.total_requests += 1
        requests, key = self._plane.requests, (head.path, status)
        requests[key] = requests.get(key, 0) + 1
        if self._span is not None:
            self._span.end(head.path, status)
            self._span = None
        if self._closed:
            return
        if self._access_log:
            request, answer = ("POST", head.path.decode("ascii")), (Answer(status, lines, body).headers, body)
            log_request(self._client, request, status, answer, took_s=monotonic() - self._began_s)
        last = not head.keep_alive or ((self._draining or self._half_closed) and not self._waiting)
        payload = b"%b%b%bcontent-length: %d\r\n%b\r\n%b" % (
            STATUS_LINE[status],
            _common[1] if _common[0] is state.default_headers else common_headers(state.default_headers),
            lines,
            len(body),
            limits.CLOSE if last else b"",
            body,
        )
        if not self._outgoing:
            self._plane.outbox.put(self)
        self._outgoing.append(payload)
        if last:
            self._closed = self._close_after = self._is_odd = True  # nothing more is served, whatever else has arrived
            return
        self._idle_since_s = self._loop.time()
        if self._waiting:
            self._pump()
        elif self._read_paused:
            self._resume_reading()

    def send(self) -> None:
        """Send the answers that are ready."""
        if self._outgoing and not self._transport.is_closing():
            outgoing, self._outgoing = self._outgoing, []
            self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
            if self._close_after:
                self._close()


def _headers_of(*values: bytes | None) -> Headers:
    authorization, content_type, content_encoding, idempotency_key, request_id, traceparent = values
    return Headers(authorization, content_type, content_encoding, idempotency_key, request_id, traceparent)


_common: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")


def common_headers(default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return uvicorn's own headers as lines. It makes a new list every second; in between, the lines stay the same."""
    global _common
    if _common[0] is not default_headers:
        _common = (default_headers, b"".join([b"%b: %b\r\n" % pair for pair in default_headers]))
    return _common[1]
