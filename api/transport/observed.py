"""Around the framework: counts its answers, knows each request's id, and opens its span where tracing is on."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.data import request_ids
from api.data.counts import NO_ROUTE, Requests, count
from api.transport.tracing import TRACEPARENT, Tracing


class Observed:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, requests: Requests, tracing: Tracing | None, documents: Collection[str]) -> None:
        self._app = app
        self._documents = documents
        self._requests = requests
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # what the framework answers to whatever is raised

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
        """The path as it was declared: `/v1/policies/{name}`, whatever the name."""
        path = getattr(scope.get("route"), "path", None)
        if path is None and scope["path"] in self._documents:
            path = scope["path"]  # the framework's own, which it does not tell of
        return NO_ROUTE if path is None else str(path).encode("ascii")


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)
