"""Debits and refunds of settles and progress calls, from the charges and the settles before."""

from __future__ import annotations

import math
from dataclasses import dataclass

from limiter.model.bucket import learned
from limiter.model.bucket.bucket import (
    COUNT_MAX,
    HISTOGRAM_STEPS,
    Flags,
    Record,
    collectable,
    histogram_step,
)
from limiter.model.bucket.learned import Entry
from limiter.model.bucket.lending import free_capacity
from limiter.model.bucket.operations import (
    BucketSettled,
    Charge,
    Settle,
    SettleStatus,
)
from limiter.model.ledger.judgement import counted
from limiter.model.overload import shedding


@dataclass(slots=True)
class Tombstone:
    """The state of a reservation once it was settled or has reported progress."""

    accounted: list[float]
    """The debit of each bucket so far, with the part that it could not pay."""
    uncollected: list[float]
    """The part of that which it could not pay."""
    deadline_us: float
    work: float = 0.0
    late: bool = False
    final: bool = False
    begun: bool = False


def standing(mark: Tombstone, operation: Settle) -> SettleStatus:
    """Distinguish a first settle from a repeat: settled stays settled, progress counts at its highest (F-R2, F-R3,
    F-R12)."""
    if mark.final:
        return SettleStatus.CONFLICT if operation.final and operation.work != mark.work else SettleStatus.DUPLICATE
    if mark.begun and not operation.final and operation.work <= mark.work:
        return SettleStatus.DUPLICATE
    return SettleStatus.SETTLED


def renew(mark: Tombstone, operation: Settle, now_us: int) -> None:
    """Move the deadline to a whole time to live from now, after progress (W14)."""
    mark.deadline_us = max(mark.deadline_us, float(now_us + (operation.deadline_us - operation.acquired_us)))


def settle_bucket(record: Record, mark: Tombstone, i: int, operation: Settle, now_us: int) -> None:
    """Count and correct one bucket: all of the work if final, else only what is beyond the mark (W5–W7)."""
    charge = operation.charges[i]
    work = measured(operation.work, charge.unit)
    target = work * charge.weight
    worth_each = worth(record, charge)
    more = (work - measured(mark.work, charge.unit)) * charge.weight
    record.work_settled += more
    entry = learned.make(record.learned, charge.learn_id) if charge.learn_id and Flags.LEARNS in record.flags else None
    if entry is not None:
        entry.work += more
    if not operation.final:
        if worth_each is not None and not charge.in_requests and target > mark.accounted[i]:
            correct(record, mark, i, target, worth_each, refundable=False)
        return
    _count(record, operation, charge, target, now_us)
    if entry is not None:
        _count_learned(record, entry, operation, charge, target)
    if worth_each is None:
        return
    if charge.in_requests:
        target = counted(record, operation.requests, charge.weight)
    if within_threshold(record, target - mark.accounted[i], charge):
        return
    same_window = not record.is_quota or operation.acquired_us >= record.committed
    correct(record, mark, i, target, worth_each, refundable=not mark.late and same_window)


def measured(work: float, unit: float) -> float:
    """Return units of work, given in the caller's own measure (W19); `unit` is as in `Charge.unit`."""
    if unit == 0:
        return work
    return float(math.ceil(work / unit)) if unit > 0 else work / -unit


def worth(record: Record, charge: Charge) -> float | None:
    """Return the value of one unit of the charge in the bucket's current unit (R10); None: nothing.

    Work charged before the bucket began to count requests is worth the same time as then. A request token was the
    price, whatever the work.
    """
    if record.counts_requests == charge.in_requests:
        return 1.0
    if not record.counts_requests or record.is_quota:
        return None
    tokens = record.rate / record.committed
    return tokens if 0 < tokens < math.inf else None


def _count(record: Record, operation: Settle, charge: Charge, work: float, now_us: int) -> None:
    latency_ms, number = operation.latency_ms, operation.class_number
    expected_ms = operation.expected_ms if math.isnan(charge.expected_ms) else charge.expected_ms
    settles = counted(record, operation.requests, charge.weight)
    record.settles += settles
    if operation.requests >= 1 and settles > 0:  # fewer could make the square arbitrarily large
        record.work_squared += work * work / settles
    if record.shedding is not None and not latency_ms >= 0:
        latency_ms = max(0.0, (now_us - operation.acquired_us) / 1000)  # the reservation knows how long it took (Q8)
    if latency_ms > expected_ms:
        record.missed += 1
    if record.histogram and latency_ms >= 0:
        step = histogram_step(latency_ms) + (0 if record.shedding is None else number * HISTOGRAM_STEPS)
        record.histogram[step] = min(record.histogram[step] + 1, COUNT_MAX)
    if record.shedding is not None:
        terms = None if charge.params is None else charge.params.overload
        target_ms = 0.0 if terms is None else terms.targets_ms[number]
        shedding.count(record.shedding, number, latency_ms=latency_ms, expected_ms=expected_ms, target_ms=target_ms)


def _count_learned(record: Record, entry: Entry, operation: Settle, charge: Charge, work: float) -> None:
    settles = counted(record, operation.requests, charge.weight)
    entry.settles += settles
    if operation.requests >= 1 and settles > 0:
        entry.work_squared += work * work / settles


def within_threshold(record: Record, delta: float, charge: Charge) -> bool:
    """True if the difference is too small to correct (W6); refunds may have a threshold of their own (W19)."""
    threshold = record.settle_threshold
    if delta < 0 and charge.params is not None and Flags.REFUNDS in charge.params.flags:
        threshold = charge.params.refund_threshold
    if threshold < 0:
        threshold = -threshold * charge.charge
    return math.fabs(delta) <= threshold


def correct(record: Record, mark: Tombstone, i: int, target: float, worth_each: float, *, refundable: bool) -> None:
    """Bring one bucket's debit to the target; count what the debt bound cuts off (W5, F-R9)."""
    delta = target - mark.accounted[i]
    if delta > 0:
        owed = delta * worth_each
        taken = collectable(record, owed)
        record.balance -= taken
        lost = (owed - taken) / worth_each
        mark.uncollected[i] += lost
        record.uncollected += lost
        mark.accounted[i] = target
    elif delta < 0:
        # Work that was not done was not left unpaid either, however late the settle.
        forgiven = min(-delta, mark.uncollected[i])
        mark.uncollected[i] -= forgiven
        record.uncollected -= forgiven
        if refundable:
            record.balance = min(record.balance + (-delta - forgiven) * worth_each, free_capacity(record))
            mark.accounted[i] = target
        else:
            mark.accounted[i] -= forgiven


def settled_of(record: Record | None, mark: Tombstone, i: int, charge: Charge) -> BucketSettled:
    """Return the answer of one bucket; a record that is missing answers with zeros."""
    adjusted = mark.accounted[i] - charge.charge
    if record is None:
        return BucketSettled(False, 0.0, adjusted, mark.uncollected[i], 0.0, 0.0)
    return BucketSettled(
        True, record.balance, adjusted, mark.uncollected[i], record.rate, record.capacity, record.counts_requests
    )
