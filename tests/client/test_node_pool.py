"""Several nodes as one that answers: failover, deadlines, no debit twice."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from aiohttp import test_utils, web

from headgate import Headgate, Throttled
from limiter.client.node_pool import NoAnswer, NodePool
from tests.support.askers import Spent
from tests.support.fleet import Process
from tests.support.live import LiveApi
from tests.support.nodes import until
from tests.support.proxy import Proxy
from tests.support.scripted_service import BUSY, ScriptedService
from tests.support.servers import Server, free_port


def in_order(gate: Headgate, *urls: str) -> Headgate:
    """Let a client begin with the first of its nodes."""
    gate.parts().pool.nodes.sort(key=lambda node: urls.index(node.url))
    return gate


async def test_a_node_that_refuses_connections_is_left_alone(service: ScriptedService) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    async with Headgate([nobody, service.url]) as gate:
        in_order(gate, nobody, service.url)
        for _ in range(10):
            assert not (await gate.acquire({"service": "a"})).degraded
        assert gate.counts()["call_failures"] <= 2
        assert [node.url for node in gate.parts().pool.nodes] == [service.url, nobody]


async def test_without_any_node_the_deadline_holds() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    async with Headgate([nobody, nobody], unavailable="closed", deadline_ms=200) as gate:
        began_s = time.monotonic()
        with pytest.raises(Throttled, match=r"127\.0\.0\.1") as away:
            await gate.acquire({"service": "a"})
        assert away.value.reason == "unavailable"
        assert time.monotonic() - began_s < 10


async def test_nodes_that_are_away_are_not_knocked_at_all_the_time() -> None:
    """A fleet that starts again would be met by every client's storm of connections."""
    pool = NodePool([f"http://127.0.0.1:{free_port()}"])
    with pytest.raises(NoAnswer):
        await pool.post_json("/v1/settle", {}, by_s=time.monotonic() + 2)
    await pool.close()
    assert 2 <= pool.calls <= 12


async def test_a_node_that_accepts_and_says_nothing_costs_half_the_deadline(service: ScriptedService) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Headgate([url, service.url], unavailable="closed", deadline_ms=2000) as gate:
            in_order(gate, url, service.url)
            assert await gate.acquire({"service": "a"})
            assert await gate.acquire({"service": "a"}), "the next goes to the one that answered"
            assert gate.counts()["call_failures"] == 1


async def test_short_deadlines_do_not_condemn_a_node(service: ScriptedService) -> None:
    service.open.clear()
    async with Headgate(service.url, unavailable="closed") as gate:
        with pytest.raises(Throttled):
            await gate.acquire({"service": "a"}, deadline_ms=5)
        assert gate.counts()["call_failures"] == 0
        service.open.set()
        await until(lambda: service.finals)


async def test_a_busy_node_sends_its_callers_to_another(service: ScriptedService) -> None:
    async with ScriptedService() as busy:
        busy.whole = BUSY
        async with Headgate([busy.url, service.url]) as gate:
            in_order(gate, busy.url, service.url)
            for _ in range(5):
                assert not (await gate.acquire({"service": "a"})).degraded
            assert len(busy.calls) == 1


async def test_a_page_of_something_in_between_is_no_answer(service: ScriptedService) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<html>bad gateway</html>", status=502)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with test_utils.TestServer(app) as between:
        url = str(between.make_url("")).rstrip("/")
        async with Headgate([url, service.url]) as gate:
            in_order(gate, url, service.url)
            assert not (await gate.acquire({"service": "a"})).degraded
            assert gate.counts()["call_failures"] == 1


async def test_what_may_not_be_repeated_is_sent_once() -> None:
    answers = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answers
        answers += 1
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = NodePool([url, url])
    try:
        with pytest.raises(NoAnswer) as error:
            await pool.post("/v1/acquire", b"{}", by_s=time.monotonic() + 5, is_repeatable=False)
        assert error.value.was_sent
        assert answers == 1
    finally:
        await pool.close()
        server.close()
        await server.wait_closed()


async def test_f_r11_an_answer_that_was_lost_is_asked_for_again(node: LiveApi, customer: str, spent: Spent) -> None:
    """The node has decided, and the connection breaks: the repeat carries the same key."""
    async with Proxy(node.port) as proxy, Headgate(f"http://127.0.0.1:{proxy.port}", deadline_ms=5000) as gate:
        for number in range(1, 11):
            proxy.drop_next_reply()
            grant = await gate.acquire({"service": "ledger", "customer": customer}, work=3)
            assert not grant.degraded
            assert spent("ledger", customer) == 3 * number
        assert gate.counts()["call_failures"] == 10


async def test_an_answer_cut_in_the_middle_goes_on_at_another_node(node: LiveApi, customer: str, spent: Spent) -> None:
    async with Proxy(node.port) as proxy:
        first = f"http://127.0.0.1:{proxy.port}"
        async with Headgate([first, node.base], deadline_ms=5000) as gate:
            in_order(gate, first, node.base)
            proxy.cut_after_reply_bytes(30)
            asked = (gate.acquire({"service": "ledger", "customer": customer}, work=1).grant() for _ in range(50))
            grants = await asyncio.gather(*asked)
            assert not any(grant.degraded for grant in grants)
            assert spent("ledger", customer) == 50
            for grant in grants:
                grant.settle(2)
        assert spent("ledger", customer) == 100


@pytest.mark.slow
async def test_nodes_that_are_frozen_or_killed_debit_nothing_twice(
    store: Server, policies: Path, node: LiveApi, customer: str, spent: Spent
) -> None:
    ports = [free_port(), free_port()]
    processes = [Process("api", redis_url=store.url, policies=policies, port=port) for port in ports]
    frozen, killed = processes
    try:
        urls = [*(f"http://127.0.0.1:{port}" for port in ports), node.base]
        async with Headgate(urls, deadline_ms=6000) as gate:
            in_order(gate, *urls)
            granted_work = 0
            for turn in range(30):
                if turn == 10:
                    os.kill(frozen.running.pid, signal.SIGSTOP)
                if turn == 20:
                    killed.running.kill()
                asked = [gate.acquire({"service": "ledger", "customer": customer}, work=1).grant() for _ in range(20)]
                grants = await asyncio.gather(*asked)
                assert not any(grant.degraded for grant in grants)
                granted_work += len(grants)
            assert gate.counts()["call_failures"] >= 1
            assert spent("ledger", customer) == granted_work
    finally:
        for process in processes:
            process.end()


async def test_failover_is_within_the_deadline_of_the_most_hurried(service: ScriptedService) -> None:
    async with ScriptedService() as hung:
        hung.open.clear()
        async with Headgate([hung.url, service.url], unavailable="closed") as gate:
            in_order(gate, hung.url, service.url)
            hurried = gate.acquire({"service": "a"}, deadline_ms=2000).grant()
            patient = gate.acquire({"service": "b"}, deadline_ms=60_000).grant()
            assert all(await asyncio.gather(patient, hurried))
