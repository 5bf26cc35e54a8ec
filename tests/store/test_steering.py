"""What the controller does to buckets: judged on the model, on the scripts, and through the class that it will use."""

import math
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.operations import LEARNED, SettleStatus, Verdict
from limiter.model.control.stewardship import SHARE_FOR_MAX_US, Lease, Steer, SteerStatus
from limiter.store import keys
from limiter.store.keys import Slot
from limiter.store.link.connect import Link, open_link
from limiter.store.steering import READ_MAX, LeaseLost, Steering
from tests.support import eventually_async
from tests.support.operations import (
    BUCKET,
    HOUR_US,
    MS_US,
    S_US,
    START_US,
    acquire,
    ask,
    done,
    look,
    progress,
    quota_terms,
    record_of,
    request_terms,
    reserve,
    rewrite,
    settle,
    work_terms,
)
from tests.support.servers import Cluster, Server
from tests.support.stores import LEASE_MS, Decides, ScriptStore

SLOT = Slot()
OWNER = b"controller"

AUTO = replace(work_terms(rate=100, capacity=50), flags=Flags.AUTO, cap=30.0, burst_s=0.1)
"""Half a second's work, or a tenth of a second's requests, but at least one."""
MUCH = 1e9
"""More work than any of these tests settles."""


def divided(terms: Params, partitions: int) -> Params:
    return replace(terms, flags=terms.flags | Flags.DIVIDED, partitions=partitions)


def steer(ledger: Decides, row: Steer, now_us: int = START_US) -> SteerStatus:
    """Set something as the owner of the slot."""
    lease = ledger.take(OWNER, LEASE_MS)
    assert lease is not None
    statuses = ledger.steer(lease, [row], now_us)
    assert statuses is not None
    return statuses[0]


def flip(
    ledger: Decides, terms: Params, *, to_requests: bool, cap: float | None = None, now_us: int = START_US
) -> None:
    row = Steer(BUCKET, terms, requests_for=MUCH if to_requests else 0.0, cap=cap)
    assert steer(ledger, row, now_us) is SteerStatus.DONE


# R10: work or requests


@pytest.mark.parametrize(
    ("balance", "tokens", "back"),
    [
        (-200, -20, -200),  # two seconds of debt stay two seconds
        (-1, -0.1, -1),
        (0, 0, 0),
        (8, 0.8, 8),
        (50, 1, 10),  # half a second's work is more than the burst holds: the rest is gone, and stays so
    ],
)
def test_r10_a_flip_there_and_back_loses_no_debt_and_grants_no_windfall(
    ledger: Decides, balance: float, tokens: float, back: float
) -> None:
    acquire(ledger, ask(AUTO, minimum=-1e9, charge=50 - balance))
    assert look(ledger, AUTO) == balance
    flip(ledger, AUTO, to_requests=True, cap=10)
    assert look(ledger, AUTO) == pytest.approx(tokens)
    assert (record_of(ledger).rate, record_of(ledger).capacity) == (10, 1)
    flip(ledger, AUTO, to_requests=False)
    assert look(ledger, AUTO) == pytest.approx(back)
    assert (record_of(ledger).rate, record_of(ledger).capacity) == (100, 50)


def test_r10_debt_is_repaid_at_the_same_time_whichever_way_it_is_counted(ledger: Decides) -> None:
    """A hundred units at 100 a second are a second; then comes the token that a request needs, at ten a second."""
    acquire(ledger, ask(AUTO, charge=150))
    flip(ledger, AUTO, to_requests=True, cap=10)
    assert not acquire(ledger, ask(AUTO), START_US + 1099 * MS_US).granted
    assert acquire(ledger, ask(AUTO), START_US + 1101 * MS_US).granted
    flip(ledger, AUTO, to_requests=False, now_us=START_US + 1101 * MS_US)
    assert look(ledger, AUTO, START_US + 1101 * MS_US) == 0


def test_r10_from_requests_to_work_grants_no_more_time_than_there_was(ledger: Decides) -> None:
    """Three tokens at thirty a second are a tenth of a second: ten units, not a full bucket of fifty."""
    acquire(ledger, ask(AUTO, charge=0))
    flip(ledger, AUTO, to_requests=True)
    assert look(ledger, AUTO) == 3
    flip(ledger, AUTO, to_requests=False)
    assert look(ledger, AUTO) == pytest.approx(10)


def test_r10_time_before_a_flip_counts_as_it_was_then(ledger: Decides) -> None:
    acquire(ledger, ask(AUTO, charge=50))
    flip(ledger, AUTO, to_requests=True, cap=20, now_us=START_US + 50 * MS_US)
    assert look(ledger, AUTO, START_US + 50 * MS_US) == pytest.approx(1), "five units of work, a twentieth of a second"


