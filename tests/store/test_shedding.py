"""Overload control in buckets, on the model and on the scripts: the requests that are refused, and the counters."""

import math
from dataclasses import replace

import pytest

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, Flags, Params, histogram_step
from limiter.model.bucket.in_flight import InFlightTerms
from limiter.model.bucket.operations import (
    Acquire,
    AcquireAnswer,
    AcquireStatus,
    Idempotency,
    Lot,
    Pressure,
    Settle,
    Verdict,
    Want,
)
from limiter.model.control.stewardship import Steer, SteerStatus
from limiter.model.overload.shedding import CLASS_NUMBERS, Shedding, ShedOrder, State
from limiter.store import layout
from tests.support.operations import (
    BUCKET,
    MS_US,
    S_US,
    START_US,
    acquire,
    ask,
    record_of,
    reserved,
    settle,
    work_terms,
)
from tests.support.servers import Server
from tests.support.stores import LEASE_MS, Decides, ScriptStore

TERMS = work_terms(rate=1000, capacity=1000, flags=Flags.OVERLOAD | Flags.HISTOGRAM)
PLUS, CRITICAL, SHEDDABLE_PLUS, SHEDDABLE = CLASS_NUMBERS.values()


def order(ledger: Decides, given: ShedOrder, *, terms: Params = TERMS, bucket: str = BUCKET, at_us: int = 0) -> None:
    """Set overload control of a bucket that is there, as the owner of its slot."""
    now_us = START_US + at_us
    acquire(ledger, ask(terms, bucket=bucket, charge=0.0), now_us)
    lease = ledger.take(b"controller", LEASE_MS)
    assert lease is not None
    assert ledger.steer(lease, [Steer(bucket, terms, overload=given)], now_us) == [SteerStatus.DONE]


def request(
    ledger: Decides, class_number: int, draw: float = 0.5, *, at_us: int = 0, terms: Params = TERMS
) -> AcquireAnswer:
    return acquire(ledger, ask(terms).but(lot=Lot(class_number, draw)), START_US + at_us)


def shedding_of(ledger: Decides, bucket: str = BUCKET) -> Shedding:
    known = record_of(ledger, bucket).shedding
    assert known is not None
    return known


def timed(
    operation: Acquire, answer: AcquireAnswer, *, latency_ms: float, expected_ms: float = 100.0, name: str = "r"
) -> Settle:
    number = 0 if operation.lot is None else operation.lot.class_number
    return reserved(operation, answer, name=name).but(
        work=2.0, latency_ms=latency_ms, expected_ms=expected_ms, class_number=number
    )


def test_q4_a_draw_below_the_share_refuses_and_the_victims_are_the_low_classes(ledger: Decides) -> None:
    """A throttle of 20 with the usual ranks 0, 1, 2 and 4."""
    order(ledger, ShedOrder(refused_shares=(0.0, 0.2, 0.4, 0.8)))
    draws = [number / 100 for number in range(100)]
    refused = [sum(not request(ledger, number, draw).granted for draw in draws) for number in CLASS_NUMBERS.values()]
    assert refused == [0, 20, 40, 80]
    assert shedding_of(ledger).refused == [0, 20, 40, 80]


def test_q4_at_the_share_itself_a_draw_passes(ledger: Decides) -> None:
    order(ledger, ShedOrder(refused_shares=(0.0, 0.25, 0.0, 1.0)))
    assert request(ledger, CRITICAL, 0.25).granted
    assert not request(ledger, CRITICAL, math.nextafter(0.25, 0)).granted
    assert not request(ledger, SHEDDABLE, math.nextafter(1.0, 0)).granted, "a share of 1 refuses everybody"


def test_a_request_that_is_turned_away_spends_nothing_and_is_no_rejection_of_the_limit(ledger: Decides) -> None:
    """The cap rules raise a cap on rejections; what overload control refuses must not make them."""
    order(ledger, ShedOrder(refused_shares=(0.0, 0.0, 0.0, 1.0)))
    answer = request(ledger, SHEDDABLE)
    assert (answer.granted, answer.buckets[0].verdict) == (False, Verdict.TURNED_AWAY)
    record = record_of(ledger)
    assert (record.balance, record.refused, record.requests, record.admitted) == (1000, 0, 2, 1)


