"""Settles are never lost while the process lives: ten thousand, through faults, every one counted once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headgate import Headgate
from limiter.client.grants import Grant
from tests.support.askers import Spent, spent_of
from tests.support.fleet import Process
from tests.support.live import LiveApi, live
from tests.support.nodes import until
from tests.support.proxy import Proxy
from tests.support.servers import Server, free_port, running

SETTLES = 10_000
PORTION = 500
PATIENCE_S = 120.0


def patient(url: str) -> Headgate:
    return Headgate(url, deadline_ms=60_000, settles_max=2 * SETTLES, adaptive=False, unavailable="closed")


async def ask(gate: Headgate, customer: str, number: int) -> list[Grant]:
    grants: list[Grant] = []
    descriptor = {"service": "ledger", "customer": customer}
    for _ in range(0, number, PORTION):
        asked = (gate.acquire(descriptor, work=1, ttl_ms=600_000).grant() for _ in range(PORTION))
        grants += await asyncio.gather(*asked)
    return grants


async def settle(gate: Headgate, grants: list[Grant]) -> None:
    """Settle a portion after the other, so that some are under way whenever something happens."""
    for at in range(0, len(grants), PORTION):
        for grant in grants[at : at + PORTION]:
            grant.settle(3)
        await until(lambda: gate.counts()["settles_waiting"] < 2 * PORTION, within_s=PATIENCE_S)


@pytest.mark.slow
async def test_f_r11_through_a_node_that_is_killed_and_started_again(
    store: Server, policies: Path, customer: str, spent: Spent
) -> None:
    port = free_port()
    settings = {"redis_url": store.url, "policies": policies, "port": port, "deadline_ms": 2000}
    process = Process("api", **settings)
    try:
        async with patient(f"http://127.0.0.1:{port}") as gate:
            grants = await ask(gate, customer, SETTLES)
            settling = asyncio.create_task(settle(gate, grants))
            for _ in range(3):
                sent = gate.counts()["settles"]
                await until(lambda: gate.counts()["settles"] > sent + PORTION, within_s=PATIENCE_S)  # noqa: B023
                process.end()
                process = await asyncio.to_thread(Process, "api", **settings)
            await settling
            assert await gate.flush(PATIENCE_S) == 0
            assert gate.counts()["settles_refused"] == 0
            assert gate.counts()["call_failures"] > 0
    finally:
        process.end()
    assert spent("ledger", customer) == 3 * SETTLES


@pytest.mark.slow
async def test_through_a_store_that_is_paused(policies: Path, customer: str, tmp_path: Path) -> None:
    with running("valkey", tmp_path / "paused") as store, live(store.url, policies, deadline_ms=1000) as api:
        async with patient(api.base) as gate:
            grants = await ask(gate, customer, SETTLES)
            settling = asyncio.create_task(settle(gate, grants))
            store.pause()
            await until(lambda: gate.counts()["settles_repeated"] > 0, within_s=60)
            store.resume()
            await settling
            assert await gate.flush(PATIENCE_S) == 0
            assert gate.counts()["settles_refused"] == 0
        with api.client() as client:
            assert spent_of(client, "ledger", customer) == 3 * SETTLES


@asynccontextmanager
async def lossy(node: LiveApi) -> AsyncIterator[Proxy]:
    """A network that delivers requests and loses answers, again and again."""
    async with Proxy(node.port) as proxy:

        async def lose() -> None:
            while True:
                seen = proxy.requests
                await until(lambda: proxy.requests > seen + 5, within_s=PATIENCE_S)  # noqa: B023
                proxy.drop_next_reply()

        losing = asyncio.create_task(lose())
        try:
            yield proxy
        finally:
            losing.cancel()
            await asyncio.gather(losing, return_exceptions=True)


@pytest.mark.slow
async def test_through_a_network_that_loses_answers(node: LiveApi, customer: str, spent: Spent) -> None:
    """Acquires as well: their keys keep a repeat from being charged again."""
    async with lossy(node) as proxy, patient(f"http://127.0.0.1:{proxy.port}") as gate:
        for _ in range(SETTLES // PORTION):
            for grant in await ask(gate, customer, PORTION):
                grant.settle(3)
        assert await gate.flush(PATIENCE_S) == 0
        assert gate.counts()["call_failures"] > 5
        assert gate.counts()["settles_refused"] == 0
    assert spent("ledger", customer) == 3 * SETTLES