def test_r10_a_fresh_auto_bucket_counts_work_and_only_the_controller_changes_that(ledger: Decides) -> None:
    answer = acquire(ledger, ask(AUTO, charge=7))
    assert (answer.buckets[0].charge, answer.buckets[0].in_requests) == (7, False)
    flip(ledger, AUTO, to_requests=True)
    answer = acquire(ledger, ask(AUTO, charge=7))
    assert (answer.buckets[0].charge, answer.buckets[0].in_requests) == (1, True)
    assert acquire(ledger, ask(AUTO, charge=7), START_US + HOUR_US).buckets[0].in_requests, "it stays so"


@pytest.mark.parametrize("beyond", [0, 1, 30])
def test_r10_an_auto_bucket_counts_requests_for_as_much_work_as_it_was_lent_that(
    ledger: Decides, beyond: float
) -> None:
    """Without a controller it counts work again, and owes what was done beyond."""
    acquire(ledger, ask(AUTO, charge=50))
    steer(ledger, Steer(BUCKET, AUTO, requests_for=40.0, cap=10.0))
    later_us = START_US + 100 * MS_US
    settle(ledger, done(reserve(ledger, ask(AUTO), later_us, name="r1"), 39), later_us)
    assert look(ledger, AUTO, later_us) == 0
    assert record_of(ledger).counts_requests
    later_us += 100 * MS_US
    settle(ledger, done(reserve(ledger, ask(AUTO), later_us, name="r2"), 1 + beyond), later_us)
    assert look(ledger, AUTO, later_us) == -beyond
    assert not acquire(ledger, ask(AUTO), later_us).buckets[0].in_requests
    assert (record_of(ledger).rate, record_of(ledger).capacity) == (100, 50)


def test_r10_what_is_owed_beyond_the_loan_is_bounded_like_any_debt(ledger: Decides) -> None:
    terms = replace(AUTO, debt_max=25.0)
    acquire(ledger, ask(terms, charge=50))
    steer(ledger, Steer(BUCKET, terms, requests_for=40.0, cap=10.0))
    later_us = START_US + 100 * MS_US
    settle(ledger, done(reserve(ledger, ask(terms), later_us), 4000), later_us)
    assert look(ledger, terms, later_us) == -25


def test_r10_a_loan_is_lent_anew_before_it_ends(ledger: Decides) -> None:
    acquire(ledger, ask(AUTO))
    for number in range(5):
        steer(ledger, Steer(BUCKET, AUTO, requests_for=40.0, cap=10.0))
        now_us = START_US + number * S_US
        settle(ledger, done(reserve(ledger, ask(AUTO), now_us, name=f"r{number}"), 30), now_us)
    acquire(ledger, ask(AUTO), now_us)
    assert (record_of(ledger).counts_requests, record_of(ledger).requests_until) == (True, 4 * 30 + 40)


@pytest.mark.parametrize("requests_for", [math.nan, -1.0, math.inf, 1e300])
def test_f_p8_a_loan_that_makes_no_sense_changes_nothing(ledger: Decides, requests_for: float) -> None:
    acquire(ledger, ask(AUTO))
    before = record_of(ledger)
    steer(ledger, Steer(BUCKET, AUTO, requests_for=requests_for, cap=10.0))
    assert record_of(ledger) == before


def test_r10_only_auto_buckets_flip(ledger: Decides) -> None:
    terms = work_terms()
    acquire(ledger, ask(terms))
    before = record_of(ledger)
    flip(ledger, terms, to_requests=True, cap=10)
    assert record_of(ledger) == before


def test_r10_a_policy_changed_by_hand_converts_the_same_way(ledger: Decides) -> None:
    work = work_terms(rate=100, capacity=50)
    requests = replace(work, flags=Flags.COUNTS_REQUESTS, cap=10.0, burst=3.0)
    acquire(ledger, ask(work, charge=250))
    assert look(ledger, work) == -200
    assert look(ledger, requests) == pytest.approx(-20)


def test_r10_a_policy_that_becomes_auto_counts_work_until_the_controller_says_otherwise(ledger: Decides) -> None:
    """Two tokens at ten a second are a fifth of a second: twenty units, less the charge."""
    terms = replace(work_terms(rate=100), flags=Flags.COUNTS_REQUESTS, cap=10.0, burst=3.0)
    acquire(ledger, ask(terms))
    answer = acquire(ledger, ask(replace(terms, flags=Flags.AUTO)))
    assert (answer.buckets[0].in_requests, answer.buckets[0].balance) == (False, 20 - answer.buckets[0].charge)