def test_p5_a_bucket_that_turns_away_spares_the_others(ledger: Decides) -> None:
    order(ledger, ShedOrder(refused_shares=(0.0, 0.0, 0.0, 1.0)))
    both = Acquire((*ask(TERMS).wants, Want("other:a", work_terms(), 1.0, 2.0)), lot=Lot(SHEDDABLE, 0.5))
    answer = acquire(ledger, both)
    assert [bucket.verdict for bucket in answer.buckets] == [Verdict.TURNED_AWAY, Verdict.PASSED]
    assert record_of(ledger, "other:a").balance == 50
    assert answer.buckets[1].pressure == Pressure(), "one without overload control has nothing to say"


def test_p11_a_shadow_only_counts(ledger: Decides) -> None:
    terms = replace(TERMS, flags=TERMS.flags | Flags.SHADOW)
    order(ledger, ShedOrder(refused_shares=(1.0, 1.0, 1.0, 1.0)), terms=terms)
    answer = request(ledger, SHEDDABLE, terms=terms)
    assert (answer.granted, answer.buckets[0].verdict) == (True, Verdict.TURNED_AWAY)
    assert shedding_of(ledger).refused == [0, 0, 0, 1]


def test_a_dry_run_shows_the_refusal_and_counts_nothing(ledger: Decides) -> None:
    order(ledger, ShedOrder(refused_shares=(0.0, 0.0, 0.0, 1.0), rates=(0.0, 1.0, 0.0, 0.0)))
    before = record_of(ledger)
    for number in (CRITICAL, SHEDDABLE):
        acquire(ledger, ask(TERMS).but(lot=Lot(number, 0.5), dry_run=True))
    assert record_of(ledger) == before


def test_s3_a_class_at_its_rate_waits_for_its_own_tokens_and_leaves_the_others_alone(ledger: Decides) -> None:
    """The rate is two per second: two at once, then one every half second."""
    order(ledger, ShedOrder(rates=(0.0, 0.0, 0.0, 2.0)))
    assert [request(ledger, SHEDDABLE).granted for _ in range(3)] == [True, True, False]
    assert all(request(ledger, CRITICAL).granted for _ in range(10))
    assert not request(ledger, SHEDDABLE, at_us=499 * MS_US).granted
    assert request(ledger, SHEDDABLE, at_us=501 * MS_US).granted
    assert not request(ledger, SHEDDABLE, at_us=502 * MS_US).granted


def test_s11_rates_in_work_are_debited_by_the_charge_and_the_debt_is_waited_for(ledger: Decides) -> None:
    """100 units per second, 30 for each: the fourth leaves a debt of 20, so a fifth waits for 210 ms."""
    terms = replace(TERMS, flags=TERMS.flags | Flags.IN_FLIGHT, in_flight=InFlightTerms(in_work=True))
    in_work = ask(terms, charge=30.0).but(lot=Lot(SHEDDABLE, 0.5), ttl_us=S_US)

    def granted(at_us: int = 0) -> bool:
        return acquire(ledger, in_work, START_US + at_us).granted

    assert granted()
    order(ledger, ShedOrder(rates=(0.0, 0.0, 0.0, 100.0)), terms=terms)
    assert [granted() for _ in range(5)] == [True, True, True, True, False]
    assert shedding_of(ledger).tokens[SHEDDABLE] == -20
    assert not granted(at_us=209 * MS_US)
    assert granted(at_us=211 * MS_US)


def test_s3_the_smallest_rate_still_lets_one_through_now_and_then(ledger: Decides) -> None:
    order(ledger, ShedOrder(rates=(0.05, 0.0, 0.0, 0.0), lent_for_us=60 * S_US))
    assert [request(ledger, PLUS).granted for _ in range(2)] == [True, False]
    assert not request(ledger, PLUS, at_us=19 * S_US).granted
    assert request(ledger, PLUS, at_us=21 * S_US).granted


