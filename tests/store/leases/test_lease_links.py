"""Leases over the store's link: long lists in pages, a cluster whose slots move, a replica that takes over (B8)."""

from pathlib import Path

import pytest
from redis.crc import key_slot

from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk, LeaseWant
from limiter.model.bucket.lending import LendStatus, LendTerms, Said
from limiter.store.clock import StoreClock
from limiter.store.keys import Slot
from limiter.store.leases import lease_store
from limiter.store.leases.lease_store import LeaseStore, lease_id
from limiter.store.link.connect import open_link
from limiter.store.store_errors import StoreError
from tests.support import eventually_async
from tests.support.servers import Cluster, Server, start_cluster

LENDS = Params(flags=Flags.LENDS, committed=1000.0, capacity=1000.0, debt_max=1e4, lending=LendTerms(lease_us=60e6))


async def lend(store: LeaseStore, slot: Slot, holder: str, number: int) -> LeaseAnswer:
    ask = LeaseAsk(
        lease_id(slot, holder, ["limit"]),
        float(number),
        (LeaseWant("limit", LENDS, Said(held=1.0, wanted=10.0)),),
        taken=number - 1.0,
    )
    return await store.lend(slot, ask, holder=holder, timeout_s=5)


async def test_a_long_list_of_leases_is_read_in_pages(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAGE", 4), ("LISTED_MAX", 9), ("LOOKED_AT_MAX", 12)):
        monkeypatch.setattr(lease_store, name, value)
    link, slot = await open_link(valkey.url), Slot()
    store = LeaseStore(link, StoreClock())
    holders = {f"h{number}" for number in range(14)}
    for holder in sorted(holders):
        await lend(store, slot, holder, 1)
    listed = [one.holder for one in await store.listed(slot)]
    assert len(listed) == len(set(listed)) == 9
    monkeypatch.setattr(lease_store, "LISTED_MAX", 100)
    assert len({one.holder for one in await store.listed(slot)}) == 12, "no further than LOOKED_AT_MAX"
    monkeypatch.setattr(lease_store, "LOOKED_AT_MAX", 100)
    assert {one.holder for one in await store.listed(slot)} == holders
    for holder in sorted(holders):  # on whichever page it stands
        assert [one.holder for one in await store.listed(slot, is_wanted=lambda one: one.holder == holder)] == [holder]  # noqa: B023
    await link.aclose()


async def test_leases_are_kept_on_a_cluster_whose_slots_move(cluster: Cluster) -> None:
    link, slots = await open_link(cluster.url), [Slot(name) for name in ("default", "orders", "carts", "users")]
    store = LeaseStore(link, StoreClock())
    for slot in slots:  # on different nodes
        assert (await lend(store, slot, "one", 1)).status is LendStatus.LENT
    number = key_slot(slots[0].prefix)
    to = next(node for node in cluster.nodes if node is not cluster.owner(number))
    cluster.begin_move(number, to)
    cluster.move_keys(number, to)
    cluster.finish_move(number, to)
    for slot in slots:
        assert (await lend(store, slot, "one", 2)).status is LendStatus.LENT
        (held,) = await store.listed(slot)
        assert (held.holder, held.row.number) == ("one", 2.0)
    await link.aclose()


@pytest.mark.slow
async def test_f_s5_a_lease_is_renewed_after_a_failover(tmp_path: Path) -> None:
    """What the replica knew goes on: the lease, and all that is lent to others."""
    with start_cluster("valkey", tmp_path, replicas_per_primary=1) as cluster:
        assert isinstance(cluster, Cluster)
        link, slot = await open_link(cluster.url), Slot()
        store = LeaseStore(link, StoreClock())
        for holder in ("one", "two"):
            assert (await lend(store, slot, holder, 1)).status is LendStatus.LENT
        owner = cluster.owner(key_slot(slot.prefix))
        assert owner.command("WAIT", 1, 5000) == 1
        owner.kill()
        renewed = await eventually_async(lambda: lend(store, slot, "one", 2), within_s=30, ignoring=StoreError)
        assert renewed.status is LendStatus.LENT
        assert {held.holder for held in await store.listed(slot)} == {"one", "two"}
        parts = sum(held.row.parts[0].capacity for held in await store.listed(slot))
        assert renewed.slices[0].balance <= 1000.0 * (1.0 - parts) + 1e-6
    await link.aclose()
