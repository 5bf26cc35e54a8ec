import pytest

from limiter.model.overload.retries import ATTEMPTS_MIN, HALF_LIFE_S, RetryMeter


def test_g6_a_large_share_of_retries_is_too_many() -> None:
    meter = RetryMeter()
    for number in range(100):
        meter.count(2 if number % 2 else 1, now_s=1.0)
    assert meter.too_many


def test_a_few_retries_are_not() -> None:
    meter = RetryMeter()
    for number in range(100):
        meter.count(2 if number % 10 == 0 else 1, now_s=1.0)
    assert not meter.too_many


def test_with_few_attempts_a_share_says_nothing() -> None:
    meter = RetryMeter()
    for _ in range(int(ATTEMPTS_MIN) - 1):
        meter.count(2, now_s=1.0)
    assert not meter.too_many


def test_old_attempts_are_forgotten_by_half() -> None:
    meter = RetryMeter()
    meter.count(1, now_s=1.0)
    for _ in range(63):
        meter.count(2, now_s=1.0)
    meter.count(1, now_s=1.0 + HALF_LIFE_S)
    assert meter.attempts == pytest.approx(33)
    assert meter.retries == pytest.approx(31.5)
