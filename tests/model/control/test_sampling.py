"""Samples: what two readings of a bucket's counters tell, and when they tell nothing."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from limiter.model.bucket.bucket import Record, fresh
from limiter.model.control.sampling import STALE_S, Counters, Sample, difference, has_begun_again, read
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy

BUCKET = fresh(Limit(read_policy({"name": "p", "rate": 100})).params(0), 0)
BEFORE = Counters(1e6, 100.0, 80.0, 20.0, 80.0, 300.0, 2000.0, 75.0)


def later(**added: float) -> Counters:
    return structs.replace(BEFORE, **{name: getattr(BEFORE, name) + more for name, more in added.items()})


def sample(**added: float) -> Sample:
    found = difference(BEFORE, later(read_us=100_000.0, **added))
    assert found is not None
    return found


def test_a_sample_is_what_was_added() -> None:
    found = sample(requests=10, admitted=6, refused=4, work_charged=6, work_settled=24, work_squared=100, settles=5)
    assert found == Sample(0.1, 10, 6, 4, 24, 5, 100, is_reported=True)
    assert found.is_telling


def test_a_bucket_forgotten_and_begun_anew_counts_from_zero() -> None:
    found = difference(BEFORE, Counters(1.1e6, 3.0, 2.0, 1.0, 2.0, 8.0, 34.0, 2.0))
    assert found == Sample(0.1, 3, 2, 1, 8, 2, 34, is_reported=True)


def test_a_record_that_began_again_is_told_from_one_that_goes_on() -> None:
    assert has_begun_again(BEFORE, Counters(1.1e6, 3.0, 2.0, 1.0, 2.0, 8.0, 34.0, 2.0))
    assert not has_begun_again(BEFORE, later(read_us=100_000.0, requests=1, admitted=1))


def test_the_time_before_anybody_asked_is_told_apart() -> None:
    found = difference(BEFORE, later(read_us=5e6, requests=10, admitted=10), idle_s=4.9)
    assert found is not None
    assert found.elapsed_s == pytest.approx(0.1)
    assert found.idle_s == 4.9


def test_a_slow_bucket_has_more_time() -> None:
    assert difference(BEFORE, later(read_us=90e6, requests=1)) is None
    assert difference(BEFORE, later(read_us=90e6, requests=1), stale_s=100.0) is not None


def test_what_was_charged_stands_for_work_that_nobody_ever_reports() -> None:
    silent = structs.replace(BEFORE, settles=0.0, work_settled=0.0, work_squared=0.0)
    found = difference(silent, structs.replace(silent, read_us=1.1e6, admitted=84.0, work_charged=92.0))
    assert found is not None
    assert (found.work, found.settles, found.is_reported) == (12.0, 4.0, False)


def test_work_charged_means_nothing_once_work_was_reported() -> None:
    assert sample(admitted=5, work_charged=50).work == 0


def test_a_final_settle_below_the_progress_before_it_is_no_negative_work() -> None:
    assert sample(work_settled=-10, settles=1).work == 0


def test_refusals_alone_tell_nothing_of_work() -> None:
    assert not sample(requests=5, refused=5).is_telling
    assert sample(work_settled=1).is_telling, "progress"
    assert sample(settles=1).is_telling, "work of nothing"


@pytest.mark.parametrize("elapsed_us", [0.0, -1.0, -1e9, STALE_S * 1e6 + 1])
def test_f_p8_readings_without_time_between_or_too_far_apart_are_no_sample(elapsed_us: float) -> None:
    """F-P8: stale statistics hold the last value."""
    assert difference(BEFORE, later(read_us=elapsed_us)) is None


def test_f_p8_a_bucket_that_is_absent_has_no_reading() -> None:
    assert read(None, 0.0) is None


@pytest.mark.parametrize("field", [name for name in Counters.__struct_fields__ if name != "read_us"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_f_p8_a_counter_that_is_no_number_makes_no_reading(field: str, value: float) -> None:
    broken: Record = replace(BUCKET, **{field: value})  # type: ignore[arg-type]
    assert read(broken, 0.0) is None


def test_reading_takes_the_counters_as_they_are() -> None:
    counted = replace(
        BUCKET, requests=9.0, admitted=8.0, refused=1.0, work_charged=8.0, work_settled=7.0,
        work_squared=6.0, settles=5.0,
    )  # fmt: skip
    assert read(counted, 3.0) == Counters(3.0, 9.0, 8.0, 1.0, 8.0, 7.0, 6.0, 5.0)


counters = st.builds(
    Counters, st.floats(0, 1e9), *[st.floats(0, 1e9) for _ in range(len(Counters.__struct_fields__) - 1)]
)


@given(counters, counters)
def test_no_sample_counts_below_zero(then: Counters, now: Counters) -> None:
    found = difference(then, now)
    if found is not None:
        assert found.elapsed_s > 0
        assert min(found.requests, found.admitted, found.work, found.settles) >= 0
