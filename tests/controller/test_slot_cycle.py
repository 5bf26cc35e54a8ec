"""The cycle of one slot: with more active buckets than one cycle looks at, each has its turn."""

import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from limiter.controller import slot_cycle
from limiter.controller.plan import make_plans
from limiter.controller.slot_cycle import Bucket, SlotCycle
from limiter.model.bucket import in_flight
from limiter.model.bucket.bucket import Params, fresh
from limiter.model.overload import shedding
from limiter.model.policy.policy_set import PolicySet
from limiter.store.keys import Slot
from limiter.store.layout import pack_record, read_record
from limiter.store.link.connect import open_link
from limiter.store.steering import Steering
from tests.support.servers import Server
from tests.support.steered import capped, policies
from tests.support.traffic import traffic

CAPPED = policies(capped(per=["customer"]))
GUARDED = policies(
    {"name": "guarded", "match": {}, "per": ["customer"], "rate": 1e6, "overload": {"response_time": {}}},
)


@asynccontextmanager
async def cycling(valkey: Server, limits: PolicySet) -> AsyncIterator[SlotCycle]:
    """A cycle that runs whenever it is told to."""
    link = await open_link(valkey.url)
    steers = Steering(link, lease_ms=60_000)
    lease = await steers.take(Slot())
    assert lease is not None
    yield SlotCycle(steers, Slot(), lease, make_plans(limits)["default"], cycle_s=0.1)
    await link.aclose()


def customers(first: int, last: int) -> list[dict[str, str]]:
    return [{"customer": f"c{number}"} for number in range(first, last)]


async def test_more_buckets_than_a_cycle_looks_at_have_fair_turns(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were used first come first, and one that is used again and again gets no second turn before others."""
    monkeypatch.setattr(slot_cycle, "LOOKED_MAX", 10)
    async with traffic(valkey.url, CAPPED) as callers, cycling(valkey, CAPPED) as cycle:
        for descriptor in customers(0, 25):
            await callers.ask(descriptor, work=1.0)
        assert await cycle.run() == 10
        for descriptor in customers(0, 10):
            await callers.ask(descriptor, work=1.0)
        assert await cycle.run() == 10
        assert set(cycle.buckets) == {f"capped:c{number}" for number in range(20)}
        assert await cycle.run() == 10
        assert len(cycle.buckets) == 25
        assert [await cycle.run() for _ in range(2)] == [5, 0]


async def test_buckets_whose_overload_control_is_due_wait_for_their_turn_with_the_others(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is in flight, so each is due in every cycle."""
    monkeypatch.setattr(slot_cycle, "LOOKED_MAX", 10)
    async with traffic(valkey.url, GUARDED) as callers, cycling(valkey, GUARDED) as cycle:
        for descriptor in customers(0, 25):
            await callers.hold(descriptor, work=1.0)
        assert [await cycle.run() for _ in range(3)] == [10, 10, 10]
        assert len(cycle.buckets) == 25
        seen_us = {name: bucket.seen_us for name, bucket in cycle.buckets.items()}
        assert [await cycle.run() for _ in range(3)] == [10, 10, 10]
        assert all(bucket.seen_us > seen_us[name] for name, bucket in cycle.buckets.items())


async def test_with_many_active_buckets_their_states_are_stored_some_at_a_time_and_in_turns(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bucket is looked at in each cycle, so each state changes again before the others were stored."""
    monkeypatch.setattr(slot_cycle, "TURNS", 1)
    monkeypatch.setattr(slot_cycle, "STATES_MAX", 10)
    async with traffic(valkey.url, GUARDED) as callers, cycling(valkey, GUARDED) as cycle:
        for descriptor in customers(0, 25):
            await callers.hold(descriptor, work=1.0)
        stored = []
        for _ in range(5):
            assert await cycle.run() == 25
            stored.append(len(await cycle._steering.states(Slot(), list(cycle.buckets))))
        assert stored == [0, 10, 20, 25, 25]


def test_a_used_bucket_with_overload_control_takes_about_a_kilobyte_of_memory() -> None:
    terms, number_of_buckets = make_plans(GUARDED)["default"].terms["guarded"], 100
    assert terms.overload is not None
    raws = list(records_of_a_used_bucket(terms.limit.params(1_000_000_000)))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        buckets = [Bucket(f"guarded:c{number}", terms, None) for number in range(number_of_buckets)]
        for now_us, raw in raws:
            for bucket in buckets:
                record = read_record(raw)
                assert record is not None
                assert bucket.guard is not None
                bucket.guard.step(record, (), terms.overload, now_us=now_us, since_us=0.0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / number_of_buckets < 1500


def records_of_a_used_bucket(params: Params) -> Iterator[tuple[int, bytes]]:
    """The record after each of ten cycles, of each in which a request is in flight and another is settled."""
    record = fresh(params, 1_000_000_000)
    assert record.shedding is not None
    assert record.slots is not None
    assert params.in_flight is not None
    in_flight.add(record.slots, params.in_flight, 1.0, 60_000_000)
    for cycle in range(10):
        shedding.ask(record.shedding, 1, 3.0, refused=False)
        shedding.count(record.shedding, 1, latency_ms=100.0 + cycle, expected_ms=1e3, target_ms=1e3)
        yield 1_000_000_000 + cycle * 100_000, pack_record(record)
