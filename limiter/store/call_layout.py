"""Calls and replies as bytes: the Python side of the scripts' ARGV and RETURNS. The headers in `lua/` describe both.

Rows of parameters, and what the store keeps, are in `limiter.store.layout`. Floats are sent as little-endian float64,
never as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from struct import Struct
from struct import error as struct_error

from limiter.model.bucket.bucket import RATE_MAX
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
from limiter.model.overload.shedding import ShedOrder, State
from limiter.model.overload.signals import Report
from limiter.store.layout import pack_params

STEERED_MAX = 256
"""Buckets in one call of steer.lua: bounds how long the store is busy with it."""
_HEAD = Struct("<ddH")
_REPLY = Struct("<Bd")
REPLY_SIZE = _REPLY.size
"""The offset of the first answer in a reply."""

_ANSWER = Struct("<Bdddd")
_PRESSURE = Struct("<Bdddd")
_REPLAYED = Struct("<I")
_MEMO = Struct("<dI")

_SETTLED = Struct("<BBBddd")
_BUCKET_SETTLED = Struct("<Bddddd")

_FENCE = Struct("<d")
_STEER_HEAD = Struct("<dH")
_STEER = Struct("<HB5d")
_STEER_OVERLOAD = Struct("<16d")
_STATE = Struct("<I")
_LEARNED_CHARGE = Struct("<Id")

_REPORT = Struct("<8sdH")
_LOAD = Struct("<d")

_SHEDS = 16
_IN_REQUESTS = 4
PRESENT, SETTLED_IN_REQUESTS = 1, 2
_SETS_CAP, _SETS_CHARGE, _SETS_UNIT, _SETS_SHARE, _SETS_STATE, _SETS_OVERLOAD = 1, 2, 4, 8, 16, 32
_SETS_CHARGES, _LASTS = 64, 128
_DONE, _LOST = 1, 3

_NOTHING = math.nan
"""Marks a field that is not set; the scripts accept no NaN in its place."""
_VERDICTS = {verdict + unit: (verdict, unit > 0) for verdict in Verdict for unit in (0, _IN_REQUESTS)}
"""The meaning of an answer's first byte: the verdict, and whether the bucket counts requests."""

_STATES = tuple(State)
_REFUSED, _GRANTED = AcquireStatus.REFUSED, AcquireStatus.GRANTED


class CallExpired(Exception):
    """The server's clock is past the call's expiry; nothing was done."""

    def __init__(self, now_us: int) -> None:
        super().__init__(f"the call came after its expiry, at {now_us} us")
        self.now_us = now_us


class LeaseLost(Exception):
    """Another controller, or none, owns the slot now; nothing was done (F-P7)."""


def pack_head(now_us: int, expires_us: int, buckets: int) -> bytes:
    """Return ARGV[1] of a script that takes batches."""
    return _HEAD.pack(now_us, expires_us, buckets)


def unpack_acquires(reply: bytes, operations: Sequence[Acquire]) -> list[AcquireAnswer]:
    """Return answers in the order of the operations; raise CallExpired if nothing was done."""
    now_us = reply_time_us(reply)
    answers, at = [], REPLY_SIZE
    for operation in operations:
        answer, at = unpack_acquire(reply, at, len(operation.wants), now_us)
        answers.append(answer)
    return answers


def unpack_acquire(reply: bytes, at: int, count: int, now_us: int) -> tuple[AcquireAnswer, int]:
    """Return the answer of an operation on `count` buckets, and the offset of the next one."""
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
    """Read the answer of one bucket in an operation with a draw."""
    code, balance, charge, rate, capacity = _ANSWER.unpack_from(reply, at)
    state, quality, refused_share, class_rate, limit = _PRESSURE.unpack_from(reply, at + _ANSWER.size)
    verdict, in_requests = _VERDICTS[code]
    pressure = Pressure(_STATES[state], quality, refused_share, class_rate, limit)
    return BucketAnswer(verdict, balance, charge, rate, capacity, in_requests, pressure)


