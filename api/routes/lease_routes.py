"""Leases over HTTP: the list of those that are held, and their end (B8, P9)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.data.auth import check_namespace
from api.routes.documentation.openapi import LEASE_DELETE, LEASES
from api.routes.responses import admit, engine_of, json_answer, respond
from limiter.engine.request_errors import ClosedLease, UnknownLease
from limiter.model.bucket.lease_contract import LeaseList, LeaseView, LeaseViewSlice, Revoked
from limiter.model.bucket.lending import LendStatus
from limiter.model.policy.fields.kinds import PARTITIONS_MAX
from limiter.model.policy.limit import policy_of
from limiter.store.keys import Slot
from limiter.store.leases.lease_store import ListedLease, Listing, slot_of
from limiter.store.policies.policy_entries import DEFAULT

router = APIRouter(tags=["leases"])

_NAMESPACE = "By default the namespace that the API key is bound to, otherwise `default`."
Namespace = Annotated[str, Query(max_length=256, description=_NAMESPACE)]


@router.get("/v1/leases", **LEASES)
async def list_leases(
    request: Request,
    namespace: Namespace = "",
    partition: Annotated[int, Query(ge=0, lt=PARTITIONS_MAX, description="The partition of the namespace.")] = 0,
    policy: Annotated[str | None, Query(max_length=64, description="Only leases of this policy.")] = None,
    holder: Annotated[str | None, Query(max_length=128, description="Only leases of this holder.")] = None,
) -> Response:
    """Return the leases of one partition that have not ended: who holds which part of which limit.

    At most 1000, those that end first.
    """
    principal = admit(request, "view")
    namespace = namespace or principal.namespace or DEFAULT
    check_namespace(principal, namespace)
    slot = Slot(namespace, partition)

    def is_wanted(lease: Listing) -> bool:
        if holder is not None and lease.holder != holder:
            return False
        return policy is None or policy in map(policy_of, lease.buckets)

    found = await engine_of(request).lease_store.listed(slot, is_wanted=is_wanted)
    return respond(json_answer(LeaseList([_shown(slot, lease) for lease in found])))


@router.delete("/v1/leases/{id}", **LEASE_DELETE)
async def revoke_lease(request: Request, id: str, namespace: Namespace = "") -> Response:  # noqa: A002
    """Lend nothing more under a lease. Its holder may use what it was lent until that ends; the answer says when."""
    principal = admit(request, "manage")
    namespace = namespace or principal.namespace or DEFAULT
    check_namespace(principal, namespace)
    slot, store = slot_of(namespace, id), engine_of(request).lease_store
    if slot is None:
        raise UnknownLease("this is no id of a lease")
    held = await store.listed(slot, is_wanted=lambda lease: lease.id == id)
    left_us = max([lease.left_us for lease in held], default=0.0)
    status = await store.revoke(slot, id)
    if status is LendStatus.UNKNOWN:
        raise UnknownLease("no lease with this id is held in this namespace")
    if status is not LendStatus.RETURNED:
        raise ClosedLease("this lease was given back or revoked before")
    return respond(json_answer(Revoked(id, round(left_us / 1000))))


def _shown(slot: Slot, lease: ListedLease) -> LeaseView:
    row = lease.row
    return LeaseView(
        lease.id,
        slot.namespace,
        slot.partition,
        lease.holder,
        row.weight,
        int(row.number),
        row.is_revoked,
        round(lease.left_us / 1000),
        [
            LeaseViewSlice(policy_of(name), name, part.rate, part.capacity, part.given)
            for name, part in zip(lease.buckets, row.parts, strict=True)
        ],
    )
