"""Probes. `/healthz` never depends on the store: one outage of it must not restart the fleet."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from api.data.answer import PROBLEM
from api.data.render import REDUCED_CAPACITY, REDUCED_CAPACITY_TITLE
from api.routes.openapi import HEALTH, READY
from api.routes.responses import engine_of, json_answer, respond

router = APIRouter(tags=["health"])


@router.get("/healthz", **HEALTH)
async def healthz() -> Response:
    """Whether the process is alive."""
    return respond(json_answer({"status": "ok"}))


@router.get("/readyz", **READY)
async def readyz(request: Request) -> Response:
    """Whether this node should get traffic, and if not, why; and what an operator should change."""
    engine = engine_of(request)
    reasons, warnings = engine.troubles(), engine.warnings()
    if not reasons:
        return respond(json_answer({"status": "ready", "warnings": warnings}))
    problem = {
        "type": REDUCED_CAPACITY,
        "title": REDUCED_CAPACITY_TITLE,
        "status": 503,
        "detail": "; ".join(reasons),
        "reason": "not_ready",
        "reasons": reasons,
        "warnings": warnings,
    }
    return respond(replace(json_answer(problem, 503), head=PROBLEM))
