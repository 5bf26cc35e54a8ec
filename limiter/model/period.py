"""Calendar periods with a time zone (P4).

    start = the last instant at or before *now* at which the zone's wall clock shows the beginning of a period
    end   = the next such instant

Minutes and hours follow elapsed time, days and longer the wall clock: a day with a change of clocks is 23 or 25
hours long, and so is its quota.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ELAPSED_US = {"minute": 60_000_000, "hour": 3_600_000_000}


class Period(StrEnum):
    """How often a quota starts afresh. Weeks begin on Monday (ISO 8601)."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


def window_us(now_us: int, period: Period, zone: ZoneInfo) -> tuple[int, int]:
    """The period that holds an instant: its start, and the start of the next (us since 1970 UTC)."""
    if length_us := _ELAPSED_US.get(period):
        # Zones are off UTC by whole minutes, some not by whole hours.
        offset_us = _offset_us(now_us, zone)
        start_us = (now_us + offset_us) // length_us * length_us - offset_us
        return start_us, start_us + length_us
    local = (_EPOCH + timedelta(microseconds=now_us)).astimezone(zone)
    first = _first_day(local.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None), period)
    return _instant_us(first, zone), _instant_us(_next(first, period), zone)


def _offset_us(now_us: int, zone: ZoneInfo) -> int:
    offset = (_EPOCH + timedelta(microseconds=now_us)).astimezone(zone).utcoffset()
    return (offset or timedelta()) // timedelta(microseconds=1)


def _first_day(midnight: datetime, period: Period) -> datetime:
    if period is Period.WEEK:
        return midnight - timedelta(days=midnight.weekday())
    return midnight.replace(day=1) if period is Period.MONTH else midnight


def _next(first: datetime, period: Period) -> datetime:
    if period is Period.MONTH:
        return (first + timedelta(days=31)).replace(day=1)
    return first + timedelta(days=7 if period is Period.WEEK else 1)


@lru_cache(maxsize=1024)
def _instant_us(midnight: datetime, zone: ZoneInfo) -> int:
    """When a wall-clock midnight happens: the first time of two, the moment after where it is skipped."""
    return (midnight.replace(tzinfo=zone).astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
