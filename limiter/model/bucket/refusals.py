"""Refusals that a node remembers for a moment: an empty bucket would refuse again.

    refused at t   until = min(t + KEEP_MAX, when the bucket could pass)      t: when the store was asked
    asked again    the same buckets, and of each as much or more: refused, and counted, to be reported to the store

A memory never admits anything. It ends by time, by a policy change and by a settle on one of its buckets; refunds
through other nodes go unnoticed for at most KEEP_MAX_S. Without I/O and without a clock: time is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

from limiter.model.bucket.operations import Ask

KEEP_MAX_S = 0.05
REMEMBERED_MAX = 4096

PlaceT = TypeVar("PlaceT", bound=Hashable)


class Remembered(Generic[PlaceT]):
    """One remembered refusal."""

    __slots__ = ("answer", "asks", "binding", "buckets", "count", "kept", "place", "refusing", "until_s")

    def __init__(
        self, place: PlaceT, buckets: Sequence[str], asks: Sequence[Ask], refusing: Sequence[bool], until_s: float,
        binding: int = 0,
    ) -> None:  # fmt: skip
        self.place = place
        """The place of the buckets; their names are unique there."""
        self.buckets = buckets
        self.asks = asks
        self.refusing = refusing
        """For each of the buckets: True if it refused."""
        self.until_s = until_s
        self.binding = binding
        """Number of the bucket that refuses until then; others may admit before."""
        self.count = 0
        """Number of repetitions that were not reported to the store yet."""
        self.answer: Any = None
        """The buckets' answers and the refusal made of them; set and used by the owner of the memory."""
        self.kept: Any = None

    def holds_for(self, asks: Sequence[Ask]) -> bool:
        """True if the buckets that refused would refuse these asks, too: each is as large, or larger."""
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
        """By the place and the binding bucket: a refund there ends the memory."""
        self.untold: dict[int, Remembered[PlaceT]] = {}
        """Refusals with repetitions that were not reported yet, by identity."""

    def remember(self, refused: Remembered[PlaceT], now_s: float) -> None:
        """Remember a refusal, if it is still valid."""
        if refused.until_s <= now_s:
            return
        if len(self.known) >= REMEMBERED_MAX:
            self.known.clear()
        self.known[refused.place, refused.buckets[refused.binding]] = refused

    def find(
        self, place: PlaceT, buckets: Sequence[str], asks: Sequence[Ask], now_s: float
    ) -> Remembered[PlaceT] | None:
        """Return the refusal that applies to this request; None if the store has to be asked."""
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
        """Count one repetition, to be reported to the store."""
        refused.count += 1
        self.untold[id(refused)] = refused

    def forget(self, place: PlaceT, buckets: Sequence[str]) -> None:
        """Forget refusals of these buckets, because something was or may have been given back to them."""
        for bucket in buckets:
            self.known.pop((place, bucket), None)

    def forget_all(self) -> None:
        """Forget all refusals, because the policies have changed."""
        self.known.clear()

    def take_untold(self) -> list[Remembered[PlaceT]]:
        """Return the refusals to report to the store, each with its count, and clear the list."""
        told = list(self.untold.values())
        self.untold.clear()
        return told
