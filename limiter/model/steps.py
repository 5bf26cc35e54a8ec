"""Long computations in steps: a generator that yields between them, so that somebody else can have a turn."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

AT_ONCE = 100
"""Policies that one step deals with: about a millisecond."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields between steps, and returns the result."""


def finish(steps: Steps[T]) -> T:
    """The result, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