def _unpack_replayed(kept: bytes, now_us: int) -> AcquireAnswer:
    """Return the first decision under an idempotency key, with its time and memo; CORRUPT if it is damaged."""
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
    """Return answers in the order of the operations; raise CallExpired if nothing was done."""
    now_us = reply_time_us(reply)
    answers, at = [], REPLY_SIZE
    for operation in operations:
        answer, at = unpack_settle(reply, at, len(operation.charges), now_us)
        answers.append(answer)
    return answers


def unpack_settle(reply: bytes, at: int, count: int, now_us: int) -> tuple[SettleAnswer, int]:
    """Return the answer of an operation on `count` buckets, and the offset of the next one."""
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
    """Return a lease as the store keeps it and as its holder presents it."""
    return _FENCE.pack(lease.fence) + lease.owner


def unpack_token(raw: bytes, left_ms: int) -> Lease | None:
    """Read a lease that the store keeps; None if the bytes are no lease."""
    if len(raw) <= _FENCE.size:
        return None
    return Lease(raw[_FENCE.size :], int(_FENCE.unpack_from(raw)[0]), left_ms)


def pack_steers(rows: Sequence[Steer], lease: Lease, *, now_us: int) -> list[bytes]:
    """Return ARGV of steer.lua."""
    params: dict[bytes, int] = {}
    parts: list[bytes] = []
    for _, terms, cap, charge, requests_for, share, share_for_us, state, overload, charges, lasts in rows:
        parts.append(
            _STEER.pack(
                params.setdefault(pack_params(terms), len(params) + 1),
                _SETS_CAP * (cap is not None)
                | _SETS_CHARGE * (charge is not None)
                | _SETS_UNIT * (requests_for is not None)
                | _SETS_SHARE * (share is not None)
                | _SETS_STATE * (state is not None)
                | _SETS_OVERLOAD * (overload is not None)
                | _SETS_CHARGES * bool(charges)
                | _LASTS * lasts,
                _NOTHING if cap is None else cap,
                _NOTHING if charge is None else charge,
                _NOTHING if requests_for is None else requests_for,
                _NOTHING if share is None else share,
                share_for_us,
            )
        )
        if overload is not None:
            parts.append(_pack_order(overload))
        if charges:
            parts += (bytes([len(charges)]), *(_LEARNED_CHARGE.pack(*learned) for learned in charges))
        if state is not None:
            parts += (_STATE.pack(len(state)), state)
    return [_STEER_HEAD.pack(now_us, len(rows)) + pack_token(lease), b"".join(params), b"".join(parts)]


def _pack_order(order: ShedOrder) -> bytes:
    return _STEER_OVERLOAD.pack(
        order.quality, order.state, order.lent_for_us, order.response_ms, *order.refused_shares, *order.rates,
        *order.limits,
    )  # fmt: skip


def unpack_steers(reply: bytes, rows: Sequence[Steer]) -> list[SteerStatus]:
    """Return statuses in the order of the rows; raise LeaseLost if nothing was done."""
    kept_lease_us(reply)
    assert len(reply) == _REPLY.size + len(rows)
    return [SteerStatus(status) for status in reply[_REPLY.size :]]


def kept_lease_us(reply: bytes) -> int:
    """Return the store's time of this reply; raise LeaseLost if it says that another controller owns the slot."""
    code, now_us = _REPLY.unpack_from(reply)
    if code == _LOST:
        raise LeaseLost("the slot was taken over, or its lease has ended")
    return int(now_us)


def reply_time_us(reply: bytes) -> int:
    """Return the store's time of this reply; raise CallExpired if it says that the call came too late."""
    code, now_us = _REPLY.unpack_from(reply)
    if code != _DONE:
        raise CallExpired(int(now_us))
    return int(now_us)


def pack_loads(loads: Mapping[str, float]) -> bytes:
    """Return ARGV[3] of signal.lua: names and loads."""
    parts: list[bytes] = []
    for name, load in loads.items():
        raw = name.encode()
        parts += (bytes([len(raw)]), raw, _LOAD.pack(load))
    return b"".join(parts)


def unpack_reports(raw: bytes) -> tuple[Report, ...]:
    """Read the reports that signal.lua keeps, oldest first; none if they cannot be read."""
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
