"""The learned charge: where it goes, when it stays, and what it makes of the spread (W8)."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.control.learning import (
    CHARGE_MIN,
    PATIENCE_CYCLES,
    STEP_MAX,
    Learning,
    LearningParams,
    learning_params,
    step,
    target,
)
from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import Moments, gather
from limiter.model.policy.reading import read_policy

MEAN = LearningParams()


def sample(*works: float, is_reported: bool = True) -> Sample:
    squares = sum(work * work for work in works)
    return Sample(0.1, len(works), len(works), 0, sum(works), len(works), squares, is_reported=is_reported)


def learned(charge: float, *cycles: tuple[float, ...], params: LearningParams = MEAN) -> tuple[float, Learning]:
    """The charge after some cycles, each with the work of its requests."""
    learning, moments = Learning(), Moments()
    for works in cycles:
        moments = gather(moments, sample(*works))
        charge, learning = step(charge, learning, moments, sample(*works), params)
    return charge, learning


def test_w8_a_charge_consistently_too_low_rises_to_the_mean() -> None:
    assert learned(1.0, *[(12.0, 8.0)] * 20)[0] == pytest.approx(10.0)


def test_w8_a_charge_consistently_too_high_falls_to_the_mean() -> None:
    assert learned(50.0, *[(2.0, 2.0)] * 20)[0] == pytest.approx(2.0)


@pytest.mark.parametrize("work", [9.1, 10.0, 10.9])
def test_w8_small_deviations_leave_it_alone(work: float) -> None:
    assert learned(10.0, *[(work,)] * 50)[0] == 10.0


def test_w8_one_odd_cycle_leaves_it_alone() -> None:
    assert learned(1.0, *[(1.0,) * 10] * 10, (3.0,) * 4)[0] == 1.0
    assert PATIENCE_CYCLES > 1


def test_w8_a_margin_may_be_in_units() -> None:
    params = LearningParams(margin=5.0)
    assert learned(10.0, *[(14.0,)] * 20, params=params)[0] == 10.0
    assert learned(10.0, *[(16.0,)] * 20, params=params)[0] == pytest.approx(16.0)


def test_nothing_learned_yet_is_the_initial_charge_until_the_first_report() -> None:
    silent = sample(40.0, is_reported=False)
    assert step(0.0, Learning(), Moments(), silent, LearningParams(initial=4.0))[0] == 4.0
    assert learned(0.0, (4.2,), params=LearningParams(initial=4.0))[0] == 4.0, "within the margin"
    assert learned(0.0, (40.0, 60.0), params=LearningParams(initial=4.0))[0] == 50.0
    assert learned(0.0, (40.0, 60.0), params=LearningParams(charge_max=8.0))[0] == 8.0


def test_the_error_is_told_in_parts_of_the_charge() -> None:
    """W8: the estimate's error is a metric."""
    assert learned(10.0, *[(5.0,)] * 2)[1].error == pytest.approx(-0.5 * (1 - 0.7**2))
    assert learned(10.0, *[(10.0,)] * 20)[1].error == 0
    assert abs(learned(1.0, *[(20.0,)] * 60)[1].error) < 0.001, "once learned, there is none"


def test_f_p8_a_step_at_most_doubles_or_halves() -> None:
    charges = [learned(1.0, *[(1000.0,)] * count)[0] for count in range(1, 8)]
    assert charges == [1, 1, 2, 4, 8, 16, 32]


def test_f_p8_what_nobody_reported_teaches_nothing() -> None:
    moments = gather(Moments(), sample(100.0))
    silent = sample(100.0, is_reported=False)
    assert step(3.0, Learning(5), moments, silent, MEAN) == (3.0, Learning(5))
    assert step(3.0, Learning(5), moments, sample(), MEAN) == (3.0, Learning(5))


def test_f_p8_moments_that_are_no_numbers_teach_nothing() -> None:
    for broken in (Moments(1.0, math.nan, 1.0), Moments(1.0, math.inf, math.inf)):
        assert step(3.0, Learning(5), broken, sample(1.0), MEAN) == (3.0, Learning(5))


def test_requests_of_no_work_leave_a_charge_above_nothing() -> None:
    assert learned(1.0, *[(0.0,)] * 100)[0] == CHARGE_MIN


def test_no_charge_is_above_the_largest_work() -> None:
    assert learned(1.0, *[(1000.0,)] * 50, params=LearningParams(charge_max=64.0))[0] == 64.0


@pytest.mark.parametrize(("wanted", "share"), [("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99)])
def test_w8_a_quantile_is_above_its_share_of_log_normal_work(wanted: str, share: float) -> None:
    draw = Random(8)
    works = [draw.lognormvariate(2.0, 0.7) for _ in range(20_000)]
    moments = Moments(len(works), sum(works), sum(work * work for work in works))
    params = learning_params(read_policy({"name": "p", "rate": 1, "charge": "learned", "learning": {"target": wanted}}))
    assert params is not None
    covered = sum(work <= target(moments, params) for work in works) / len(works)
    assert covered == pytest.approx(share, abs=0.01)


def test_the_quantiles_of_even_work_are_that_work() -> None:
    moments = Moments(10.0, 50.0, 250.0)
    for deviations in (None, 0.0, 1.28, 2.33):
        assert target(moments, LearningParams(deviations)) == pytest.approx(5.0)


def test_a_policy_says_how_to_learn() -> None:
    fields = {"name": "p", "rate": 1, "charge": "learned", "max_work": 512}
    assert learning_params(read_policy(fields)) == LearningParams(charge_max=512.0)
    learning = {"target": "p50", "margin": 3, "initial": 7}
    assert learning_params(read_policy(fields | {"learning": learning})) == LearningParams(0.0, 3.0, 7.0, 512.0)
    assert learning_params(read_policy({"name": "p", "rate": 1, "charge": 2})) is None


@given(
    st.floats(CHARGE_MIN, 1e6),
    st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), min_size=1, max_size=20),
    st.sampled_from([None, 0.0, 1.28, 2.33]),
)
def test_f_p8_no_history_breaks_the_bounds_of_a_charge(
    charge: float, cycles: list[list[float]], deviations: float | None
) -> None:
    params = LearningParams(deviations, charge_max=1e6)
    learning, moments = Learning(), Moments()
    for works in cycles:
        moments = gather(moments, sample(*works))
        moved, learning = step(charge, learning, moments, sample(*works), params)
        assert CHARGE_MIN <= moved <= 1e6
        assert charge / STEP_MAX * (1 - 1e-12) <= moved <= charge * STEP_MAX * (1 + 1e-12)
        assert math.isfinite(learning.error)
        charge = moved
