"""Requests that arrive in one turn of the loop are handled together in the next.

    requests ──► decoded ──► asked of the store ──► answered ──► rendered ──► sent

Taking thirty requests through one stage, and then all through the next, is a third faster than taking each through all
stages: the processor runs the same code again while it is in its caches. A lone request does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Stage(Generic[ItemT]):
    """Gathers items until the next turn of the loop. `handle` takes all of them, and must not let one fail the others.

    With `hurries`, if the previous turn had at most one item, the first of a turn is handled at once: it would wait in
    vain.
    """

    __slots__ = ("_at_once", "_handle", "_hurries", "_is_held", "_is_scheduled", "_items", "_loop", "_was_alone")

    def __init__(self, handle: Callable[[list[ItemT]], None], *, hurries: bool = False) -> None:
        self._handle = handle
        self._hurries = hurries
        self._items: list[ItemT] = []
        self._is_held = self._is_scheduled = False
        self._was_alone = True
        self._at_once = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, item: ItemT) -> None:
        """Add an item."""
        if self._is_scheduled or self._is_held:
            self._items.append(item)
            return
        if self._loop is None:  # asking for it each time costs a system call
            self._loop = asyncio.get_running_loop()
        self._is_scheduled = True
        self._loop.call_soon(self._end_turn)
        if self._hurries and self._was_alone:
            self._at_once = 1
            self._handle([item])
        else:
            self._items.append(item)

    def __enter__(self) -> None:
        """Handle all items that are put from now on when the context ends: for callers that know when all are there."""
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._run()

    def _end_turn(self) -> None:
        self._is_scheduled = False
        self._was_alone = len(self._items) + self._at_once <= 1
        self._at_once = 0
        self._run()

    def _run(self) -> None:
        if self._items:
            items, self._items = self._items, []
            self._handle(items)
