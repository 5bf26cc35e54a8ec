"""How records, calls and replies look as bytes: the Python side of `lua/lib/record.lua` and the scripts' ARGV.

Floats go as little-endian float64 and never as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from limiter.model.bucket import HISTOGRAM_STEPS, Flags, Params, Record
from limiter.model.ledger import Tombstone
from limiter.model.operations import (
    Acquire,
    AcquireAnswer,
    AcquireStatus,
    BucketAnswer,
    BucketSettled,
    Settle,
    SettleAnswer,
    SettleStatus,
    Verdict,
)

VERSION = 1
PACKED_MAX = 4096

_packed: dict[int, tuple[Params, bytes]] = {}

_RECORD = Struct("<BB19d")
_HISTOGRAM = Struct(f"<{HISTOGRAM_STEPS}d")
_PARAMS = Struct("<B9d")
_HEAD = Struct("<ddH")
_REPLY = Struct("<Bd")

_ACQUIRE = Struct("<BBd")
_WANT = Struct("<HBdd")
_IDEMPOTENCY = Struct("<H16sI")
_ANSWER = Struct("<Bdddd")
_REPLAYED = Struct("<I")
_MEMO = Struct("<dI")

_SETTLE = Struct("<HBBdddddd")
_CHARGE = Struct("<HBdd")
_SETTLED = Struct("<BBBd")
_BUCKET_SETTLED = Struct("<Bddddd")
_TOMBSTONE = Struct("<BBd")
_ACCOUNTED = Struct("<dd")

_LEASE, _DRY_RUN, _IDEMPOTENT = 1, 2, 4
_DONE = 1

_FIELDS = tuple(name for name in Record.__dataclass_fields__ if name not in ("flags", "histogram"))
_VERDICTS = tuple(Verdict)
_REFUSED, _GRANTED = AcquireStatus.REFUSED, AcquireStatus.GRANTED


class CallExpired(Exception):
    """The server's clock is past the call's expiry: nothing was done."""

    def __init__(self, now_us: int) -> None:
        super().__init__(f"the call came after its expiry, at {now_us} us")
        self.now_us = now_us


def pack_record(record: Record) -> bytes:
    """A record as the scripts write it."""
    fields = _RECORD.pack(VERSION, record.flags, *(getattr(record, name) for name in _FIELDS))
    return fields + _HISTOGRAM.pack(*record.histogram) if record.histogram else fields


def unpack_record(raw: bytes) -> Record:
    """A record as the scripts wrote it; ValueError if it is none."""
    if len(raw) not in (_RECORD.size, _RECORD.size + _HISTOGRAM.size) or raw[0] != VERSION:
        raise ValueError("not a bucket record of this version")
    _, flags, *fields = _RECORD.unpack_from(raw)
    record = Record(flags=Flags(flags), **dict(zip(_FIELDS, fields, strict=True)))
    if len(raw) > _RECORD.size:
        record.histogram = list(_HISTOGRAM.unpack_from(raw, _RECORD.size))
    return record


def pack_tombstone(mark: Tombstone) -> bytes:
    """A tombstone as the settle script writes it."""
    head = _TOMBSTONE.pack(2 if mark.final else 1, mark.late, mark.work)
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
    return _PARAMS.pack(
        params.flags,
        params.committed,
        params.rate,
        params.capacity,
        params.burst_s,
        params.debt_max,
        params.settle_threshold,
        params.stop_debt,
        params.window_start_us,
        params.window_end_us,
    )


class Terms:
    """The buckets of one call, numbered as they come, with the parameters each goes by."""

    __slots__ = ("buckets", "numbers", "rows")

    def __init__(self) -> None:
        self.buckets: dict[str, int] = {}
        self.rows: dict[bytes, int] = {}
        self.numbers: list[int] = []

    def number(self, bucket: str, params: Params | None) -> int:
        """The bucket's number in the call, from 1."""
        number = self.buckets.get(bucket)
        if number is None:
            self.buckets[bucket] = number = len(self.buckets) + 1
            self.numbers.append(0 if params is None else self.rows.setdefault(pack_params(params), len(self.rows) + 1))
        return number

    def arguments(self, *, now_us: int, expires_us: int) -> list[bytes]:
        """ARGV[1] to ARGV[3]."""
        head = _HEAD.pack(now_us, expires_us, len(self.buckets))
        return [head, b"".join(self.rows), Struct(f"<{len(self.numbers)}H").pack(*self.numbers)]


