"""Calendar windows with time zones (P4)."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.policy.period import Period, Span, parse, window_us

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
        (Period.QUARTER, "2026-07-01T00:00:00", "2026-10-01T00:00:00"),
        (Period.YEAR, "2026-01-01T00:00:00", "2027-01-01T00:00:00"),
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
    assert window_us(first_us + 3 * HOUR_US // 2, Period.HOUR, berlin) == (
        first_us + HOUR_US,
        first_us + 2 * HOUR_US,
    )


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Asia/Kolkata", "Asia/Kathmandu",
         "Australia/Lord_Howe", "Africa/Cairo", "Pacific/Apia", "Asia/Beirut"]  # fmt: skip


spans = st.one_of(
    st.sampled_from(Period).map(Span),
    st.sampled_from([1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]).map(lambda count: Span(Period.MINUTE, count)),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]).map(lambda count: Span(Period.HOUR, count)),
    st.integers(1, 31).map(lambda day: Span(Period.MONTH, 1, day)),
)
CHANGES = ["2026-03-29", "2026-10-25", "2026-03-08", "2026-11-01", "2026-04-05", "2026-10-04", "2011-12-30",
           "2024-02-29", "2100-02-28", "2026-12-31", "2026-09-06", "2026-04-24"]  # fmt: skip
# Half of the instants are near a change of clocks, at midnights and month ends, in leap years and at the year 2100.
moments = st.one_of(
    st.integers(us("2000-01-01"), us("2060-01-01")),
    st.builds(
        lambda day, hours, off_us: us(day) + hours * HOUR_US + off_us,
        st.sampled_from(CHANGES),
        st.integers(-48, 48), st.sampled_from([-1, 0, 1, 30 * 60_000_000]),
    ),
)  # fmt: skip


@given(now_us=moments, span=spans, zone=st.sampled_from(ZONES).map(ZoneInfo))
def test_p4_windows_hold_their_instant_and_follow_one_another(now_us: int, span: Span, zone: ZoneInfo) -> None:
    """Windows tile time: no gap, no overlap, in whatever zone and at whatever change of clocks."""
    for _ in range(30):
        start_us, end_us = window_us(now_us, span, zone)
        assert start_us <= now_us < end_us
        assert window_us(start_us, span, zone) == window_us(end_us - 1, span, zone) == (start_us, end_us)
        assert window_us((start_us + end_us) // 2, span, zone) == (start_us, end_us)
        assert window_us(end_us, span, zone)[0] == end_us, "no gap and no overlap"
        now_us = end_us


@pytest.mark.parametrize("zone", ZONES)
def test_p4_windows_tile_years_of_clock_changes(zone: str) -> None:
    """Zones that change their clocks at midnight, by half an hour, or skip a whole day."""
    for span in (Span(Period.HOUR), Span(Period.HOUR, 6), Span(Period.MINUTE, 15), Span(Period.DAY)):
        at_us, end_us = us("2011-12-28"), us("2012-01-02")
        while at_us < end_us:
            start_us, next_us = window_us(at_us, span, ZoneInfo(zone))
            assert start_us <= at_us < next_us
            assert window_us(next_us, span, ZoneInfo(zone))[0] == next_us
            at_us = next_us
    for year in range(2020, 2027):
        for span in (Span(Period.HOUR, 12), Span(Period.DAY), Span(Period.MONTH, 1, 31), Span(Period.QUARTER)):
            at_us, end_us = us(f"{year}-01-01"), us(f"{year + 1}-01-01")
            while at_us < end_us:
                _, next_us = window_us(at_us, span, ZoneInfo(zone))
                assert window_us(next_us - 1, span, ZoneInfo(zone))[1] == next_us
                assert window_us(next_us, span, ZoneInfo(zone))[0] == next_us
                at_us = next_us


@pytest.mark.parametrize(
    ("text", "found"),
    [("minute", (Period.MINUTE, 1)), ("year", (Period.YEAR, 1)), ("15m", (Period.MINUTE, 15)), ("6h", (Period.HOUR, 6)),
     ("60m", (Period.MINUTE, 60)), ("24h", (Period.HOUR, 24)), ("7m", None), ("5h", None), ("90m", None), ("0m", None),
     ("1d", None), ("-5m", None), ("1.5h", None), ("015m", None), ("", None), ("Month", None), ("15 m", None)],
)  # fmt: skip
def test_p4_multiples_divide_an_hour_or_a_day(text: str, found: tuple[Period, int] | None) -> None:
    assert parse(text) == found


@pytest.mark.parametrize(
    ("now", "start", "end"),
    [
        ("2026-03-14T23:59:59", "2026-02-15", "2026-03-15"),
        ("2026-03-15T00:00:00", "2026-03-15", "2026-04-15"),
        ("2026-01-01T00:00:00", "2025-12-15", "2026-01-15"),
    ],
)
def test_p4_a_month_may_begin_on_a_billing_day(now: str, start: str, end: str) -> None:
    assert window_us(us(now), Span(Period.MONTH, 1, 15), ZoneInfo("UTC")) == (us(start), us(end))


@pytest.mark.parametrize(
    ("now", "start", "end"),
    [
        ("2026-02-27T12:00:00", "2026-01-31", "2026-02-28"),
        ("2026-02-28T00:00:00", "2026-02-28", "2026-03-31"),
        ("2028-02-29T00:00:00", "2028-02-29", "2028-03-31"),
        ("2026-04-30T00:00:00", "2026-04-30", "2026-05-31"),
        ("2026-12-31T00:00:00", "2026-12-31", "2027-01-31"),
    ],
)
def test_p4_a_billing_day_that_a_month_lacks_is_its_last(now: str, start: str, end: str) -> None:
    assert window_us(us(now), Span(Period.MONTH, 1, 31), ZoneInfo("UTC")) == (us(start), us(end))


@pytest.mark.parametrize(
    ("at", "start", "end"),
    [("2026-06-01T13:00:00", "2026-06-01T12:00:00", "2026-06-01T18:00:00"),
     ("2026-10-25T01:00:00", "2026-10-25T00:00:00", "2026-10-25T06:00:00"),
     ("2026-03-29T05:00:00", "2026-03-29T00:00:00", "2026-03-29T06:00:00")],
)  # fmt: skip
def test_p4_six_hours_begin_by_the_wall_clock(at: str, start: str, end: str) -> None:
    """On a day with a change of clocks its first six hours are five or seven."""
    zone = "Europe/Berlin"
    assert window_us(us(at, zone), Span(Period.HOUR, 6), ZoneInfo(zone)) == (us(start, zone), us(end, zone))


def test_p4_a_quarter_of_an_hour_begins_at_quarters_of_the_zone_s_hours() -> None:
    zone = "Asia/Kathmandu"  # 5 h 45 min ahead
    found = window_us(us("2026-09-21T14:13:20", zone), Span(Period.MINUTE, 15), ZoneInfo(zone))
    assert found == (us("2026-09-21T14:00:00", zone), us("2026-09-21T14:15:00", zone))
