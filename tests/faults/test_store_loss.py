"""F-S3 and promise 4: an answer within the deadline, whatever the store does; and recovery by itself (B3)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from limiter.engine.breaker import FAILURES_MAX
from limiter.engine.decider import Decider
from limiter.engine.request_errors import NotDecided
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, Refused, SettleRequest
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.reading import read_policy_set
from limiter.store.buckets import Buckets
from limiter.store.link.connect import open_link
from limiter.store.store_errors import StoreUnavailable
from tests.support.nodes import until
from tests.support.servers import Server

DEADLINE_S = 0.1
NOWHERE = "redis://127.0.0.1:1"
SECRET = b"a secret of the tests"


@asynccontextmanager
async def node(
    url: str, *policies: dict[str, Any], nodes: int = 1, deadline_s: float = DEADLINE_S
) -> AsyncIterator[Decider]:
    link = await open_link(url)
    buckets = Buckets(link)
    decider = Decider(buckets, Signer(SECRET), deadline_s=deadline_s, nodes=lambda: nodes)
    decider.enforce(read_policy_set({"policies": list(policies)}))
    yield decider
    await buckets.drain()
    await link.aclose()


def policy(mode: str, **more: Any) -> dict[str, Any]:
    return {"name": mode, "match": {}, "rate": 1e-6, "capacity": 50, "on_store_failure": mode, **more}


def ask(work: float = 1) -> AcquireRequest:
    return AcquireRequest({"customer": "c1"}, work=work)


async def test_open_lets_pass_and_says_so() -> None:
    async with node(NOWHERE, policy("open")) as decider:
        decision = await decider.acquire(ask(work=1000))
        assert isinstance(decision, Granted)
        assert decision.degraded


async def test_closed_decides_nothing() -> None:
    """`429` only ever means over a limit."""
    async with node(NOWHERE, policy("closed"), policy("open")) as decider:
        with pytest.raises(NotDecided) as error:
            await decider.acquire(ask())
        assert (error.value.reason, error.value.policy) == ("store_unavailable", "closed")


async def test_local_admits_its_share_and_no_more() -> None:
    async with node(NOWHERE, policy("local"), nodes=5) as decider:
        decisions = [await decider.acquire(ask()) for _ in range(20)]
    assert sum(isinstance(decision, Granted) for decision in decisions) == 10
    refusal = decisions[-1]
    assert isinstance(refusal, Refused)
    assert (refusal.degraded, refusal.policy) == (True, "local")


async def test_two_nodes_on_their_own_admit_together_no_more_than_the_limit_and_one_capacity(valkey: Server) -> None:
    """The store has given one capacity; without it the nodes share one more."""
    async with node(valkey.tcp_url, policy("local"), nodes=2) as a, node(valkey.tcp_url, policy("local"), nodes=2) as b:
        admitted = 0
        for decider in (a, b) * 30:
            admitted += isinstance(await decider.acquire(ask()), Granted)
        assert admitted == 50
        valkey.pause()
        try:
            for decider in (a, b) * 60:
                admitted += isinstance(await decider.acquire(ask()), Granted)
        finally:
            valkey.resume()
        assert admitted == 100


async def test_f_s3_a_frozen_store_costs_no_answer_more_than_twice_its_deadline(valkey: Server) -> None:
    deadline_s = 1.0  # so long that a busy machine does not count as a slow answer
    async with node(valkey.tcp_url, policy("local", capacity=1e6), deadline_s=deadline_s) as decider:
        loop = asyncio.get_running_loop()
        took_s: list[float] = []

        async def caller() -> None:
            for _ in range(20):
                began_s = loop.time()
                assert isinstance(await decider.acquire(ask()), Granted)
                took_s.append(loop.time() - began_s)

        valkey.pause()
        try:
            await asyncio.gather(*(caller() for _ in range(50)))
        finally:
            valkey.resume()
        assert max(took_s) < 2 * deadline_s
        # Once it is shunned, nobody waits for it any more.
        assert sorted(took_s)[len(took_s) // 2] < deadline_s / 2


async def test_f_s3_it_recovers_without_a_restart(valkey: Server) -> None:
    async with node(valkey.tcp_url, policy("open")) as decider:
        valkey.pause()
        try:
            for _ in range(10):
                assert (await granted(decider)).degraded
            assert decider.store_is_shunned
        finally:
            valkey.resume()
        answers: list[Granted] = []

        async def keep_asking() -> None:
            while not answers or answers[-1].degraded:
                answers.append(await granted(decider))
                await asyncio.sleep(0)

        async with asyncio.timeout(10):
            await keep_asking()
        assert not decider.store_is_shunned


async def test_work_granted_without_the_store_is_debited_at_its_settle(valkey: Server) -> None:
    async with node(NOWHERE, policy("open")) as cut_off, node(valkey.url, policy("open")) as connected:
        grant = await granted(cut_off)
        settled = await connected.settle(SettleRequest(grant.reservation, 12))
        assert settled.adjusted == 12
        assert (await granted(connected)).limits[0].balance == pytest.approx(50 - 12 - 1)


async def test_a_settle_without_the_store_is_to_be_sent_again() -> None:
    async with node(NOWHERE, policy("open")) as decider:
        grant = await granted(decider)
        with pytest.raises(NotDecided) as error:
            await decider.settle(SettleRequest(grant.reservation, 12))
        assert error.value.reason == "store_unavailable"


async def test_f_s8_a_store_without_memory_degrades_acquires_and_still_settles(valkey: Server) -> None:
    async with node(valkey.url, policy("open")) as decider:
        grant = await granted(decider)
        client = valkey.client()
        client.config_set("maxmemory", 1)
        try:
            assert (await granted(decider)).degraded
            assert (await decider.settle(SettleRequest(grant.reservation, 12))).adjusted == 11
            assert not decider.store_is_shunned
        finally:
            client.config_set("maxmemory", 0)
        assert not (await granted(decider)).degraded


async def test_f_s15_a_probe_that_meets_a_store_without_memory_ends_and_settles_go_on(valkey: Server) -> None:
    """F-S15: the probe was never over, and every settle was a 503 for as long as the memory lacked."""
    async with node(valkey.url, policy("open"), deadline_s=0.5) as decider:
        grant = await granted(decider)
        valkey.client().config_set("maxmemory", 1)
        try:
            for _ in range(FAILURES_MAX):
                decider._store_health.unanswered(StoreUnavailable("no answer"))
                decider._store_health.breaker.failed_s = -1.0  # calls of their own, however fast this is
            assert decider.store_is_shunned
            await until(lambda: time.monotonic() >= decider._store_health.breaker.open_until_s)
            assert (await granted(decider)).degraded, "it probes, and is told that there is no memory"
            assert not decider.store_is_shunned, "which is an answer"
            assert (await decider.settle(SettleRequest(grant.reservation, 12))).adjusted == 11
        finally:
            valkey.client().config_set("maxmemory", 0)


async def granted(decider: Decider) -> Granted:
    decision: Decision = await decider.acquire(ask())
    assert isinstance(decision, Granted)
    return decision
