"""The life of a reservation (W14, F-R17): progress renews it, and how late it may be settled is its own."""

import msgspec
import pytest

from limiter.model.bucket.bucket import Params
from limiter.model.bucket.operations import LATE_US, SettleStatus
from limiter.store import keys
from tests.support.operations import (
    BUCKET,
    MINUTE_US,
    S_US,
    START_US,
    ask,
    done,
    forget,
    progress,
    record_of,
    reserve,
    settle,
    work_terms,
)
from tests.support.servers import Server
from tests.support.stores import Decides, ScriptStore

TERMS = work_terms(rate=1e-30, capacity=1000)


def test_f_r17_progress_renews_the_deadline_however_long_the_stream_runs(ledger: Decides) -> None:
    """Ten minutes of a stream whose time to live is one: nothing is lost, and the rest is refunded at the end."""
    reservation = reserve(ledger, ask(TERMS, charge=500))
    now_us = START_US
    for step in range(1, 13):
        now_us += 50 * S_US
        answer = settle(ledger, progress(reservation, 40.0 * step), now_us)
        assert (answer.status, answer.late) == (SettleStatus.SETTLED, False)
        assert answer.deadline_us == now_us + MINUTE_US
    answer = settle(ledger, done(reservation, 490), now_us + 59 * S_US)
    assert (answer.status, answer.late, answer.buckets[0].adjusted) == (SettleStatus.SETTLED, False, -10)
    assert record_of(ledger).balance == pytest.approx(510)


def test_w14_a_stream_that_stands_still_renews_its_deadline_too(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=500))
    settle(ledger, progress(reservation, 100), START_US + 50 * S_US)
    answer = settle(ledger, progress(reservation, 100), START_US + 100 * S_US)
    assert (answer.status, answer.deadline_us) == (SettleStatus.DUPLICATE, START_US + 160 * S_US)
    answer = settle(ledger, done(reservation, 100), START_US + 159 * S_US)
    assert not answer.late
    assert answer.buckets[0].balance == pytest.approx(900)


def test_w14_late_progress_is_marked_late_and_renews(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=500))
    answer = settle(ledger, progress(reservation, 600), START_US + 90 * S_US)
    assert (answer.late, answer.deadline_us) == (True, START_US + 150 * S_US)
    answer = settle(ledger, done(reservation, 550), START_US + 100 * S_US)
    assert not answer.late
    assert answer.buckets[0].balance == pytest.approx(450)


def test_w14_a_clock_that_steps_back_shortens_no_reservation(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=5))
    settle(ledger, progress(reservation, 6), START_US + 50 * S_US)
    assert settle(ledger, progress(reservation, 7), START_US).deadline_us == START_US + 110 * S_US


def test_w14_a_final_settle_renews_nothing(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=5))
    assert settle(ledger, done(reservation, 6), START_US + 50 * S_US).deadline_us == reservation.deadline_us
    again = settle(ledger, progress(reservation, 6), START_US + 55 * S_US)
    assert (again.status, again.deadline_us) == (SettleStatus.DUPLICATE, reservation.deadline_us)


@pytest.mark.parametrize("late_us", [0, 1 * S_US, LATE_US, 3_600 * S_US])
def test_w14_how_late_a_settle_may_come_is_the_reservation_s_own(ledger: Decides, late_us: int) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=5)).but(late_us=late_us)
    gone = settle(ledger, done(reservation, 6), reservation.deadline_us + late_us + 1)
    assert gone.status is SettleStatus.GONE
    answer = settle(ledger, done(reservation, 6), reservation.deadline_us + late_us)
    assert (answer.status, answer.late) == (SettleStatus.SETTLED, late_us > 0)


def test_w14_a_renewed_reservation_is_gone_after_its_new_deadline(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=5))
    renewed = settle(ledger, progress(reservation, 6), START_US + 50 * S_US).deadline_us
    answer = settle(ledger, done(reservation, 7), int(renewed) + LATE_US + 1)
    assert answer.status is SettleStatus.GONE


def test_w14_the_tombstone_lives_as_long_as_the_reservation_may_be_settled(valkey: Server) -> None:
    store = ScriptStore(valkey)
    reservation = reserve(store, ask(TERMS, charge=5)).but(late_us=3_600 * S_US)
    settle(store, progress(reservation, 6), START_US + 50 * S_US)
    left_ms = store.client.pttl(keys.tombstone(store.prefix, "r1"))
    assert 3_650_000 < left_ms <= 3_660_001, "a time to live from now, and how late it may be"
    assert record_of(store, BUCKET).balance == pytest.approx(994)


@pytest.mark.parametrize(("params", "balance"), [(TERMS, 1000 - 25), (None, 0.0)], ids=["policy", "no policy"])
def test_a_settle_restores_a_record_that_has_expired_if_its_policy_still_exists(
    ledger: Decides, params: Params | None, balance: float
) -> None:
    """The bucket is full again, less the 25 units beyond the charge; without its policy there is nothing to debit."""
    reservation = reserve(ledger, ask(TERMS, charge=5))
    forget(ledger)
    (charge,) = reservation.charges
    answer = settle(ledger, done(reservation.but(charges=(msgspec.structs.replace(charge, params=params),)), 30))
    assert (answer.status, answer.buckets[0].present) == (SettleStatus.SETTLED, params is not None)
    assert answer.buckets[0].balance == pytest.approx(balance)
