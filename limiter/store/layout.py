"""How records, calls and replies look as bytes: the Python side of `lua/lib/record.lua` and the scripts' ARGV.

Floats go as little-endian float64 and never as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from struct import Struct
from struct import error as struct_error

from limiter.model.bucket.block import Block
from limiter.model.bucket.bucket import HISTOGRAM_STEPS, RATE_MAX, RECORD_FLAGS, ROOM_SIZE, Flags, Params, Record
from limiter.model.bucket.ledger import Tombstone
from limiter.model.bucket.operations import (
    Acquire,
    AcquireAnswer,
    AcquireStatus,
    BucketAnswer,
    BucketSettled,
    Pressure,
    Settle,
    SettleAnswer,
    SettleStatus,
    Verdict,
)
from limiter.model.control.stewardship import Lease, Steer, SteerStatus
from limiter.model.overload.shedding import CLASSES, Shedding, ShedOrder, is_sound
from limiter.model.overload.signals import Report

VERSION, VERSION_BEFORE = 2, 1
"""Records of the version before are read, and written anew as this one."""
PACKED_MAX = 4096
STEERED_MAX = 256
"""Buckets that one call of steer.lua may carry: bounds how long the store is busy with it."""

_packed: dict[int, tuple[Params, bytes]] = {}

_RECORD = Struct("<BH6diId24s11d")
_RECORD_BEFORE = Struct("<BB19d")
_HISTOGRAMS = {classes: Struct(f"<{HISTOGRAM_STEPS * classes}d") for classes in (1, len(CLASSES))}
"""One histogram, or one for each class."""
_SHARE = Struct("<3d")
_REQUESTS_UNTIL = Struct("<d")
_SHEDDING = Struct("<28d")
_BLOCK = Struct("<3d")
_PARAMS = Struct("<H11d")
_BLOCK_TERMS = Struct("<3d")
_HEAD = Struct("<ddH")
_REPLY = Struct("<Bd")
REPLY_SIZE = _REPLY.size
"""Where the answers begin in a reply."""

_ANSWER = Struct("<Bdddd")
_PRESSURE = Struct("<Bddd")
_REPLAYED = Struct("<I")
_MEMO = Struct("<dI")

_SETTLED = Struct("<BBBddd")
_BUCKET_SETTLED = Struct("<Bddddd")
_TOMBSTONE = Struct("<BBdd")
_ACCOUNTED = Struct("<dd")

_FENCE = Struct("<d")
_STEER_HEAD = Struct("<dH")
_STEER = Struct("<HB5d")
_STEER_OVERLOAD = Struct("<10d")
_STATE = Struct("<I")

_REPORT = Struct("<8sdH")
_LOAD = Struct("<d")

_SHEDS = 16
_IN_REQUESTS = 4
PRESENT, SETTLED_IN_REQUESTS = 1, 2
_SETS_CAP, _SETS_CHARGE, _SETS_UNIT, _SETS_SHARE, _SETS_STATE, _SETS_OVERLOAD = 1, 2, 4, 8, 16, 32
_DONE, _LOST = 1, 3

_NOTHING = math.nan
"""Stands where nothing is set; the scripts would not take it anyway."""

_INF = math.inf
_EPOCHS = 2**31
_NO_ROOM = bytes(ROOM_SIZE)
_new_record = Record.__new__
_SHARE_FIELDS = ("share", "share_until_us", "share_partitions")
_APART = {"flags", "histogram", "shedding", "block", "requests_until", *_SHARE_FIELDS}
_FIELDS = tuple(name for name in Record.__dataclass_fields__ if name not in _APART)
_FLAGS = tuple(Flags(bits) for bits in range(RECORD_FLAGS + 1))
# Asking an enum, record by record, is dear.
_HAS_HISTOGRAM, _HAS_SHARE, _IS_AUTO = int(Flags.HISTOGRAM), int(Flags.DIVIDED), int(Flags.AUTO)
_HAS_SHEDDING, _HAS_BLOCK = int(Flags.OVERLOAD), int(Flags.BLOCK)
_HAS_TRAILER = _HAS_HISTOGRAM | _HAS_SHARE | _IS_AUTO | _HAS_SHEDDING | _HAS_BLOCK


def _classes(flags: int) -> int:
    """How many classes are counted apart."""
    return len(CLASSES) if flags & _HAS_SHEDDING else 1


def _trailers_size(flags: int) -> int:
    histogram = _HISTOGRAMS[_classes(flags)].size if flags & _HAS_HISTOGRAM else 0
    share = _SHARE.size if flags & _HAS_SHARE else 0
    until = _REQUESTS_UNTIL.size if flags & _IS_AUTO else 0
    shedding = _SHEDDING.size if flags & _HAS_SHEDDING else 0
    return histogram + share + until + shedding + (_BLOCK.size if flags & _HAS_BLOCK else 0)


_TRAILERS = tuple(map(_trailers_size, range(RECORD_FLAGS + 1)))
_VERDICTS = {verdict + unit: (verdict, unit > 0) for verdict in Verdict for unit in (0, _IN_REQUESTS)}
"""What the first byte of an answer means: the verdict, and whether the bucket counts requests."""

_REFUSED, _GRANTED = AcquireStatus.REFUSED, AcquireStatus.GRANTED


class CallExpired(Exception):
    """The server's clock is past the call's expiry: nothing was done."""

    def __init__(self, now_us: int) -> None:
        super().__init__(f"the call came after its expiry, at {now_us} us")
        self.now_us = now_us


class LeaseLost(Exception):
    """The slot is another's, or nobody's, by now: nothing was done (F-P7)."""


def pack_record(record: Record) -> bytes:
    """A record as the scripts write it."""
    packed = _RECORD.pack(VERSION, record.flags, *(getattr(record, name) for name in _FIELDS))
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
    return packed


def unpack_record(raw: bytes) -> Record:
    """A record as the scripts wrote it; ValueError if it is none."""
    record = _new_record(Record)
    # Field by field, in the order of the layout: a controller reads thousands of them in a tenth of a second.
    if len(raw) >= _RECORD.size and raw[0] == VERSION:
        fixed_size = _RECORD.size
        (
            _, flags, record.updated_us, record.balance, record.requests, record.admitted, record.refused,
            record.work_charged, record.epoch, record.kept_until_s, record.charge, record.room, record.work_settled,
            record.work_squared, record.settles, record.missed, record.uncollected, record.rate, record.capacity,
            record.committed, record.debt_max, record.settle_threshold, record.stop_debt,
        ) = _RECORD.unpack_from(raw)  # fmt: skip
    else:
        fixed_size, flags = _RECORD_BEFORE.size, _unpack_before(record, raw)
    if flags > RECORD_FLAGS or len(raw) != fixed_size + _TRAILERS[flags]:
        raise ValueError("not a bucket record of this version")
    record.flags, record.histogram, record.shedding, record.block = _FLAGS[flags], [], None, None
    record.share = record.share_until_us = record.share_partitions = record.requests_until = 0.0
    if flags & _HAS_TRAILER:
        _unpack_trailers(record, flags, raw, fixed_size)
    return record


def _unpack_before(record: Record, raw: bytes) -> int:
    """The fixed fields of a record of the version before, whose trailers are the same; the flags."""
    if len(raw) < _RECORD_BEFORE.size or raw[0] != VERSION_BEFORE:
        raise ValueError("not a bucket record of this version")
    (
        _, flags, record.updated_us, record.balance, record.rate, record.capacity, record.committed, record.debt_max,
        record.settle_threshold, record.stop_debt, record.charge, epoch, record.requests, record.admitted,
        record.refused, record.work_charged, record.work_settled, record.work_squared, record.settles, record.missed,
        record.uncollected,
    ) = _RECORD_BEFORE.unpack_from(raw)  # fmt: skip
    record.epoch = int(epoch) if -1 <= epoch < _EPOCHS else -1
    record.kept_until_s, record.room = 0, _NO_ROOM
    return int(flags)


def _unpack_trailers(record: Record, flags: int, raw: bytes, at: int) -> None:
    """What only some buckets have."""
    if flags & _HAS_HISTOGRAM:
        histograms = _HISTOGRAMS[_classes(flags)]
        record.histogram = list(histograms.unpack_from(raw, at))
        at += histograms.size
    if flags & _HAS_SHARE:
        record.share, record.share_until_us, record.share_partitions = _SHARE.unpack_from(raw, at)
        at += _SHARE.size
    if flags & _IS_AUTO:
        (record.requests_until,) = _REQUESTS_UNTIL.unpack_from(raw, at)
        at += _REQUESTS_UNTIL.size
    if flags & _HAS_SHEDDING:
        record.shedding = _unpack_shedding(raw, at)
        at += _SHEDDING.size
    if flags & _HAS_BLOCK:
        record.block = Block(*_BLOCK.unpack_from(raw, at))


def _pack_shedding(known: Shedding) -> bytes:
    return _SHEDDING.pack(
        known.quality,
        known.overloaded,
        *known.refused_shares,
        *known.rates,
        *known.tokens,
        *known.refused,
        *known.timed,
        *known.missed,
        known.slack_min_ms,
        known.slack_before_ms,
    )


def _unpack_shedding(raw: bytes, at: int) -> Shedding:
    quality, overloaded, *by_class, slack_min_ms, slack_before_ms = _SHEDDING.unpack_from(raw, at)
    shares, rates, tokens, refused, timed, missed = (by_class[i : i + len(CLASSES)] for i in range(0, 24, len(CLASSES)))
    return Shedding(
        quality=quality,
        overloaded=overloaded,
        refused_shares=shares,
        rates=rates,
        tokens=tokens,
        refused=refused,
        timed=timed,
        missed=missed,
        slack_min_ms=slack_min_ms,
        slack_before_ms=slack_before_ms,
    )


def read_record(raw: bytes) -> Record | None:
    """A record that the scripts would take (lua/lib/record.lua); None for one that is damaged (F-S11)."""
    try:
        record = unpack_record(raw)
    except ValueError:
        return None
    # Written so that NaN fails as well.
    if not (-_INF < record.balance <= record.capacity < _INF and 0 < record.rate < _INF):
        return None
    if not (record.capacity > 0 and record.updated_us > 0):
        return None
    return record if not record.flags & _HAS_TRAILER or _is_trailer_sound(record) else None


def _is_trailer_sound(record: Record) -> bool:
    if not (0 < record.share <= 1 or record.share_partitions == 0):
        return False
    if record.shedding is not None and not is_sound(record.shedding, rate_max=RATE_MAX):
        return False
    block = record.block
    return block is None or (block.counted_until_us >= 0 and block.refused >= 0 and 0 <= block.until_us < _INF)


def pack_tombstone(mark: Tombstone) -> bytes:
    """A tombstone as the settle script writes it."""
    head = _TOMBSTONE.pack(2 if mark.final else 1, mark.late, mark.work, mark.deadline_us)
    return head + b"".join(map(_ACCOUNTED.pack, mark.accounted, mark.uncollected))


def pack_params(params: Params) -> bytes:
    """One row of policy parameters."""
    # By identity: plans use the same parameters again and again, and to hash them costs as much as to pack them.
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
    return packed if params.block is None else packed + _BLOCK_TERMS.pack(*params.block)


def pack_head(now_us: int, expires_us: int, buckets: int) -> bytes:
    """ARGV[1] of a script that takes batches."""
    return _HEAD.pack(now_us, expires_us, buckets)


def unpack_acquires(reply: bytes, operations: Sequence[Acquire]) -> list[AcquireAnswer]:
    """Answers in the order of the operations; CallExpired if nothing was done."""
    now_us = reply_time_us(reply)
    answers, at = [], REPLY_SIZE
    for operation in operations:
        answer, at = unpack_acquire(reply, at, len(operation.wants), now_us)
        answers.append(answer)
    return answers


def unpack_acquire(reply: bytes, at: int, count: int, now_us: int) -> tuple[AcquireAnswer, int]:
    """The answer of an operation on so many buckets, and where the next one begins."""
    status = reply[at]
    at += 1
    if status <= _GRANTED:
        rows = []
        for _ in range(count):
            code, balance, charge, rate, capacity = _ANSWER.unpack_from(reply, at)
            verdict, in_requests = _VERDICTS[code]
            rows.append(BucketAnswer(verdict, balance, charge, rate, capacity, in_requests))
            at += _ANSWER.size
        return AcquireAnswer(_GRANTED if status else _REFUSED, now_us, tuple(rows)), at
    if status >= _SHEDS:
        rows = [_unpack_drawn(reply, at + number * _DRAWN_SIZE) for number in range(count)]
        return AcquireAnswer(AcquireStatus(status - _SHEDS), now_us, tuple(rows)), at + count * _DRAWN_SIZE
    if status == AcquireStatus.REPLAYED:
        (size,) = _REPLAYED.unpack_from(reply, at)
        at += _REPLAYED.size
        return _unpack_replayed(reply[at : at + size], now_us), at + size
    return AcquireAnswer(AcquireStatus(status), now_us), at


_DRAWN_SIZE = _ANSWER.size + _PRESSURE.size


def _unpack_drawn(reply: bytes, at: int) -> BucketAnswer:
    """One bucket's part in an operation that had a lot."""
    code, balance, charge, rate, capacity = _ANSWER.unpack_from(reply, at)
    overloaded, quality, refused_share, class_rate = _PRESSURE.unpack_from(reply, at + _ANSWER.size)
    verdict, in_requests = _VERDICTS[code]
    pressure = Pressure(overloaded == 1, quality, refused_share, class_rate)
    return BucketAnswer(verdict, balance, charge, rate, capacity, in_requests, pressure)


