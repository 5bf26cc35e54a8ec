"""Throttles of overload control as this node last heard of them, for when the store is away (Q11).

asked with the store       the answer says how much of the class is refused there: remembered
asked without it           refused by that share for HELD_S after it was heard; then the policy's on_store_failure
                           alone decides
"""

from __future__ import annotations

from limiter.model.bucket.operations import BucketAnswer, Lot, Pressure, Verdict
from limiter.store.keys import Slot

HELD_S = 10.0
"""As long as a controller lends a throttle (`limiter.model.overload.shedding`)."""

THROTTLES_MAX = 20_000


class Throttles:
    """Throttles that one node remembers. Time is an argument (s)."""

    def __init__(self) -> None:
        self._heard: dict[tuple[Slot, str, int], tuple[float, Pressure]] = {}
        """By bucket and class; only of those that say anything but calm."""

    def hear(self, slot: Slot, bucket: str, lot: Lot, told: Pressure, now_s: float) -> None:
        """Remember what a bucket said to a class."""
        key = slot, bucket, lot.class_number
        if told.refused_share > 0 or told.quality < 1:
            if len(self._heard) >= THROTTLES_MAX:
                self._heard.clear()
            self._heard[key] = now_s, told
        elif key in self._heard:
            del self._heard[key]

    def answer(self, slot: Slot, bucket: str, lot: Lot, local: BucketAnswer, now_s: float) -> BucketAnswer:
        """The answer of a bucket in this node, with what is remembered of its throttle."""
        heard = self._heard.get((slot, bucket, lot.class_number))
        if heard is None or not 0 <= now_s - heard[0] <= HELD_S:
            return local
        told = heard[1]
        if lot.draw < told.refused_share:
            return local.but(verdict=Verdict.TURNED_AWAY, pressure=told)
        return local.but(pressure=told)
