"""Answers as the framework takes them, and what routes need of a request."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response

from api import json_text
from api.answer import JSON, Answer
from api.auth import Principal, Right
from api.decode import BadRequest, Invalid, check_json
from api.explain import FieldProblem
from api.json_text import Fields, Malformed
from api.limits import read_body
from api.plane import Plane
from api.request_ids import SENT, identified
from limiter.engine import Engine
from limiter.settings import Settings


def respond(answer: Answer) -> Response:
    """A response with these headers, in this order, and the request's id."""
    answer = identified(answer, SENT.get())
    response = Response(content=answer.body, status_code=answer.status)
    response.raw_headers = answer.headers
    return response


def json_answer(document: Any, status: int = 200) -> Answer:
    """Plain data as an answer."""
    return Answer(status, JSON, msgspec.json.encode(document))


def engine_of(request: Request) -> Engine:
    """The engine that serves this request."""
    engine = request.app.state.engine
    assert isinstance(engine, Engine)
    return engine


def plane_of(request: Request) -> Plane:
    """The data plane that serves this request."""
    plane = request.app.state.plane
    assert isinstance(plane, Plane)
    return plane


async def body_of(request: Request) -> bytes:
    """The whole body, within the limits."""
    settings: Settings = request.app.state.settings
    return await read_body(request, max_bytes=settings.body_max_bytes, timeout_s=settings.body_timeout_s)


def admit(request: Request, right: Right) -> Principal:
    """Who asks, if it may."""
    authorization = request.headers.get("authorization")
    return plane_of(request).doorkeeper.admit(authorization.encode("latin-1") if authorization else None, right)


async def document_of(request: Request) -> Any:
    """A body as plain data, each name once and each number finite; BadRequest if it is not that."""
    body = await body_of(request)
    headers = dict(request.scope["headers"])
    check_json(headers.get(b"content-type"), headers.get(b"content-encoding"))
    try:
        document = json_text.read(body)
    except Malformed as malformed:
        raise BadRequest(str(malformed)) from None
    _check_sound("", document)
    return document


def _check_sound(at: str, value: Any) -> None:
    """What JSON cannot say, or says twice, is refused wherever it stands."""
    if isinstance(value, json_text.Odd):
        raise Invalid([FieldProblem(at, str(value)[:60], "a finite number")])
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise Invalid([FieldProblem(at, json_text.shown(value), "Unicode text")])
    if isinstance(value, Fields):
        if value.twice:
            raise Invalid([FieldProblem(at, json_text.shown(value.twice[0]), "each name once")])
        for name, inner in value.items():
            _check_sound(at, name)
            _check_sound(f"{at}.{name}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_sound(f"{at}[{index}]", inner)
