"""Namespaces over HTTP: how each is spread over the store; one that nobody spoke of has a single partition (R9)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from api.answer import Answer
from api.auth import check_namespace
from api.editing import expected_revision, tagged
from api.openapi import NAMESPACE, NAMESPACE_DELETE, NAMESPACE_PUT, NAMESPACES
from api.responses import admit, document_of, engine_of, json_answer, respond
from limiter.model.policy import Namespace, read_namespace
from limiter.store.policies import PolicyMissing, PolicyStore

router = APIRouter(tags=["namespaces"])


@router.get("/v1/namespaces", **NAMESPACES)
async def list_namespaces(request: Request) -> Response:
    """Every namespace that was put, and the revision of all policies and namespaces together."""
    principal = admit(request, "view")
    stored = await _store(request).load()
    seen = [name for name in stored.policies.namespaces if principal.namespace in (None, name)]
    document = {
        "revision": stored.revision,
        "namespaces": {name: _shown(stored.policies.namespaces[name]) for name in seen},
        "revisions": {name: stored.namespace_revisions[name] for name in seen},
    }
    return respond(tagged(json_answer(document), stored.revision))


@router.get("/v1/namespaces/{name}", **NAMESPACE)
async def get_namespace(request: Request, name: str) -> Response:
    """How one namespace is spread; the revision of that is the `ETag`."""
    principal = admit(request, "view")
    stored = await _store(request).load()
    namespace = stored.policies.namespaces.get(name)
    if namespace is None or principal.namespace not in (None, name):
        raise PolicyMissing(name, kind="namespace")
    return respond(tagged(json_answer(_shown(namespace)), stored.namespace_revisions[name]))


@router.put("/v1/namespaces/{name}", **NAMESPACE_PUT)
async def put_namespace(request: Request, name: str) -> Response:
    """Spread a namespace anew. Buckets whose partition is another one then begin there, full."""
    principal = admit(request, "manage")
    namespace = read_namespace(name, await document_of(request))
    check_namespace(principal, name)
    store = _store(request)
    now_at = (await store.load()).namespace_revisions.get(name, 0)
    expected = expected_revision(request, name, now_at, kind="namespace")
    revision = await store.put_namespace(name, namespace, who=principal.name, expected=expected)
    return respond(tagged(json_answer(_shown(namespace), 200 if now_at else 201), revision))


@router.delete("/v1/namespaces/{name}", **NAMESPACE_DELETE)
async def delete_namespace(request: Request, name: str) -> Response:
    """Give a namespace a single partition again. Its policies stay."""
    principal = admit(request, "manage")
    check_namespace(principal, name)
    store = _store(request)
    now_at = (await store.load()).namespace_revisions.get(name, 0)
    expected = expected_revision(request, name, now_at, kind="namespace")
    await store.delete_namespace(name, who=principal.name, expected=expected)
    return respond(Answer(204, b"", b""))


def _store(request: Request) -> PolicyStore:
    return engine_of(request).store


def _shown(namespace: Namespace) -> dict[str, Any]:
    return namespace.model_dump(mode="json")
