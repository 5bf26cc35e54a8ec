"""Requests for leases and the rows that are kept of them, as `lua/lend.lua` reads and writes them (B8)."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk, LeaseWant, LentPressure, SliceAnswer
from limiter.model.bucket.lending import LendStatus, Part, Row, Used
from limiter.store.call_layout import REPLY_SIZE, pack_head, reply_time_us
from limiter.store.layout import pack_params

_ROW = Struct("<B11d")
_PART = Struct("<15d")
_ASK = Struct("<B12d")
_ASK_ROW = Struct("<7d")
_SLICE = Struct("<10d")
_PRESSURE = Struct("<14d")
_NUMBER = Struct("<H")
_GIVEN_BACK, _REVOKED = 1, 2


def pack_row(row: Row) -> bytes:
    """Return a lease as lend.lua keeps it."""
    state = _GIVEN_BACK if row.is_closed else _REVOKED if row.is_revoked else 0
    return _ROW.pack(state, row.number, row.weight, *row.used) + b"".join(map(_pack_part, row.parts))


def _pack_part(part: Part) -> bytes:
    return _PART.pack(
        part.end_us, part.rate, part.capacity, part.held_rate, part.held_capacity, part.tokens, part.moved,
        part.period_us, part.given, part.refused, part.content, part.short, part.demand, part.level, part.at_us,
    )  # fmt: skip


def unpack_row(raw: bytes) -> Row | None:
    """Read a lease as it is kept; None for something that is not ours."""
    if len(raw) < _ROW.size or (len(raw) - _ROW.size) % _PART.size:
        return None
    state, number, weight, *used = _ROW.unpack_from(raw)
    parts = [Part(*_PART.unpack_from(raw, at)) for at in range(_ROW.size, len(raw), _PART.size)]
    return Row(number, weight, Used(*used), parts, state == _GIVEN_BACK, state == _REVOKED)


def pack_ask(ask: LeaseAsk, *, now_us: int, expires_us: int) -> list[bytes]:
    """Return ARGV of lend.lua, but for the lease's entry in the index."""
    params: dict[bytes, int] = {}
    terms = [_NUMBER.pack(params.setdefault(pack_params(want.params), len(params) + 1)) for want in ask.wants]
    rows = [_ASK_ROW.pack(*want.ask, want.weight, want.refused, want.by_request) for want in ask.wants]
    head = _ASK.pack(ask.kind, ask.number, ask.taken, ask.weight, *ask.used)
    return [pack_head(now_us, expires_us, len(rows)), b"".join(params), b"".join(terms), head + b"".join(rows)]


def unpack_answer(reply: bytes, wants: Sequence[LeaseWant]) -> LeaseAnswer:
    """Return the answer to a request for a lease; raise CallExpired if nothing was done."""
    now_us = reply_time_us(reply)
    status, at = LendStatus(reply[REPLY_SIZE]), REPLY_SIZE + 1
    if len(reply) == at:
        return LeaseAnswer(status, now_us)
    slices = []
    for want in wants:
        one = SliceAnswer(*_SLICE.unpack_from(reply, at))
        at += _SLICE.size
        if want.params.overload is not None:
            values = _PRESSURE.unpack_from(reply, at)
            at += _PRESSURE.size
            one = one._replace(pressure=LentPressure(values[0], values[1], values[2:6], values[6:10], values[10:14]))
        slices.append(one)
    return LeaseAnswer(status, now_us, tuple(slices))
