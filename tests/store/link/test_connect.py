"""Links to real servers: every kind of URL, and every way for a call to go wrong."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import pytest
from redis.crc import key_slot
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError

from limiter.store.link.connect import Link, open_link, probe
from limiter.store.link.server_connection import pack
from limiter.store.link.urls import UrlError
from limiter.store.store_errors import StoreOutOfMemory, StoreRefused, StoreUnavailable, StoreUnsupported
from tests.support import eventually_async
from tests.support.fake import FakeServer
from tests.support.nodes import until
from tests.support.proxy import Proxy
from tests.support.servers import (
    Certificates,
    Cluster,
    Sentinels,
    Server,
    free_port,
    make_certificates,
    running,
    start_cluster,
    start_sentinels,
)

SLACK_S = 0.5  # what a busy machine may add to a time limit


class Connect(Protocol):
    def __call__(self, url: str, *, connect_timeout_s: float = 1.0, max_connections: int = 16) -> Awaitable[Link]: ...


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`open_link`, closed at the end of the test."""
    links: list[Link] = []

    async def connect(url: str, *, connect_timeout_s: float = 1.0, max_connections: int = 16) -> Link:
        links.append(await open_link(url, connect_timeout_s=connect_timeout_s, max_connections=max_connections))
        return links[-1]

    yield connect
    for link in links:
        await link.aclose()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A Valkey that this test may mistreat."""
    with running("valkey", tmp_path) as server:
        yield server


async def store(link: Link, key: bytes, value: bytes = b"1", timeout_s: float = 2.0) -> None:
    assert await link.call(key, "SET", key, value, timeout_s=timeout_s) == b"OK"


async def fetch(link: Link, key: bytes, timeout_s: float = 2.0) -> bytes | None:
    reply: bytes | None = await link.call(key, "GET", key, timeout_s=timeout_s)
    return reply


async def increment(link: Link, timeout_s: float = 2.0) -> int:
    reply: int = await link.call(b"count", "INCR", b"count", timeout_s=timeout_s)
    return reply


async def elapsed_s(work: Awaitable[object]) -> float:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    await work
    return loop.time() - begun_s


# One server


async def test_a_unix_socket_serves(server: Server, connect: Connect) -> None:
    link = await connect(server.url)
    await store(link, b"key", b"\x00\xff")
    assert await fetch(link, b"key") == b"\x00\xff"


async def test_a_tcp_port_serves(server: Server, connect: Connect) -> None:
    link = await connect(server.tcp_url)
    await store(link, b"key")
    assert await fetch(link, b"key") == b"1"


async def test_the_database_of_the_url_is_used(valkey: Server, connect: Connect) -> None:
    await store(await connect(f"{valkey.tcp_url}/3"), b"key")
    assert valkey.command("GET", "key") is None
    await store(await connect(f"{valkey.url}?db=2"), b"key")
    assert valkey.client().info("keyspace").keys() == {"db2", "db3"}


async def test_a_password_and_a_user_are_sent(tmp_path: Path, connect: Connect) -> None:
    secret = "p@ss/w:rd"
    with running("valkey", tmp_path, config={"requirepass": secret}) as server:
        server.command("ACL", "SETUSER", "teller", "on", f">{secret}", "~*", "+@all")
        for user in ("", "teller"):
            link = await connect(f"redis://{user}:{quote(secret, safe='')}@127.0.0.1:{server.port}")
            await store(link, b"key")


async def test_a_missing_or_wrong_password_is_a_refusal(tmp_path: Path, connect: Connect) -> None:
    with running("valkey", tmp_path, config={"requirepass": "right"}) as server:
        with pytest.raises(StoreRefused, match="Authentication required"):
            await store(await connect(server.tcp_url), b"key")
        with pytest.raises(StoreRefused, match="invalid username-password") as refused:
            await store(await connect(f"redis://:wrong@127.0.0.1:{server.port}"), b"key")
        assert ":wrong" not in str(refused.value)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {**certificates.config, "tls-port": str(free_port())}
    with running("redis", tmp_path_factory.mktemp("tls-server"), config=config) as server:
        yield server


def tls_url(server: Server, certificates: Certificates, *, port: int = 0) -> str:
    return f"rediss://127.0.0.1:{port or server.config['tls-port']}?ssl_ca_certs={quote(str(certificates.authority))}"


async def test_tls_serves(tls_server: Server, certificates: Certificates, connect: Connect) -> None:
    link = await connect(tls_url(tls_server, certificates))
    await store(link, b"key")
    assert await fetch(link, b"key") == b"1"


async def test_an_unknown_authority_is_a_refusal(tls_server: Server, connect: Connect) -> None:
    link = await connect(f"rediss://127.0.0.1:{tls_server.config['tls-port']}")
    with pytest.raises(StoreRefused, match="CERTIFICATE_VERIFY_FAILED"):
        await store(link, b"key")


async def test_certificates_that_cannot_be_read_are_reported_at_once(connect: Connect) -> None:
    with pytest.raises(UrlError, match="cannot set up TLS"):
        await connect("rediss://store?ssl_ca_certs=/nowhere/ca.pem")


async def test_connecting_may_outlast_a_call_and_serve_the_next(
    tls_server: Server, certificates: Certificates, connect: Connect
) -> None:
    async with Proxy(int(tls_server.config["tls-port"])) as proxy:
        url = tls_url(tls_server, certificates, port=proxy.port)
        link = await connect(url, connect_timeout_s=10, max_connections=1)
        proxy.mode = "stall"  # the handshake stands still
        with pytest.raises(StoreRefused, match="did not accept a connection in time"):
            await store(link, b"key", timeout_s=0.05)
        proxy.mode = "pass"
        await store(link, b"key")
        assert proxy.connections == 1


async def test_a_link_needs_no_server_until_it_is_called(own_server: Server, connect: Connect) -> None:
    """F-S2"""
    own_server.stop()
    link = await connect(own_server.tcp_url)
    with pytest.raises(StoreRefused):
        await store(link, b"key")
    own_server.start()
    await store(link, b"key")


async def test_a_restart_between_calls_is_not_noticed(own_server: Server, connect: Connect) -> None:
    link = await connect(own_server.tcp_url)
    await asyncio.gather(*(store(link, b"key") for _ in range(5)))  # several connections, soon all dead
    await asyncio.to_thread(own_server.stop)  # the loop goes on and sees them close
    own_server.start()
    await asyncio.gather(*(store(link, b"key") for _ in range(5)))


async def test_calls_beyond_the_connections_wait_their_turn(valkey: Server, connect: Connect) -> None:
    async with Proxy(valkey.port) as proxy:
        link = await connect(proxy.url, max_connections=2)
        counts = await asyncio.gather(*(increment(link) for _ in range(50)))
        assert sorted(counts) == list(range(1, 51))
        assert proxy.connections == 2


@pytest.mark.parametrize("form", ["redis://{}", "redis+cluster://{}", "redis+sentinel://{}/orders"])
async def test_a_closed_link_refuses(form: str) -> None:
    link = await open_link(form.format(f"127.0.0.1:{free_port()}"))
    await link.aclose()
    with pytest.raises(StoreRefused, match="closed"):
        await store(link, b"key")


async def test_a_link_closed_after_use_refuses(valkey: Server) -> None:
    link = await open_link(valkey.url)
    await store(link, b"key")
    await link.aclose()
    with pytest.raises(StoreRefused, match="closed"):
        await store(link, b"key")


@pytest.mark.parametrize("form", ["rediss://{}", "rediss+cluster://{}", "rediss+sentinel://{}/orders"])
async def test_closing_ends_calls_that_still_connect(form: str) -> None:
    """Not as if their callers had been cancelled."""
    async with Proxy(free_port()) as nowhere:
        nowhere.mode = "stall"
        link = await open_link(form.format(f"127.0.0.1:{nowhere.port}"))
        call = asyncio.create_task(store(link, b"key"))
        await eventually_async(lambda: asyncio.sleep(0, nowhere.connections == 1))
        await link.aclose()
        with pytest.raises(StoreRefused):
            await call


# Answers of servers


@pytest.mark.parametrize(
    "answer",
    [
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "READONLY You can't write against a read only replica.",
        "BUSY Redis is busy running a script.",
        "MISCONF Errors writing to the AOF file: No space left on device",
        "NOREPLICAS Not enough good replicas to write.",
        "NOAUTH Authentication required.",
        "ERR max number of clients reached",
    ],
)
async def test_a_server_that_cannot_serve_now_has_not_executed(answer: str, connect: Connect) -> None:
    async with FakeServer({"INCR": b"-%b\r\n" % answer.encode()}) as fake:
        with pytest.raises(StoreRefused):
            await increment(await connect(fake.url))
        assert len(fake.seen) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("NOSCRIPT No matching script. Please use EVAL.", NoScriptError),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", ResponseError),
        ("READONLY You can't write against a replica. script: f00, on @user_script:1.", ReadOnlyError),
    ],
)
async def test_other_answers_are_passed_on_unchanged(answer: str, kind: type[ResponseError], connect: Connect) -> None:
    """An error half way through a script is not a refusal: part of it ran."""
    async with FakeServer({"INCR": b"-%b\r\n" % answer.encode()}) as fake:
        with pytest.raises(ResponseError) as answered:
            await increment(await connect(fake.url))
        assert type(answered.value) is kind
        assert len(fake.seen) == 1


async def test_an_error_leaves_the_connection_in_step(valkey: Server, connect: Connect) -> None:
    async with Proxy(valkey.port) as proxy:
        link = await connect(proxy.url)
        await store(link, b"count", b"text")
        with pytest.raises(ResponseError, match="not an integer"):
            await increment(link)
        assert await fetch(link, b"count") == b"text"
        assert proxy.connections == 1


async def test_a_server_turned_replica_refuses_and_is_connected_to_again(own_server: Server, connect: Connect) -> None:
    """F-S6: behind a virtual address the next connection may find the new primary."""
    async with Proxy(own_server.port) as proxy:
        link = await connect(proxy.url)
        await increment(link)
        own_server.command("REPLICAOF", "127.0.0.1", free_port())
        with pytest.raises(StoreRefused, match="read only replica"):
            await increment(link)
        own_server.command("REPLICAOF", "NO", "ONE")
        assert await increment(link) == 2
        assert proxy.connections == 2


async def test_a_full_server_refuses_writes_and_still_reads(own_server: Server, connect: Connect) -> None:
    """F-S8"""
    link = await connect(own_server.url)
    await store(link, b"key")
    own_server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreOutOfMemory):
        await store(link, b"other")
    assert await fetch(link, b"key") == b"1"


# Time, cuts and cancellation


async def test_no_call_outlasts_its_timeout_on_a_frozen_server(own_server: Server, connect: Connect) -> None:
    """F-S3: some wait for a reply, most for a connection."""
    link = await connect(own_server.tcp_url, max_connections=4)
    await increment(link)
    own_server.pause()
    calls = [asyncio.create_task(elapsed_s(_failing(increment(link, timeout_s=0.1)))) for _ in range(40)]
    assert max(await asyncio.gather(*calls)) < 0.1 + SLACK_S
    own_server.resume()
    assert await increment(link) >= 2


async def _failing(work: Awaitable[object]) -> None:
    with pytest.raises(StoreUnavailable):
        await work


async def test_no_call_outlasts_its_timeout_where_nobody_accepts(connect: Connect) -> None:
    async with Proxy(free_port()) as nowhere:
        nowhere.mode = "stall"
        link = await connect(f"rediss://127.0.0.1:{nowhere.port}")
        assert await elapsed_s(_failing(increment(link, timeout_s=0.1))) < 0.1 + SLACK_S


async def test_a_call_out_of_time_is_not_sent(valkey: Server, connect: Connect) -> None:
    link = await connect(valkey.url)
    with pytest.raises(StoreRefused):
        await increment(link, timeout_s=0.0)
    assert valkey.command("GET", "count") is None


async def test_a_stalled_call_may_have_run(valkey: Server, connect: Connect) -> None:
    async with Proxy(valkey.port) as proxy:
        link = await connect(proxy.url)
        await increment(link)
        proxy.mode = "stall"
        with pytest.raises(StoreUnavailable, match="did not answer in time") as failed:
            await increment(link, timeout_s=0.05)
        assert not isinstance(failed.value, StoreRefused)


@pytest.mark.parametrize("reply_bytes", [0, 2])
async def test_a_reset_in_a_reply_is_reported_and_nothing_is_sent_twice(
    valkey: Server, connect: Connect, reply_bytes: int
) -> None:
    """F-S4: the command ran; whether to send it again is not the link's to decide."""
    async with Proxy(valkey.port) as proxy:
        link = await connect(proxy.url)
        assert await increment(link) == 1
        proxy.cut_after_reply_bytes(reply_bytes)
        with pytest.raises(StoreUnavailable) as failed:
            await increment(link)
        assert not isinstance(failed.value, StoreRefused)
        assert valkey.command("GET", "count") == b"2"
        assert await increment(link) == 3


