"""What comes in one turn of the loop is handled in the next, all of it together.

    requests ──► decoded ──► asked of the store ──► answered ──► rendered ──► sent

To take thirty requests through one stage, and then all through the next, is a third faster than to take each through
all stages: the processor meets the same code again while it still knows it. A lone request waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Stage(Generic[ItemT]):
    """Gathers items until the next turn of the loop. `handle` sees to each of them, whatever befalls another."""

    __slots__ = ("_handle", "_is_held", "_items", "_loop")

    def __init__(self, handle: Callable[[list[ItemT]], None]) -> None:
        self._handle = handle
        self._items: list[ItemT] = []
        self._is_held = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, item: ItemT) -> None:
        """One more."""
        if not self._items and not self._is_held:
            if self._loop is None:  # to ask for it costs a call to the system
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._run)
        self._items.append(item)

    def __enter__(self) -> None:
        """What is put from now on is handled on leaving: for who knows when all is there."""
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._run()

    def _run(self) -> None:
        if self._items:
            items, self._items = self._items, []
            self._handle(items)
