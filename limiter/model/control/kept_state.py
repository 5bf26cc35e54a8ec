"""The state of a bucket that the controller keeps in the store for the next owner (F-P7, R11).

    version, state of the steps, reasons of the last cycles        as msgpack
    with overload control: its state, its reasons                  after these

another version, damaged, or not a number anywhere    treated as absent: begin again (F-P8)
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

import msgspec

from limiter.model.control.caps import Reason
from limiter.model.control.cycle_step import State
from limiter.model.overload.overload_control import Note
from limiter.model.overload.overload_state import OverloadState, pack_state

VERSION = 2
REASONS_MAX = 10


class KeptState(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One bucket's state and reasons."""

    version: int
    state: State
    reasons: list[Reason]
    """Reasons for the cap in the last cycles, oldest first."""
    overload: bytes = b""
    """State of overload control, packed; empty without overload control."""
    notes: list[Note] = []
    """Reasons of overload control, oldest first."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KeptState).decode


def pack(
    state: State, reasons: Iterable[Reason], overload: OverloadState | None = None, notes: Iterable[Note] = ()
) -> bytes:
    """Return a bucket's state as bytes."""
    if overload is None:
        return _encode((VERSION, state, list(reasons)))
    return _encode((VERSION, state, list(reasons), pack_state(overload), list(notes)))


def unpack(raw: bytes | None) -> KeptState | None:
    """Return a bucket's state; None if it is absent or unusable."""
    if raw is None:
        return None
    try:
        memory = _decode(raw)
    except (msgspec.DecodeError, ValueError):  # ValueError: a name that is not UTF-8
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
