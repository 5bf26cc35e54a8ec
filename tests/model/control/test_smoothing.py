"""Averages: R1's formula and figures, and what becomes of them when samples are long, few or missing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import Load, Moments, Smoothing, follow, gather, rest, smooth


def sample(
    *, elapsed_s: float = 0.1, requests: float = 0, refused: float = 0, work: float = 0, settles: float = 0,
    work_squared: float = 0, is_reported: bool = True,
) -> Sample:  # fmt: skip
    return Sample(
        elapsed_s, requests, requests - refused, refused, work, settles, work_squared, is_reported=is_reported
    )


def test_r1_the_average_is_a_of_the_sample_and_the_rest_of_itself() -> None:
    """R1: avg = a·sample + (1−a)·avg"""
    assert smooth(10.0, 20.0, 0.7) == pytest.approx(17.0)
    assert smooth(10.0, 20.0, 0.3) == pytest.approx(13.0)


def test_the_first_sample_is_the_average() -> None:
    assert smooth(None, 20.0, 0.3) == 20.0


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from([0.3, 0.7]), st.integers(1, 20))
def test_r1_a_sample_of_k_cycles_counts_as_k_samples(average: float, value: float, alpha: float, cycles: int) -> None:
    """1 − (1−a)^k: a controller that slept does not see less than one that did not."""
    one_by_one = average
    for _ in range(cycles):
        one_by_one = smooth(one_by_one, value, alpha)
    assert smooth(average, value, alpha, cycles) == pytest.approx(
        one_by_one, rel=1e-6, abs=1e-9 * (average + value) + 1e-300
    )


def test_r1_each_average_has_its_weight() -> None:
    """R1: 0.7 for work per request, 0.3 for work per second, 0.7 for the rejection rate."""
    before = Load(work_rate=100.0, work_per_request=1.0, rejection_rate=0.5)
    after = follow(before, sample(requests=10, refused=0, work=20, settles=10), cycles=1.0)
    assert after.work_rate == pytest.approx(0.3 * 200 + 0.7 * 100)
    assert after.work_per_request == pytest.approx(0.7 * 2 + 0.3 * 1)
    assert after.rejection_rate == pytest.approx(0.3 * 0.5)


def test_r14_a_policy_may_have_weights_of_its_own() -> None:
    before = Load(work_rate=100.0, work_per_request=1.0, rejection_rate=0.5)
    smoothing = Smoothing(work_per_request=0.5, work_rate=0.1, rejection=0.2)
    after = follow(before, sample(requests=10, refused=0, work=20, settles=10), smoothing, cycles=1.0)
    assert after.work_rate == pytest.approx(110.0)
    assert after.work_per_request == pytest.approx(1.5)
    assert after.rejection_rate == pytest.approx(0.4)


@pytest.mark.parametrize(("rejection_rate", "is_rejecting"), [(0.0, False), (0.00099, False), (0.001, True), (1, True)])
def test_r1_a_rejection_rate_below_a_thousandth_counts_as_zero(rejection_rate: float, is_rejecting: bool) -> None:
    assert Load(rejection_rate=rejection_rate).is_rejecting is is_rejecting


def test_a_cycle_in_which_nothing_ended_says_nothing_of_work_per_request() -> None:
    before = Load(work_rate=100.0, work_per_request=7.0)
    after = follow(before, sample(requests=3, refused=3), cycles=1.0)
    assert after.work_per_request == 7.0
    assert after.work_rate == pytest.approx(70.0)


def test_w7_work_reported_as_it_goes_belongs_to_the_request_that_ends() -> None:
    """Ten cycles of progress and one end: 100 units for one request, not 10."""
    load = Load()
    for _ in range(9):
        load = follow(load, sample(work=10), cycles=1.0)
    load = follow(load, sample(work=10, settles=1), cycles=1.0)
    assert load.work_per_request == pytest.approx(100.0)
    assert load.work_unended == 0


def test_a_bucket_at_rest_forgets_its_rates_but_not_what_a_request_costs() -> None:
    rested = rest(Load(work_rate=100.0, work_per_request=5.0, rejection_rate=0.5), cycles=10.0)
    assert rested.work_rate == pytest.approx(100 * 0.7**10)
    assert not rested.is_rejecting
    assert rested.work_per_request == 5.0
    assert rest(Load(), cycles=10.0) == Load()


def moments_of(*works: float) -> Moments:
    return gather(Moments(), sample(work=sum(works), settles=len(works), work_squared=sum(w * w for w in works)))


def test_moments_know_mean_and_spread() -> None:
    moments = moments_of(1.0, 3.0)
    assert moments.mean == 2.0
    assert moments.variation == pytest.approx(0.5)
    assert moments_of(4.0, 4.0, 4.0).variation == 0


def test_moments_of_nothing_are_nothing() -> None:
    assert (Moments().mean, Moments().variation) == (0.0, 0.0)
    assert moments_of(0.0, 0.0).variation == 0.0


def test_what_is_long_ago_counts_little_however_few_requests_came_since() -> None:
    """Half a second for each request: fifty of one unit are soon outweighed by a few of fifty."""
    moments = moments_of(*[1.0] * 50)
    for _ in range(20):
        moments = gather(moments, sample(elapsed_s=0.5, work=50, settles=1, work_squared=2500))
    assert moments.mean == pytest.approx(50, rel=0.1)


def test_what_was_only_charged_tells_nothing_of_the_spread() -> None:
    assert gather(Moments(), sample(work=10, settles=5, is_reported=False)) == Moments()


def test_a_cost_fifty_times_as_high_shows_at_once_as_spread() -> None:
    moments = moments_of(*[1.0] * 200)
    shaken = gather(moments, sample(work=500, settles=10, work_squared=25_000))
    assert shaken.variation > 1


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), min_size=1, max_size=10))
def test_means_lie_between_the_least_and_the_most(cycles: list[list[float]]) -> None:
    moments = Moments()
    for works in cycles:
        squares = math.fsum(work * work for work in works)
        moments = gather(moments, sample(work=math.fsum(works), settles=len(works), work_squared=squares))
    every = [work for works in cycles for work in works]
    assert min(every) - 1e-6 <= moments.mean <= max(every) * (1 + 1e-9) + 1e-6
    assert moments.variation >= 0
