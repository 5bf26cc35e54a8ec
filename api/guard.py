"""uvicorn's HTTP protocol with limits on a request's head, an end for idle connections, and manners.

What it adds: problem+json for what is no HTTP, 431 and 408 (H1), answers in order even when garbage follows a
request (H6), an answer for who has closed its sending side, an end to who does not take its answers (H1), and a
shutdown that lets a connection that looks idle bring the request that is already on its way (H8).
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api import limits
from api.answer import Answer
from api.observed import NO_ROUTE, count
from api.request_ids import identified

FAREWELL_S = 0.5
"""How long a connection that looks idle, or whose client does not read, stays open in a shutdown."""


class HeadTooLarge(Exception):
    """More head than is taken."""


class NoHost(Exception):
    """Not one `Host`."""


class NotAProxy(Exception):
    """CONNECT is for proxies."""


def wire(answer: Answer, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """A last answer as bytes."""
    answer = identified(answer, None)
    common = b"".join([b"%b: %b\r\n" % pair for pair in default_headers])
    length = b"content-length: %d\r\n" % len(answer.body)
    return b"".join([STATUS_LINE[answer.status], common, answer.head, length, limits.CLOSE, b"\r\n", answer.body])


class Patience:
    """With a client that does not take its answers: it ends, and the connection with it.

    It runs while writing is paused, and from closing on until everything is sent, for closing waits for the client.
    """

    __slots__ = ("_limit_s", "_loop", "_timer", "_transport")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """From now on the client keeps us waiting."""
        if self._timer is None:
            self._transport = transport
            self._timer = self._loop.call_later(self._limit_s, transport.abort)

    def end(self) -> None:
        """It does no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._transport = None

    def shorten(self, limit_s: float) -> None:
        """Have less of it from now on, and with who tries it already."""
        self._limit_s = min(self._limit_s, limit_s)
        if self._transport is not None:
            transport = self._transport
            self.end()
            self.begin(transport)


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.draining = False
        self._in_head = False
        self._head_bytes = 0
        self._unparsed_bytes = 0
        self._has_no_host = False
        self._refusal: Answer | None = None
        self._serving: RequestResponseCycle | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._arrival_s = float(app_state.get("body_timeout_s", 10.0))
        self._patience = Patience(self.loop, self._arrival_s)

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; whoever sends nothing does not stay."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, with every timer, and with everything that was still to be served (H9)."""
        self._unset_keepalive_if_required()
        self._arrived()
        self._patience.end()
        self.pipeline.clear()
        self.flow.read_paused = False  # there is nothing left to resume
        if self._serving is not None:
            self._serving.disconnected = True
            self._serving.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client will send no more. If it still waits for an answer it gets it, then the connection ends."""
        if not self._busy or self.cycle.more_body or self.scheme == "https":
            return None
        self.cycle.keep_alive = False
        return True

    def shutdown(self) -> None:
        """Let what runs finish; close at once only what is idle, and that after a moment."""
        self.drain()
        if self._busy:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(FAREWELL_S, self._close_if_idle)

    def drain(self) -> None:
        """The server is ending: answer once more, and have little patience."""
        self.draining = True
        self._patience.shorten(FAREWELL_S)

    def pause_writing(self) -> None:
        """The client does not read: that is borne for a while."""
        super().pause_writing()
        self._patience.begin(self.transport)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._patience.end()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for long."""
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._patience.begin(self.transport)

    @property
    def _busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _close_if_idle(self) -> None:
        if not self._busy and not self._in_head:
            self._close()

    # Reading

    def data_received(self, data: bytes) -> None:
        """Parse, and count what the parser keeps to itself."""
        if self._refusal is not None or self.transport.is_closing():
            return
        was_in_head = self._in_head
        self._unset_keepalive_if_required()
        self._feed(data)
        if was_in_head and self._in_head:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > limits.HEAD_BYTES_MAX:
                self._refuse(limits.head_too_large())

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # To no other protocol, so it is ignored; but the parser took the rest for it, and has to begin again.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(self._without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _without_upgrade(self) -> bytes:
        """The head of the request that asked for an upgrade, without that."""
        lines = [b"%b %b HTTP/1.1" % (self.scope["method"].encode(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() != b"upgrade"]
                lines += [b"connection: " + b",".join(kept)] if kept else []
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        super().on_message_begin()
        self._arrived()
        self._in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        self._arrival = self.loop.call_later(self._arrival_s, self._not_arrived)

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        self._unparsed_bytes = 0
        if self._head_bytes > limits.HEAD_BYTES_MAX or len(self.headers) > limits.HEADERS_MAX:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        """The head is whole: the request can be served."""
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
        super().on_headers_complete()
        if self.draining and self._busy:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._in_head:  # the parser sees no more of it, because of an upgrade
            return
        self._arrived()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

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
        """Refuse what the parser, or a limit of ours within it, refused."""
        if self._has_no_host:
            self._refuse(limits.no_host())
            return
        too_large = self._in_head and (
            self._head_bytes > limits.HEAD_BYTES_MAX or len(self.headers) > limits.HEADERS_MAX
        )
        self._refuse(limits.head_too_large() if too_large else limits.not_http())

    def _refuse(self, answer: Answer) -> None:
        """Answer what cannot be served, after what came before it, and end."""
        self._arrived()
        self._refusal = answer
        if self.pipeline:
            if self.cycle.more_body:
                self.pipeline.popleft()  # the request whose body broke off
        elif not self._busy:
            self._send_refusal()
        elif self.cycle.more_body:
            self.cycle.disconnected = True  # its body broke off: this is its answer
            self.cycle.message_event.set()
            self._send_refusal()

    def on_response_complete(self) -> None:
        """One is answered: the next, or what could not be served."""
        was_last = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            self._patience.begin(self.transport)
        elif was_last and self._refusal is not None:
            self._send_refusal()

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        count(self.app_state["plane"].requests, NO_ROUTE, self._refusal.status)
        self.transport.write(wire(self._refusal, self.server_state.default_headers))
        self._close()
