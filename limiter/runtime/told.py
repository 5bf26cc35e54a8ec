"""The hot path has callbacks instead of coroutines. This is for callers that want to await an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

OutcomeT = TypeVar("OutcomeT")

Done = Callable[[OutcomeT | Exception], None]
"""Is told what came of something, or why nothing did; once."""


class Told(Generic[OutcomeT]):
    """A `Done` with a future to wait for."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[OutcomeT] = asyncio.get_running_loop().create_future()

    def __call__(self, outcome: OutcomeT | Exception) -> None:
        """Pass it on, unless nobody waits any more."""
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
