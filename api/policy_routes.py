"""Policies over HTTP: read, put, delete, history, rollback; with `ETag` and `If-Match` against lost edits (P6)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from api.answer import Answer
from api.audit_routes import may_see
from api.auth import Principal, check_namespace
from api.decode import Invalid
from api.editing import expected_revision, shown_change, tagged
from api.explain import FieldProblem
from api.json_text import Fields, shown
from api.openapi import POLICIES, POLICY, POLICY_DELETE, POLICY_HISTORY, POLICY_PUT, POLICY_ROLLBACK
from api.responses import admit, document_of, engine_of, json_answer, respond
from limiter.model.policy import Policy, dump, read_policy
from limiter.store.policies import AuditEntry, PolicyMissing, PolicyStore, StoredPolicies

router = APIRouter(tags=["policies"])

REVISION_MAX = 2**53


@router.get("/v1/policies", **POLICIES)
async def list_policies(request: Request) -> Response:
    """Everything that is stored, and the revision of the whole."""
    principal = admit(request, "view")
    stored = await _store(request).load()
    policies = [policy for policy in stored.policies.policies if _may_see(principal, policy)]
    document = {
        "revision": stored.revision,
        "namespaces": {
            name: namespace.model_dump(mode="json")
            for name, namespace in stored.policies.namespaces.items()
            if principal.namespace in (None, name)
        },
        "policies": [dump(policy) for policy in policies],
        "revisions": {policy.name: stored.revisions[policy.name] for policy in policies},
        "damaged": dict(stored.damaged) if principal.namespace is None else {},
    }
    return respond(tagged(json_answer(document), stored.revision))


@router.get("/v1/policies/{name}", **POLICY)
async def get_policy(request: Request, name: str) -> Response:
    """One policy as it was put; its revision is the `ETag`."""
    principal = admit(request, "view")
    policy, revision = _find(await _store(request).load(), principal, name)
    return respond(tagged(json_answer(dump(policy)), revision))


@router.put("/v1/policies/{name}", **POLICY_PUT)
async def put_policy(request: Request, name: str) -> Response:
    """Put one policy: in force in every node within a second, and on live buckets at their next request."""
    principal = admit(request, "manage")
    policy = _named(name, await document_of(request))
    check_namespace(principal, policy.namespace)
    store = _store(request)
    stored = await store.load()
    before = stored.get(name)
    if before is not None:
        check_namespace(principal, before.namespace)
    revision = await store.put(policy, who=principal.name, expected=_expected(request, stored, name))
    return respond(tagged(json_answer(dump(policy), 200 if before else 201), revision))


@router.delete("/v1/policies/{name}", **POLICY_DELETE)
async def delete_policy(request: Request, name: str) -> Response:
    """Remove one policy. Reservations made under it can still be settled."""
    principal = admit(request, "manage")
    store = _store(request)
    stored = await store.load()
    if principal.namespace is not None:
        _find(stored, principal, name)
    await store.delete(name, who=principal.name, expected=_expected(request, stored, name))
    return respond(Answer(204, b"", b""))


@router.get("/v1/policies/{name}/history", **POLICY_HISTORY)
async def policy_history(request: Request, name: str) -> Response:
    """What was done to one policy, newest first: who, when, before, after."""
    principal = admit(request, "view")
    history = await _history(request, principal, name)
    return respond(json_answer({"policy": name, "history": [shown_change(entry) for entry in history]}))


@router.post("/v1/policies/{name}/rollback", **POLICY_ROLLBACK)
async def rollback_policy(request: Request, name: str) -> Response:
    """Put a policy back to what it was at a revision."""
    principal = admit(request, "manage")
    revision = _revision_of(await document_of(request))
    await _history(request, principal, name)
    store = _store(request)
    expected = _expected(request, await store.load(), name)
    now_at = await store.rollback(name, revision, who=principal.name, expected=expected)
    stored = await store.load()
    policy = stored.get(name)
    return respond(tagged(json_answer(dump(policy) if policy else None), now_at))


def _store(request: Request) -> PolicyStore:
    return engine_of(request).store


def _may_see(principal: Principal, policy: Policy) -> bool:
    return principal.namespace in (None, policy.namespace)


def _find(stored: StoredPolicies, principal: Principal, name: str) -> tuple[Policy, int]:
    policy = stored.get(name)
    if policy is None or not _may_see(principal, policy):
        raise PolicyMissing(name)
    return policy, stored.revisions[name]


async def _history(request: Request, principal: Principal, name: str) -> list[AuditEntry]:
    """What was done to a policy that this principal may know of."""
    history = await _store(request).history(name)
    if not all(may_see(principal, entry) for entry in history):
        raise PolicyMissing(name)
    return history


def _named(name: str, document: Any) -> Policy:
    """The policy that a body describes, under the name of its path."""
    if isinstance(document, Fields) and document.setdefault("name", name) != name:
        raise Invalid([FieldProblem("name", shown(document["name"]), f"{shown(name)}, as in the path, or none")])
    return read_policy(document)


def _revision_of(document: Any) -> int:
    revision = document.get("revision") if isinstance(document, Fields) and len(document) == 1 else None
    if not isinstance(revision, int) or isinstance(revision, bool) or not 1 <= revision <= REVISION_MAX:
        raise Invalid([FieldProblem("revision", shown(revision), "the number of a revision in the history")])
    return revision


def _expected(request: Request, stored: StoredPolicies, name: str) -> int | None:
    return expected_revision(request, name, stored.revisions.get(name, 0), kind="policy")
