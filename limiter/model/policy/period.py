"""Calendar periods with a time zone (P4).

    start = the last instant at or before *now* at which a period begins by the zone's wall clock
    end   = the next such instant

minute, hour, 15m    follow elapsed time since local midnight: the hour that clocks show twice is two hours
6h                   begins at 00:00, 06:00, 12:00 and 18:00 by the wall clock
day and longer       likewise: a day with a change of clocks is 23 or 25 hours long, and so is its quota
month on the 15th    from a billing day to the next; the 29th to 31st are the last day of months that are shorter

Windows follow one another without gap or overlap, whatever the clocks do.
"""

from __future__ import annotations

import re
from calendar import monthrange
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MULTIPLE = re.compile(r"([1-9][0-9]{0,2})([mh])")
_MINUTE_US = 60_000_000
_HOUR_US = 60 * _MINUTE_US


class Period(StrEnum):
    """How often a quota starts again. Weeks begin on Monday (ISO 8601), quarters in January."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    QUARTER = "quarter"
    YEAR = "year"


_NAMES = frozenset(map(str, Period))
_MONTHS = {Period.MONTH: 1, Period.QUARTER: 3, Period.YEAR: 12}


class Span(NamedTuple):
    """A period, a multiple of it, and the day on which months begin."""

    period: Period
    times: int = 1
    billing_day: int = 1


def parse(text: str) -> tuple[Period, int] | None:
    """Parse a period, or a multiple that divides an hour or a day evenly: `15m`, `6h`; None for anything else."""
    if text in _NAMES:
        return Period(text), 1
    match = _MULTIPLE.fullmatch(text)
    if match is None:
        return None
    count = int(match[1])
    period, whole = (Period.MINUTE, 60) if match[2] == "m" else (Period.HOUR, 24)
    return (period, count) if whole % count == 0 else None


def window_us(now_us: int, span: Span | Period, zone: ZoneInfo) -> tuple[int, int]:
    """Return the period that contains an instant: its start, and the start of the next (us since 1970 UTC)."""
    if isinstance(span, Period):
        span = Span(span)
    local = (_EPOCH + timedelta(microseconds=now_us)).astimezone(zone)
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None, fold=0)
    if span.period is Period.MINUTE or span.period is Period.HOUR:
        day = _instant_us(midnight, zone), _instant_us(midnight + timedelta(days=1), zone)
        if span.period is Period.HOUR and span.times > 1:
            return _cut(now_us, _hours(midnight, span.times, zone), day[1])
        length_us = span.times * (_MINUTE_US if span.period is Period.MINUTE else _HOUR_US)
        start_us = day[0] + (now_us - day[0]) // length_us * length_us
        return start_us, min(start_us + length_us, day[1])
    first = _first_day(midnight, span)
    return _instant_us(first, zone), _instant_us(_next(first, span), zone)


def _cut(now_us: int, starts: tuple[int, ...], end_us: int) -> tuple[int, int]:
    """Return the part of a day that contains an instant."""
    start_us = max(start for start in starts if start <= now_us)
    return start_us, min([start for start in starts if start > now_us], default=end_us)


@lru_cache(maxsize=1024)
def _hours(midnight: datetime, count: int, zone: ZoneInfo) -> tuple[int, ...]:
    """Return the starts of the parts of a day."""
    return tuple(_instant_us(midnight + timedelta(hours=hour), zone) for hour in range(0, 24, count))


def _first_day(midnight: datetime, span: Span) -> datetime:
    if span.period is Period.DAY:
        return midnight
    if span.period is Period.WEEK:
        return midnight - timedelta(days=midnight.weekday())
    months = _MONTHS[span.period]
    first = _in_month(midnight, -((midnight.month - 1) % months), span.billing_day)
    return first if first <= midnight else _in_month(midnight, -months, span.billing_day)


def _next(first: datetime, span: Span) -> datetime:
    months = _MONTHS.get(span.period)
    if months is not None:
        return _in_month(first, months, span.billing_day)
    return first + timedelta(days=7 if span.period is Period.WEEK else 1)


def _in_month(midnight: datetime, months: int, day: int) -> datetime:
    """Return a day of the month this many months later; the last day if the month is shorter."""
    number = midnight.year * 12 + midnight.month - 1 + months
    year, month = divmod(number, 12)
    return midnight.replace(year=year, month=month + 1, day=min(day, monthrange(year, month + 1)[1]))


@lru_cache(maxsize=1024)
def _instant_us(wall: datetime, zone: ZoneInfo) -> int:
    """Return the instant at which a wall clock shows a time: the first of two, or the next moment if it is skipped."""
    return (wall.replace(tzinfo=zone).astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
