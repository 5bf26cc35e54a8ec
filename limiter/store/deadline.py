"""Deadlines on an event loop that may be held up.

A loop whose process did not get to run finds timers that are due and sockets that are readable at the same time, and
may run the timers first: an answer that had come would go unread, and the store be thought to have failed. A deadline
that is noticed late therefore gives the loop one more turn to read what is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

HELD_UP_S = 0.01
"""A timer that runs so much after its time was held up."""

TURN_S = 0.002
"""Above the resolution of the loop's timers (1 ms), so that it reads, and runs what waited for that, in between."""


class Deadline:
    """Calls `expire` at a time of the loop's, once."""

    __slots__ = ("_deadline_s", "_expire", "_timer")

    def __init__(self, deadline_s: float, expire: Callable[[], None]) -> None:
        self._deadline_s = deadline_s
        self._expire = expire
        self._timer = asyncio.get_running_loop().call_at(deadline_s, self._is_due)

    def _is_due(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._deadline_s < HELD_UP_S:
            self._expire()
        else:
            self._timer = loop.call_later(TURN_S, self._expire)

    def cancel(self) -> None:
        """It does not matter any more."""
        self._timer.cancel()


class TimeoutAt:
    """`asyncio.timeout_at` with such a deadline."""

    __slots__ = ("_deadline", "_deadline_s", "_timeout")

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._deadline = Deadline(self._deadline_s, self._expire)

    def _expire(self) -> None:
        self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(self, *raised: object) -> None:
        self._deadline.cancel()
        await self._timeout.__aexit__(*raised)  # type: ignore[arg-type]  # the three as they come
