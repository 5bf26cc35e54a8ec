"""Reading a bucket's latency histogram: a percentile, the highest latency, the counts between two readings.

    step i covers [2^(e + i/7), 2^(e + (i + 1)/7)) ms        e = OCTAVE_MIN − 1 (`bucket.histogram_step`)
    percentile p = the step that holds the p·n/100-th smallest latency, given as 2·low·high / (low + high)

Error bound (S7): the true percentile (nearest rank) lies in the same step, from low to high = 1.104 · low. The harmonic
mean of the two is off by (high − low) / (high + low) at either end, which is 4.95 % of the true value, and by less
between them. Below 0.069 ms the first step begins at 0 and is given by its end; latencies above 70 minutes are counted
by the last step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, OCTAVE_MIN, STEP_EDGES, STEPS

_MANTISSAS = (0.5, *STEP_EDGES)
EDGES_MS = (
    0.0,
    *(2.0 ** (OCTAVE_MIN + step // STEPS) * _MANTISSAS[step % STEPS] for step in range(1, HISTOGRAM_STEPS + 1)),
)
"""Lower bound of each step, and upper bound of the last."""

EMPTY = (0.0,) * HISTOGRAM_STEPS


def percentile(histogram: Sequence[float], p: float) -> float | None:
    """Return the latency (ms) that p % of the counted ones do not exceed; None if the count is 0 or invalid."""
    total = count(histogram)
    if total <= 0:
        return None
    rank = p * total / 100
    for step, reached in enumerate(accumulate(histogram)):
        if reached >= rank and histogram[step] > 0:
            low, high = EDGES_MS[step], EDGES_MS[step + 1]
            return 2 * low * high / (low + high) if low else high
    return highest_ms(histogram)


def highest_ms(histogram: Sequence[float]) -> float | None:
    """Return the end of the last step with a count: no latency was longer, unless it was beyond the last step."""
    for step in range(len(histogram) - 1, -1, -1):
        if histogram[step] > 0:
            return EDGES_MS[step + 1]
    return None


def count(histogram: Sequence[float]) -> float:
    """Return the number of latencies; 0 if a count is NaN or infinite, as none can be trusted then (F-P8)."""
    total = sum(histogram)
    return total if math.isfinite(total) and min(histogram, default=0.0) >= 0 else 0.0


def added(histogram: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
    """Return the sum of two histograms."""
    return tuple([one + other for one, other in zip(histogram, more, strict=True)])


def between(older: Sequence[float], newer: Sequence[float]) -> tuple[float, ...]:
    """Return the counts between two readings; all counts, if the record expired in between and began again."""
    if not older:
        return tuple(newer)
    difference = tuple([late - early for late, early in zip(newer, older, strict=True)])
    return tuple(newer) if min(difference) < 0 else difference
