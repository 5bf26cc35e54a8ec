"""Losses of policies over HTTP: what is gone, and its acknowledgement (F-S10)."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from api.data.auth import audit, refuse
from api.routes.documentation import answers
from api.routes.documentation.answers import LossAcknowledged, LossStatus
from api.routes.documentation.openapi import LOSS, LOSS_ACKNOWLEDGE
from api.routes.responses import admit, engine_of, json_answer, respond
from limiter.api_keys import Principal
from limiter.store.policies import losses
from limiter.store.policies.losses import Loss

router = APIRouter(tags=["store"])


@router.get("/v1/store/loss", **LOSS)
async def get_store_loss(request: Request) -> Response:
    """Return whether the store lost its policies, and which. Every node reports a loss until it is acknowledged."""
    principal = admit(request, "view")
    found, seen = await losses.read(engine_of(request).link)
    document: LossStatus = {"lost": found is not None}
    if found is not None:
        document["loss"] = _shown(found, principal)
    if seen is not None:
        document["acknowledged"] = {"who": seen.who, "when": _when(seen.when_us), "loss": _shown(seen.loss, principal)}
    return respond(json_answer(document))


@router.post("/v1/store/loss/acknowledge", **LOSS_ACKNOWLEDGE)
async def acknowledge_store_loss(request: Request) -> Response:
    """Acknowledge a loss of policies, so that nodes stop warning of it."""
    principal = admit(request, "manage")
    if principal.namespace is not None:
        refuse(principal, "acknowledge a loss, which is of all namespaces")
    found = await engine_of(request).acknowledge_loss(principal.name)
    if found is not None:
        audit.warning(
            "acknowledged: key %s has seen that the store lost its policies (times: %d; revision %d before, %d after)",
            principal.name, len(found.times), found.before, found.after,
        )  # fmt: skip
    document: LossAcknowledged = {"acknowledged": found is not None}
    return respond(json_answer(document))


def _shown(loss: Loss, principal: Principal) -> answers.Loss:
    seen = [place for place in loss.policies if principal.namespace in (None, place[0])]
    return {
        "when": _when(loss.when_us),
        "last": _when(loss.last_us),
        "times": len(loss.times),
        "revision_before": loss.before,
        "revision_after": loss.after,
        "policies": [{"namespace": namespace, "name": name} for namespace, name in seen],
        "more": loss.more if principal.namespace is None else 0,
    }


def _when(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="milliseconds")
