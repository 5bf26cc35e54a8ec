"""The controller over HTTP: the owner of a partition, and the reasoning for its buckets (R11)."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter, Request, Response
from msgspec import to_builtins

from api.routes.documentation.answers import ControllerPage, Owner, SteeredBucket
from api.routes.documentation.openapi import CONTROLLER
from api.routes.pages import Page, placed
from api.routes.responses import admit, engine_of, json_answer, respond
from limiter.model.control.reasoning import reasoning
from limiter.model.control.stewardship import Lease
from limiter.store import inspect

router = APIRouter(tags=["controller"])


@router.get("/v1/controller", **CONTROLLER)
async def get_controller(request: Request, query: Page) -> Response:
    """Return who steers a partition, and a page of its steered buckets with the reasoning of their last cycles.

    Ask for the next page with its `cursor`, until that is empty. The reasoning may be about a second old.
    """
    query = placed(query, admit(request, "view"))
    link = engine_of(request).link
    now_us = await inspect.now_us(link)
    page = await inspect.list_steered(link, query)
    document: ControllerPage = {
        "owner": _shown(page.owner),
        "buckets": [
            cast(
                "SteeredBucket", {"namespace": query.namespace, **to_builtins(reasoning(name, record, memory, now_us))}
            )
            for name, record, memory in page.buckets
        ],
        "cursor": page.cursor,
        "unreadable": page.unreadable,
    }
    return respond(json_answer(document))


def _shown(owner: Lease | None) -> Owner | None:
    if owner is None:
        return None
    name = owner.owner.decode("utf-8", "backslashreplace")
    return {"controller": name, "fence": owner.fence, "expires_in_ms": owner.left_ms}
