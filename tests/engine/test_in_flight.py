"""W18 through the decider: as many reservations at once as the policy says, settled or not."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from limiter.engine.breaker import FAILURES_MAX
from limiter.engine.decider import Decider
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, Refused, SettleRequest
from limiter.model.bucket.in_flight import Slots
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.reading import read_policy_set
from limiter.store.buckets import Buckets
from limiter.store.inspect import PageQuery, list_buckets
from limiter.store.link.connect import Link, open_link
from tests.support.servers import Server


@pytest.fixture
async def link(valkey: Server) -> AsyncIterator[Link]:
    opened = await open_link(valkey.url)
    yield opened
    await opened.aclose()


@pytest.fixture
def decider(link: Link) -> Decider:
    return Decider(Buckets(link), Signer(b"a secret of the tests"), deadline_s=5)


def reports(**more: Any) -> dict[str, Any]:
    return {"name": "reports", "match": {"service": "reports"}, "rate": 1e6, "in_flight": 2} | more


def enforce(decider: Decider, *policies: dict[str, Any]) -> None:
    decider.enforce(read_policy_set({"policies": list(policies)}))


async def ask(decider: Decider, *, key: str | None = None, **more: Any) -> Decision:
    return await decider.acquire(AcquireRequest({"service": "reports"}, **more), idempotency_key=key)


async def grant(decider: Decider, **more: Any) -> Granted:
    decision = await ask(decider, **more)
    assert isinstance(decision, Granted), decision
    return decision


async def refuse(decider: Decider, **more: Any) -> Refused:
    decision = await ask(decider, **more)
    assert isinstance(decision, Refused), decision
    return decision


async def slots(link: Link, name: str = "reports") -> Slots:
    (found,) = [record.slots for bucket, record in (await list_buckets(link, PageQuery())).buckets if bucket == name]
    assert found is not None
    return found


async def test_w18_one_too_many_is_told_why_and_when_to_ask_again_and_a_settle_lets_it_in(decider: Decider) -> None:
    enforce(decider, reports())
    first, _ = await grant(decider), await grant(decider)
    told = await refuse(decider)
    assert (told.policy, told.reason, told.retry, told.retry_after_ms) == ("reports", "in_flight", "after", 1000)
    assert told.detail == "reports: all 2 places for open reservations are taken; each settle frees one"
    assert [limit.passed for limit in told.limits] == [False]
    assert decider.decisions.refused["in_flight"] == 1
    await decider.settle(SettleRequest(first.reservation, 5))
    await grant(decider)


async def test_w18_one_that_nobody_settles_leaves_with_its_time_to_live(decider: Decider) -> None:
    """Its time to live is the server's: nothing sleeps here, the next one is asked for until it is let in."""
    enforce(decider, reports(in_flight=1))
    await grant(decider, ttl_ms=50)
    began_s, asked = time.monotonic(), 0
    while isinstance(await ask(decider, ttl_ms=50), Refused):
        asked += 1
        assert time.monotonic() - began_s < 30
    assert asked > 0
    assert time.monotonic() - began_s >= 0.04


async def test_w18_progress_holds_the_place_and_the_last_word_frees_it(decider: Decider, link: Link) -> None:
    enforce(decider, reports(in_flight=1))
    stream = await grant(decider)
    for work in (1, 2, 2, 3):
        await decider.settle(SettleRequest(stream.reservation, work, final=False))
        await refuse(decider)
    assert (await slots(link)).count == 1
    await decider.settle(SettleRequest(stream.reservation, 3))
    assert (await slots(link)).count == 0


async def test_f_r7_a_repeat_under_its_key_takes_no_second_place_and_is_refused_again_alike(
    decider: Decider, link: Link
) -> None:
    enforce(decider, reports())
    first = await grant(decider, key="once")
    again = await grant(decider, key="once")
    assert (again.replayed, again.reservation) == (True, first.reservation)
    assert (await slots(link)).count == 1
    await grant(decider)
    refused = await refuse(decider, key="other")
    repeated = await refuse(decider, key="other")
    assert (repeated.replayed, repeated.reason, repeated.detail) == (True, "in_flight", refused.detail)