def _unpack_replayed(kept: bytes, now_us: int) -> AcquireAnswer:
    """The first decision under an idempotency key, with the time and the memo of then; CORRUPT if it is damaged."""
    try:
        first_us, memo_size = _MEMO.unpack_from(kept)
        at = _MEMO.size + memo_size
        count = (len(kept) - at - 1) // (_DRAWN_SIZE if kept[at] >= _SHEDS else _ANSWER.size)
        answer, end = unpack_acquire(kept, at, count, int(first_us))
    except (struct_error, IndexError, KeyError, ValueError, OverflowError):
        return AcquireAnswer(AcquireStatus.CORRUPT, now_us)
    if end != len(kept) or not answer.buckets or not 0 < first_us < RATE_MAX:
        return AcquireAnswer(AcquireStatus.CORRUPT, now_us)
    return answer.but(memo=kept[_MEMO.size : at])


def unpack_settles(reply: bytes, operations: Sequence[Settle]) -> list[SettleAnswer]:
    """Answers in the order of the operations; CallExpired if nothing was done."""
    now_us = reply_time_us(reply)
    answers, at = [], REPLY_SIZE
    for operation in operations:
        answer, at = unpack_settle(reply, at, len(operation.charges), now_us)
        answers.append(answer)
    return answers


def unpack_settle(reply: bytes, at: int, count: int, now_us: int) -> tuple[SettleAnswer, int]:
    """The answer of an operation on so many buckets, and where the next one begins."""
    status = SettleStatus(reply[at])
    if status in (SettleStatus.GONE, SettleStatus.CORRUPT):
        return SettleAnswer(status, now_us), at + 1
    _, late, stop, work, deadline_us, before_us = _SETTLED.unpack_from(reply, at)
    at += _SETTLED.size
    rows = []
    for _ in range(count):
        code, balance, adjusted, uncollected, rate, capacity = _BUCKET_SETTLED.unpack_from(reply, at)
        present, in_requests = code >= PRESENT, code >= SETTLED_IN_REQUESTS
        rows.append(BucketSettled(present, balance, adjusted, uncollected, rate, capacity, in_requests))
        at += _BUCKET_SETTLED.size
    return SettleAnswer(status, now_us, late == 1, stop == 1, work, deadline_us, before_us, tuple(rows)), at


