"""Helpers that tests share: servers of their own, a proxy that misbehaves, waiting without sleeping blindly."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], *, within_s: float = 10.0, what: str = "") -> T:
    """Poll until `condition` gives something true, and return it; fail when it has not within the time."""
    deadline_s = time.monotonic() + within_s
    while not (result := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s} s: {what or condition}")
        time.sleep(0.01)
    return result


async def eventually_async(
    condition: Callable[[], Awaitable[T]],
    *,
    within_s: float = 10.0,
    ignoring: type[Exception] | tuple[type[Exception], ...] = (),
    what: str = "",
) -> T:
    """Like `eventually`, for coroutines; errors of the kinds to ignore count as "not yet"."""
    deadline_s = time.monotonic() + within_s
    last: Exception | None = None
    while True:
        try:
            if result := await condition():
                return result
        except ignoring as error:
            last = error
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s} s: {what or condition}") from last
        await asyncio.sleep(0.01)
