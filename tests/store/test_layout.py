"""Bytes and constants that Python and Lua must agree on."""

import re
from struct import calcsize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model import bucket, operations
from limiter.model.bucket import HISTOGRAM_STEPS, Flags, Record, fresh
from limiter.model.operations import AcquireStatus, SettleStatus, Verdict
from limiter.store import batcher, buckets, layout
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


RECORD, CALL = numbers("lib/record.lua"), numbers("lib/call.lua")
ACQUIRE, SETTLE = numbers("acquire.lua"), numbers("settle.lua")

fields = st.floats(allow_nan=False)
records = st.builds(
    Record,
    flags=st.sampled_from([Flags(bits) for bits in range(4)]),
    **dict.fromkeys(layout._FIELDS, fields),
    histogram=st.just([]),
)


@given(records, st.none() | st.lists(fields, min_size=HISTOGRAM_STEPS, max_size=HISTOGRAM_STEPS))
def test_a_record_comes_back_as_it_was(record: Record, histogram: list[float] | None) -> None:
    if histogram is not None:
        record.flags |= Flags.HISTOGRAM
        record.histogram = histogram
    raw = layout.pack_record(record)
    assert layout.unpack_record(raw) == record
    assert len(raw) == (154 if histogram is None else 154 + 8 * HISTOGRAM_STEPS)


@pytest.mark.parametrize("raw", [b"", b"\1", b"\2" + bytes(153), b"\1" + bytes(152), b"\1" + bytes(154)])
def test_other_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a bucket record"):
        layout.unpack_record(raw)


def test_an_untouched_bucket_is_154_bytes() -> None:
    """At most 300 with its key and the server's own, as `make bench` measures."""
    assert len(layout.pack_record(fresh(work_terms(), START_US))) == 154


@pytest.mark.parametrize("name", ["STEP_BACK_MAX_US", "IDLE_TTL_MS", "TTL_MAX_MS", "OCTAVES", "OCTAVE_MIN", "STEPS"])
def test_the_models_constants_are_the_scripts(name: str) -> None:
    assert RECORD[name] == getattr(bucket, name)


def test_a_settled_reservation_is_remembered_as_long_as_it_may_be_settled() -> None:
    assert SETTLE["SETTLE_GRACE_US"] == operations.SETTLE_GRACE_US


def test_s4_replies_live_at_least_twice_as_long_as_calls() -> None:
    assert CALL["REPLY_TTL_MS"] * 1000 >= 2 * batcher.CALL_LIFETIME_US
    assert batcher.TIMEOUT_MAX_S * 1e6 <= batcher.CALL_LIFETIME_US, "no retry is sent after the call's end"


def test_flags_have_the_same_bits() -> None:
    bits = {name: RECORD[name] for name in ("QUOTA", "COUNTS_REQUESTS", "HAS_HISTOGRAM", "SHADOW")}
    assert bits == {
        "QUOTA": Flags.QUOTA,
        "COUNTS_REQUESTS": Flags.COUNTS_REQUESTS,
        "HAS_HISTOGRAM": Flags.HISTOGRAM,
        "SHADOW": Flags.SHADOW,
    }
    assert set(Flags) == {Flags.QUOTA, Flags.COUNTS_REQUESTS, Flags.HISTOGRAM, Flags.SHADOW}, "none is left out"


def test_fields_stand_in_the_same_order() -> None:
    """Lua counts from 1, and has version and flags before the fields."""
    other_names = {"updated_us": "UPDATED", "settle_threshold": "THRESHOLD"}
    expected = {other_names.get(name, name.upper()): 3 + at for at, name in enumerate(layout._FIELDS)}
    assert {name: RECORD[name] for name in expected} == expected
    assert RECORD["HISTOGRAM"] == 3 + len(layout._FIELDS)
    assert (RECORD["VERSION"], RECORD["FLAGS"], RECORD["LAYOUT"]) == (1, 2, layout.VERSION)


def test_rows_of_parameters_have_the_same_size() -> None:
    source = (scripts_directory() / "lib/record.lua").read_text()
    found = re.search(r"local PARAMS, PARAMS_SIZE = '(<B?d+)', (\d+)", source)
    assert found is not None
    assert calcsize(found[1]) == int(found[2]) == layout._PARAMS.size


def test_statuses_have_the_same_numbers() -> None:
    assert {name.removeprefix("OP_"): number for name, number in ACQUIRE.items() if name.startswith("OP_")} == {
        status.name: status for status in AcquireStatus
    }
    assert {name.removeprefix("OP_"): number for name, number in SETTLE.items() if name.startswith("OP_")} == {
        status.name: status for status in SettleStatus
    }
    assert {name: ACQUIRE[name] for name in ("PASSED", "DEBITED", "BLOCKED")} == {v.name: v for v in Verdict}
    assert (ACQUIRE["LEASE"], ACQUIRE["DRY_RUN"], ACQUIRE["IDEMPOTENT"]) == (
        layout._LEASE,
        layout._DRY_RUN,
        layout._IDEMPOTENT,
    )
    assert (CALL["DONE"], ACQUIRE["FINGERPRINT_SIZE"]) == (layout._DONE, buckets.FINGERPRINT_SIZE)