def pack_token(lease: Lease) -> bytes:
    """What the store keeps of a lease, and what its holder shows."""
    return _FENCE.pack(lease.fence) + lease.owner


def unpack_token(raw: bytes, left_ms: int) -> Lease | None:
    """A lease as it is kept; None for something that is not ours."""
    if len(raw) <= _FENCE.size:
        return None
    return Lease(raw[_FENCE.size :], int(_FENCE.unpack_from(raw)[0]), left_ms)


def pack_steers(rows: Sequence[Steer], lease: Lease, *, now_us: int) -> list[bytes]:
    """ARGV of steer.lua."""
    params: dict[bytes, int] = {}
    parts: list[bytes] = []
    for _, terms, cap, charge, requests_for, share, share_for_us, state, overload in rows:
        parts.append(
            _STEER.pack(
                params.setdefault(pack_params(terms), len(params) + 1),
                _SETS_CAP * (cap is not None)
                | _SETS_CHARGE * (charge is not None)
                | _SETS_UNIT * (requests_for is not None)
                | _SETS_SHARE * (share is not None)
                | _SETS_STATE * (state is not None)
                | _SETS_OVERLOAD * (overload is not None),
                _NOTHING if cap is None else cap,
                _NOTHING if charge is None else charge,
                _NOTHING if requests_for is None else requests_for,
                _NOTHING if share is None else share,
                share_for_us,
            )
        )
        if overload is not None:
            parts.append(_pack_order(overload))
        if state is not None:
            parts += (_STATE.pack(len(state)), state)
    return [_STEER_HEAD.pack(now_us, len(rows)) + pack_token(lease), b"".join(params), b"".join(parts)]