async def test_a_refused_connection_is_a_refusal(valkey: Server, connect: Connect) -> None:
    async with Proxy(valkey.port) as proxy:
        link = await connect(proxy.url)
        await proxy.refuse()
        with pytest.raises(StoreRefused):
            await increment(link)
        await proxy.accept()
        assert await increment(link) == 1


async def test_a_request_held_back_may_still_arrive_later(valkey: Server, connect: Connect) -> None:
    """A timeout is never a refusal, because the network may deliver the request later."""
    async with Proxy(valkey.port) as proxy:
        link = await connect(proxy.url)
        proxy.mode = "hold"
        with pytest.raises(StoreUnavailable):
            await increment(link, timeout_s=0.05)
        proxy.release_held()
        await eventually_async(lambda: asyncio.sleep(0, valkey.command("GET", "count") == b"1"))


async def test_after_a_cancelled_call_the_next_gets_its_own_reply(valkey: Server, connect: Connect) -> None:
    """F-R16"""
    async with Proxy(valkey.port) as proxy:
        link = await connect(proxy.url, max_connections=1)
        await store(link, b"mine", b"mine")
        await store(link, b"other", b"other")
        proxy.delay_s = 0.02
        for _ in range(10):
            before = proxy.requests
            abandoned = asyncio.create_task(fetch(link, b"other"))
            await eventually_async(lambda before=before: asyncio.sleep(0, proxy.requests > before))  # type: ignore[misc]
            abandoned.cancel()
            with pytest.raises(asyncio.CancelledError):
                await abandoned
            assert await fetch(link, b"mine") == b"mine"


