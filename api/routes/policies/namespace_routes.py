"""Namespaces over HTTP: their partitions and settings; one that was not declared has a single partition (R9)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.data.answer import Answer
from api.data.auth import check_namespace
from api.routes.documentation.answers import NamespaceList
from api.routes.documentation.openapi import NAMESPACE, NAMESPACE_DELETE, NAMESPACE_PUT, NAMESPACES
from api.routes.policies.editing import asked_namespace, edit, shown_namespace, tagged
from api.routes.responses import admit, document_of, engine_of, json_answer, respond
from limiter.model.policy.reading import read_namespace
from limiter.store.policies.policy_entries import API, namespace_place
from limiter.store.policies.policy_store import PolicyMissing, PolicyStore, StoredPolicies

router = APIRouter(tags=["namespaces"])


@router.get("/v1/namespaces", **NAMESPACES)
async def list_namespaces(request: Request) -> Response:
    """Return all declared namespaces, with the revision of all policies and namespaces."""
    principal = admit(request, "view")
    asked = asked_namespace(request, principal)
    stored = await _store(request).load()
    seen = [name for name in stored.policies.namespaces if asked in (None, name)]
    kept = {name: stored.kept[namespace_place(name)] for name in seen}
    document: NamespaceList = {
        "revision": stored.revision,
        "namespaces": {name: shown_namespace(stored.policies.namespaces[name]) for name in seen},
        "revisions": {name: one.revision for name, one in kept.items()},
        "owners": {name: one.owner or API for name, one in kept.items()},
    }
    return respond(tagged(json_answer(document), stored.revision))


@router.get("/v1/namespaces/{name}", **NAMESPACE)
async def get_namespace(request: Request, name: str) -> Response:
    """Return one namespace. The header `ETag` is its revision."""
    principal = admit(request, "view")
    stored = await _store(request).load()
    namespace = stored.policies.namespaces.get(name)
    if namespace is None or principal.namespace not in (None, name):
        raise PolicyMissing(namespace_place(name))
    kept = stored.kept[namespace_place(name)]
    return respond(tagged(json_answer(shown_namespace(namespace)), kept.revision, kept.owner or API))


@router.put("/v1/namespaces/{name}", **NAMESPACE_PUT)
async def put_namespace(request: Request, name: str) -> Response:
    """Declare a namespace, or change its partitions. Buckets that move to another partition begin full there."""
    principal = admit(request, "manage")
    namespace = read_namespace(name, await document_of(request))
    check_namespace(principal, name)
    place, store = namespace_place(name), _store(request)

    async def put(stored: StoredPolicies, expected: int | None) -> tuple[int, int]:
        status = 200 if place in stored.kept else 201
        return status, await store.put_namespace(name, namespace, who=principal.name, expected=expected)

    status, revision = await edit(request, principal, store, place, put)
    return respond(tagged(json_answer(shown_namespace(namespace), status), revision, API))


@router.delete("/v1/namespaces/{name}", **NAMESPACE_DELETE)
async def delete_namespace(request: Request, name: str) -> Response:
    """Remove the declaration of a namespace: it has one partition then. Its policies stay."""
    principal = admit(request, "manage")
    check_namespace(principal, name)
    store = _store(request)

    async def delete(_: StoredPolicies, expected: int | None) -> None:
        await store.delete_namespace(name, who=principal.name, expected=expected)

    await edit(request, principal, store, namespace_place(name), delete)
    return respond(Answer(204, b"", b""))


def _store(request: Request) -> PolicyStore:
    return engine_of(request).store
