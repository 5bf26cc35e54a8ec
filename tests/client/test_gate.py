"""The gate: what it asks, what it gives, and what happens to a refused request."""

import asyncio
import hashlib
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate import AdaptiveThrottle, Headgate, Misused, Throttled, criticality
from limiter.client.request_context import enter
from tests.support.askers import Spent
from tests.support.live import LiveApi, live
from tests.support.nodes import until
from tests.support.scripted_service import BUSY, Operation, ScriptedService, granted, refused
from tests.support.servers import Server


async def test_an_estimate_is_charged_and_corrected_by_the_settle(node: LiveApi, customer: str, spent: Spent) -> None:
    descriptor = {"service": "ledger", "customer": customer}
    async with Headgate(node.base) as gate:
        async with gate.acquire(descriptor, work=3) as grant:
            assert (bool(grant), grant.charged, grant.local, grant.covered) == (True, 3, False, True)
            assert [one["policy"] for one in grant.limits] == ["ledger"]
            assert spent("ledger", customer) == 3
            grant.settle(12)
        assert await gate.flush() == 0
        assert spent("ledger", customer) == 12


async def test_without_a_settle_the_estimate_stays(node: LiveApi, customer: str, spent: Spent) -> None:
    async with Headgate(node.base) as gate:
        async with gate.acquire({"service": "ledger", "customer": customer}, work=3):
            pass
        grant = await gate.acquire({"service": "ledger", "customer": customer}, work=4)
        grant.settle()
        grant.settle(100)
        assert grant.settled
    assert spent("ledger", customer) == 7, "a second settle does nothing"


async def test_closing_sends_what_waits(node: LiveApi, customer: str, spent: Spent) -> None:
    gate = Headgate(node.base)
    grants = [await gate.acquire({"service": "ledger", "customer": customer}, work=1) for _ in range(20)]
    for grant in grants:
        grant.settle(2)
    await gate.close()
    await gate.close()
    assert spent("ledger", customer) == 40


async def test_a_closed_client_opens_again(service: ScriptedService) -> None:
    gate = Headgate(service.url)
    async with gate:
        await gate.acquire({"service": "a"})
    async with gate:
        assert await gate.acquire({"service": "a"})


def test_a_client_serves_one_loop_after_another(node: LiveApi, customer: str) -> None:
    gate = Headgate(node.base)

    async def ask() -> None:
        async with gate, gate.acquire({"service": "ledger", "customer": customer}) as grant:
            assert grant

    for _ in range(2):
        asyncio.run(ask())


async def test_a_wrong_call_names_the_field(node: LiveApi) -> None:
    async with Headgate(node.base) as gate:
        with pytest.raises(Misused, match="work") as wrong:
            await gate.acquire({"service": "ledger"}, work=-1)
        assert (wrong.value.status, wrong.value.reason) == (422, "invalid")
        with pytest.raises(ValueError, match="work is a number, not nan"):
            await gate.acquire({"service": "ledger"}, work=float("nan"))
        with pytest.raises(Misused, match="criticality"):
            await gate.acquire({"service": "ledger"}, criticality="urgent")


async def test_a_wrong_call_spoils_no_other_in_its_batch(node: LiveApi, customer: str) -> None:
    async with Headgate(node.base) as gate:
        works = [1, -1] * 10
        asked = [gate.acquire({"service": "ledger", "customer": customer}, work=work).grant() for work in works]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one).__name__ for one in found] == ["Grant", "Misused"] * 10


async def test_policies_that_forbid_are_refusals(node: LiveApi, customer: str) -> None:
    async with Headgate(node.base, adaptive=False) as gate:
        with pytest.raises(Throttled) as denied:
            await gate.acquire({"service": "closed", "customer": customer})
        assert (denied.value.reason, denied.value.policy, denied.value.retry) == ("denied", "closed", "never")
        descriptor = {"service": "blocking", "customer": customer}
        assert await gate.acquire(descriptor, work=5)
        refusals = [(await gate.acquire(descriptor, work=5, on_refused="degrade")).refusal for _ in range(3)]
        assert [one.reason for one in refusals if isinstance(one, Throttled)] == ["work", "work", "blocked"]
        with pytest.raises(Throttled) as large:
            await gate.acquire({"service": "bounded", "customer": customer}, work=41, on_refused="wait")
        assert (large.value.reason, large.value.retry) == ("request_too_large", "never")