def test_r10_a_histogram_outlives_a_flip(ledger: Decides) -> None:
    terms = replace(AUTO, flags=Flags.AUTO | Flags.HISTOGRAM)
    settle(ledger, done(reserve(ledger, ask(terms)), 2).but(latency_ms=30.0))
    flip(ledger, terms, to_requests=True)
    acquire(ledger, ask(terms))
    assert sum(record_of(ledger).histogram) == 1


# Settles across a flip


def test_r10_work_charged_before_a_flip_is_settled_by_its_worth_in_time(ledger: Decides) -> None:
    """Twenty units more than charged are a fifth of a second: two requests at ten a second."""
    reservation = reserve(ledger, ask(AUTO, charge=50))
    flip(ledger, AUTO, to_requests=True, cap=10)
    answer = settle(ledger, done(reservation, 70)).buckets[0]
    assert (answer.adjusted, answer.in_requests) == (20, True)
    assert answer.balance == pytest.approx(-2)


def test_r10_work_charged_before_a_flip_is_refunded_up_to_the_burst(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(AUTO, charge=56))
    flip(ledger, AUTO, to_requests=True, cap=10)
    answer = settle(ledger, done(reservation, 51)).buckets[0]
    assert answer.adjusted == -5
    assert answer.balance == pytest.approx(-0.1)
    reservation = reserve(ledger, ask(AUTO), START_US + HOUR_US, name="r2")
    assert settle(ledger, done(reservation, 0), START_US + HOUR_US).buckets[0].balance <= 1


def test_r10_progress_across_a_flip_debits_by_its_worth_in_time(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(AUTO, charge=50))
    flip(ledger, AUTO, to_requests=True, cap=10)
    assert settle(ledger, progress(reservation, 60)).buckets[0].balance == pytest.approx(-1)
    assert settle(ledger, progress(reservation, 80)).buckets[0].balance == pytest.approx(-3)
    last = settle(ledger, done(reservation, 80))
    assert last.status is SettleStatus.SETTLED
    assert last.buckets[0].balance == pytest.approx(-3)


def test_r10_a_request_token_was_the_price_whatever_the_work(ledger: Decides) -> None:
    acquire(ledger, ask(AUTO, charge=0))
    flip(ledger, AUTO, to_requests=True)
    reservation = reserve(ledger, ask(AUTO))
    flip(ledger, AUTO, to_requests=False)
    before = look(ledger, AUTO)
    settled = settle(ledger, done(reservation, 500)).buckets[0]
    assert (settled.balance, settled.adjusted) == (before, 0)


def test_r10_debt_is_bounded_by_as_much_time_after_a_flip(ledger: Decides) -> None:
    """A debt of at most 200 units is two seconds: twenty requests at ten a second. The rest is counted as work."""
    terms = replace(AUTO, debt_max=200.0)
    reservation = reserve(ledger, ask(terms, charge=50))
    flip(ledger, terms, to_requests=True, cap=10)
    answer = settle(ledger, done(reservation, 1050)).buckets[0]
    assert answer.balance == pytest.approx(-20)
    assert answer.uncollected == record_of(ledger).uncollected == pytest.approx(800)


# Minimums in parts of a limit


def test_w11_minimums_keep_their_proportion_in_a_part_of_the_limit(ledger: Decides) -> None:
    """A class that must leave half of 100 leaves half of what a quarter holds."""
    terms = divided(work_terms(rate=1e-9, capacity=100), 4)
    sheddable, critical = ask(terms, minimum=50, charge=1), ask(terms, minimum=1, charge=1)
    assert sum(acquire(ledger, sheddable).granted for _ in range(100)) == 13, "25 … 13, and 12.5 are half"
    assert sum(acquire(ledger, critical).granted for _ in range(100)) == 12, "12 … 1: one token is not a quarter of one"


def test_w11_minimums_keep_their_proportion_in_an_auto_bucket_that_counts_requests(ledger: Decides) -> None:
    terms = replace(AUTO, committed=1e-9, capacity=100.0, cap=1e-9, burst=10.0, burst_s=0.0)
    acquire(ledger, ask(terms, charge=0))
    flip(ledger, terms, to_requests=True)
    assert look(ledger, terms) == 10
    assert sum(acquire(ledger, ask(terms, minimum=50)).granted for _ in range(100)) == 6, "10 … 5"
    assert sum(acquire(ledger, ask(terms, minimum=1)).granted for _ in range(100)) == 4, "4 … 1"
    assert sum(acquire(ledger, ask(terms, minimum=-20)).granted for _ in range(100)) == 3, "0 … -2"


