"""Bytes and constants that Python and Lua must agree on."""

import math
import re
from struct import calcsize
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.bucket import bucket, lending, operations, reservation
from limiter.model.bucket.block import Block
from limiter.model.bucket.bucket import HISTOGRAM_STEPS, RECORD_FLAGS, Flags, Record, fresh
from limiter.model.bucket.in_flight import Slots
from limiter.model.bucket.lending import Book, LendStatus, Lent, Part, Row, Sums, Used
from limiter.model.bucket.operations import AcquireStatus, SettleStatus, Verdict
from limiter.model.control import stewardship
from limiter.model.control.stewardship import SteerStatus
from limiter.model.overload import signals
from limiter.model.overload.shedding import CLASSES, LENT_FOR_MAX_US, LENT_FOR_US, RECENT, RECENT_MIN, Shedding, State
from limiter.store import batcher, buckets, call_layout, flush, keys, layout
from limiter.store.leases import lease_layout
from limiter.store.scripts import scripts_directory
from tests.support.operations import START_US, work_terms

_LOCAL = re.compile(r"^local ([A-Z_, ]+?) = (-?\d[-\d, ]*)(?:\s*--.*)?$", re.MULTILINE)


def numbers(name: str) -> dict[str, int]:
    """The numeric constants that a Lua file declares at its top level."""
    source = (scripts_directory() / name).read_text()
    found: dict[str, int] = {}
    for names, values in _LOCAL.findall(source):
        found |= zip(names.split(", "), map(int, values.split(", ")), strict=True)
    return found


RECORD, BEGIN = numbers("lib/record.lua"), numbers("lib/begin.lua")
ACQUIRE, SETTLE = numbers("acquire.lua"), numbers("settle.lua")
LEASE, STEER = numbers("lib/lease.lua"), numbers("steer.lua")
SIGNAL, LEND = numbers("signal.lua"), numbers("lend.lua")

fields = st.floats(allow_nan=False)
others: dict[str, st.SearchStrategy[Any]] = {
    "epoch": st.integers(-1, 2**31 - 1),
    "kept_until_s": st.integers(0, 2**32 - 1),
    "second_attempts": st.integers(0, 2**32 - 1),
    "further_attempts": st.integers(0, 2**32 - 1),
}
SHARE_FIELDS = ("share", "share_until_us", "share_partitions")
APART = {
    "flags", "histogram", "shedding", "block", "slots", "learned", "lent", "book", "requests_until", *SHARE_FIELDS
}  # fmt: skip
FIELDS = tuple(name for name in Record.__dataclass_fields__ if name not in APART)
"""The fields that every record has, in the order of the layout."""

records = st.builds(
    Record,
    flags=st.sampled_from([Flags(bits) for bits in range(4)]),
    **{name: others.get(name, fields) for name in FIELDS},
    histogram=st.just([]),
)
by_class = st.lists(fields, min_size=len(CLASSES), max_size=len(CLASSES))
sheddings = st.builds(
    Shedding,
    **{
        name: by_class if isinstance(getattr(Shedding(), name), list) else fields
        for name in Shedding.__dataclass_fields__
    },
)

lents = st.builds(Lent, fields, fields, fields, fields)
sums = st.builds(Sums, **dict.fromkeys(Sums.__dataclass_fields__, fields))
books = st.builds(Book, fields, fields, fields, fields, fields, fields, st.lists(sums, max_size=6))
parts = st.builds(Part, **dict.fromkeys(Part.__dataclass_fields__, fields))
useds = st.builds(Used, **dict.fromkeys(Used._fields, fields))
rows = st.builds(Row, fields, fields, useds, st.lists(parts, min_size=1, max_size=4), st.booleans())


