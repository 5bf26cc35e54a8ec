"""One request, one limit: the most it may take, its charge, and the work that is not collected (W5, W13, F-R18)."""

import pytest

from limiter.model.bucket.operations import COVERED, LEARNED, TOO_LARGE, Verdict
from tests.support.operations import (
    BUCKET,
    START_US,
    acquire,
    ask,
    done,
    look,
    progress,
    record_of,
    reserve,
    rewrite,
    settle,
    work_terms,
)
from tests.support.stores import Decides

TERMS = work_terms(rate=1e-30, capacity=3000, debt_max=6000)


def test_f_r18_work_that_an_acquire_cannot_collect_is_counted_at_once(ledger: Decides) -> None:
    """An estimate of 19 000 on a bucket of 3000 that may owe 6000: 9000 are debited, 10 000 are lost and said to be."""
    answer = acquire(ledger, ask(TERMS, charge=19_000))
    assert (answer.granted, answer.buckets[0].charge, answer.buckets[0].balance) == (True, 9000, -6000)
    assert record_of(ledger).uncollected == 10_000


@pytest.mark.parametrize(
    ("work", "uncollected", "balance"),
    [(19_000, 10_000, -6000), (25_000, 16_000, -6000), (12_000, 3000, -6000), (9000, 0, -6000), (4000, 0, -1000)],
)
def test_w5_a_settle_knows_what_its_acquire_could_not_collect(
    ledger: Decides, work: float, uncollected: float, balance: float
) -> None:
    """9000 were debited for an estimate of 19 000. Nothing is counted twice, and only what was paid is given back."""
    reservation = reserve(ledger, ask(TERMS, charge=19_000))
    bucket = settle(ledger, done(reservation, work)).buckets[0]
    assert (bucket.uncollected, bucket.balance) == (uncollected, balance)
    assert bucket.adjusted - bucket.uncollected == 3000 - balance - 9000, "what was really debited beyond the charge"
    assert record_of(ledger).uncollected == uncollected


def test_w5_uncollected_work_that_was_not_done_is_forgiven_however_late(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=19_000))
    answer = settle(ledger, done(reservation, 12_000), reservation.deadline_us + 1)
    assert (answer.late, answer.buckets[0].uncollected, answer.buckets[0].balance) == (True, 3000, -6000)
    assert record_of(ledger).uncollected == 3000


def test_w5_progress_counts_from_the_charge_that_was_wanted(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=19_000))
    assert settle(ledger, progress(reservation, 18_000)).buckets[0].uncollected == 10_000
    assert settle(ledger, progress(reservation, 20_000)).buckets[0].uncollected == 11_000
    assert settle(ledger, done(reservation, 20_000)).buckets[0].uncollected == 11_000
    assert record_of(ledger).uncollected == 11_000


def test_w13_covered_asks_for_the_whole_charge(ledger: Decides) -> None:
    terms = work_terms(rate=1e-30, capacity=50, debt_max=100)
    assert not acquire(ledger, ask(terms, charge=51, how=COVERED)).granted
    assert acquire(ledger, ask(terms, charge=30, how=COVERED)).granted
    assert not acquire(ledger, ask(terms, charge=21, how=COVERED)).granted
    assert acquire(ledger, ask(terms, charge=21)).granted, "the minimum would do"


def test_w13_a_learned_charge_above_the_capacity_needs_a_full_bucket(ledger: Decides) -> None:
    """Otherwise nobody would ever be admitted again, and nothing be learned that says otherwise."""
    terms = work_terms(rate=1e-30, capacity=50, debt_max=100)
    acquire(ledger, ask(terms, charge=0))
    record = record_of(ledger)
    record.charge = 80.0
    rewrite(ledger, record)
    answer = acquire(ledger, ask(terms, charge=1, how=COVERED | LEARNED))
    assert (answer.granted, answer.buckets[0].charge) == (True, 80)
    assert not acquire(ledger, ask(terms, charge=1, how=COVERED | LEARNED)).granted


def test_w13_a_learned_charge_is_never_more_than_can_be_collected(ledger: Decides) -> None:
    terms = work_terms(rate=1e-30, capacity=50, debt_max=100)
    acquire(ledger, ask(terms, charge=0))
    record = record_of(ledger)
    record.charge = 800.0
    rewrite(ledger, record)
    answer = acquire(ledger, ask(terms, charge=1, how=LEARNED))
    assert (answer.buckets[0].charge, record_of(ledger).uncollected) == (150, 0)


def test_w13_an_estimate_that_is_too_large_is_refused_and_spends_nothing(ledger: Decides) -> None:
    terms = work_terms(rate=1e-30, capacity=50)
    answer = acquire(ledger, ask(terms, charge=5, how=TOO_LARGE))
    assert (answer.granted, answer.buckets[0].verdict, look(ledger, terms)) == (False, Verdict.BLOCKED, 50)
    assert record_of(ledger).refused == 1


def test_a_settle_for_a_splinter_of_a_request_leaves_the_statistics_finite(ledger: Decides) -> None:
    """The square of the work by 5e-324 requests would be infinite, and stop learning for ever."""
    reservation = reserve(ledger, ask(work_terms(), charge=2))
    settle(ledger, done(reservation, 5.0).but(requests=5e-324), START_US + 1)
    assert record_of(ledger, BUCKET).work_squared == 0
    another = reserve(ledger, ask(work_terms(), charge=2), name="r2")
    settle(ledger, done(another, 5.0), START_US + 2)
    assert record_of(ledger, BUCKET).work_squared == 25
