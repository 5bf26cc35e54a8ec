"""How much of a request is taken, and for how long it may come (F-H1)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from api.data import render
from api.data.answer import Answer

HEAD_BYTES_MAX = 65_536
HEADERS_MAX = 100
PARAMETERS_MAX = 100
"""In a query. Each costs the same, however short it is."""
CHUNKS_MAX = 16_384
"""Of one body. Each costs the same, however small it is."""
LINGER_BYTES_MAX = 16_777_216
LINGER_S = 2.0

CLOSE = b"connection: close\r\n"


class BodyRefused(Exception):
    """A body that is not read to its end; the connection ends with the answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def too_large(body_max_bytes: int) -> Answer:
    """413: a body longer than is taken."""
    return render.problem(413, "too_long", f"the body is longer than {body_max_bytes} bytes")


def too_many_chunks() -> Answer:
    """413: a body in more chunks than are taken."""
    return render.problem(413, "too_long", f"the body comes in more than {CHUNKS_MAX} chunks; send larger ones")


def too_slow() -> Answer:
    """408: a request that did not arrive in time."""
    return render.problem(408, "too_slow", "the request did not arrive in time")


def head_too_large() -> Answer:
    """431: more headers than are taken."""
    allowed = f"at most {HEADERS_MAX} headers, {PARAMETERS_MAX} query parameters and {HEAD_BYTES_MAX} bytes in all"
    return render.problem(431, "head_too_long", f"the request's head is too long; allowed: {allowed}")


def not_http() -> Answer:
    """400: bytes that are no HTTP request."""
    return render.problem(400, "not_http", "this is not an HTTP request that can be understood")


def no_host() -> Answer:
    """400: HTTP/1.1 without a `Host`, or with several (RFC 9112, 3.2)."""
    return render.problem(400, "host", "Host: found none, or several; allowed: one in every request of HTTP/1.1")


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, or BodyRefused."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise BodyRefused(too_large(max_bytes))
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise BodyRefused(too_large(max_bytes))
    except TimeoutError:
        raise BodyRefused(too_slow()) from None
    return bytes(body)


class LastAnswer:
    """An ASGI response after which the connection ends.

    A connection that is closed while the client still sends is reset, and with it goes the answer. So the rest is
    read and dropped, within bounds, before the answer is declared complete.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        headers = [*self._answer.headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self._answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": self._answer.body, "more_body": True})
        if self._answer.status == 413:
            await _linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while dropped < LINGER_BYTES_MAX:
                message: Message = await receive()
                dropped += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    break
