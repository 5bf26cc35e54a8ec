"""Limits on the size of a request, and on the time that it takes to arrive (F-H1)."""

from __future__ import annotations

from api.data import render
from api.data.answer import Answer

HEAD_BYTES_MAX = 65_536
HEADERS_MAX = 100
PARAMETERS_MAX = 100
"""Parameters in a query. Each costs the same, however short it is."""
CHUNKS_MAX = 16_384
"""Chunks of one body. Each costs the same, however small it is."""

CLOSE = b"connection: close\r\n"


def too_large(body_max_bytes: int) -> Answer:
    """413: the body is too long."""
    return render.problem(413, "too_long", f"the body is longer than {body_max_bytes} bytes")


def too_many_chunks() -> Answer:
    """413: the body has too many chunks."""
    return render.problem(413, "too_long", f"the body comes in more than {CHUNKS_MAX} chunks; send larger ones")


def too_slow() -> Answer:
    """408: the request did not arrive in time."""
    return render.problem(408, "too_slow", "the request did not arrive in time")


def head_too_large() -> Answer:
    """431: too many headers."""
    allowed = f"at most {HEADERS_MAX} headers, {PARAMETERS_MAX} query parameters and {HEAD_BYTES_MAX} bytes in all"
    return render.problem(431, "head_too_long", f"the request's head is too long; allowed: {allowed}")


def not_http() -> Answer:
    """400: bytes that are no HTTP request."""
    return render.problem(400, "not_http", "this is not an HTTP request that can be understood")


def no_host() -> Answer:
    """400: HTTP/1.1 without a `Host`, or with several (RFC 9112, 3.2)."""
    return render.problem(400, "host", "Host: found none, or several; allowed: one in every request of HTTP/1.1")
