"""Refusals that a node repeats by itself, and reports to the store later: promise 1 and promise 9."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from limiter.engine.decider import Decider
from limiter.model.bucket.contract import AcquireRequest, Granted, Refused, SettleRequest
from limiter.model.bucket.refusals import KEEP_MAX_S
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.reading import read_policy_set
from limiter.store import batcher, flush
from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from tests.support.nodes import PATIENT_S, Watched, until
from tests.support.operations import record_of
from tests.support.servers import Server
from tests.support.stores import ScriptStore

POLICY = {"name": "reads", "match": {"service": "orders"}, "per": ["customer"], "rate": "1/h", "capacity": 10}
LONG_S = 3600.0


@pytest.fixture
async def link(valkey: Server) -> AsyncIterator[Watched]:
    """A way to the store on which calls can be counted."""
    link = Watched(await open_link(valkey.url))
    yield link
    await link.aclose()


@pytest.fixture
async def decider(link: Watched) -> AsyncIterator[Decider]:
    """A node that remembers refusals; its memory lasts as long as a test needs it."""
    buckets = Buckets(link)
    decider = Decider(buckets, Signer(b"a secret of the tests"), deadline_s=PATIENT_S, repeat_s=KEEP_MAX_S)
    decider.enforce(read_policy_set({"policies": [POLICY]}))
    decider.repeater.refusals.keep_s = LONG_S
    yield decider
    decider.repeater.stop()
    await buckets.drain()


def ask(work: float = 5, customer: str = "c1", **more: Any) -> AcquireRequest:
    return AcquireRequest({"service": "orders", "customer": customer}, work=work, **more)


async def refused(decider: Decider, request: AcquireRequest) -> Refused:
    decision = await decider.acquire(request)
    assert isinstance(decision, Refused)
    return decision


async def empty(decider: Decider) -> Granted:
    """Take all that the bucket holds, and more."""
    granted = await decider.acquire(ask(100))
    assert isinstance(granted, Granted)
    return granted


async def test_a_refusal_is_repeated_without_the_store_and_counts_everywhere(
    decider: Decider, link: Watched, valkey: Server
) -> None:
    await empty(decider)
    first = await refused(decider, ask())
    calls = len(link.calls)
    again = [await refused(decider, ask()) for _ in range(20)]
    assert len(link.calls) == calls, "the store was not asked"
    assert again == [first] * 20, "word for word"
    assert (decider.decisions.refused["work"], decider.decisions.repeated) == (21, 20)
    await refused(decider, ask(1, customer="c1"))  # asks for less: the store is asked, and told of the others
    record = record_of(ScriptStore(valkey, Slot()), "reads:c1")
    assert (record.requests, record.refused, record.admitted) == (23, 22, 1)


async def test_repeated_refusals_are_reported_even_without_another_call(decider: Decider, valkey: Server) -> None:
    decider.repeater.refusals.keep_s = KEEP_MAX_S
    await empty(decider)
    for _ in range(10):
        await refused(decider, ask())
    repeated = decider.decisions.repeated
    store = ScriptStore(valkey, Slot())
    await until(lambda: record_of(store, "reads:c1").refused == 10)
    assert record_of(store, "reads:c1").requests == 11
    assert decider.decisions.repeated == repeated, "telling decides nothing"


async def test_more_than_what_was_refused_is_refused_with_its_own_numbers(decider: Decider, link: Watched) -> None:
    """B1: the explanation is of this request."""
    await empty(decider)
    first = await refused(decider, ask(12))
    calls = len(link.calls)
    more = await refused(decider, ask(15))
    assert len(link.calls) == calls
    assert more.detail != first.detail
    assert more.retry_after_ms > first.retry_after_ms


async def test_a_settle_that_gives_back_ends_the_memory(decider: Decider) -> None:
    granted = await empty(decider)
    await refused(decider, ask())
    await refused(decider, ask())
    await decider.settle(SettleRequest(granted.reservation, 0))
    assert isinstance(await decider.acquire(ask()), Granted)


async def test_a_settle_on_the_bucket_that_refuses_longest_ends_the_repetition(decider: Decider, link: Watched) -> None:
    soon = {"name": "a-user", "match": {"user": "*"}, "per": ["user"], "rate": "100/h", "capacity": 10}
    late = {"name": "b-all", "match": {"service": "orders"}, "rate": "1/h", "capacity": 10}
    decider.enforce(read_policy_set({"policies": [soon, late]}))
    of_all = await decider.acquire(AcquireRequest({"service": "orders"}, work=100))
    of_user = await decider.acquire(AcquireRequest({"user": "u1"}, work=100))
    assert isinstance(of_all, Granted)
    assert isinstance(of_user, Granted)
    both = AcquireRequest({"service": "orders", "user": "u1"}, work=5)
    await refused(decider, both)
    await decider.settle(SettleRequest(of_user.reservation, 100))
    calls = len(link.calls)
    await refused(decider, both)
    assert len(link.calls) == calls, "the other one says no as it did"
    await decider.settle(SettleRequest(of_all.reservation, 0))
    calls = len(link.calls)
    await refused(decider, both)
    assert len(link.calls) > calls, "the first one may pass at any time now"


async def test_a_change_of_policies_ends_the_memory(decider: Decider) -> None:
    await empty(decider)
    await refused(decider, ask())
    decider.enforce(read_policy_set({"policies": [{**POLICY, "minimum": -1000, "max_debt": 5000}]}))
    assert isinstance(await decider.acquire(ask()), Granted)


async def test_refusals_from_before_a_change_of_policies_are_reported_before_the_next_acquire(
    decider: Decider, valkey: Server
) -> None:
    await empty(decider)
    for _ in range(3):
        await refused(decider, ask())
    decider.enforce(read_policy_set({"policies": [{**POLICY, "capacity": 1000}]}))
    await refused(decider, ask())
    await decider._buckets.drain()
    record = record_of(ScriptStore(valkey, Slot()), "reads:c1")
    assert (record.refused, record.capacity) == (4, 1000), "the bucket stands on the new terms"


@pytest.mark.parametrize("aside", [{"dry_run": True}, {"criticality": "critical_plus"}])
async def test_requests_that_the_store_might_decide_otherwise_ask_the_store(
    decider: Decider, link: Watched, aside: dict[str, Any]
) -> None:
    decider.enforce(read_policy_set({"policies": [{**POLICY, "reserve": {"critical": "5"}, "max_debt": 0}]}))
    assert isinstance(await decider.acquire(ask(6)), Granted)
    await refused(decider, ask(3))
    calls = len(link.calls)
    await decider.acquire(ask(3, **aside))
    assert len(link.calls) == calls + 1


async def test_an_idempotency_key_is_always_decided_by_the_store(decider: Decider, link: Watched) -> None:
    await empty(decider)
    await refused(decider, ask())
    calls = len(link.calls)
    assert isinstance(await decider.acquire(ask(), idempotency_key="k1"), Refused)
    assert len(link.calls) == calls + 1


async def test_without_the_memory_the_store_is_always_asked(decider: Decider, link: Watched) -> None:
    decider.repeater.refusals.keep_s = 0
    await empty(decider)
    await refused(decider, ask())
    calls = len(link.calls)
    await refused(decider, ask())
    assert len(link.calls) == calls + 1


async def test_a_call_reports_only_refusals_that_have_ended_or_that_it_asks_about(
    decider: Decider, link: Watched
) -> None:
    """Reported with every call, many hot buckets would cost the store as much as acquires on them."""
    for customer in ("c1", "c2"):
        await decider.acquire(ask(100, customer))
        await refused(decider, ask(5, customer))
        await refused(decider, ask(5, customer))
    untold = decider.repeater.refusals.untold
    assert len(untold) == 2
    await decider.acquire(ask(5, "c3"))
    assert len(untold) == 2
    await decider.acquire(ask(1, "c1"))
    assert [refused.buckets for refused in untold.values()] == [["reads:c2"]]


async def test_more_of_several_limits_is_refused_with_its_own_numbers(decider: Decider, link: Watched) -> None:
    """B1: also where several limits answered."""
    shared = {"name": "all", "match": {"service": "orders"}, "rate": "1/h", "capacity": 1000}
    decider.enforce(read_policy_set({"policies": [POLICY, shared]}))
    await empty(decider)
    first = await refused(decider, ask(12))
    calls = len(link.calls)
    more = await refused(decider, ask(15))
    assert len(link.calls) == calls, "the store was not asked"
    assert (first.policy, more.policy, len(more.limits)) == ("reads", "reads", 2)
    assert more.retry_after_ms > first.retry_after_ms


async def test_a_learned_charge_is_refused_in_the_words_of_the_store(decider: Decider, link: Watched) -> None:
    """The node does not know what the store has learned, so it says what the store said."""
    decider.enforce(read_policy_set({"policies": [{**POLICY, "charge": "learned", "reserve": {"sheddable": "50%"}}]}))
    await empty(decider)
    sheddable = AcquireRequest({"service": "orders", "customer": "c1"}, criticality=Criticality.SHEDDABLE)
    first = await refused(decider, AcquireRequest({"service": "orders", "customer": "c1"}))
    calls = len(link.calls)
    again = await refused(decider, sheddable)
    assert len(link.calls) == calls
    assert again.detail == first.detail


async def test_refusals_that_could_not_be_sent_are_reported_later(
    decider: Decider, valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 9: a report has no right to a place that an acquire needs, and is not lost."""
    await empty(decider)
    for _ in range(5):
        await refused(decider, ask())
    monkeypatch.setattr(batcher, "WAITING_MAX", 0)
    monkeypatch.setattr(flush, "OPERATIONS_MAX", 0)
    decider.repeater._tell_all()
    monkeypatch.undo()
    assert decider.repeater.refusals.untold, "put back, for want of room"
    store = ScriptStore(valkey, Slot())
    assert record_of(store, "reads:c1").refused == 1, "only the store's own refusal is counted yet"
    await until(lambda: record_of(store, "reads:c1").refused == 5)
