"""Samples: the difference between two readings of a bucket's counters.

    sample = counters now − counters then

they went back     the record expired and the bucket began again: the sample counts from zero
no settles ever    callers never report work: the charge stands for it
unusable           absent, not a number, no time passed, or too long ago: no sample, and the controller holds (F-P8)
"""

from __future__ import annotations

from math import isfinite
from typing import ClassVar

from limiter.model.bucket.bucket import Flags, Record
from limiter.model.bucket.learned import Entry
from limiter.model.control.value import Value

STALE_S = 60.0
"""An older reading is only a starting point: an average since then says nothing about the present."""


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


class Reading(Value, frozen=True):
    """The fields of a record without trailers that a step uses: read in a third of the time of a whole record."""

    flags: Flags
    requests: float
    admitted: float
    refused: float
    work_charged: float
    charge: float
    work_settled: float
    work_squared: float
    settles: float
    rate: float
    committed: float

    learned: ClassVar[list[Entry]] = []
    requests_until: ClassVar[float] = 0.0

    @property
    def counts_requests(self) -> bool:
        """True if the balance is in requests."""
        return Flags.COUNTS_REQUESTS in self.flags


Seen = Record | Reading
"""A record, or the part of it that a step uses."""


class Sample(Value, frozen=True):
    """The counts of a bucket over some time."""

    elapsed_s: float
    requests: float
    admitted: float
    refused: float
    work: float
    """Reported work, or charged work if callers never report."""
    settles: float
    """Requests that did this work."""
    work_squared: float
    """Sum of the squares of each settled request's work; 0 if callers never report."""
    is_reported: bool
    """True if the work was reported, not only charged."""
    idle_s: float = 0.0
    """Time without requests at the start of the sample: a bucket is only read after it was used."""

    @property
    def is_telling(self) -> bool:
        """True if the sample contains work or settles to learn from."""
        return self.work > 0 or self.settles > 0


def read(record: Seen | None, now_us: float) -> Counters | None:
    """Return the counters of a bucket; None if it does not exist or a counter is NaN or infinite."""
    if record is None:
        return None
    requests, admitted, refused = record.requests, record.admitted, record.refused
    charged, settled, squared = record.work_charged, record.work_settled, record.work_squared
    settles = record.settles
    # One NaN or infinite counter makes the sum so.
    if not isfinite(now_us + requests + admitted + refused + charged + settled + squared + settles):
        return None
    return Counters(now_us, requests, admitted, refused, charged, settled, squared, settles)


def has_begun_again(then: Counters, now: Counters) -> bool:
    """Return True if the counters went back: the record expired, and the bucket began again."""
    return now.requests < then.requests or now.settles < then.settles or now.admitted < then.admitted


def difference(then: Counters, now: Counters, *, idle_s: float = 0.0, stale_s: float = STALE_S) -> Sample | None:
    """Return the sample between two readings, which begins with `idle_s` of rest; None if they are not comparable."""
    elapsed_s = (now.read_us - then.read_us) / 1e6
    if not 0 < elapsed_s <= stale_s:
        return None
    elapsed_s -= idle_s
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
        is_reported,
        idle_s,
    )


_ZERO = Counters(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
