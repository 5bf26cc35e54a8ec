"""S9, S12: the limit on what is in flight, one regime after the other."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from limiter.model.overload.in_flight_limit import (
    FEW,
    SPREAD_FIRST,
    SPREAD_MAX,
    SPREAD_MIN,
    LimitParams,
    LimitSample,
    LimitState,
    Trial,
    is_hung,
    limits,
    start,
    step,
)

PARAMS = LimitParams()
CYCLE_S = 0.1
RANKS = (0.0, 1.0, 2.0, 4.0)


def sample(
    *, answered: float = 5.0, late: float = 0.0, refused: float = 0.0, mean_s: float = 0.2, in_flight: float = 10.0
) -> LimitSample:
    """100 ms of a backend that answers 50 a second, at a target of 1 s."""
    return LimitSample(CYCLE_S, in_flight, answered, late, refused, answered * mean_s, 1.0)


CALM = sample()
BUSY = sample(refused=5, mean_s=0.6, in_flight=37)
LATE = sample(refused=5, late=2, mean_s=0.9, in_flight=60)


def run(samples: Iterable[LimitSample], state: LimitState | None = None, params: LimitParams = PARAMS) -> LimitState:
    state = state or start(params, 1.0)
    for one in samples:
        state = step(state, one, params)
    return state


def test_s8_a_bucket_begins_with_its_initial_limit_or_with_what_is_in_flight_already() -> None:
    assert start(PARAMS, 1.0).limit == 20
    assert start(PARAMS, 1.0, in_flight=70).limit == 70
    assert start(LimitParams(is_limited_at_first=False), 1.0).limit == math.inf


def test_q8_failures_are_late_however_fast_they_are() -> None:
    """The mean is that of health, so late answers do not count; failures do, and base is not learned from them."""
    healthy = run([CALM] * 200)
    assert run([sample(late=5)] * 50, healthy).rule == "calm"
    failing = run([sample(late=5, mean_s=0.01)._replace(failed=5)] * 50, healthy)
    assert failing.rule == "cut"
    assert failing.base_s == healthy.base_s


def test_calm_keeps_head_room_above_what_is_served() -> None:
    """50 a second and a target of 1 s: 1.5 · 50 · 1 s · (1 − 0.25)."""
    state = run([CALM] * 100)
    assert state.rule == "calm"
    assert state.limit == pytest.approx(56.25, rel=0.01)
    assert state.served_rate == pytest.approx(50)


def test_calm_never_falls_below_the_initial_limit() -> None:
    assert run([sample(answered=0.1, in_flight=0)] * 100).limit == pytest.approx(20, rel=0.01)


def test_refuse_follows_what_is_served_and_spreads_it_until_some_are_late() -> None:
    """Nobody is late: the spread falls, so more may be in flight; by 0.02 a second."""
    state = run([BUSY] * 100)
    assert state.rule == "refuse"
    assert state.spread == pytest.approx(SPREAD_FIRST - 0.2, abs=0.01)
    assert state.limit == pytest.approx(state.capacity * (1 - state.spread))


def test_the_spread_stays_where_just_the_allowed_share_is_late() -> None:
    state = run([sample(refused=5, late=0.5, mean_s=0.6, in_flight=37)] * 200)
    before = state.spread
    state = run([sample(refused=5, late=0.5, mean_s=0.6, in_flight=37)] * 100, state)
    assert state.spread == pytest.approx(before, abs=0.002)


def test_cut_brings_capacity_down_to_what_is_served() -> None:
    ahead = replace(run([BUSY] * 100), capacity=200.0)
    state = run([LATE] * 30, ahead)
    assert state.rule == "cut"
    assert state.capacity <= 50.1
    assert state.spread > ahead.spread


def test_one_late_answer_is_never_sure() -> None:
    state = run([sample(answered=0, in_flight=1)] * 50)
    state = run([sample(answered=1, late=1, mean_s=3.0, in_flight=0)], state)
    assert state.rule == "calm"


def test_late_answers_do_not_count_while_the_mean_is_no_longer_than_without_a_queue() -> None:
    """S12: what is slow by itself is no reason to refuse."""
    slow = run([sample(mean_s=0.8)] * 100)
    assert slow.base_s == pytest.approx(0.8)
    state = run([sample(mean_s=0.85, late=3)] * 100, slow)
    assert state.rule == "calm"
    assert state.late_share == 0


def test_base_is_learned_only_while_nobody_is_refused() -> None:
    assert run([BUSY] * 100).base_s == 0
    known = run([CALM] * 100)
    assert known.base_s == pytest.approx(0.2)
    assert run([BUSY] * 100, known).base_s == known.base_s
    down = run([sample(mean_s=0.1)] * 100, known).base_s
    up = run([sample(mean_s=0.3)] * 100, known).base_s
    assert 0.2 - down > up - 0.2 > 0, "quicker down than up"


def test_no_target_is_held_that_the_backend_needs_without_a_queue() -> None:
    state = start(PARAMS, 1.0, base_s=2.0)
    assert state.limit == 20
    assert step(replace(state, capacity=10.0), BUSY, PARAMS).limit == pytest.approx(50 * 3.0 * 0.75, rel=0.02)


def on_trial(**more: float) -> LimitState:
    """Down to a third of the 60 that were in flight."""
    state = replace(run([LATE] * 40), limit=18.0)
    return replace(state, trial=Trial(60.0, 50.0, 0.9, **more))


def test_a_trial_begins_when_answers_are_late() -> None:
    state = run([LATE] * 40)
    assert state.trial is not None
    assert state.limit >= 0.3 * state.trial.in_flight


def few(*, late: float, mean_s: float, answered: float = 2.0) -> LimitSample:
    return sample(answered=answered, late=late, mean_s=mean_s, in_flight=18, refused=5)


def test_s12_a_trial_is_futile_where_fewer_are_answered_as_slowly() -> None:
    state = on_trial(age_s=2.4, answered=18, late=18, seconds=16.2)
    state = step(state, few(late=2, mean_s=0.9), PARAMS)
    assert state.rule == "futile"
    assert state.base_s == pytest.approx(0.9)
    assert state.limit == pytest.approx(1.3 * 60)
    assert state.trial is None


def test_a_trial_is_cured_where_no_more_are_late() -> None:
    state = step(on_trial(age_s=2.4, answered=18, late=0, seconds=5), few(late=0, mean_s=0.3), PARAMS)
    assert state.trial is None
    assert state.rule != "futile"


def test_a_trial_goes_deeper_where_fewer_help_but_not_enough() -> None:
    state = on_trial(age_s=2.4, answered=18, late=18, seconds=7)
    state = step(state, few(late=5, mean_s=0.4, answered=5), PARAMS)
    assert state.trial is not None
    assert state.trial.in_flight == 18


def test_a_long_sample_gives_a_trial_up_and_moves_the_spread_as_far_as_a_second() -> None:
    state = on_trial()
    long = LimitSample(5.0, 18, 100, 10, 50, 60, 1.0)
    assert step(state, long, PARAMS).trial is None
    assert abs(step(state, long, PARAMS).spread - state.spread) <= 0.02


def test_an_idle_bucket_keeps_its_limit_and_begins_its_averages_again() -> None:
    state = run([sample(answered=0, in_flight=0)] * 50, run([BUSY] * 100))
    assert state.known_s == CYCLE_S
    assert state.served_rate == 0
    assert state.limit > 20


def test_f_p11_some_in_flight_and_nobody_answered_for_twice_the_target_is_hung() -> None:
    waiting = sample(answered=0, in_flight=FEW)
    state = run([waiting] * 19, run([CALM] * 30))
    assert not is_hung(state, FEW, 1.0)
    state = run([waiting] * 2, state)
    assert is_hung(state, FEW, 1.0)
    assert not is_hung(state, FEW - 1, 1.0)
    assert not is_hung(run([CALM], state), FEW, 1.0)
    assert not is_hung(run([sample(answered=0, in_flight=0)] * 100), 0, 1.0), "nobody waits"


@pytest.mark.parametrize(
    ("asking", "expected"),
    [
        ((True, True, True, True), (100, 90, 80, 70)),
        ((False, True, False, True), (100, 100, 90, 90)),
        ((False, False, False, True), (100, 100, 100, 100)),
        ((True, False, False, True), (100, 90, 90, 90)),
    ],
)
def test_s8_each_class_that_asks_keeps_a_tenth_from_those_below(
    asking: tuple[bool, ...], expected: tuple[float, ...]
) -> None:
    assert limits(100, asking, RANKS) == expected


def test_classes_of_one_rank_share_one_limit_and_nobody_has_none() -> None:
    assert limits(100, (True,) * 4, (1.0, 1.0, 1.0, 1.0)) == (100, 100, 100, 100)
    assert limits(1, (True,) * 4, RANKS) == (1, 1, 1, 1)
    assert limits(5, (True,) * 4, RANKS) == (5, 4, 3, 2)


def test_s8_the_initial_limit_is_divided_over_the_partitions() -> None:
    assert LimitParams(initial=20).divided(4).initial == 5
    assert LimitParams(initial=2).divided(4).initial == 1
    assert PARAMS.divided(1) is PARAMS


BROKEN = [math.nan, math.inf, -1.0, 1e300]


@pytest.mark.parametrize("field", LimitSample._fields)
@pytest.mark.parametrize("wrong", BROKEN)
def test_f_p8_what_is_no_number_holds(field: str, wrong: float) -> None:
    state = run([BUSY] * 30)
    if field in ("elapsed_s", "target_s") and wrong == 1e300:
        return  # a long time is a time
    assert step(state, CALM._replace(**{field: wrong}), PARAMS) == state


wild = st.floats() | st.floats(0, 1e6) | st.just(0.0)
samples = st.builds(LimitSample, st.floats(0.001, 100) | wild, wild, wild, wild, wild, wild, st.floats(0.0001, 3600))


@given(st.lists(samples, max_size=30), st.booleans())
def test_the_limit_is_at_least_one_whatever_is_told(history: list[LimitSample], is_limited: bool) -> None:
    params = LimitParams(is_limited_at_first=is_limited)
    state = start(params, 1.0)
    for one in history:
        state = step(state, one, params)
        assert state.limit >= 1
        assert SPREAD_MIN <= state.spread <= SPREAD_MAX
        assert state.capacity >= 0
        assert not any(map(math.isnan, (state.limit, state.base_s, state.served_rate, state.late_rate)))
