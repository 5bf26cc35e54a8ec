"""The parameters of a page of a partition's buckets."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query

from api.data.auth import check_namespace
from limiter.api_keys import Principal
from limiter.model.policy.fields.kinds import PARTITIONS_MAX
from limiter.store.inspect import PageQuery
from limiter.store.policies.policy_entries import DEFAULT

CURSOR = "The `cursor` of the page before; empty for the first page."
_NAMESPACE = "By default the namespace that the API key is bound to, otherwise `default`."


def _page_query(
    namespace: Annotated[str, Query(max_length=256, description=_NAMESPACE)] = "",
    partition: Annotated[int, Query(ge=0, lt=PARTITIONS_MAX, description="The partition of the namespace.")] = 0,
    policy: Annotated[str | None, Query(max_length=64, description="Only buckets of this policy.")] = None,
    contains: Annotated[str, Query(max_length=256, description="Only buckets whose name contains this text.")] = "",
    cursor: Annotated[str, Query(max_length=8192, description=CURSOR)] = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="The most buckets on a page.")] = 100,
) -> PageQuery:
    return PageQuery(namespace, partition, policy, contains, cursor, limit)


Page = Annotated[PageQuery, Depends(_page_query)]


def placed(query: PageQuery, principal: Principal) -> PageQuery:
    """Set the namespace: of the query, otherwise the key's own or `default`; Forbidden if it is not the key's."""
    namespace = query.namespace or principal.namespace or DEFAULT
    check_namespace(principal, namespace)
    return query._replace(namespace=namespace)