def test_a_request_that_another_bucket_refuses_takes_no_token_of_its_class(ledger: Decides) -> None:
    order(ledger, ShedOrder(rates=(0.0, 0.0, 0.0, 1.0)))
    full = Want("other:a", work_terms(), 51.0, 2.0)
    assert not acquire(ledger, Acquire((*ask(TERMS).wants, full), lot=Lot(SHEDDABLE, 0.5))).granted
    assert request(ledger, SHEDDABLE).granted


def test_a_lower_rate_clamps_gathered_tokens_and_no_rate_frees_the_class(ledger: Decides) -> None:
    order(ledger, ShedOrder(rates=(0.0, 0.0, 0.0, 100.0)))
    assert shedding_of(ledger).tokens[SHEDDABLE] == 100
    order(ledger, ShedOrder(rates=(0.0, 0.0, 0.0, 2.0)))
    assert shedding_of(ledger).tokens[SHEDDABLE] == 2
    order(ledger, ShedOrder())
    assert all(request(ledger, SHEDDABLE).granted for _ in range(5))


def test_s4_q6_answers_carry_quality_and_overload(ledger: Decides) -> None:
    order(ledger, ShedOrder(quality=0.4, state=State.OVERLOADED, refused_shares=(0, 0, 0.1, 0.2), rates=(0, 0, 0, 7.0)))
    assert request(ledger, CRITICAL).buckets[0].pressure == Pressure(State.OVERLOADED, 0.4)
    assert request(ledger, SHEDDABLE).buckets[0].pressure == Pressure(State.OVERLOADED, 0.4, 0.2, 7.0)
    assert acquire(ledger, ask(TERMS)).buckets[0].pressure is None, "nobody asked"


def test_f_p8_a_value_that_makes_no_sense_changes_nothing(ledger: Decides) -> None:
    order(ledger, ShedOrder(quality=0.5, refused_shares=(0.1, 0.2, 0.3, 0.4), rates=(1.0, 2.0, 3.0, 4.0)))
    nan, inf = math.nan, math.inf
    order(ledger, ShedOrder(quality=nan, refused_shares=(nan, 1.5, -0.1, 0.9), rates=(nan, inf, -1.0, 9.0)))
    known = shedding_of(ledger)
    assert known.quality == 0.5
    assert known.refused_shares == [0.1, 0.2, 0.3, 0.9]
    assert known.rates == [1.0, 2.0, 3.0, 9.0]


def test_q2_q8_settles_count_by_class_who_was_timed_and_what_was_missed(ledger: Decides) -> None:
    """Where a settle does not say how long it took, the time since its acquire counts: none, here."""
    for name, (number, latency_ms) in enumerate([(CRITICAL, 100.0), (CRITICAL, 101.0), (SHEDDABLE, 300.0)]):
        operation = ask(TERMS).but(lot=Lot(number, 0.5))
        settle(ledger, timed(operation, acquire(ledger, operation), latency_ms=latency_ms, name=f"r{name}"))
    operation = ask(TERMS).but(lot=Lot(SHEDDABLE, 0.5))
    settle(ledger, timed(operation, acquire(ledger, operation), latency_ms=math.nan, name="untold"))
    known = shedding_of(ledger)
    assert (known.timed, record_of(ledger).missed) == ([0, 2, 0, 2], 2)
    assert known.slack_min_ms == -200
    assert known.seconds == pytest.approx(0.501)
    assert record_of(ledger).settles == 4
    assert known.failed == 0


def test_q8_an_outcome_that_counts_as_late_is_counted_as_a_failure_too(ledger: Decides) -> None:
    operation = ask(TERMS).but(lot=Lot(CRITICAL, 0.5))
    settle(ledger, timed(operation, acquire(ledger, operation), latency_ms=1.0, name="failed", expected_ms=-math.inf))
    known = shedding_of(ledger)
    assert (known.failed, known.late, record_of(ledger).missed) == (1, [0, 1, 0, 0], 1)


