"""CPU time as the cost of a request: what `settle(work=...)` takes where work is counted in CPU milliseconds.

    with cpu_cost() as cost: ...                  a block without await: CPU time of this thread
    result, cpu_ms = await cpu_time_of(handle())  a coroutine: its own steps, not those of others in between

Tasks that the coroutine starts, and work that it hands to threads, are not part of its time.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from time import thread_time_ns
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class CpuCost:
    """CPU time of the present thread within a block, in milliseconds; it grows until the block ends."""

    def __init__(self) -> None:
        self._began_ns = thread_time_ns()
        self._ended_ns: int | None = None

    def __enter__(self) -> Self:
        self._began_ns, self._ended_ns = thread_time_ns(), None
        return self

    def __exit__(self, *_: object) -> None:
        self._ended_ns = thread_time_ns()

    @property
    def ms(self) -> float:
        ended_ns = thread_time_ns() if self._ended_ns is None else self._ended_ns
        return (ended_ns - self._began_ns) / 1e6


def cpu_cost() -> CpuCost:
    """Return a context manager that measures the CPU time of its block. The block must not await."""
    return CpuCost()


class CpuTimed(Generic[T]):
    """An awaitable that runs a coroutine and knows the CPU time of its steps, also while it runs and if it fails."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._spent_ns = 0
        self._step_began_ns: int | None = None

    @property
    def ms(self) -> float:
        """CPU time so far; read from within the coroutine, its present step included."""
        running_ns = 0 if self._step_began_ns is None else thread_time_ns() - self._step_began_ns
        return (self._spent_ns + running_ns) / 1e6

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._coroutine.__await__()
        send: Any = None
        failure: BaseException | None = None
        while True:
            self._step_began_ns = thread_time_ns()
            try:
                waited_for = steps.send(send) if failure is None else steps.throw(failure)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._spent_ns += thread_time_ns() - self._step_began_ns
                self._step_began_ns = None
            try:
                send, failure = (yield waited_for), None
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                failure = error


async def cpu_time_of(coroutine: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Await the coroutine, and return its result and the CPU milliseconds of its own steps."""
    timed = CpuTimed(coroutine)
    return await timed, timed.ms