@given(
    records,
    st.none() | st.lists(st.integers(0, 2**32 - 1), min_size=HISTOGRAM_STEPS, max_size=HISTOGRAM_STEPS),
    st.none() | st.tuples(fields, fields, fields),
    st.none() | fields,
    st.none() | sheddings,
    st.none() | st.builds(Block, fields, fields, fields),
    st.none() | st.builds(Slots, **dict.fromkeys(Slots.__dataclass_fields__, fields)),
    st.none() | st.tuples(lents, books),
)
def test_a_record_comes_back_as_it_was(
    record: Record,
    histogram: list[int] | None,
    share: tuple[float, float, float] | None,
    requests_until: float | None,
    shedding: Shedding | None,
    block: Block | None,
    slots: Slots | None,
    lent: tuple[Lent, Book] | None,
) -> None:
    classes = 1
    if lent is not None:
        record.flags |= Flags.LENDS
        record.lent, record.book = lent
    if slots is not None:
        record.flags |= Flags.IN_FLIGHT
        record.slots = slots
    if block is not None:
        record.flags |= Flags.BLOCK
        record.block = block
    if shedding is not None:
        record.flags |= Flags.OVERLOAD
        record.shedding, classes = shedding, len(CLASSES)
    if histogram is not None:
        record.flags |= Flags.HISTOGRAM
        record.histogram = histogram * classes
    if share is not None:
        record.flags |= Flags.DIVIDED
        record.share, record.share_until_us, record.share_partitions = share
    if requests_until is not None:
        record.flags |= Flags.AUTO
        record.requests_until = requests_until
    raw = layout.pack_record(record)
    assert layout.unpack_record(raw) == record
    histograms = 4 * HISTOGRAM_STEPS * classes * (histogram is not None)
    trailers = 24 * (share is not None) + 8 * (requests_until is not None) + 392 * (shedding is not None)
    trailers += 24 * (block is not None) + 40 * (slots is not None)
    trailers += 0 if lent is None else 32 + 49 + 56 * len(lent[1].ends)
    assert len(raw) == 179 + histograms + trailers


@given(rows)
def test_a_lease_comes_back_as_it_was(row: Row) -> None:
    raw = lease_layout.pack_row(row)
    assert lease_layout.unpack_row(raw) == row
    assert len(raw) == LEND["ROW_HEAD_SIZE"] + len(row.parts) * LEND["PART_SIZE"]


@pytest.mark.parametrize("raw", [b"", bytes(88), bytes(90), bytes(89 + 103)])
def test_other_bytes_are_no_lease(raw: bytes) -> None:
    assert lease_layout.unpack_row(raw) is None


@pytest.mark.parametrize(("ends", "size"), [(0, 80), (0, 82), (1, 81), (1, 137 - 57), (255, 81)])
def test_a_book_of_another_length_than_it_says_is_no_record(ends: int, size: int) -> None:
    """F-S11."""
    raw = b"\2\0\2" + bytes(176) + (bytes(32) + bytes([ends]) + bytes(size))[:size]
    with pytest.raises(ValueError, match="not a bucket record"):
        layout.unpack_record(raw)


@pytest.mark.parametrize("name", ["GRAIN_US", "MARGIN_US", "ROW_KEPT_US", "SMOOTH_US", "PLAIN_MIN_US"])
def test_the_constants_of_lending_are_the_scripts(name: str) -> None:
    assert LEND[name] == getattr(lending, name)
    assert RECORD["LEAP_MAX_US"] == lending.LEAP_MAX_US
    assert RECORD["LEAP_PARTS"] == lending.LEAP_PARTS


@pytest.mark.parametrize("status", [status for status in LendStatus if status is not LendStatus.REPEATED])
def test_what_came_of_a_request_for_a_lease_is_numbered_alike(status: LendStatus) -> None:
    assert LEND[status.name] == status


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\1", b"\3" + bytes(178), b"\0" + bytes(178), b"\1" + bytes(152), b"\1" + bytes(154),
        b"\2" + bytes(177), b"\2" + bytes(179), b"\2\x04" + bytes(177), b"\2\x80" + bytes(177), b"\2\0\1" + bytes(176),
        b"\2\0\x80" + bytes(176), b"\2" + bytes(153),
        b"\1\x04" + bytes(152), b"\1\x08" + bytes(152), b"\1\x10" + bytes(152), b"\1\x20" + bytes(152),
        b"\1\x40" + bytes(152), b"\1\x80" + bytes(152), b"\1\xff" + bytes(152),
        b"\1\x0c" + bytes(152 + 24),
    ],
)  # fmt: skip
def test_other_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a bucket record"):
        layout.unpack_record(raw)


