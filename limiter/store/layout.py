"""Records, tombstones and rows of parameters as bytes: the Python side of `lua/lib/record.lua`.

The rest of calls and replies is in `limiter.store.call_layout`. Floats are little-endian float64,
never text.
"""

from __future__ import annotations

import math
from struct import Struct
from struct import error as struct_error

from limiter.model.bucket.block import Block
from limiter.model.bucket.bucket import HISTOGRAM_STEPS, RATE_MAX, RECORD_FLAGS, Flags, Params, Record
from limiter.model.bucket.in_flight import Slots
from limiter.model.bucket.in_flight import is_sound as are_slots_sound
from limiter.model.bucket.learned import Entry
from limiter.model.bucket.learned import is_sound as are_entries_sound
from limiter.model.bucket.lending import Book, Lent, Sums, is_lent_sound
from limiter.model.control.sampling import Reading
from limiter.model.ledger.correction import Tombstone
from limiter.model.overload.shedding import CLASSES, LENT_FOR_US, Shedding, State, is_sound

VERSION, VERSION_BEFORE = 2, 1
"""Records of the previous version are still read; they are written again as this one."""
PACKED_MAX = 4096

_packed: dict[int, tuple[Params, bytes]] = {}

_RECORD = Struct("<BH6diId2d2I11d")
_RECORD_BEFORE = Struct("<BB19d")
_HISTOGRAMS = {classes: Struct(f"<{HISTOGRAM_STEPS * classes}I") for classes in (1, len(CLASSES))}
"""One histogram, or one for each class."""
_HISTOGRAM_BEFORE_SIZE = 576
_SHARE = Struct("<3d")
_LENT = Struct("<4d")
_BOOK = Struct("<B6d")
_SUMS = Struct("<7d")
_REQUESTS_UNTIL = Struct("<d")
_SHEDDING = Struct("<49d")
_SHEDDING_BEFORE = Struct("<28d")
"""The form of older records, which are read, and written in the present form."""
_BLOCK = Struct("<3d")
_SLOTS = Struct("<5d")
_PARAMS = Struct("<H11d")
_BLOCK_TERMS = Struct("<3d")
_LEND_TERMS = Struct("<3d")
_OVERLOAD_TERMS = Struct("<5d")
_IN_FLIGHT_TERMS = Struct("<3d")
_TOMBSTONE = Struct("<BBdd")
_ACCOUNTED = Struct("<dd")
_ENTRY = Struct("<Idddd")
_REFUND_TERMS = Struct("<d")

_INF = math.inf
_EPOCHS = 2**31
_new_record = Record.__new__
_new_shedding = Shedding.__new__
_FLAGS = tuple(Flags(bits) for bits in range(RECORD_FLAGS + 1))
# Looking up enum members for every record is expensive.
_HAS_HISTOGRAM, _HAS_SHARE, _IS_AUTO = int(Flags.HISTOGRAM), int(Flags.DIVIDED), int(Flags.AUTO)
_HAS_SHEDDING, _HAS_BLOCK, _HAS_SLOTS = int(Flags.OVERLOAD), int(Flags.BLOCK), int(Flags.IN_FLIGHT)
_LEARNS, _LENDS = int(Flags.LEARNS), int(Flags.LENDS)
_HAS_TRAILER = _HAS_HISTOGRAM | _HAS_SHARE | _IS_AUTO | _HAS_SHEDDING | _HAS_BLOCK | _HAS_SLOTS | _LEARNS | _LENDS
_UNKNOWN = ~int(RECORD_FLAGS)


def _classes(flags: int) -> int:
    """Return how many classes are counted separately."""
    return len(CLASSES) if flags & _HAS_SHEDDING else 1


def _trailers_size(flags: int) -> int:
    histogram = _HISTOGRAMS[_classes(flags)].size if flags & _HAS_HISTOGRAM else 0
    share = _SHARE.size if flags & _HAS_SHARE else 0
    until = _REQUESTS_UNTIL.size if flags & _IS_AUTO else 0
    shedding = _SHEDDING.size if flags & _HAS_SHEDDING else 0
    block = _BLOCK.size if flags & _HAS_BLOCK else 0
    return histogram + share + until + shedding + block + (_SLOTS.size if flags & _HAS_SLOTS else 0)


def _trailers_size_before(flags: int) -> int:
    """Of older records; −1 where those were as they are now."""
    if flags & (_HAS_SLOTS | _LEARNS) or not flags & (_HAS_HISTOGRAM | _HAS_SHEDDING):
        return -1
    histogram = _HISTOGRAM_BEFORE_SIZE * _classes(flags) if flags & _HAS_HISTOGRAM else 0
    rest = _trailers_size(flags & ~(_HAS_HISTOGRAM | _HAS_SHEDDING))
    return histogram + rest + (_SHEDDING_BEFORE.size if flags & _HAS_SHEDDING else 0)


