"""The wire: each call gets its own reply, in order, or an error if there is none (F-S4, F-R16)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from redis.exceptions import NoScriptError, ResponseError

from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import Link, open_link
from limiter.store.link.links import ServerLink
from limiter.store.link.server_connection import ServerConnection, pack
from limiter.store.store_errors import StoreOutOfMemory, StoreRefused, StoreUnavailable
from tests.support.nodes import PATIENT_S, until
from tests.support.operations import ask, look, work_terms
from tests.support.proxy import Proxy
from tests.support.servers import Cluster, Server
from tests.support.stores import ScriptStore

KEY = b"hg:{default/0}:x"
SLOT = Slot("default", 0)
TERMS = work_terms(rate=1e-30, capacity=1000)


@pytest.fixture
async def link(valkey: Server) -> AsyncIterator[Link]:
    async with aclosing(await open_link(valkey.url)) as link:
        await wired(link)
        yield link


async def wired(link: Link) -> None:
    """Wait until a wire stands."""
    replies: list[Any] = []

    def stands() -> bool:
        return link.send(KEY, pack("PING"), replies.append, deadline_s=deadline_s())

    await until(stands)
    await until(lambda: replies)


def deadline_s(within_s: float = PATIENT_S) -> float:
    return asyncio.get_running_loop().time() + within_s


def node_of(link: Link) -> ServerConnection:
    assert isinstance(link, ServerLink)
    return link._node


async def test_many_calls_share_it_and_each_gets_its_own_reply(link: Link) -> None:
    replies: list[Any] = []
    for number in range(100):
        assert link.send(KEY, pack("ECHO", b"%d" % number), replies.append, deadline_s=deadline_s())
    await until(lambda: len(replies) == 100)
    assert replies == [b"%d" % number for number in range(100)]


async def test_an_error_reply_is_the_error_that_call_would_raise(link: Link) -> None:
    replies: list[Any] = []
    for command in (pack("EVALSHA", b"0" * 40, 0), pack("NO-SUCH-COMMAND"), pack("ECHO", b"after")):
        link.send(KEY, command, replies.append, deadline_s=deadline_s())
    await until(lambda: len(replies) == 3)
    assert [type(reply) for reply in replies] == [NoScriptError, ResponseError, bytes]


async def test_a_store_out_of_memory_is_reported_as_such(link: Link, valkey: Server) -> None:
    client, replies = valkey.client(), list[Any]()
    client.config_set("maxmemory", "1")
    try:
        link.send(KEY, pack("SET", KEY, b"x"), replies.append, deadline_s=deadline_s())
        await until(lambda: replies)
    finally:
        client.config_set("maxmemory", "0")
    assert isinstance(replies[0], StoreOutOfMemory)


async def test_a_lost_connection_fails_all_its_calls_and_is_replaced(link: Link, valkey: Server) -> None:
    replies: list[Any] = []
    for _ in range(3):
        link.send(KEY, pack("BLPOP", KEY, 0), replies.append, deadline_s=deadline_s())
    client = valkey.client()
    await until(lambda: int(client.info("clients")["blocked_clients"]) == 1)
    client.client_kill_filter(_type="normal", skipme=True)
    await until(lambda: len(replies) == 3)
    assert [type(reply) for reply in replies] == [StoreUnavailable] * 3
    await wired(link)


async def test_a_reply_that_does_not_come_ends_the_connection_for_everybody_on_it(valkey: Server) -> None:
    async with Proxy(valkey.port) as proxy, aclosing(await open_link(proxy.url)) as link:
        await wired(link)
        proxy.mode = "stall"
        replies: list[Any] = []
        link.send(KEY, pack("PING"), replies.append, deadline_s=deadline_s(0.05))
        link.send(KEY, pack("PING"), replies.append, deadline_s=deadline_s())
        await until(lambda: len(replies) == 2)
        assert [type(reply) for reply in replies] == [StoreUnavailable] * 2
        assert "did not answer in time" in str(replies[0])


async def test_a_closed_link_sends_nothing(valkey: Server) -> None:
    link = await open_link(valkey.url)
    await wired(link)
    await link.aclose()
    assert not link.send(KEY, pack("PING"), lambda _: None, deadline_s=deadline_s())


async def test_dropping_connections_lets_sent_calls_finish(link: Link) -> None:
    replies: list[Any] = []
    link.send(KEY, pack("ECHO", b"before"), replies.append, deadline_s=deadline_s())
    await node_of(link).drop()
    await until(lambda: replies)
    assert replies == [b"before"]
    await wired(link)


async def test_a_read_only_server_is_left(link: Link, valkey: Server) -> None:
    """F-S6: the next connection may find the primary, behind the same address."""
    client, replies = valkey.client(), list[Any]()
    client.replicaof("127.0.0.1", 1)
    try:
        link.send(KEY, pack("SET", KEY, b"x"), replies.append, deadline_s=deadline_s())
        await until(lambda: replies)
        assert isinstance(replies[0], StoreRefused)
        await until(lambda: node_of(link)._wire is None)
    finally:
        client.replicaof("NO", "ONE")


async def test_acquires_go_by_it_and_scripts_that_were_forgotten_are_sent_again(link: Link, valkey: Server) -> None:
    """F-S1: invisible to callers, and debited once."""
    buckets = Buckets(link)
    assert (await buckets.acquire(SLOT, ask(TERMS, charge=1), timeout_s=PATIENT_S)).granted
    valkey.client().script_flush()
    assert (await buckets.acquire(SLOT, ask(TERMS, charge=1), timeout_s=PATIENT_S)).granted
    assert look(ScriptStore(valkey, SLOT), TERMS, 0) == 998
    await buckets.drain()


async def test_a_call_lost_on_the_wire_is_sent_again_with_the_same_id(valkey: Server) -> None:
    """F-S4: the store ran it, the reply was lost: the repeat finds the first reply, and nothing is debited twice."""
    async with Proxy(valkey.port) as proxy, aclosing(await open_link(proxy.url)) as link:
        buckets = Buckets(link)
        await buckets.acquire(SLOT, ask(TERMS, charge=1), timeout_s=PATIENT_S)
        await wired(link)
        proxy.drop_next_reply()
        answer = await buckets.acquire(SLOT, ask(TERMS, charge=1), timeout_s=PATIENT_S)
        assert answer.granted
        assert look(ScriptStore(valkey, SLOT), TERMS, 0) == 998
        await buckets.drain()


async def test_a_cluster_s_redirects_are_followed(cluster: Cluster) -> None:
    """F-S7: a call that the server redirects goes on through the link, with the same id."""
    async with aclosing(await open_link(cluster.url)) as link:
        buckets = Buckets(link)
        for number in range(20):
            slot = Slot(f"tenant{number}", 0)
            assert (await buckets.acquire(slot, ask(TERMS, charge=1), timeout_s=PATIENT_S)).granted
        link._slots = [link._slots[-1]] * len(link._slots)  # type: ignore[attr-defined]
        for number in range(20):
            slot = Slot(f"tenant{number}", 0)
            assert (await buckets.acquire(slot, ask(TERMS, charge=1), timeout_s=PATIENT_S)).granted
            assert look(ScriptStore(cluster, slot), TERMS, 0) == 998
        await buckets.drain()


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"+OK\r\n", "what nobody had asked for"), (b"?what\r\n", "what is no reply")],
    ids=["unasked", "noise"],
)
async def test_a_server_that_speaks_out_of_turn_is_left(link: Link, data: bytes, why: str) -> None:
    """Replies and calls would no longer belong together (F-R16)."""
    wire = node_of(link)._wire
    assert wire is not None
    replies: list[Any] = []
    if why.endswith("reply"):
        wire.send(pack("PING"), replies.append, deadline_s=deadline_s())
    wire.data_received(data)
    assert not wire.is_open
    assert all(isinstance(reply, StoreUnavailable) and why in str(reply) for reply in replies)
