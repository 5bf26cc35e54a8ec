"""Learned charges on a real store: before weights, by the values of `learn_by`, kept while idle, known to new keys."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from limiter.store import keys
from limiter.store.keys import Slot
from tests.support.nodes import until
from tests.support.servers import Server
from tests.support.steered import Look, policies
from tests.support.traffic import Traffic, steering, traffic

READ, WRITE = {"operation": "read"}, {"operation": "write"}
GET, SCAN = {"operation": "get", "customer": "c1"}, {"operation": "scan", "customer": "c1"}


async def charged(callers: Traffic, descriptor: dict[str, str], *, work: float) -> float:
    await callers.ask(descriptor, work=work)
    return callers.charged


async def come_to(callers: Traffic, *calls: tuple[dict[str, str], float]) -> None:
    """Send some of each until each is charged what it costs."""
    async with asyncio.timeout(30), AsyncExitStack() as flows:
        for descriptor, work in calls:
            await flows.enter_async_context(callers.flowing(descriptor, rate=40, work=lambda work=work: work))  # type: ignore[misc]
        for descriptor, work in calls:
            while abs(await charged(callers, descriptor, work=work) - work) > 0.1 * work:
                pass


async def test_w15_what_is_learned_is_before_weights(valkey: Server) -> None:
    """Reads and writes of 4 units each, a write weighing 3: both are charged 4, not a read 8 and a write 2.7."""
    weighed = {"name": "io", "match": {}, "rate": 1e5, "charge": "learned", "weights": {"operation": {"write": 3}}}
    limits = policies(weighed)
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        await come_to(callers, (READ, 4.0), (WRITE, 4.0))


async def test_w15_values_of_learn_by_have_a_charge_each(valkey: Server) -> None:
    """Gets of 1 and scans of 500 in one bucket; and a new key of the policy starts from what the others cost."""
    apart = {
        "name": "rows", "match": {}, "per": ["customer"], "rate": 1e6, "charge": "learned", "learn_by": ["operation"]
    }  # fmt: skip
    limits, look = policies(apart), Look(valkey)
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        await come_to(callers, (GET, 1.0), (SCAN, 500.0))
        client = valkey.client()
        await until(lambda: client.exists(keys.memory(Slot().prefix, "rows")), within_s=10)
        fresh = {"operation": "scan", "customer": "c2"}
        await callers.ask(fresh, work=500.0)
        await until(lambda: (found := look.record("rows:c2")) is not None and len(found.learned) == 2, within_s=10)
        assert await charged(callers, fresh, work=500.0) == pytest.approx(500, rel=0.2)
        other = {"operation": "get", "customer": "c2"}
        assert await charged(callers, other, work=1.0) == pytest.approx(1, rel=0.2), "though c2 never did one"


async def test_r15_what_was_learned_survives_the_bucket(valkey: Server) -> None:
    """A record goes after ten idle minutes; what was learned of it stays for a day."""
    limits, look = policies({"name": "io", "match": {}, "rate": 1e5, "charge": "learned"}), Look(valkey)
    client = valkey.client()
    bucket, state = keys.bucket(Slot().prefix, "io"), keys.state(Slot().prefix, "io")
    async with traffic(valkey.url, limits) as callers:
        async with steering(valkey.url, limits):
            await come_to(callers, (READ, 8.0))
        left_s, kept_s = client.ttl(bucket), client.ttl(state)
        assert isinstance(left_s, int)
        assert isinstance(kept_s, int)
        assert kept_s > left_s + 80_000
        client.delete(bucket)
        client.delete(keys.memory(Slot().prefix, "io"))
        async with steering(valkey.url, limits):
            await callers.ask(READ, work=8.0)
            await until(lambda: (found := look.record("io")) is not None and found.charge > 0, within_s=10)
            assert await charged(callers, READ, work=8.0) == pytest.approx(8, rel=0.1)


async def test_r15_a_new_key_starts_with_the_cap_of_what_the_others_cost(valkey: Server) -> None:
    limits = policies({"name": "capped", "match": {}, "per": ["customer"], "rate": 100, "mechanism": "requests"})
    look = Look(valkey)
    async with steering(valkey.url, limits), traffic(valkey.url, limits) as callers:
        async with callers.flowing({"customer": "c1"}, rate=30, work=lambda: 50.0):
            await until(lambda: 0 < look.cap("capped:c1") < 3, within_s=30)
            client = valkey.client()
            await until(lambda: client.exists(keys.memory(Slot().prefix, "capped")), within_s=10)
        await callers.ask({"customer": "c2"}, work=50.0)
        await until(lambda: 0 < look.cap("capped:c2") < 3.5, within_s=5)
        memory = look.memory("capped:c2")
        assert memory is None or memory.reasons[0].rule == "start"
