"""Grants: settled once, by how the work ended; progress; streams."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from headgate import Headgate
from tests.support.askers import Spent
from tests.support.live import LiveApi
from tests.support.nodes import until
from tests.support.scripted_service import Operation, ScriptedService, granted, settled


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, None),
        (ValueError("x"), "error"),
        (TimeoutError(), "timeout"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
async def test_the_outcome_says_how_the_work_ended(
    service: ScriptedService, error: BaseException | None, outcome: str | None
) -> None:
    gate = Headgate(service.url)
    with nullcontext() if error is None else pytest.raises(type(error)):
        async with gate.acquire({"service": "a"}, work=3) as grant:
            grant.progress(2)
            if error is not None:
                raise error
    await gate.close()
    (settle,) = service.finals
    assert (settle["work"], settle.get("outcome")) == (2, outcome)


async def test_a_cancelled_task_settles_what_it_did(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        begun = asyncio.Event()

        async def work() -> None:
            async with gate.acquire({"service": "a"}) as grant:
                grant.progress(7)
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await gate.flush() == 0
        assert [(one["work"], one["outcome"]) for one in service.finals] == [(7, "cancelled")]


async def test_outcomes_are_counted_by_the_policy_that_names_them(node: LiveApi, customer: str) -> None:
    async with Headgate(node.base) as gate:
        for error in (ValueError(), TimeoutError(), asyncio.CancelledError()):
            with pytest.raises(type(error)):
                async with gate.acquire({"service": "timed", "customer": customer}):
                    raise error
        await gate.flush()
        assert gate.counts()["settles_refused"] == 0, "the service knows these outcomes"


async def test_work_that_is_no_number_is_refused_before_it_is_sent(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"})
        for work in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="work is a number from 0 on"):
                grant.settle(work)
            with pytest.raises(ValueError, match="work is a number from 0 on"):
                grant.progress(work)
        assert not grant.settled


# Progress.


async def test_progress_is_put_together(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"})
        for done in range(1, 2001):
            grant.progress(done)
            if done % 100 == 0:
                await asyncio.sleep(0)
        grant.progress(5)
        await until(lambda: service.settles)
        assert len(service.settles) <= 5
        await until(lambda: service.settles[-1]["work"] == 2000)
        grant.settle()
        assert await gate.flush() == 0
    assert [one["work"] for one in service.finals] == [2000], "a smaller sum came late"
    assert gate.counts()["settles_waiting"] == 0


async def test_stop_is_remembered(node: LiveApi, customer: str) -> None:
    async with Headgate(node.base) as gate:
        grant = await gate.acquire({"service": "streams", "customer": customer}, work=1)
        assert not grant.stopped
        grant.progress(20)
        grant.progress(100)
        await until(lambda: grant.stopped)
        grant.settle(0)
        await gate.flush()
        assert grant.stopped, "also when the debt has been paid back"


async def test_a_long_grant_is_renewed_until_it_is_settled(node: LiveApi, customer: str, spent: Spent) -> None:
    async with Headgate(node.base) as gate:
        grant = await gate.acquire({"service": "places", "customer": customer}, work=1, ttl_ms=400)
        calls = gate.parts().calls
        await until(lambda: calls.settles >= 6)  # six renewals: well beyond its time to live
        grant.settle(3)
        assert await gate.flush() == 0
        assert gate.counts()["settles_refused"] == 0, "the reservation was still known"


async def test_a_grant_that_was_dropped_is_not_renewed(service: ScriptedService) -> None:
    service.decide = lambda number, operation: granted(number, operation, expires_in_ms=100)
    async with Headgate(service.url) as gate:
        kept = await gate.acquire({"service": "a"})
        dropped = await gate.acquire({"service": "a"})
        await until(lambda: {one["reservation"] for one in service.settles} == {"r1", "r2"})
        del dropped
        gc.collect()
        seen = [one["reservation"] for one in service.settles].count("r2")
        more = len(service.settles) + 6
        await until(lambda: len(service.settles) > more)
        assert [one["reservation"] for one in service.settles].count("r2") <= seen + 2  # one may have been waiting
        assert kept
        assert not service.finals


async def test_f_r17_progress_that_nobody_hears_is_sent_when_the_service_is_back(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"})
        service.correct = lambda _: (503, {"reason": "store_unavailable"})
        grant.progress(4)
        await until(lambda: len(service.settles) >= 3)
        service.correct = settled
        grant.settle(9)
        assert await gate.flush() == 0
        assert gate.counts()["settles_waiting"] == 0
    assert service.finals[-1]["work"] == 9


async def test_a_settle_overtakes_its_own_progress(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"})
        service.open.clear()
        grant._settler._settlement.sent_s = 0.0  # type: ignore[attr-defined]
        grant.progress(4)
        await until(lambda: service.settles)
        grant.settle(9)
        flushing = asyncio.create_task(gate.flush())
        await until(lambda: service.finals)
        assert gate.counts()["settles_waiting"] == 1, "both copies are of one settle"
        assert not flushing.done()
        service.open.set()
        assert await flushing == 0
        assert gate.counts()["settles_waiting"] == 0


# Streams.


class Source:
    """Chunks, and whether they were closed."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        self.count, self.error = count, error
        self.closed = False

    async def read(self) -> AsyncIterator[str]:
        try:
            for _ in range(self.count):
                await asyncio.sleep(0)
                yield "abc"
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True

    def __iter__(self) -> Iterator[str]:
        yield from ["abc"] * self.count
        if self.error is not None:
            raise self.error


