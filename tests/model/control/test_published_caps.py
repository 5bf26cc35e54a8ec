"""The published rules for a cap, each with the sources' own figures, and what no input can make them do (S10)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.control.caps import STEP_MAX, CapParams, Rule
from limiter.model.control.published_caps import step
from limiter.model.control.smoothing import Load

PARAMS = CapParams()
REJECTING = 0.2


def after(cap: float, *, committed: float, work_rate: float, work_per_request: float, rejection_rate: float) -> float:
    return step(cap, Load(work_rate, work_per_request, rejection_rate), PARAMS, committed=committed)[1]


def test_r2_forty_units_too_many_at_four_a_request_lower_the_cap_by_3_33() -> None:
    """R2: X = 40, f = 4, n = 3 → −3.33 rps"""
    cap = after(20.0, committed=100, work_rate=140, work_per_request=4, rejection_rate=REJECTING)
    assert cap - 20 == pytest.approx(-3.33, abs=0.004)


def test_r3_raising_is_slower_than_lowering() -> None:
    """R3: Y/f/m, m = 4"""
    cap = after(20.0, committed=100, work_rate=60, work_per_request=4, rejection_rate=REJECTING)
    assert cap - 20 == pytest.approx(40 / 4 / 4)


@pytest.mark.parametrize("before", [6.1, 50.0, 500.0])
def test_r4_2500_units_a_second_at_500_a_request_set_six_whatever_the_cap_was(before: float) -> None:
    """R4: s·L/f, s = 1.2: L = 2500, f = 500 → 6 rps"""
    assert after(before, committed=1000, work_rate=2500, work_per_request=500, rejection_rate=0) == pytest.approx(6.0)


def test_r4_never_raises_a_cap() -> None:
    """R4: a cap that is already below s·L/f is lowered by R2 instead."""
    load = Load(work_rate=2500.0, work_per_request=500.0)
    rule, cap = step(5.5, load, PARAMS, committed=1000.0)
    assert rule == "lower"
    assert cap == pytest.approx(5.5 - 1500 / 500 / 3)


@pytest.mark.parametrize(
    ("work_rate", "rejection_rate", "rule"),
    [
        (101, 0.001, "lower"), (99, 0.001, "raise"), (100, 0.5, "hold"),
        (101, 0.00099, "set"), (99, 0.00099, "hold"), (100, 0.0, "hold"),
    ],
)  # fmt: skip
def test_r1_the_threshold_of_a_thousandth_tells_the_rules_apart(
    work_rate: float, rejection_rate: float, rule: Rule
) -> None:
    assert step(40.0, Load(work_rate, 4.0, rejection_rate), PARAMS, committed=100.0)[0] == rule


def test_f_p8_a_step_at_most_halves_or_doubles() -> None:
    assert after(100, committed=100, work_rate=1e9, work_per_request=1, rejection_rate=1) == 50.0
    assert after(2, committed=1000, work_rate=0, work_per_request=1, rejection_rate=1) == 4.0
    assert after(2, committed=1000, work_rate=0, work_per_request=0, rejection_rate=1) == 4.0


@pytest.mark.parametrize("work_rate", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("work_per_request", [None, math.nan, math.inf, 4.0])
def test_f_p8_absent_or_not_a_number_holds_the_cap(work_rate: float | None, work_per_request: float | None) -> None:
    assert step(20.0, Load(work_rate, work_per_request, 1.0), PARAMS, committed=100.0) == ("hold", 20.0)


positive = st.floats(1e-6, 1e9)
loads = st.builds(
    Load,
    st.none() | st.floats(0, 1e12) | st.sampled_from([math.nan, math.inf]),
    st.none() | st.floats(0, 1e12) | st.sampled_from([math.nan, math.inf]),
    st.floats(0, 1) | st.just(math.nan),
)


@given(cap=positive, load=loads, committed=positive)
def test_f_p8_no_step_but_a_set_one_is_larger_than_its_bound(cap: float, load: Load, committed: float) -> None:
    rule, moved = step(cap, load, PARAMS, committed=committed)
    assert moved > 0
    if rule != "set" and moved > PARAMS.floor:
        assert cap / STEP_MAX * (1 - 1e-12) <= moved <= cap * STEP_MAX * (1 + 1e-12)
