"""Counting the nodes that live: by the store's clock, and without the store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from limiter.store import registry as registries
from limiter.store.clock import StoreClock
from limiter.store.keys import NODES
from limiter.store.link.connect import Link, open_link
from limiter.store.registry import GONE_US, NodeRegistry
from limiter.store.store_errors import StoreUnavailable
from tests.support.nodes import until
from tests.support.servers import Cluster, Server, running


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    link = await open_link(server.url)
    yield link
    await link.aclose()


def registry(link: Link) -> NodeRegistry:
    return NodeRegistry(link, StoreClock())


def now_us(server: Server) -> int:
    seconds, microseconds = server.command("TIME")
    return int(seconds) * 1_000_000 + int(microseconds)


async def test_nodes_count_each_other(link: Link) -> None:
    one, two = registry(link), registry(link)
    assert one.count == 1, "nobody has been asked yet"
    await one.beat()
    await two.beat()
    assert (one.count, two.count) == (1, 2)
    await one.beat()
    assert (one.count, two.count) == (2, 2)


async def test_a_node_that_leaves_is_gone_at_once(link: Link) -> None:
    one, two = registry(link), registry(link)
    await two.beat()
    await two.leave()
    await one.beat()
    assert one.count == 1


async def test_a_node_that_fell_silent_is_gone_after_a_few_seconds(link: Link, server: Server) -> None:
    one = registry(link)
    server.command("ZADD", NODES, now_us(server) - GONE_US + 2_000_000, "just now")
    server.command("ZADD", NODES, now_us(server) - GONE_US - 1, "long gone")
    await one.beat()
    assert one.count == 2
    assert server.command("ZSCORE", NODES, "long gone") is None


async def test_a_store_whose_clock_was_set_back_forgets_the_future(link: Link, server: Server) -> None:
    one = registry(link)
    server.command("ZADD", NODES, now_us(server) + 3_600_000_000, "from the future")
    await one.beat()
    assert one.count == 1


async def test_the_count_survives_the_loss_of_the_store(tmp_path: Path) -> None:
    """B3: the share of each node stays what it was."""
    with running("valkey", tmp_path) as server:
        link = await open_link(server.url)
        one, two = registry(link), registry(link)
        await two.beat()
        await one.beat()
        server.stop()
        with pytest.raises(StoreUnavailable):
            await one.beat()
        assert one.count == 2
        await one.leave()
        await link.aclose()


async def test_the_stores_clock_becomes_known(link: Link, server: Server) -> None:
    clock = StoreClock()
    await NodeRegistry(link, clock).beat()
    assert abs(clock.now_us() - now_us(server)) < 5_000_000


async def test_running_beats_again_and_again_and_leaves_at_the_end(
    link: Link, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registries, "BEAT_S", 0.01)
    one, other = registry(link), registry(link)
    task = asyncio.create_task(one.run())
    await until(lambda: server.command("ZCARD", NODES) == 1)
    server.command("SET", NODES, "foreign")  # whatever happens to the key, it goes on
    server.command("DEL", NODES)
    await until(lambda: server.command("ZCARD", NODES) == 1)
    await other.beat()
    await until(lambda: one.count == 2)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert server.command("ZRANGE", NODES, 0, -1) == [other.name.encode()]


async def test_nodes_are_counted_on_a_cluster(cluster: Cluster) -> None:
    link = await open_link(cluster.url)
    one, two = registry(link), registry(link)
    await one.beat()
    await two.beat()
    assert two.count == 2
    await link.aclose()
