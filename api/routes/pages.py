"""Which page of a partition's buckets a caller wants to see."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query

from api.data.auth import check_namespace
from limiter.api_keys import Principal
from limiter.model.policy.fields.kinds import PARTITIONS_MAX
from limiter.store.inspect import PageQuery
from limiter.store.policies.policy_entries import DEFAULT

Text = Annotated[str, Query(max_length=256)]


def _page_query(
    namespace: Text = "",
    partition: Annotated[int, Query(ge=0, lt=PARTITIONS_MAX)] = 0,
    policy: Annotated[str | None, Query(max_length=64)] = None,
    contains: Text = "",
    cursor: Annotated[str, Query(max_length=8192)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> PageQuery:
    return PageQuery(namespace, partition, policy, contains, cursor, limit)


Page = Annotated[PageQuery, Depends(_page_query)]


def placed(query: PageQuery, principal: Principal) -> PageQuery:
    """A page of the namespace that was asked for, else of the key's own, else of `default`; Forbidden if not its."""
    namespace = query.namespace or principal.namespace or DEFAULT
    check_namespace(principal, namespace)
    return query._replace(namespace=namespace)
