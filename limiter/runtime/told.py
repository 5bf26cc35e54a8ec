"""An awaitable outcome, for callers of the hot path, which uses callbacks instead of coroutines."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

OutcomeT = TypeVar("OutcomeT")


class Told(Generic[OutcomeT]):
    """A callback that takes one outcome, with a future to wait for."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[OutcomeT] = asyncio.get_running_loop().create_future()

    def __call__(self, outcome: OutcomeT) -> None:
        """Set the outcome, unless the waiter was cancelled."""
        conclude(self.future, outcome)


def conclude(future: asyncio.Future[OutcomeT], outcome: OutcomeT | Exception) -> None:
    """Set a future's result or exception, unless it is done: the waiter may have been cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