def test_an_untouched_bucket_is_179_bytes() -> None:
    """With its key and the server's own data it is at most 300 (`make bench`); up to 180, allocators give 192 bytes."""
    assert len(layout.pack_record(fresh(work_terms(), START_US))) == 179


@pytest.mark.parametrize(
    "name",
    [
        "STEP_BACK_MAX_US",
        "IDLE_TTL_S",
        "TTL_MAX_S",
        "KEPT_LONGER_S",
        "KEPT_MAX_S",
        "LENT_TTL_S",
        "OCTAVES",
        "OCTAVE_MIN",
        "STEPS",
        "ATTEMPTS_MAX",
        "COUNT_MAX",
    ],
)
def test_the_models_constants_are_the_scripts(name: str) -> None:
    assert RECORD[name] == getattr(bucket, name)


def test_f_s4_replies_live_at_least_twice_as_long_as_calls() -> None:
    assert BEGIN["REPLY_TTL_MS"] * 1000 >= 2 * batcher.CALL_LIFETIME_US
    assert batcher.TIMEOUT_MAX_S * 1e6 <= batcher.CALL_LIFETIME_US, "no retry is sent after the call's end"


def test_flags_have_the_same_bits() -> None:
    other_names = {"HISTOGRAM": "HAS_HISTOGRAM"}
    for flag in Flags:
        assert flag.name is not None
        assert RECORD[other_names.get(flag.name, flag.name)] == flag, flag.name
    assert RECORD["BEYOND"] == RECORD_FLAGS + 1
    assert sum(Flags) - Flags.SHADOW == RECORD_FLAGS, "none is left out"
    assert set(Flags) - set(RECORD_FLAGS) == {Flags.SHADOW} == {max(Flags)}, "what a record keeps is below the rest"
    assert Flags.SHADOW == 2**15, "there is room for what records will keep"


def test_fields_stand_in_the_same_order() -> None:
    """Lua counts from 1, and has version and flags before the fields."""
    other_names = {"updated_us": "UPDATED", "kept_until_s": "KEPT_UNTIL", "settle_threshold": "THRESHOLD"}
    attempts = ("second_attempts", "further_attempts")
    names = ["room" if name == attempts[0] else name for name in FIELDS if name != attempts[1]]
    expected = {other_names.get(name, name.upper()): 3 + at for at, name in enumerate(names)}
    assert {name: RECORD[name] for name in expected} == expected
    assert RECORD["HISTOGRAM"] == 3 + len(names)
    assert (RECORD["WINDOW_END"], RECORD["WINDOW_START"]) == (RECORD["RATE"], RECORD["COMMITTED"])
    shares = [RECORD[name] for name in ("SHARE", "SHARE_UNTIL", "SHARE_PARTITIONS")]
    assert shares == [4 + len(names) + at for at in range(len(SHARE_FIELDS))]
    assert RECORD["SHARE_SIZE"] == layout._SHARE.size
    assert RECORD["REQUESTS_UNTIL_SIZE"] == layout._REQUESTS_UNTIL.size
    assert RECORD["REQUESTS_UNTIL"] == RECORD["SHARE_PARTITIONS"] + 1
    assert RECORD["SHEDDING"] == RECORD["REQUESTS_UNTIL"] + 1
    assert (RECORD["VERSION"], RECORD["FLAGS"], RECORD["LAYOUT"]) == (1, 2, layout.VERSION)
    assert RECORD["LAYOUT_BEFORE"] == layout.VERSION_BEFORE


