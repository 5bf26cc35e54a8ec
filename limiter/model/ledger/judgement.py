"""Verdicts of the buckets of an acquire, and the changes to their records once all have been asked."""

from __future__ import annotations

from collections.abc import Sequence

from limiter.model.bucket import block, in_flight, learned
from limiter.model.bucket.admission import needed, part_of_minimum
from limiter.model.bucket.bucket import (
    ATTEMPTS_MAX,
    KIND,
    WEIGHS,
    Flags,
    Params,
    Record,
    collectable,
    share_of,
)
from limiter.model.bucket.in_flight import InFlightTerms
from limiter.model.bucket.lending import free_capacity, free_part
from limiter.model.bucket.operations import (
    COVERED,
    LEARNED,
    TOO_LARGE,
    Acquire,
    Lot,
    Pressure,
    Verdict,
    Want,
)
from limiter.model.overload import shedding
from limiter.model.overload.shedding import Turn


def judge(
    operation: Acquire, records: Sequence[Record], minimums: Sequence[float], charges: Sequence[float], now_us: int
) -> list[Verdict]:
    """Return each bucket's verdict (W3, W13, W17)."""
    verdicts = []
    for want, record, need, charge in zip(operation.wants, records, minimums, charges, strict=True):
        amount = counted(record, operation.requests, want.weight) if record.counts_requests else charge
        covered = want.params.is_quota
        if want.how & COVERED and not (covered or record.counts_requests):
            # A learned charge may be more than the bucket holds: a full bucket is then enough.
            covered, amount = True, min(amount, record.capacity) if want.how & LEARNED else amount
        need = needed(need, amount, debt_max=record.debt_max, capacity=record.capacity, covered=covered)
        passed = record.balance >= need and not want.how & TOO_LARGE
        if blocked_us(record, want.params, now_us) > 0:
            verdicts.append(Verdict.DENIED)
        elif passed and is_full(record, want.params, now_us):
            verdicts.append(Verdict.FULL)
        else:
            verdicts.append(Verdict.PASSED if passed else Verdict.BLOCKED)
    return verdicts


def is_full(record: Record, params: Params, now_us: int) -> bool:
    """Check for as many open reservations as there may be (W18)."""
    terms, slots = params.in_flight, record.slots
    if terms is None or slots is None or terms.limit == 0:
        return False
    return slots.count >= _places(record, params, terms, now_us)


def _places(record: Record, params: Params, terms: InFlightTerms, now_us: int) -> float:
    """How many may be open here: places of parts that are lent are their holders' (B8)."""
    return in_flight.limit_here(terms, share_of(record, params, now_us) * free_part(record))


def told_charge(verdict: Verdict, charge: float, record: Record, params: Params, now_us: int) -> float:
    """Value of the answer's field `charge`, by the verdict (`BucketAnswer.charge`)."""
    if verdict is Verdict.DENIED:
        return blocked_us(record, params, now_us)
    if verdict is Verdict.FULL and params.in_flight is not None:
        return _places(record, params, params.in_flight, now_us)
    return charge


def blocked_us(record: Record, params: Params, now_us: int) -> float:
    """Return the time for which the bucket's key is still blocked; 0 if it is not (W17)."""
    if record.block is None or params.block is None:
        return 0.0
    return block.left_us(record.block, params.block, now_us)


def shed(operation: Acquire, lot: Lot, records: Sequence[Record], verdicts: list[Verdict]) -> list[Turn | None]:
    """Give overload control the last word, so that the share it refuses is that of all requests (Q4, S3, S9)."""
    turns: list[Turn | None] = [None] * len(records)
    over = [_is_over_committed(want, record) for want, record in zip(operation.wants, records, strict=True)]
    for i, record in enumerate(records):
        if record.shedding is None or verdicts[i] is Verdict.DENIED:
            continue
        turn = turns[i] = shedding.turns_away(
            record.shedding,
            lot.class_number,
            lot.draw,
            in_flight=0.0 if record.slots is None else record.slots.count,
            free=free_part(record),
            expected_ms=lot.expected_ms,
            over_committed=sum(over) > over[i],
            requests=operation.requests,
        )
        if turn.is_refused:
            verdicts[i] = Verdict.TURNED_AWAY
    return turns


def _is_over_committed(want: Want, record: Record) -> bool:
    """Check for a key that takes more than its rate: less than half of its capacity is left (S11)."""
    return not record.is_quota and not want.params.is_shadow and record.balance < record.capacity / 2


