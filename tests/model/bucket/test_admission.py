"""The balance that a class needs in a bucket (W11), and the wait until it is there."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from limiter.model.bucket.admission import class_minimum, wait_us
from limiter.model.bucket.bucket import fresh, refill
from tests.support.operations import START_US, work_terms


@pytest.mark.parametrize(
    ("minimum", "reserve", "needed"),
    [(1, None, 1), (1, 50, 50), (1, 25, 25), (1, 0, 1), (1, -20, -20), (30, 25, 30), (-10, 0, 0), (-30, -20, -30)],
)
def test_w11_a_reserve_asks_for_more_and_a_negative_one_for_less(
    minimum: float, reserve: float | None, needed: float
) -> None:
    assert class_minimum(minimum, reserve) == needed


@given(st.floats(-1e6, 1e6), st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_w11_a_class_that_reserves_more_never_needs_less(minimum: float, reserves: list[float]) -> None:
    needed = [class_minimum(minimum, reserve) for reserve in sorted(reserves)]
    assert needed == sorted(needed)


@pytest.mark.parametrize(
    ("balance", "need", "expected_us"),
    [(5, 1, 0), (1, 1, 0), (0, 1, 10_000), (-100, 1, 1_010_000), (49, 50, 10_000), (0, 51, math.inf)],
)
def test_the_wait_is_what_is_missing_at_the_rate(balance: float, need: float, expected_us: float) -> None:
    assert wait_us(balance=balance, need=need, rate=100, capacity=50) == expected_us


def test_without_a_rate_the_wait_is_endless() -> None:
    assert wait_us(balance=0, need=1, rate=0, capacity=50) == math.inf


@given(balance=st.floats(-1e6, 50), need=st.floats(-1e3, 50), rate=st.floats(0.1, 1e6))
def test_after_the_wait_the_balance_suffices(balance: float, need: float, rate: float) -> None:
    assume(balance < need)
    record = fresh(work_terms(rate=rate, capacity=50), START_US)
    record.balance = balance
    waited_us = math.ceil(wait_us(balance=balance, need=need, rate=rate, capacity=50))
    refill(record, START_US + waited_us)
    assert record.balance == pytest.approx(need, abs=rate / 1e6 + 1e-9) or record.balance >= need
