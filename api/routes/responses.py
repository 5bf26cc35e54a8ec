"""Answers in the framework's form, and the parts of a request that routes use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import Request, Response

from api.data import decode, json_text
from api.data.answer import JSON, Answer
from api.data.decode import Invalid, TooLong
from api.data.field_problems import FieldProblem, is_text
from api.data.json_text import Fields
from api.data.plane import Plane
from api.data.request_ids import SENT, identified
from api.routes.bodies import read_body
from limiter.api_keys import Principal, Right
from limiter.engine.engine import Engine
from limiter.settings import Settings

DOCUMENT_BYTES_MAX = 131_072
"""Size of a policy or a namespace: each value is checked by a function of its own, so a megabyte would take too
long."""

STEP_MAX = 64


def respond(answer: Answer) -> Response:
    """Return a response with these headers, in this order, and the request's id."""
    answer = identified(answer, SENT.get())
    response = Response(content=answer.body, status_code=answer.status)
    response.raw_headers = answer.headers
    return response


def json_answer(document: Any, status: int = 200) -> Answer:
    """Return plain data as an answer."""
    return Answer(status, JSON, msgspec.json.encode(document))


def engine_of(request: Request) -> Engine:
    engine = request.app.state.engine
    assert isinstance(engine, Engine)
    return engine


def plane_of(request: Request) -> Plane:
    plane = request.app.state.plane
    assert isinstance(plane, Plane)
    return plane


async def body_of(request: Request) -> bytes:
    """Return the whole body, within the limits."""
    settings: Settings = request.app.state.settings
    return await read_body(request, max_bytes=settings.body_max_bytes, timeout_s=settings.body_timeout_s)


def admit(request: Request, right: Right) -> Principal:
    """Return the caller if it has this right."""
    authorization = request.headers.get("authorization")
    return plane_of(request).doorkeeper.admit(authorization.encode("latin-1") if authorization else None, right)


async def document_of(request: Request) -> Any:
    """Return a body as plain data, each name once and each number finite; raise BadRequest otherwise."""
    return checked(await body_of(request))


def checked(body: bytes, *, bytes_max: int = DOCUMENT_BYTES_MAX) -> Any:
    """Return the document in a body, each name once and each number finite; raise BadRequest otherwise."""
    if len(body) > bytes_max:
        raise TooLong(f"the document has {len(body)} bytes; allowed: at most {bytes_max}")
    document = decode.document(body)
    unsound = _unsound(document)
    if unsound is not None:
        steps, found, allowed = unsound
        raise Invalid([FieldProblem(_place(reversed(steps)), found, allowed)])
    return document


_Unsound = tuple[list[str | int], str, str]
"""Where, from the inside out; what was found; what is allowed."""


def _unsound(value: Any) -> _Unsound | None:
    """Find a value that JSON cannot express, or a repeated name, at any depth; build its place only then."""
    if isinstance(value, str):
        return None if is_text(value) else _unsound_text(value)
    if isinstance(value, Fields):
        if value.twice:
            return [], json_text.shown(value.twice[0]), "each name once"
        for name, inner in value.items():
            if not is_text(name):
                return _unsound_text(name)
            if (found := _unsound(inner)) is not None:
                found[0].append(name)
                return found
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if (found := _unsound(inner)) is not None:
                found[0].append(index)
                return found
    return None


def _unsound_text(value: str) -> _Unsound:
    if isinstance(value, json_text.Odd):
        return [], json_text.shown(value), "a finite number"
    return [], json_text.shown(value), "Unicode text"


def _place(steps: Iterable[str | int]) -> str:
    """`match.service`, `per[3]`."""
    place = ""
    for step in steps:
        place += f"[{step}]" if isinstance(step, int) else f".{_step(step)}"
    return place.lstrip(".")


def _step(name: str) -> str:
    return name if len(name) <= STEP_MAX and name.isprintable() else json_text.shown(name)