async def test_cancelling_at_any_moment_leaves_no_connection_out_of_step(valkey: Server, connect: Connect) -> None:
    """F-R16: cancelled while waiting for a turn, connecting, sending, or reading."""
    link = await connect(valkey.tcp_url, max_connections=2)
    for key in (b"mine", b"other"):
        await store(link, key, key)
    for steps in range(12):
        abandoned = [asyncio.create_task(fetch(link, b"other")) for _ in range(4)]
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in abandoned:
            task.cancel()
        assert await fetch(link, b"mine") == b"mine"
        await asyncio.gather(*abandoned, return_exceptions=True)
    assert await asyncio.gather(*(fetch(link, b"mine") for _ in range(8))) == [b"mine"] * 8


# Cluster


def keys_by_node(cluster: Cluster) -> dict[int, bytes]:
    """A key for each node, by the node's port."""
    keys: dict[int, bytes] = {}
    for number in range(1000):
        key = b"key-%d" % number
        keys.setdefault(cluster.owner(key_slot(key)).port, key)
        if len(keys) == len(cluster.nodes):
            return keys
    raise AssertionError("a node serves no slot")


async def test_a_cluster_serves_keys_of_all_nodes(cluster: Cluster, connect: Connect) -> None:
    link = await connect(cluster.url)
    for key in keys_by_node(cluster).values():
        await store(link, key, key)
        assert cluster.client_for(key).get(key) == key


