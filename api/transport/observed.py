"""The layer around the framework: counts and logs answers, and handles request ids and spans."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.data import request_ids
from api.data.counts import NO_ROUTE, Requests, count
from api.transport.access import log_request
from api.transport.tracing import TRACEPARENT, Tracing


class Observed:
    """The outermost layer."""

    def __init__(
        self,
        app: ASGIApp,
        requests: Requests,
        tracing: Tracing | None,
        documents: Collection[str],
        *,
        access_log: bool = False,
    ) -> None:
        self._app = app
        self._documents = documents
        self._requests = requests
        self._tracing = tracing
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._access_log:
            await self._serve_and_log(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve_and_log(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = monotonic()
        status, headers, body = 500, list[tuple[bytes, bytes]](), b""

        async def keeping(message: Message) -> None:
            nonlocal status, headers, body
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message["headers"])
            elif not body:
                body = message.get("body", b"")  # a problem arrives in one piece
            await send(message)

        try:
            await self._serve(scope, receive, keeping)
        finally:
            request = scope["method"], quote(scope["path"])
            log_request(scope.get("client"), request, status, (headers, body), took_s=monotonic() - began_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500  # the framework's answer to any exception

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        request_ids.SENT.set(_header(scope, request_ids.HEADER))
        span = None
        if self._tracing is not None:
            span = self._tracing.begin(scope["method"], _header(scope, TRACEPARENT))
        try:
            await self._app(scope, receive, noting)
        finally:
            route = self._route(scope)
            count(self._requests, route, status)
            if span is not None:
                span.end(route, status)

    def _route(self, scope: Scope) -> bytes:
        """Return the path as it was declared: `/v1/policies/{name}`, whatever the name."""
        path = getattr(scope.get("route"), "path", None)
        if path is None and scope["path"] in self._documents:
            path = scope["path"]  # a path of the framework itself, which is not in its list
        return NO_ROUTE if path is None else str(path).encode("ascii")


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)
