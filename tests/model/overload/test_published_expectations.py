"""Q2, Q3, Q5 by the published rules, which stay selectable (S10)."""

import math
import sys
from dataclasses import replace as replace_params

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from limiter.model.overload.expectations import ExpectationParams, ExpectationSample, Mode, Rules
from limiter.model.overload.published_expectations import PublishedState, start, step

DAMPED = ExpectationParams(rules=Rules.PUBLISHED)
IDEAL = ExpectationParams(mode=Mode.IDEAL, rules=Rules.PUBLISHED)
BAD = ExpectationSample(1.0, settled=100, missed=12, slack_min_ms=-50)
FINE = ExpectationSample(1.0, settled=100, missed=0, slack_min_ms=50)


def run(*samples: ExpectationSample, params: ExpectationParams = DAMPED, throttle: float = 0.0) -> PublishedState:
    state = replace(start(params), throttle=throttle)
    for sample in samples:
        state = step(state, sample, params)
    return state


def slack(slack_min_ms: float) -> ExpectationSample:
    return ExpectationSample(1.0, settled=100, slack_min_ms=slack_min_ms)


def test_the_defaults() -> None:
    assert (DAMPED.expected_latency_ms, DAMPED.threshold, DAMPED.window_s, DAMPED.interval_s) == (200, 0.05, 10, 1)
    assert (DAMPED.step_up, DAMPED.step_down, DAMPED.calm_intervals, DAMPED.initial) == (10, 1, 3, 0)
    assert (DAMPED.mode, DAMPED.ideal_band_ms) == (Mode.DAMPED, (5, 20))


@pytest.mark.parametrize(("missed", "overloaded"), [(0, False), (5, False), (5.01, True), (100, True)])
def test_q2_more_than_the_threshold_is_overload(missed: float, overloaded: bool) -> None:
    assert run(ExpectationSample(1.0, settled=100, missed=missed)).overloaded is overloaded


def test_q2_the_share_is_of_the_whole_window() -> None:
    once = ExpectationSample(1.0, settled=100, missed=40, slack_min_ms=-1)
    assert not run(*[FINE] * 7, once).overloaded
    assert run(*[FINE] * 6, once).overloaded
    assert run(once, *[FINE] * 6).overloaded
    assert not run(once, *[FINE] * 7).overloaded


def test_q2_what_is_older_than_the_window_is_forgotten() -> None:
    flood = ExpectationSample(1.0, settled=10_000, missed=10_000, slack_min_ms=-1)
    assert run(flood, *[FINE] * 9).overloaded
    assert not run(flood, *[FINE] * 10).overloaded


def test_q3_each_overloaded_interval_adds_a_large_step() -> None:
    assert [run(*[BAD] * n).throttle for n in range(4)] == [0, 10, 20, 30]


def test_q3_small_steps_out_after_calm_intervals() -> None:
    short = replace_params(DAMPED, window_s=1)
    throttles = [run(*[BAD] * 3, *[FINE] * n, params=short).throttle for n in range(7)]
    assert throttles == [30, 30, 30, 30, 29, 28, 27]


def test_q3_calm_must_be_consecutive() -> None:
    short = replace_params(DAMPED, window_s=1)
    assert run(BAD, FINE, FINE, FINE, BAD, FINE, FINE, FINE, params=short).throttle == 20


def test_q3_never_below_the_initial_value() -> None:
    params = ExpectationParams(initial=3)
    assert start(params).throttle == 3
    assert run(*[FINE] * 20, params=params, throttle=5).throttle == 3


def test_the_throttle_is_bounded() -> None:
    assert run(*[BAD] * 50).throttle == 100
    assert run(*[BAD] * 50, params=ExpectationParams(throttle_max=25)).throttle == 25


@pytest.mark.parametrize(
    ("slack_ms", "throttle", "rule"),
    [(4.9, 50.25, "tighten"), (5, 50, "hold"), (20, 50, "hold"), (20.1, 49.75, "loosen"), (-3, 50.25, "tighten")],
)  # fmt: skip
def test_q5_the_throttle_follows_the_slack(slack_ms: float, throttle: float, rule: str) -> None:
    state = run(slack(slack_ms), params=IDEAL, throttle=50)
    assert (state.throttle, state.reason and state.reason.rule) == (throttle, rule)


def test_q5_overload_takes_the_large_step_here_too() -> None:
    assert run(BAD, params=IDEAL, throttle=50).throttle == 60


def test_q5_the_least_slack_of_the_window_counts() -> None:
    state = run(slack(10), slack(25), params=IDEAL, throttle=50)
    assert state.throttle == 50
    assert run(slack(10), *[slack(25)] * 10, params=IDEAL, throttle=50).throttle == 49.75


