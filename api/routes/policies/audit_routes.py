"""The audit log over HTTP: every change of policies and namespaces, and who made it (P6)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.routes.documentation.answers import AuditPage, Change
from api.routes.documentation.openapi import AUDIT
from api.routes.pages import CURSOR
from api.routes.policies.editing import asked_namespace, shown_change
from api.routes.responses import admit, engine_of, json_answer, respond
from limiter.api_keys import Principal
from limiter.store.policies.policy_entries import AuditEntry

router = APIRouter(tags=["audit"])

LIMIT_MAX = 1000


@router.get("/v1/audit", **AUDIT)
async def get_audit_log(
    request: Request,
    cursor: Annotated[str, Query(max_length=64, description=CURSOR)] = "",
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX, description="The most changes on a page.")] = 100,
) -> Response:
    """Return a page of the audit log, newest first. Ask for the next page with its `cursor`, until that is empty.

    With `namespace`, or an API key that is bound to one, only changes of that namespace. Such pages may be shorter than
    `limit`, and so are pages of long policies: a page ends after about a megabyte.
    """
    principal = admit(request, "view")
    namespace = asked_namespace(request, principal)
    page = await engine_of(request).store.audit_page(cursor=cursor, limit=limit)
    changes: list[Change] = [
        {"kind": entry.kind, "namespace": entry.namespace or None, "name": entry.name, **shown_change(entry)}
        for entry in page.entries
        if may_see(principal, entry) and (namespace is None or entry.concerns(namespace))
    ]
    document: AuditPage = {"changes": changes, "cursor": page.cursor}
    return respond(json_answer(document))


def may_see(principal: Principal, entry: AuditEntry) -> bool:
    """True if a change concerns no other namespace than the key's."""
    return principal.namespace in (None, entry.namespace)