def test_w11_a_class_is_not_starved_when_its_burst_shrinks_with_the_cap(ledger: Decides) -> None:
    """Half of a burst of ten; steered to a burst of one, a class that leaves half asks for the one there is."""
    terms = replace(request_terms(cap=100, burst=0), burst_s=0.1)
    acquire(ledger, ask(terms))
    steer(ledger, Steer(BUCKET, terms, cap=2.0))
    later_us = START_US + HOUR_US
    assert acquire(ledger, ask(terms, minimum=5), later_us).granted
    assert not acquire(ledger, ask(terms, minimum=5), later_us).granted


def test_w11_one_token_stays_one_token_when_the_burst_grows_with_the_cap(ledger: Decides) -> None:
    """A burst of one; steered to a burst of ten, whoever asked for one asks for no more."""
    terms = replace(request_terms(cap=10, burst=0), burst_s=0.1)
    acquire(ledger, ask(terms))
    steer(ledger, Steer(BUCKET, terms, cap=100.0))
    later_us = START_US + HOUR_US
    assert sum(acquire(ledger, ask(terms, minimum=1), later_us).granted for _ in range(100)) == 10


def test_a_part_too_small_for_one_token_admits_when_it_is_full(ledger: Decides) -> None:
    terms = divided(work_terms(rate=1, capacity=1), 10)
    assert acquire(ledger, ask(terms, minimum=1, charge=1)).granted
    assert not acquire(ledger, ask(terms, minimum=1, charge=1), START_US + 9 * S_US).granted
    assert acquire(ledger, ask(terms, minimum=1, charge=1), START_US + 11 * S_US).granted


# Shares (B5, R9)

WIDE = divided(work_terms(rate=100, capacity=100, debt_max=1000, stop_debt=500), 4)


def test_r9_a_partition_holds_an_equal_part_until_it_is_given_another(ledger: Decides) -> None:
    acquire(ledger, ask(WIDE, charge=0))
    record = record_of(ledger)
    assert (record.rate, record.committed, record.capacity) == (25, 25, 25)
    assert (record.debt_max, record.stop_debt) == (250, 125)


def test_b5_a_share_holds_for_its_time_and_then_falls_back(ledger: Decides) -> None:
    acquire(ledger, ask(WIDE, charge=0))
    steer(ledger, Steer(BUCKET, WIDE, share=0.7, share_for_us=5 * S_US))
    record = record_of(ledger)
    assert (record.rate, record.capacity, record.balance) == (70, 70, 25), "more room, and no windfall"
    assert look(ledger, WIDE, START_US + S_US) == 70
    assert look(ledger, WIDE, START_US + 5 * S_US - 1) == 70
    assert look(ledger, WIDE, START_US + 5 * S_US) == 25
    acquire(ledger, ask(WIDE, charge=0), START_US + 5 * S_US)
    assert (record_of(ledger).rate, record_of(ledger).capacity) == (25, 25)


def test_b5_a_lowered_share_takes_the_surplus_at_once(ledger: Decides) -> None:
    acquire(ledger, ask(WIDE, charge=0))
    steer(ledger, Steer(BUCKET, WIDE, share=0.1, share_for_us=5 * S_US))
    assert record_of(ledger).balance == 10
    assert (record_of(ledger).debt_max, record_of(ledger).stop_debt) == (100, 50)


def test_b5_with_another_number_of_partitions_old_shares_mean_nothing(ledger: Decides) -> None:
    acquire(ledger, ask(WIDE, charge=0))
    steer(ledger, Steer(BUCKET, WIDE, share=0.7, share_for_us=SHARE_FOR_MAX_US))
    five = replace(WIDE, partitions=5)
    assert acquire(ledger, ask(five, charge=0)).buckets[0].capacity == 20
    assert acquire(ledger, ask(WIDE, charge=0)).buckets[0].capacity == 70, "of four, as it was given"
    whole = work_terms(rate=100, capacity=100)
    assert acquire(ledger, ask(whole, charge=0)).buckets[0].capacity == 100
    assert acquire(ledger, ask(WIDE, charge=0)).buckets[0].capacity == 25, "forgotten once it was not divided"


