"""Long computations in steps: generators that yield between them, so that other tasks get their turn."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

AT_ONCE = 100
"""Policies in one step: about a millisecond."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields between steps, and returns the result."""


class Run(Generic[T]):
    """Iterates over the steps of a computation; after the last one it has the result."""

    result: T

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[None]:
        self.result = yield from self._steps


def finish(steps: Steps[T]) -> T:
    """Run all steps without a pause, and return the result."""
    run = Run(steps)
    for _ in run:
        pass
    return run.result