async def test_one_seed_is_enough(cluster: Cluster, connect: Connect) -> None:
    link = await connect(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.nodes[1].port}")
    for key in keys_by_node(cluster).values():
        await store(link, key)


async def test_a_moved_slot_is_followed(cluster: Cluster, connect: Connect) -> None:
    """F-S7"""
    link = await connect(cluster.url)
    slot = key_slot(b"count")
    for expected in range(1, 7):
        assert await increment(link) == expected
        cluster.move_slot(slot, next(node for node in cluster.nodes if node is not cluster.owner(slot)))
    assert await increment(link) == 7


async def test_a_slot_under_way_is_asked_for_on_both_sides(cluster: Cluster, connect: Connect) -> None:
    """F-S7: keys not yet moved are served by the old node, others, after ASK, by the new one."""
    link = await connect(cluster.url)
    moved, kept, new = b"{tag}moved", b"{tag}kept", b"{tag}new"
    slot = key_slot(moved)
    await store(link, moved, b"moved")
    await store(link, kept, b"kept")
    source = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not source)
    cluster.begin_move(slot, target)
    try:
        source.command("MIGRATE", "127.0.0.1", target.port, moved, 0, 5000)
        assert await fetch(link, kept) == b"kept"
        assert await fetch(link, moved) == b"moved"
        await asyncio.gather(*(store(link, new) for _ in range(20)))  # ASKING holds for one command on one connection
        with pytest.raises(StoreRefused, match="rehashing"):
            await link.call(moved, "MGET", moved, kept, timeout_s=2)
    finally:
        cluster.move_keys(slot, target)
        cluster.finish_move(slot, target)
    assert await link.call(moved, "MGET", moved, kept, new, timeout_s=2) == [b"moved", b"kept", b"1"]


