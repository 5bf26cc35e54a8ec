"""Listening to a channel: over every kind of link, and when the way is lost."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest
from redis.exceptions import NoPermissionError

from limiter.store.link import server_connection
from limiter.store.link.connect import open_link
from limiter.store.store_errors import StoreRefused, StoreUnavailable
from tests.support import eventually_async
from tests.support.proxy import Proxy
from tests.support.servers import Cluster, Sentinels, Server, free_port, start_sentinels

CHANNEL = b"hg:news"
SOON_S = 10.0


@asynccontextmanager
async def listening(url: str) -> AsyncIterator[AsyncGenerator[bytes]]:
    """A subscription that stands."""
    link = await open_link(url)
    try:
        async with aclosing(link.listen(CHANNEL)) as messages:
            assert await soon(messages) == b"", "the subscription stands"
            yield messages
    finally:
        await link.aclose()


async def soon(messages: AsyncGenerator[bytes]) -> bytes:
    async with asyncio.timeout(SOON_S):
        return await anext(messages)


async def test_published_messages_are_heard_in_order(server: Server) -> None:
    async with listening(server.url) as messages:
        for text in (b"one", b"", b"\x00\xff"):
            server.command("PUBLISH", CHANNEL, text)
        assert [await soon(messages) for _ in range(3)] == [b"one", b"", b"\x00\xff"]


async def test_on_a_cluster_any_node_may_publish(cluster: Cluster) -> None:
    async with listening(cluster.url) as messages:
        for number, node in enumerate(cluster.nodes):
            node.command("PUBLISH", CHANNEL, f"from {number}")
            assert await soon(messages) == f"from {number}".encode()


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    group = start_sentinels("valkey", tmp_path_factory.mktemp("sentinels"))
    try:
        yield group
    finally:
        group.close()


async def test_under_sentinel_the_primary_is_heard(sentinels: Sentinels) -> None:
    async with listening(sentinels.url) as messages:
        sentinels.primary.command("PUBLISH", CHANNEL, "news")
        assert await soon(messages) == b"news"
        sentinels.primary.command("CLIENT", "KILL", "TYPE", "pubsub")
        with pytest.raises(StoreUnavailable):
            await soon(messages)


async def test_a_lost_connection_is_reported_and_a_new_one_can_be_made(valkey: Server) -> None:
    for _ in range(2):
        async with listening(valkey.url) as messages:
            valkey.command("CLIENT", "KILL", "TYPE", "pubsub")
            with pytest.raises(StoreUnavailable):
                await soon(messages)


async def test_on_a_cluster_a_lost_connection_is_reported(cluster: Cluster) -> None:
    async with listening(cluster.url) as messages:
        for node in cluster.nodes:
            node.command("CLIENT", "KILL", "TYPE", "pubsub")
        with pytest.raises(StoreUnavailable):
            await soon(messages)


async def test_a_server_that_is_away_is_reported() -> None:
    link = await open_link(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnavailable):
        await soon(link.listen(CHANNEL))
    await link.aclose()


async def test_a_quiet_channel_is_no_dead_one(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "LISTEN_PING_S", 0.02)
    async with Proxy(valkey.port) as proxy, listening(proxy.url) as messages:
        waiting = asyncio.ensure_future(soon(messages))
        begun = proxy.requests

        async def asked_a_few_times() -> bool:
            return proxy.requests >= begun + 3

        await eventually_async(asked_a_few_times)
        valkey.command("PUBLISH", CHANNEL, "news")
        assert await waiting == b"news"


async def test_a_dead_connection_that_nobody_closes_is_found_out(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "LISTEN_PING_S", 0.1)
    async with Proxy(valkey.port) as proxy, listening(proxy.url) as messages:
        proxy.mode = "stall"
        with pytest.raises(StoreUnavailable, match="silent"):
            await soon(messages)


async def test_closing_the_link_ends_it(valkey: Server) -> None:
    link = await open_link(valkey.url)
    messages = link.listen(CHANNEL)
    await soon(messages)
    waiting = asyncio.ensure_future(soon(messages))
    await asyncio.sleep(0)
    await link.aclose()
    with pytest.raises(StoreUnavailable):
        await waiting
    with pytest.raises(StoreRefused, match="closed"):
        await soon(link.listen(CHANNEL))


async def test_the_end_of_listening_leaves_no_connection_behind(valkey: Server) -> None:
    link = await open_link(valkey.url)
    async with aclosing(link.listen(CHANNEL)) as messages:
        await soon(messages)

    async def nobody_listens() -> bool:
        return bool(valkey.command("PUBLISH", CHANNEL, "news") == 0)

    await eventually_async(nobody_listens)
    await link.aclose()


async def test_a_channel_without_the_right_to_hear_it_is_reported(valkey: Server) -> None:
    valkey.command("ACL", "SETUSER", "deaf", "reset", "on", ">word", "~*", "+@all", "resetchannels")
    link = await open_link(f"redis://deaf:word@127.0.0.1:{valkey.port}")
    try:
        with pytest.raises(NoPermissionError):
            await soon(link.listen(CHANNEL))
    finally:
        valkey.command("ACL", "DELUSER", "deaf")
        await link.aclose()
