"""Criticality on calls to other services (G4), and the word of an answer on retries (G6).

    httpx.Client(event_hooks=httpx_hooks())              httpx.AsyncClient(event_hooks=async_httpx_hooks())
    session.mount("http://", requests_adapter())         aiohttp.ClientSession(trace_configs=[aiohttp_trace()])

The hooks send the header `Headgate-Criticality` with the class of the present request, where there is one and the call
does not set the header itself. Use them for clients of your own services: the header goes wherever the client calls.

Only the layer above the one that refused retries: it reads `retry_of(answer.headers)`, and when it gives up, answers
its own caller with `passed_on(answer.headers)`, which says `never`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from limiter.client.request_context import CRITICALITY_HEADER, current

if TYPE_CHECKING:
    import aiohttp
    import httpx
    from requests.adapters import HTTPAdapter

RETRY_HEADER = "Headgate-Retry"
RETRIES = ("now", "after", "never")


def outgoing_headers() -> dict[str, str]:
    """Return the headers that belong on a call to another service, for clients that have no hook here."""
    name = current()
    return {} if name is None else {CRITICALITY_HEADER: name}


def _mark(headers: MutableMapping[str, Any]) -> None:
    name = current()
    if name is not None and CRITICALITY_HEADER not in headers:
        headers[CRITICALITY_HEADER] = name


def httpx_hooks() -> dict[str, list[Callable[[httpx.Request], None]]]:
    """Return the event hooks of an `httpx.Client`."""

    def mark(request: httpx.Request) -> None:
        _mark(request.headers)

    return {"request": [mark]}


def async_httpx_hooks() -> dict[str, list[Callable[[httpx.Request], Awaitable[None]]]]:
    """Return the event hooks of an `httpx.AsyncClient`."""

    async def mark(request: httpx.Request) -> None:
        _mark(request.headers)

    return {"request": [mark]}


def requests_adapter(**options: Any) -> HTTPAdapter:
    """Return a transport adapter for a `requests.Session`; the options are those of `HTTPAdapter`."""
    from requests import PreparedRequest
    from requests.adapters import HTTPAdapter

    class CriticalityAdapter(HTTPAdapter):
        """Adds the class of the present request to each call."""

        def add_headers(self, request: PreparedRequest, **kwargs: Any) -> None:
            super().add_headers(request, **kwargs)
            _mark(request.headers)

    return CriticalityAdapter(**options)


def aiohttp_trace() -> aiohttp.TraceConfig:
    """Return a trace configuration for an `aiohttp.ClientSession`."""
    import aiohttp

    async def mark(
        session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceRequestStartParams
    ) -> None:
        _mark(params.headers)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(mark)
    return trace


def retry_of(headers: Mapping[str, str]) -> str | None:
    """Return the answer's word on retries: `now`, `after` or `never`; None if it has none.

    `headers` may be those of any HTTP client, or a plain dictionary in any case.
    """
    value = headers.get(RETRY_HEADER)
    if value is None:
        value = next((value for name, value in headers.items() if name.lower() == RETRY_HEADER.lower()), None)
    word = (value or "").strip().lower()
    return word if word in RETRIES else None


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for our own caller, once we gave up on an answer with these: nobody above is to retry."""
    return {} if retry_of(headers) is None else {RETRY_HEADER: "never"}