def commit_place(record: Record, params: Params, verdict: Verdict, taken: float, operation: Acquire) -> None:
    """Count the attempt, and what is in flight or found no place (G6, W18)."""
    if operation.attempt == 2:
        record.second_attempts = min(record.second_attempts + 1, ATTEMPTS_MAX)
    elif operation.attempt > 2:
        record.further_attempts = min(record.further_attempts + 1, ATTEMPTS_MAX)
    terms, slots = params.in_flight, record.slots
    if terms is None or slots is None:
        return
    if verdict is Verdict.DEBITED:
        in_flight.add(slots, terms, taken if terms.in_work else operation.requests, operation.ttl_us)
    elif verdict is Verdict.FULL:
        slots.refused += operation.requests


def commit_class(
    record: Record,
    verdict: Verdict,
    lot: Lot,
    *,
    requests: float,
    work: float | None = None,
    turn: Turn | None = None,
) -> None:
    """Count the request in its class, as refused or admitted, and debit the class of an admitted one, by its work if
    given.

    If another bucket has refused the request, this one has let nobody else pass in its place.
    """
    if record.shedding is None or verdict is Verdict.DENIED:
        return
    if turn is not None and verdict in (Verdict.TURNED_AWAY, Verdict.DEBITED):
        record.shedding.ahead[lot.class_number] = turn.ahead
    shedding.ask(record.shedding, lot.class_number, requests, refused=verdict is Verdict.TURNED_AWAY)
    if verdict is Verdict.DEBITED:
        shedding.take(record.shedding, lot.class_number, requests, work)


def pressure(record: Record, verdict: Verdict, lot: Lot | None) -> Pressure | None:
    """State of a bucket's overload control, for its answer; None if the request is not subject to any."""
    if lot is None or record.shedding is None:
        return None if lot is None else Pressure()
    known, number = record.shedding, lot.class_number
    return Pressure(
        shedding.state_told(known, number, turned_away=verdict is Verdict.TURNED_AWAY),
        known.quality if known.lent_until_us > 0 else 1.0,
        shedding.share_told(known, number),
        known.rates[number] if known.lent_until_us > 0 else 0.0,
        known.limits[number],
    )


def commit(
    record: Record,
    params: Params,
    verdict: Verdict,
    charge: float,
    *,
    granted: bool,
    requests: float,
    counted: float,
    now_us: int,
) -> tuple[Verdict, float]:
    """Count the request, and debit it if every bucket agreed. A shadow takes part as long as it would admit (P11)."""
    record.requests += counted
    if verdict in (Verdict.BLOCKED, Verdict.DENIED):
        record.refused += counted
    if verdict is Verdict.BLOCKED and record.block is not None and params.block is not None:
        block.count_refusal(record.block, params.block, requests, now_us)
    if verdict >= Verdict.BLOCKED or not granted:
        return verdict, charge
    wanted = counted if record.counts_requests else charge
    taken = collectable(record, wanted)
    record.balance -= taken
    record.uncollected += wanted - taken
    record.admitted += counted
    record.work_charged += charge if record.counts_requests else taken
    return Verdict.DEBITED, taken


def counted(record: Record, requests: float, weight: float) -> float:
    """Return the number that requests of this weight count as: only a cap of requests weighs them (W16), and a bucket
    that may come to have one or that learns its charge before weights."""
    return requests * weight if record.flags & KIND == Flags.COUNTS_REQUESTS or record.flags & WEIGHS else requests


def charge_of(want: Want, record: Record) -> float:
    """Return the charge that a bucket is asked for: the caller's, or the learned one."""
    estimate = record.charge
    if Flags.LEARNS in record.flags:
        entry = learned.find(record.learned, want.learn_id) if want.learn_id else None
        estimate = entry.charge if entry is not None else 0.0 if want.learn_id else estimate
        estimate *= want.weight
    if want.how & LEARNED and estimate > 0 and not record.counts_requests:
        # An estimate that no balance could pay would lock the bucket, or be forgiven in part.
        return estimate if want.params.is_quota else min(estimate, record.capacity + record.debt_max)
    return want.charge


def minimum_of(want: Want, record: Record) -> float:
    """Return the minimum for the part of the limit that the bucket holds."""
    capacity = free_capacity(record)
    part = capacity / want.params.whole_capacity
    return part_of_minimum(want.minimum, part=part, capacity=capacity)
