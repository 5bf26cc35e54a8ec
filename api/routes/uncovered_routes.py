"""Requests that no policy covers, over HTTP: what callers send, and what they probably meant (P7)."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.data.auth import check_namespace
from api.routes.documentation.answers import UncoveredList, UncoveredRequests
from api.routes.documentation.openapi import UNCOVERED
from api.routes.responses import admit, engine_of, json_answer, respond
from limiter.engine.planner import Planner
from limiter.model.policy.uncovered import HINTS_MAX, Nearest, Seen, Shape

router = APIRouter(tags=["policies"])


@router.get("/v1/uncovered", **UNCOVERED)
async def list_uncovered(
    request: Request,
    namespace: Annotated[
        str | None, Query(max_length=256, description="Only requests that name this namespace.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=100, description="The most rows to return.")] = 20,
) -> Response:
    """List the most frequent requests that no policy covers, since this process started, by namespace and dimensions.

    `count` is too high by at most `count_error`. An API key that is bound to a namespace sees only that one.
    """
    principal = admit(request, "view")
    if namespace is not None:
        check_namespace(principal, namespace)
    wanted = namespace if principal.namespace is None else principal.namespace
    decider = engine_of(request).decider
    found = [row for row in decider.uncovered.most_frequent() if wanted in (None, row[0].namespace)][:limit]
    # In a thread: names made to be similar to many known ones take milliseconds, in which decisions would wait.
    shown = await asyncio.to_thread(_show, found, decider.planner)
    document: UncoveredList = {"uncovered": shown}
    return respond(json_answer(document))


def _show(found: list[tuple[Shape, Seen]], planner: Planner) -> list[UncoveredRequests]:
    nearest = {
        namespace: Nearest(planner.dimensions(namespace)) for namespace in {shape.namespace for shape, _ in found}
    }
    return [_shown(shape, seen, nearest[shape.namespace], planner) for shape, seen in found]


def _shown(shape: Shape, seen: Seen, nearest: Nearest, planner: Planner) -> UncoveredRequests:
    unknown = [name for name in shape.dimensions if name not in nearest.known][:HINTS_MAX]
    return {
        "namespace": printable(shape.namespace),
        "namespace_known": planner.declares(shape.namespace),
        "dimensions": [printable(name) for name in shape.dimensions],
        "nearest": {printable(name): meant for name in unknown if (meant := nearest.of(name)) is not None},
        "count": seen.count,
        "count_error": seen.count_error,
        "first_seen_ms": seen.first_us / 1000,
        "last_seen_ms": seen.last_us / 1000,
        "examples": [{printable(name): printable(value) for name, value in row.items()} for row in list(seen.examples)],
    }


def printable(text: str) -> str:
    """Return client text without characters that a terminal or a log would act on."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
