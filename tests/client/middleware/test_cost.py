import asyncio
import time
from collections.abc import Generator
from contextlib import suppress

import pytest

from headgate import cpu_cost, cpu_time_of
from limiter.client.middleware.cost import CpuTimed


def burn(milliseconds: float) -> None:
    """Use so much CPU time of this thread, however long that takes."""
    until_ns = time.thread_time_ns() + milliseconds * 1e6
    while time.thread_time_ns() < until_ns:
        pass


def test_a_block_costs_the_cpu_time_of_its_thread() -> None:
    with cpu_cost() as cost:
        burn(20)
        within = cost.ms
    assert 20 <= within <= cost.ms < 40
    burn(20)
    assert cost.ms < 40, "it has ended"


async def test_waiting_costs_nothing() -> None:
    with cpu_cost() as cost:
        await asyncio.to_thread(burn, 50)
    assert cost.ms < 40


async def test_a_coroutine_costs_its_own_steps_and_not_those_of_others() -> None:
    async def work(milliseconds: float) -> str:
        for _ in range(10):
            burn(milliseconds / 10)
            await asyncio.sleep(0)
        return f"{milliseconds:g}"

    async with asyncio.TaskGroup() as group:
        other = group.create_task(work(200))
        small = group.create_task(cpu_time_of(work(20)))
        large = group.create_task(cpu_time_of(work(60)))
    assert other.result() == "200"
    (first, first_ms), (second, second_ms) = small.result(), large.result()
    assert (first, second) == ("20", "60")
    assert 20 <= first_ms < 40
    assert 60 <= second_ms < 80


async def test_a_coroutine_gets_what_it_waits_for() -> None:
    async def work() -> str:
        assert asyncio.current_task() is own
        return await asyncio.to_thread(str, 7)

    own = asyncio.current_task()
    assert (await cpu_time_of(work()))[0] == "7"


async def test_the_cost_is_known_within_and_after_a_failure() -> None:
    async def work() -> None:
        burn(5)
        with pytest.raises(ValueError, match="wrong"):
            await failing
        assert timed.ms >= 5
        raise ZeroDivisionError

    failing = asyncio.get_running_loop().create_future()
    failing.set_exception(ValueError("wrong"))
    timed = CpuTimed(work())
    with pytest.raises(ZeroDivisionError):
        await timed
    burn(30)
    assert 5 <= timed.ms < 25, "it has ended"


async def test_a_cancelled_coroutine_hears_of_it_and_its_cost_counts() -> None:
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            burn(5)
            cleaned = True

    async def run() -> None:
        await timed

    started = asyncio.Event()
    timed = CpuTimed(work())
    task = asyncio.create_task(run())
    await started.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert cleaned
    assert timed.ms >= 5


def test_a_coroutine_that_is_closed_is_closed_within() -> None:
    closed = False

    class Never:
        def __await__(self) -> Generator[None, None, None]:
            yield

    async def work() -> None:
        nonlocal closed
        try:
            await Never()
        finally:
            closed = True

    async def run() -> None:
        await CpuTimed(work())

    outer = run()
    outer.send(None)
    outer.close()
    assert closed
