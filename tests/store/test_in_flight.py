"""W18, S9: how many reservations of a bucket are open, in the model and in the scripts."""

import random
import struct
from dataclasses import replace

import pytest

from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.in_flight import InFlightTerms, Slots
from limiter.model.bucket.operations import Acquire, AcquireAnswer, Idempotency, Lot, Settle, Verdict
from limiter.model.control.stewardship import Steer
from limiter.model.overload.shedding import CLASS_NUMBERS, OverloadTerms, Shedding, ShedOrder, State, turns_away
from limiter.model.policy.limit import divided
from limiter.store import keys, layout
from tests.support.operations import (
    BUCKET,
    MINUTE_US,
    S_US,
    START_US,
    acquire,
    ask,
    done,
    progress,
    record_of,
    reserved,
    settle,
    work_terms,
)
from tests.support.servers import Server
from tests.support.stores import LEASE_MS, Decides, ScriptStore

PLUS, CRITICAL, SHEDDABLE_PLUS, SHEDDABLE = CLASS_NUMBERS.values()


def terms(limit: float = 2, *, length_us: float = 0.0, in_work: bool = False, flags: Flags = Flags.NONE) -> Params:
    """Plenty of work, and few places."""
    plenty = work_terms(rate=1000, capacity=1000, flags=flags | Flags.IN_FLIGHT)
    return replace(plenty, in_flight=InFlightTerms(limit, length_us, in_work))


def request(given: Params, *, ttl_us: int = MINUTE_US, bucket: str = BUCKET) -> Acquire:
    return ask(given, bucket=bucket).but(ttl_us=ttl_us)


def open_one(
    ledger: Decides, given: Params, name: str, *, at_us: int = 0, ttl_us: int = MINUTE_US, bucket: str = BUCKET
) -> Settle:
    operation = request(given, ttl_us=ttl_us, bucket=bucket)
    answer = acquire(ledger, operation, START_US + at_us)
    return reserved(operation, answer, name=name, ttl_us=ttl_us)


def verdict(ledger: Decides, given: Params, *, at_us: int = 0, ttl_us: int = MINUTE_US) -> Verdict:
    return acquire(ledger, request(given, ttl_us=ttl_us), START_US + at_us).buckets[0].verdict


def slots_of(ledger: Decides, bucket: str = BUCKET) -> Slots:
    slots = record_of(ledger, bucket).slots
    assert slots is not None
    return slots


def test_w18_the_next_one_is_refused_while_all_places_are_taken_and_spends_nothing(ledger: Decides) -> None:
    given = terms(2)
    open_one(ledger, given, "a")
    open_one(ledger, given, "b")
    before = record_of(ledger)
    answer = acquire(ledger, request(given))
    assert (answer.granted, answer.buckets[0].verdict, answer.buckets[0].charge) == (False, Verdict.FULL, 2)
    after = record_of(ledger)
    assert (after.balance, after.admitted, after.refused) == (before.balance, before.admitted, 0)
    assert (slots_of(ledger).count, slots_of(ledger).refused) == (2, 1)


def test_w18_a_settle_frees_its_place_at_once_and_a_repeat_of_it_frees_no_other(ledger: Decides) -> None:
    given = terms(2)
    first = open_one(ledger, given, "a")
    open_one(ledger, given, "b")
    settle(ledger, done(first, 3.0))
    settle(ledger, done(first, 3.0))
    settle(ledger, done(first, 4.0))
    assert slots_of(ledger).count == 1
    assert verdict(ledger, given) is Verdict.DEBITED
    assert verdict(ledger, given) is Verdict.FULL


