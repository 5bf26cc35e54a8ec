"""The checks of every route with an API key, in this order, before any part of the request is used.

    who asks? 401, 403 ──► does a page of another site? 403 ──► is the body JSON? 415 ──► its parameters: 413, 422, …

A dependency of whole routers: no route can forget it, and the framework's own validation comes after it.
"""

from __future__ import annotations

from fastapi import Request

from api.data.decode import JSON, MERGE_PATCH, CrossSite, check_json
from api.routes.responses import admit
from limiter.api_keys import Right

READING = frozenset({"GET", "HEAD", "OPTIONS"})
ASKING = frozenset({"/v1/policies/check"})
"""Paths that are posted to without changing anything."""


async def data_plane(request: Request) -> None:
    """Check requests of callers."""
    _check(request, "use")


async def management(request: Request) -> None:
    """Check requests that show or change what is managed."""
    reads = request.method in READING or request.scope["path"] in ASKING
    _check(request, "view" if reads else "manage")


def _check(request: Request, right: Right) -> None:
    admit(request, right)
    if request.method in READING:
        return
    headers = request.headers
    if any(site.strip().lower() == "cross-site" for site in headers.getlist("sec-fetch-site")):
        raise CrossSite("a web page of another site sent this (Sec-Fetch-Site: cross-site); send it from a program")
    # A form in a page of another site can be posted without a preflight, but not as JSON.
    if request.method == "POST" or headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        kinds = (JSON, MERGE_PATCH) if request.method == "PATCH" else (JSON,)
        check_json(_raw(request, "content-type"), _raw(request, "content-encoding"), kinds=kinds)


def _raw(request: Request, name: str) -> bytes | None:
    value = request.headers.get(name)
    return None if value is None else value.encode("latin-1")
