"""Choosing between counting work and counting requests (R10)."""

from random import Random

import pytest

from limiter.model.control.costs import Cost
from limiter.model.control.mechanism import (
    AutoParams,
    Pace,
    Signs,
    auto_params,
    explain,
    follow,
    gather_minute,
    is_suited,
    rest,
    step,
)
from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import Moments
from limiter.model.policy.reading import read_policy

PARAMS = AutoParams()
PATIENCE_S, RATE_HIGH, RATE_LOW = PARAMS.patience_s, PARAMS.rate_high, PARAMS.rate_low
EVEN = Moments(50.0, 50.0, 50.0)
BETWEEN = Moments(50.0, 50.0, 50.0 * (1 + 0.75**2))
UNEVEN = Moments(50.0, 50.0, 50.0 * (1 + 1.2**2))
CAPACITY = 100.0


def signs(pace: Pace, moments: Moments, *, minute: Moments = EVEN, cost: Cost = Cost(1.0, 50.0)) -> Signs:  # noqa: B008
    return Signs(pace, moments, minute, cost, CAPACITY)


def sample(admitted: float, elapsed_s: float = 0.1) -> Sample:
    return Sample(elapsed_s, admitted, admitted, 0.0, admitted, admitted, admitted, is_reported=True)


def steady(rate: float) -> Pace:
    return Pace(rate, rate * rate)


def chosen_after(seconds: float, pace: Pace, moments: Moments, *, counts_requests: bool = False) -> bool:
    for _ in range(round(seconds * 10)):
        found = signs(pace, moments)
        counts_requests, pace = step(found, PARAMS, counts_requests=counts_requests, elapsed_s=0.1)
    return counts_requests


def test_r10_many_requests_alike_are_counted() -> None:
    assert chosen_after(PATIENCE_S + 0.1, steady(200.0), EVEN)


def test_r10_few_requests_are_counted_by_work() -> None:
    assert not chosen_after(60, steady(10.0), EVEN)
    assert not chosen_after(0.1, steady(10.0), EVEN, counts_requests=True)


def test_r10_work_that_varies_is_counted_by_work() -> None:
    assert not chosen_after(60, steady(200.0), UNEVEN)
    assert not chosen_after(0.1, steady(200.0), UNEVEN, counts_requests=True), "at once"


def test_r10_requests_in_bursts_are_counted_by_work() -> None:
    bursts = Pace(200.0, 200.0**2 * (1 + 1.5**2))
    assert not chosen_after(60, bursts, EVEN)
    assert not chosen_after(0.1, bursts, EVEN, counts_requests=True)


@pytest.mark.parametrize("counts_requests", [True, False])
def test_r10_between_the_thresholds_what_is_in_force_stays(counts_requests: bool) -> None:
    """Hysteresis."""
    between = (RATE_HIGH + RATE_LOW) / 2
    assert chosen_after(60, steady(between), EVEN, counts_requests=counts_requests) is counts_requests
    assert chosen_after(60, steady(200.0), BETWEEN, counts_requests=counts_requests) is counts_requests


def test_r10_it_takes_patience_to_count_requests_and_a_break_begins_it_anew() -> None:
    counts, pace = False, steady(200.0)
    for _ in range(29):
        counts, pace = step(signs(pace, EVEN), PARAMS, counts_requests=counts, elapsed_s=0.1)
    assert not counts
    counts, pace = step(signs(pace, UNEVEN), PARAMS, counts_requests=counts, elapsed_s=0.1)
    assert pace.suits_requests_s == 0
    assert not chosen_after(2.9, pace, EVEN)


def test_r10_whoever_was_sent_back_to_work_waits_again() -> None:
    found = signs(Pace(200.0, 200.0**2, 5.0), UNEVEN)
    counts, pace = step(found, PARAMS, counts_requests=True, elapsed_s=0.1)
    assert (counts, pace.suits_requests_s) == (False, 0.0)


def test_what_is_not_known_is_counted_by_work() -> None:
    assert not chosen_after(60, steady(200.0), Moments()), "nobody reports what requests do"
    assert not chosen_after(60, Pace(), EVEN)
    assert not chosen_after(0.1, Pace(), EVEN, counts_requests=True)


