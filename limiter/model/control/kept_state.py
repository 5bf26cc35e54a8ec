"""What the controller keeps of a bucket in the store, so that the next owner continues from there (F-P7, R11).

    version, state of the steps, reasons of the last cycles        as msgpack
    with overload control: its state, its reasons                  after these

another version, damaged, or not a number anywhere    as if nothing were kept: begin again (F-P8)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

import msgspec

from limiter.model.control.caps import Reason
from limiter.model.control.cycle import State
from limiter.model.overload.overload_control import Note, OverloadState, pack_state

VERSION = 1
REASONS_MAX = 10


class KeptState(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One bucket's past, as far as it matters."""

    version: int
    state: State
    reasons: list[Reason]
    """Why the cap is what it is: the last cycles, oldest first."""
    overload: bytes = b""
    """What overload control remembers, packed; empty where there is none."""
    notes: list[Note] = []
    """Why overload control does what it does, oldest first."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KeptState).decode


def pack(
    state: State, reasons: Iterable[Reason], overload: OverloadState | None = None, notes: Iterable[Note] = ()
) -> bytes:
    """A bucket's past as bytes."""
    if overload is None:
        return _encode((VERSION, state, list(reasons)))
    return _encode((VERSION, state, list(reasons), pack_state(overload), list(notes)))


def unpack(raw: bytes | None) -> KeptState | None:
    """A bucket's past; None if there is none that could be used."""
    if raw is None:
        return None
    try:
        memory = _decode(raw)
    except (msgspec.DecodeError, ValueError):  # a name that is no UTF-8 is the latter
        return None
    kept = msgspec.to_builtins((memory.state, memory.reasons, memory.notes))
    if memory.version != VERSION or not all(map(isfinite, _numbers(kept))):
        return None
    return memory


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, tuple | list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, float | int):
        yield value
