"""The work of a request, learned from those that were settled: a mean whose memory doubts itself (R1, R12).

    k, n     requests that were settled in a sample, and requests that the mean stands for
    off      (sample ÷ mean − 1) / √((spread + SPREAD_MIN) · (1/k + 1/n)),  spread = variance ÷ mean²
    doubt    sum of `off` while it stays on one side, each at most DOUBT_CLIP, less DOUBT_DRIFT per sample

first          the sample is the mean
agrees         mean and spread move by k / (n + k), and n grows up to MEMORY
contradicts    |doubt| above DOUBT_MAX: the sample counts with R1's 0.7, and the memory begins again
progress       work of requests that have not ended waits for the next that does (W7)

An average that weighs the newest sample by 0.7 in every cycle follows the noise of a few requests, and as the cap goes
by 1/f, noise in f makes the cap too high on average. A mean of many requests does not, but is late when costs jump.
"""

from __future__ import annotations

from math import sqrt

from limiter.model.control.value import Value

MEMORY = 200.0
"""Requests in the mean: where costs vary by 100 %, a mean of 200 is accurate to 7 %."""
DOUBT_MAX = 5.0
DOUBT_DRIFT = 0.75
DOUBT_CLIP = 4.0
"""These three are in standard errors."""
SPREAD_MIN = 1e-4
"""Least assumed spread: costs vary by 1 %."""
SPREAD_STEP = 100.0
"""A sample more than ten deviations off is a jump and says little about the spread."""
SMALLEST_PART = 1e-3
"""Least cost of a request, as a part of the smallest mean: for requests that do no work."""


class Cost(Value, frozen=True):
    """The work of a request, and the certainty of that estimate."""

    work: float = 0.0
    """f: work units per request, or per token where requests have weights; 0 while unknown."""
    requests: float = 0.0
    """n"""
    spread: float = 1.0
    doubt: float = 0.0
    unended: float = 0.0
    """Work reported by requests that have not ended."""
    smallest: float = 0.0
    """The smallest mean of a sample; 0 while unknown."""
    largest: float = 0.0
    """The largest Σw² ÷ Σw of a sample, which lies between its mean and its largest request."""

    @property
    def is_known(self) -> bool:
        """True if any request has reported its work."""
        return self.work > 0


def guessed(work: float) -> Cost:
    """Return a first guess from other requests, with the weight of one request."""
    return Cost(work, 1.0, smallest=work, largest=work)


def learn(cost: Cost, *, work: float, work_squared: float, settles: float, alpha: float) -> Cost:
    """Return the cost after a sample of ended requests; `alpha` is the weight of one that contradicts the mean."""
    if settles <= 0:
        return _unended(cost, work) if work else cost
    # Compared, not min(max()): this runs for every bucket in every cycle.
    work += cost.unended
    mean, before, many, spread = work / settles, cost.work, cost.requests, cost.spread
    smallest, largest = cost.smallest, cost.largest
    if work > 0:
        if not 0 < smallest < mean:
            smallest = mean
        seen = work_squared / work
        if seen < mean:
            seen = mean
        if seen > largest:
            largest = seen
    if not before > 0:
        return Cost(mean, settles, spread, 0.0, 0.0, smallest, largest) if work > 0 else cost
    share = mean / before
    doubt = _doubted(cost.doubt, (share - 1.0) / sqrt((spread + SPREAD_MIN) * (1.0 / settles + 1.0 / many)))
    if -DOUBT_MAX <= doubt <= DOUBT_MAX:
        weight = settles / (many + settles)
        around, most = work_squared / settles / before / before - 2.0 * share + 1.0, SPREAD_STEP * (spread + SPREAD_MIN)
        if around < 0:
            around = 0.0
        elif around > most:
            around = most
        spread += (around - spread) * weight
    else:
        many, doubt = min(many, settles * (1.0 - alpha) / alpha), 0.0
        weight = settles / (many + settles)
    after, many = before + (mean - before) * weight, many + settles
    if after < smallest * SMALLEST_PART:
        after = smallest * SMALLEST_PART
    if many > MEMORY:
        many = MEMORY
    return Cost(after, many, spread, doubt, 0.0, smallest, largest)


def _doubted(doubt: float, off: float) -> float:
    """Return the doubt after a sample `off` standard errors away; a change of side starts it again."""
    if off > 0:
        doubt = (doubt if doubt > 0 else 0.0) + min(DOUBT_CLIP, off) - DOUBT_DRIFT
        return doubt if doubt > 0 else 0.0
    doubt = (doubt if doubt < 0 else 0.0) + max(-DOUBT_CLIP, off) + DOUBT_DRIFT
    return doubt if doubt < 0 else 0.0


def _unended(cost: Cost, work: float) -> Cost:
    return Cost(
        cost.work, cost.requests, cost.spread, cost.doubt, cost.unended + work, cost.smallest, cost.largest
    )  # fmt: skip
