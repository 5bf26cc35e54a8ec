"""Live buckets over HTTP: what is left in them, and what they have seen."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from api.auth import check_namespace
from api.openapi import BUCKETS
from api.responses import admit, engine_of, json_answer, respond
from limiter.model.bucket import Record, refill
from limiter.model.policy import PARTITIONS_MAX
from limiter.store import keys
from limiter.store.inspect import TIMEOUT_S
from limiter.store.inspect import list_buckets as list_page

router = APIRouter(tags=["buckets"])

Text = Annotated[str, Query(max_length=256)]


@router.get("/v1/buckets", **BUCKETS)
async def list_buckets(
    request: Request,
    namespace: Text = "default",
    partition: Annotated[int, Query(ge=0, lt=PARTITIONS_MAX)] = 0,
    policy: Annotated[str | None, Query(max_length=64)] = None,
    contains: Text = "",
    cursor: Annotated[str, Query(max_length=8192)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """A page of the buckets in one partition; the next one with its `cursor`, until that is empty.

    Names are as in the store: policy, then the values of its key, percent-encoded.
    """
    check_namespace(admit(request, "view"), namespace)
    link = engine_of(request).link
    seconds, microseconds = await link.call(keys.PROBE, "TIME", timeout_s=TIMEOUT_S)
    now_us = int(seconds) * 1_000_000 + int(microseconds)
    page = await list_page(link, namespace, partition, policy=policy, contains=contains, cursor=cursor, limit=limit)
    document = {
        "buckets": [_shown(name, record, now_us) for name, record in page.buckets],
        "cursor": page.cursor,
        "unreadable": page.unreadable,
    }
    return respond(json_answer(document))


def _shown(name: str, record: Record, now_us: int) -> dict[str, Any]:
    """A bucket as it would be found now."""
    refill(record, now_us)
    ended = record.is_quota and now_us >= record.rate
    return {
        "bucket": name,
        "policy": name.partition(":")[0],
        "mechanism": "quota" if record.is_quota else "requests" if record.counts_requests else "work",
        "balance": record.capacity if ended else record.balance,
        "capacity": record.capacity,
        "rate": 0.0 if record.is_quota else record.rate,
        "updated_ms": record.updated_us / 1000,
        "requests": record.requests,
        "admitted": record.admitted,
        "refused": record.refused,
        "work_charged": record.work_charged,
        "work_settled": record.work_settled,
        "settles": record.settles,
        "uncollected": record.uncollected,
    }
