"""Bodies of requests that the framework serves: read within the limits, or refused together with the connection."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from api.data.answer import Answer
from api.data.request_limits import too_large, too_slow

LINGER_BYTES_MAX = 16_777_216
LINGER_S = 2.0


class BodyRefused(Exception):
    """The body is not read to its end; the connection ends with the answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body, or raise BodyRefused."""
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

    A connection that is closed while the client still sends is reset, and the answer is lost. So the rest is read and
    dropped, within bounds, before the answer is declared complete.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
