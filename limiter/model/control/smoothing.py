"""Averages that follow a bucket's load: the published ones (R1), and the moments from which charges are learned.

    avg = a · sample + (1 − a) · avg

first sample    is the average
k cycles long   counts as k samples alike: a becomes 1 − (1 − a)^k
work/request    a = 0.7, for each sample in which requests ended, however long it is: it is no rate over time
work/second     a = 0.3
rejections      a = 0.7; a rate below 0.001 counts as zero
"""

from __future__ import annotations

from math import exp, sqrt
from typing import NamedTuple

from msgspec.structs import replace

from limiter.model.control.sampling import Sample
from limiter.model.control.value import Value

REJECTION_RATE_MIN = 0.001

WINDOW_REQUESTS = 50.0
WINDOW_S = 2.0
"""The moments cover the last WINDOW_REQUESTS requests, or the last WINDOW_S seconds if those have fewer requests."""


class Smoothing(NamedTuple):
    """R1: the weight of the newest sample in each average; a policy may set others (R14)."""

    work_per_request: float = 0.7
    work_rate: float = 0.3
    rejection: float = 0.7


SMOOTHING = Smoothing()


def smooth(average: float | None, sample: float, alpha: float, cycles: float = 1.0) -> float:
    """Return the average after a sample that is some cycles long."""
    if average is None:
        return sample
    weight = alpha if cycles == 1.0 else 1.0 - (1.0 - alpha) ** cycles
    return weight * sample + (1.0 - weight) * average


class Load(Value, frozen=True):
    """A bucket's load, smoothed."""

    work_rate: float | None = None
    """L: work units per second."""
    work_per_request: float | None = None
    """f: work units."""
    rejection_rate: float = 0.0
    """Share of requests that this bucket refused."""
    work_unended: float = 0.0
    """Work of requests that have only reported progress so far: it counts for the next request that ends."""

    @property
    def is_rejecting(self) -> bool:
        """True if the rejection rate is above the threshold that counts as zero (R1)."""
        return self.rejection_rate >= REJECTION_RATE_MIN


def follow(load: Load, sample: Sample, smoothing: Smoothing = SMOOTHING, *, cycles: float) -> Load:
    """Return the load after a sample."""
    work, settles, requests = sample.work, sample.settles, sample.requests
    work_per_request, work_unended = load.work_per_request, load.work_unended + work
    if settles > 0:
        work_per_request = smooth(work_per_request, work_unended / settles, smoothing.work_per_request)
        work_unended = 0.0
    rejection_rate = load.rejection_rate
    rejected = sample.refused / requests if requests > 0 else 0.0
    if rejected or rejection_rate:  # most buckets reject nothing
        rejection_rate = smooth(rejection_rate, rejected, smoothing.rejection, cycles)
    work_rate = smooth(load.work_rate, work / sample.elapsed_s, smoothing.work_rate, cycles)
    return Load(work_rate, work_per_request, rejection_rate, work_unended)


def rest(load: Load, smoothing: Smoothing = SMOOTHING, *, cycles: float) -> Load:
    """Return the load after a time without requests."""
    if load.work_rate is None:
        return load
    return replace(
        load,
        work_rate=smooth(load.work_rate, 0.0, smoothing.work_rate, cycles),
        rejection_rate=smooth(load.rejection_rate, 0.0, smoothing.rejection, cycles),
    )


class Moments(Value, frozen=True):
    """Mean and spread of the work of recent requests; the weight of older ones fades."""

    requests: float = 0.0
    work: float = 0.0
    work_squared: float = 0.0

    @property
    def mean(self) -> float:
        """Work units per request; 0 before the first report."""
        return self.work / self.requests if self.requests > 0 else 0.0

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation ÷ mean."""
        if self.work <= 0:
            return 0.0
        # In this order no divisor underflows to zero.
        squared = self.work_squared / self.work * (self.requests / self.work) - 1.0
        return sqrt(squared) if squared > 0 else 0.0


def gather(
    moments: Moments, sample: Sample, *, requests: float = WINDOW_REQUESTS, seconds: float = WINDOW_S
) -> Moments:
    """Return the moments after a sample; charged work says nothing about the spread."""
    settles = sample.settles
    if not sample.is_reported or settles <= 0:
        return moments
    keep = exp(-settles / requests - sample.elapsed_s / seconds)
    return Moments(
        moments.requests * keep + settles,
        moments.work * keep + sample.work,
        moments.work_squared * keep + sample.work_squared,
    )
