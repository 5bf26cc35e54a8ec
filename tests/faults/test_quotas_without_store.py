"""F-S14, promise 10: a store that is away hands no quota out again, and what is granted meanwhile is debited."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from limiter.engine.decider import Decider
from limiter.engine.engine import open_engine
from limiter.engine.fallback import remainders
from limiter.engine.request_errors import NotDecided
from limiter.model.bucket.contract import AcquireRequest, Granted, Refused, SettleRequest
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.reading import read_policy_set
from limiter.settings import Settings
from limiter.store.buckets import Buckets
from limiter.store.link.connect import open_link
from tests.support.fleet import Process
from tests.support.nodes import until
from tests.support.servers import Server, free_port

QUOTA = 20_000
POLICY = {"name": "monthly", "match": {}, "per": ["customer"], "quota": {"work": QUOTA, "period": "month"}}
FILE = "policies: [{name: monthly, match: {}, per: [customer], quota: {work: 20000, period: month}}]"
PATIENT_S = 60.0


@asynccontextmanager
async def node(server: Server, *policies: dict[str, Any], nodes: int = 1) -> AsyncIterator[Decider]:
    link = await open_link(server.url)
    buckets = Buckets(link)
    decider = Decider(buckets, Signer(b"a secret of the tests"), deadline_s=2.0, nodes=lambda: nodes)
    decider.enforce(read_policy_set({"policies": list(policies or [POLICY])}))
    try:
        yield decider
    finally:
        await buckets.drain()
        await link.aclose()


def ask(work: float, customer: str = "c1", **more: Any) -> AcquireRequest:
    return AcquireRequest({"customer": customer}, work=work, **more)


async def granted(decider: Decider, work: float, customer: str = "c1") -> Granted:
    decision = await decider.acquire(ask(work, customer))
    assert isinstance(decision, Granted)
    return decision


async def sum_granted(decider: Decider, work: float, *, times: int) -> float:
    decisions = [await decider.acquire(ask(work)) for _ in range(times)]
    assert all(decision.degraded for decision in decisions)
    return sum(work for decision in decisions if isinstance(decision, Granted))


def shun(decider: Decider) -> None:
    """Open the circuit breaker, as calls without an answer would, without waiting for them."""
    decider._store_health.breaker.is_open = True
    decider._store_health.breaker.open_until_s = time.monotonic() + 600


async def balance(decider: Decider, customer: str = "c1") -> float:
    """The balance of the quota in the store."""
    decision = await decider.acquire(ask(0, customer, dry_run=True))
    assert not decision.degraded
    return decision.limits[0].balance


async def recovered(decider: Decider) -> None:
    decider.store_answered()
    await decider.post()


async def test_f_s14_a_quota_that_is_used_up_grants_nothing_while_the_store_is_away(valkey: Server) -> None:
    """It was granted again, 64 % over."""
    async with node(valkey) as decider:
        await granted(decider, QUOTA)
        shun(decider)
        refused = await decider.acquire(ask(1))
    assert isinstance(refused, Refused)
    assert (refused.degraded, refused.policy, refused.reason) == (True, "monthly", "quota")


async def test_f_s14_a_quota_goes_on_from_its_known_balance_and_the_store_is_debited_once(valkey: Server) -> None:
    async with node(valkey) as decider:
        await granted(decider, QUOTA - 100)
        shun(decider)
        assert await sum_granted(decider, 3, times=50) == 99
        assert decider.remainders.owing == 1
        await recovered(decider)
        assert decider.remainders.owing == 0
        assert await balance(decider) == 1
        await decider.post()
        assert await balance(decider) == 1, "once"
        assert not (await granted(decider, 1)).degraded


async def test_f_s14_an_unknown_quota_is_closed_and_named(valkey: Server) -> None:
    async with node(valkey) as decider:
        await granted(decider, 1, "c1")
        shun(decider)
        with pytest.raises(NotDecided) as error:
            await decider.acquire(ask(1, "a stranger"))
    assert (error.value.reason, error.value.policy) == ("store_unavailable", "monthly")
    assert "does not know what is left of monthly" in str(error.value)


async def test_f_s14_a_balance_of_long_ago_is_closed_where_others_may_have_used_it(valkey: Server) -> None:
    async with node(valkey) as alone, node(valkey, nodes=2) as one_of_two:
        for decider in (alone, one_of_two):
            await granted(decider, 1)
            (heard,) = decider.remainders._heard.values()
            heard.heard_s -= remainders.HEARD_MAX_S + 1
            shun(decider)
        assert (await granted(alone, 1)).degraded
        with pytest.raises(NotDecided, match="does not know"):
            await one_of_two.acquire(ask(1))


@pytest.mark.parametrize("mode", ["open", "local"])
async def test_open_and_local_are_had_for_the_asking(valkey: Server, mode: str) -> None:
    async with node(valkey, POLICY | {"on_store_failure": mode}) as decider:
        await granted(decider, QUOTA)
        shun(decider)
        assert (await granted(decider, 10)).degraded


async def test_f_s14_a_shadow_refuses_nothing_whatever_is_known_of_it(valkey: Server) -> None:
    async with node(valkey, POLICY | {"shadow": True}) as decider:
        shun(decider)
        assert (await granted(decider, 5)).degraded
        assert decider.remainders.owing == 0


async def test_f_s14_several_nodes_share_the_known_balance_and_never_exceed_it(valkey: Server) -> None:
    async with node(valkey, nodes=2) as a, node(valkey, nodes=2) as b:
        total = 0.0
        for number in range(40):  # each hears of what the other took
            total += (await granted((a, b)[number % 2], 495)).charged
        assert total == QUOTA - 200
        for decider in (a, b):
            shun(decider)
        for decider in (a, b):
            total += await sum_granted(decider, 1, times=300)
        assert total <= QUOTA
        for decider in (a, b):
            await recovered(decider)
        for decider in (a, b):  # until both had time to post what they owe, neither asks the store
            held = await decider.acquire(ask(1))
            assert held.degraded
            total += held.charged if isinstance(held, Granted) else 0
        for decider in (a, b):
            decider.remainders._hold_until_s = 0.0
            await decider.post()
        total += sum(one.charged for one in [await a.acquire(ask(1)) for _ in range(300)] if isinstance(one, Granted))
        assert total == QUOTA, "and what was left is not lost"


async def test_f_s14_the_settle_of_such_a_grant_corrects_the_difference(valkey: Server) -> None:
    async with node(valkey) as decider:
        await granted(decider, 1000)
        shun(decider)
        more, less = await granted(decider, 100), await granted(decider, 100)
        await recovered(decider)
        assert await balance(decider) == QUOTA - 1200
        assert (await decider.settle(SettleRequest(more.reservation, 130))).adjusted == 30
        assert await balance(decider) == QUOTA - 1230
        assert (await decider.settle(SettleRequest(less.reservation, 40))).adjusted == -60
        assert await balance(decider) == QUOTA - 1170
        assert (await decider.settle(SettleRequest(less.reservation, 40))).duplicate


async def test_f_s14_requests_are_counted_where_the_quota_counts_requests(valkey: Server) -> None:
    policy = {"name": "hits", "match": {}, "per": ["customer"], "quota": {"requests": 10, "period": "day"}}
    async with node(valkey, policy) as decider:
        for _ in range(4):
            await granted(decider, 50)
        shun(decider)
        decisions = [await decider.acquire(ask(50)) for _ in range(9)]
        assert sum(isinstance(decision, Granted) for decision in decisions) == 6
        await recovered(decider)
        assert await balance(decider) == 0


async def test_f_s14_a_threshold_of_settles_forgives_nothing_of_it(valkey: Server) -> None:
    async with node(valkey, POLICY | {"settle_threshold": 50}) as decider:
        await granted(decider, 1000)
        shun(decider)
        await granted(decider, 30)
        await recovered(decider)
        assert await balance(decider) == QUOTA - 1030


async def test_f_s14_a_window_that_begins_without_the_store_is_debited_in_the_store(valkey: Server) -> None:
    """The store still has the window before, in which a debit would be forgotten with the next acquire."""
    async with node(valkey) as decider:
        await granted(decider, QUOTA)
        (heard,) = decider.remainders._heard.values()
        shun(decider)
        # As if all that was heard was of the month before.
        prefix = b"hg:{default/0}:b:monthly+quota:c1"
        valkey.client().delete(prefix)
        heard.start_us -= 1
        assert (await granted(decider, 70)).degraded
        await recovered(decider)
        assert await balance(decider) == QUOTA - 70


async def test_f_s14_a_window_that_began_unheard_is_closed_where_there_are_other_nodes(valkey: Server) -> None:
    async with node(valkey, nodes=2) as decider:
        await granted(decider, 1)
        (heard,) = decider.remainders._heard.values()
        heard.start_us -= 1  # the month before: this one began while the store was there
        shun(decider)
        with pytest.raises(NotDecided, match="does not know"):
            await decider.acquire(ask(1))


async def test_f_s14_a_dry_run_owes_nothing(valkey: Server) -> None:
    async with node(valkey) as decider:
        await granted(decider, 1)
        shun(decider)
        assert (await decider.acquire(ask(5, dry_run=True))).degraded
        assert decider.remainders.owing == 0


async def test_f_s14_without_memory_a_quota_goes_on_and_is_debited(valkey: Server) -> None:
    async with node(valkey) as decider:
        await granted(decider, QUOTA - 10)
        valkey.client().config_set("maxmemory", 1)
        try:
            decisions = [await decider.acquire(ask(4)) for _ in range(4)]
            assert sum(isinstance(decision, Granted) for decision in decisions) == 2
            await decider.post()
            assert decider.remainders.owing == 0, "settles need no memory"
        finally:
            valkey.client().config_set("maxmemory", 0)
        assert await balance(decider) == 2


async def test_f_s14_buckets_that_are_remembered_are_bounded(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remainders, "BUCKETS_MAX", 3)
    async with node(valkey) as decider:
        for customer in ("c1", "c2", "c3", "c1", "c4"):
            await granted(decider, 1, customer)
        assert [bucket for _, bucket in decider.remainders._heard] == [
            "monthly+quota:c3",
            "monthly+quota:c1",
            "monthly+quota:c4",
        ]


async def test_f_s14_a_post_whose_answer_is_lost_debits_once(durable: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remainders, "POST_TIMEOUT_S", 0.3)
    async with node(durable) as decider:
        await granted(decider, 1000)
        shun(decider)
        await granted(decider, 7)
        durable.pause()
        try:
            await decider.post()
            assert decider.remainders.owing == 1
        finally:
            durable.resume()
        await recovered(decider)
        assert decider.remainders.owing == 0
        assert await balance(decider) == QUOTA - 1007


class Fleet:
    """Two nodes as processes."""

    def __init__(self, server: Server, file: Path) -> None:
        self.server, self.file = server, file
        self.nodes: list[Process] = []
        self.clients: list[httpx.Client] = []

    def start(self) -> httpx.Client:
        port = free_port()
        self.nodes.append(
            Process("api", redis_url=self.server.url, policies=self.file, port=port, secret="x" * 32, deadline_ms=2000)
        )
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)
        self.clients.append(client)
        return client

    def end(self) -> None:
        for client in self.clients:
            client.close()
        for process in self.nodes:
            process.end()


@pytest.fixture
def fleet(durable: Server, tmp_path: Path) -> Iterator[Fleet]:
    file = tmp_path / "policies.yaml"
    file.write_text(FILE)
    made = Fleet(durable, file)
    yield made
    made.end()


def acquire(client: httpx.Client, work: float) -> httpx.Response:
    return client.post("/v1/acquire", json={"descriptor": {"customer": "c1"}, "work": work})


def until_metric(client: httpx.Client, line: str) -> None:
    deadline_s = time.monotonic() + PATIENT_S
    while line not in client.get("/metrics").text.splitlines():
        assert time.monotonic() < deadline_s, line


@pytest.mark.slow
def test_f_s14_two_nodes_and_a_store_that_comes_and_goes_never_grant_more_than_the_quota(fleet: Fleet) -> None:
    """A monthly quota of 20,000 that was nearly used up: it was 64 % over after eight seconds without the store."""
    clients = [fleet.start(), fleet.start()]
    for client in clients:
        until_metric(client, "headgate_nodes 2.0")
    total, number = 0.0, 0
    while total < QUOTA - 300:
        number += 1
        answer = acquire(clients[number % 2], 100)
        if answer.status_code == 200:  # else the machine was so busy that the deadline was missed
            total += answer.json()["charged"]
    for _ in range(2):
        fleet.server.stop()
        for number in range(400):
            answer = acquire(clients[number % 2], 1)
            assert answer.status_code in (200, 429)
            assert answer.json()["degraded"]
            total += answer.json().get("charged", 0.0) if answer.status_code == 200 else 0.0
        assert total <= QUOTA
        stranger = fleet.start()  # a node that starts meanwhile knows nothing
        assert acquire(stranger, 1).status_code == 503
        fleet.server.start()
        degraded = True
        while degraded:
            answers = [acquire(client, 1) for client in (*clients, stranger)]
            assert {answer.status_code for answer in answers} <= {200, 429, 503}
            total += sum(answer.json()["charged"] for answer in answers if answer.status_code == 200)
            degraded = any(answer.status_code == 503 or answer.json().get("degraded") for answer in answers)
        assert total <= QUOTA
        clients.append(stranger)
    while (answer := acquire(clients[0], 1)).status_code == 200:
        total += 1
    assert answer.status_code == 429
    # Nothing is lost but what the store took and could not say in time.
    assert QUOTA - 20 <= total <= QUOTA


def test_f_s14_sigterm_while_the_store_is_away_names_the_debits_that_are_lost(
    durable: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(FILE)

    async def main(back: bool) -> None:
        engine = await open_engine(Settings(policies=file, deadline_ms=2000), durable.url)
        await engine.start()
        try:
            await until(lambda: not (engine.troubles() or engine.decider.remainders.is_going), within_s=PATIENT_S)
            await granted(engine.decider, 1000)
            await asyncio.to_thread(durable.stop)
            await until(lambda: not engine.store_is_up, within_s=PATIENT_S)
            assert (await granted(engine.decider, 5)).degraded
            if back:
                await asyncio.to_thread(durable.start)
        finally:
            await engine.stop()
            if not back:
                await asyncio.to_thread(durable.start)

    asyncio.run(main(back=True))
    assert "will not be debited" not in caplog.text
    asyncio.run(main(back=False))
    assert "grants of 1 quota buckets without it will not be debited" in caplog.text

    async def left() -> float:
        async with node(durable) as decider:
            return await balance(decider)

    assert asyncio.run(left()) == QUOTA - 1005 - 1000


async def test_f_s14_a_window_that_the_clock_went_back_from_is_unknown(valkey: Server) -> None:
    async with node(valkey) as decider:
        await granted(decider, 1)
        (heard,) = decider.remainders._heard.values()
        heard.start_us += 10**15  # what was heard is of a later month
        shun(decider)
        with pytest.raises(NotDecided, match="does not know"):
            await decider.acquire(ask(1))


async def test_f_s14_a_window_that_ends_without_the_store_takes_its_debits_with_it(valkey: Server) -> None:
    async with node(valkey) as decider:
        await granted(decider, 100)
        shun(decider)
        await granted(decider, 50)
        (going,) = decider.remainders._going.values()
        going.end_us = 1  # the month is over
        await recovered(decider)
        assert decider.remainders.owing == 0
        assert await balance(decider) == QUOTA - 100


async def test_f_s14_a_new_window_without_the_store_begins_full_and_owes_nothing_of_the_last(valkey: Server) -> None:
    async with node(valkey) as decider:
        await granted(decider, QUOTA - 10)
        shun(decider)
        await granted(decider, 10)
        (going,) = decider.remainders._going.values()
        going.start_us -= 1  # the grants so far were of the month before
        going.record.updated_us = going.began_us = 1
        assert (await decider.acquire(ask(1))).degraded
        assert going.rolled
        assert going.owed <= 1


async def test_f_s16_debits_on_a_damaged_record_are_given_up_and_logged(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with node(valkey) as decider:
        await granted(decider, 100)
        shun(decider)
        await granted(decider, 50)
        valkey.client().set(b"hg:{default/0}:b:monthly+quota:c1", b"not ours")
        await recovered(decider)
        assert decider.remainders.owing == 0
        assert "50 units granted without the store are not debited" in caplog.text
