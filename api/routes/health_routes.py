"""Probes. `/healthz` does not depend on the store: an outage of the store must not restart the fleet."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from api.data.answer import PROBLEM
from api.data.render import REDUCED_CAPACITY, REDUCED_CAPACITY_TITLE
from api.routes.documentation.answers import Health, Load, NotReady, Readiness
from api.routes.documentation.openapi import HEALTH, LOAD, READY
from api.routes.responses import engine_of, json_answer, respond

router = APIRouter(tags=["health"])


@router.get("/healthz", **HEALTH)
async def get_health() -> Response:
    """Return 200 while the process is alive, whatever the store does."""
    alive: Health = {"status": "ok"}
    return respond(json_answer(alive))


@router.get("/readyz", **READY)
async def get_readiness(request: Request) -> Response:
    """Return whether this node should get traffic, the reasons if not, and warnings for operators."""
    engine = engine_of(request)
    reasons, warnings = engine.troubles(), engine.warnings()
    if not reasons:
        ready: Readiness = {"status": "ready", "warnings": warnings}
        return respond(json_answer(ready))
    problem: NotReady = {
        "type": REDUCED_CAPACITY,
        "title": REDUCED_CAPACITY_TITLE,
        "status": 503,
        "detail": "; ".join(reasons),
        "reason": "not_ready",
        "reasons": reasons,
        "warnings": warnings,
    }
    return respond(replace(json_answer(problem, 503), head=PROBLEM))


@router.get("/load", **LOAD)
async def get_load(request: Request) -> Response:
    """Return how busy this process is, for load balancers: at 1.0 it cannot do more."""
    engine = engine_of(request)
    busy: Load = {"load": round(engine.busyness.share(), 3), "waiting": engine.waiting}
    return respond(json_answer(busy))
