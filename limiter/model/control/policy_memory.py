"""Values learned from a policy's buckets, for new keys of the policy (R15, W15).

    each value   moves by 1/n towards a bucket's own value, n = the buckets heard so far, at most HEARD_MAX

Kept in the store by policy and partition, and written by the controller about once a second while it changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import msgspec

from limiter.model.bucket.learned import ENTRIES_MAX

VERSION = 1
HEARD_MAX = 100.0
LIFE_S = 30 * 86_400


class PolicyMemory(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The mean of a policy's buckets."""

    version: int = VERSION
    heard: float = 0.0
    work: float = 0.0
    """f: work units per request, or per token; 0 while unknown."""
    heard_charge: float = 0.0
    charge: float = 0.0
    """The learned charge, before weights; 0 while none is learned."""
    charges: dict[int, tuple[float, float]] = msgspec.field(default_factory=dict)
    """By id of the values of `learn_by`: buckets heard, and the charge."""

    def hear(self, *, work: float, charge: float, charges: Iterable[tuple[int, float]]) -> None:
        """Add one bucket's learned values; 0 stands for unknown."""
        if work > 0:
            self.heard, self.work = _moved(self.heard, self.work, work)
        if charge > 0:
            self.heard_charge, self.charge = _moved(self.heard_charge, self.charge, charge)
        for id_, learned in charges:
            if learned > 0 and (id_ in self.charges or len(self.charges) < ENTRIES_MAX):
                self.charges[id_] = _moved(*self.charges.get(id_, (0.0, 0.0)), learned)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PolicyMemory).decode


def pack(memory: PolicyMemory) -> bytes:
    """Return a memory as bytes."""
    return _encode(memory)


def unpack(raw: bytes | None) -> PolicyMemory:
    """Return a memory; an empty one for bytes that cannot be used (F-P8)."""
    if raw is None:
        return PolicyMemory()
    try:
        memory = _decode(raw)
    except (msgspec.DecodeError, ValueError):
        return PolicyMemory()
    numbers = [memory.heard, memory.work, memory.heard_charge, memory.charge]
    numbers += [number for pair in memory.charges.values() for number in pair]
    if memory.version != VERSION or not all(isfinite(number) and number >= 0 for number in numbers):
        return PolicyMemory()
    return memory


def _moved(heard: float, value: float, seen: float) -> tuple[float, float]:
    heard = min(heard + 1.0, HEARD_MAX)
    return heard, value + (seen - value) / heard