_TRAILERS = tuple(map(_trailers_size, range(RECORD_FLAGS + 1)))
_TRAILERS_BEFORE = tuple(map(_trailers_size_before, range(RECORD_FLAGS + 1)))


def pack_record(record: Record) -> bytes:
    """A record as the scripts write it."""
    slots = record.slots
    flying, before = (0.0, 0.0) if slots is None else (slots.present, slots.before)
    packed = _RECORD.pack(
        VERSION, record.flags, record.updated_us, record.balance, record.requests, record.admitted, record.refused,
        record.work_charged, record.epoch, record.kept_until_s, record.charge, flying, before, record.second_attempts,
        record.further_attempts, record.work_settled, record.work_squared, record.settles, record.missed,
        record.uncollected, record.rate, record.capacity, record.committed, record.debt_max, record.settle_threshold,
        record.stop_debt,
    )  # fmt: skip
    if record.histogram:
        packed += _HISTOGRAMS[_classes(record.flags)].pack(*record.histogram)
    if Flags.DIVIDED in record.flags:
        packed += _SHARE.pack(record.share, record.share_until_us, record.share_partitions)
    if Flags.AUTO in record.flags:
        packed += _REQUESTS_UNTIL.pack(record.requests_until)
    if record.shedding is not None:
        packed += _pack_shedding(record.shedding)
    if record.block is not None:
        packed += _BLOCK.pack(record.block.counted_until_us, record.block.refused, record.block.until_us)
    if slots is not None:
        packed += _SLOTS.pack(slots.start_us, slots.before_us, slots.length_us, slots.longest_us, slots.refused)
    if Flags.LEARNS in record.flags:
        packed += bytes([len(record.learned)]) + b"".join(map(_pack_entry, record.learned))
    if record.lent is not None and record.book is not None:
        packed += pack_lending(record.lent, record.book)
    return packed


def _pack_entry(entry: Entry) -> bytes:
    return _ENTRY.pack(entry.id, entry.charge, entry.settles, entry.work, entry.work_squared)


def unpack_record(raw: bytes) -> Record:
    """Read a record that the scripts wrote; raise ValueError for other bytes."""
    record = _new_record(Record)
    # Field by field, in the order of the layout: a controller reads thousands of records in a tenth of a second.
    if len(raw) >= _RECORD.size and raw[0] == VERSION:
        fixed_size = _RECORD.size
        (
            _, flags, record.updated_us, record.balance, record.requests, record.admitted, record.refused,
            record.work_charged, record.epoch, record.kept_until_s, record.charge, flying, before,
            record.second_attempts, record.further_attempts, record.work_settled, record.work_squared, record.settles,
            record.missed, record.uncollected, record.rate, record.capacity, record.committed, record.debt_max,
            record.settle_threshold, record.stop_debt,
        ) = _RECORD.unpack_from(raw)  # fmt: skip
    else:
        fixed_size, flags, flying, before = _RECORD_BEFORE.size, _unpack_before(record, raw), 0.0, 0.0
    record.learned, record.lent, record.book = [], None, None
    if flags & (_LEARNS | _LENDS) and not flags & _UNKNOWN:
        behind = end = fixed_size + _TRAILERS[flags]
        if flags & _LEARNS:
            record.learned, behind = _unpack_learned(raw, behind)
        if flags & _LENDS:
            record.lent, record.book, behind = unpack_lending(raw, behind)
        if behind != len(raw):
            raise ValueError("not a bucket record of this version")
        raw = raw[:end]
    size = len(raw) - fixed_size
    if flags & _UNKNOWN or size not in (_TRAILERS[flags], _TRAILERS_BEFORE[flags]):
        raise ValueError("not a bucket record of this version")
    record.flags, record.histogram, record.shedding, record.block = _FLAGS[flags], [], None, None
    record.share = record.share_until_us = record.share_partitions = record.requests_until = 0.0
    record.slots = None
    if flags & _HAS_TRAILER:
        _unpack_trailers(record, flags, raw, fixed_size, is_old=size == _TRAILERS_BEFORE[flags])
        if flags & _HAS_SLOTS:
            start_us, before_us, length_us, longest_us, refused = _SLOTS.unpack_from(raw, len(raw) - _SLOTS.size)
            record.slots = Slots(
                present=flying, before=before, start_us=start_us, before_us=before_us, length_us=length_us,
                longest_us=longest_us, refused=refused,
            )  # fmt: skip
    return record


