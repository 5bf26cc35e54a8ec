"""Shared parts of management routes: the namespace, the audit log's form, and `ETag`, `If-Match` and `If-None-Match`
against lost edits (F-P6)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from fastapi import Request

from api.data.answer import Answer
from api.data.auth import check_namespace
from api.data.decode import BadRequest, Invalid
from api.data.field_problems import FieldProblem
from api.data.json_text import shown
from api.routes.documentation.answers import Entry, Revision
from limiter.api_keys import Principal
from limiter.model.policy.fields.kinds import is_name
from limiter.model.policy.policy_set import Namespace
from limiter.store.policies.policy_entries import DEFAULT, AuditEntry, Place
from limiter.store.policies.policy_store import PolicyStore, RevisionConflict, StoredPolicies

OVERTAKEN_MAX = 3
"""How often an edit without a condition is repeated because another came between."""

_TAGS = re.compile(r'\s*(?:W/)?"[^"]*"\s*(?:,\s*(?:W/)?"[^"]*"\s*)*')
_STRONG_TAG = re.compile(r'(?<!W/)"(\d{1,15})"')
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

T = TypeVar("T")


def asked_namespace(request: Request, principal: Principal) -> str | None:
    """Return the namespace of the query, or the one that the key is bound to; None if there is neither.

    Raises Forbidden if the query names another than the key's own.
    """
    asked = request.query_params.getlist("namespace")
    if len(asked) > 1 or not all(map(is_name, asked)):
        found = shown(asked[0]) if len(asked) == 1 else f"it {len(asked)} times"
        raise Invalid([FieldProblem("namespace", found, "one name of letters, digits, '.', '_' or '-'")])
    if asked:
        check_namespace(principal, asked[0])
        return asked[0]
    return principal.namespace


def meant_namespace(request: Request, principal: Principal, document: Any = None) -> str:
    """Return a policy's namespace: of the query or the body, which must agree, otherwise the key's or `default`."""
    asked = asked_namespace(request, principal)
    written = document.get("namespace") if isinstance(document, dict) else None
    if not isinstance(written, str):  # absent, or invalid: validation reports it
        return asked or DEFAULT
    if principal.namespace is not None:
        check_namespace(principal, written)
    if asked is not None and asked != written:
        raise Invalid([FieldProblem("namespace", shown(written), f"{shown(asked)}, as in the query, or none")])
    return written


async def edit(
    request: Request,
    principal: Principal,
    store: PolicyStore,
    place: Place,
    change: Callable[[StoredPolicies, int | None], Awaitable[T]],
    *,
    builds_on_it: bool = False,
) -> T:
    """Change an entry only in the state that was read: `change` receives what is stored and the revision to replace.

    Without a condition by the caller, a change that another one overtook is made again on the present state; after a
    few times on any state. Changes that build on what was read, and all changes with a key that is bound to a
    namespace, fail instead.
    """
    last_word = principal.namespace is None and not builds_on_it
    for overtaken in range(OVERTAKEN_MAX + 1):
        stored = await store.load()
        now_at = stored.revision_of(place)
        expected = expected_revision(request, place, now_at)
        is_last = overtaken == OVERTAKEN_MAX
        if expected is None and not (is_last and last_word):
            try:
                return await change(stored, now_at)
            except RevisionConflict:
                if is_last:
                    raise
        else:
            return await change(stored, expected)
    raise AssertionError("the last attempt returns or raises")


def expected_revision(request: Request, place: Place, now_at: int) -> int | None:
    """Return the revision that the caller means to replace: 0 for none, None for any."""
    if request.headers.get("if-none-match", "").strip() == "*":
        return 0
    condition = request.headers.get("if-match")
    if condition is None:
        return None
    if condition.strip() == "*":
        tags = {now_at} - {0}
    elif _TAGS.fullmatch(condition):
        tags = {int(tag) for tag in _STRONG_TAG.findall(condition)}
    else:
        raise BadRequest(f'If-Match: found {shown(condition)}; allowed: an ETag, such as "7", or *')
    if now_at not in tags:
        raise RevisionConflict(place, now_at)
    return now_at


def tagged(answer: Answer, revision: int, owner: str = "") -> Answer:
    """Add the revision as the `ETag`, and the owner of the entry."""
    answer = answer.with_header("etag", f'"{revision}"')
    return answer.with_header("headgate-owner", owner) if owner else answer


def shown_change(entry: AuditEntry) -> Revision:
    """Return one change as plain data: who, when, before, after."""
    return {
        "revision": entry.revision,
        "when": (_EPOCH + timedelta(microseconds=entry.when_us)).isoformat(timespec="milliseconds"),
        "who": entry.who,
        "action": entry.action,
        "owner": entry.owner,
        "before": entry.before,
        "after": entry.after,
    }


def shown_place(place: Place) -> Entry:
    """Return the subject of an entry as plain data."""
    return {"kind": place.kind, "namespace": place.namespace, "name": place.name}


def shown_namespace(namespace: Namespace) -> dict[str, Any]:
    """Return a namespace's settings as plain data."""
    return namespace.model_dump(mode="json", exclude_none=True)