async def test_a_node_that_restarts_is_found_again(tmp_path: Path, connect: Connect) -> None:
    with start_cluster("valkey", tmp_path) as cluster:
        assert isinstance(cluster, Cluster)
        link = await connect(cluster.url)
        keys = keys_by_node(cluster)
        for key in keys.values():
            await store(link, key)
        lost = cluster.nodes[2]
        lost.kill()
        with pytest.raises(StoreUnavailable):
            await store(link, keys[lost.port])
        await store(link, keys[cluster.nodes[0].port])
        lost.start()
        await eventually_async(lambda: link.call(keys[lost.port], "PING", timeout_s=1), ignoring=StoreUnavailable)


@pytest.mark.slow
async def test_a_cluster_failover_is_followed(tmp_path: Path, connect: Connect) -> None:
    """F-S5"""
    with start_cluster("valkey", tmp_path, replicas_per_primary=1) as cluster:
        assert isinstance(cluster, Cluster)
        link = await connect(cluster.url)
        await increment(link)
        owner = cluster.owner(key_slot(b"count"))
        assert owner.command("WAIT", 1, 5000) == 1
        owner.kill()
        assert await eventually_async(lambda: increment(link), within_s=30, ignoring=StoreUnavailable) == 2
        assert cluster.owner(key_slot(b"count")) is not owner


async def test_a_server_without_cluster_says_so(valkey: Server, connect: Connect) -> None:
    link = await connect(f"redis+cluster://127.0.0.1:{valkey.port}")
    with pytest.raises(StoreRefused, match="cluster support disabled"):
        await store(link, b"key")


async def test_a_cluster_node_reached_as_one_server_says_what_to_use(cluster: Cluster, connect: Connect) -> None:
    link = await connect(cluster.nodes[0].tcp_url)
    foreign = keys_by_node(cluster)[cluster.nodes[1].port]
    with pytest.raises(StoreUnsupported, match=r"use redis\+cluster://"):
        await store(link, foreign)


async def test_no_call_outlasts_its_timeout_when_no_node_answers(connect: Connect) -> None:
    async with Proxy(free_port()) as nowhere:
        nowhere.mode = "stall"
        link = await connect(f"rediss+cluster://127.0.0.1:{nowhere.port},127.0.0.1:{free_port()}")
        assert await elapsed_s(_failing(increment(link, timeout_s=0.1))) < 0.1 + SLACK_S


# Sentinel


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with start_sentinels("valkey", tmp_path) as group:
        assert isinstance(group, Sentinels)
        yield group


@pytest.mark.slow
async def test_sentinels_name_the_primary_and_its_successor(sentinels: Sentinels, connect: Connect) -> None:
    """F-S5: also with one sentinel gone."""
    link = await connect(sentinels.url)
    assert await increment(link) == 1
    former = sentinels.primary
    assert former.command("WAIT", 1, 5000) == 1
    sentinels.sentinels[0].kill()
    former.kill()
    with pytest.raises(StoreUnavailable):
        await increment(link)
    assert await eventually_async(lambda: increment(link), within_s=30, ignoring=StoreUnavailable) == 2
    assert sentinels.primary is not former


async def test_a_demoted_primary_is_left_for_the_new_one(own_server: Server, valkey: Server, connect: Connect) -> None:
    """F-S6"""
    async with FakeServer({"SENTINEL": address_of(own_server)}) as sentinel:
        link = await connect(f"redis+sentinel://127.0.0.1:{sentinel.port}/orders")
        await increment(link)
        own_server.command("REPLICAOF", "127.0.0.1", valkey.port)
        sentinel.replies["SENTINEL"] = address_of(valkey)
        with pytest.raises(StoreRefused):
            await increment(link)
        await increment(link)
        assert valkey.command("GET", "count") == b"1"


def address_of(server: Server) -> bytes:
    """The reply of a sentinel that takes this server for the primary."""
    return b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(server.port)), server.port)


