"""Calls: acquires that go together, settles that ride along and are repeated until they are answered."""

import asyncio
import logging
import time
from collections import Counter
from itertools import count
from typing import Any

import pytest

from headgate import Headgate, Misused
from limiter.client import calls
from limiter.client.calls import BATCH_BYTES, BATCH_MAX, CALLS_MAX
from tests.support.nodes import until
from tests.support.scripted_service import Operation, ScriptedService, granted, settled


async def ask(gate: Headgate, number: int, **descriptor: str) -> list[Any]:
    asked = (gate.acquire({"service": "a", "number": str(one), **descriptor}).grant() for one in range(number))
    return await asyncio.gather(*asked)


async def test_acquires_that_come_together_go_together(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        grants = await ask(gate, 1000)
        assert len(grants) == 1000
        assert len(service.calls) <= 1000 / BATCH_MAX + 2
        for grant in grants:
            grant.settle(2)
        assert await gate.flush() == 0
        assert len(service.calls) <= 2 * (1000 / BATCH_MAX + 2)
    assert max(map(len, service.calls)) <= BATCH_MAX
    numbers = [one["descriptor"]["number"] for one in service.acquires]
    assert sorted(numbers, key=int) == [str(one) for one in range(1000)]


async def test_each_gets_its_own_answer(service: ScriptedService) -> None:
    service.decide = lambda number, operation: granted(
        number, operation, charged=float(operation["descriptor"]["number"])
    )
    async with Headgate(service.url) as gate:
        assert [grant.charged for grant in await ask(gate, 300)] == list(range(300))


async def test_a_slow_call_holds_up_no_other(service: ScriptedService) -> None:
    async with Headgate(service.url, deadline_ms=20_000) as gate:
        service.open.clear()
        slow = asyncio.create_task(gate.acquire({"service": "slow"}).grant())
        await until(lambda: service.calls)
        beside = asyncio.create_task(gate.acquire({"service": "beside"}).grant())
        await until(lambda: len(service.calls) == 2)
        assert not slow.done()
        service.open.set()
        assert await beside
        assert await slow


async def test_calls_beside_each_other_are_few(service: ScriptedService) -> None:
    async with Headgate(service.url, deadline_ms=20_000) as gate:
        service.open.clear()
        tasks = []
        for _ in range(CALLS_MAX + 4):
            tasks.append(asyncio.create_task(gate.acquire({"service": "a"}).grant()))
            if len(tasks) <= CALLS_MAX:
                await until(lambda: len(service.calls) == len(tasks))
        began_s = time.monotonic()
        await until(lambda: time.monotonic() - began_s > 4 * calls.BESIDE_S)
        assert len(service.calls) == CALLS_MAX
        service.open.set()
        await asyncio.gather(*tasks)
        assert len(service.calls) == CALLS_MAX + 1, "those who waited went together"
        assert len(service.connections) <= CALLS_MAX


async def test_the_bytes_of_a_call_are_bounded(service: ScriptedService) -> None:
    large = {f"dimension-{one}": "x" * 1000 for one in range(32)}
    async with Headgate(service.url, deadline_ms=20_000) as gate:
        await ask(gate, 60, **large)
    assert service.bytes_most < BATCH_BYTES + 40_000
    assert len(service.acquires) == 60


async def test_settles_ride_along_with_acquires(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        for _ in range(20):
            grant = await gate.acquire({"service": "a"})
            grant.settle(2)
        assert len(service.calls) <= 22


async def test_a_settle_goes_by_itself_soon(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        (await gate.acquire({"service": "a"})).settle(2)
        await until(lambda: service.finals)


async def test_an_acquire_that_its_batch_had_no_room_for_goes_alone(service: ScriptedService) -> None:
    numbers = count()

    def decide(number: int, operation: Operation) -> Any:
        if len(service.calls[-1]) > 1 and next(numbers) % 3 == 0:
            return 413, {"reason": "too_long", "detail": "buckets"}
        return granted(number, operation)

    service.decide = decide
    async with Headgate(service.url, deadline_ms=20_000) as gate:
        assert all(await ask(gate, 30))
        service.decide = lambda *_: (413, {"reason": "too_long", "detail": "this one alone"})
        with pytest.raises(Misused, match="this one alone"):
            await gate.acquire({"service": "a"})


@pytest.mark.parametrize("answer", [(503, {"reason": "node_busy"}), (500, {}), (429, {}), (408, {})])
async def test_a_settle_is_sent_until_it_is_answered(service: ScriptedService, answer: Any) -> None:
    tries: Counter[str] = Counter()

    def correct(operation: Operation) -> Any:
        tries[operation["reservation"]] += 1
        return answer if tries[operation["reservation"]] <= 3 else settled(operation)

    service.correct = correct
    async with Headgate(service.url) as gate:
        for grant in await ask(gate, 20):
            grant.settle(2)
        assert await gate.flush() == 0
        assert gate.counts()["settles_repeated"] == 60
    assert set(tries.values()) == {4}


async def test_a_settle_that_is_never_taken_is_counted(
    service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    service.correct = lambda _: (404, {"reason": "unknown_reservation"})
    async with Headgate(service.url) as gate:
        (await gate.acquire({"service": "a"})).settle(2)
        assert await gate.flush() == 0
        assert (gate.counts()["settles_refused"], gate.counts()["settles_waiting"]) == (1, 0)
    assert "a settle was not taken: 404 unknown_reservation" in caplog.text


async def test_an_answer_with_too_few_results_is_none(service: ScriptedService) -> None:
    async with Headgate(service.url, unavailable="open") as gate:
        service.whole = (200, {"results": []})
        assert all(grant.degraded for grant in await ask(gate, 3))
        service.whole = None
        assert not (await gate.acquire({"service": "a"})).degraded


async def test_what_is_settled_after_closing_is_told(
    service: ScriptedService, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Headgate(service.url)
    grant = await gate.acquire({"service": "a"})
    await gate.close()
    with caplog.at_level(logging.WARNING):
        grant.settle(3)
    assert "settled after its client was closed" in caplog.text
    assert service.finals == []


async def test_flush_says_how_many_are_left(service: ScriptedService, caplog: pytest.LogCaptureFixture) -> None:
    service.correct = lambda _: (503, {})
    gate = Headgate(service.url)
    for grant in await ask(gate, 5):
        grant.settle(2)
    assert await gate.flush(0.05) == 5
    await gate.close(0.05)
    assert "5 settles were not answered" in caplog.text
