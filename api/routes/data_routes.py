"""The data plane as routes, with the same answers as the fast lane."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.data.decode import BadRequest
from api.data.plane import Headers
from api.routes.documentation.openapi import ACQUIRE, BATCH, LEASE, LEASE_RENEW, LEASE_RETURN, SETTLE
from api.routes.responses import body_of, plane_of, respond

router = APIRouter(tags=["data plane"])


@router.post("/v1/acquire", **ACQUIRE)
async def acquire(request: Request) -> Response:
    """Ask before the work. Either every policy that covers the descriptor admits and charges it, or none is charged."""
    body = await body_of(request)
    return respond(await plane_of(request).answer(b"/v1/acquire", _headers(request), body))


@router.post("/v1/settle", **SETTLE)
async def settle(request: Request) -> Response:
    """Report what the work really cost, or with `final: false` the work so far. Safe to repeat."""
    body = await body_of(request)
    return respond(await plane_of(request).answer(b"/v1/settle", _headers(request), body))


@router.post("/v1/batch", **BATCH)
async def batch(request: Request) -> Response:
    """Send up to 1000 acquires and settles. Results come in order, each as the single call would be answered."""
    body = await body_of(request)
    return respond(await plane_of(request).answer(b"/v1/batch", _headers(request), body))


@router.post("/v1/leases", **LEASE)
async def lease(request: Request) -> Response:
    """Ask for a part of every limit that covers a descriptor, and decide on it without asking until the lease ends."""
    body = await body_of(request)
    return respond(await plane_of(request).answer(b"/v1/leases", _headers(request), body))


@router.post("/v1/leases/renew", **LEASE_RENEW)
async def renew_lease(request: Request) -> Response:
    """Say what was done, held and owed, and get the next part. Safe to repeat: the number makes it the same request."""
    body = await body_of(request)
    return respond(await plane_of(request).answer(b"/v1/leases/renew", _headers(request), body))


@router.post("/v1/leases/return", **LEASE_RETURN)
async def return_lease(request: Request) -> Response:
    """Give a lease back before it ends: what is left can be lent again at once. Debt always counts."""
    body = await body_of(request)
    return respond(await plane_of(request).answer(b"/v1/leases/return", _headers(request), body))


def _headers(request: Request) -> Headers:
    found: dict[bytes, bytes] = {}
    for name, value in request.scope["headers"]:
        if name == b"idempotency-key" and name in found:  # it is unclear which one the caller means to repeat
            raise BadRequest("Idempotency-Key: found it twice; allowed: one")
        found.setdefault(name, value)  # the first of several
    return Headers(
        found.get(b"authorization"),
        found.get(b"content-type"),
        found.get(b"content-encoding"),
        found.get(b"idempotency-key"),
    )
