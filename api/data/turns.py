"""Turns: how many operations of batches may be in progress at once, and who waits how long for a turn.

    begin   while fewer than IN_PROGRESS_MAX are in progress; else wait, first come first served
    give up after the deadline: a node that is asked more than it can do says so early and cheaply (promise 9)

All that a node has at once would spend their deadlines waiting for each other. What waits here is not even decoded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

IN_PROGRESS_MAX = 512
"""Enough for every call to the store to be full, and the next ones too."""


class _Waiting(NamedTuple):
    begin: Callable[[], int]
    give_up: Callable[[], None]
    until_s: float


class Turns:
    """Hands out turns. Every turn ends: operations in progress have deadlines of their own."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waiting: deque[_Waiting] = deque()
        self._in_progress = 0

    def ask(self, begin: Callable[[], int], give_up: Callable[[], None]) -> None:
        """Call `begin` when there is room, which says how many operations it began; or `give_up` if there is none."""
        until_s = asyncio.get_running_loop().time() + self._patience_s
        self._waiting.append(_Waiting(begin, give_up, until_s))
        self._go_on()

    def done(self) -> None:
        """One operation is no longer in progress."""
        self._in_progress -= 1
        if self._waiting:
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._in_progress < IN_PROGRESS_MAX:
            waiting = self._waiting.popleft()
            if asyncio.get_running_loop().time() > waiting.until_s:
                waiting.give_up()
            else:
                begun = waiting.begin()  # which may ask for another turn, and so count, before it returns
                self._in_progress += begun
