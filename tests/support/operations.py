"""Short spellings of the most frequent operations on buckets: terms, acquires, settles, one at a time."""

import math

from limiter.model.bucket.block import BlockTerms
from limiter.model.bucket.bucket import Flags, Params, Record
from limiter.model.bucket.operations import (
    LEARNED,
    Acquire,
    AcquireAnswer,
    BucketAnswer,
    Charge,
    Settle,
    SettleAnswer,
    Verdict,
    Want,
)
from limiter.model.ledger.ledger import Ledger
from limiter.store import keys, layout
from tests.support.stores import Decides, ScriptStore

START_US = 1_790_000_000_000_000
"""2026-09-21 14:13:20 UTC, a Monday."""

MS_US = 1_000
S_US = 1_000_000
MINUTE_US = 60_000_000
HOUR_US = 3_600_000_000
DAY_US = 86_400_000_000

NO_REFILL = 1e-30
"""A rate so slow that no float64 balance shows it: totals are exact whatever the clock does."""

BUCKET = "reads:a"


def work_terms(
    *,
    rate: float = 100.0,
    capacity: float = 50.0,
    debt_max: float = 10_000.0,
    settle_threshold: float = 0.0,
    stop_debt: float = math.inf,
    flags: Flags = Flags.NONE,
    block: BlockTerms | None = None,
) -> Params:
    """A bucket of work; without arguments the one of W10."""
    return Params(
        flags=flags | (Flags.NONE if block is None else Flags.BLOCK),
        block=block,
        committed=rate,
        capacity=capacity,
        debt_max=debt_max,
        settle_threshold=settle_threshold,
        stop_debt=stop_debt,
    )


def request_terms(*, cap: float, burst: float) -> Params:
    """A bucket of request tokens."""
    return Params(flags=Flags.COUNTS_REQUESTS, committed=cap, cap=cap, capacity=cap, burst=burst, debt_max=0.0)


def quota_terms(limit: float, window_us: tuple[int, int], *, debt_max: float = 0.0) -> Params:
    """A limit over a calendar window."""
    start_us, end_us = window_us
    return Params(flags=Flags.QUOTA, capacity=limit, debt_max=debt_max, window_start_us=start_us, window_end_us=end_us)


def ask(terms: Params, *, bucket: str = BUCKET, minimum: float = 1.0, charge: float = 2.0, how: int = 0) -> Acquire:
    """A request for one bucket."""
    return Acquire((Want(bucket, terms, minimum, charge, how),))


def acquire(ledger: Decides, operation: Acquire, now_us: int = START_US) -> AcquireAnswer:
    """Decide one request, on its own."""
    (answer,) = ledger.acquire([operation], now_us)
    return answer


def settle(ledger: Decides, operation: Settle, now_us: int = START_US) -> SettleAnswer:
    """Settle one reservation, on its own."""
    (answer,) = ledger.settle([operation], now_us)
    return answer


def charge_of(want: Want, found: BucketAnswer) -> Charge:
    """The charge of one debited bucket in a reservation."""
    # Where the charge was learned, or the bucket counts requests, it is not the want's.
    lost = 0.0 if found.in_requests or want.how & LEARNED else want.charge - found.charge
    return Charge(
        want.bucket, found.charge, want.weight, want.params, found.in_requests, uncollected=lost, learn_id=want.learn_id
    )


def reserved(operation: Acquire, answer: AcquireAnswer, *, name: str = "r1", ttl_us: int = MINUTE_US) -> Settle:
    """The reservation that a granted acquire leads to, as a settle with no work in it yet."""
    assert answer.granted
    return Settle(
        reservation=name,
        charges=tuple(
            charge_of(want, found)
            for want, found in zip(operation.wants, answer.buckets, strict=True)
            if found.verdict is Verdict.DEBITED
        ),
        work=0.0,
        acquired_us=answer.now_us,
        deadline_us=answer.now_us + ttl_us,
        requests=operation.requests,
    )


def reserve(ledger: Decides, operation: Acquire, now_us: int = START_US, *, name: str = "r1") -> Settle:
    """Acquire, and hold the reservation."""
    return reserved(operation, acquire(ledger, operation, now_us), name=name)


def done(reservation: Settle, work: float) -> Settle:
    """The final settle of a reservation."""
    return reservation.but(work=work)


def progress(reservation: Settle, work: float) -> Settle:
    """A progress call with the reservation's work so far."""
    return reservation.but(work=work, final=False)


def look(ledger: Decides, terms: Params, now_us: int = START_US, *, bucket: str = BUCKET) -> float:
    """The balance that a request would find; changes nothing."""
    watching = ask(terms, bucket=bucket, minimum=-math.inf, charge=0.0).but(dry_run=True)
    return acquire(ledger, watching, now_us).buckets[0].balance


def record_of(ledger: Decides, bucket: str = BUCKET) -> Record:
    """A bucket's record as it is kept."""
    if isinstance(ledger, Ledger):
        return ledger.records[bucket]
    assert isinstance(ledger, ScriptStore)
    raw = ledger.record(bucket)
    assert raw is not None, f"there is no bucket {bucket}"
    return layout.unpack_record(raw)


def rewrite(ledger: Decides, record: Record, bucket: str = BUCKET) -> None:
    """Put a record in place, as the controller will."""
    if isinstance(ledger, Ledger):
        ledger.records[bucket] = record
    else:
        assert isinstance(ledger, ScriptStore)
        ledger.client.set(keys.bucket(ledger.prefix, bucket), layout.pack_record(record))


def forget(ledger: Decides, bucket: str = BUCKET) -> None:
    """Remove a bucket's record, as the expiry of its key does."""
    if isinstance(ledger, Ledger):
        del ledger.records[bucket]
    else:
        assert isinstance(ledger, ScriptStore)
        ledger.client.delete(keys.bucket(ledger.prefix, bucket))
