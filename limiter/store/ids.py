"""Random ids, many drawn at a time: to ask the system for each would cost more than the id is used for."""

from __future__ import annotations

from os import urandom

DRAWN = 256


class RandomIds:
    """Ids of one size that nobody had before."""

    __slots__ = ("_at", "_pool", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool, self._at = b"", 0

    def next(self) -> bytes:
        """Another one."""
        at, size = self._at, self._size
        if at >= len(self._pool):
            self._pool, at = urandom(size * DRAWN), 0
        self._at = at + size
        return self._pool[at : at + size]