async def test_without_sentinels_a_known_primary_still_serves(own_server: Server, connect: Connect) -> None:
    async with FakeServer({"SENTINEL": address_of(own_server)}) as sentinel:
        link = await connect(f"redis+sentinel://127.0.0.1:{sentinel.port}/orders")
        await increment(link)
        assert sentinel.seen == [[b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", b"orders"]]
    own_server.restart()
    assert await eventually_async(lambda: increment(link), ignoring=StoreUnavailable)


async def test_an_unknown_service_is_named(connect: Connect) -> None:
    async with FakeServer({"SENTINEL": b"*-1\r\n"}) as sentinel:
        link = await connect(f"redis+sentinel://127.0.0.1:{sentinel.port},127.0.0.1:{free_port()}/orders")
        with pytest.raises(StoreRefused, match=r"no sentinel named a primary for orders: .* does not know it"):
            await increment(link)


# The probe


async def test_the_probe_finds_out_name_and_version(server: Server, connect: Connect) -> None:
    facts = await probe(await connect(server.url))
    assert facts.name == server.flavour
    assert facts.version >= ((8, 0) if facts.name == "valkey" else (7, 0))
    assert facts.maxmemory_policy == "noeviction"
    seconds, microseconds = server.command("TIME")
    assert abs(facts.now_us - (seconds * 1_000_000 + microseconds)) < 60_000_000


def slots_of(*ranges: tuple[int, int, str, int]) -> bytes:
    """The reply to CLUSTER SLOTS."""
    rows = b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (first, last, len(host), host.encode(), port)
        for first, last, host, port in ranges
    )
    return b"*%d\r\n%b" % (len(ranges), rows)


async def test_f_s7_slots_that_no_node_serves_are_refused(connect: Connect) -> None:
    async with FakeServer({}) as fake:
        link = await connect(f"redis+cluster://127.0.0.1:{fake.port}")
        fake.replies["CLUSTER"] = b"*0\r\n"
        with pytest.raises(StoreRefused, match="knows of no slots"):
            await store(link, b"key")
        fake.replies["CLUSTER"] = slots_of((0, 16_383, "?", fake.port))
        with pytest.raises(StoreRefused, match="no node of the cluster serves slot"):
            await store(link, b"key")


async def test_f_s7_a_redirect_without_end_is_given_up(connect: Connect) -> None:
    async with FakeServer({}) as fake:
        fake.replies["CLUSTER"] = slots_of((0, 16_383, "127.0.0.1", fake.port))
        fake.replies["SET"] = b"-MOVED 1 127.0.0.1:%d\r\n" % fake.port
        with pytest.raises(StoreRefused, match="redirected"):
            await store(await connect(f"redis+cluster://127.0.0.1:{fake.port}"), b"key")


async def test_f_s8_out_of_memory_is_no_reason_to_look_for_another_server(connect: Connect) -> None:
    async with FakeServer({"SET": b"-OOM command not allowed\r\n"}) as fake:
        fake.replies["CLUSTER"] = slots_of((0, 16_383, "127.0.0.1", fake.port))
        fake.replies["SENTINEL"] = b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%d\r\n" % (len(str(fake.port)), fake.port)
        for url in (f"redis+cluster://127.0.0.1:{fake.port}", f"redis+sentinel://127.0.0.1:{fake.port}/orders"):
            link = await connect(url)
            with pytest.raises(StoreOutOfMemory):
                await store(link, b"key")


async def test_a_server_without_info_is_refused_with_the_fix(connect: Connect) -> None:
    """F-S13"""
    async with FakeServer({}) as fake:
        with pytest.raises(StoreUnsupported, match="does not answer INFO"):
            await probe(await connect(fake.url))


async def test_calls_to_the_primary_that_sentinels_name_go_by_the_wire(own_server: Server, connect: Connect) -> None:
    replies: list[Any] = []

    def sent() -> bool:
        deadline_s = asyncio.get_running_loop().time() + 5
        return link.send(b"key", pack("ECHO", b"hello"), replies.append, deadline_s=deadline_s)

    async with FakeServer({"SENTINEL": address_of(own_server)}) as sentinel:
        link = await connect(f"redis+sentinel://127.0.0.1:{sentinel.port}/orders")
        assert not sent(), "nobody has asked the sentinels yet"
        await increment(link)
        await until(sent)
        await until(lambda: replies)
        assert replies[0] == b"hello"