def test_the_fixed_part_has_the_same_bytes() -> None:
    source = (scripts_directory() / "lib/record.lua").read_text()
    for name, struct in (("FIELDS", layout._RECORD), ("FIELDS_BEFORE", layout._RECORD_BEFORE)):
        found = re.search(rf"local {name} = '(\S+)'", source)
        assert found is not None
        assert calcsize(found[1].replace("c24", "24s")) == struct.size
    assert (RECORD["SIZE"], RECORD["SIZE_BEFORE"]) == (layout._RECORD.size, layout._RECORD_BEFORE.size)
    assert RECORD["FRONT"] == calcsize("<BH")
    assert RECORD["CHANGING"] == calcsize("<BH6diId24s5d") == layout._RECORD.size - calcsize("<6d")


def test_fields_of_overload_control_stand_in_the_same_order() -> None:
    """A number for each class where the field is a list."""
    places, at = {}, 1
    for name, default in ((name, getattr(Shedding(), name)) for name in Shedding.__dataclass_fields__):
        places[name] = at
        at += len(default) if isinstance(default, list) else 1
    other_names = {"refused_shares": "SHED_SHARE", "rates": "SHED_RATE", "tokens": "SHED_TOKENS", "refused": "SHED"}
    other_names |= {"slack_min_ms": "SLACK_MIN", "slack_before_ms": "SLACK_BEFORE", "limits": "SHED_LIMIT"}
    other_names |= {"lent_until_us": "LENT_UNTIL", "refused_recently": "SHED_RECENTLY"}
    expected = {other_names.get(name, name.upper()): place for name, place in places.items()}
    assert {name: RECORD[name] for name in expected} == expected
    assert (RECORD["SHEDDING_COUNT"], RECORD["SHEDDING_SIZE"]) == (at - 1, layout._SHEDDING.size)
    assert RECORD["CLASSES"] == len(CLASSES)
    assert (RECORD["OVERLOADED"], RECORD["RECENT"], RECORD["RECENT_MIN"]) == (State.OVERLOADED, RECENT, RECENT_MIN)
    assert (RECORD["LENT_FOR_US"], RECORD["LENT_FOR_MAX_US"]) == (LENT_FOR_US, LENT_FOR_MAX_US)
    assert (RECORD["SHEDDING_BEFORE_SIZE"], RECORD["HISTOGRAM_BEFORE_SIZE"]) == (224, 576)
    assert RECORD["HISTOGRAM_SIZE"] == 4 * HISTOGRAM_STEPS


def test_reports_of_load_have_the_same_bounds() -> None:
    assert SIGNAL["SIGNAL_TTL_MS"] * 1000 == signals.SIGNAL_TTL_US
    assert SIGNAL["SOURCES_MAX"] == signals.SOURCES_MAX
    assert (SIGNAL["SOURCE_SIZE"], SIGNAL["ROW_HEAD_SIZE"]) == (keys.SOURCE_SIZE, call_layout._REPORT.size)


def test_rows_of_parameters_have_the_same_size() -> None:
    source = (scripts_directory() / "lib/record.lua").read_text()
    found = re.search(r"local PARAMS = '(<Hd+)'", source)
    assert found is not None
    assert calcsize(found[1]) == layout._PARAMS.size
    assert (RECORD["BLOCK_SIZE"], RECORD["COUNTED_UNTIL"]) == (layout._BLOCK.size, RECORD["SHEDDING"] + 1)
    assert (RECORD["SLOTS_SIZE"], RECORD["SLOT_START"]) == (layout._SLOTS.size, RECORD["BLOCKED_UNTIL"] + 1)


