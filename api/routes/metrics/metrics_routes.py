"""Metrics for Prometheus. They cover all namespaces, so a key that is bound to one cannot read them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.data.answer import Answer, header
from api.data.auth import refuse
from api.routes.documentation.openapi import METRICS
from api.routes.metrics.node_metrics import NodeMetrics
from api.routes.responses import admit, respond
from limiter.settings import Settings

router = APIRouter(tags=["health"])


@router.get("/metrics", **METRICS)
async def get_metrics(request: Request) -> Response:
    """Return the metrics of this node, all its processes together, in the format that `Accept` asks for."""
    _admit(request)
    shown: NodeMetrics = request.app.state.metrics
    body, content_type = await shown.scrape(request.headers.get("accept", ""))
    return respond(Answer(200, header("content-type", content_type), body))


def _admit(request: Request) -> None:
    settings: Settings = request.app.state.settings
    if settings.metrics_open:
        return
    principal = admit(request, "view")
    if principal.namespace is not None:
        refuse(principal, "read metrics, which are of all namespaces")