def test_b5_a_cap_keeps_its_proportion_to_the_share(ledger: Decides) -> None:
    terms = divided(replace(work_terms(rate=100), flags=Flags.COUNTS_REQUESTS, cap=40.0, burst=20.0), 4)
    acquire(ledger, ask(terms))
    assert (record_of(ledger).rate, record_of(ledger).capacity) == (10, 5)
    steer(ledger, Steer(BUCKET, terms, cap=6.0))
    steer(ledger, Steer(BUCKET, terms, share=0.5, share_for_us=S_US))
    assert (record_of(ledger).rate, record_of(ledger).capacity) == (12, 10)
    steer(ledger, Steer(BUCKET, terms, share=0.25, cap=3.0, share_for_us=S_US))
    assert (record_of(ledger).rate, record_of(ledger).capacity) == (3, 5), "a cap is for the share it comes with"


def test_b5_a_bucket_is_made_to_hold_a_share_and_for_nothing_else(ledger: Decides) -> None:
    assert steer(ledger, Steer(BUCKET, WIDE, charge=3.0, state=b"x")) is SteerStatus.ABSENT
    assert steer(ledger, Steer(BUCKET, work_terms(), share=0.1, share_for_us=S_US)) is SteerStatus.ABSENT
    assert steer(ledger, Steer(BUCKET, WIDE, share=0.1, share_for_us=S_US)) is SteerStatus.DONE
    assert (record_of(ledger).balance, record_of(ledger).capacity) == (10, 10)


def test_b5_a_quotas_division_stays_as_it_is(ledger: Decides) -> None:
    """What one part of it has used cannot be taken back: no other part may have it too."""
    terms = divided(quota_terms(100, (START_US - 1, START_US + HOUR_US)), 4)
    assert acquire(ledger, ask(terms, charge=20)).buckets[0].balance == 5
    assert steer(ledger, Steer(BUCKET, terms, share=0.9, share_for_us=S_US, charge=3.0)) is SteerStatus.DONE
    assert (record_of(ledger).capacity, record_of(ledger).charge) == (25, 3)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, 1e-9, math.nan, math.inf])
def test_f_p8_a_share_that_makes_no_sense_is_not_taken(ledger: Decides, share: float) -> None:
    acquire(ledger, ask(WIDE, charge=0))
    before = record_of(ledger)
    assert steer(ledger, Steer(BUCKET, WIDE, share=share, share_for_us=S_US)) is SteerStatus.DONE
    assert record_of(ledger) == before


@pytest.mark.parametrize("share_for_us", [0, -1, SHARE_FOR_MAX_US + 1])
def test_f_p8_a_share_for_a_time_that_makes_no_sense_is_not_taken(ledger: Decides, share_for_us: int) -> None:
    acquire(ledger, ask(WIDE, charge=0))
    before = record_of(ledger)
    assert steer(ledger, Steer(BUCKET, WIDE, share=0.5, share_for_us=share_for_us)) is SteerStatus.DONE
    assert record_of(ledger) == before


def test_b5_a_record_lives_at_least_as_long_as_its_share(server: Server) -> None:
    """Forgotten earlier it would hold an equal part, while others hold what it gave up."""
    store = ScriptStore(server)
    steer(store, Steer(BUCKET, WIDE, share=0.1, share_for_us=SHARE_FOR_MAX_US, state=b"x"), 0)
    hour_ms, key = SHARE_FOR_MAX_US // 1000, keys.bucket(store.prefix, BUCKET)
    assert store.client.pttl(key) >= hour_ms
    assert store.client.pttl(keys.state(store.prefix, BUCKET)) >= hour_ms
    acquire(store, ask(WIDE), 0)
    assert store.client.pttl(key) >= hour_ms - 60_000, "an acquire keeps it as long"
    settle(store, done(reserve(store, ask(WIDE), 0), 2).but(acquired_us=1), 0)
    assert store.client.pttl(key) >= hour_ms - 60_000, "and so does a settle"


# F-P8: values that make no sense


@pytest.mark.parametrize("cap", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300])
def test_f_p8_a_cap_that_makes_no_sense_leaves_the_old_one(ledger: Decides, cap: float) -> None:
    terms = request_terms(cap=100, burst=3)
    acquire(ledger, ask(terms))
    before = record_of(ledger)
    assert steer(ledger, Steer(BUCKET, terms, cap=cap)) is SteerStatus.DONE
    assert record_of(ledger) == before


@pytest.mark.parametrize("cap", [math.nan, math.inf, 0.0, -1.0])
def test_f_p8_a_flip_with_a_senseless_cap_starts_from_the_policys(ledger: Decides, cap: float) -> None:
    acquire(ledger, ask(AUTO))
    flip(ledger, AUTO, to_requests=True, cap=cap)
    assert record_of(ledger).rate == 30


