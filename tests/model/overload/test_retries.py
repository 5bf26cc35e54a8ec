import pytest

from limiter.model.overload.retries import ATTEMPTS_MIN, HALF_LIFE_S, RetryMeter, RetryMeters


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


def test_g6_the_retries_on_one_bucket_say_nothing_of_another() -> None:
    meters: RetryMeters[str] = RetryMeters()
    for _ in range(100):
        meters.count("slot", ["noisy"], 2, 0.0)
        meters.count("slot", ["quiet"], 1, 0.0)
        meters.count("elsewhere", ["noisy"], 1, 0.0)
    assert meters.among("slot", ["noisy", "quiet"]) == {"noisy"}
    assert not meters.too_many("elsewhere", "noisy")


def test_buckets_that_nobody_retries_on_are_not_remembered() -> None:
    meters: RetryMeters[str] = RetryMeters()
    meters.count("slot", ["one", "two"], 1, 0.0)
    assert not meters.known


def test_first_attempts_count_once_a_bucket_has_a_meter() -> None:
    meters: RetryMeters[str] = RetryMeters()
    for _ in range(30):
        meters.count("slot", ["b"], 3, 0.0)
    for _ in range(100):
        meters.count("slot", ["b"], 1, 0.0)
    assert not meters.too_many("slot", "b")


def test_the_number_of_meters_is_bounded_and_the_latest_retried_stay() -> None:
    meters: RetryMeters[int] = RetryMeters(most=10)
    meters.count(0, ["kept"], 2, 0.0)
    for number in range(100):
        meters.count(number, ["b"], 2, 0.0)
        meters.count(0, ["kept"], 2, 0.0)
    assert len(meters.known) == 10
    assert (0, "kept") in meters.known
