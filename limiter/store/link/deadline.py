"""Deadlines on an event loop that may be held up.

A loop whose process did not get to run finds timers that are due and sockets that are readable at the same time, and
may run the timers first: an answer that had arrived would stay unread, and the store would seem to have failed. A
deadline that runs late therefore gives the loop one more turn to read what has arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

HELD_UP_S = 0.01
"""A timer that runs this much late was held up."""

TURN_S = 0.002
"""Above the resolution of the loop's timers (1 ms), so that the loop reads, and runs what waited for it, in between."""


class Deadline:
    """Calls `expire` once, at a time of the loop's clock."""

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
        self._timer.cancel()


class TimeoutAt:
    """`asyncio.timeout_at` with such a deadline: raises TimeoutError inside when it passes. For one use."""

    __slots__ = ("_cancelling", "_deadline", "_deadline_s", "_is_expired", "_task")

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._is_expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._deadline = Deadline(self._deadline_s, self._expire)

    def _expire(self) -> None:
        self._is_expired = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: object) -> None:
        self._deadline.cancel()
        # A task that somebody else cancelled as well must end as cancelled, not as timed out.
        if self._is_expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from raised