def _unpack_learned(raw: bytes, at: int) -> tuple[list[Entry], int]:
    """Read the entries by values of `learn_by`; the number is where they end."""
    end = at + 1 + raw[at] * _ENTRY.size if len(raw) > at else at
    if not at < end <= len(raw):
        raise ValueError("not a bucket record of this version")
    return [Entry(*values) for values in _ENTRY.iter_unpack(raw[at + 1 : end])], end


def pack_lending(lent: Lent, book: Book) -> bytes:
    """Return the lending part of a record."""
    head = _LENT.pack(lent.rate, lent.capacity, lent.until_us, lent.shift_us)
    head += _BOOK.pack(
        len(book.ends), book.tau_us, book.plain_rate, book.plain_at_us, book.seen_work, book.seen_requests,
        book.seen_admitted,
    )  # fmt: skip
    return head + b"".join(
        _SUMS.pack(one.end_us, one.rate, one.capacity, one.holders, one.content, one.short, one.demand)
        for one in book.ends
    )


def unpack_lending(raw: bytes, at: int) -> tuple[Lent, Book, int]:
    """Read the lending part of a record; the number is where it ends."""
    try:
        lent = Lent(*_LENT.unpack_from(raw, at))
        count, tau_us, plain_rate, plain_at_us, work, requests, admitted = _BOOK.unpack_from(raw, at + _LENT.size)
        begin = at + _LENT.size + _BOOK.size
        ends = [Sums(*_SUMS.unpack_from(raw, begin + number * _SUMS.size)) for number in range(count)]
    except struct_error:
        raise ValueError("not a bucket record of this version") from None
    return lent, Book(tau_us, plain_rate, plain_at_us, work, requests, admitted, ends), begin + count * _SUMS.size


def _unpack_before(record: Record, raw: bytes) -> int:
    """Read the fixed fields of a record of the previous version, whose trailers are the same; return its flags."""
    if len(raw) < _RECORD_BEFORE.size or raw[0] != VERSION_BEFORE:
        raise ValueError("not a bucket record of this version")
    (
        _, flags, record.updated_us, record.balance, record.rate, record.capacity, record.committed, record.debt_max,
        record.settle_threshold, record.stop_debt, record.charge, epoch, record.requests, record.admitted,
        record.refused, record.work_charged, record.work_settled, record.work_squared, record.settles, record.missed,
        record.uncollected,
    ) = _RECORD_BEFORE.unpack_from(raw)  # fmt: skip
    record.epoch = int(epoch) if -1 <= epoch < _EPOCHS else -1
    record.kept_until_s = record.second_attempts = record.further_attempts = 0
    return int(flags)


def _unpack_trailers(record: Record, flags: int, raw: bytes, at: int, *, is_old: bool) -> None:
    """Trailers that only some buckets have, except for the slots."""
    if flags & _HAS_HISTOGRAM:
        histograms, classes = _HISTOGRAMS[_classes(flags)], _classes(flags)
        # Counts by coarser steps cannot be told apart into finer ones.
        record.histogram = [0] * (HISTOGRAM_STEPS * classes) if is_old else list(histograms.unpack_from(raw, at))
        at += _HISTOGRAM_BEFORE_SIZE * classes if is_old else histograms.size
    if flags & _HAS_SHARE:
        record.share, record.share_until_us, record.share_partitions = _SHARE.unpack_from(raw, at)
        at += _SHARE.size
    if flags & _IS_AUTO:
        (record.requests_until,) = _REQUESTS_UNTIL.unpack_from(raw, at)
        at += _REQUESTS_UNTIL.size
    if flags & _HAS_SHEDDING:
        record.shedding = _shedding_of_before(raw, at, record.updated_us) if is_old else _unpack_shedding(raw, at)
        at += _SHEDDING_BEFORE.size if is_old else _SHEDDING.size
    if flags & _HAS_BLOCK:
        record.block = Block(*_BLOCK.unpack_from(raw, at))


def _pack_shedding(known: Shedding) -> bytes:
    return _SHEDDING.pack(
        known.quality,
        known.state,
        known.lent_until_us,
        known.response_ms,
        *known.refused_shares,
        *known.rates,
        *known.tokens,
        *known.limits,
        *known.asked,
        *known.refused,
        *known.refused_recently,
        *known.timed,
        *known.late,
        known.seconds,
        known.slack_min_ms,
        known.slack_before_ms,
        *known.ahead,
        known.median_ms,
        known.failed,
    )


def _unpack_shedding(raw: bytes, at: int) -> Shedding:
    values = list(_SHEDDING.unpack_from(raw, at))
    # Without a call to its constructor, which would take twice as long.
    known = _new_shedding(Shedding)
    known.quality, known.state, known.lent_until_us, known.response_ms = values[:4]
    known.refused_shares, known.rates, known.tokens = values[4:8], values[8:12], values[12:16]
    known.limits, known.asked, known.refused = values[16:20], values[20:24], values[24:28]
    known.refused_recently, known.timed, known.late = values[28:32], values[32:36], values[36:40]
    known.seconds, known.slack_min_ms, known.slack_before_ms = values[40:43]
    known.ahead = values[43:47]
    known.median_ms, known.failed = values[47:]
    return known


