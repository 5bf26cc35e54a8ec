"""G5: reported loads, smoothed; above the target the least critical are refused first."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.overload.utilisation import (
    CLASS_OCTAVES,
    UtilisationParams,
    UtilisationSample,
    UtilisationState,
    asked_order,
    level_max,
    refusal_share,
    step,
)
from limiter.model.policy.criticality import RANKS, Criticality, descending, shed_order

PARAMS = UtilisationParams()


def run(*loads: float, params: UtilisationParams = PARAMS) -> UtilisationState:
    state = UtilisationState()
    for load in loads:
        state = step(state, UtilisationSample(1.0, {"cpu": load}), params)
    return state


def shares(level: float) -> list[float]:
    return [refusal_share(level, RANKS[criticality], shed_order(RANKS)) for criticality in Criticality]


def test_loads_are_smoothed_exponentially() -> None:
    assert run(0.4).signals["cpu"].load == 0.4
    assert run(0.4, 0.8).signals["cpu"].load == pytest.approx(0.8 - 0.4 * math.exp(-1))


def test_smoothing_goes_by_time_not_by_reports() -> None:
    """Two reports half a second apart say as much as one for the whole second."""
    half = UtilisationSample(0.5, {"cpu": 0.8})
    twice = step(step(run(0.4), half, PARAMS), half, PARAMS)
    assert twice.signals["cpu"].load == pytest.approx(run(0.4, 0.8).signals["cpu"].load)


def test_cycles_without_a_report_hold_and_the_report_speaks_for_them() -> None:
    state = run(1.6)
    for _ in range(9):
        state = step(state, UtilisationSample(0.1, {}), PARAMS)
        assert state.level == run(1.6).level
    state = step(state, UtilisationSample(0.1, {"cpu": 1.6}), PARAMS)
    assert state.level == pytest.approx(run(1.6, 1.6).level)


def test_twice_the_target_is_one_octave() -> None:
    assert run(1.6).level == pytest.approx(0.25)
    assert run(0.8).level == 0
    assert run(0.4).level == 0


def test_at_the_target_the_level_stays() -> None:
    state = UtilisationState(level=3.0)
    assert step(state, UtilisationSample(1.0, {"cpu": 0.8}), PARAMS).level == 3.0


def test_below_the_target_it_falls() -> None:
    state = UtilisationState(level=3.0)
    assert step(state, UtilisationSample(1.0, {"cpu": 0.4}), PARAMS).level == pytest.approx(2.75)
    assert step(state, UtilisationSample(1.0, {"cpu": 0.0}), PARAMS).level == pytest.approx(2.0)


def test_the_busiest_signal_counts_against_its_own_target() -> None:
    params = UtilisationParams(targets={"queue_age_s": 0.1})
    state = step(UtilisationState(), UtilisationSample(1.0, {"cpu": 0.7, "queue_age_s": 0.2}), params)
    assert state.level == pytest.approx(0.25)
    assert str(state.reason) == "queue_age_s 0.2 (target 0.1): level 0 → 0.25"


def test_the_least_critical_are_refused_first() -> None:
    assert shares(0) == [0, 0, 0, 0]
    assert shares(1) == [0, 0, 0, 0.5]
    assert shares(CLASS_OCTAVES) == [0, 0, 0, 0.75]
    assert shares(CLASS_OCTAVES + 1) == [0, 0, 0.5, 0.875]
    assert shares(2 * CLASS_OCTAVES + 1) == [0, 0.5, 0.875, 1 - 1 / 32]


def test_the_most_critical_is_never_refused() -> None:
    assert refusal_share(level_max(shed_order(RANKS)), 0, shed_order(RANKS)) == 0
    assert level_max(shed_order(dict.fromkeys(Criticality, 0.0))) == 0


def test_classes_of_equal_rank_are_refused_alike() -> None:
    equal = {**RANKS, Criticality.CRITICAL: 4.0, Criticality.SHEDDABLE_PLUS: 4.0}
    assert shed_order(equal) == (4.0,)
    assert refusal_share(1, 4.0, shed_order(equal)) == 0.5


def test_classes_are_ordered_by_rank() -> None:
    assert descending(RANKS) == tuple(Criticality)
    assert shed_order(RANKS) == (4, 2, 1)


def test_f_p8_a_short_silence_holds_a_long_one_releases_slowly() -> None:
    state = UtilisationState(level=5.0)
    state = step(state, UtilisationSample(1.0, {"cpu": 0.8}), PARAMS)
    for _ in range(10):
        state = step(state, UtilisationSample(1.0, {}), PARAMS)
    assert state.level == 5.0
    state = step(state, UtilisationSample(1.0, {}), PARAMS)
    assert state.level == pytest.approx(4.75)
    assert str(state.reason) == "no signal: level 5 → 4.75"


@pytest.mark.parametrize("load", [math.nan, math.inf, -1.0])
def test_f_p8_a_load_that_is_no_number_is_a_silence(load: float) -> None:
    state = run(1.6)
    after = step(state, UtilisationSample(1.0, {"cpu": load}), PARAMS)
    assert (after.level, after.signals["cpu"].load) == (state.level, 1.6)


def test_it_is_above_its_target_until_the_load_has_fallen() -> None:
    assert run(1.0).is_refusing
    assert run(1.0).is_above
    fallen = run(*[1.6] * 5, *[0.4] * 6)
    assert fallen.is_refusing
    assert not fallen.is_above


def test_s8_the_level_does_not_climb_through_classes_in_which_nobody_asks() -> None:
    """Critical alone asks: the first octave is its own. With every class it would take five octaves and 17 s."""
    state, every = UtilisationState(), UtilisationState()
    for _ in range(4):
        state = step(state, UtilisationSample(1.0, {"cpu": 1.6}, [1.0]), PARAMS)
        every = step(every, UtilisationSample(1.0, {"cpu": 1.6}), PARAMS)
    order = asked_order(RANKS, [1.0])
    assert order == (1.0,)
    assert refusal_share(state.level, 1.0, order) == pytest.approx(0.5)
    assert refusal_share(every.level, 1.0, asked_order(RANKS)) == 0
    assert level_max(order) < level_max(shed_order(RANKS))


def test_where_nobody_asks_at_all_the_least_critical_is_meant() -> None:
    assert asked_order(RANKS, []) == (4.0,)
    assert asked_order(RANKS, [0.0]) == (4.0,)


samples = st.builds(
    UtilisationSample,
    st.floats(0, 30) | st.floats(),
    st.dictionaries(st.sampled_from(["cpu", "queue"]), st.floats() | st.floats(0, 10)),
)


@given(st.lists(samples, max_size=40))
def test_the_level_stays_in_its_bounds_whatever_is_told(history: list[UtilisationSample]) -> None:
    state = UtilisationState()
    for sample in history:
        before = state.level
        state = step(state, sample, PARAMS)
        assert 0 <= state.level <= level_max(shed_order(RANKS))
        assert abs(state.level - before) <= 1 + 1e-9
        assert all(math.isfinite(signal.load) for signal in state.signals.values())
        assert str(state.reason)


@given(st.floats(0, 100))
def test_refusal_rises_with_rank_and_level(level: float) -> None:
    found = shares(level)
    assert found == sorted(found)
    assert all(0 <= share <= 1 for share in found)
    assert all(lower <= higher for lower, higher in zip(found, shares(level + 1), strict=True))
