"""Q: whom the throttle refuses, how it is solved from what may be in flight, and how its steps are bounded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from limiter.model.overload.expectations import (
    ExpectationParams,
    ExpectationSample,
    ExpectationState,
    Mode,
    Rules,
    admitted,
    expected_ms,
    refusal_share,
    solve,
    start,
    step,
)
from limiter.model.policy.criticality import Criticality

DAMPED = ExpectationParams()
SHORT = ExpectationParams(window_s=1)
IDEAL = ExpectationParams(mode=Mode.IDEAL)
RANKS = (0.0, 1.0, 2.0, 4.0)
ALL = (100.0, 100.0, 100.0, 100.0)
CRITICAL = (0.0, 100.0, 0.0, 0.0)


def interval(
    *, missed: float = 0.0, mean_s: float = 0.1, settled: float = 100, asked: tuple[float, ...] = CRITICAL
) -> ExpectationSample:
    """A second of 100 requests."""
    return ExpectationSample(1.0, settled * mean_s, settled, missed, settled * mean_s, settled, asked)


FINE = interval()
BAD = interval(missed=12, mean_s=0.3)


def run(
    *samples: ExpectationSample, params: ExpectationParams = DAMPED, throttle: float = 0.0, healthy: int = 3
) -> ExpectationState:
    """Some healthy seconds, then a throttle, then the samples."""
    state = start(params)
    for _ in range(healthy):
        state = step(state, FINE, params)
    state = replace(state, throttle=throttle or state.throttle)
    for sample in samples:
        state = step(state, sample, params)
    return state


def test_the_defaults() -> None:
    assert (DAMPED.expected_latency_ms, DAMPED.threshold, DAMPED.window_s, DAMPED.interval_s) == (200, 0.05, 10, 1)
    assert (DAMPED.step_up, DAMPED.step_down, DAMPED.calm_intervals, DAMPED.initial) == (10, 1, 3, 0)
    assert (DAMPED.mode, DAMPED.rules, DAMPED.ideal_target, DAMPED.min_samples) == (
        Mode.DAMPED,
        Rules.BOUNDED,
        0.99,
        20,
    )


def test_q1_the_requests_own_expectation_wins() -> None:
    params = ExpectationParams(expected_by={"operation": {"report": 5000}, "client": {"mobile": 800}})
    both = {"operation": "report", "client": "mobile"}
    assert expected_ms(50, both, params) == 50
    assert expected_ms(0, both, params) == 0
    assert expected_ms(None, both, params) == 5000
    assert expected_ms(None, {"client": "mobile"}, params) == 800
    assert expected_ms(None, {"operation": "read"}, params) == 200


def test_q13_expectations_differ_by_class() -> None:
    params = ExpectationParams(expected_by={"criticality": {"sheddable": 2000}, "operation": {"report": 5000}})
    assert expected_ms(None, {}, params, Criticality.SHEDDABLE) == 2000
    assert expected_ms(None, {}, params, Criticality.CRITICAL) == 200
    assert expected_ms(None, {"operation": "report"}, params, Criticality.CRITICAL) == 5000
    assert expected_ms(None, {"criticality": "sheddable"}, params, Criticality.CRITICAL) == 200, "no dimension"


def test_q12_nobody_expects_less_than_the_policy_allows() -> None:
    params = ExpectationParams(expected_min_ms=150, expected_by={"operation": {"ping": 100}})
    assert expected_ms(0, {}, params) == 150
    assert expected_ms(400, {}, params) == 400
    assert expected_ms(None, {"operation": "ping"}, params) == 150


# The throttle


@pytest.mark.parametrize(
    ("throttle", "rank", "share"), [(10, 0, 0), (10, 1, 0.1), (10, 4, 0.4), (25, 4, 1), (90, 4, 1)]
)
def test_q4_a_rank_is_refused_in_m_times_p_percent(throttle: float, rank: float, share: float) -> None:
    assert refusal_share(throttle, rank) == pytest.approx(share)


def test_q4_rank_zero_is_never_refused_and_the_full_throttle_refuses_always() -> None:
    assert refusal_share(100, 0) == 0
    assert refusal_share(100, 1) == 1


@given(st.floats(0, 1e6), st.floats(0, 100), st.floats(0, 100))
def test_q4_who_has_the_greater_rank_is_refused_no_less(throttle: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= refusal_share(throttle, low) <= refusal_share(throttle, high) <= 1


@pytest.mark.parametrize(
    ("allowed", "throttle"), [(400, 0), (500, 0), (330, 10), (225, 25), (200, 100 / 3), (150, 50), (100, 100), (0, 100)]
)
def test_the_throttle_is_solved_exactly(allowed: float, throttle: float) -> None:
    """100 of each rank: rank 4 is refused wholly at 25, rank 2 at 50, rank 1 at 100, rank 0 never."""
    assert solve(ALL, allowed, RANKS) == pytest.approx(throttle)


rates = st.lists(st.floats(0, 1e5), min_size=4, max_size=4).map(tuple)


@given(rates, st.floats(0, 5e5))
def test_the_solution_lets_in_no_more_than_is_allowed(asked: tuple[float, ...], allowed: float) -> None:
    throttle = solve(asked, allowed, RANKS)
    let_in = admitted(throttle, asked, RANKS)
    assert let_in <= max(allowed, asked[0]) * (1 + 1e-9) + 1e-6
    if throttle > 0:
        assert admitted(throttle * 0.99, asked, RANKS) >= min(allowed, let_in) - 1e-6, "and it is the least that does"


# Mode damped


@pytest.mark.parametrize(("missed", "overloaded"), [(0, False), (5, False), (5.01, True), (100, True)])
def test_q2_more_than_the_threshold_is_overload(missed: float, overloaded: bool) -> None:
    state = run(interval(missed=missed, mean_s=0.3), params=ExpectationParams(window_s=1))
    assert state.overloaded is overloaded


def test_q2_the_share_is_of_the_whole_window() -> None:
    once = interval(missed=40, mean_s=0.3)
    assert run(once, *[FINE] * 6, healthy=2).overloaded is False, "two fine seconds came before"
    assert run(once, *[FINE] * 4, healthy=2).overloaded


def test_q10_a_raise_moves_at_most_a_fifth_of_what_is_let_in() -> None:
    """Published, M would be 10, 20, 30: of ten times the load that is 10 %, but of rank 4 it is all of them."""
    assert run(BAD, params=SHORT).throttle == 10
    low = interval(missed=12, mean_s=0.3, asked=(0.0, 0.0, 0.0, 100.0))
    assert run(low, params=SHORT).throttle == pytest.approx(5), "of rank 4 a step of 10 would refuse 40 %"
    assert run(low, low, params=SHORT).throttle == pytest.approx(9), "and then a fifth of the rest"


def test_q3_a_window_that_only_remembers_adds_nothing() -> None:
    state = run(*[BAD] * 6, FINE)
    assert state.overloaded
    assert state.reason is not None
    assert state.reason.rule == "wait"
    assert state.throttle == run(*[BAD] * 6).throttle


def test_q3_small_steps_out_after_calm_intervals() -> None:
    throttles = [run(BAD, *[FINE] * n, params=SHORT).throttle for n in range(7)]
    assert throttles[:4] == [10, 10, 10, 10]
    assert throttles[4:] == pytest.approx([9, 8, 7])


def test_q10_a_release_is_bounded_by_what_it_lets_in() -> None:
    """Nine tenths of rank 4 are refused: one step of M would let in 40 % more than before."""
    wave = (0.0, 0.0, 0.0, 1000.0)
    low = interval(asked=wave)
    state = replace(run(params=SHORT), throttle=22.5, calm=5, asked_rates=wave)
    state = step(state, low, SHORT)
    let_in = admitted(state.throttle, wave, RANKS)
    assert 22.5 - 1 < state.throttle < 22.5
    assert let_in == pytest.approx(110), "a hundredth of what is asked"


def test_q3_calm_must_be_consecutive() -> None:
    assert run(BAD, FINE, FINE, FINE, BAD, FINE, FINE, FINE, params=SHORT).throttle == 20


def test_q3_never_below_the_initial_value() -> None:
    params = ExpectationParams(initial=3)
    assert start(params).throttle == 3
    assert run(*[FINE] * 20, params=params, throttle=5).throttle == 3


def test_q8_fewer_answers_than_the_least_number_say_nothing() -> None:
    few = interval(missed=19, settled=19, mean_s=1.0)
    assert run(few, params=SHORT).throttle == 0
    assert run(interval(missed=20, settled=20, mean_s=1.0), params=SHORT).throttle > 0


def test_q8_admitted_requests_of_which_none_settles_are_an_overload() -> None:
    """F-P11: nothing was settled, and 300 are in flight for longer than expected."""
    silent = ExpectationSample(1.0, in_flight=300, admitted=0, asked=CRITICAL)
    state = run(silent, params=SHORT)
    assert state.is_hung
    assert state.overloaded
    assert state.throttle == 10
    young = ExpectationSample(1.0, in_flight=300, admitted=300, asked=CRITICAL)
    assert not run(young, params=SHORT).overloaded, "they may still come in time"


def test_q8_failures_are_missed_however_fast_they_are() -> None:
    """The mean is what it was in health, so load is not the cause of late answers; errors count all the same."""
    late = interval(missed=50)
    assert run(late, params=SHORT).throttle == 0
    failed = late._replace(failed=50)
    assert run(failed, params=SHORT).throttle == 10
    assert run(failed, params=SHORT).overloaded


def test_q8_fast_failures_do_not_make_answers_look_slow_afterwards() -> None:
    fast = interval(missed=100, mean_s=0.001)._replace(failed=100)
    assert run(*[fast] * 30).base_s == run().base_s


def test_s12_what_is_slow_without_load_is_not_missed() -> None:
    """A fifth of the answers are late while nobody is refused and the mean is in time: that is the backend's nature."""
    natural = interval(missed=20, mean_s=0.15)
    state = start(DAMPED)
    for _ in range(30):
        state = step(state, natural, DAMPED)
    assert state.throttle == 0
    assert state.base_s == pytest.approx(0.15)
    assert step(state, interval(missed=90, mean_s=0.3), replace_window(DAMPED)).throttle > 0