def test_q5_who_serves_nobody_loosens() -> None:
    assert run(ExpectationSample(1.0), params=IDEAL, throttle=100).throttle == 99.75


def test_q6_changed_bounds_reach_a_live_throttle() -> None:
    state = run(*[BAD] * 5)
    assert step(state, FINE, ExpectationParams(throttle_max=20)).throttle == 20


def test_cycles_make_intervals() -> None:
    part = ExpectationSample(0.1, settled=10, missed=2, slack_min_ms=-1)
    assert run(*[part] * 9).throttle == 0
    assert run(*[part] * 10).throttle == 10
    assert run(*[part] * 20).throttle == 20


def test_a_bucket_that_nobody_looked_at_is_calm_meanwhile() -> None:
    late = ExpectationSample(60.0)
    short = replace_params(DAMPED, window_s=1)
    state = run(*[BAD] * 3, late, params=short)
    # Three are calm, the others lower the throttle by one each.
    assert state.throttle == 0
    assert run(*[BAD] * 3, ExpectationSample(20.0), params=short).throttle == 30 - (20 - 3)
    assert not state.overloaded


@pytest.mark.parametrize(
    "sample",
    [
        ExpectationSample(math.nan, settled=1, missed=1),
        ExpectationSample(-1.0),
        ExpectationSample(1.0, settled=math.inf, missed=1),
        ExpectationSample(1.0, settled=1, missed=math.nan),
        ExpectationSample(1.0, settled=1, missed=1, slack_min_ms=math.nan),
    ],
)
def test_f_p8_what_is_no_number_holds(sample: ExpectationSample) -> None:
    state = run(BAD, BAD)
    assert replace(step(state, sample, DAMPED), reason=state.reason) == state


@pytest.mark.parametrize(
    ("samples", "params", "words"),
    [
        ([BAD, BAD], DAMPED, "12 % missed 200 ms (threshold 5 %): M 10 → 20"),
        ([BAD, FINE], DAMPED, "6 % missed 200 ms (threshold 5 %): M 10 → 20"),
        ([FINE], DAMPED, "0 % missed 200 ms (threshold 5 %), calm for 1: M stays 0"),
        ([slack(3)], IDEAL, "least slack 3 ms (band 5 to 20 ms): M 0 → 0.25"),
        ([ExpectationSample(1.0)], IDEAL, "nobody was served (band 5 to 20 ms): M stays 0"),
    ],
)  # fmt: skip
def test_r11_the_reason_is_told_in_words(
    samples: list[ExpectationSample], params: ExpectationParams, words: str
) -> None:
    assert str(run(*samples, params=params).reason) == words


def test_no_reason_without_a_decision() -> None:
    assert run(BAD._replace(elapsed_s=0.1)).reason is None


wild = st.floats() | st.floats(0, 1e6)
samples = st.builds(
    ExpectationSample, st.floats(0, 100) | wild, settled=wild, missed=wild, slack_min_ms=wild, seconds=wild
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
    ideal_step=st.floats(0.01, 1),
)


@given(parameters, st.lists(samples, max_size=30))
def test_the_throttle_stays_in_its_bounds_whatever_is_told(
    params: ExpectationParams, history: list[ExpectationSample]
) -> None:
    state = start(params)
    for sample in history:
        before = state.throttle
        state = step(state, sample, params)
        assert params.initial <= state.throttle <= params.throttle_max
        assert state.throttle - before <= max(params.step_up, params.ideal_step) * max(1.0, sample.elapsed_s + 1)
        assert len(state.intervals) <= params.window_intervals
        assert state.open_s < params.interval_s
        assert str(state.reason)


@pytest.mark.parametrize(
    "params", [DAMPED, IDEAL, replace_params(DAMPED, interval_s=0.1)], ids=["damped", "ideal", "short"]
)
@pytest.mark.parametrize(
    "sample",
    [
        ExpectationSample(sys.float_info.max),
        ExpectationSample(sys.float_info.max, settled=1, missed=1),
        ExpectationSample(1.0, settled=sys.float_info.max, missed=sys.float_info.max),
        ExpectationSample(1.0, settled=1, seconds=sys.float_info.max),
    ],
)
def test_f_p8_a_huge_finite_number_is_judged_like_a_large_one_or_not_at_all(
    params: ExpectationParams, sample: ExpectationSample
) -> None:
    """F-P8: a time of 1.8e308 s overflowed, and so did two such counts in one window."""
    state = run(sample, sample, sample, params=params)
    assert params.initial <= state.throttle <= params.throttle_max
    assert state.open_s < params.interval_s
