"""Which page of a partition's buckets a caller wants to see."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query

from limiter.model.policy import PARTITIONS_MAX
from limiter.store.inspect import PageQuery

Text = Annotated[str, Query(max_length=256)]


def _page_query(
    namespace: Text = "default",
    partition: Annotated[int, Query(ge=0, lt=PARTITIONS_MAX)] = 0,
    policy: Annotated[str | None, Query(max_length=64)] = None,
    contains: Text = "",
    cursor: Annotated[str, Query(max_length=8192)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> PageQuery:
    return PageQuery(namespace, partition, policy, contains, cursor, limit)


Page = Annotated[PageQuery, Depends(_page_query)]
