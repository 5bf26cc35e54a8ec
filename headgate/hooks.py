"""Hooks that put the class of the present request on outgoing calls, and what answers say about retries."""

from limiter.client.middleware.outgoing import (
    aiohttp_trace,
    async_httpx_hooks,
    httpx_hooks,
    outgoing_headers,
    passed_on,
    requests_adapter,
    retry_of,
)

__all__ = [
    "aiohttp_trace",
    "async_httpx_hooks",
    "httpx_hooks",
    "outgoing_headers",
    "passed_on",
    "requests_adapter",
    "retry_of",
]
