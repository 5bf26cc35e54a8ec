"""Charges that one bucket learns separately by the values of `learn_by` (W15): W8 for each of them.

An entry of the record counts the requests and the work of one value, both weighed, so charges are
learned before weights. The state of a value is its last reading, its moments and the error of its charge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from limiter.model.bucket.learned import Entry
from limiter.model.control import learning, smoothing
from limiter.model.control.learning import Learning, LearningParams
from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import Moments
from limiter.model.control.value import Value

MOVE_MIN = 1e-3
"""Relative: a charge that moves by less is not written."""


class Apart(Value, frozen=True):
    """State of one value."""

    settles: float
    work: float
    work_squared: float
    moments: Moments = Moments()
    learning: Learning = Learning()


Charges = tuple[tuple[int, float], ...]
"""Ids of values, and their charges."""


def step(
    known: Mapping[int, Apart], entries: Sequence[Entry], params: LearningParams, *, elapsed_s: float
) -> tuple[dict[int, Apart], Charges]:
    """Learn from each entry that has grown; return the new states, and the charges that moved."""
    after: dict[int, Apart] = {}
    moved = []
    for entry in entries:
        apart = known.get(entry.id)
        if apart is None or entry.settles < apart.settles:  # new, or the record began again
            apart = Apart(0.0, 0.0, 0.0)
        settles = entry.settles - apart.settles
        if settles > 0:
            sample = Sample(
                elapsed_s, settles, settles, 0.0, max(0.0, entry.work - apart.work), settles,
                entry.work_squared - apart.work_squared, is_reported=True,
            )  # fmt: skip
            moments = smoothing.gather(apart.moments, sample)
            charge, learned = learning.step(entry.charge, apart.learning, moments, sample, params)
            if abs(charge - entry.charge) > MOVE_MIN * charge:
                moved.append((entry.id, charge))
            apart = Apart(entry.settles, entry.work, entry.work_squared, moments, learned)
        after[entry.id] = apart
    return after, tuple(moved)
