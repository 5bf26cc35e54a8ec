"""Reports of load over HTTP (G5)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.data import decode
from api.data.auth import check_namespace
from api.routes.documentation.openapi import SIGNALS
from api.routes.responses import admit, body_of, engine_of, json_answer, respond

router = APIRouter(tags=["data plane"])


@router.post("/v1/signals", **SIGNALS)
async def report_load(request: Request) -> Response:
    """Report how busy a service is: CPU, executor load, queue age, any signal that the policy has a target for.

    Without `key` the report is for every bucket of the policy. Above the target, the least critical are refused first.
    """
    principal = admit(request, "use")
    taken = decode.signals(await body_of(request))
    check_namespace(principal, taken.namespace)
    return respond(json_answer(await engine_of(request).report(taken), 202))