def test_statuses_have_the_same_numbers() -> None:
    assert {name.removeprefix("OP_"): number for name, number in ACQUIRE.items() if name.startswith("OP_")} == {
        status.name: status for status in AcquireStatus
    }
    assert {name.removeprefix("OP_"): number for name, number in SETTLE.items() if name.startswith("OP_")} == {
        status.name: status for status in SettleStatus
    }
    assert {name: ACQUIRE[name] for name in ("PASSED", "DEBITED", "BLOCKED", "TURNED_AWAY", "DENIED", "FULL")} == {
        v.name: v for v in Verdict
    }
    flags = {name: ACQUIRE[name] for name in FLAGS_OF_AN_ACQUIRE}
    assert flags == {name: getattr(flush, name) for name in flags}
    asked = {name: ACQUIRE[name] for name in ("LEARNED", "TOO_LARGE", "COVERED")}
    assert asked == {name: getattr(operations, name) for name in asked}
    assert (ACQUIRE["SHEDS"], SETTLE["IN_CLASS"], SETTLE["UNCOUNTED"], SETTLE["EXPECTS"], SETTLE["UNPAID"]) == (
        call_layout._SHEDS,
        flush.IN_CLASS,
        flush.UNCOUNTED,
        reservation._EXPECTS,
        reservation._UNPAID,
    )
    assert (ACQUIRE["ANSWER_ROW_SIZE"], ACQUIRE["SHEDS_ROW_SIZE"]) == (
        call_layout._ANSWER.size,
        call_layout._DRAWN_SIZE,
    )
    assert ACQUIRE["IN_REQUESTS"] == call_layout._IN_REQUESTS
    assert (SETTLE["PRESENT"], SETTLE["IN_REQUESTS"]) == (call_layout.PRESENT, call_layout.SETTLED_IN_REQUESTS)
    assert (BEGIN["DONE"], ACQUIRE["FINGERPRINT_SIZE"]) == (call_layout._DONE, buckets.FINGERPRINT_SIZE)


def test_values_that_the_controller_sets_have_the_same_bits_and_bounds() -> None:
    sets = {name.lower(): number for name, number in STEER.items() if name.startswith("SETS_")}
    assert sets == {f"sets_{name}": getattr(call_layout, f"_SETS_{name.upper()}") for name in SETS}
    assert {name.removeprefix("ROW_"): number for name, number in STEER.items() if name.startswith("ROW_")} == {
        status.name: status for status in SteerStatus
    }
    assert (LEASE["DONE"], LEASE["LOST"], LEASE["FENCE_SIZE"]) == (
        call_layout._DONE,
        call_layout._LOST,
        call_layout._FENCE.size,
    )
    assert STEER["SHARE_FOR_MAX_US"] == stewardship.SHARE_FOR_MAX_US
    found = re.search(r"^local SHARE_MIN = (\S+)", (scripts_directory() / "steer.lua").read_text(), re.MULTILINE)
    assert found is not None
    assert float(found[1]) == stewardship.SHARE_MIN


FLAGS_OF_AN_ACQUIRE = ("TOLD", "DRY_RUN", "DRAWN", "IDEMPOTENT", "WEIGHED", "LIVES", "SECOND", "FURTHER")
SETS = ("cap", "charge", "unit", "share", "state", "overload", "charges")


BROKEN: dict[str, dict[str, float]] = {
    "capacity": {"capacity": 0.0, "balance": 0.0},
    "time": {"updated_us": 0},
    "share": {"share": 2.0, "share_partitions": 4},
    "balance": {"balance": math.nan},
}


@pytest.mark.parametrize("fields", BROKEN.values(), ids=BROKEN)
def test_f_s16_a_record_with_impossible_values_is_unsound(fields: dict[str, float]) -> None:
    record = fresh(work_terms(rate=1, capacity=10), 1_790_000_000_000_000)
    assert layout.read_record(layout.pack_record(record)) is not None
    if "share" in fields:
        record.flags |= Flags.DIVIDED
    for name, value in fields.items():
        setattr(record, name, value)
    assert layout.read_record(layout.pack_record(record)) is None


def test_f_s11_bytes_too_short_for_a_lease_are_none() -> None:
    assert call_layout.unpack_token(b"12345678", 1000) is None


def test_f_s16_a_record_with_impossible_overload_control_is_unsound() -> None:
    record = fresh(work_terms(rate=1, capacity=10), START_US)
    record.flags |= Flags.OVERLOAD
    record.shedding = Shedding(lent_until_us=1.0)
    assert layout.read_record(layout.pack_record(record)) is not None
    record.shedding.quality = math.nan
    assert layout.read_record(layout.pack_record(record)) is None
