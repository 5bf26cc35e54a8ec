"""Refusals that a node remembers for a moment: what an empty bucket said, it would say again.

    refused at t   until = min(t + KEEP_MAX, when the bucket could pass)      t: when the store was asked
    asked again    the same buckets, and of each as much or more: refused, and counted to be told to the store

It never admits anything. A policy change, a settle on one of the buckets and the time end it; what others give back
meanwhile goes unseen for at most KEEP_MAX_S. Without I/O and without a clock: time is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

KEEP_MAX_S = 0.05
REMEMBERED_MAX = 4096

Ask = tuple[int, float, float]
"""What is asked of one bucket: how, the minimum, and the charge."""

PlaceT = TypeVar("PlaceT", bound=Hashable)


class Remembered(Generic[PlaceT]):
    """One refusal."""

    __slots__ = ("answer", "asks", "binding", "buckets", "count", "kept", "place", "refusing", "until_s")

    def __init__(
        self, place: PlaceT, buckets: Sequence[str], asks: Sequence[Ask], refusing: Sequence[bool], until_s: float,
        binding: int = 0,
    ) -> None:  # fmt: skip
        self.place = place
        """Where the buckets are; their names are unique there."""
        self.buckets = buckets
        self.asks = asks
        self.refusing = refusing
        """Which of the buckets said no."""
        self.until_s = until_s
        self.binding = binding
        """Which of them says no until then; others may pass before."""
        self.count = 0
        """How often it was repeated since the store was last told."""
        self.answer: Any = None
        """What the buckets said, and what was made of it: for whoever remembers."""
        self.kept: Any = None

    def holds_for(self, asks: Sequence[Ask]) -> bool:
        """Whether the buckets that said no would say it to this, too: it asks for as much, or more."""
        for was, now, refused in zip(self.asks, asks, self.refusing, strict=True):
            if refused and not (now[0] == was[0] and now[1] >= was[1] and now[2] >= was[2]):
                return False
        return True


class Refusals(Generic[PlaceT]):
    """The refusals that one node remembers; `keep_s` of 0 remembers none."""

    def __init__(self, keep_s: float) -> None:
        assert 0 <= keep_s <= KEEP_MAX_S
        self.keep_s = keep_s
        self.known: dict[tuple[PlaceT, str], Remembered[PlaceT]] = {}
        """By the place and the bucket that says no for as long as it holds: what is given back there ends it."""
        self.untold: dict[int, Remembered[PlaceT]] = {}
        """Those that were repeated since the store was last told, by identity."""

    def remember(self, refused: Remembered[PlaceT], now_s: float) -> None:
        """Remember a refusal, if it still holds."""
        if refused.until_s <= now_s:
            return
        if len(self.known) >= REMEMBERED_MAX:
            self.known.clear()
        self.known[refused.place, refused.buckets[refused.binding]] = refused

    def find(
        self, place: PlaceT, buckets: Sequence[str], asks: Sequence[Ask], now_s: float
    ) -> Remembered[PlaceT] | None:
        """The refusal that holds for this request; None if the store has to be asked."""
        for bucket in buckets:
            found = self.known.get((place, bucket))
            if found is None:
                continue
            if found.until_s <= now_s:
                del self.known[place, bucket]
            elif found.buckets == buckets and found.holds_for(asks):
                return found
        return None

    def repeat(self, refused: Remembered[PlaceT]) -> None:
        """Count one more, to be told."""
        refused.count += 1
        self.untold[id(refused)] = refused

    def forget(self, place: PlaceT, buckets: Sequence[str]) -> None:
        """Something was given back to these buckets, or may have been."""
        for bucket in buckets:
            self.known.pop((place, bucket), None)

    def forget_all(self) -> None:
        """The policies are other ones."""
        self.known.clear()

    def take_untold(self) -> list[Remembered[PlaceT]]:
        """What the store is to be told: each has its count, and is told once."""
        told = list(self.untold.values())
        self.untold.clear()
        return told
