"""The FastAPI application: all routes, with the framework's own errors as problem+json."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from api.data import render
from api.data.auth import Forbidden, Unauthenticated
from api.data.decode import BadRequest, Invalid
from api.data.field_problems import FieldProblem
from api.data.json_text import shown
from api.data.plane import Plane
from api.data.request_ids import SENT, identified
from api.routes import (
    bucket_routes,
    controller_routes,
    data_routes,
    entrance,
    health_routes,
    lease_routes,
    loss_routes,
    signal_routes,
    uncovered_routes,
)
from api.routes.bodies import BodyRefused, LastAnswer
from api.routes.documentation import docs_page
from api.routes.documentation.openapi_document import describe
from api.routes.metrics import metrics_routes
from api.routes.metrics.node_metrics import NodeMetrics
from api.routes.policies import audit_routes, namespace_routes, policy_routes
from api.routes.responses import respond
from api.transport.observed import Observed
from api.transport.tracing import Tracing
from limiter.engine.engine import Engine
from limiter.engine.request_errors import RequestError
from limiter.metrics.processes import Shelf
from limiter.model.policy.problems import PolicyError
from limiter.settings import Settings
from limiter.store.inspect import CursorError
from limiter.store.policies.policy_sets import OwnedByOthers
from limiter.store.policies.policy_store import PolicyMissing, RevisionConflict
from limiter.store.store_errors import StoreError

MODULES = (
    data_routes,
    signal_routes,
    policy_routes,
    namespace_routes,
    audit_routes,
    bucket_routes,
    lease_routes,
    controller_routes,
    uncovered_routes,
    health_routes,
    loss_routes,
    metrics_routes,
    docs_page,
)

DATA_PLANE = (data_routes, signal_routes)
OPEN = (health_routes, metrics_routes, docs_page)
"""Routes without an API key, or with a rule of their own."""


def create_app(engine: Engine, settings: Settings, tracing: Tracing | None = None) -> FastAPI:
    """Return the application over an engine that the caller starts and stops."""
    plane = Plane(engine.decider, settings)
    metrics = NodeMetrics(engine, plane, settings.metrics_dir)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with _in_background(metrics.shelf):
            # uvicorn passes its state to its protocols: the fast lane finds the data plane here.
            yield {
                "plane": plane,
                "tracing": tracing,
                "body_max_bytes": settings.body_max_bytes,
                "body_timeout_s": settings.body_timeout_s,
                "access_log": settings.access_log,
            }

    app = FastAPI(
        title="Headgate",
        summary="Acquire before you work, settle with what it cost.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.engine, app.state.plane, app.state.settings, app.state.metrics = engine, plane, settings, metrics
    app.state.sets = asyncio.Lock()  # held while a whole set of policies is checked
    for module in MODULES:
        first = (
            [] if module in OPEN else [Depends(entrance.data_plane if module in DATA_PLANE else entrance.management)]
        )
        app.include_router(module.router, dependencies=first)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(Methods, routes_of=app)
    documents = {app.docs_url or "", app.openapi_url or ""}
    app.add_middleware(
        Observed, requests=plane.requests, tracing=tracing, documents=documents, access_log=settings.access_log
    )
    describe(app)
    return app


@asynccontextmanager
async def _in_background(shelf: Shelf | None) -> AsyncIterator[None]:
    """Write this process's metrics for the other processes, if there are any, while the context is open."""
    if shelf is None:
        yield
        return
    leaving = asyncio.create_task(shelf.run())
    try:
        yield
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


class Methods:
    """Adds HEAD wherever there is GET, and OPTIONS everywhere."""

    def __init__(self, app: ASGIApp, routes_of: FastAPI) -> None:
        self._app = app
        self._routes_of = routes_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope.get("method")
        if method == "HEAD":
            asked = {**scope, "method": "GET"}  # the server knows that it was HEAD, and sends no body
            await self._app(asked, receive, send)
            scope["route"] = asked.get("route")
            return
        if method == "OPTIONS" and (allowed := allowed_methods(self._routes_of, scope)):
            await Response(status_code=204, headers={"allow": ", ".join(allowed)})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def allowed_methods(app: FastAPI, scope: Scope) -> list[str]:
    """Return all methods of a request's path; none if there is no such path."""
    methods: set[str] = set()
    for route in (*app.routes, *(route for module in MODULES for route in module.router.routes)):
        found: set[str] | None = getattr(route, "methods", None)
        if found and route.matches(scope)[0] is not Match.NONE:
            methods |= found
    if not methods:
        return []
    return sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = allowed_methods(request.app, request.scope)
        answer = render.problem(
            405, "method", f"{shown(request.method)} is not for this path; allowed: {', '.join(allowed)}"
        )
        return respond(answer.with_header("allow", ", ".join(allowed)))
    if error.status_code == 404:
        return respond(render.problem(404, "no_such_path", "there is nothing at this path; /docs lists what there is"))
    return respond(render.problem(error.status_code, "refused", str(error.detail)))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [
        FieldProblem(".".join(map(str, problem["loc"][1:])), shown(problem.get("input")), problem["msg"])
        for problem in error.errors()
    ]
    return respond(render.failure(Invalid(found)))


async def _body_refused(_: Request, error: Exception) -> LastAnswer:
    assert isinstance(error, BodyRefused)
    return LastAnswer(identified(error.answer, SENT.get()))


async def _gone(_: Request, error: Exception) -> Response:
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=400)  # the client has gone


async def _failed(_: Request, error: Exception) -> Response:
    return respond(render.failure(error))


_HANDLERS: dict[type[Exception], Any] = {
    HTTPException: _http_error,
    RequestValidationError: _invalid,
    BodyRefused: _body_refused,
    ClientDisconnect: _gone,
    # Errors that mean something to the caller; any other is a 500, and the server logs it.
    **dict.fromkeys(
        [
            BadRequest,
            CursorError,
            Forbidden,
            OwnedByOthers,
            PolicyError,
            PolicyMissing,
            RequestError,
            RevisionConflict,
            StoreError,
            Unauthenticated,
            Exception,
        ],
        _failed,
    ),
}
