"""The kinds of fields: the values of each, and the message for others. Amounts stay as they were written."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from limiter.model.bucket.block import AFTER_MAX
from limiter.model.bucket.in_flight import PLACES_MAX
from limiter.model.numbers import DIMENSIONS_MAX, LEAST, NUMBER_MAX
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.field_refusals import amount, is_number, is_stored, refuse
from limiter.model.policy.fields.patterns import LISTED_MAX, PATTERN_MAX, is_text
from limiter.model.policy.fields.shown import DIMENSION_NAME
from limiter.model.policy.period import Period
from limiter.model.policy.period import parse as parse_period

PARTITIONS_MAX = 1024
DESCRIPTION_MAX = 1000
ZONE_MAX = 64

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RATE = re.compile(
    r"(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)(?: ?/ ?(?P<unit>s|m|h|d))?", re.IGNORECASE
)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def is_name(value: str) -> bool:
    """True for a valid name of a policy or a namespace."""
    return _NAME.fullmatch(value) is not None


def _name(value: object) -> str:
    if not isinstance(value, str) or not is_name(value):
        raise refuse("a name of 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return value


def _dimension(value: object) -> str:
    if not isinstance(value, str) or not DIMENSION_NAME.fullmatch(value):
        raise refuse("the name of a dimension: 1 to 64 letters, digits, '_', '.' or '-', not beginning with a digit")
    return value


def _value(value: object) -> str:
    if not is_text(value, longest=PATTERN_MAX):
        raise refuse(f"a value of the dimension: text of at most {PATTERN_MAX} characters (a number in quotes)")
    return value


def _description(value: object) -> str:
    if not is_text(value, longest=DESCRIPTION_MAX):
        raise refuse(f"text of at most {DESCRIPTION_MAX} characters")
    return value


def rate_per_s(value: float | str) -> float:
    """Return units per second, from `100`, `100/s`, `6000/m`, `1000/h` or `5000/d`; NaN for anything else."""
    if isinstance(value, str):
        match = _RATE.fullmatch(value.strip())
        return float(match["number"]) / _SECONDS[(match["unit"] or "s").lower()] if match else math.nan
    return float(value)


def _rate(value: object) -> float | str:
    number = rate_per_s(value) if isinstance(value, str) else value
    if not (is_number(number) and number >= LEAST):
        raise refuse("a positive number of units per second, or one with its time: 100/s, 6000/m, 1000/h, 5000/d")
    return value if isinstance(value, str) else number


def _capacity(value: object) -> float | str:
    return amount(value, f"more than nothing: {quantity.ALLOWED}", least=LEAST)


def _burst(value: object) -> float | str:
    allowed = "more than nothing: a number of requests (3), a time at the cap (100ms) or a share of a second's (10%)"
    return amount(value, allowed, least=LEAST)


def _initial(value: object) -> float | str:
    if value == "C" or value == "C/F":
        return value
    allowed = "'C', 'C/F', a share of the rate (30%) or a positive number of requests per second"
    return amount(value, allowed, least=LEAST, timeless=True)


def _debt(value: object) -> float | str:
    return amount(value, f"nothing or more: {quantity.ALLOWED}", least=0.0)


def _reserve(value: object) -> float | str:
    allowed = (
        "a number of units (50), a time at the rate (500ms) or a share of the capacity (50%); below zero to borrow"
    )
    return amount(value, allowed, least=-NUMBER_MAX)


def _threshold(value: object) -> float | str:
    return amount(value, "a number of units (2) or a share of the charge (10%)", least=0.0, timeless=True)


_SIDES = ("debit", "refund")


def _settle_threshold(value: object) -> float | str | dict[str, float | str]:
    if not isinstance(value, dict):
        return _threshold(value)
    if not value or not set(value) <= set(_SIDES):
        raise refuse("a number of units (2), a share of the charge (10%), or one for debit and one for refund")
    return {side: _threshold(value[side]) for side in _SIDES if side in value}


def _minimum(value: object) -> float:
    if not is_number(value):
        raise refuse("a number; below zero to let requests borrow")
    return float(value)


def _charge(value: object) -> float | Literal["learned"]:
    if value == "learned":
        return "learned"
    if not (is_number(value) and value >= 0):
        raise refuse("a number of units, zero or more, or 'learned'")
    return float(value)


def _places(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= PLACES_MAX:
        raise refuse(f"a whole number of reservations from 1 to {PLACES_MAX}")
    return value


LEASE_MIN_S, LEASE_MAX_S = 1.0, 60.0


def _lease_s(value: object) -> float:
    if not (is_number(value) and LEASE_MIN_S <= value <= LEASE_MAX_S):
        raise refuse(f"a number of seconds from {LEASE_MIN_S:g} to {LEASE_MAX_S:g}")
    return float(value)


def _need(value: object) -> float:
    if not (is_number(value) and value >= 1):
        raise refuse("a number of requests, 1 or more")
    return float(value)


def _after(value: object) -> float:
    if not (is_number(value) and 1 <= value <= AFTER_MAX and float(value).is_integer()):
        raise refuse(f"a whole number of refusals from 1 to {AFTER_MAX}")
    return float(value)


def seconds(value: float | str) -> float:
    """Return a time in seconds, from `90`, `90s`, `10m`, `1h` or `1d`; NaN for anything else."""
    try:
        return math.nan if quantity.parse(value)[1] == "%" else quantity.units(value, rate=1.0)
    except (ValueError, OverflowError):
        return math.nan


def seconds_up_to(longest_s: float, longest: str) -> BeforeValidator:
    """Accept a time of at least a second."""

    def check(value: object) -> float | str:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or not 1 <= seconds(value) <= longest_s:
            raise refuse(f"a time from 1s to {longest}: seconds (90), or 90s, 10m, 1h")
        return value

    return BeforeValidator(check)


CYCLE_MIN_S, CYCLE_MAX_S = 0.01, 60.0


def _cycle(value: object) -> float | str:
    known = isinstance(value, int | float | str) and not isinstance(value, bool)
    if not (known and CYCLE_MIN_S <= seconds(value) <= CYCLE_MAX_S):  # type: ignore[arg-type]
        raise refuse("a time from 10ms to 60s: seconds (0.5), or 500ms, 2s")
    return value  # type: ignore[return-value]


def _alpha(value: object) -> float:
    if not (is_number(value) and LEAST <= value <= 1):
        raise refuse("a number above 0 and at most 1")
    return float(value)


def _weight(value: object) -> float:
    if not (is_number(value) and value >= 0):
        raise refuse("a number, zero or more")
    return float(value)


def _partitions(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= PARTITIONS_MAX:
        raise refuse(f"a whole number from 1 to {PARTITIONS_MAX}")
    return value


def _zone(value: object) -> str:
    try:
        # A long name is not looked up: Python would import it part by part.
        if isinstance(value, str) and len(value) <= ZONE_MAX:
            return ZoneInfo(value).key
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise refuse("the name of a time zone, such as UTC or Europe/Berlin")


def _period(value: object) -> str:
    if not isinstance(value, str) or parse_period(value) is None:
        names = ", ".join(Period)
        raise refuse(f"{names}, or a multiple that divides an hour or a day evenly: 15m, 6h")
    return value


def _billing_day(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 31:
        raise refuse("a day of the month from 1 to 31; a shorter month has its last day instead")
    return value


def _unique(values: list[str]) -> list[str]:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise refuse("each dimension once", found=f"{twice!r} twice")
    return values


Name = Annotated[str, BeforeValidator(_name)]
Dimension = Annotated[str, BeforeValidator(_dimension)]
Value = Annotated[str, BeforeValidator(_value)]
Description = Annotated[str, BeforeValidator(_description)]
Rate = Annotated[float | str, BeforeValidator(_rate)]
Capacity = Annotated[float | str, BeforeValidator(_capacity)]
Burst = Annotated[float | str, BeforeValidator(_burst)]
Initial = Annotated[float | str, BeforeValidator(_initial)]
Debt = Annotated[float | str, BeforeValidator(_debt)]
Reserve = Annotated[float | str, BeforeValidator(_reserve)]
Threshold = Annotated[float | str, BeforeValidator(_threshold)]
SettleThreshold = Annotated[float | str | dict[str, float | str], BeforeValidator(_settle_threshold)]
Minimum = Annotated[float, BeforeValidator(_minimum)]
Charge = Annotated[float | Literal["learned"], BeforeValidator(_charge)]
Alpha = Annotated[float, BeforeValidator(_alpha)]
CycleTime = Annotated[float | str, BeforeValidator(_cycle)]
Refusals = Annotated[float, BeforeValidator(_after)]
Places = Annotated[int, BeforeValidator(_places)]
LeaseSeconds = Annotated[float, BeforeValidator(_lease_s)]
Need = Annotated[float, BeforeValidator(_need)]
Weight = Annotated[float, BeforeValidator(_weight)]
Partitions = Annotated[int, BeforeValidator(_partitions)]
QuotaPeriod = Annotated[str, BeforeValidator(_period)]
BillingDay = Annotated[int, BeforeValidator(_billing_day)]
Zone = Annotated[str, BeforeValidator(_zone)]
Dimensions = Annotated[list[Dimension], Field(max_length=DIMENSIONS_MAX), AfterValidator(_unique)]


def _filled(table: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    if not table and not is_stored(info):
        raise refuse("at least one value of the dimension", found="none")
    return table


WeightTable = Annotated[dict[Value, Weight], AfterValidator(_filled)]
RateTable = Annotated[dict[Value, Rate], Field(max_length=LISTED_MAX), AfterValidator(_filled)]
ClassTable = Annotated[
    dict[Value, Annotated[Criticality, Field(strict=False)]], Field(max_length=LISTED_MAX), AfterValidator(_filled)
]
