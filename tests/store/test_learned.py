"""Charges learned before weights and by values of `learn_by`, callers' own measure, thresholds by side (W15, W19)."""

from dataclasses import replace

import pytest

from limiter.model.bucket.bucket import Flags
from limiter.model.bucket.learned import ENTRIES_MAX, REST, learn_id
from limiter.model.bucket.operations import KEYED, LEARNED, Acquire, Want
from limiter.model.control.stewardship import Steer
from tests.support.operations import (
    BUCKET,
    START_US,
    acquire,
    done,
    look,
    progress,
    record_of,
    reserved,
    settle,
    work_terms,
)
from tests.support.stores import LEASE_MS, Decides

TERMS = work_terms(capacity=10_000, flags=Flags.LEARNS)
GET, SCAN = learn_id(["operation"], {"operation": "get"}), learn_id(["operation"], {"operation": "scan"})


def wanted(id_: int, *, weight: float = 1.0) -> Acquire:
    return Acquire((Want(BUCKET, TERMS, 1.0, 1.0, LEARNED | KEYED if id_ else LEARNED, weight, id_),))


def work(ledger: Decides, id_: int, amount: float, *, weight: float = 1.0, name: str = "r") -> float:
    """One request that does some work; what it was charged."""
    operation = wanted(id_, weight=weight)
    answer = acquire(ledger, operation)
    settle(ledger, done(reserved(operation, answer, name=name), amount))
    return answer.buckets[0].charge


def teach(ledger: Decides, *charges: tuple[int, float], charge: float | None = None) -> None:
    lease = ledger.take(b"controller", LEASE_MS)
    assert lease is not None
    ledger.steer(lease, [Steer(BUCKET, TERMS, charge=charge, charges=charges)], START_US)


def test_w15_each_value_counts_its_own_requests_and_work(ledger: Decides) -> None:
    for number in range(3):
        work(ledger, GET, 1.0, name=f"g{number}")
    work(ledger, SCAN, 500.0, name="s")
    found = {entry.id: (entry.settles, entry.work, entry.work_squared) for entry in record_of(ledger).learned}
    assert found == {GET: (3.0, 3.0, 3.0), SCAN: (1.0, 500.0, 250_000.0)}


def test_w15_each_value_is_charged_what_was_learned_of_it(ledger: Decides) -> None:
    work(ledger, GET, 1.0, name="g")
    teach(ledger, (GET, 2.0), (SCAN, 400.0))
    assert work(ledger, GET, 1.0, name="g2") == 2.0
    assert work(ledger, SCAN, 500.0, name="s") == 400.0, "a value that this bucket has not met may be taught, too"
    assert work(ledger, learn_id(["operation"], {"operation": "put"}), 9.0, name="p") == 1.0, "the charge that is sent"


def test_w15_weights_come_after_what_was_learned(ledger: Decides) -> None:
    """4 units each, a write weighing 3: per weight 4 units."""
    work(ledger, 0, 4.0, name="read")
    work(ledger, 0, 4.0, weight=3.0, name="write")
    record = record_of(ledger)
    assert (record.settles, record.work_settled, record.work_squared) == (4.0, 16.0, 64.0)
    teach(ledger, charge=4.0)
    assert work(ledger, 0, 4.0, name="read2") == 4.0
    assert work(ledger, 0, 4.0, weight=3.0, name="write2") == 12.0


def test_w15_values_beyond_the_most_share_one_entry(ledger: Decides) -> None:
    for number in range(1, ENTRIES_MAX + 4):
        work(ledger, number, float(number), name=f"r{number}")
    entries = {entry.id: entry for entry in record_of(ledger).learned}
    assert len(entries) == ENTRIES_MAX + 1
    assert entries[REST].settles == 3
    assert entries[REST].work == 17 + 18 + 19
    teach(ledger, (REST, 18.0))
    assert work(ledger, 999, 18.0, name="other") == 18.0


def test_w15_progress_counts_for_its_value(ledger: Decides) -> None:
    operation = wanted(SCAN)
    reservation = reserved(operation, acquire(ledger, operation))
    settle(ledger, progress(reservation, 30.0))
    settle(ledger, done(reservation, 50.0))
    (entry,) = record_of(ledger).learned
    assert (entry.settles, entry.work) == (1.0, 50.0)


def test_w15_a_policy_that_no_longer_learns_apart_forgets_what_it_did(ledger: Decides) -> None:
    work(ledger, GET, 1.0)
    teach(ledger, (GET, 2.0), charge=3.0)
    plain = replace(TERMS, flags=Flags.NONE)
    acquire(ledger, Acquire((Want(BUCKET, plain, 1.0, 1.0, LEARNED),)))
    record = record_of(ledger)
    assert (record.learned, record.charge) == ([], 0.0)


@pytest.mark.parametrize(("unit", "debited"), [(2048.0, 32.0), (3000.0, 22.0), (-3000.0, 65_536 / 3000)])
def test_w19_bytes_become_units(ledger: Decides, unit: float, debited: float) -> None:
    """64 KB are 32 units of 2048 bytes; rounded up unless below zero."""
    terms = work_terms(capacity=100)
    operation = Acquire((Want(BUCKET, terms, 1.0, 1.0),))
    reservation = reserved(operation, acquire(ledger, operation))
    measured = reservation.but(charges=(reservation.charges[0].but(unit=unit),))
    settle(ledger, progress(measured, 1.0))
    assert look(ledger, terms) == 99.0, "a byte is a unit, which was charged"
    settle(ledger, done(measured, 65_536.0))
    assert look(ledger, terms) == pytest.approx(100 - debited)
    assert record_of(ledger).work_settled == pytest.approx(debited)


def test_w19_a_refund_may_have_a_threshold_of_its_own(ledger: Decides) -> None:
    terms = replace(work_terms(capacity=100, settle_threshold=0.0, flags=Flags.REFUNDS), refund_threshold=-0.1)
    operation = Acquire((Want(BUCKET, terms, 1.0, 50.0),))
    for name, done_work, left in (("less", 46.0, 50.0), ("much less", 40.0, 60.0), ("more", 51.0, 49.0)):
        ledger.records.pop(BUCKET, None) if hasattr(ledger, "records") else ledger.client.flushall()  # type: ignore[attr-defined]
        reservation = reserved(operation, acquire(ledger, operation), name=name)
        settle(ledger, done(reservation, done_work))
        assert look(ledger, terms) == left, name
