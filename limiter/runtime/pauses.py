"""Long computations beside requests: a few milliseconds at a time, with a turn of the event loop after each."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TypeVar

from limiter.model.steps import Run, Steps

STRETCH_S = 0.002
"""Time that a computation takes before requests get their turn; the step that exceeds it is still finished."""

T = TypeVar("T")


async def with_pauses(steps: Steps[T]) -> T:
    """Run a computation to its end, and let other tasks run every STRETCH_S; return its result."""
    until_s = perf_counter() + STRETCH_S
    run = Run(steps)
    for _ in run:
        if perf_counter() >= until_s:
            await asyncio.sleep(0)
            until_s = perf_counter() + STRETCH_S
    return run.result
