"""Nodes that watch the policy store: they receive every change, with and without notifications."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from limiter.model.policy.policy_set import PolicySet
from limiter.store import keys
from limiter.store.link.connect import Link, open_link
from limiter.store.policies import policy_store
from limiter.store.policies.policy_store import PolicyStore, StoredPolicies
from tests.support.nodes import until
from tests.support.policies import policy, rates, watching
from tests.support.servers import Server, running


def has_received(received: list[StoredPolicies], revision: int) -> Callable[[], bool]:
    return lambda: bool(received) and received[-1].revision == revision


async def test_a_node_receives_all_policies_and_then_each_change(store: PolicyStore, link: Link) -> None:
    await store.put(policy("a"), who="ada")
    async with watching(PolicyStore(link)) as received:
        await until(has_received(received, 1))
        await store.put(policy("b"), who="ada")
        await until(has_received(received, 2))
        await store.delete("default", "a", who="ada")
        await until(has_received(received, 3))
    assert [sorted(rates(stored)) for stored in received] == [["a"], ["a", "b"], ["b"]]


async def test_a_notification_is_enough(store: PolicyStore, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_store, "POLL_S", 1000.0)
    async with watching(store) as received:
        await until(has_received(received, 0))
        await until(lambda: server.command("PUBSUB", "NUMSUB", keys.POLICIES_CHANNEL)[1] == 1)
        await store.put(policy(), who="ada")
        await until(has_received(received, 1), within_s=1.0)


class Deaf:
    """A link over which no notification comes."""

    def __init__(self, link: Link) -> None:
        self.call = link.call
        self.send = link.send
        self.aclose = link.aclose

    async def listen(self, channel: bytes) -> AsyncGenerator[bytes]:
        raise ResponseError("NOPERM not this channel")
        yield b""


async def test_without_notifications_a_node_finds_a_change_within_a_second(store: PolicyStore, link: Link) -> None:
    async with watching(PolicyStore(Deaf(link))) as received:
        await until(has_received(received, 0))
        await store.put(policy(), who="ada")
        await until(has_received(received, 1), within_s=1.0)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A Valkey that this test may mistreat, with an append-only file."""
    with running("valkey", tmp_path, config={"appendonly": "yes"}) as server:
        yield server


async def test_watching_survives_the_loss_of_the_store(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """F-S2, F-S3: it begins without a store, and goes on when one is back."""
    own_server.stop()
    link = await open_link(own_server.url)
    store = PolicyStore(link)
    async with watching(store) as received:
        await until(lambda: "policies cannot be read from the store" in caplog.text)
        assert received == []
        own_server.start()
        await until(has_received(received, 0))
        await store.put(policy(), who="ada")
        await until(has_received(received, 1))
        own_server.restart()
        await store.put(policy("b"), who="ada")
        await until(has_received(received, 2))
    assert len(received) == 3, "a store that merely went away is no change"
    assert caplog.text.count("policies cannot be read from the store") <= 2
    await link.aclose()


async def test_f_s10_a_store_that_lost_its_policies_is_reported(store: PolicyStore, server: Server) -> None:
    """F-S10"""
    await store.put(policy("a"), who="ada")
    await store.put(policy("b"), who="ada")
    async with watching(store) as received:
        await until(has_received(received, 2))
        server.command("FLUSHALL")
        await until(has_received(received, 0))
        assert received[-1].policies == PolicySet()


async def test_f_s10_a_store_emptied_and_filled_again_between_two_looks_is_reported(
    store: PolicyStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-S10: the same revision, but of another life."""
    monkeypatch.setattr(policy_store, "POLL_S", 1000.0)
    await store.put(policy("a"), who="ada")
    async with watching(store) as received:
        await until(has_received(received, 1))
        server.command("FLUSHALL")
        await store.put(policy("b"), who="ada")
        await until(lambda: rates(received[-1]) == {"b": 100.0})


async def test_a_node_that_fails_on_a_change_receives_the_next(
    store: PolicyStore, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[int] = []

    async def stumble(stored: StoredPolicies) -> None:
        received.append(stored.revision)
        raise RuntimeError("no")

    task = asyncio.create_task(store.watch(stumble))
    await until(lambda: received == [0])
    await store.put(policy(), who="ada")
    await until(lambda: received == [0, 1])
    assert "could not be taken over" in caplog.text
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
