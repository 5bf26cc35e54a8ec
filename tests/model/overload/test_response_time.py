"""S1–S4: a percentile steers a rate; classes yield in order; cheaper work comes before refusals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, histogram_step
from limiter.model.overload.histogram import EMPTY, percentile
from limiter.model.overload.response_time import (
    ClassSample,
    ClassState,
    ResponseTimeParams,
    ResponseTimeSample,
    ResponseTimeState,
    smooth,
    step,
)
from limiter.model.policy.criticality import Criticality

PLUS, CRITICAL, SHEDDABLE_PLUS, SHEDDABLE = Criticality
PLAIN = ResponseTimeParams()
DEGRADING = ResponseTimeParams(degrade=True)
SLOW_MS, FINE_MS, FAST_MS = 3000.0, 800.0, 10.0


def latencies(latency_ms: float, number: int = 150) -> tuple[float, ...]:
    histogram = [0.0] * HISTOGRAM_STEPS
    histogram[histogram_step(latency_ms)] = float(number)
    return tuple(histogram)


def sample(elapsed_s: float = 1.0, refused: float = 0.0, **by_class: float) -> ResponseTimeSample:
    classes = {Criticality(name): ClassSample(latencies(ms), refused) for name, ms in by_class.items()}
    return ResponseTimeSample(elapsed_s, classes)


def at(rates: Mapping[Criticality, float], quality: float = 1.0) -> ResponseTimeState:
    return ResponseTimeState(classes={name: ClassState(rate=rate) for name, rate in rates.items()}, quality=quality)


def rates(state: ResponseTimeState) -> dict[Criticality, float]:
    return {name: one.rate for name, one in state.classes.items()}


def rules(state: ResponseTimeState) -> list[str]:
    return [f"{reason.criticality} {reason.rule}" for reason in state.reasons]


def run(
    state: ResponseTimeState, samples: Sequence[ResponseTimeSample], params: ResponseTimeParams = PLAIN
) -> ResponseTimeState:
    for one in samples:
        state = step(state, one, params)
    return state


def test_the_published_parameters_are_the_defaults() -> None:
    assert (PLAIN.percentile, PLAIN.nreq, PLAIN.timeout_s, PLAIN.alpha) == (90, 100, 1, 0.7)
    assert (PLAIN.err_d, PLAIN.err_i, PLAIN.adj_d, PLAIN.adj_i, PLAIN.c_i) == (0.0, -0.5, 1.2, 2.0, -0.1)
    assert (PLAIN.rate_min, PLAIN.rate_max, PLAIN.adjlo_d, PLAIN.lc_thresh) == (0.05, 5000, 10, 20)
    assert (PLAIN.target_ms, PLAIN.degrade) == (1000, False)


def test_s1_runs_after_nreq_samples_or_the_timeout() -> None:
    few = ResponseTimeSample(0.1, {CRITICAL: ClassSample(latencies(SLOW_MS, 50))})
    once = step(ResponseTimeState(), few, PLAIN)
    assert once.reasons == ()
    assert rules(step(once, few, PLAIN)) == ["critical cut"]
    slow = ResponseTimeSample(0.1, {CRITICAL: ClassSample(latencies(SLOW_MS, 1))})
    assert not run(ResponseTimeState(), [slow] * 9).reasons
    assert rules(run(ResponseTimeState(), [slow] * 10)) == ["critical cut"]


def test_s1_the_samples_between_two_runs_count_together() -> None:
    first = ResponseTimeSample(0.1, {CRITICAL: ClassSample(latencies(FAST_MS, 50))})
    second = ResponseTimeSample(0.1, {CRITICAL: ClassSample(latencies(SLOW_MS, 50))})
    state = run(ResponseTimeState(), [first, second])
    expected = percentile([a + b for a, b in zip(latencies(FAST_MS, 50), latencies(SLOW_MS, 50), strict=True)], 90)
    assert state.classes[CRITICAL].current_ms == expected
    assert state.classes[CRITICAL].pending == EMPTY


def test_s2_the_weight_is_on_the_old_value() -> None:
    assert smooth(1000, 2000, 0.7) == pytest.approx(1300)
    assert smooth(None, 2000, 0.7) == 2000


def test_both_conventions_of_smoothing_meet() -> None:
    """R1 puts its weight on the sample, S2 on the old value: S2's α is R1's 1 − a."""
    old, new, a = 1000.0, 2000.0, 0.7
    r1 = a * new + (1 - a) * old
    assert r1 == pytest.approx(1700)
    assert smooth(old, new, 1 - a) == pytest.approx(r1)
    assert smooth(old, new, a) != pytest.approx(r1)


def test_s2_above_the_target_the_rate_is_divided() -> None:
    assert rates(step(at({CRITICAL: 120}), sample(critical=SLOW_MS), PLAIN)) == {CRITICAL: pytest.approx(100)}


def test_s2_well_below_the_target_the_rate_rises_by_the_error() -> None:
    state = step(at({CRITICAL: 100}), sample(critical=FAST_MS), PLAIN)
    error = state.classes[CRITICAL].error
    assert error == pytest.approx(-0.99, abs=0.01)
    assert state.classes[CRITICAL].rate == pytest.approx(100 - (error + 0.1) * 2.0)


def test_s2_near_the_target_the_rate_holds() -> None:
    state = step(at({CRITICAL: 100}), sample(critical=FINE_MS), PLAIN)
    assert rates(state) == {CRITICAL: 100}
    assert rules(state) == ["critical hold"]


def test_s2_the_rate_has_bounds() -> None:
    assert rates(run(at({CRITICAL: 1}), [sample(critical=SLOW_MS)] * 20)) == {CRITICAL: 0.05}
    assert rates(run(at({CRITICAL: 4999.5}), [sample(critical=FAST_MS)] * 3)) == {CRITICAL: 5000}


def test_s8_a_class_begins_at_its_initial_rate() -> None:
    assert rates(step(ResponseTimeState(), sample(0.1), PLAIN)) == {}
    assert PLAIN.rate_initial == 100
    low = ResponseTimeParams(rate_initial=7, nreq=500)
    assert rates(step(ResponseTimeState(), sample(0.1, critical=FAST_MS), low)) == {CRITICAL: 7}


def test_f_p8_nothing_measured_holds() -> None:
    state = run(at({CRITICAL: 100}), [ResponseTimeSample(1.0, {})] * 5)
    assert rates(state) == {CRITICAL: 100}
    assert str(state.reasons[0]) == "critical: nothing was measured: 100 requests/s stay"


@pytest.mark.parametrize("elapsed_s", [math.nan, math.inf, -1.0])
def test_f_p8_a_time_that_is_no_number_holds(elapsed_s: float) -> None:
    state = at({CRITICAL: 100})
    assert step(state, sample(elapsed_s, critical=SLOW_MS), PLAIN) == state


def test_f_p8_a_histogram_of_no_numbers_holds() -> None:
    broken = ResponseTimeSample(1.0, {CRITICAL: ClassSample((math.nan,) * HISTOGRAM_STEPS, math.nan)})
    assert rates(step(at({CRITICAL: 100}), broken, PLAIN)) == {CRITICAL: 100}


def test_s3_lower_classes_yield_first() -> None:
    state = at({PLUS: 100, CRITICAL: 100, SHEDDABLE: 100})
    after = step(state, sample(critical=SLOW_MS, sheddable=FINE_MS), PLAIN)
    assert rates(after) == {PLUS: 100, CRITICAL: 100, SHEDDABLE: 10}
    assert "critical yield" in rules(after)


def test_s8_a_class_in_which_nobody_asks_shields_nobody() -> None:
    """Sheddable asked once and has a rate: critical is cut at once, not after it has yielded and twenty runs more."""
    after = step(at({CRITICAL: 120, SHEDDABLE: 100}), sample(critical=SLOW_MS), PLAIN)
    assert rates(after) == {CRITICAL: pytest.approx(100), SHEDDABLE: 100}


def test_s3_a_lower_class_above_its_target_is_cut_by_itself_alone() -> None:
    after = step(at({CRITICAL: 100, SHEDDABLE: 120}), sample(sheddable=SLOW_MS), PLAIN)
    assert rates(after) == {CRITICAL: 100, SHEDDABLE: pytest.approx(100)}


def test_s3_with_the_lower_at_the_floor_a_counter_rises_and_then_the_class_is_cut() -> None:
    state = at({CRITICAL: 120, SHEDDABLE: 0.05})
    late = sample(critical=SLOW_MS, sheddable=FINE_MS)
    counted = run(state, [late] * 19)
    assert counted.classes[CRITICAL].low_count == 19
    assert rates(counted)[CRITICAL] == 120
    cut = step(counted, late, PLAIN)
    assert rates(cut)[CRITICAL] == pytest.approx(100)
    assert rates(step(cut, late, PLAIN))[CRITICAL] == pytest.approx(100 / 1.2)


def test_s3_the_counter_begins_anew_once_the_class_is_back() -> None:
    counted = run(at({CRITICAL: 120, SHEDDABLE: 0.05}), [sample(critical=SLOW_MS, sheddable=FINE_MS)] * 19)
    back = run(counted, [sample(critical=FAST_MS)] * 10)
    assert back.classes[CRITICAL].low_count == 0


def test_s3_while_a_higher_class_is_above_lower_ones_may_not_be_raised() -> None:
    state = at({CRITICAL: 100, SHEDDABLE: 1})
    held = step(state, sample(critical=SLOW_MS, sheddable=FAST_MS), PLAIN)
    assert rates(held)[SHEDDABLE] == pytest.approx(0.1)
    assert "sheddable hold" in rules(held)
    calm = step(state, sample(critical=FINE_MS, sheddable=FAST_MS), PLAIN)
    assert "sheddable raise" in rules(calm)


def test_s3_a_higher_class_that_went_silent_blocks_nobody() -> None:
    fast = sample(sheddable=FAST_MS)
    state = run(at({CRITICAL: 100, SHEDDABLE: 1}), [sample(critical=SLOW_MS), fast, fast])
    assert "sheddable raise" in rules(state)


def test_s3_each_class_has_its_own_target() -> None:
    params = ResponseTimeParams(targets_ms={PLUS: 500})
    after = step(at({PLUS: 120, CRITICAL: 120}), sample(critical_plus=FINE_MS, critical=FINE_MS), params)
    assert rules(after) == ["critical_plus yield", "critical hold"]


def test_s3_classes_of_equal_rank_yield_to_nobody() -> None:
    params = ResponseTimeParams(ranks=dict.fromkeys(Criticality, 1.0))
    after = step(at({CRITICAL: 120, SHEDDABLE: 120}), sample(critical=SLOW_MS, sheddable=SLOW_MS), params)
    assert rates(after) == {CRITICAL: pytest.approx(100), SHEDDABLE: pytest.approx(100)}


def test_s4_quality_is_lowered_before_anybody_is_refused() -> None:
    state = run(at({CRITICAL: 120}), [sample(critical=SLOW_MS)] * 10, DEGRADING)
    assert state.quality == 0
    assert rates(state) == {CRITICAL: 120}
    after = step(state, sample(critical=SLOW_MS), DEGRADING)
    assert after.quality == 0
    assert rates(after) == {CRITICAL: pytest.approx(100)}


def test_s4_quality_has_a_floor() -> None:
    params = ResponseTimeParams(degrade=True, quality_min=0.75)
    state = run(at({CRITICAL: 120}), [sample(critical=SLOW_MS)] * 4, params)
    assert state.quality == 0.75
    assert rates(state)[CRITICAL] == pytest.approx(100)


def test_s4_it_comes_back_in_reverse_order() -> None:
    refusing = run(at({CRITICAL: 100}, quality=0.0), [sample(refused=5, critical=FAST_MS)] * 3, DEGRADING)
    assert refusing.quality == 0
    assert rates(refusing)[CRITICAL] > 104
    open_again = run(refusing, [sample(critical=FAST_MS)] * 5, DEGRADING)
    assert open_again.quality == pytest.approx(0.1)
    assert rates(open_again) == rates(refusing)
    assert run(open_again, [sample(critical=FAST_MS)] * 100, DEGRADING).quality == 1


def test_s4_another_class_that_is_refused_keeps_quality_low() -> None:
    state = at({CRITICAL: 100, SHEDDABLE: 1}, quality=0.5)
    both = ResponseTimeSample(
        1.0, {CRITICAL: ClassSample(latencies(FAST_MS)), SHEDDABLE: ClassSample(latencies(FAST_MS), 9)}
    )
    assert run(state, [both, both], DEGRADING).quality == pytest.approx(0.52)  # not yet known in the first run
    assert rules(step(step(state, both, DEGRADING), both, DEGRADING)) == ["critical raise", "sheddable raise"]


def test_s8_quality_comes_back_once_the_target_is_met() -> None:
    """Half below the target is not asked for."""
    near = run(at({CRITICAL: 100}, quality=0.5), [sample(critical=FINE_MS)] * 10, DEGRADING)
    assert near.quality == pytest.approx(0.7)


def test_s11_degradation_alone_refuses_nobody() -> None:
    alone = ResponseTimeParams(degrade=True, is_refusing=False)
    state = run(at({CRITICAL: 120}), [sample(critical=SLOW_MS)] * 30, alone)
    assert (state.quality, rates(state)) == (0, {CRITICAL: 120})


def test_s8_rates_are_divided_over_the_partitions() -> None:
    part = PLAIN.divided(4)
    assert (part.rate_initial, part.rate_max, part.rate_min, part.adj_i) == (25, 1250, 0.0125, 0.5)
    assert PLAIN.divided(1) is PLAIN


def test_s4_without_degrade_quality_is_whole() -> None:
    assert run(at({CRITICAL: 100}, quality=0.3), [sample(critical=SLOW_MS)] * 3).quality == 1


def test_the_reason_is_told_in_words() -> None:
    def told(state: ResponseTimeState, params: ResponseTimeParams = PLAIN, sheddable_ms: float = 0.0) -> str:
        late = {"critical": 1340.0} | ({"sheddable": sheddable_ms} if sheddable_ms else {})
        return str(step(state, sample(**late), params).reasons[0])

    shown = percentile(latencies(1340), 90)
    begin = f"critical: p90 {shown:.4g} ms (target 1000 ms): "
    assert told(at({CRITICAL: 120})) == begin + "120 → 100 requests/s"
    assert (
        told(at({CRITICAL: 120, SHEDDABLE: 5}), sheddable_ms=FINE_MS)
        == begin + "lower classes yield, 120 requests/s stay"
    )
    counted = told(at({CRITICAL: 120, SHEDDABLE: 0.05}), sheddable_ms=FINE_MS)
    assert counted == begin + "lower classes are at the floor (1), 120 requests/s stay"
    assert told(at({CRITICAL: 120}), DEGRADING) == begin + "quality 1 → 0.9"


def test_a_changed_policy_reaches_live_rates() -> None:
    state = at({CRITICAL: 4000})
    assert rates(step(state, sample(0.1), replace(PLAIN, rate_max=10, rate_initial=10))) == {CRITICAL: 10}


counts = st.one_of(st.just(0.0), st.floats(0, 1e6), st.sampled_from([math.nan, math.inf, -1.0]))
histograms = st.builds(latencies, st.floats(0, 1e6), st.integers(0, 500)) | counts.map(
    lambda number: (number,) * HISTOGRAM_STEPS
)
class_samples = st.builds(ClassSample, histograms, counts)
samples = st.builds(
    ResponseTimeSample,
    st.floats(0, 5) | st.floats(),
    st.dictionaries(st.sampled_from(Criticality), class_samples),
)


@given(st.booleans(), st.lists(samples, max_size=20))
def test_rates_and_quality_stay_in_their_bounds_whatever_is_told(
    degrade: bool, history: list[ResponseTimeSample]
) -> None:
    params = ResponseTimeParams(degrade=degrade)
    state = ResponseTimeState()
    for one in history:
        state = step(state, one, params)
        assert 0 <= state.quality <= 1
        for name, controller in state.classes.items():
            assert params.rate_min <= controller.rate <= params.rate_max
            assert controller.current_ms is None or math.isfinite(controller.current_ms)
            assert name in params.ranks
        assert all(str(reason) for reason in state.reasons)