def pack_acquires(operations: Sequence[Acquire], terms: Terms, keys: dict[str, int]) -> bytes:
    """ARGV[4] of acquire.lua; numbers buckets in `terms` and idempotency keys in `keys`."""
    parts: list[bytes] = []
    append, number, pack_want = parts.append, terms.number, _WANT.pack
    for operation in operations:
        wants, requests, lease, dry_run, idempotency = operation
        flags = _LEASE * lease | _DRY_RUN * dry_run | _IDEMPOTENT * (idempotency is not None)
        append(_ACQUIRE.pack(flags, len(wants), requests))
        for bucket, params, minimum, charge, learned in wants:
            append(pack_want(number(bucket, params), learned, minimum, charge))
        if idempotency is not None:
            key_number = keys.setdefault(idempotency.key, len(keys) + 1)
            append(_IDEMPOTENCY.pack(key_number, idempotency.fingerprint, len(idempotency.memo)))
            append(idempotency.memo)
    return b"".join(parts)


def unpack_acquires(reply: bytes, operations: Sequence[Acquire]) -> list[AcquireAnswer]:
    """Answers in the order of the operations; CallExpired if nothing was done."""
    now_us = reply_time_us(reply)
    answers, at = [], _REPLY.size
    for operation in operations:
        answer, at = _unpack_acquire(reply, at, len(operation.wants), now_us)
        answers.append(answer)
    return answers


def _unpack_acquire(reply: bytes, at: int, count: int, now_us: int) -> tuple[AcquireAnswer, int]:
    status = reply[at]
    at += 1
    if status <= _GRANTED:
        rows = []
        for _ in range(count):
            verdict, balance, charge, rate, capacity = _ANSWER.unpack_from(reply, at)
            rows.append(BucketAnswer(_VERDICTS[verdict], balance, charge, rate, capacity))
            at += _ANSWER.size
        return AcquireAnswer(_GRANTED if status else _REFUSED, now_us, tuple(rows)), at
    if status == AcquireStatus.REPLAYED:
        (size,) = _REPLAYED.unpack_from(reply, at)
        at += _REPLAYED.size
        return _unpack_replayed(reply[at : at + size]), at + size
    return AcquireAnswer(AcquireStatus(status), now_us), at


def _unpack_replayed(kept: bytes) -> AcquireAnswer:
    """The first decision under an idempotency key, with the time and the memo of then."""
    first_us, memo_size = _MEMO.unpack_from(kept)
    at = _MEMO.size + memo_size
    count = (len(kept) - at - 1) // _ANSWER.size
    answer, _ = _unpack_acquire(kept, at, count, int(first_us))
    return answer._replace(memo=kept[_MEMO.size : at])


def pack_settles(operations: Sequence[Settle], terms: Terms, tombstones: dict[str, int]) -> bytes:
    """ARGV[4] of settle.lua; numbers buckets in `terms` and reservations in `tombstones`."""
    parts: list[bytes] = []
    for operation in operations:
        parts.append(
            _SETTLE.pack(
                tombstones.setdefault(operation.reservation, len(tombstones) + 1),
                operation.final,
                len(operation.charges),
                operation.work,
                operation.requests,
                operation.latency_ms,
                operation.expected_ms,
                operation.acquired_us,
                operation.deadline_us,
            )
        )
        for bucket, charge, weight, params, in_requests in operation.charges:
            parts.append(_CHARGE.pack(terms.number(bucket, params), in_requests, charge, weight))
    return b"".join(parts)


def unpack_settles(reply: bytes, operations: Sequence[Settle]) -> list[SettleAnswer]:
    """Answers in the order of the operations; CallExpired if nothing was done."""
    now_us = reply_time_us(reply)
    answers, at = [], _REPLY.size
    for operation in operations:
        status = SettleStatus(reply[at])
        if status in (SettleStatus.GONE, SettleStatus.CORRUPT):
            answers.append(SettleAnswer(status, now_us))
            at += 1
            continue
        _, late, stop, work = _SETTLED.unpack_from(reply, at)
        at += _SETTLED.size
        rows = []
        for _ in operation.charges:
            present, *values = _BUCKET_SETTLED.unpack_from(reply, at)
            rows.append(BucketSettled(present == 1, *values))
            at += _BUCKET_SETTLED.size
        answers.append(SettleAnswer(status, now_us, late == 1, stop == 1, work, tuple(rows)))
    return answers


def reply_time_us(reply: bytes) -> int:
    """The store's time when it made this reply; CallExpired if the reply is that it came too late."""
    code, now_us = _REPLY.unpack_from(reply)
    if code != _DONE:
        raise CallExpired(int(now_us))
    return int(now_us)
