"""The cap of a request bucket: each rule with the sources' own figures, and what no input can make it do."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.bucket.bucket import fresh
from limiter.model.control.caps import STEP_MAX, CapParams, Reason, Rule, bounded, cap_params, start, step
from limiter.model.control.smoothing import Load
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy

PARAMS = CapParams(smallest_work=0.01)
REJECTING = 0.2


def after(cap: float, *, committed: float, work_rate: float, work_per_request: float, rejection_rate: float) -> float:
    load = Load(work_rate, work_per_request, rejection_rate)
    return step(cap, load, PARAMS, committed=committed)[1]


def rule_of(*, work_rate: float, rejection_rate: float) -> Rule:
    return step(20.0, Load(work_rate, 4.0, rejection_rate), PARAMS, committed=100.0)[0]


def test_r2_forty_units_too_many_at_four_a_request_lower_the_cap_by_3_33() -> None:
    """R2: X = 40, f = 4, n = 3 → −3.33 rps"""
    cap = after(20.0, committed=100, work_rate=140, work_per_request=4, rejection_rate=REJECTING)
    assert cap - 20 == pytest.approx(-3.33, abs=0.004)


def test_r3_raising_is_slower_than_lowering() -> None:
    """R3: Y/f/m, m = 4"""
    cap = after(20.0, committed=100, work_rate=60, work_per_request=4, rejection_rate=REJECTING)
    assert cap - 20 == pytest.approx(40 / 4 / 4)


@pytest.mark.parametrize("before", [1.0, 5.0, 500.0])
def test_r4_2500_units_a_second_at_500_a_request_set_six_whatever_the_cap_was(before: float) -> None:
    """R4: s·L/f, s = 1.2: L = 2500, f = 500 → 6 rps"""
    cap = after(before, committed=1000, work_rate=2500, work_per_request=500, rejection_rate=0)
    assert cap == pytest.approx(6.0)


def test_r8_a_cap_that_was_set_and_still_rejects_nothing_is_lowered() -> None:
    """Set again and again, it would stay a fifth above what is done, and limit nothing."""
    load = Load(work_rate=2500.0, work_per_request=500.0)
    rule, cap = step(6.0, load, PARAMS, committed=1000.0, was_set=True)
    assert rule == "lower"
    assert cap == pytest.approx(6 - 1500 / 500 / 3)


def test_r5_nothing_is_raised_without_rejections() -> None:
    assert after(20.0, committed=100, work_rate=1, work_per_request=4, rejection_rate=0.0) == 20.0
    assert after(20.0, committed=100, work_rate=1, work_per_request=4, rejection_rate=0.0009) == 20.0


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
    assert rule_of(work_rate=work_rate, rejection_rate=rejection_rate) == rule


@pytest.mark.parametrize(
    ("steering", "cap"), [({"initial": "C/F"}, 2.0), ({"initial": "C"}, 100.0), ({}, 30.0), ({"initial": 7}, 7.0)]
)
def test_r6_the_first_cap_is_c_over_f_or_c_or_a_share_of_c(steering: dict[str, object], cap: float) -> None:
    """R6: C/F, C, or b·C with b = 0.3 by default. The bucket begins with it."""
    document = {"name": "p", "rate": 100, "mechanism": "requests", "charge": "learned", "max_work": 50}
    policy = read_policy({**document, "steering": steering})
    assert fresh(Limit(policy).params(0), 0).rate == pytest.approx(cap)


@pytest.mark.parametrize(("work_per_request", "cap"), [(1.0, 100.0), (50.0, 2.0)])
def test_r8_a_hundred_units_are_a_hundred_requests_of_one_or_two_of_fifty(work_per_request: float, cap: float) -> None:
    """R8: C = 100. At the right cap neither rule moves it."""
    load = Load(work_rate=100.0, work_per_request=work_per_request, rejection_rate=REJECTING)
    assert start(load, CapParams(), committed=100.0) == cap
    assert step(cap, load, CapParams(), committed=100.0) == ("hold", cap)


def test_r9_each_partition_steers_by_its_own_share() -> None:
    """R9: 100 over ten partitions → 10 each."""
    committed = fresh(Limit(read_policy({"name": "p", "rate": 100}), partitions=10).params(0), 0).committed
    assert committed == pytest.approx(10.0)
    assert start(Load(work_per_request=1.0), CapParams(), committed=committed) == pytest.approx(10.0)


def test_r6_caps_stay_between_the_floor_and_c_over_the_smallest_work() -> None:
    params = CapParams(floor=0.5, smallest_work=2.0)
    assert bounded(0.0, params, committed=100.0) == 0.5
    assert bounded(1e9, params, committed=100.0) == 50.0
    assert bounded(0.2, params, committed=0.4) == 0.2, "the limit counts for more than the floor"


def test_f_p8_a_step_at_most_halves_or_doubles() -> None:
    assert after(100, committed=100, work_rate=1e9, work_per_request=1, rejection_rate=1) == 50.0
    assert after(2, committed=1000, work_rate=0, work_per_request=1, rejection_rate=1) == 4.0


@pytest.mark.parametrize("work_rate", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("work_per_request", [None, math.nan, math.inf, 4.0])
def test_f_p8_absent_or_not_a_number_holds_the_cap(work_rate: float | None, work_per_request: float | None) -> None:
    load = Load(work_rate, work_per_request, 1.0)
    assert step(20.0, load, PARAMS, committed=100.0) == ("hold", 20.0)


def test_f_p8_an_average_of_the_rejection_rate_that_is_no_number_raises_nothing() -> None:
    assert step(20.0, Load(1.0, 4.0, math.nan), PARAMS, committed=100.0) == ("hold", 20.0)


@pytest.mark.parametrize("cap", [math.nan, math.inf, -1.0, 0.0])
def test_f_p8_a_cap_that_is_none_begins_anew(cap: float) -> None:
    assert step(cap, Load(1.0, 4.0, 1.0), PARAMS, committed=100.0) == ("start", 25.0)
    assert step(cap, Load(), PARAMS, committed=100.0) == ("start", PARAMS.floor)


def test_requests_of_no_work_cannot_raise_the_cap_beyond_its_bound() -> None:
    assert after(9_000.0, committed=100, work_rate=0, work_per_request=0, rejection_rate=1) == 10_000.0


positive = st.floats(1e-6, 1e9)
loads = st.builds(
    Load,
    st.none() | st.floats(0, 1e12) | st.sampled_from([math.nan, math.inf]),
    st.none() | st.floats(0, 1e12) | st.sampled_from([math.nan, math.inf]),
    st.floats(0, 1) | st.just(math.nan),
)
params = st.builds(CapParams, st.floats(1, 10), st.floats(1, 10), st.floats(1, 3), st.floats(1e-3, 1), positive)


@given(cap=st.floats() | positive, load=loads, params=params, committed=positive)
def test_r6_f_p8_no_input_moves_a_cap_out_of_its_bounds(
    cap: float, load: Load, params: CapParams, committed: float
) -> None:
    _, moved = step(cap, load, params, committed=committed)
    ceiling = committed / params.smallest_work
    assert min(params.floor, ceiling) <= moved <= ceiling
    assert moved > 0


@given(share=st.floats(0, 1), load=loads, params=params, committed=positive)
def test_f_p8_no_step_but_a_set_one_is_larger_than_its_bound(
    share: float, load: Load, params: CapParams, committed: float
) -> None:
    cap = bounded(share * committed / params.smallest_work, params, committed=committed)
    rule, moved = step(cap, load, params, committed=committed)
    if rule != "set":
        assert cap / STEP_MAX * (1 - 1e-12) <= moved <= cap * STEP_MAX * (1 + 1e-12)
    if rule == "hold":
        assert moved == cap
    if rule == "lower":
        assert moved <= cap
    if rule == "raise":
        assert moved >= cap


def test_a_policy_says_how_to_steer() -> None:
    steering = {"lower_cycles": 5, "raise_cycles": 6, "safety": 1.5, "floor": 0.2}
    policy = read_policy({"name": "p", "rate": 1, "mechanism": "auto", "steering": steering, "min_work": 3})
    assert cap_params(policy) == CapParams(5, 6, 1.5, 0.2, 3)
    assert cap_params(read_policy({"name": "p", "rate": 1})) == CapParams()


@pytest.mark.parametrize(
    ("fields", "floor", "first"),
    [
        ({"rate": 100}, 0.1, 30.0),
        ({"rate": 0.2}, 0.06, 0.06),
        ({"rate": "6/m"}, 0.03, 0.03),
        ({"rate": 100, "per": ["customer"], "rates": {"customer": {"slow": 0.2}}}, 0.06, 30.0),
        ({"rate": 1, "steering": {"floor": 0.5}}, 0.5, 0.5),
        ({"rate": 100, "steering": {"initial": 0.1}}, 0.1, 0.1),
    ],
)
def test_the_defaults_of_the_floor_and_of_the_first_cap_agree(
    fields: dict[str, Any], floor: float, first: float
) -> None:
    """R6: a cap that starts below the lowest there is would be lifted by the first cycle."""
    policy = read_policy({"name": "p", "mechanism": "requests", **fields})
    assert cap_params(policy).floor == pytest.approx(floor)
    assert Limit(policy).terms.cap == pytest.approx(first)


def test_w16_the_smallest_work_behind_a_token_does_not_go_by_weights() -> None:
    """A request of half the weight takes half a token."""
    weights = {"operation": {"read": 1, "write": 3}, "consistency": {"eventual": 0.5, "none": 0}}
    policy = {"name": "p", "rate": 1, "weights": weights, "mechanism": "auto"}
    assert read_policy(policy).smallest_work == 1.0
    assert read_policy(policy | {"min_work": 4}).smallest_work == 4.0


SPREAD = "140 ÷ 12.4 units/request, over some cycles"


@pytest.mark.parametrize(
    ("rule", "before", "after", "work_rate", "sentence"),
    [
        ("start", 0, 80.645, 0, "1000 units/s ÷ 12.4 units/request → 80.6 rps"),
        ("lower", 90, 86.2, 1140, f"1140 units/s, 140 above the rate: {SPREAD}: 90 → 86.2 rps"),
        ("raise", 70, 72.8, 860, f"860 units/s, 140 below the rate: {SPREAD}: 70 → 72.8 rps"),
        ("set", 500, 242, 2500, "2500 units/s ÷ 12.4 units/request, plus a margin: 500 → 242 rps"),
        ("hold", 80, 80, 500, "500 of 1000 units/s, 12.4 units/request: stays at 80 rps"),
    ],
)  # fmt: skip
def test_r11_each_rule_explains_itself_in_a_sentence(
    rule: Rule, before: float, after: float, work_rate: float, sentence: str
) -> None:
    assert Reason(0.0, 1000.0, work_rate, 12.4, 0.1, rule, before, after).sentence == sentence
