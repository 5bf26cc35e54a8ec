"""How long a node lets a client wait that has sent everything and reads everything: its own time, and the machine's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Wait(NamedTuple):
    """A time without a byte of an answer."""

    took_s: float = 0.0
    began_s: float = 0.0
    """By the clock that all processes of a machine share."""
    computed_s: float = 0.0
    """Processor time of the node and the store meanwhile, for whomever: more of this wait was not their own."""


class Silence:
    """The longest wait of one client, from when all was sent on.

    The end of a connection counts as an answer if nothing else came: then it is what the client waited for.
    """

    def __init__(self, computed_s: Callable[[], float], now_s: Callable[[], float] = time.monotonic) -> None:
        self._computed_s = computed_s
        self._now_s = now_s
        self._since: tuple[float, float] | None = None
        self.heard_bytes = 0
        self.longest = Wait()

    @property
    def has_begun(self) -> bool:
        """Whether all is sent."""
        return self._since is not None

    def begin(self) -> None:
        """The last byte is sent."""
        self._since = self._now_s(), self._computed_s()

    def heard(self, count: int) -> None:
        """So many bytes of an answer have come."""
        self._end()
        self.heard_bytes += count

    def closed(self) -> None:
        """The connection has ended."""
        if not self.heard_bytes:
            self._end()
        self._since = None

    def _end(self) -> None:
        if self._since is None:
            return
        (began_s, before_s), now_s, after_s = self._since, self._now_s(), self._computed_s()
        self.longest = max(self.longest, Wait(now_s - began_s, began_s, after_s - before_s))
        self._since = now_s, after_s


def computed_s(*pids: int) -> float:
    """The processor time that processes have used so far; those that are gone count for nothing."""
    total_ns = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total_ns += int(file.read_text().split()[0])
            except (OSError, ValueError, IndexError):
                continue
    return total_ns / 1e9