async def test_the_class_of_the_request_is_sent(service: ScriptedService) -> None:
    async with Headgate(service.url, namespace="tenant") as gate:
        with criticality("sheddable"):
            await gate.acquire({"service": "a"}, ttl_ms=500, expected_latency_ms=20)
        await gate.acquire({"service": "a"}, criticality="critical_plus", namespace="default")
    first, second = service.acquires
    assert {name: first[name] for name in ("criticality", "namespace", "ttl_ms", "expected_latency_ms")} == {
        "criticality": "sheddable", "namespace": "tenant", "ttl_ms": 500, "expected_latency_ms": 20,
    }  # fmt: skip
    assert (second["criticality"], second.get("namespace")) == ("critical_plus", None)


async def test_latency_counts_from_where_the_request_entered(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        with enter(time.monotonic_ns() - 5_000_000_000):
            async with gate.acquire({"service": "a"}):
                pass
        async with gate.acquire({"service": "a"}):
            pass
    entered, plain = service.finals
    assert 5000 <= entered["latency_ms"] < 35_000
    assert plain["latency_ms"] < 5000


async def test_keys_are_new_whatever_the_program_does_to_random(service: ScriptedService) -> None:
    for _ in range(2):
        random.seed(1)
        async with Headgate(service.url) as gate:
            await asyncio.gather(*(gate.acquire({"service": "a"}).grant() for _ in range(10)))
    assert len({one["idempotency_key"] for one in service.acquires}) == 20


# Refused.


async def test_a_refused_request_goes_on_falsy_where_the_caller_wants_that(service: ScriptedService) -> None:
    service.decide = lambda *_: refused(retry="never", reason="request_too_large")
    async with Headgate(service.url, adaptive=False) as gate:
        grant = await gate.acquire({"service": "a"}, on_refused="degrade")
        assert (bool(grant), grant.quality) == (False, 0.0)
        assert isinstance(grant.refusal, Throttled)
        grant.progress(3)
        grant.settle(5)
        seen: list[Throttled] = []
        assert not await gate.acquire({"service": "a"}, on_refused=seen.append)

        async def note(refusal: Throttled) -> None:
            await asyncio.sleep(0)
            seen.append(refusal)

        assert not await gate.acquire({"service": "a"}, on_refused=note)
        assert [one.reason for one in seen] == ["request_too_large"] * 2

        def fail(refusal: Throttled) -> None:
            raise LookupError(refusal.policy)

        with pytest.raises(LookupError, match="reads"):
            await gate.acquire({"service": "a"}, on_refused=fail)
    assert service.settles == []


def test_an_unknown_way_to_be_refused_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="raise, wait, degrade or a function"):
        Headgate(on_refused="retry")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="off or auto"):
        Headgate(local="on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="open, closed or local"):
        Headgate(unavailable="maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:8080"):
        Headgate("localhost:8080")


async def test_waiting_gets_room_in_the_order_of_coming(node: LiveApi, customer: str) -> None:
    order: list[int] = []
    async with Headgate(node.base, on_refused="wait", wait_s=20) as gate:

        async def work(number: int) -> None:
            async with gate.acquire({"service": "paced", "customer": customer}, work=1):
                order.append(number)

        tasks = []
        for number in range(12):
            tasks.append(asyncio.create_task(work(number)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        acquires = gate.parts().calls.acquires
        assert gate.parts().lines == {}
    first_asked = order.index(max(order[:3]))  # those who asked before there was a line stand as they were answered
    assert first_asked < 12
    assert sorted(order) == list(range(12))
    assert acquires < 60, "those behind the first do not ask"


async def test_a_newcomer_stands_behind_those_who_wait(service: ScriptedService) -> None:
    room = 0

    def decide(number: int, operation: Operation) -> Any:
        nonlocal room
        if room <= 0:
            return refused()
        room -= 1
        return granted(number, operation)

    service.decide = decide
    order: list[str] = []
    async with Headgate(service.url, on_refused="wait", adaptive=False) as gate:

        async def work(name: str) -> None:
            await gate.acquire({"service": "a"})
            order.append(name)

        first = asyncio.create_task(work("first"))
        await until(lambda: gate.parts().lines)
        asked = len(service.acquires)
        second = asyncio.create_task(work("second"))
        await until(lambda: len(service.acquires) > asked + 2)
        room = 1
        await first
        assert order == ["first"]
        room = 1
        await second
    assert order == ["first", "second"]


async def test_waiting_ends_with_the_time_for_it(service: ScriptedService) -> None:
    service.decide = lambda *_: refused(retry_after_ms=3_600_000)
    async with Headgate(service.url, on_refused="wait", adaptive=False) as gate:
        began_s = time.monotonic()
        with pytest.raises(Throttled):
            await gate.acquire({"service": "a"}, wait_s=60)
        assert time.monotonic() - began_s < 30, "room that comes too late is not waited for"
        service.decide = lambda *_: refused(retry_after_ms=1)
        found = await asyncio.gather(
            *(gate.acquire({"service": "b"}, wait_s=0.2).grant() for _ in range(3)), return_exceptions=True
        )
        assert [type(one) for one in found] == [Throttled] * 3
        assert gate.parts().lines == {}


async def test_a_waiter_who_is_cancelled_leaves_the_line(service: ScriptedService) -> None:
    service.decide = lambda *_: refused(retry_after_ms=5)
    async with Headgate(service.url, on_refused="wait", adaptive=False) as gate:
        waiters = [asyncio.create_task(gate.acquire({"service": "a"}).grant()) for _ in range(3)]
        await until(lambda: any(line.waiting == 3 for line in gate.parts().lines.values()))
        for waiter in waiters[:2]:
            waiter.cancel()
        await asyncio.gather(*waiters[:2], return_exceptions=True)
        service.decide = granted
        assert await waiters[2]
        assert gate.parts().lines == {}


# Given up (F-R16).


async def test_f_r16_what_a_cancelled_task_was_granted_is_given_back(service: ScriptedService) -> None:
    service.open.clear()
    async with Headgate(service.url) as gate:
        tasks = [asyncio.create_task(gate.acquire({"service": "a"}).grant()) for _ in range(5)]
        await until(lambda: len(service.acquires) == 5)
        for task in tasks[:4]:
            task.cancel()
        await asyncio.gather(*tasks[:4], return_exceptions=True)
        service.open.set()
        assert await tasks[4]
        await until(lambda: len(service.finals) == 4)
        assert {(one["work"], one["outcome"]) for one in service.finals} == {(0.0, "cancelled")}
        assert await gate.acquire({"service": "a"}), "the connections are as they were"
        assert len(service.connections) <= 3


async def test_f_r16_a_task_cancelled_before_its_request_was_sent_asks_nothing(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        task = asyncio.create_task(gate.acquire({"service": "a"}).grant())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await gate.acquire({"service": "b"})
    assert [one["descriptor"]["service"] for one in service.acquires] == ["b"]


async def test_f_r16_an_answer_that_comes_with_the_cancellation_is_given_back(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Headgate(service.url) as gate:
        await gate.acquire({"service": "a"})
        calls = gate.parts().calls
        task = asyncio.create_task(gate.acquire({"service": "a"}).grant())
        tell = calls._tell

        def tell_and_cancel(*arguments: Any) -> None:
            tell(*arguments)
            task.cancel()

        monkeypatch.setattr(calls, "_tell", tell_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        await gate.flush()
        assert [(one["reservation"], one["work"]) for one in service.finals] == [("r2", 0.0)]


async def test_a_grant_that_comes_after_the_deadline_is_given_back(service: ScriptedService) -> None:
    service.open.clear()
    async with Headgate(service.url, unavailable="closed") as gate:
        task = asyncio.create_task(gate.acquire({"service": "a"}, deadline_ms=30).grant())
        with pytest.raises(Throttled) as late:
            await task
        assert (late.value.reason, late.value.status) == ("unavailable", 503)
        service.open.set()
        await until(lambda: service.finals)
        assert service.finals[0]["work"] == 0


async def test_closing_gives_back_what_nobody_waits_for(service: ScriptedService) -> None:
    service.open.clear()
    gate = Headgate(service.url)
    task = asyncio.create_task(gate.acquire({"service": "a"}).grant())
    await until(lambda: service.acquires)
    task.cancel()
    closing = asyncio.create_task(gate.close())
    await asyncio.sleep(0)
    service.open.set()
    await closing
    assert [one["work"] for one in service.finals] == [0.0]


async def test_closing_ends_those_who_wait_for_an_answer(service: ScriptedService) -> None:
    service.open.clear()
    gate = Headgate(service.url, unavailable="closed")
    task = asyncio.create_task(gate.acquire({"service": "a"}, deadline_ms=20_000).grant())
    await until(lambda: service.acquires)
    await gate.close(timeout_s=0.05)
    with pytest.raises(Throttled, match="given up"):
        await task


# Settles wait.


async def test_too_many_settles_let_nothing_new_begin(service: ScriptedService) -> None:
    async with Headgate(service.url, settles_max=3) as gate:
        grants = [await gate.acquire({"service": "a"}) for _ in range(4)]
        service.correct = lambda _: BUSY
        for grant in grants[:3]:
            grant.settle(2)
        with pytest.raises(Throttled) as full:
            await gate.acquire({"service": "a"})
        assert (full.value.reason, full.value.local, full.value.retry) == ("settles_waiting", True, "after")
        service.correct = lambda _: (200, {})
        assert await gate.flush() == 0
        assert await gate.acquire({"service": "a"})


async def test_a_reservation_from_elsewhere_is_settled(node: LiveApi, customer: str, spent: Spent) -> None:
    async with Headgate(node.base) as gate, httpx.AsyncClient(base_url=node.base) as client:
        body = {"descriptor": {"service": "ledger", "customer": customer}, "work": 3}
        reservation = (await client.post("/v1/acquire", json=body)).json()["reservation"]
        assert (await gate.settle(reservation, 5, latency_ms=2))["adjusted"] == 2
        assert (await gate.settle(reservation, 5))["duplicate"] is True
        with pytest.raises(Misused, match="unknown_reservation"):
            await gate.settle("forged", 5)
    assert spent("ledger", customer) == 5


# Retries.


@pytest.mark.parametrize("answer", [refused("overload", drawn_share=1.0), refused("overload"), BUSY])
async def test_a_storm_of_refusals_costs_no_more_calls(service: ScriptedService, answer: Any) -> None:
    service.decide = lambda *_: answer
    async with Headgate(service.url, unavailable="closed", adaptive=False) as gate:
        requests = 500
        outcomes: Counter[str] = Counter()
        for _ in range(requests // 10):
            found = await asyncio.gather(
                *(gate.acquire({"service": "a"}).grant() for _ in range(10)), return_exceptions=True
            )
            outcomes.update(type(one).__name__ for one in found)
    assert outcomes == {"Throttled": requests}
    assert len(service.acquires) <= 1.1 * requests + 10
    attempts = Counter(one.get("attempt", 1) for one in service.acquires)
    assert max(attempts) <= 3


async def test_a_busy_node_is_asked_again_while_the_budget_lasts(service: ScriptedService) -> None:
    service.decide = lambda number, operation: BUSY if number == 1 else granted(number, operation)
    async with Headgate(service.url) as gate:
        assert await gate.acquire({"service": "a"})
    first, second = service.acquires
    assert first["idempotency_key"] == second["idempotency_key"]
    assert (first.get("attempt"), second["attempt"]) == (None, 2)


# Adaptive throttling (G3).


class Steady:
    """A service of so many requests a second, asked in steps of 10 ms by a clock of the test's."""

    def __init__(self, gate: Headgate, service: ScriptedService, accepted_per_s: float, reason: str) -> None:
        self.now_s = 1000.0
        self.gate, self.service = gate, service
        self.room = 0.0
        self.accepted_per_s = accepted_per_s
        self.reason = reason
        self.served = 0
        gate._now_s = lambda: self.now_s
        service.decide = self.decide

    def decide(self, number: int, operation: Operation) -> Any:
        if self.room < 1:
            return refused(self.reason)
        self.room -= 1
        self.served += 1
        return granted(number, operation)

    async def run(self, seconds: int, per_s: int) -> tuple[float, float]:
        """Return how many requests were sent and served, per second."""
        sent, served = len(self.service.acquires), self.served
        for _ in range(seconds * per_s // 10):
            self.now_s += 10 / per_s
            self.room = min(self.room + self.accepted_per_s * 10 / per_s, self.accepted_per_s)
            asked = (self.gate.acquire({"service": "a"}).grant() for _ in range(10))
            await asyncio.gather(*asked, return_exceptions=True)
        return (len(self.service.acquires) - sent) / seconds, (self.served - served) / seconds


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["overload", "work"])
async def test_g3_a_target_that_accepts_ten_of_a_hundred_is_sent_twenty(service: ScriptedService, reason: str) -> None:
    async with Headgate(service.url, adaptive=AdaptiveThrottle(), deadline_ms=20_000) as gate:
        gate._draw = random.Random(5).random
        steady = Steady(gate, service, 10, reason)
        await steady.run(150, 100)
        sent, served = await steady.run(60, 100)
        assert 15 <= sent <= 25
        assert served == pytest.approx(10, abs=0.5)
        assert gate.rejected > 0
        assert max(gate.probabilities().values()) == pytest.approx(0.8 if reason == "overload" else 0.0, abs=0.05)


@pytest.mark.slow
async def test_g3_a_target_that_draws_is_still_asked_for_its_tenth(service: ScriptedService) -> None:
    draw = random.Random(7).random
    async with Headgate(service.url, deadline_ms=20_000) as gate:
        gate._draw = random.Random(5).random
        steady = Steady(gate, service, 10, "overload")

        def decide(number: int, operation: Operation) -> Any:
            if draw() < 0.9:
                return refused("overload", drawn_share=0.9)
            return granted(number, operation, drawn_share=0.9)

        service.decide = decide
        await steady.run(60, 100)
        sent, _ = await steady.run(60, 100)
    assert sent >= 97, "what a draw refuses says nothing about what the target can do"


# Load reports (G5) and API keys.


async def test_g5_load_is_reported_while_the_client_is_open(service: ScriptedService) -> None:
    reports: list[Operation] = []

    def take(path: str, body: Operation) -> Any:
        assert path == "/v1/signals"
        reports.append(body)
        return 200, {}

    service.others = take
    options = {"policy": "busy", "interval_s": 0.05, "queue_age_s": lambda: 0.5, "source": "here"}
    async with Headgate(service.url, namespace="tenant", report_load=options) as gate:
        await until(lambda: len(reports) >= 2)
        load = gate.parts().load
        assert load is not None
    assert not [task for task in asyncio.all_tasks() if "load" in task.get_name()], "it ends with the client"
    assert {name: reports[-1][name] for name in ("policy", "namespace", "source")} == {
        "policy": "busy", "namespace": "tenant", "source": "here",
    }  # fmt: skip
    assert reports[-1]["signals"]["queue_age_s"] == pytest.approx(0.5)


def test_g5_a_client_for_threads_measures_threads(node: LiveApi) -> None:
    with Headgate.sync(node.base, report_load=True) as gate:
        load = gate.inner.parts().load
        assert load is not None
        assert load._of == "threads"


async def test_an_api_key_is_sent_and_a_wrong_one_is_the_programs_mistake(store: Server, policies: Path) -> None:
    key = "hg_key_0123456789abcdefghijklmnop"
    digest = hashlib.sha256(key.encode()).hexdigest()
    with live(store.url, policies, api_keys=f"orders:caller:{digest}") as closed:
        async with Headgate(closed.base, api_key=key) as gate:
            assert await gate.acquire({"service": "ledger"})
        async with Headgate(closed.base, api_key="wrong") as gate:
            with pytest.raises(Misused, match="401 unauthenticated"):
                await gate.acquire({"service": "ledger"})
