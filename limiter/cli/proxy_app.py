"""The proxy's other lane: probes, load, metrics, and whatever the fast lane hands over, as a plain ASGI application."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from api.data import render
from api.data.answer import JSON, PROBLEM, Answer, header
from api.data.counts import NO_ROUTE, count
from api.data.decode import BadRequest, CrossSite
from api.data.json_text import shown
from api.data.plane import Headers
from api.data.request_ids import HEADER, identified
from api.routes.bodies import BodyRefused, LastAnswer, read_body
from limiter.cli import proxy_metrics
from limiter.cli.proxy_plane import ProxyPlane
from limiter.client.node_pool import NodePool
from limiter.runtime.busyness import Busyness

BODY_MAX_BYTES = 1_048_576
BODY_TIMEOUT_S = 10.0
NOTHING_HERE = (
    "there is nothing at this path; the proxy serves acquires, settles, batches, leases, signals, /healthz, /readyz, "
    "/load and /metrics: ask a node for everything else"
)


@dataclass
class Upstream:
    """The proxy's knowledge of the service."""

    was_reached: bool = False
    """A node has answered since the proxy started."""


class ProxyApp:
    """Answers what the fast lane does not."""

    def __init__(self, plane: ProxyPlane, pool: NodePool, upstream: Upstream) -> None:
        self._plane = plane
        self._pool = pool
        self._upstream = upstream
        self._busyness = Busyness()
        self._gets: dict[str, Callable[[Request], Answer]] = {
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/load": self._load,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        request = Request(scope, receive)
        path = scope["path"]
        try:
            answer = await self._answer(request, path)
        except BodyRefused as refused:
            await LastAnswer(self._counted(request, path, refused.answer))(scope, receive, send)
            return
        except ClientDisconnect:
            return
        except Exception as error:
            answer = render.failure(error)
        answer = self._counted(request, path, answer)
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.body})

    def _counted(self, request: Request, path: str, answer: Answer) -> Answer:
        is_known = path in self._gets or path.encode() in self._plane.paths
        count(self._plane.requests, path.encode() if is_known else NO_ROUTE, answer.status)
        return identified(answer, _raw(request, HEADER))

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the lanes what they look for, as `api.app` does."""
        scope["state"].update(
            plane=self._plane,
            tracing=None,
            body_max_bytes=BODY_MAX_BYTES,
            body_timeout_s=BODY_TIMEOUT_S,
            access_log=False,
        )
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, request: Request, path: str) -> Answer:
        posts = path.encode() in self._plane.paths
        allowed = ["OPTIONS", "POST"] if posts else ["GET", "HEAD", "OPTIONS"] if path in self._gets else []
        if not allowed:
            return render.problem(404, "no_such_path", NOTHING_HERE)
        if request.method == "OPTIONS":
            return Answer(204, header("allow", ", ".join(allowed)), b"")
        if request.method not in allowed:
            detail = f"{shown(request.method)} is not for this path; allowed: {', '.join(allowed)}"
            return render.problem(405, "method", detail).with_header("allow", ", ".join(allowed))
        if posts:
            return await self._post(request, path)
        return self._gets[path](request)

    async def _post(self, request: Request, path: str) -> Answer:
        if any(site.strip().lower() == "cross-site" for site in request.headers.getlist("sec-fetch-site")):
            raise CrossSite("a web page of another site sent this (Sec-Fetch-Site: cross-site); send it from a program")
        if len(request.headers.getlist("idempotency-key")) > 1:  # it is unclear which one the caller means to repeat
            raise BadRequest("Idempotency-Key: found it twice; allowed: one")
        headers = Headers(
            _raw(request, b"authorization"),
            _raw(request, b"content-type"),
            _raw(request, b"content-encoding"),
            _raw(request, b"idempotency-key"),
        )
        if not self._plane.admits(headers):
            return await self._plane.answer(path.encode(), headers, b"")  # which says why
        body = await read_body(request, max_bytes=BODY_MAX_BYTES, timeout_s=BODY_TIMEOUT_S)
        return await self._plane.answer(path.encode(), headers, body)

    # Probes, load, metrics.

    def _health(self, _: Request) -> Answer:
        return _json({"status": "ok"})

    def _readiness(self, _: Request) -> Answer:
        """Ready once a node has answered. If all are away later, the proxy still has clear answers to give."""
        if self._upstream.was_reached:
            now_s = time.monotonic()
            is_away = all(node.away_until_s > now_s for node in self._pool.nodes)
            return _json({"status": "ready", "warnings": ["no node of the service answers"] if is_away else []})
        reasons = ["no node of the service has answered yet"]
        problem = {
            "type": render.REDUCED_CAPACITY,
            "title": render.REDUCED_CAPACITY_TITLE,
            "status": 503,
            "detail": reasons[0],
            "reason": "not_ready",
            "reasons": reasons,
            "warnings": [],
        }
        return Answer(503, PROBLEM, msgspec.json.encode(problem))

    def load(self) -> float:
        """Return how busy the proxy is: its processor or its queue, whichever is fuller."""
        return round(max(self._busyness.share(), self._plane.desk.fill), 3)

    def _load(self, _: Request) -> Answer:
        return _json({"load": self.load(), "waiting": self._plane.desk.waiting})

    def _metrics(self, request: Request) -> Answer:
        shown = proxy_metrics.readings(self._plane, self._pool, self.load())
        body, content_type = proxy_metrics.encode(shown, request.headers.get("accept", ""))
        return Answer(200, header("content-type", content_type), body)


def _raw(request: Request, name: bytes) -> bytes | None:
    return next((value for known, value in request.scope["headers"] if known == name), None)


def _json(document: object) -> Answer:
    return Answer(200, JSON, msgspec.json.encode(document))
