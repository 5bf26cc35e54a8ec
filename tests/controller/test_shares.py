"""Limits divided over partitions: shares follow demand, and never sum to more than the limit (B5, R9)."""

from typing import Any

import pytest

from limiter.model.policy.policy_set import PolicySet
from limiter.store import keys
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from limiter.store.policies.policy_store import PolicyStore
from tests.support.nodes import until
from tests.support.partitions import TEN, customer_in, shares
from tests.support.servers import Cluster, Server
from tests.support.steered import Look, policies
from tests.support.traffic import Traffic, steering, traffic


def divided(**more: Any) -> dict[str, Any]:
    return {"name": "all", "match": {}, "rate": 200, "capacity": "500ms", **more}


def limits_of(**more: Any) -> PolicySet:
    return policies(divided(**more), default=TEN)


async def follow(where: Server | Cluster, limits: PolicySet, callers: Traffic) -> None:
    """Nine tenths of the demand in one partition: its share follows, and the sum stays."""
    most, least = customer_in(limits, 3), customer_in(limits, 7)
    sums: list[float] = []

    def has_followed() -> bool:
        held = shares(where, limits)
        sums.append(sum(held))
        return held[3] > 0.7 and 0.01 < held[7] < 0.2

    async with (
        steering(where.url, limits),
        callers.flowing(most, rate=180, work=lambda: 1.0),
        callers.flowing(least, rate=20, work=lambda: 1.0),
    ):
        await until(has_followed, within_s=30)
    assert max(sums) <= 1 + 1e-9


KINDS: dict[str, dict[str, Any]] = {
    "work": {"capacity": "500ms"},
    "requests": {"mechanism": "requests", "steering": {"initial": "C"}},
    "counted": {"count": "requests", "capacity": "500ms"},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_b5_shares_follow_demand(valkey: Server, kind: str) -> None:
    limits = policies({"name": "all", "match": {}, "rate": 200, **KINDS[kind]}, default=TEN)
    async with traffic(valkey.url, limits) as callers:
        await follow(valkey, limits, callers)


async def test_b5_shares_follow_demand_on_a_cluster(cluster: Cluster) -> None:
    limits = limits_of()
    async with traffic(cluster.url, limits) as callers:
        await follow(cluster, limits, callers)


async def test_b5_a_new_owner_goes_on_from_what_is_held(valkey: Server) -> None:
    limits = limits_of()
    most = customer_in(limits, 3)
    sums: list[float] = []

    def goes_beyond(share: float) -> bool:
        held = shares(valkey, limits)
        sums.append(sum(held))
        return held[3] > share

    async with traffic(valkey.url, limits) as callers, callers.flowing(most, rate=180, work=lambda: 1.0):
        for share in (0.7, 0.8):
            async with steering(valkey.url, limits):
                await until(lambda share=share: goes_beyond(share), within_s=30)  # type: ignore[misc]
            assert goes_beyond(0.7), "what was lent stays lent while nobody owns the partitions"
    assert max(sums) <= 1 + 1e-9


async def test_little_demand_lends_nothing(valkey: Server) -> None:
    """A bucket is made in a partition only to hold a share, and nobody needs one here."""
    limits = limits_of()
    async with steering(valkey.url, limits) as controller, traffic(valkey.url, limits) as callers:
        async with callers.flowing(customer_in(limits, 3), rate=5, work=lambda: 1.0):
            await until(lambda: controller.stats.buckets > 20, within_s=30)
        assert [Look(valkey, Slot("default", partition)).record("all") is not None for partition in range(10)] == [
            partition == 3 for partition in range(10)
        ]


async def test_r9_another_number_of_partitions_begins_with_equal_shares(valkey: Server) -> None:
    limits = limits_of()
    four = policies(divided(), default={**TEN, "partitions": 4})
    link = await open_link(valkey.url)
    async with steering(valkey.url, limits) as controller, traffic(valkey.url, limits) as callers:
        async with callers.flowing(customer_in(limits, 3), rate=180, work=lambda: 1.0):
            await until(lambda: shares(valkey, limits)[3] > 0.5, within_s=30)
        callers.enforce(four)
        await PolicyStore(link).apply(four, who="test")
        await until(lambda: controller.owned == [Slot("default", partition) for partition in range(4)])
        async with callers.flowing(customer_in(four, 1), rate=180, work=lambda: 1.0):
            look = Look(valkey, Slot("default", 1))
            await until(lambda: (found := look.record("all")) is not None and found.committed > 140, within_s=30)
    await link.aclose()


async def test_f_p8_a_partition_that_is_taken_anew_keeps_its_share(valkey: Server) -> None:
    """A failover may lose its lease. Until it is known again what is asked for there, nothing is given to others."""
    limits = limits_of()
    most, least = customer_in(limits, 3), customer_in(limits, 7)
    held: list[float] = []
    async with (
        steering(valkey.url, limits) as controller,
        traffic(valkey.url, limits) as callers,
        callers.flowing(most, rate=180, work=lambda: 1.0),
        callers.flowing(least, rate=20, work=lambda: 1.0),
    ):
        await until(lambda: shares(valkey, limits)[3] > 0.7, within_s=30)
        valkey.command("DEL", keys.lease(Slot("default", 3).prefix))
        await until(lambda: controller.stats.leases_lost == 1)

        def have_run(cycles: int) -> bool:
            held.append(shares(valkey, limits)[3])
            return controller.stats.cycles >= cycles

        await until(lambda cycles=controller.stats.cycles + 100: have_run(cycles), within_s=30)  # type: ignore[misc]
        assert len(controller.owned) == 10
    assert min(held) > 0.6