def test_chance_alone_is_no_burst() -> None:
    """Independent requests, five to a cycle on average, vary by 45 % from cycle to cycle by chance."""
    draw, pace = Random(10), Pace()
    for _ in range(200):
        pace = follow(pace, sample(sum(draw.random() < 0.05 for _ in range(100))), cycles=1.0)
    assert pace.rate == pytest.approx(50, rel=0.2)
    assert pace.variation < 0.35


def test_bursts_are_told_from_an_even_stream() -> None:
    pace = Pace()
    for second in range(20):
        for _ in range(10):
            pace = follow(pace, sample(20.0 if second % 5 == 0 else 0.0), cycles=1.0)
    assert pace.variation > 1


def test_a_bucket_at_rest_slows_down() -> None:
    rested = rest(Pace(100.0, 10_000.0, 2.0), cycles=20.0)
    assert rested.rate == pytest.approx(100 * 0.95**20)
    assert rested.suits_requests_s == 0
    assert rest(Pace(), cycles=20.0) == Pace()


def minute_of(*costs: float) -> Moments:
    """Ten requests of each cost in turn, half a second apart."""
    minute = Moments()
    for cost in costs:
        reported = Sample(0.5, 10, 10, 0, 10 * cost, 10, 10 * cost * cost, is_reported=True)
        minute = gather_minute(minute, reported)
    return minute


def test_r16_costs_that_alternate_in_bursts_are_counted_by_work_though_each_moment_is_even() -> None:
    """R16: a cap set by the cheap ones admits the expensive ones, and is late each time."""
    even, bursts = minute_of(*[3.0] * 120), minute_of(*([3.0] * 10 + [15.0] * 10) * 6)
    suited = Pace(200.0, 200.0**2, PATIENCE_S)
    assert step(signs(suited, EVEN, minute=even), PARAMS, counts_requests=False, elapsed_s=0.1)[0]
    found = signs(suited, EVEN, minute=bursts)
    assert not step(found, PARAMS, counts_requests=False, elapsed_s=0.1)[0]
    assert not step(found, PARAMS, counts_requests=True, elapsed_s=0.1)[0], "and they do not stay counted"
    assert "over the last minute" in explain(found, PARAMS, counts_requests=False)


def test_r12_a_request_that_costs_more_than_the_bucket_holds_is_counted_however_few_there_are() -> None:
    large, less, small = Cost(500.0, 20.0), Cost(60.0, 20.0), Cost(40.0, 20.0)
    slow = Pace(0.2, 0.04)
    assert step(signs(slow, UNEVEN, cost=large), PARAMS, counts_requests=False, elapsed_s=0.1)[0]
    assert not step(signs(slow, EVEN, cost=less), PARAMS, counts_requests=False, elapsed_s=0.1)[0]
    assert step(signs(slow, EVEN, cost=less), PARAMS, counts_requests=True, elapsed_s=0.1)[0], "hysteresis"
    assert not step(signs(slow, EVEN, cost=small), PARAMS, counts_requests=True, elapsed_s=0.1)[0]
    told = explain(signs(slow, UNEVEN, cost=large), PARAMS, counts_requests=True)
    assert told == "a request costs 500 units, and the bucket holds 100: requests are counted"


def test_r14_a_policy_may_have_thresholds_of_its_own() -> None:
    document = {"name": "p", "rate": 100, "mechanism": "auto", "capacity": "2s"}
    auto = {"rate_high": 10, "rate_low": 5, "even": 0.2, "uneven": 0.4, "patience_s": 1}
    params = auto_params(read_policy({**document, "steering": {"auto": auto}}))
    assert params == AutoParams(10, 5, 0.2, 0.4, 1, 2)
    assert auto_params(read_policy(document)) == AutoParams(capacity_s=2)
    pace = Pace(12.0, 144.0, 1.0)
    assert is_suited(pace, params)
    assert not is_suited(pace, PARAMS)
    assert step(signs(pace, EVEN), params, counts_requests=False, elapsed_s=0.1)[0]