def replace_window(params: ExpectationParams) -> ExpectationParams:
    return ExpectationParams(window_s=params.interval_s)


def test_a_bucket_that_nobody_looked_at_is_calm_meanwhile() -> None:
    state = run(*[BAD] * 3, ExpectationSample(60.0), params=SHORT)
    assert state.throttle == 0
    assert not state.overloaded


def test_cycles_make_intervals() -> None:
    part = ExpectationSample(0.1, 3, 10, 2, 3.0, 10, (0.0, 10.0, 0.0, 0.0))
    assert run(*[part] * 9, params=SHORT).throttle == 0
    assert run(*[part] * 10, params=SHORT).throttle == 10


# Mode ideal


def ideal(
    *, missed: float = 0.0, mean_s: float = 0.17, refused: float = 0.0, in_flight: float = 51.0
) -> ExpectationSample:
    """100 ms of 300 answers per second, 600 of rank 1 asked."""
    return ExpectationSample(0.1, in_flight, 30, missed, 30 * mean_s, 30, (0.0, 60.0, 0.0, 0.0), refused)


def test_q9_the_ideal_mode_does_not_limit_before_answers_are_known() -> None:
    state = step(start(IDEAL), ideal(in_flight=1000), IDEAL)
    assert state.throttle == 0


def test_q9_m_is_computed_from_what_may_be_in_flight() -> None:
    state = start(IDEAL)
    for _ in range(50):
        state = step(state, ideal(), IDEAL)
    assert state.limit is not None
    limit = state.limit.limit
    full = step(state, ideal(in_flight=limit), IDEAL)
    assert full.throttle == pytest.approx(50, abs=2), "as many as are served: half of those that ask"
    above = step(state, ideal(in_flight=2 * limit), IDEAL)
    assert above.throttle > full.throttle
    assert step(state, ideal(in_flight=0), IDEAL).throttle < full.throttle


