"""The latency histogram of a bucket, read: a percentile, the highest latency, what came between two readings.

    step i covers [2^e · (1 + j/4), 2^e · (1 + (j+1)/4)) ms    e = i div 4 − 3, j = i mod 4 (`bucket.histogram_step`)
    percentile p = the step that holds the p·n/100-th smallest latency, interpolated linearly inside it

Error bound: the true percentile (nearest rank) lies in the same step, so the answer is off by less than the step's
width, which is 1/4 of its lower edge at the foot of an octave and 1/7 at its head: below 25 % of the true value.
Below 0.125 ms the first step begins at 0, so the error is at most 0.156 ms; what took longer than 28.7 s is counted
by the last step and told as at most 32.8 s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, OCTAVE_MIN, STEPS

EDGES_MS = (
    0.0,
    *(2.0 ** (OCTAVE_MIN - 1 + step // STEPS) * (1 + step % STEPS / STEPS) for step in range(1, HISTOGRAM_STEPS + 1)),
)
"""Where each step begins, and where the last one ends."""

EMPTY = (0.0,) * HISTOGRAM_STEPS


def percentile(histogram: Sequence[float], p: float) -> float | None:
    """The latency (ms) that p % of the counted ones do not exceed; None if nothing, or no number, was counted."""
    total = count(histogram)
    if total <= 0:
        return None
    rank = p * total / 100
    for step, reached in enumerate(accumulate(histogram)):
        if reached >= rank and histogram[step] > 0:
            low, high = EDGES_MS[step], EDGES_MS[step + 1]
            return high - (high - low) * min(1.0, (reached - rank) / histogram[step])
    return highest_ms(histogram)


def highest_ms(histogram: Sequence[float]) -> float | None:
    """The end of the last step that counted anything: no latency was longer, unless it was beyond the last step."""
    for step in range(len(histogram) - 1, -1, -1):
        if histogram[step] > 0:
            return EDGES_MS[step + 1]
    return None


def count(histogram: Sequence[float]) -> float:
    """How many latencies were counted; 0 if a count is no number, for then none of them can be believed (F-P8)."""
    total = sum(histogram)
    return total if math.isfinite(total) and min(histogram, default=0.0) >= 0 else 0.0


def added(histogram: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
    """Two histograms as one."""
    return tuple([one + other for one, other in zip(histogram, more, strict=True)])


def between(older: Sequence[float], newer: Sequence[float]) -> tuple[float, ...]:
    """What was counted between two readings; everything, if the record expired in between and began again."""
    if not older:
        return tuple(newer)
    difference = tuple([late - early for late, early in zip(newer, older, strict=True)])
    return tuple(newer) if min(difference) < 0 else difference
