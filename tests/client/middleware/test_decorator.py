"""Functions that ask before they run, of all four kinds, before a real Headgate."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import Headgate, Throttled, limited, present_grant
from tests.support import eventually
from tests.support.live import LiveApi
from tests.support.settles import Settled

CALL: dict[str, str] = {"service": "pages", "customer": "{customer}"}


@pytest.fixture
async def gate(headgate: LiveApi) -> AsyncIterator[Headgate]:
    async with Headgate(headgate.base) as gate:
        yield gate


async def test_a_function_is_refused_once_its_limit_is_used_up(gate: Headgate, customer: str) -> None:
    @gate.limited(CALL, work=11)
    async def search(customer: str, words: str = "all") -> str:
        """Find."""
        return words

    assert search.__doc__ == "Find."
    assert await search(customer, words="some") == "some"
    with pytest.raises(Throttled) as refused:
        await search(customer)
    assert refused.value.policy == "pages"
    assert await search(f"{customer}-other") == "all"


async def test_a_fallback_is_called_in_place_of_a_refused_function(gate: Headgate, customer: str) -> None:
    async def instead(customer: str) -> str:
        return f"nothing for {customer}"

    @gate.limited(CALL, work=11, fallback=instead)
    async def search(customer: str) -> str:
        return "found"

    @gate.limited(CALL, fallback=lambda customer: "at once")
    async def look(customer: str) -> str:
        return "found"

    assert [await search(customer), await search(customer)] == ["found", f"nothing for {customer}"]
    assert await look(customer) == "at once"


@pytest.mark.parametrize("settle", ["latency", "cpu", len, None])
async def test_the_true_work_is_settled(
    settle: Any, gate: Headgate, headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    terms: Any = {"work": lambda customer: 2.0, "settle": settle}

    @gate.limited(lambda customer: {"service": "pages", "customer": customer}, **terms)
    async def search(customer: str) -> str:
        await asyncio.sleep(0)
        return "x" * 50

    with Headgate.sync(headgate.base) as sync_gate:

        @sync_gate.limited({"service": "pages", "customer": f"{customer}-sync"}, **terms)
        def find(customer: str) -> str:
            return "x" * 50

        await search(customer)
        find(customer)
    for work, outcome, _ in settled:
        assert outcome == "ok"
        assert work == 50 if settle is len else work == 2 if settle is None else work > 0
    assert len(settled) == 2


async def test_the_function_may_settle_by_itself(gate: Headgate, customer: str, balance: Callable[..., float]) -> None:
    @gate.limited({"service": "pages", "customer": "{order.customer}"})
    async def search(order: Any) -> None:
        present_grant().settle(work=50)

    await search(SimpleNamespace(customer=customer))
    await gate.flush()
    assert balance() == pytest.approx(-40, abs=0.1)
    assert present_grant().charged == 0


@pytest.mark.parametrize(("error", "outcome"), [(ValueError(), "error"), (TimeoutError(), "timeout")])
async def test_an_exception_is_the_outcome(
    error: Exception, outcome: str, gate: Headgate, headgate: LiveApi, customer: str, settled: list[Settled]
) -> None:
    @gate.limited(CALL)
    async def search(customer: str) -> None:
        raise error

    with Headgate.sync(headgate.base) as sync_gate:

        @limited(sync_gate, CALL)
        def find(customer: str) -> None:
            raise error

        with pytest.raises(type(error)):
            await search(customer)
        with pytest.raises(type(error)):
            find(customer)
    assert [one.outcome for one in settled] == [outcome, outcome]


async def test_a_stream_settles_what_was_read_and_is_cancelled_by_a_reader_that_leaves(
    gate: Headgate, customer: str, settled: list[Settled]
) -> None:
    closed = []

    @gate.limited(CALL, each=len)
    async def words(customer: str) -> AsyncIterator[str]:
        try:
            for _ in range(4):
                yield "word"
        finally:
            closed.append(customer)

    assert [word async for word in words(customer)] == ["word"] * 4
    stream: Any = words(f"{customer}-other")
    await anext(stream)
    await stream.aclose()
    assert [one[:2] for one in settled] == [(16, "ok"), (4, "cancelled")]
    assert closed == [customer, f"{customer}-other"]


async def test_a_stream_without_work_of_its_items_leaves_the_charge(
    gate: Headgate, customer: str, settled: list[Settled]
) -> None:
    async def nothing(customer: str) -> AsyncIterator[str]:
        yield "nothing"

    @gate.limited(CALL, work=11, fallback=nothing)
    async def words(customer: str) -> AsyncIterator[str]:
        yield "word"

    assert [word async for word in words(customer)] == ["word"]
    assert [one[:2] for one in settled] == [(11, "ok")]
    assert [word async for word in words(customer)] == ["nothing"]

    @gate.limited(CALL, work=11)
    async def strictly(customer: str) -> AsyncIterator[str]:
        yield "word"

    with pytest.raises(Throttled):
        await anext(strictly(customer))


def test_generators_without_await_are_limited_alike(headgate: LiveApi, customer: str, settled: list[Settled]) -> None:
    def nothing(customer: str) -> Iterator[str]:
        yield "nothing"

    with Headgate.sync(headgate.base) as gate:

        @gate.limited(CALL, each=len, fallback=nothing)
        def words(customer: str) -> Iterator[str]:
            for _ in range(4):
                yield "word"

        assert list(words(customer)) == ["word"] * 4
        gate.flush()
        assert list(words(customer)) == ["nothing"]
        for _ in words(f"{customer}-other"):
            break
        eventually(lambda: len(settled) == 2)
    assert [one[:2] for one in settled] == [(16, "ok"), (4, "cancelled")]


def test_functions_without_await_are_refused_or_fall_back(headgate: LiveApi, customer: str) -> None:
    with Headgate.sync(headgate.base) as gate:

        @gate.limited(CALL, work=11)
        def search(customer: str) -> str:
            return "found"

        @gate.limited(CALL, fallback=str.upper)
        def look(customer: str) -> str:
            return "found"

        assert search(customer) == "found"
        with pytest.raises(Throttled):
            search(customer)
        assert look(customer) == customer.upper()


def test_mistakes_are_told_when_the_function_is_decorated() -> None:
    with pytest.raises(TypeError, match=r"needs Headgate\.sync"):
        Headgate().limited(CALL)(lambda customer: None)
    with pytest.raises(TypeError, match=r"needs Headgate\("):
        Headgate.sync().limited(CALL)(asyncio.sleep)
    with pytest.raises(TypeError, match="is a generator: `each` gives the work of its items"):
        Headgate.sync().limited(CALL, settle="cpu")(lambda customer: (yield))
    with pytest.raises(ValueError, match="settle is latency, cpu, a function of the result or None"):
        Headgate().limited(CALL, settle="bytes")
    with pytest.raises(TypeError, match="unknown option wait"):
        Headgate.sync().limited(CALL, wait=3)(len)
