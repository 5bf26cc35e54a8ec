"""Routes of web frameworks: the pattern that a path will match (`/orders/{id}`), found before the framework is called.

Frameworks are recognised by what their objects offer, so none of them is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

FULL = 2
"""The value of Starlette's `Match.FULL`."""


def starlette_route(routes: Iterable[Any], scope: MutableMapping[str, Any]) -> str | None:
    """Return the pattern of the route of Starlette or FastAPI that matches, with those it is mounted under."""
    for route in routes:
        if not hasattr(route, "matches"):
            continue
        match, child_scope = route.matches(scope)
        if match.value != FULL:
            continue
        contexts = getattr(route, "effective_route_contexts", None)
        if contexts is not None:  # a router that FastAPI includes
            return _included(contexts(), scope)
        path = str(getattr(route, "path_format", None) or getattr(route, "path", ""))
        inner = getattr(route, "routes", None)
        if not inner:
            return path or None
        below = starlette_route(inner, {**scope, **child_scope})
        mounted = path.removesuffix("/{path}")
        return None if below is None else mounted + below
    return None


def _included(contexts: Iterable[Any], scope: MutableMapping[str, Any]) -> str | None:
    for context in contexts:
        if context.matches(scope)[0].value == FULL:
            path: str | None = getattr(context.starlette_route, "path_format", None) or getattr(
                context, "path_format", None
            )
            return path
    return None


def werkzeug_route(url_map: Any, environ: dict[str, Any]) -> str | None:
    """Return the rule of Flask, or of another application with a `url_map`, that matches."""
    from werkzeug.exceptions import HTTPException
    from werkzeug.routing import RequestRedirect

    try:
        rule, _ = url_map.bind_to_environ(environ).match(return_rule=True)
    except (RequestRedirect, HTTPException):
        return None
    found: str = rule.rule
    return found


def django_route(path: str) -> str | None:
    """Return the pattern of Django's that matches, as `path()` or `re_path()` had it, with a slash in front."""
    from django.urls import Resolver404, resolve

    try:
        return f"/{resolve(path).route}"
    except Resolver404:
        return None


def is_django(app: Any) -> bool:
    return type(app).__module__.startswith("django.")