@pytest.mark.parametrize("charge", [math.nan, math.inf, 0.0, -1.0, 1e300])
def test_f_p8_a_charge_that_makes_no_sense_leaves_the_old_one(ledger: Decides, charge: float) -> None:
    acquire(ledger, ask(work_terms()))
    steer(ledger, Steer(BUCKET, work_terms(), charge=12.5))
    steer(ledger, Steer(BUCKET, work_terms(), charge=charge))
    assert record_of(ledger).charge == 12.5


def test_w4_a_learned_charge_is_taken_from_the_next_request_on(ledger: Decides) -> None:
    request = ask(work_terms(), charge=2, how=LEARNED)
    assert acquire(ledger, request).buckets[0].charge == 2
    steer(ledger, Steer(BUCKET, work_terms(), charge=12.5))
    assert acquire(ledger, request).buckets[0].charge == 12.5


def test_r_a_cap_moves_the_burst_that_follows_it_and_clamps_what_is_too_much(ledger: Decides) -> None:
    terms = replace(request_terms(cap=100, burst=0), burst_s=0.1)
    acquire(ledger, ask(terms))
    steer(ledger, Steer(BUCKET, terms, cap=20.0))
    record = record_of(ledger)
    assert (record.rate, record.capacity, record.balance) == (20, 2, 2)


def test_r_the_time_before_a_cap_counts_at_the_old_one(ledger: Decides) -> None:
    terms = request_terms(cap=10, burst=100)
    acquire(ledger, ask(terms, minimum=0), START_US)
    rewrite(ledger, replace(record_of(ledger), balance=0.0))
    steer(ledger, Steer(BUCKET, terms, cap=1.0), START_US + S_US)
    assert look(ledger, terms, START_US + 2 * S_US) == 11


# F-P7: one owner at a time


def test_f_p7_a_slot_has_one_owner_and_each_taking_a_higher_fence(ledger: Decides) -> None:
    first = ledger.take(b"first", LEASE_MS)
    assert first == Lease(b"first", 1, LEASE_MS)
    assert ledger.take(b"second", LEASE_MS) is None
    assert ledger.take(b"first", LEASE_MS) == first, "keeping it is no new taking"
    ledger.release(b"second")
    assert ledger.take(b"second", LEASE_MS) is None, "nobody gives back what is another's"
    ledger.release(b"first")
    assert ledger.take(b"second", LEASE_MS) == Lease(b"second", 2, LEASE_MS)
    ledger.release(b"second")
    assert ledger.take(b"second", LEASE_MS) == Lease(b"second", 3, LEASE_MS)


def test_f_p7_a_stale_owner_changes_nothing(ledger: Decides) -> None:
    """Paused, overtaken, and awake again: its decisions are of another time."""
    acquire(ledger, ask(WIDE))
    paused = ledger.take(b"first", LEASE_MS)
    assert paused is not None
    ledger.release(b"first")  # what the end of its time does
    successor = ledger.take(b"second", LEASE_MS)
    assert successor is not None
    assert successor.fence > paused.fence
    before = record_of(ledger)
    rows = [Steer(BUCKET, WIDE, share=0.9, share_for_us=S_US, charge=9.0, state=b"stale")]
    assert ledger.steer(paused, rows, START_US) is None
    assert ledger.sample(paused, 10) is None
    assert record_of(ledger) == before
    assert ledger.sample(successor, 10) == [BUCKET], "nothing was taken from its successor"
    assert ledger.steer(successor, rows, START_US) == [SteerStatus.DONE]


def test_f_p7_an_owner_that_lost_its_lease_and_took_it_again_is_another_one(ledger: Decides) -> None:
    acquire(ledger, ask(WIDE))
    before = ledger.take(b"first", LEASE_MS)
    ledger.release(b"first")
    after = ledger.take(b"first", LEASE_MS)
    assert before is not None
    assert after is not None
    assert ledger.steer(before, [Steer(BUCKET, WIDE, charge=9.0)], START_US) is None
    assert ledger.steer(after, [Steer(BUCKET, WIDE, charge=9.0)], START_US) == [SteerStatus.DONE]


def test_f_p7_nobody_steers_without_a_lease(ledger: Decides) -> None:
    acquire(ledger, ask(WIDE))
    assert ledger.steer(Lease(b"", 0), [Steer(BUCKET, WIDE, charge=9.0)], START_US) is None
    assert ledger.steer(Lease(b"first", 1), [Steer(BUCKET, WIDE, charge=9.0)], START_US) is None


