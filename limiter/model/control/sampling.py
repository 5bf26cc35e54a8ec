"""What happened in a bucket between two readings of its counters.

    sample = counters now − counters then

they went back     the record expired and the bucket began again: the sample counts from zero
no settles ever    callers never say what work was done: what was charged stands for it
unusable           absent, not a number, no time passed, or too long ago: no sample, and the controller holds (F-P8)
"""

from __future__ import annotations

from math import isfinite

from limiter.model.bucket.bucket import Record
from limiter.model.control.value import Value

STALE_S = 60.0
"""A reading older than this is only a place to begin from: its average says nothing of now."""


class Counters(Value, frozen=True):
    """A bucket's cumulative counters at a time: reading them twice loses and doubles nothing."""

    read_us: float
    requests: float
    admitted: float
    refused: float
    work_charged: float
    work_settled: float
    work_squared: float
    settles: float
    uncollected: float


class Sample(Value, frozen=True):
    """What happened in a stretch of time."""

    elapsed_s: float
    requests: float
    admitted: float
    refused: float
    work: float
    """Work that was reported, or charged where nobody ever reports."""
    settles: float
    """Requests that did this work."""
    work_squared: float
    """Sum of the squares of each settled request's work; 0 where nobody ever reports."""
    uncollected: float
    is_reported: bool
    """Whether the work was reported, not only charged."""

    @property
    def is_telling(self) -> bool:
        """Whether anything was done, so that its work can be told."""
        return self.work > 0 or self.settles > 0


def read(record: Record | None, now_us: float) -> Counters | None:
    """The counters of a bucket; None if there is none, or if they are no numbers."""
    if record is None:
        return None
    requests, admitted, refused = record.requests, record.admitted, record.refused
    charged, settled, squared = record.work_charged, record.work_settled, record.work_squared
    settles, uncollected = record.settles, record.uncollected
    # One that is no number makes the sum none.
    if not isfinite(now_us + requests + admitted + refused + charged + settled + squared + settles + uncollected):
        return None
    return Counters(now_us, requests, admitted, refused, charged, settled, squared, settles, uncollected)


def difference(then: Counters, now: Counters) -> Sample | None:
    """What happened from one reading to the next; None if they cannot tell."""
    elapsed_s = (now.read_us - then.read_us) / 1e6
    if not 0 < elapsed_s <= STALE_S:
        return None
    requests, admitted, settles = now.requests, now.admitted, now.settles
    if requests < then.requests or settles < then.settles or admitted < then.admitted:
        then = _ZERO
    admitted -= then.admitted
    is_reported = settles > 0
    work = now.work_settled - then.work_settled if is_reported else now.work_charged - then.work_charged
    return Sample(
        elapsed_s,
        requests - then.requests,
        admitted,
        now.refused - then.refused,
        work if work > 0 else 0.0,  # a final settle may take back what progress reported
        settles - then.settles if is_reported else admitted,
        now.work_squared - then.work_squared,
        now.uncollected - then.uncollected,
        is_reported,
    )


_ZERO = Counters(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
