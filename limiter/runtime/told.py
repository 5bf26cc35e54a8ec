"""An awaitable outcome, for callers of the hot path, which uses callbacks instead of coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

OutcomeT = TypeVar("OutcomeT")


class Told(Generic[OutcomeT]):
    """A callback that takes one outcome, with a future to wait for."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[OutcomeT] = asyncio.get_running_loop().create_future()

    def __call__(self, outcome: OutcomeT) -> None:
        """Set the outcome, unless the waiter was cancelled."""
        conclude(self.future, outcome)


class WaitingRoom:
    """The desk of callers that wait in a coroutine: the place of each operation is its `Told`."""

    def answer(self, operations: Sequence[Any]) -> None:
        """Wake each caller."""
        for operation in operations:
            operation.place(operation)

    answer_settles = answer


WAITING_ROOM = WaitingRoom()


def conclude(future: asyncio.Future[OutcomeT], outcome: OutcomeT | Exception) -> None:
    """Set a future's result or exception, unless it is done: the waiter may have been cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