def test_what_was_sampled_and_changes_again_is_listed_again(ledger: Decides) -> None:
    lease = ledger.take(OWNER, LEASE_MS)
    assert lease is not None
    for name in ("a", "b", "c"):
        acquire(ledger, ask(WIDE, bucket=name))
        acquire(ledger, ask(WIDE, bucket=name))
    assert ledger.sample(lease, 2) == ["a", "b"]
    acquire(ledger, ask(WIDE, bucket="a"))
    assert ledger.sample(lease, 10) == ["c", "a"]
    assert ledger.sample(lease, 10) == []
    acquire(ledger, ask(WIDE, bucket="b"))
    assert ledger.sample(lease, 10) == ["b"]


# F-S11: what is not ours


@pytest.mark.parametrize("damage", [b"", b"junk", b"\1" + bytes(153), b"\1\x08" + b"\xff" * 176])
def test_f_s11_a_damaged_record_is_left_untouched_and_the_others_steered(server: Server, damage: bytes) -> None:
    store = ScriptStore(server)
    acquire(store, ask(WIDE))
    store.client.set(keys.bucket(store.prefix, "damaged"), damage)
    lease = store.take(OWNER, LEASE_MS)
    assert lease is not None
    rows = [
        Steer(name, WIDE, share=0.5, share_for_us=S_US, charge=9.0, state=b"x") for name in ("damaged", BUCKET, "none")
    ]
    rows[2] = rows[2]._replace(share=None)
    assert store.steer(lease, rows, START_US) == [SteerStatus.CORRUPT, SteerStatus.DONE, SteerStatus.ABSENT]
    assert (store.record("damaged"), store.state("damaged"), store.state("none")) == (damage, None, None)
    assert (record_of(store).charge, store.state(BUCKET)) == (9.0, b"x")


@pytest.mark.parametrize("share", [math.nan, 0.0, 1.5, -0.5])
def test_f_s11_a_share_that_is_none_makes_a_record_that_is_none(server: Server, share: float) -> None:
    store = ScriptStore(server)
    steer(store, Steer(BUCKET, WIDE, share=0.5, share_for_us=S_US))
    rewrite(store, replace(record_of(store), share=share))
    damaged = store.record(BUCKET)
    assert steer(store, Steer(BUCKET, WIDE, charge=9.0)) is SteerStatus.CORRUPT
    assert not acquire(store, ask(WIDE)).granted
    assert store.record(BUCKET) == damaged


def test_f_s11_a_key_of_another_type_is_left_untouched(server: Server) -> None:
    store = ScriptStore(server)
    store.client.rpush(keys.bucket(store.prefix, BUCKET), "x")
    assert steer(store, Steer(BUCKET, WIDE, share=0.5, share_for_us=S_US)) is SteerStatus.CORRUPT
    store.client.rpush(keys.lease(Slot("other").prefix), "x")
    assert ScriptStore(server, Slot("other")).take(OWNER, LEASE_MS) is None


def test_f_s11_a_damaged_list_of_touched_buckets_stands_in_nobodys_way(server: Server) -> None:
    store = ScriptStore(server)
    lease = store.take(OWNER, LEASE_MS)
    assert lease is not None
    store.client.set(keys.touched(store.prefix), "junk")
    assert store.sample(lease, 10) == []
    store.client.delete(keys.touched(store.prefix))
    store.client.rpush(keys.touched(store.prefix), "junk", keys.bucket(store.prefix, "ours"), b"\xff")
    assert store.sample(lease, 10) == ["ours"]


# Through the class that the controller uses


@pytest.fixture
async def link(server: Server) -> AsyncIterator[Link]:
    link = await open_link(server.url)
    yield link
    await link.aclose()


async def test_a_controller_owns_samples_reads_and_steers(server: Server, link: Link) -> None:
    store, steering = ScriptStore(server), Steering(link)
    acquire(store, ask(WIDE, bucket="a"), 0)
    acquire(store, ask(WIDE, bucket="b"), 0)
    store.client.set(keys.bucket(store.prefix, "damaged"), "junk")
    lease = await steering.take(SLOT)
    assert lease is not None
    sampled = await steering.sample(SLOT, lease, 100)
    assert sampled.names == ["a", "b"]
    records = await steering.records(SLOT, [*sampled.names, "damaged", "absent"])
    assert list(records) == ["a", "b"]
    assert (records["a"].admitted, records["a"].updated_us <= sampled.now_us) == (1, True)
    rows = [Steer("a", WIDE, charge=9.0, state=b"x"), Steer("absent", WIDE, charge=9.0), Steer("damaged", WIDE)]
    statuses = await steering.steer(SLOT, lease, rows)
    assert statuses == [SteerStatus.DONE, SteerStatus.ABSENT, SteerStatus.CORRUPT]
    assert (await steering.records(SLOT, ["a"]))["a"].charge == 9.0
    assert await steering.states(SLOT, ["a", "b"]) == {"a": b"x"}


