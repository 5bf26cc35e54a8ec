"""Amounts as people write them (W2), and what is no amount."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.quantity import ALLOWED, parse, units


@pytest.mark.parametrize(
    ("written", "at_100"),
    [
        (50, 50), (0.5, 0.5), (0, 0), (-20, -20), ("50", 50), ("+50", 50), ("-50", -50), (".5", 0.5), ("5.", 5),
        ("1e3", 1000), ("1E3", 1000), (" 50 ", 50),
        ("500ms", 50), ("60s", 6000), ("5m", 30_000), ("1h", 360_000), ("1d", 8_640_000), ("100us", 0.01),
        ("500MS", 50), ("5%", 5), ("100%", 100), ("150%", 150), ("-20%", -20), ("0.1%", 0.1),
    ],
)  # fmt: skip
def test_w2_units_time_and_share_at_100_a_second(written: float | str, at_100: float) -> None:
    assert units(written, rate=100) == pytest.approx(at_100, rel=1e-15)


def test_w2_five_percent_of_a_hundred_is_five_to_the_bit() -> None:
    assert units("5%", rate=100) == 5
    assert units("500ms", rate=100) == 50


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e9))
def test_a_plain_number_does_not_depend_on_the_rate(number: float, rate: float) -> None:
    assert units(number, rate=rate) == units(repr(number), rate=rate) == number


@pytest.mark.parametrize(
    "written", ["", " ", "ms", "%", "5 ms", "5 %", "5%%", "5mss", "5w", "1,5", "0x10", "five", "1e", "--5", "٣", "5\n5"]
)
def test_other_text_is_shown_with_what_is_allowed(written: str) -> None:
    with pytest.raises(ValueError, match="found") as refused:
        parse(written)
    assert str(refused.value) == f"found {written!r}; allowed: {ALLOWED}"


@pytest.mark.parametrize("written", [True, False, None, [], {"units": 5}, b"5"])
def test_a_value_that_is_neither_number_nor_text_is_no_amount(written: object) -> None:
    """F-V4: a boolean is no number."""
    with pytest.raises(ValueError, match="allowed: a number of units"):
        parse(written)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", [math.inf, -math.inf, math.nan, "1e400", "-1e400ms", "1e999%"])
def test_a_number_that_is_not_finite_is_no_amount(written: float | str) -> None:
    """F-V2."""
    with pytest.raises(ValueError, match="the number must be finite"):
        parse(written)


@pytest.mark.parametrize("written", ["inf", "nan", "Infinity"])
def test_names_of_numbers_are_no_numbers(written: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        parse(written)


def test_only_short_texts_are_remembered() -> None:
    """F-H10: an amount may be as long as a request's body."""
    quantity._known.cache_clear()
    assert parse("1." + "0" * 100_000 + "s") == parse("1.0s") == (1.0, "s")
    assert quantity._known.cache_info().currsize == 1
    for number in range(2 * quantity.TEXTS_KEPT):
        parse(f"{number}s")
    assert quantity._known.cache_info().currsize == quantity.TEXTS_KEPT
