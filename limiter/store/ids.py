"""Random ids, drawn many at a time: asking the system for each one would be expensive."""

from __future__ import annotations

from os import urandom

DRAWN = 256


class RandomIds:
    """Random ids of one size."""

    __slots__ = ("_at", "_pool", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool, self._at = b"", 0

    def next(self) -> bytes:
        at, size = self._at, self._size
        if at >= len(self._pool):
            self._pool, at = urandom(size * DRAWN), 0
        self._at = at + size
        return self._pool[at : at + size]
