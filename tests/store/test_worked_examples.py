"""The examples of docs/requirements.md with their own figures: the model and the scripts are each judged by them."""

from dataclasses import replace
from zoneinfo import ZoneInfo

import pytest

from limiter.model.bucket.admission import class_minimum
from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.operations import LEARNED, Acquire, AcquireStatus, SettleStatus, Verdict, Want
from limiter.model.policy.fields.quantity import units
from limiter.model.policy.period import Period, window_us
from tests.support.operations import (
    BUCKET,
    DAY_US,
    HOUR_US,
    MINUTE_US,
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
from tests.support.stores import Decides

UTC = ZoneInfo("UTC")


def admitted(ledger: Decides, operation: Acquire, now_us: int = START_US) -> int:
    """The number of equal requests that are admitted in one instant."""
    count = 0
    while acquire(ledger, operation, now_us).granted:
        count += 1
    return count


# G1, P3, W1–W4: what a bucket holds, and who is let in


def test_w1_a_bucket_refills_at_its_rate_while_below_capacity(ledger: Decides) -> None:
    terms = work_terms(rate=100, capacity=50)
    acquire(ledger, ask(terms, charge=50))
    assert [look(ledger, terms, START_US + ms * MS_US) for ms in (0, 10, 250, 500, 9000)] == [0, 1, 25, 50, 50]


@pytest.mark.parametrize(
    ("written", "capacity", "forgiven_ms"), [(50, 50, 500), ("50", 50, 500), ("500ms", 50, 500), ("5%", 5, 50)]
)
def test_w2_capacity_as_units_time_or_share(
    ledger: Decides, written: float | str, capacity: float, forgiven_ms: int
) -> None:
    """At 100 units/s, 50 units = 500 ms of lateness forgiven; 5 % = 5 tokens = 50 ms."""
    terms = work_terms(rate=100, capacity=units(written, rate=100))
    assert look(ledger, terms) == capacity
    assert admitted(ledger, ask(terms, charge=1)) == capacity, "all the forgiven work may come at once"
    assert look(ledger, terms, START_US + (forgiven_ms - 1) * MS_US) < capacity
    assert look(ledger, terms, START_US + forgiven_ms * MS_US) == capacity


@pytest.mark.parametrize(("minimum", "count"), [(25, 26), (1, 50), (0, 51), (-10, 61)])
def test_w3_a_request_needs_the_minimum_and_no_more(ledger: Decides, minimum: float, count: int) -> None:
    """Fifty tokens, one each: the last one in is the one that finds exactly the minimum."""
    assert admitted(ledger, ask(work_terms(capacity=50), minimum=minimum, charge=1)) == count


def test_w3_the_minimum_may_change_while_running(ledger: Decides) -> None:
    terms = work_terms(capacity=50)
    assert acquire(ledger, ask(terms, minimum=1, charge=30)).granted
    assert not acquire(ledger, ask(terms, minimum=25, charge=1)).granted
    assert acquire(ledger, ask(terms, minimum=20, charge=1)).granted


def test_w3_a_charge_above_the_balance_is_admitted_and_becomes_debt(ledger: Decides) -> None:
    terms = work_terms(capacity=50)
    assert acquire(ledger, ask(terms, minimum=1, charge=70)).granted
    assert look(ledger, terms) == -20


def test_w4_the_charge_is_fixed_estimated_or_learned(ledger: Decides) -> None:
    terms = work_terms(capacity=50)
    fixed, estimate = ask(terms, charge=2), ask(terms, charge=7)
    learned = ask(terms, charge=2, how=LEARNED)
    assert acquire(ledger, fixed).buckets[0].charge == 2
    assert acquire(ledger, estimate).buckets[0].charge == 7
    assert acquire(ledger, learned).buckets[0].charge == 2, "nothing is learned yet"
    record = record_of(ledger)
    record.charge = 12.5
    rewrite(ledger, record)
    answer = acquire(ledger, learned)
    assert (answer.buckets[0].charge, answer.buckets[0].balance) == (12.5, 50 - 2 - 7 - 2 - 12.5)
    assert acquire(ledger, fixed).buckets[0].charge == 2, "who brings a number is charged that number"


# W5–W7: what settling does


def test_w5_a_refund_never_lifts_a_bucket_above_its_capacity(ledger: Decides) -> None:
    terms = work_terms(rate=100, capacity=50)
    reservation = reserve(ledger, ask(terms, charge=50))
    answer = settle(ledger, done(reservation, 0), START_US + 300 * MS_US)
    assert answer.buckets[0].balance == 50, "30 had come back by themselves already"


def test_w5_a_settle_mints_no_tokens_because_refill_comes_first(ledger: Decides) -> None:
    """45 left, 100 ms pass: the bucket is full at 50, then 20 more are debited. The other order would leave 35."""
    terms = work_terms(rate=100, capacity=50)
    reservation = reserve(ledger, ask(terms, charge=5))
    assert settle(ledger, done(reservation, 25), START_US + 100 * MS_US).buckets[0].balance == 30
    assert look(ledger, terms, START_US + 100 * MS_US) == 30


def test_w5_nothing_is_admitted_until_refill_repays_the_debt(ledger: Decides) -> None:
    terms = work_terms(rate=100, capacity=50)
    settle(ledger, done(reserve(ledger, ask(terms, charge=2)), 150))
    assert look(ledger, terms) == -100
    assert not acquire(ledger, ask(terms), START_US + 1009 * MS_US).granted
    assert acquire(ledger, ask(terms), START_US + 1010 * MS_US).granted


def test_w5_one_absurd_settle_cannot_lock_a_bucket_for_days(ledger: Decides) -> None:
    terms = work_terms(rate=100, capacity=50, debt_max=200)
    answer = settle(ledger, done(reserve(ledger, ask(terms, charge=2)), 1e12))
    assert answer.buckets[0].balance == -200
    assert answer.buckets[0].uncollected == record_of(ledger).uncollected == 1e12 - 250
    assert acquire(ledger, ask(terms), START_US + 2010 * MS_US).granted


@pytest.mark.parametrize(
    ("threshold", "work", "adjusted"),
    [(2, 12, 0), (2, 8, 0), (2, 13, 3), (2, 7, -3), (-0.1, 11, 0), (-0.1, 9, 0), (-0.1, 12, 2), (-0.1, 8, -2)],
)
def test_w6_a_settle_within_the_threshold_changes_nothing(
    ledger: Decides, threshold: float, work: float, adjusted: float
) -> None:
    """The charge is 10; the threshold 2 units, or 10 %."""
    terms = work_terms(capacity=50, settle_threshold=threshold)
    answer = settle(ledger, done(reserve(ledger, ask(terms, charge=10)), work))
    assert answer.status is SettleStatus.SETTLED
    assert answer.buckets[0].adjusted == adjusted
    assert look(ledger, terms) == 40 - adjusted
    assert record_of(ledger).work_settled == work, "the statistics know the truth all the same"


def test_w7_a_long_read_debits_as_it_goes(ledger: Decides) -> None:
    """1 MB at 1 KB a token, 16 reads of 64 KB in 16 ms: others are refused after 1 ms, not 16."""
    terms = work_terms(rate=100, capacity=50)
    other = ask(terms, charge=1).but(dry_run=True)
    reservation = reserve(ledger, ask(terms, charge=1))
    assert acquire(ledger, other).granted
    for read in range(1, 17):
        now_us = START_US + read * MS_US
        answer = settle(ledger, progress(reservation, 64 * read), now_us)
        assert answer.buckets[0].adjusted == 64 * read - 1
        assert not acquire(ledger, other, now_us).granted
    assert record_of(ledger).work_settled == 1024
    assert look(ledger, terms, START_US + 16 * MS_US) == pytest.approx(50 + 1.6 - 1024)
    last = settle(ledger, done(reservation, 1024), START_US + 16 * MS_US)
    assert last.buckets[0].adjusted == 1023, "the final word adds nothing to what was debited on the way"


def test_w7_settled_only_at_the_end_others_are_let_in_for_16_ms(ledger: Decides) -> None:
    """The same read without progress calls shows their use."""
    terms = work_terms(rate=100, capacity=50)
    other = ask(terms, charge=1).but(dry_run=True)
    reservation = reserve(ledger, ask(terms, charge=1))
    assert all(acquire(ledger, other, START_US + ms * MS_US).granted for ms in range(16))
    settle(ledger, done(reservation, 1024), START_US + 16 * MS_US)
    assert not acquire(ledger, other, START_US + 16 * MS_US).granted


def test_w7_progress_is_answered_stop_when_debt_passes_the_bound(ledger: Decides) -> None:
    """64 a millisecond against 50 in the bucket: the ninth read passes 500 of debt."""
    terms = work_terms(rate=100, capacity=50, stop_debt=500)
    reservation = reserve(ledger, ask(terms, charge=1))
    stops = [settle(ledger, progress(reservation, 64 * n), START_US + n * MS_US).stop for n in range(1, 17)]
    assert stops == [False] * 8 + [True] * 8


# W9, and F-P4, F-P5: policies that change under live buckets


def test_w9_f_p4_capacity_lowered_clamps_the_surplus(ledger: Decides) -> None:
    acquire(ledger, ask(work_terms(capacity=50), charge=10))
    assert look(ledger, work_terms(capacity=20)) == 20
    answer = acquire(ledger, ask(work_terms(capacity=20), charge=0))
    assert (answer.buckets[0].balance, answer.buckets[0].capacity) == (20, 20)


def test_w9_f_p4_debt_survives_a_change(ledger: Decides) -> None:
    acquire(ledger, ask(work_terms(capacity=50), charge=80))
    assert look(ledger, work_terms(capacity=20, rate=10)) == -30
    assert look(ledger, work_terms(capacity=500, rate=1000)) == -30


def test_w9_f_p4_rate_lowered_is_felt_from_the_next_request_on(ledger: Decides) -> None:
    """The second before the change was still at the old rate, the one after it at the new."""
    acquire(ledger, ask(work_terms(rate=20, capacity=50), charge=50))
    slower = work_terms(rate=5, capacity=50)
    assert acquire(ledger, ask(slower, charge=0), START_US + S_US).buckets[0].balance == 20
    assert look(ledger, slower, START_US + 2 * S_US) == 25


def test_w9_f_p5_capacity_raised_grants_no_windfall_even_after_long_idling(ledger: Decides) -> None:
    acquire(ledger, ask(work_terms(rate=100, capacity=50), charge=50))
    larger, later_us = work_terms(rate=100, capacity=5000), START_US + HOUR_US
    assert acquire(ledger, ask(larger, charge=0), later_us).buckets[0].balance == 50
    assert look(ledger, larger, later_us + 10 * S_US) == 1050, "from there on it refills to the new capacity"


def test_w9_f_p5_rate_raised_credits_nothing_for_the_past(ledger: Decides) -> None:
    acquire(ledger, ask(work_terms(rate=1, capacity=50), charge=50))
    faster = work_terms(rate=1000, capacity=50)
    assert acquire(ledger, ask(faster, charge=0), START_US + 10 * S_US).buckets[0].balance == 10
    assert look(ledger, faster, START_US + 10 * S_US + 20 * MS_US) == 30


def test_w9_minimum_and_charge_change_at_the_next_request(ledger: Decides) -> None:
    terms = work_terms(capacity=50)
    assert acquire(ledger, ask(terms, minimum=1, charge=2)).buckets[0].balance == 48
    assert acquire(ledger, ask(terms, minimum=1, charge=5)).buckets[0].balance == 43
    assert not acquire(ledger, ask(terms, minimum=44, charge=5)).granted


# W10: rate 100/s, capacity 50, charge 2, minimum 1


def test_w10_used_more_than_the_charge(ledger: Decides) -> None:
    """Request that used N > 2: N − 2 more are debited."""
    terms = work_terms(rate=100, capacity=50)
    answer = settle(ledger, done(reserve(ledger, ask(terms, minimum=1, charge=2)), 9))
    assert (answer.buckets[0].adjusted, answer.buckets[0].balance) == (7, 41)


def test_w10_used_one(ledger: Decides) -> None:
    """Used 1: one is returned."""
    terms = work_terms(rate=100, capacity=50)
    answer = settle(ledger, done(reserve(ledger, ask(terms, minimum=1, charge=2)), 1))
    assert (answer.buckets[0].adjusted, answer.buckets[0].balance) == (-1, 49)


@pytest.mark.parametrize("work", [50, 51, 500])
def test_w10_at_zero_or_below_nothing_is_admitted(ledger: Decides, work: float) -> None:
    terms = work_terms(rate=100, capacity=50)
    settle(ledger, done(reserve(ledger, ask(terms, minimum=1, charge=2)), work))
    assert look(ledger, terms) == 50 - work
    request = ask(terms, minimum=1, charge=2)
    repaid_us = START_US + int(work - 50 + 1) * 10 * MS_US
    assert not acquire(ledger, request).granted
    assert not acquire(ledger, request.but(dry_run=True), repaid_us - 1).granted
    assert acquire(ledger, request, repaid_us).granted


def test_w10_twenty_five_at_once_and_fifty_a_second(ledger: Decides) -> None:
    """Capacity 50 at 2 each is 25 at once; the rate then carries 50 requests per second."""
    terms = work_terms(rate=100, capacity=50)
    request = ask(terms, minimum=1, charge=2)
    assert admitted(ledger, request) == 25
    let_in = sum(acquire(ledger, request, START_US + ms * MS_US).granted for ms in range(10, 1001, 10))
    assert let_in == 50


# W11: classes


def test_w11_the_least_critical_are_refused_first(ledger: Decides) -> None:
    """reserve: {sheddable: 50%, sheddable_plus: 25%, critical: 0, critical_plus: -20%} of a capacity of 100."""
    terms = work_terms(rate=1e-9, capacity=100)
    reserves = {"sheddable": 50.0, "sheddable_plus": 25.0, "critical": 0.0, "critical_plus": -20.0}
    requests = {name: ask(terms, minimum=class_minimum(1, units), charge=1) for name, units in reserves.items()}
    counts = {name: admitted(ledger, request) for name, request in requests.items()}
    assert counts == {"sheddable": 51, "sheddable_plus": 25, "critical": 24, "critical_plus": 21}
    assert look(ledger, terms) == pytest.approx(-21)


# P5, P11: several policies on one request


def test_p5_a_refusal_consumes_nothing_anywhere(ledger: Decides) -> None:
    reads, writes = work_terms(capacity=50), work_terms(capacity=5)
    acquire(ledger, ask(writes, bucket="writes:a", charge=5))
    both = Acquire((Want("reads:a", reads, 1, 2), Want("writes:a", writes, 1, 2)))
    answer = acquire(ledger, both)
    assert answer.status is AcquireStatus.REFUSED
    assert [found.verdict for found in answer.buckets] == [Verdict.PASSED, Verdict.BLOCKED]
    assert (look(ledger, reads), look(ledger, writes, bucket="writes:a")) == (50, 0)
    assert (record_of(ledger).requests, record_of(ledger).admitted, record_of(ledger).refused) == (1, 0, 0)
    assert record_of(ledger, "writes:a").refused == 1, "the one that refused says so"


def test_p5_a_refusal_inside_a_batch_leaves_the_others_their_tokens(ledger: Decides) -> None:
    terms = work_terms(capacity=10)
    small, large = ask(terms, minimum=3, charge=3), ask(terms, minimum=8, charge=8)
    answers = ledger.acquire([small, large, small, small, small], START_US)
    assert [answer.granted for answer in answers] == [True, False, True, True, False]
    assert look(ledger, terms) == 1


def test_p11_a_shadow_policy_counts_and_refuses_nothing(ledger: Decides) -> None:
    real, shadow = work_terms(capacity=50), work_terms(capacity=4, flags=Flags.SHADOW)
    both = Acquire((Want("reads:a", real, 1, 2), Want("trial:a", shadow, 1, 2)))
    answers = [acquire(ledger, both) for _ in range(5)]
    assert all(answer.granted for answer in answers)
    assert [answer.buckets[1].verdict for answer in answers] == [Verdict.DEBITED] * 2 + [Verdict.BLOCKED] * 3
    record = record_of(ledger, "trial:a")
    assert (record.requests, record.admitted, record.refused, record.balance) == (5, 2, 3, 0)
    assert look(ledger, real) == 40


def test_p11_a_shadow_spends_nothing_on_what_another_policy_refused(ledger: Decides) -> None:
    real, shadow = work_terms(capacity=1), work_terms(capacity=50, flags=Flags.SHADOW)
    both = Acquire((Want("reads:a", real, 2, 2), Want("trial:a", shadow, 1, 2)))
    assert not acquire(ledger, both).granted
    assert look(ledger, shadow, bucket="trial:a") == 50


def test_a_dry_run_says_what_would_happen_and_changes_nothing(ledger: Decides) -> None:
    """B1: the same answer as the real one, before it."""
    terms = work_terms(capacity=50)
    acquire(ledger, ask(terms))
    dry = acquire(ledger, ask(terms).but(dry_run=True))
    assert (dry.granted, dry.buckets[0].verdict, dry.buckets[0].balance) == (True, Verdict.PASSED, 48)
    assert (record_of(ledger).requests, record_of(ledger).balance) == (1, 48)


# R: request tokens


def test_r_cap_100_is_a_token_every_10_ms_and_burst_3_three_at_once(ledger: Decides) -> None:
    request = ask(request_terms(cap=100, burst=3), charge=7)
    assert admitted(ledger, request) == 3
    assert not acquire(ledger, request, START_US + 10 * MS_US - 1).granted
    assert acquire(ledger, request, START_US + 10 * MS_US).granted
    assert not acquire(ledger, request, START_US + 10 * MS_US).granted
    assert admitted(ledger, request, START_US + HOUR_US) == 3


def test_r_work_does_not_matter_to_a_bucket_of_requests(ledger: Decides) -> None:
    terms = request_terms(cap=100, burst=3)
    reservation = reserve(ledger, ask(terms, charge=7))
    answer = settle(ledger, done(reservation, 500))
    assert (answer.buckets[0].adjusted, answer.buckets[0].balance) == (0, 2)
    assert (record_of(ledger).work_charged, record_of(ledger).work_settled) == (7, 500), "the controller wants both"


def test_r7_a_burst_given_as_time_follows_the_cap(ledger: Decides) -> None:
    terms = replace(request_terms(cap=100, burst=0), burst_s=0.1)
    assert admitted(ledger, ask(terms)) == 10
    record = record_of(ledger)
    record.rate = 20.0  # what the controller will do
    rewrite(ledger, record)
    assert admitted(ledger, ask(terms), START_US + HOUR_US) == 2


# P4: quotas over calendar windows


def test_p4_a_quota_covers_the_charge_and_refuses_beyond_its_limit(ledger: Decides) -> None:
    terms = quota_terms(100, window_us(START_US, Period.DAY, UTC))
    assert acquire(ledger, ask(terms, charge=60)).granted
    assert not acquire(ledger, ask(terms, charge=60)).granted, "absolute: 40 do not cover 60"
    assert acquire(ledger, ask(terms, charge=40)).granted
    end_us = terms.window_end_us
    assert not acquire(ledger, ask(terms, charge=1), end_us - 1).granted, "nothing comes back within the window"
    tomorrow = quota_terms(100, window_us(end_us, Period.DAY, UTC))
    assert acquire(ledger, ask(tomorrow, charge=1), end_us).buckets[0].balance == 99


def test_p4_a_window_that_does_not_hold_the_time_is_answered_and_not_used(ledger: Decides) -> None:
    terms = quota_terms(100, window_us(START_US, Period.HOUR, UTC))
    answer = acquire(ledger, ask(terms), terms.window_end_us)
    assert (answer.status, answer.now_us) == (AcquireStatus.WINDOW, terms.window_end_us)
    assert acquire(ledger, ask(terms), terms.window_start_us - 1).status is AcquireStatus.WINDOW
    assert acquire(ledger, ask(terms), terms.window_start_us).granted


def test_p4_a_settle_into_a_later_window_refunds_nothing(ledger: Decides) -> None:
    today = quota_terms(100, window_us(START_US, Period.DAY, UTC))
    midnight_us = today.window_end_us
    tomorrow = quota_terms(100, window_us(midnight_us, Period.DAY, UTC))
    reservation = reserve(ledger, ask(today, charge=60), midnight_us - S_US)
    assert acquire(ledger, ask(tomorrow, charge=50), midnight_us).buckets[0].balance == 50
    answer = settle(ledger, done(reservation, 0), midnight_us + S_US)
    assert (answer.status, answer.buckets[0].balance) == (SettleStatus.SETTLED, 50)


def test_p4_a_settle_within_the_window_refunds(ledger: Decides) -> None:
    terms = quota_terms(100, window_us(START_US, Period.DAY, UTC))
    assert settle(ledger, done(reserve(ledger, ask(terms, charge=60)), 10)).buckets[0].balance == 90


def test_p4_a_quota_raised_or_lowered_keeps_its_used_part(ledger: Decides) -> None:
    window = window_us(START_US, Period.DAY, UTC)
    acquire(ledger, ask(quota_terms(100, window), charge=60))
    assert look(ledger, quota_terms(150, window)) == 90
    assert look(ledger, quota_terms(50, window)) == -10


def test_p4_a_quota_lasts_its_window_and_not_a_day_of_24_hours(ledger: Decides) -> None:
    """The day of 25 hours when Berlin's clocks go back: its last hour still belongs to it."""
    before_us = 1_792_879_200_000_000  # 2026-10-25 00:00 in Berlin
    terms = quota_terms(100, window_us(before_us, Period.DAY, ZoneInfo("Europe/Berlin")))
    assert acquire(ledger, ask(terms, charge=100), before_us).granted
    assert acquire(ledger, ask(terms, charge=1), before_us + DAY_US + 59 * MINUTE_US).status is AcquireStatus.REFUSED
    assert acquire(ledger, ask(terms, charge=1), before_us + DAY_US + HOUR_US).status is AcquireStatus.WINDOW


def test_w5_balances_stay_within_capacity_and_debt_whatever_is_settled(ledger: Decides) -> None:
    terms = work_terms(capacity=50, debt_max=30)
    for number, work in enumerate([0, 1e300, 0, 5, 1e300, 2**53]):
        reservation = reserve(ledger, ask(terms, minimum=-1e9, charge=0 if number else 40), name=f"r{number}")
        balance = settle(ledger, done(reservation, work)).buckets[0].balance
        assert -30 <= balance <= 50


def test_w5_a_minimum_below_the_debt_bound_is_still_a_limit(ledger: Decides) -> None:
    """A charge must stay within the bound: otherwise a bucket at its bound would admit everything for nothing."""
    terms = work_terms(capacity=10, debt_max=5)
    granted = [acquire(ledger, ask(terms, minimum=-1000, charge=1)).granted for _ in range(50)]
    assert sum(granted) == 15


def test_w5_a_charge_beyond_capacity_and_debt_waits_for_a_full_bucket(ledger: Decides) -> None:
    terms = work_terms(capacity=10, debt_max=5)
    assert acquire(ledger, ask(terms, minimum=1, charge=500)).granted
    assert not acquire(ledger, ask(terms, minimum=1, charge=500)).granted


def test_r10_a_settle_in_another_unit_than_its_charge_moves_nothing(ledger: Decides) -> None:
    """Charged as work; meanwhile the policy counts requests."""
    reservation = reserve(ledger, ask(work_terms(capacity=1000), charge=100))
    as_requests = replace(request_terms(cap=1e-9, burst=10), debt_max=10)
    for _ in range(9):
        acquire(ledger, ask(as_requests))
    before = acquire(ledger, ask(as_requests)).buckets[0].balance
    settled = settle(ledger, done(reservation, 100)).buckets[0]
    assert (settled.balance, settled.adjusted) == (before, 0.0)


# W16: weights in a bucket that counts requests


def weighed(terms: Params, weight: float, *, charge: float = 2.0) -> Acquire:
    return Acquire((Want(BUCKET, terms, 1.0, charge, 0, weight),))


def test_w16_a_request_takes_as_many_tokens_as_it_weighs(ledger: Decides) -> None:
    """One write is worth three reads."""
    terms = request_terms(cap=1e-9, burst=10)
    read, write = weighed(terms, 1), weighed(terms, 3)
    assert acquire(ledger, write).buckets[0].charge == 3
    assert acquire(ledger, read).buckets[0].charge == 1
    assert look(ledger, terms) == pytest.approx(6)
    assert admitted(ledger, write) == 2
    assert not acquire(ledger, write).granted, "no tokens left"


def test_w16_a_request_counts_as_much_as_it_weighs(ledger: Decides) -> None:
    """The controller's work per request is then work per token: 5 and 5 units, whatever the weights."""
    terms = request_terms(cap=1e-9, burst=10)
    for number, weight in enumerate((1.0, 3.0)):
        reservation = reserve(ledger, weighed(terms, weight), name=f"r{number}")
        settled = settle(ledger, done(reservation, 5.0))
        assert settled.buckets[0].adjusted == 0, "the token was the price"
    acquire(ledger, weighed(terms, 30.0))
    record = record_of(ledger)
    assert (record.requests, record.admitted, record.refused, record.settles) == (34, 4, 30, 4)
    assert (record.work_settled / record.settles, record.work_squared / record.settles) == (5, 25)


def test_w16_a_request_that_weighs_nothing_takes_no_token(ledger: Decides) -> None:
    terms = request_terms(cap=1e-9, burst=10)
    reservation = reserve(ledger, weighed(terms, 0.0))
    settle(ledger, done(reservation, 5.0))
    assert (look(ledger, terms), record_of(ledger).settles, record_of(ledger).work_settled) == (10, 0, 0)


def test_w16_weights_of_requests_mean_nothing_to_work_and_quotas(ledger: Decides) -> None:
    quota = replace(quota_terms(10, (START_US - S_US, START_US + S_US)), flags=Flags.QUOTA | Flags.COUNTS_REQUESTS)
    for bucket, terms, left in (("reads:b", work_terms(capacity=50), 48), ("hits:a", quota, 9)):
        answer = acquire(ledger, Acquire((Want(bucket, terms, 1.0, 2.0, 0, 3.0),)))
        assert (answer.buckets[0].balance, record_of(ledger, bucket).requests) == (left, 1)
