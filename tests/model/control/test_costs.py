"""The work of a request: a mean of many that gives itself up once requests contradict it."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.control.costs import MEMORY, Cost, guessed, learn


def after(cost: Cost, *works: float) -> Cost:
    """The cost after a sample of these requests."""
    squares = math.fsum(work * work for work in works)
    return learn(cost, work=math.fsum(works), work_squared=squares, settles=len(works), alpha=0.7)


def known(*, work: float = 10.0, samples: int = 60, seed: int = 1) -> Cost:
    """Ten requests to a sample, uniform around a mean."""
    draw, cost = Random(seed), Cost()
    for _ in range(samples):
        cost = after(cost, *(draw.uniform(0, 2 * work) for _ in range(10)))
    return cost


def test_the_first_sample_is_the_mean() -> None:
    cost = after(Cost(), 4.0, 6.0)
    assert (cost.work, cost.requests, cost.smallest) == (5.0, 2.0, 5.0)
    assert cost.largest == pytest.approx(5.2)
    assert cost.is_known
    assert not Cost().is_known


def test_it_is_a_mean_of_many_requests_not_of_the_last_sample() -> None:
    cost = known()
    assert cost.requests == MEMORY
    assert cost.work == pytest.approx(10.0, rel=0.1)
    assert cost.spread == pytest.approx(1 / 3, rel=0.3)
    noisy = after(cost, *[13.0] * 10)
    assert noisy.work == pytest.approx(cost.work + (13 - cost.work) * 10 / 210)


def test_r1_requests_that_contradict_it_are_believed_by_seven_tenths_after_two_samples() -> None:
    cost = known()
    once = after(cost, *[200.0] * 10)
    assert once.work < 25, "one sample may be chance"
    twice = after(once, *[200.0] * 10)
    assert twice.work == pytest.approx(0.7 * 200 + 0.3 * once.work)
    assert twice.requests == pytest.approx(10 / 0.7)
    assert twice.doubt == 0.0


def test_costs_that_fall_are_believed_as_well() -> None:
    cost = known()
    for _ in range(10):
        cost = after(cost, *[0.5] * 10)
    assert cost.work == pytest.approx(0.5, rel=0.4)


def test_doubt_on_one_side_is_forgotten_on_the_other() -> None:
    cost = known()
    up = after(cost, *[16.0] * 10)
    assert up.doubt > 0
    assert after(up, *[4.0] * 10).doubt <= 0


def test_costs_that_only_scatter_are_never_given_up() -> None:
    """Long tails: the mean stays within a third of what it is, and its memory stays long."""
    draw, cost = Random(3), Cost()
    for _ in range(400):
        cost = after(cost, *(min(draw.paretovariate(1.5), 100) for _ in range(20)))
    assert cost.work == pytest.approx(2.7, rel=0.35)


def test_w7_work_reported_as_it_goes_belongs_to_the_request_that_ends() -> None:
    """Nine reports of progress and one end: 100 units for one request, not 10."""
    cost = Cost()
    for _ in range(9):
        cost = learn(cost, work=10.0, work_squared=0.0, settles=0.0, alpha=0.7)
    assert (cost.unended, cost.is_known) == (90.0, False)
    cost = learn(cost, work=10.0, work_squared=10_000.0, settles=1.0, alpha=0.7)
    assert (cost.work, cost.unended) == (100.0, 0.0)


def test_requests_that_do_nothing_do_not_make_a_cost_of_nothing() -> None:
    cost = known()
    for _ in range(500):
        cost = after(cost, *[0.0] * 10)
    assert 0 < cost.work <= cost.smallest
    assert after(Cost(), 0.0, 0.0) == Cost(), "nothing is known from requests that do nothing"


def test_r15_a_guess_is_worth_one_request() -> None:
    assert after(guessed(50.0), *[10.0] * 9).work == pytest.approx(14.0)


# Squares of smaller numbers lose their digits.
work = st.just(0.0) | st.floats(1e-100, 1e9)
works = st.lists(st.lists(work, min_size=1, max_size=20), min_size=1, max_size=30)


@given(works)
def test_f_p8_no_history_makes_a_cost_that_is_no_number_or_beyond_what_was_seen(history: list[list[float]]) -> None:
    cost = Cost()
    for sample in history:
        cost = after(cost, *sample)
        assert all(math.isfinite(value) for value in (cost.work, cost.requests, cost.spread, cost.doubt))
    most = max(math.fsum(sample) / len(sample) for sample in history)
    assert 0 <= cost.work <= most * (1 + 1e-9)
    assert cost.largest <= max(map(max, history)) * (1 + 1e-9)
