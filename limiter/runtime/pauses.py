"""Long computations beside requests: a few milliseconds at a stretch, with a turn of the event loop after each."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TypeVar

from limiter.model.steps import Steps

STRETCH_S = 0.002
"""How long a stretch may take before requests have their turn; it ends with the step that takes it beyond."""

T = TypeVar("T")


async def with_pauses(steps: Steps[T]) -> T:
    """The result of a computation that others should not have to wait for."""
    until_s = perf_counter() + STRETCH_S
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        if perf_counter() >= until_s:
            await asyncio.sleep(0)
            until_s = perf_counter() + STRETCH_S
