"""Calendar windows with time zones (P4)."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from limiter.model.period import Period, window_us

HOUR_US = 3_600_000_000


def us(text: str, zone: str = "UTC") -> int:
    """An instant, as the zone's clocks show it."""
    local = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))
    return (local.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("period", "start", "end"),
    [
        (Period.MINUTE, "2026-09-21T14:13:00", "2026-09-21T14:14:00"),
        (Period.HOUR, "2026-09-21T14:00:00", "2026-09-21T15:00:00"),
        (Period.DAY, "2026-09-21T00:00:00", "2026-09-22T00:00:00"),
        (Period.WEEK, "2026-09-21T00:00:00", "2026-09-28T00:00:00"),
        (Period.MONTH, "2026-09-01T00:00:00", "2026-10-01T00:00:00"),
    ],
)
def test_p4_periods_in_utc(period: Period, start: str, end: str) -> None:
    assert window_us(us("2026-09-21T14:13:20.123456"), period, ZoneInfo("UTC")) == (us(start), us(end))


@pytest.mark.parametrize(
    ("day", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("2026-06-01", 24)], ids=["spring", "autumn", "summer"]
)
@pytest.mark.parametrize("at", ["00:00:00", "02:30:00", "12:00:00", "23:59:59.999999"])
def test_p4_a_day_in_berlin_is_as_long_as_its_clocks_say(day: str, hours: int, at: str) -> None:
    zone = "Europe/Berlin"
    start_us, end_us = window_us(us(f"{day}T{at}", zone), Period.DAY, ZoneInfo(zone))
    assert start_us == us(f"{day}T00:00:00", zone)
    assert end_us - start_us == hours * HOUR_US


def test_p4_a_week_and_a_month_with_a_change_of_clocks() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    start_us, end_us = window_us(us("2026-10-25T12:00:00"), Period.WEEK, berlin)
    assert (start_us, end_us - start_us) == (us("2026-10-19T00:00:00", "Europe/Berlin"), (7 * 24 + 1) * HOUR_US)
    start_us, end_us = window_us(us("2026-03-15T12:00:00"), Period.MONTH, berlin)
    assert end_us - start_us == (31 * 24 - 1) * HOUR_US


@pytest.mark.parametrize(
    ("now", "start", "end"),
    [
        ("2026-12-31T23:59:59", "2026-12-01", "2027-01-01"),
        ("2028-02-29T12:00:00", "2028-02-01", "2028-03-01"),
        ("2026-01-31T00:00:00", "2026-01-01", "2026-02-01"),
    ],
)
def test_p4_months_of_any_length(now: str, start: str, end: str) -> None:
    assert window_us(us(now), Period.MONTH, ZoneInfo("UTC")) == (us(start), us(end))


def test_p4_weeks_begin_on_monday() -> None:
    utc = ZoneInfo("UTC")
    sunday, monday = us("2026-09-27T23:59:59"), us("2026-09-28T00:00:00")
    assert window_us(sunday, Period.WEEK, utc) == (us("2026-09-21"), monday)
    assert window_us(monday, Period.WEEK, utc)[0] == monday


def test_p4_hours_in_india_begin_at_half_past() -> None:
    zone = ZoneInfo("Asia/Kolkata")
    assert window_us(us("2026-09-21T14:13:20"), Period.HOUR, zone) == (
        us("2026-09-21T13:30:00"),
        us("2026-09-21T14:30:00"),
    )
    assert window_us(us("2026-09-21T18:30:00"), Period.DAY, zone)[0] == us("2026-09-21T18:30:00")


def test_p4_the_hour_that_clocks_show_twice_is_two_hours() -> None:
    """Hours follow elapsed time: nobody gets two quotas' worth into one, or one into two."""
    berlin = ZoneInfo("Europe/Berlin")
    first_us = us("2026-10-25T00:00:00")  # 02:00 summer time
    assert window_us(first_us + HOUR_US // 2, Period.HOUR, berlin) == (first_us, first_us + HOUR_US)
    assert window_us(first_us + 3 * HOUR_US // 2, Period.HOUR, berlin) == (first_us + HOUR_US, first_us + 2 * HOUR_US)


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Asia/Kolkata", "Asia/Kathmandu",
         "Australia/Lord_Howe", "Africa/Cairo", "Pacific/Apia", "Asia/Beirut"]  # fmt: skip


@given(
    now_us=st.integers(us("2000-01-01"), us("2060-01-01")),
    period=st.sampled_from(Period),
    zone=st.sampled_from(ZONES).map(ZoneInfo),
)
def test_p4_windows_hold_their_instant_and_follow_one_another(now_us: int, period: Period, zone: ZoneInfo) -> None:
    # Where clocks change by half an hour, an hour is cut short.
    assume(not (period is Period.HOUR and zone.key == "Australia/Lord_Howe"))
    start_us, end_us = window_us(now_us, period, zone)
    assert start_us <= now_us < end_us
    assert window_us(start_us, period, zone) == window_us(end_us - 1, period, zone) == (start_us, end_us)
    assert window_us(end_us, period, zone)[0] == end_us, "no gap and no overlap"


@pytest.mark.parametrize("zone", ZONES)
def test_p4_windows_tile_years_of_clock_changes(zone: str) -> None:
    """Zones that change their clocks at midnight, by half an hour, or skip a whole day."""
    for period in (Period.HOUR, Period.DAY):
        at_us, end_us = us("2011-12-28"), us("2012-01-02")
        while at_us < end_us:
            start_us, next_us = window_us(at_us, period, ZoneInfo(zone))
            assert start_us <= at_us < next_us
            assert window_us(next_us, period, ZoneInfo(zone))[0] == next_us
            at_us = next_us
    for year in range(2020, 2027):
        at_us, end_us = us(f"{year}-01-01"), us(f"{year + 1}-01-01")
        while at_us < end_us:
            _, next_us = window_us(at_us, Period.DAY, ZoneInfo(zone))
            assert window_us(next_us - 1, Period.DAY, ZoneInfo(zone))[1] == next_us
            assert window_us(next_us, Period.DAY, ZoneInfo(zone))[0] == next_us
            at_us = next_us
