"""The share of retries among recent attempts, by bucket (G6).

    share = Σ retries · 2^(−age / half-life)  ÷  Σ attempts · 2^(−age / half-life)

Above SHARE_MAX another retry only adds to the load, so refusals say `retry: never`. Each bucket has a meter of its own:
the retries of one customer change no answer to another (G2). A bucket gets its meter with its first retry, so buckets
without retries cost nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

HALF_LIFE_S = 5.0
SHARE_MAX = 0.3
ATTEMPTS_MIN = 20.0
"""Recent attempts needed for a share to be meaningful."""

_FOLD_S = 0.1


@dataclass(slots=True)
class RetryMeter:
    """Counts attempts, forgetting by half every HALF_LIFE_S. Time is an argument."""

    attempts: float = 0.0
    retries: float = 0.0
    folded_s: float = 0.0

    def count(self, attempt: int, now_s: float) -> None:
        """Count one request with its attempt number."""
        # Folding on every request would cost more than the accuracy is worth.
        if now_s - self.folded_s > _FOLD_S:
            keep = 0.5 ** ((now_s - self.folded_s) / HALF_LIFE_S)
            self.attempts, self.retries, self.folded_s = self.attempts * keep, self.retries * keep, now_s
        self.attempts += 1.0
        if attempt > 1:
            self.retries += 1.0

    @property
    def too_many(self) -> bool:
        """True if callers should not retry."""
        return self.attempts >= ATTEMPTS_MIN and self.retries > SHARE_MAX * self.attempts


PlaceT = TypeVar("PlaceT", bound=Hashable)

METERS_MAX = 10_000
"""Most buckets with a meter in one node. Beyond that, the least recently retried lose theirs."""


class RetryMeters(Generic[PlaceT]):
    """The meters of buckets with retries, by place (a slot) and name."""

    __slots__ = ("_most", "known")

    def __init__(self, most: int = METERS_MAX) -> None:
        self._most = most
        self.known: dict[tuple[PlaceT, str], RetryMeter] = {}

    def count(self, place: PlaceT, buckets: Iterable[str], attempt: int, now_s: float) -> None:
        """Count one request in each of its buckets."""
        known = self.known
        for bucket in buckets:
            meter = known.get((place, bucket))
            if meter is None:
                if attempt == 1:
                    continue
                meter = RetryMeter(folded_s=now_s)
            elif attempt > 1:
                del known[place, bucket]  # the most recently retried stand last
            if attempt > 1:
                known[place, bucket] = meter
            meter.count(attempt, now_s)
        if len(known) > self._most:
            for oldest in list(known)[: len(known) - self._most]:
                del known[oldest]

    def too_many(self, place: PlaceT, bucket: str) -> bool:
        """True if so many of the bucket's callers retry that they should stop."""
        meter = self.known.get((place, bucket))
        return meter is not None and meter.too_many

    def among(self, place: PlaceT, buckets: Iterable[str]) -> frozenset[str]:
        """Return the buckets whose callers should stop retrying."""
        if not self.known:
            return _NONE
        return frozenset(bucket for bucket in buckets if self.too_many(place, bucket))


_NONE: frozenset[str] = frozenset()
