"""The cycle of one slot: with more active buckets than one cycle looks at, each has its turn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from limiter.controller import slot_cycle
from limiter.controller.plan import make_plans
from limiter.controller.slot_cycle import SlotCycle
from limiter.model.policy.policy_set import PolicySet
from limiter.store.keys import Slot
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
