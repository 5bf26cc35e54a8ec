"""Live buckets over HTTP: their balances and counts."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.routes.documentation.answers import Bucket, BucketPage, OverloadState
from api.routes.documentation.openapi import BUCKETS
from api.routes.pages import Page, placed
from api.routes.responses import admit, engine_of, json_answer, respond
from limiter.model.bucket.bucket import Record, refill
from limiter.model.overload.shedding import CLASSES, Shedding, State, share_told
from limiter.model.policy.limit import Limit, policy_of
from limiter.store import inspect

router = APIRouter(tags=["buckets"])


@router.get("/v1/buckets", **BUCKETS)
async def list_buckets(request: Request, query: Page) -> Response:
    """Return a page of the live buckets in one partition. Ask for the next page with its `cursor`, until that is empty.

    A bucket's name is its policy, then the values of its key, percent-encoded, as in the store.
    """
    query = placed(query, admit(request, "view"))
    engine = engine_of(request)
    link = engine.link
    now_us = await inspect.now_us(link)
    page = await inspect.list_buckets(link, query)
    document: BucketPage = {
        "buckets": [
            _shown(query.namespace, name, record, now_us, engine.decider.planner.find(query.namespace, name))
            for name, record in page.buckets
        ],
        "cursor": page.cursor,
        "unreadable": page.unreadable,
    }
    return respond(json_answer(document))


def _shown(namespace: str, name: str, record: Record, now_us: int, limit: Limit | None) -> Bucket:
    """Return a bucket with its balance as of now."""
    refill(record, now_us)
    counts_requests = record.counts_requests or (limit is not None and limit.counts)
    ended = record.is_quota and now_us >= record.rate
    bucket: Bucket = {
        "namespace": namespace,
        "bucket": name,
        "policy": policy_of(name),
        "mechanism": "quota" if record.is_quota else "requests" if counts_requests else "work",
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
        "second_attempts": record.second_attempts,
        "further_attempts": record.further_attempts,
    }
    if record.slots is not None:
        bucket["in_flight"] = record.slots.count
    if record.shedding is not None:
        bucket["overload"] = _shown_shedding(record.shedding)
    return bucket


def _shown_shedding(known: Shedding) -> OverloadState:
    """Return the state of overload control for a bucket, by class."""
    return {
        "quality": known.quality,
        "overloaded": known.state == State.OVERLOADED,
        "state": State(int(known.state)).word,
        "classes": {
            criticality: {
                "refused_share": share_told(known, number),
                "rate": known.rates[number],
                "limit": known.limits[number],
                "asked": known.asked[number],
                "refused": known.refused[number],
                "timed": known.timed[number],
                "late": known.late[number],
            }
            for number, criticality in enumerate(CLASSES)
        },
    }
