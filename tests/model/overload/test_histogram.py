"""Percentiles from the latency histogram, and how far off they may be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, histogram_step
from limiter.model.overload.histogram import EDGES_MS, EMPTY, added, between, count, highest_ms, percentile


def counted(*latencies_ms: float) -> list[float]:
    histogram = [0.0] * HISTOGRAM_STEPS
    for latency_ms in latencies_ms:
        histogram[histogram_step(latency_ms)] += 1
    return histogram


def test_the_edges_are_where_the_steps_begin() -> None:
    assert (EDGES_MS[0], EDGES_MS[-1], len(EDGES_MS)) == (0.0, 2.0**22, HISTOGRAM_STEPS + 1)
    for step in range(1, HISTOGRAM_STEPS):
        assert histogram_step(EDGES_MS[step]) == step
        assert histogram_step(math.nextafter(EDGES_MS[step], 0)) == step - 1


def test_s7_answers_of_81_ms_are_not_taken_for_more_than_90() -> None:
    assert (percentile(counted(*[81.0] * 60), 90) or math.inf) < 90


def test_a_percentile_finds_the_step_by_rank() -> None:
    histogram = counted(*[10.0] * 90, *[1000.0] * 10)
    low, high = percentile(histogram, 90), percentile(histogram, 91)
    assert low is not None
    assert high is not None
    assert low <= 10 * 1.05
    assert high >= 1000 / 1.05


def test_nothing_counted_has_no_percentile() -> None:
    assert percentile(EMPTY, 90) is None
    assert percentile((), 90) is None
    assert highest_ms(EMPTY) is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_f_p8_a_count_that_is_no_number_spoils_the_histogram(wrong: float) -> None:
    assert percentile([wrong, *EMPTY[1:]], 90) is None
    assert count([5.0, wrong, *EMPTY[2:]]) == 0


def test_readings_differ_by_what_came_between() -> None:
    older, newer = counted(1, 2), counted(1, 2, 2, 300)
    assert between(older, newer) == tuple(counted(2, 300))
    assert added(older, between(older, newer)) == tuple(newer)
    assert between((), newer) == tuple(newer)


def test_a_bucket_that_began_anew_counts_from_nothing() -> None:
    assert between(counted(1, 1, 1), counted(1)) == tuple(counted(1))


@given(st.lists(st.floats(0.1, 3_600_000), min_size=1, max_size=200), st.floats(0.1, 100))
def test_s7_a_percentile_is_off_by_less_than_five_percent_from_a_tenth_of_a_millisecond_to_an_hour(
    latencies_ms: list[float], p: float
) -> None:
    told = percentile(counted(*latencies_ms), p)
    true = sorted(latencies_ms)[max(0, math.ceil(p * len(latencies_ms) / 100) - 1)]
    assert told is not None
    assert abs(told - true) <= 0.05 * true
    assert true <= (highest_ms(counted(*latencies_ms)) or 0)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_percentiles_rise(latencies_ms: list[float]) -> None:
    told = [percentile(counted(*latencies_ms), p) or 0 for p in range(1, 101)]
    assert told == sorted(told)
    assert 0 < told[0] <= told[-1] <= 2**22