async def test_a_stream_is_settled_by_what_it_gave(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        async with gate.acquire({"service": "a"}, work=100) as grant:
            assert [chunk async for chunk in grant.stream(Source(4).read(), work=len)] == ["abc"] * 4
        await gate.flush()
        assert [(one["work"], one.get("outcome")) for one in service.finals] == [(12, None)]


async def test_a_reader_who_leaves_pays_for_what_he_was_given(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        source = Source(100)
        async with gate.acquire({"service": "a"}, work=100) as grant:
            async for _ in grant.stream(source.read(), work=len):
                break
        grant = await gate.acquire({"service": "a"}, work=100)
        stream = grant.stream(Source(100).read(), work=len)
        assert [await anext(stream) for _ in range(3)] == ["abc"] * 3
        await stream.aclose()  # type: ignore[attr-defined]
        await gate.flush()
        assert [(one["work"], one.get("outcome")) for one in service.finals] == [(3, None), (9, "cancelled")]
        await until(lambda: source.closed)


async def test_a_stream_that_fails_or_is_cancelled_says_so(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        for error in (ValueError(), TimeoutError(), asyncio.CancelledError()):
            grant = await gate.acquire({"service": "a"})
            with pytest.raises(type(error)):
                async for _ in grant.stream(Source(2, error).read(), work=len):
                    pass
        await gate.flush()
        assert sorted((one["work"], one["outcome"]) for one in service.finals) == [
            (6, "cancelled"), (6, "error"), (6, "timeout"),
        ]  # fmt: skip


async def test_a_stream_ends_when_the_service_asks_to_stop(service: ScriptedService) -> None:
    service.correct = lambda operation: settled(operation, stop=operation["work"] >= 30)
    async with Headgate(service.url) as gate, gate.acquire({"service": "a"}) as grant:
        source = Source(100_000)
        given = 0
        async for _ in grant.stream(source.read(), work=len):
            given += 1
        assert grant.stopped
        assert 10 <= given < 100_000
        assert source.closed, "what was not read may hold a connection"
        await gate.flush()
        assert service.finals[-1]["work"] == 3 * given


async def test_a_source_without_await_is_the_same(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"})
        assert list(grant.stream_sync(Source(3), work=len)) == ["abc"] * 3
        grant = await gate.acquire({"service": "a"})
        with pytest.raises(LookupError):
            list(grant.stream_sync(Source(2, LookupError()), work=len))
        grant = await gate.acquire({"service": "a"})
        for _ in grant.stream_sync(Source(9), work=len):
            break
        await gate.flush()
    found = sorted((one["work"], one.get("outcome", "ok")) for one in service.finals)
    assert found == [(3, "cancelled"), (6, "error"), (9, "ok")]


def _decide_with(quality: float) -> Any:
    def decide(number: int, operation: Operation) -> Any:
        return granted(number, operation, quality=quality, state="degraded", degraded=True)

    return decide


async def test_a_grant_says_how_good_an_answer_should_be(service: ScriptedService) -> None:
    service.decide = _decide_with(0.4)
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"})
        assert (grant.quality, grant.state, grant.degraded) == (0.4, "degraded", True)