def _pack_order(order: ShedOrder) -> bytes:
    return _STEER_OVERLOAD.pack(order.quality, order.overloaded, *order.refused_shares, *order.rates)


def unpack_steers(reply: bytes, rows: Sequence[Steer]) -> list[SteerStatus]:
    """Statuses in the order of the rows; LeaseLost if nothing was done."""
    kept_lease_us(reply)
    assert len(reply) == _REPLY.size + len(rows)
    return [SteerStatus(status) for status in reply[_REPLY.size :]]


def kept_lease_us(reply: bytes) -> int:
    """The store's time when it made this reply; LeaseLost if the reply is that another has the slot."""
    code, now_us = _REPLY.unpack_from(reply)
    if code == _LOST:
        raise LeaseLost("the slot was taken over, or its lease has ended")
    return int(now_us)


def reply_time_us(reply: bytes) -> int:
    """The store's time when it made this reply; CallExpired if the reply is that it came too late."""
    code, now_us = _REPLY.unpack_from(reply)
    if code != _DONE:
        raise CallExpired(int(now_us))
    return int(now_us)


def pack_loads(loads: Mapping[str, float]) -> bytes:
    """ARGV[3] of signal.lua: names and loads."""
    parts: list[bytes] = []
    for name, load in loads.items():
        raw = name.encode()
        parts += (bytes([len(raw)]), raw, _LOAD.pack(load))
    return b"".join(parts)


def unpack_reports(raw: bytes) -> tuple[Report, ...]:
    """What signal.lua keeps, oldest first; nothing if it cannot be read."""
    reports, at = [], 0
    try:
        while at < len(raw):
            source, reported_us, size = _REPORT.unpack_from(raw, at)
            at += _REPORT.size
            reports.append(Report(source, reported_us, _unpack_loads(raw[at : at + size])))
            at += size
    except (struct_error, UnicodeDecodeError, IndexError):
        return ()
    return tuple(reports)


def _unpack_loads(raw: bytes) -> dict[str, float]:
    loads, at = {}, 0
    while at < len(raw):
        end = at + 1 + raw[at]
        (loads[raw[at + 1 : end].decode()],) = _LOAD.unpack_from(raw, end)
        at = end + _LOAD.size
    return loads