@pytest.mark.parametrize("ttl_us", [1_000, S_US, MINUTE_US, 86_400 * S_US])
def test_w18_one_that_nobody_settles_frees_its_place_after_its_time_to_live_and_within_twice_that(
    ledger: Decides, ttl_us: int
) -> None:
    given = terms(1)
    open_one(ledger, given, "lost", ttl_us=ttl_us)
    for at_us in (1, ttl_us // 2, ttl_us - 1):
        assert verdict(ledger, given, at_us=at_us, ttl_us=ttl_us) is Verdict.FULL
    assert verdict(ledger, given, at_us=2 * ttl_us, ttl_us=ttl_us) is Verdict.DEBITED


def test_w18_whenever_one_begins_it_stays_for_its_time_to_live_and_is_gone_after_twice_that(ledger: Decides) -> None:
    given, ttl_us = terms(1000), 10 * S_US
    for second in range(40):
        open_one(ledger, given, f"r{second}", at_us=second * S_US, ttl_us=ttl_us)
        present = slots_of(ledger).count
        assert min(second + 1, 10) <= present <= 20, second


def test_w18_a_long_one_makes_the_slots_longer_and_is_not_lost_in_a_short_one(ledger: Decides) -> None:
    given = terms(100)
    for second in range(4):
        open_one(ledger, given, f"short{second}", at_us=second * S_US, ttl_us=S_US)
    open_one(ledger, given, "stream", at_us=4 * S_US, ttl_us=600 * S_US)
    open_one(ledger, given, "short", at_us=5 * S_US, ttl_us=S_US)
    assert verdict(ledger, given, at_us=600 * S_US) is Verdict.DEBITED
    assert slots_of(ledger).count >= 2, "the stream lives until 604 s"
    verdict(ledger, given, at_us=1300 * S_US)
    assert slots_of(ledger).count <= 2, "and is gone by 1204 s"


def test_w18_progress_keeps_its_place_for_as_long_as_it_reports(ledger: Decides) -> None:
    given, ttl_us = terms(1), 10 * S_US
    stream = open_one(ledger, given, "stream", ttl_us=ttl_us)
    for at_us in range(8 * S_US, 200 * S_US, 8 * S_US):
        settle(ledger, progress(stream, at_us / S_US), START_US + at_us)
        assert slots_of(ledger).count == 1
        assert verdict(ledger, given, at_us=at_us + 1, ttl_us=ttl_us) is Verdict.FULL
    settle(ledger, done(stream, 500.0), START_US + 199 * S_US)
    assert slots_of(ledger).count == 0


def test_w14_w18_a_repeat_of_progress_moves_its_place_once(ledger: Decides) -> None:
    given = terms(5)
    stream = open_one(ledger, given, "stream", ttl_us=10 * S_US)
    for _ in range(3):
        settle(ledger, progress(stream, 5.0), START_US + 9 * S_US)
        settle(ledger, progress(stream, 5.0), START_US + 12 * S_US)
    assert slots_of(ledger).count == 1
    settle(ledger, done(stream, 9.0), START_US + 13 * S_US)
    assert slots_of(ledger).count == 0


def test_f_r7_a_repeated_acquire_takes_one_place(ledger: Decides) -> None:
    once = request(terms(2)).but(idempotency=Idempotency("k", b"f" * 16, b"memo"))
    for _ in range(3):
        acquire(ledger, once)
    assert slots_of(ledger).count == 1


def test_a_dry_run_says_that_it_is_full_and_takes_no_place(ledger: Decides) -> None:
    given = terms(1)
    looks = request(given).but(dry_run=True)
    assert acquire(ledger, looks).granted
    open_one(ledger, given, "a")
    assert acquire(ledger, looks).buckets[0].verdict is Verdict.FULL
    assert (slots_of(ledger).count, slots_of(ledger).refused) == (1, 0)


def test_p11_a_shadow_counts_as_far_as_it_would_admit_and_refuses_nothing(ledger: Decides) -> None:
    given = terms(2, flags=Flags.SHADOW)
    answers = [acquire(ledger, request(given)) for _ in range(4)]
    assert all(answer.granted for answer in answers)
    assert [answer.buckets[0].verdict for answer in answers] == [Verdict.DEBITED] * 2 + [Verdict.FULL] * 2
    assert (slots_of(ledger).count, slots_of(ledger).refused) == (2, 2)


def test_p5_a_request_that_another_bucket_refuses_takes_no_place(ledger: Decides) -> None:
    given = terms(1)
    both = Acquire((*request(given).wants, *request(given, bucket="other:a").wants), ttl_us=MINUTE_US)
    open_one(ledger, given, "taken", bucket="other:a")
    assert not acquire(ledger, both).granted
    assert slots_of(ledger).count == 0
    assert verdict(ledger, given) is Verdict.DEBITED


def test_r9_a_part_of_a_divided_limit_has_its_share_of_the_places_and_one_at_least(ledger: Decides) -> None:
    quarter = divided(terms(20), 4)
    assert [verdict(ledger, quarter) for _ in range(6)] == [Verdict.DEBITED] * 5 + [Verdict.FULL]
    splinter = divided(terms(2), 64)
    first, second = (acquire(ledger, request(splinter, bucket="wide:b")) for _ in range(2))
    assert (first.granted, second.buckets[0].verdict, second.buckets[0].charge) == (True, Verdict.FULL, 1)


def test_s11_places_in_work_are_as_large_as_what_was_charged(ledger: Decides) -> None:
    given = terms(5, in_work=True)
    two, other = open_one(ledger, given, "a"), open_one(ledger, given, "b")
    assert slots_of(ledger).count == 4
    open_one(ledger, given, "c")
    assert verdict(ledger, given) is Verdict.FULL, "6 units are in flight"
    settle(ledger, done(two, 50.0))
    settle(ledger, done(other, 0.0))
    assert slots_of(ledger).count == 2


def test_a_policy_that_gets_a_limit_begins_with_nothing_in_flight_and_old_settles_free_nothing(
    ledger: Decides,
) -> None:
    plain, given = work_terms(rate=1000, capacity=1000), terms(2)
    old = open_one(ledger, plain, "old")
    open_one(ledger, given, "new", at_us=S_US)
    assert slots_of(ledger).count == 1
    settle(ledger, done(old, 2.0), START_US + 2 * S_US)
    assert slots_of(ledger).count == 1
    verdict(ledger, plain, at_us=3 * S_US)
    assert record_of(ledger).slots is None


def test_w18_what_was_granted_without_the_store_frees_nothing(ledger: Decides) -> None:
    given = terms(2)
    mine = open_one(ledger, given, "mine")
    settle(ledger, done(mine, 2.0).but(reservation="another", is_uncounted=True))
    settle(ledger, progress(mine, 2.0).but(reservation="a third", is_uncounted=True), START_US + S_US)
    assert slots_of(ledger).count == 1


@pytest.mark.parametrize("back_us", [1, 900_000, 2 * S_US, 3600 * S_US])
def test_f_t1_f_t2_a_clock_that_goes_back_makes_no_count_negative_and_freezes_none(
    ledger: Decides, back_us: int
) -> None:
    given, ttl_us = terms(3), 10 * S_US
    before = [open_one(ledger, given, f"b{number}", at_us=8 * S_US, ttl_us=ttl_us) for number in range(2)]
    after = open_one(ledger, given, "after", at_us=8 * S_US - back_us, ttl_us=ttl_us)
    assert verdict(ledger, given, at_us=8 * S_US - back_us, ttl_us=ttl_us) is Verdict.FULL
    for reservation in (*before, after):
        settle(ledger, done(reservation, 2.0), START_US + 9 * S_US - back_us)
    assert slots_of(ledger).count == 0
    open_one(ledger, given, "lost", at_us=9 * S_US - back_us, ttl_us=ttl_us)
    verdict(ledger, given, at_us=60 * S_US - back_us, ttl_us=ttl_us)
    assert slots_of(ledger).count == 1, "the one that was lost has left"


def test_f_t1_a_clock_that_jumps_ahead_empties_the_slots_and_later_settles_free_nothing(ledger: Decides) -> None:
    given, day_us = terms(2), 86_400 * S_US
    reservation = open_one(ledger, given, "a", ttl_us=10 * S_US)
    open_one(ledger, given, "b", at_us=day_us, ttl_us=10 * S_US)
    settle(ledger, done(reservation, 2.0).but(late_us=2 * day_us), START_US + day_us)
    assert slots_of(ledger).count == 1


def test_a_bucket_is_kept_while_something_may_be_in_flight(ledger: Decides) -> None:
    open_one(ledger, terms(2), "stream", ttl_us=86_400 * S_US)
    assert record_of(ledger).kept_until_s * 1e6 >= START_US + 2 * 86_400 * S_US


def test_g6_attempts_are_counted_whatever_is_decided_and_no_dry_run(ledger: Decides) -> None:
    given = work_terms(rate=1, capacity=4)
    for attempt in (1, 2, 2, 3, 3, 3):
        acquire(ledger, ask(given).but(attempt=attempt))
    acquire(ledger, ask(given).but(attempt=2, dry_run=True))
    record = record_of(ledger)
    assert (record.second_attempts, record.further_attempts, record.requests, record.admitted) == (2, 3, 6, 2)


# Overload control: limits by class, throttles that are lent, who yields first.

SHEDS = replace(
    terms(0, length_us=10 * S_US, flags=Flags.OVERLOAD), overload=OverloadTerms((0.0, 100.0, 100.0, 200.0), 0.0)
)


def order(ledger: Decides, given: ShedOrder, *, with_terms: Params = SHEDS, at_us: int = 0) -> None:
    """Set overload control of a bucket that is there, as the owner of its slot."""
    touch(ledger, with_terms, at_us)
    lease = ledger.take(b"controller", LEASE_MS)
    assert lease is not None
    ledger.steer(lease, [Steer(BUCKET, with_terms, overload=given)], START_US + at_us)


def touch(ledger: Decides, with_terms: Params, at_us: int) -> None:
    settle(ledger, done(open_one(ledger, with_terms, f"first{at_us}", at_us=at_us), 2.0), START_US + at_us)


def ask_in(
    ledger: Decides, number: int, *, at_us: int = 0, draw: float = 0.5, expected_ms: float = float("nan")
) -> AcquireAnswer:
    operation = request(SHEDS).but(lot=Lot(number, draw, expected_ms))
    return acquire(ledger, operation, START_US + at_us)


def shedding_of(ledger: Decides) -> Shedding:
    known = record_of(ledger).shedding
    assert known is not None
    return known


def test_s9_each_class_is_refused_from_its_own_limit_on(ledger: Decides) -> None:
    order(ledger, ShedOrder(limits=(0.0, 3.0, 2.0, 1.0)))
    assert [ask_in(ledger, SHEDDABLE).granted for _ in range(2)] == [True, False]
    assert [ask_in(ledger, SHEDDABLE_PLUS).granted for _ in range(2)] == [True, False]
    assert [ask_in(ledger, CRITICAL).granted for _ in range(2)] == [True, False]
    assert all(ask_in(ledger, PLUS).granted for _ in range(5)), "which is not limited"
    known = shedding_of(ledger)
    assert (known.asked, known.refused) == ([5, 2, 2, 2], [0, 1, 1, 1])


def test_s8_a_bucket_begins_limited_and_a_part_of_it_by_its_share(ledger: Decides) -> None:
    first = replace(SHEDS, overload=OverloadTerms(limit_initial=100.0))
    acquire(ledger, request(first).but(lot=Lot(CRITICAL, 0.5)))
    assert shedding_of(ledger).limits == [100.0] * 4
    part = divided(first, 200)
    acquire(ledger, request(part, bucket="part:a").but(lot=Lot(CRITICAL, 0.5)))
    known = record_of(ledger, "part:a").shedding
    assert known is not None
    assert known.limits == [1.0] * 4


def test_q11_without_a_controller_throttles_end_by_themselves_and_limits_stay(ledger: Decides) -> None:
    order(ledger, ShedOrder(quality=0.5, state=State.OVERLOADED, refused_shares=(1.0,) * 4, limits=(9.0,) * 4))
    refused = ask_in(ledger, CRITICAL, at_us=10 * S_US - 1)
    assert refused.buckets[0].verdict is Verdict.TURNED_AWAY
    granted = ask_in(ledger, CRITICAL, at_us=10 * S_US)
    pressure = granted.buckets[0].pressure
    assert granted.granted
    assert pressure is not None
    assert (pressure.state, pressure.quality, pressure.limit) == (State.CALM, 1.0, 9.0)


def test_q11_a_clock_that_goes_back_lends_nothing_for_longer(ledger: Decides) -> None:
    order(ledger, ShedOrder(refused_shares=(1.0,) * 4), at_us=3600 * S_US)
    assert ask_in(ledger, CRITICAL).granted


HASTY_MS, PATIENT_MS = 299.0, 300.0
"""Below and at the response time of THROTTLE."""
THROTTLE = ShedOrder(response_ms=300.0, refused_shares=(0.0, 0.2, 0.4, 0.8))


def test_q13_who_expects_less_than_answers_take_is_refused_in_place_of_others(ledger: Decides) -> None:
    order(ledger, THROTTLE)
    assert ask_in(ledger, CRITICAL, draw=0.3, expected_ms=HASTY_MS).granted, "nobody else was refused yet"
    assert not ask_in(ledger, CRITICAL, draw=0.1, expected_ms=PATIENT_MS).granted
    assert not ask_in(ledger, CRITICAL, draw=0.3, expected_ms=HASTY_MS).granted, "in place of the next"
    assert ask_in(ledger, CRITICAL, draw=0.1, expected_ms=PATIENT_MS).granted, "which is spared"
    assert not ask_in(ledger, CRITICAL, draw=0.1).granted, "nor does who expects nothing yield, but none is spared now"
    ahead = [ask_in(ledger, CRITICAL, draw=0.3, expected_ms=HASTY_MS).granted for _ in range(30)]
    assert ahead == [False] * 10 + [True] * 20
    assert ask_in(ledger, SHEDDABLE_PLUS, draw=0.5, expected_ms=HASTY_MS).granted, "classes yield to their own"


@pytest.mark.parametrize("expected_ms", [HASTY_MS, PATIENT_MS])
def test_q13_where_all_expect_the_same_nothing_changes(ledger: Decides, expected_ms: float) -> None:
    order(ledger, THROTTLE)
    for number, share in enumerate(THROTTLE.refused_shares):
        for draw in (share / 2, share, (share + 1) / 2):
            granted = [ask_in(ledger, number, draw=draw, expected_ms=expected_ms).granted for _ in range(5)]
            assert granted == [draw >= share] * 5


def test_q4_q13_rank_0_is_never_refused_whatever_it_expects(ledger: Decides) -> None:
    order(ledger, THROTTLE)
    for draw in (0.0, 0.1, 0.9):
        assert all(ask_in(ledger, PLUS, draw=draw, expected_ms=ms).granted for ms in (PATIENT_MS, HASTY_MS, 0.0))


@pytest.mark.parametrize(("hasty", "share"), [(0.1, 0.2), (0.5, 0.2), (0.5, 0.8), (0.02, 0.4)])
def test_q13_the_share_is_right_and_the_hasty_bear_most_of_it(hasty: float, share: float) -> None:
    """The model alone; the scripts agree with it."""
    chance, count = random.Random(7), 20_000
    known = Shedding(lent_until_us=1.0, response_ms=300.0, refused_shares=[0.0, share, 0.0, 0.0])
    refused = {True: 0, False: 0}
    for _ in range(count):
        is_hasty, draw = chance.random() < hasty, chance.random()
        turn = turns_away(
            known, CRITICAL, draw, in_flight=0, expected_ms=HASTY_MS if is_hasty else PATIENT_MS, over_committed=False
        )
        known.ahead[CRITICAL] = turn.ahead
        refused[is_hasty] += turn.is_refused
    assert sum(refused.values()) / count == pytest.approx(share, abs=0.01)
    least = max(0.0, (share - hasty) / (1 - hasty))
    assert refused[False] / count / (1 - hasty) == pytest.approx(least, abs=0.02)


def test_s13_the_draw_of_a_session_is_not_exchanged(ledger: Decides) -> None:
    order(ledger, THROTTLE)
    ask_in(ledger, CRITICAL, draw=0.1, expected_ms=PATIENT_MS)
    ask_in(ledger, CRITICAL, draw=0.3, expected_ms=HASTY_MS)
    session = float("-inf")
    assert [ask_in(ledger, CRITICAL, draw=0.1, expected_ms=session).granted for _ in range(3)] == [False] * 3
    assert [ask_in(ledger, CRITICAL, draw=0.3, expected_ms=session).granted for _ in range(3)] == [True] * 3


def test_q13_at_a_limit_the_hasty_leave_the_last_places_to_those_that_were_refused(ledger: Decides) -> None:
    order(ledger, ShedOrder(response_ms=300.0, limits=(0.0, 10.0, 0.0, 0.0)))
    assert all(ask_in(ledger, CRITICAL, expected_ms=HASTY_MS).granted for _ in range(10)), "nobody else was refused yet"
    assert not ask_in(ledger, CRITICAL, expected_ms=PATIENT_MS).granted
    order(ledger, ShedOrder(response_ms=300.0, limits=(0.0, 12.0, 0.0, 0.0)))  # whose request stays in flight, too
    ahead = [ask_in(ledger, CRITICAL, expected_ms=HASTY_MS).granted for _ in range(11)]
    assert ahead == [False] * 10 + [True], "ten for each that was refused"


def test_s11_the_customer_above_its_committed_rate_is_refused_before_others_of_its_class(ledger: Decides) -> None:
    order(ledger, ShedOrder(refused_shares=(0.0, 0.2, 0.4, 0.4)))
    customer = work_terms(rate=1, capacity=10)

    def from_customer(name: str, draw: float = 0.3) -> bool:
        wants = (*request(SHEDS).wants, *ask(customer, bucket=name, charge=3.0).wants)
        return acquire(ledger, Acquire(wants, lot=Lot(CRITICAL, draw), ttl_us=MINUTE_US)).granted

    assert [from_customer("customers:a") for _ in range(3)] == [True, True, True], "4 of 10 units are left"
    assert not from_customer("customers:b", 0.1)
    assert not from_customer("customers:a")
    assert from_customer("customers:b", 0.1), "spared"


def test_q13_nobody_is_spared_where_another_bucket_refuses(ledger: Decides) -> None:
    order(ledger, THROTTLE)
    ask_in(ledger, CRITICAL, draw=0.1, expected_ms=PATIENT_MS)
    ask_in(ledger, CRITICAL, draw=0.3, expected_ms=HASTY_MS)
    before = shedding_of(ledger).ahead[CRITICAL]
    empty = ask(work_terms(rate=1, capacity=10), bucket="customers:a", charge=1.0, minimum=11.0)
    both = Acquire((*request(SHEDS).wants, *empty.wants), lot=Lot(CRITICAL, 0.1, PATIENT_MS), ttl_us=MINUTE_US)
    assert not acquire(ledger, both).granted
    assert (before, shedding_of(ledger).ahead[CRITICAL]) == (2, 2)


def test_q13_the_record_follows_the_median_of_answers_that_did_not_fail(ledger: Decides) -> None:
    chance = random.Random(3)
    for i in range(300):
        operation = request(SHEDS).but(lot=Lot(CRITICAL, 0.5))
        made = reserved(operation, acquire(ledger, operation), name=f"r{i}")
        (charge,) = made.charges
        failed = i % 5 == 0
        latency_ms = 1.0 if failed else chance.choice([100.0, 200.0, 5000.0])
        charges = (charge.but(expected_ms=float("-inf")) if failed else charge,)
        settle(ledger, done(made, 2.0).but(class_number=CRITICAL, latency_ms=latency_ms, charges=charges))
    assert shedding_of(ledger).median_ms == pytest.approx(200, rel=0.25)


def test_q8_s9_settles_count_what_was_late_and_how_long_all_took(ledger: Decides) -> None:
    """By class the target of SHEDS; the acquire's time counts where nobody says how long it took."""
    took_ms = {CRITICAL: 100.0, SHEDDABLE_PLUS: 101.0, SHEDDABLE: 150.0}
    for number, latency_ms in took_ms.items():
        operation = request(SHEDS).but(lot=Lot(number, 0.5))
        made = reserved(operation, acquire(ledger, operation), name=f"r{number}")
        settle(ledger, done(made, 2.0).but(class_number=number, latency_ms=latency_ms))
    operation = request(SHEDS).but(lot=Lot(SHEDDABLE, 0.5))
    silent = reserved(operation, acquire(ledger, operation), name="silent")
    settle(ledger, done(silent, 2.0).but(class_number=SHEDDABLE), START_US + S_US)
    known = shedding_of(ledger)
    assert (known.timed, known.late) == ([0, 1, 1, 2], [0, 0, 1, 1])
    assert known.seconds == pytest.approx(1.351)


def test_q8_an_outcome_that_the_policy_counts_is_late_and_missed_however_fast(ledger: Decides) -> None:
    operation = request(SHEDS).but(lot=Lot(CRITICAL, 0.5))
    made = reserved(operation, acquire(ledger, operation))
    (charge,) = made.charges
    failed = charge.but(expected_ms=float("-inf"))
    settle(ledger, done(made, 2.0).but(class_number=CRITICAL, latency_ms=1.0, charges=(failed,)))
    known = shedding_of(ledger)
    assert (known.timed[CRITICAL], known.late[CRITICAL], record_of(ledger).missed) == (1, 1, 1)
    assert known.slack_min_ms == float("inf")


def test_s8_the_share_that_answers_tell_is_measured_whichever_controller_refuses(ledger: Decides) -> None:
    order(ledger, ShedOrder(limits=(0.0, 0.0, 0.0, 1.0)))
    ask_in(ledger, CRITICAL)
    told = [ask_in(ledger, SHEDDABLE).buckets[0].pressure for _ in range(20)]
    shares = [one.refused_share for one in told if one]
    assert shares[0] == pytest.approx(0.1), "one refusal says little"
    assert shares == sorted(shares)
    assert 0.7 < shares[-1] < 1
    assert [one.state for one in told if one] == [State.CALM] * 2 + [State.OVERLOADED] * 18
    granted = ask_in(ledger, CRITICAL).buckets[0].pressure
    assert granted is not None
    assert (granted.refused_share, granted.state) == (0.0, State.CALM)


def test_s8_the_measured_share_follows_the_latest_requests(ledger: Decides) -> None:
    order(ledger, ShedOrder(refused_shares=(0.0, 0.6, 0.0, 0.0), lent_for_us=60 * S_US))
    for number in range(500):
        ask_in(ledger, CRITICAL, draw=number * 0.618 % 1)
    assert shedding_of(ledger).refused_recently[CRITICAL] == pytest.approx(0.6, abs=0.1)


# Records of before.

_OLD_SHEDDING = [0.5, 1.0, *[0.1, 0.2, 0.3, 0.4], *[0, 0, 0, 9.0], *[0, 0, 0, 2.0], *[1, 2, 3, 4], *[5, 6, 7, 8]]


@pytest.mark.parametrize("flags", [Flags.OVERLOAD, Flags.OVERLOAD | Flags.HISTOGRAM])
def test_a_record_with_the_older_form_of_overload_control_is_read_and_written_anew(
    valkey: Server, flags: Flags
) -> None:
    """Counters go on, and what was set ends by itself; latencies of the coarser histogram begin at none."""
    store, given = ScriptStore(valkey), work_terms(rate=1000, capacity=1000, flags=flags)
    acquire(store, ask(given).but(lot=Lot(CRITICAL, 0.5)))
    fixed = layout.pack_record(record_of(store))[: layout._RECORD.size]
    old = struct.pack("<28d", *_OLD_SHEDDING, *[9, 9, 9, 9], 1.5, 2.5)
    histogram = bytes(4 * 576) if Flags.HISTOGRAM in flags else b""
    key = keys.bucket(store.prefix, BUCKET)
    store.client.set(key, fixed + histogram + old)
    read = record_of(store).shedding
    assert read is not None
    assert (read.quality, read.state, read.refused_shares) == (0.5, 3.0, [0.1, 0.2, 0.3, 0.4])
    assert (read.refused, read.timed, read.asked) == ([1, 2, 3, 4], [5, 6, 7, 8], [6, 8, 10, 12])
    refused = acquire(store, ask(given).but(lot=Lot(SHEDDABLE, 0.39)), START_US + S_US)
    assert refused.buckets[0].verdict is Verdict.TURNED_AWAY
    assert len(store.client.get(key)) == 179 + 392 + (4 * 728 if Flags.HISTOGRAM in flags else 0)
    assert acquire(store, ask(given).but(lot=Lot(SHEDDABLE, 0.39)), START_US + 11 * S_US).granted