async def test_f_s1_scripts_that_the_server_forgot_are_sent_again(server: Server, link: Link) -> None:
    steering = Steering(link)
    for _ in range(2):
        server.client().script_flush()
        lease = await steering.take(SLOT)
        assert lease is not None
        server.client().script_flush()
        assert (await steering.sample(SLOT, lease, 10)).names == []
        server.client().script_flush()
        assert await steering.steer(SLOT, lease, [Steer("a", WIDE)]) == [SteerStatus.ABSENT]
        await steering.release(SLOT)


async def test_f_p7_a_lease_ends_by_itself_and_the_former_owner_is_told(server: Server, link: Link) -> None:
    paused, successor = Steering(link, lease_ms=50), Steering(link)
    old = await paused.take(SLOT)
    assert old is not None
    new = await eventually_async(lambda: successor.take(SLOT), what="a takeover within the lease")
    assert new is not None
    assert new.fence > old.fence
    with pytest.raises(LeaseLost):
        await paused.sample(SLOT, old, 10)
    with pytest.raises(LeaseLost):
        await paused.steer(SLOT, old, [Steer("a", WIDE, share=0.5, share_for_us=S_US)])
    await paused.release(SLOT)
    assert ScriptStore(server).record("a") is None
    assert await paused.take(SLOT) is None
    assert (await successor.sample(SLOT, new, 10)).names == []


async def test_sampling_keeps_the_lease(server: Server, link: Link) -> None:
    short, long = Steering(link, owner=OWNER, lease_ms=200), Steering(link, owner=OWNER, lease_ms=LEASE_MS)
    lease = await short.take(SLOT)
    assert lease is not None
    await long.sample(SLOT, lease, 10)
    assert server.client().pttl(keys.lease(SLOT.prefix)) > LEASE_MS / 2


async def test_many_buckets_go_in_several_calls(server: Server, link: Link) -> None:
    steering, names = Steering(link), [f"b{number}" for number in range(READ_MAX + 1)]
    lease = await steering.take(SLOT)
    assert lease is not None
    rows = [Steer(name, WIDE, share=0.5, share_for_us=SHARE_FOR_MAX_US, state=name.encode()) for name in names]
    assert await steering.steer(SLOT, lease, rows) == [SteerStatus.DONE] * len(rows)
    assert list(await steering.records(SLOT, names)) == names
    assert await steering.states(SLOT, names) == {name: name.encode() for name in names}


async def test_slots_are_steered_on_a_cluster(cluster: Cluster) -> None:
    link = await open_link(cluster.url)
    steering = Steering(link)
    for slot in (Slot("default", 0), Slot("default", 1), Slot("orders", 0), Slot("carts", 7)):  # on different nodes
        acquire(ScriptStore(cluster, slot), ask(WIDE), 0)
        lease = await steering.take(slot)
        assert lease is not None
        assert lease.fence == 1, "each slot counts for itself"
        assert (await steering.sample(slot, lease, 10)).names == [BUCKET]
        assert await steering.steer(slot, lease, [Steer(BUCKET, WIDE, charge=9.0)]) == [SteerStatus.DONE]
        assert (await steering.records(slot, [BUCKET]))[BUCKET].charge == 9.0
    await link.aclose()


def test_a_shadow_is_steered_like_any_other(ledger: Decides) -> None:
    terms = divided(work_terms(rate=100, capacity=100, flags=Flags.SHADOW), 4)
    steer(ledger, Steer(BUCKET, terms, share=0.01, share_for_us=S_US))
    assert acquire(ledger, ask(terms, minimum=30)).granted
    assert acquire(ledger, ask(terms, minimum=30)).buckets[0].verdict is Verdict.BLOCKED


def test_r10_a_loan_too_small_to_show_leaves_the_bucket_as_it_is(ledger: Decides) -> None:
    """It would count requests and work again at once, and each change of unit may cost the balance its last bit."""
    terms = replace(work_terms(rate=1 / 3, capacity=1.0), flags=Flags.AUTO, cap=100.0, burst=1.0)
    reservation = reserve(ledger, ask(terms, minimum=0.0, charge=2 / 3))
    settle(ledger, done(reservation, 2 / 3))
    before = record_of(ledger).balance
    lease = ledger.take(b"owner", LEASE_MS)
    assert lease is not None
    for _ in range(5):
        ledger.steer(lease, [Steer(BUCKET, terms, requests_for=1e-109)], START_US)
    assert (record_of(ledger).balance, record_of(ledger).counts_requests) == (before, False)
