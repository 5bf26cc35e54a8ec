import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from limiter.client import request_context
from limiter.client.request_context import (
    CarryingExecutor,
    Raises,
    carry,
    criticality,
    current,
    enter,
    entered_ns,
    from_header,
    raised,
    raises,
)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Raises:
    fresh = Raises()
    monkeypatch.setattr(request_context, "raises", fresh)
    return fresh


def test_g4_inner_code_lowers_the_class_and_cannot_raise_it_by_the_way(counted: Raises) -> None:
    assert current() is None
    with criticality("critical"):
        with criticality("sheddable_plus"):
            assert current() == "sheddable_plus"
            with criticality("critical_plus"):
                assert current() == "sheddable_plus"
            assert current() == "sheddable_plus"
        assert current() == "critical"
    assert current() is None
    assert counted.total() == 0


def test_g4_raising_is_explicit_and_counted(counted: Raises) -> None:
    with criticality("sheddable"):
        with raised("critical"):
            assert current() == "critical"
        with raised("critical"):
            pass
        assert current() == "sheddable"
    assert counted.counts() == {("sheddable", "critical"): 2}
    with raised("critical_plus"), raised("sheddable"):
        assert current() == "critical_plus", "it lowers nothing"
    assert counted.counts()[None, "critical_plus"] == 1
    assert counted.total() == 3


def test_the_counts_of_the_process_are_readable() -> None:
    before = raises.total()
    with raised("critical"):
        pass
    assert raises.total() == before + 1


def test_g4_functions_and_coroutine_functions_are_decorated(counted: Raises) -> None:
    @criticality("sheddable")
    def plain(value: int) -> tuple[int, str | None]:
        return value, current()

    @raised("critical_plus")
    async def awaited() -> str | None:
        await asyncio.sleep(0)
        return current()

    assert plain(3) == (3, "sheddable")
    assert plain.__name__ == "plain"
    assert asyncio.run(awaited()) == "critical_plus"
    assert current() is None
    assert counted.total() == 1


def test_generators_are_not_decorated_because_their_class_would_leak() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    async def stream() -> AsyncIterator[int]:
        yield 1

    for function in (numbers, stream):
        with pytest.raises(TypeError, match="use `with` inside it"):
            criticality("sheddable")(function)


def test_an_exception_restores_the_class() -> None:
    with pytest.raises(ZeroDivisionError), criticality("sheddable"):
        raise ZeroDivisionError
    assert current() is None


def test_a_class_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="criticality 'urgent' is none of critical_plus, critical"):
        criticality("urgent")
    with pytest.raises(ValueError, match="'urgent' is none of"):
        enter(criticality="urgent")


@pytest.mark.parametrize(
    ("value", "name"),
    [("critical", "critical"), (" Sheddable_Plus ", "sheddable_plus"), (b"sheddable", "sheddable"), ("", None),
     ("urgent", None), (b"\xff", None), (None, None)],
)  # fmt: skip
def test_g4_a_header_names_one_of_the_classes_or_none(value: str | bytes | None, name: str | None) -> None:
    assert from_header(value) == name


async def test_g4_tasks_and_their_threads_carry_the_class() -> None:
    async def inner() -> str | None:
        await asyncio.sleep(0)
        return current()

    with criticality("sheddable"):
        task = asyncio.create_task(inner())
        async with asyncio.TaskGroup() as group:
            grouped = group.create_task(inner())
        in_thread = await asyncio.to_thread(current)
    assert [await task, grouped.result(), in_thread] == ["sheddable"] * 3
    assert current() is None


async def test_g4_a_task_that_lowers_its_class_leaves_that_of_others_alone() -> None:
    lowered, seen = asyncio.Event(), asyncio.Event()
    shared = criticality("sheddable")

    async def low() -> None:
        with shared:
            lowered.set()
            await seen.wait()
            assert current() == "sheddable"
        assert current() == "critical"

    with criticality("critical"):
        task = asyncio.create_task(low())
        await lowered.wait()
        assert current() == "critical"
        with shared:
            seen.set()
            await task
            assert current() == "sheddable"
        assert current() == "critical"


async def test_g4_executors_carry_the_class_of_the_code_that_submits() -> None:
    loop = asyncio.get_running_loop()
    with CarryingExecutor(2) as executor, ThreadPoolExecutor(2) as plain:
        with criticality("sheddable"):
            assert await loop.run_in_executor(executor, current) == "sheddable"
            assert executor.submit(current).result() == "sheddable"
            assert list(executor.map(lambda _: current(), range(8))) == ["sheddable"] * 8
            assert await loop.run_in_executor(plain, carry(current)) == "sheddable"
            assert await loop.run_in_executor(plain, current) is None, "which is why the other exists"
        assert executor.submit(current).result() is None


def test_g4_threads_carry_the_class_and_keep_their_changes_to_themselves() -> None:
    seen: list[str | None] = []
    both = threading.Barrier(2)

    def work() -> None:
        seen.append(current())
        with criticality("sheddable"):
            both.wait(10)
            seen.append(current())

    with criticality("sheddable_plus"):
        carried = carry(work)
        threads = [threading.Thread(target=carried) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current() == "sheddable_plus"
    assert sorted(map(str, seen)) == ["sheddable", "sheddable", "sheddable_plus", "sheddable_plus"]


def test_the_entrance_knows_its_time_and_class_whatever_was_before() -> None:
    """A thread that serves one request after another."""
    assert entered_ns() is None
    with criticality("sheddable"):
        with enter(1000, criticality="critical"):
            assert (entered_ns(), current()) == (1000, "critical")
            with enter(2000):
                assert (entered_ns(), current()) == (2000, None)
            assert (entered_ns(), current()) == (1000, "critical")
        assert (entered_ns(), current()) == (None, "sheddable")


async def test_the_entrance_is_carried_into_tasks_and_threads() -> None:
    async def request() -> tuple[int | None, int | None]:
        enter(5000)
        return await asyncio.create_task(asyncio.to_thread(entered_ns)), entered_ns()

    assert await asyncio.create_task(request()) == (5000, 5000)
    assert entered_ns() is None