async def test_p11_p5_a_shadow_refuses_nothing_and_a_refusal_elsewhere_takes_no_place(
    decider: Decider, link: Link
) -> None:
    enforce(decider, reports(shadow=True), reports(name="strict", in_flight=3))
    for _ in range(3):
        await grant(decider)
    told = await refuse(decider)
    assert (told.policy, [limit.policy for limit in told.limits if not limit.passed]) == (
        "strict",
        ["reports", "strict"],
    )
    assert ((await slots(link)).count, (await slots(link, "strict")).count) == (2, 3)


async def test_w18_r9_the_limit_is_for_the_whole_and_each_partition_has_its_share(decider: Decider, link: Link) -> None:
    spread = {"partitions": 2, "partition_by": ["customer"]}
    decider.enforce(read_policy_set({"namespaces": {"default": spread}, "policies": [reports(in_flight=4)]}))
    for customer in ("a", "b", "c", "d", "e", "f", "g", "h"):
        request = AcquireRequest({"service": "reports", "customer": customer})
        answers = [await decider.acquire(request) for _ in range(3)]
        assert any(isinstance(answer, Refused) for answer in answers), "no part has more than two places"
    counts = [
        record.slots.count
        for partition in range(2)
        for _, record in (await list_buckets(link, PageQuery(partition=partition))).buckets
        if record.slots is not None
    ]
    assert counts == [2, 2]


async def test_f_s10_after_the_store_lost_everything_places_begin_anew_and_old_settles_free_none(
    decider: Decider, link: Link, valkey: Server
) -> None:
    enforce(decider, reports())
    old = [await grant(decider) for _ in range(2)]
    valkey.client().flushall()
    await grant(decider)
    for reservation in old:
        await decider.settle(SettleRequest(reservation.reservation, 1))
    assert (await slots(link)).count == 1
    await grant(decider)
    await refuse(decider)


@pytest.mark.parametrize("mode", ["open", "local"])
async def test_w18_what_is_granted_without_the_store_takes_no_place(decider: Decider, link: Link, mode: str) -> None:
    enforce(decider, reports(on_store_failure=mode))
    await grant(decider)
    breaker = decider._store_health.breaker
    for number in range(FAILURES_MAX):
        breaker.fail(time.monotonic() + number, 0.5)
    alone = [await grant(decider) for _ in range(5)]
    assert all(one.degraded for one in alone)
    decider.store_answered()
    for one in alone:
        await decider.settle(SettleRequest(one.reservation, 1))
    assert (await slots(link)).count == 1


async def test_w18_a_quota_may_have_places_too(decider: Decider) -> None:
    enforce(decider, {"name": "reports", "quota": {"work": 1000, "period": "day"}, "in_flight": 1})
    first = await grant(decider)
    assert (await refuse(decider)).reason == "in_flight"
    await decider.settle(SettleRequest(first.reservation, 1))
    await grant(decider)


async def test_w18_a_dry_run_says_what_a_request_would_find(decider: Decider, link: Link) -> None:
    enforce(decider, reports(in_flight=1))
    await grant(decider, dry_run=True)
    await grant(decider)
    assert (await refuse(decider, dry_run=True)).reason == "in_flight"
    assert (await slots(link)).count == 1


async def test_g6_attempts_that_callers_send_are_in_the_record(decider: Decider, link: Link) -> None:
    enforce(decider, reports(in_flight=None), reports(name="counting", in_flight=10))
    for attempt in (1, 2, 3, 7, 2, 2):
        await ask(decider, attempt=attempt)
    for _, record in (await list_buckets(link, PageQuery())).buckets:
        assert (record.requests, record.second_attempts, record.further_attempts) == (6, 3, 2)