def test_s3_each_class_has_a_histogram_of_its_own(ledger: Decides) -> None:
    for number in (CRITICAL, SHEDDABLE):
        operation = ask(TERMS).but(lot=Lot(number, 0.5))
        settle(ledger, timed(operation, acquire(ledger, operation), latency_ms=50.0, name=f"r{number}"))
    counted = [at for at, count in enumerate(record_of(ledger).histogram) if count]
    assert counted == [number * HISTOGRAM_STEPS + histogram_step(50.0) for number in (CRITICAL, SHEDDABLE)]


def test_q1_the_expectation_of_a_bucket_s_own_policy_counts_for_that_bucket(ledger: Decides) -> None:
    """The same request, late for one policy and in time for the other."""
    operation = Acquire((*ask(TERMS).wants, *ask(TERMS, bucket="other:a").wants), lot=Lot(CRITICAL, 0.5))
    made = timed(operation, acquire(ledger, operation), latency_ms=150.0, expected_ms=math.nan)
    patient, hasty = made.charges
    settle(ledger, made.but(charges=(patient.but(expected_ms=200.0), hasty.but(expected_ms=100.0))))
    assert (record_of(ledger).missed, record_of(ledger, "other:a").missed) == (0, 1)
    assert shedding_of(ledger).slack_min_ms == 50


def test_q5_the_least_slack_is_that_of_the_epoch_and_the_one_before_stays_readable(ledger: Decides) -> None:
    def settled(name: str, latency_ms: float) -> None:
        operation = ask(TERMS).but(lot=Lot(CRITICAL, 0.5))
        settle(ledger, timed(operation, acquire(ledger, operation), latency_ms=latency_ms, name=name))

    settled("a", 90.0)
    settled("b", 70.0)
    assert shedding_of(ledger).slack_min_ms == 10
    lease = ledger.take(b"controller", LEASE_MS)
    assert lease is not None
    assert ledger.sample(lease, 100) == [BUCKET]
    settled("c", 40.0)
    settled("d", 60.0)
    known = shedding_of(ledger)
    assert (known.slack_min_ms, known.slack_before_ms) == (40, 10)


def test_q6_taking_the_block_away_reaches_the_live_bucket_and_so_does_giving_one(ledger: Decides) -> None:
    plain = work_terms(rate=1000, capacity=1000)
    order(ledger, ShedOrder(refused_shares=(1.0, 1.0, 1.0, 1.0)))
    assert not request(ledger, CRITICAL).granted
    assert request(ledger, CRITICAL, terms=plain).granted
    assert record_of(ledger).shedding is None
    assert request(ledger, CRITICAL).granted, "it begins anew: nobody is refused until the controller says so"
    assert shedding_of(ledger) == Shedding(asked=[0, 1, 0, 0], limits=[0] * 4)
    assert record_of(ledger).balance == 1000 - 2 - 2, "the balance is what it was"


def test_f_r7_a_repeated_key_is_answered_as_the_first_time(valkey: Server) -> None:
    store = ScriptStore(valkey)
    order(store, ShedOrder(quality=0.5, refused_shares=(0.0, 0.0, 0.0, 1.0)))
    operation = ask(TERMS).but(lot=Lot(SHEDDABLE, 0.5), idempotency=Idempotency("k", b"f" * 16, b"memo"))
    first = acquire(store, operation)
    again = acquire(store, operation.but(lot=Lot(SHEDDABLE, 0.9)))
    assert first.status is again.status is AcquireStatus.REFUSED
    assert (again.memo, again.buckets) == (b"memo", first.buckets)
    assert shedding_of(store).refused[SHEDDABLE] == 1


def test_a_bucket_without_the_block_pays_no_byte(ledger: Decides) -> None:
    acquire(ledger, ask(work_terms()))
    assert len(layout.pack_record(record_of(ledger))) == 179
