"""Turns: a bound on operations of batches in progress, and on the time that others wait for a turn.

    begin   while fewer than IN_PROGRESS_MAX are in progress; otherwise wait, first come first served
    give up after the deadline: a node with more work than it can do says so early and cheaply (promise 9)

If a node began everything at once, operations would spend their deadlines waiting for each other. A batch that waits
here is not even decoded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

IN_PROGRESS_MAX = 512
"""Enough to fill every call to the store, and the next ones, too."""


class _Waiting(NamedTuple):
    begin: Callable[[], int]
    give_up: Callable[[], None]
    until_s: float


class Turns:
    """Hands out turns. Every turn ends: operations in progress have their own deadlines."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waiting: deque[_Waiting] = deque()
        self._in_progress = 0

    def ask(self, begin: Callable[[], int], give_up: Callable[[], None]) -> None:
        """Call `begin`, which returns how many operations it began, when there is room; or `give_up` after the
        deadline."""
        until_s = asyncio.get_running_loop().time() + self._patience_s
        self._waiting.append(_Waiting(begin, give_up, until_s))
        self._go_on()

    def done(self) -> None:
        """Note that one operation is no longer in progress."""
        self._in_progress -= 1
        if self._waiting:
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._in_progress < IN_PROGRESS_MAX:
            waiting = self._waiting.popleft()
            if asyncio.get_running_loop().time() > waiting.until_s:
                waiting.give_up()
            else:
                begun = waiting.begin()  # it may ask for another turn, and so count, before it returns
                self._in_progress += begun