def test_q9_one_slow_answer_in_a_hundred_is_allowed() -> None:
    state = start(IDEAL)
    for cycle in range(200):
        state = step(
            state, ideal(missed=1.0 if cycle % 4 == 0 else 0.0, in_flight=40)._replace(asked=(0, 30, 0, 0)), IDEAL
        )
    assert state.throttle == 0


def test_r11_the_reason_is_told_in_words() -> None:
    assert str(run(BAD, params=SHORT).reason) == "12 % missed 200 ms (threshold 5 %): M 0 → 10"
    assert str(run(FINE, params=SHORT).reason) == "0 % missed 200 ms (threshold 5 %), calm for 4: M stays 0"
    state, told = start(IDEAL), []
    for cycle in range(200):
        late = cycle > 50
        state = step(state, ideal(missed=20.0 * late, mean_s=0.17 + 0.2 * late, in_flight=200 if late else 40), IDEAL)
        told += [str(state.reason)] if state.reason else []
    assert any("missed 200 ms (threshold 1 %)" in line and "may be in flight: M 0 → " in line for line in told)
    assert len(told) < 50, "not every cycle leaves one"


@pytest.mark.parametrize("params", [DAMPED, IDEAL], ids=["damped", "ideal"])
@pytest.mark.parametrize("field", ["elapsed_s", "in_flight", "settled", "missed", "seconds", "admitted", "refused"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_f_p8_what_is_no_number_holds(params: ExpectationParams, field: str, wrong: float) -> None:
    state = replace(run(BAD, params=params), reason=None)
    assert step(state, ExpectationSample(**FINE._asdict() | {field: wrong}), params) == state


wild = st.floats() | st.floats(0, 1e6)
samples = st.builds(
    ExpectationSample,
    st.floats(0, 100) | wild,
    *[wild] * 5,
    asked=st.tuples(wild, wild, wild, wild),
    refused=wild,
)
parameters = st.builds(
    ExpectationParams,
    mode=st.sampled_from(Mode),
    threshold=st.floats(0, 1),
    window_s=st.floats(1, 30),
    step_up=st.floats(2, 100),
    step_down=st.floats(0.01, 1),
    calm_intervals=st.integers(0, 5),
    initial=st.floats(0, 100),
)


@given(parameters, st.lists(samples, max_size=30))
def test_the_throttle_stays_in_its_bounds_whatever_is_told(
    params: ExpectationParams, history: list[ExpectationSample]
) -> None:
    state = start(params)
    for sample in history:
        state = step(state, sample, params)
        assert params.initial <= state.throttle <= max(params.initial, params.throttle_max)
        assert len(state.intervals) <= params.window_intervals
        assert state.open_s < params.interval_s
        assert state.reason is None or str(state.reason)
