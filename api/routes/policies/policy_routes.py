"""Policies over HTTP: read, put, patch, delete, history, rollback, each in its namespace, and whole sets at once; with
`ETag` and `If-Match` against lost edits (F-P6, P12)."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from api.data.answer import Answer
from api.data.auth import check_namespace
from api.data.decode import Invalid, TooLong
from api.data.field_problems import FieldProblem
from api.data.json_text import Fields, shown
from api.routes.documentation import answers
from api.routes.documentation.answers import CheckedSet, PolicyHistory, PolicyList
from api.routes.documentation.openapi import (
    POLICIES,
    POLICIES_APPLY,
    POLICIES_CHECK,
    POLICY,
    POLICY_DELETE,
    POLICY_HISTORY,
    POLICY_PATCH,
    POLICY_PUT,
    POLICY_ROLLBACK,
)
from api.routes.policies.audit_routes import may_see
from api.routes.policies.editing import (
    asked_namespace,
    edit,
    meant_namespace,
    shown_change,
    shown_namespace,
    shown_place,
    tagged,
)
from api.routes.responses import admit, body_of, checked, document_of, engine_of, json_answer, respond
from limiter.api_keys import Principal
from limiter.model.numbers import NUMBER_MAX
from limiter.model.policy.fields.kinds import is_name
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import PolicySet, warnings
from limiter.model.policy.reading import dump, policy_set_steps, read_policy
from limiter.model.steps import Steps
from limiter.runtime.pauses import with_pauses
from limiter.store.policies.policy_entries import API, DEFAULT, ENTRIES_AT_ONCE, policy_place
from limiter.store.policies.policy_sets import AppliedSet
from limiter.store.policies.policy_store import PolicyMissing, PolicyStore, StoredPolicies

router = APIRouter(tags=["policies"])

REVISION_MAX = int(NUMBER_MAX)
SET_BYTES_MAX = 1_048_576
SET_ENTRIES_MAX = 5_000
"""Of a whole set, which is read in a thread, and its policies and namespaces, which are checked one after the other:
each takes up to a tenth of a millisecond, and no request takes longer than a second (F-H10)."""


@router.get("/v1/policies", **POLICIES)
async def list_policies(request: Request) -> Response:
    """Return all policies and namespaces, or those of one namespace, with the revision of the whole.

    `revisions` and `owners` have a key `<namespace>/<name>` for each policy.
    """
    principal = admit(request, "view")
    namespace = asked_namespace(request, principal)
    stored = await _store(request).load()
    document = await with_pauses(_listed(stored, namespace))
    document["warnings"] = warnings(stored.policies, namespace)
    return respond(tagged(json_answer(document), stored.revision))


@router.post("/v1/policies/apply", **POLICIES_APPLY)
async def apply_policies(request: Request) -> Response:
    """Apply a whole set of policies in one step, all of it or nothing, for an owner.

    `prune` removes the owner's policies that the set no longer contains. A differing policy of another owner is a 409,
    unless `take_over` is true. A `dry_run` changes nothing and answers what would change.
    """
    principal = admit(request, "manage")
    namespace = asked_namespace(request, principal)
    options, policies = await _set(request, principal, namespace)
    applied = await _store(request).apply(
        policies,
        who=principal.name,
        owner=options["owner"],
        prune=options["prune"],
        foreign="take_over" if options["take_over"] else "refuse",
        within=namespace,
        dry_run=options["dry_run"],
    )
    return respond(tagged(json_answer(_shown(applied, dry_run=options["dry_run"])), applied.revision))


@router.post("/v1/policies/check", **POLICIES_CHECK)
async def check_policies(request: Request) -> Response:
    """Check whether a set is valid, and list the mistakes by field if not. Changes nothing and needs no store.

    Its warnings are about backends of which the set's policies commit more than they can do.
    """
    principal = admit(request, "view")
    _, policies = await _set(request, principal, asked_namespace(request, principal))
    document: CheckedSet = {"ok": True, "warnings": warnings(policies)}
    return respond(json_answer(document))


@router.get("/v1/policies/{name}", **POLICY)
async def get_policy(request: Request, name: str) -> Response:
    """Return one policy. The header `ETag` is its revision, `Headgate-Owner` its owner."""
    principal = admit(request, "view")
    namespace = meant_namespace(request, principal)
    kept = (await _store(request).load()).kept.get(policy_place(namespace, name))
    if kept is None or not isinstance(kept.part, Policy):
        raise PolicyMissing(policy_place(namespace, name))
    return respond(tagged(json_answer(dump(kept.part)), kept.revision, kept.owner or API))


@router.put("/v1/policies/{name}", **POLICY_PUT)
async def put_policy(request: Request, name: str) -> Response:
    """Create or replace one policy. In force in every node within a second, on live buckets at their next request."""
    principal = admit(request, "manage")
    document = await document_of(request)
    namespace = meant_namespace(request, principal, document)
    policy = _named(namespace, name, document)
    place, store = policy_place(namespace, name), _store(request)

    async def put(stored: StoredPolicies, expected: int | None) -> tuple[int, int]:
        status = 200 if stored.policy(namespace, name) else 201
        return status, await store.put(policy, who=principal.name, expected=expected)

    status, revision = await edit(request, principal, store, place, put)
    return respond(tagged(json_answer(dump(policy), status), revision, API))


@router.patch("/v1/policies/{name}", **POLICY_PATCH)
async def patch_policy(request: Request, name: str) -> Response:
    """Change some fields of a policy by a JSON merge patch (RFC 7396), in which `null` removes a field.

    A patch therefore cannot set `match: {dimension: null}`; put the whole policy for that.
    """
    principal = admit(request, "manage")
    patch = await document_of(request)
    namespace = meant_namespace(request, principal, patch)
    place, store = policy_place(namespace, name), _store(request)

    async def change(stored: StoredPolicies, expected: int | None) -> tuple[Policy, int]:
        before = stored.policy(namespace, name)
        if before is None:
            raise PolicyMissing(place)
        policy = _named(namespace, name, merged(dump(before), patch))
        return policy, await store.put(policy, who=principal.name, action="patch", expected=expected)

    policy, revision = await edit(request, principal, store, place, change, builds_on_it=True)
    return respond(tagged(json_answer(dump(policy)), revision, API))


@router.delete("/v1/policies/{name}", **POLICY_DELETE)
async def delete_policy(request: Request, name: str) -> Response:
    """Remove one policy. Its open reservations can still be settled."""
    principal = admit(request, "manage")
    namespace = meant_namespace(request, principal)
    store = _store(request)

    async def delete(_: StoredPolicies, expected: int | None) -> None:
        await store.delete(namespace, name, who=principal.name, expected=expected)

    await edit(request, principal, store, policy_place(namespace, name), delete)
    return respond(Answer(204, b"", b""))


@router.get("/v1/policies/{name}/history", **POLICY_HISTORY)
async def get_policy_history(request: Request, name: str) -> Response:
    """Return the changes of one policy, newest first: who, when, before, after."""
    principal = admit(request, "view")
    namespace = meant_namespace(request, principal)
    entries = await _store(request).history(namespace, name)
    history = [shown_change(entry) for entry in entries if may_see(principal, entry)]
    if not history:
        raise PolicyMissing(policy_place(namespace, name))
    document: PolicyHistory = {"policy": name, "namespace": namespace, "history": history}
    return respond(json_answer(document))


@router.post("/v1/policies/{name}/rollback", **POLICY_ROLLBACK)
async def rollback_policy(request: Request, name: str) -> Response:
    """Roll a policy back to an earlier revision. Its owner is `api` then, so that no file undoes the rollback."""
    principal = admit(request, "manage")
    revision = _revision_of(await document_of(request))
    namespace = meant_namespace(request, principal)
    store = _store(request)

    async def roll_back(_: StoredPolicies, expected: int | None) -> tuple[Policy, int]:
        return await store.rollback(namespace, name, revision, who=principal.name, expected=expected)

    policy, now_at = await edit(request, principal, store, policy_place(namespace, name), roll_back)
    return respond(tagged(json_answer(dump(policy)), now_at, API))


def merged(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396): objects field by field, `null` removes, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _store(request: Request) -> PolicyStore:
    return engine_of(request).store


def _listed(stored: StoredPolicies, namespace: str | None) -> Steps[PolicyList]:
    policies, revisions, owners = [], {}, {}
    for number, (place, kept) in enumerate(stored.kept.items()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        if isinstance(kept.part, Policy) and namespace in (None, place.namespace):
            policies.append({"namespace": place.namespace, **dump(kept.part)})
            key = f"{place.namespace}/{place.name}"
            revisions[key], owners[key] = kept.revision, kept.owner or API
    return {
        "revision": stored.revision,
        "namespaces": {
            name: shown_namespace(spread)
            for name, spread in stored.policies.namespaces.items()
            if namespace in (None, name)
        },
        "policies": policies,
        "revisions": revisions,
        "owners": owners,
        "damaged": {
            str(place): kept.part for place, kept in stored.damaged.items() if namespace in (None, place.namespace)
        },
        "warnings": [],
    }


def _named(namespace: str, name: str, document: Any) -> Policy:
    """Return the policy of a body, under the name of its path and in the given namespace."""
    if isinstance(document, dict):
        if document.setdefault("name", name) != name:
            raise Invalid([FieldProblem("name", shown(document["name"]), f"{shown(name)}, as in the path, or none")])
        if namespace != DEFAULT:
            document.setdefault("namespace", namespace)
    return read_policy(document)


def _revision_of(document: Any) -> int:
    revision = document.get("revision") if isinstance(document, Fields) and len(document) == 1 else None
    if not isinstance(revision, int) or isinstance(revision, bool) or not 1 <= revision <= REVISION_MAX:
        raise Invalid([FieldProblem("revision", shown(revision), "the number of a revision in the history")])
    return revision


def _options(document: Any) -> dict[str, Any]:
    """Remove the options for applying from a body; the rest is the set."""
    found: dict[str, Any] = {"owner": API, "prune": False, "take_over": False, "dry_run": False}
    if not isinstance(document, Fields):
        return found
    for name, default in found.items():
        value = found[name] = document.pop(name, default)
        if name == "owner":
            if not isinstance(value, str) or not is_name(value):
                allowed = "a name of 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"
                raise Invalid([FieldProblem(name, shown(value), allowed)])
        elif not isinstance(value, bool):
            raise Invalid([FieldProblem(name, shown(value), "true or false")])
    return found


async def _set(request: Request, principal: Principal, namespace: str | None) -> tuple[dict[str, Any], PolicySet]:
    """Return the options of a body and its set, which stays within a namespace if one is asked for."""
    body = await body_of(request)
    turns: asyncio.Lock = request.app.state.sets
    # Thousands of policies take a while to check: one set at a time, with pauses in which requests get their turn.
    async with turns:
        options, document = await asyncio.to_thread(_read_set, body, namespace)
        policies = await with_pauses(policy_set_steps(document))
    if namespace is not None:
        named = {policy.namespace for policy in policies.policies} | policies.namespaces.keys()
        for other in sorted(named - {namespace}):
            check_namespace(principal, other)
            raise Invalid([FieldProblem("namespace", shown(other), f"{shown(namespace)}, as in the query, or none")])
    return options, policies


def _read_set(body: bytes, namespace: str | None) -> tuple[dict[str, Any], Any]:
    """Return options and document of a set; its policies without a namespace belong to this one."""
    document = checked(body, bytes_max=SET_BYTES_MAX)
    options = _options(document)
    entries = sum(len(document[part]) for part in ("policies", "namespaces") if _is_long(document, part))
    if entries > SET_ENTRIES_MAX:
        raise TooLong(f"the set has {entries} policies and namespaces; allowed: at most {SET_ENTRIES_MAX} at once")
    if namespace not in (None, DEFAULT) and isinstance(document, Fields):
        defaults = document.get("defaults")
        if not (isinstance(defaults, dict) and "namespace" in defaults):
            for policy in document["policies"] if isinstance(document.get("policies"), list) else ():
                if isinstance(policy, Fields):
                    policy.setdefault("namespace", namespace)
    return options, document


def _is_long(document: Any, part: str) -> bool:
    return isinstance(document, Fields) and isinstance(document.get(part), list | dict)


def _shown(applied: AppliedSet, *, dry_run: bool) -> answers.AppliedSet:
    return {
        "revision": applied.revision,
        "dry_run": dry_run,
        "made": [shown_place(place) for place in applied.made],
        "changed": [shown_place(place) for place in applied.changed],
        "removed": [shown_place(place) for place in applied.removed],
        "kept": [
            {**shown_place(foreign.place), "owner": foreign.owner, "revision": foreign.revision}
            for foreign in applied.foreign
        ],
    }
