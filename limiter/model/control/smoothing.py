"""Averages that follow a bucket's load (R1).

    avg = a · sample + (1 − a) · avg

first sample    is the average
k cycles long   counts as k samples alike: a becomes 1 − (1 − a)^k
work/request    a = 0.7, for each sample in which requests ended, however long it is: it is no rate over time
work/second     a = 0.3
rejections      a = 0.7; a rate below 0.001 counts as zero
"""

from __future__ import annotations

from math import exp, sqrt

from msgspec.structs import replace

from limiter.model.control.sampling import Sample
from limiter.model.control.value import Value

WORK_PER_REQUEST_ALPHA = 0.7
WORK_RATE_ALPHA = 0.3
REJECTION_RATE_ALPHA = 0.7
REJECTION_RATE_MIN = 0.001

WINDOW_REQUESTS = 50.0
WINDOW_S = 2.0
"""The moments stand for the last so many requests, or the last so many seconds where those are fewer."""


def smooth(average: float | None, sample: float, alpha: float, cycles: float = 1.0) -> float:
    """The average after a sample that is some cycles long."""
    if average is None:
        return sample
    weight = alpha if cycles == 1.0 else 1.0 - (1.0 - alpha) ** cycles
    return weight * sample + (1.0 - weight) * average


class Load(Value, frozen=True):
    """What a bucket carries, smoothed."""

    work_rate: float | None = None
    """L: work units a second."""
    work_per_request: float | None = None
    """f: work units."""
    rejection_rate: float = 0.0
    """Share of the requests that this bucket refused."""
    work_unended: float = 0.0
    """Work of requests that have only reported progress so far: it counts for the next request that ends."""

    @property
    def is_rejecting(self) -> bool:
        """Whether the rejection rate is more than next to nothing (R1)."""
        return self.rejection_rate >= REJECTION_RATE_MIN


def follow(load: Load, sample: Sample, *, cycles: float) -> Load:
    """The load after a sample."""
    work, settles, requests = sample.work, sample.settles, sample.requests
    work_per_request, work_unended = load.work_per_request, load.work_unended + work
    if settles > 0:
        work_per_request = smooth(work_per_request, work_unended / settles, WORK_PER_REQUEST_ALPHA)
        work_unended = 0.0
    rejection_rate = load.rejection_rate
    rejected = sample.refused / requests if requests > 0 else 0.0
    if rejected or rejection_rate:  # most buckets reject nothing
        rejection_rate = smooth(rejection_rate, rejected, REJECTION_RATE_ALPHA, cycles)
    work_rate = smooth(load.work_rate, work / sample.elapsed_s, WORK_RATE_ALPHA, cycles)
    return Load(work_rate, work_per_request, rejection_rate, work_unended)


def rest(load: Load, *, cycles: float) -> Load:
    """The load after a time in which nobody asked."""
    if load.work_rate is None:
        return load
    return replace(
        load,
        work_rate=smooth(load.work_rate, 0.0, WORK_RATE_ALPHA, cycles),
        rejection_rate=smooth(load.rejection_rate, 0.0, REJECTION_RATE_ALPHA, cycles),
    )


class Moments(Value, frozen=True):
    """Mean and spread of the last requests' work, older ones counting less and less."""

    requests: float = 0.0
    work: float = 0.0
    work_squared: float = 0.0

    @property
    def mean(self) -> float:
        """Work units a request; 0 while none has reported."""
        return self.work / self.requests if self.requests > 0 else 0.0

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation ÷ mean."""
        if self.work <= 0:
            return 0.0
        # In this order nothing vanishes that is divided by.
        squared = self.work_squared / self.work * (self.requests / self.work) - 1.0
        return sqrt(squared) if squared > 0 else 0.0


def gather(moments: Moments, sample: Sample) -> Moments:
    """The moments after a sample; what was only charged tells nothing of the spread."""
    settles = sample.settles
    if not sample.is_reported or settles <= 0:
        return moments
    keep = exp(-settles / WINDOW_REQUESTS - sample.elapsed_s / WINDOW_S)
    return Moments(
        moments.requests * keep + settles,
        moments.work * keep + sample.work,
        moments.work_squared * keep + sample.work_squared,
    )