def _shedding_of_before(raw: bytes, at: int, updated_us: float) -> Shedding:
    """Overload control of an older record, whose throttles were set without an end."""
    values = list(_SHEDDING_BEFORE.unpack_from(raw, at))
    refused, timed = values[14:18], values[18:22]
    return Shedding(
        quality=values[0],
        state=values[1] * State.OVERLOADED,
        lent_until_us=updated_us + LENT_FOR_US,
        refused_shares=values[2:6],
        rates=values[6:10],
        tokens=values[10:14],
        asked=[one + other for one, other in zip(refused, timed, strict=True)],
        refused=refused,
        timed=timed,
        slack_min_ms=values[26],
        slack_before_ms=values[27],
    )


def read_plainly(raw: bytes) -> Reading | None:
    """Return the fields that the controller uses, of a record without trailers; None for any other record."""
    if len(raw) != _RECORD.size or raw[0] != VERSION:
        return None
    (
        _, flags, updated_us, balance, requests, admitted, refused, charged, _, _, charge, _, _, _, _, settled, squared,
        settles, _, _, rate, capacity, committed, _, _, _,
    ) = _RECORD.unpack_from(raw)  # fmt: skip
    if flags >= _HAS_HISTOGRAM or not (-_INF < balance <= capacity < _INF and 0 < rate < _INF and capacity > 0):
        return None
    if not updated_us > 0:
        return None
    return Reading(
        _FLAGS[flags], requests, admitted, refused, charged, charge, settled, squared, settles, rate, committed
    )  # fmt: skip


def read_record(raw: bytes) -> Record | None:
    """Return a record that the scripts would accept (lua/lib/record.lua); None for a damaged one (F-S11)."""
    try:
        record = unpack_record(raw)
    except ValueError:
        return None
    # Written so that NaN fails, too.
    if not (-_INF < record.balance <= record.capacity < _INF and 0 < record.rate < _INF):
        return None
    if not (record.capacity > 0 and record.updated_us > 0):
        return None
    return record if _is_trailer_sound(record) else None


def _is_trailer_sound(record: Record) -> bool:
    if not (0 < record.share <= 1 or record.share_partitions == 0):
        return False
    if record.shedding is not None and not is_sound(record.shedding, rate_max=RATE_MAX):
        return False
    if record.slots is not None and not are_slots_sound(record.slots, most=RATE_MAX):
        return False
    if record.learned and not are_entries_sound(record.learned, most=RATE_MAX):
        return False
    if record.lent is not None and not is_lent_sound(record.lent, most=RATE_MAX):
        return False
    block = record.block
    return block is None or (block.counted_until_us >= 0 and block.refused >= 0 and 0 <= block.until_us < _INF)


def pack_tombstone(mark: Tombstone) -> bytes:
    """Return a tombstone as the settle script writes it."""
    head = _TOMBSTONE.pack(2 if mark.final else 1, mark.late, mark.work, mark.deadline_us)
    return head + b"".join(map(_ACCOUNTED.pack, mark.accounted, mark.uncollected))


def pack_params(params: Params) -> bytes:
    """Return one row of policy parameters."""
    # Cached by identity: plans use the same parameters again and again, and hashing costs as much as packing.
    kept = _packed.get(id(params))
    if kept is not None and kept[0] is params:
        return kept[1]
    if len(_packed) >= PACKED_MAX:
        _packed.clear()
    packed = _pack_params(params)
    _packed[id(params)] = (params, packed)
    return packed


def _pack_params(params: Params) -> bytes:
    packed = _PARAMS.pack(
        params.flags,
        params.committed,
        params.cap,
        params.capacity,
        params.burst,
        params.burst_s,
        params.debt_max,
        params.settle_threshold,
        params.stop_debt,
        params.window_start_us,
        params.window_end_us,
        params.partitions,
    )
    if params.block is not None:
        packed += _BLOCK_TERMS.pack(*params.block)
    if params.overload is not None:
        packed += _OVERLOAD_TERMS.pack(*params.overload.targets_ms, params.overload.limit_initial)
    if params.in_flight is not None:
        packed += _IN_FLIGHT_TERMS.pack(*params.in_flight)
    if Flags.REFUNDS in params.flags:
        packed += _REFUND_TERMS.pack(params.refund_threshold)
    return packed if params.lending is None else packed + _LEND_TERMS.pack(*params.lending)
