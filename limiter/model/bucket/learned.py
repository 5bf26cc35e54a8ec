"""Charges that one bucket learns separately by the values of `learn_by`: the reference for the entries in
`lua/lib/record.lua` (W15).

    settled     the entry of the value counts requests and work; both are weighed, so work ÷ requests is before weights
    acquired    charge of the entry · weight, once the controller has learned one

Up to ENTRIES_MAX values have an entry each; the others share the entry REST.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

ENTRIES_MAX = 16
REST = 0
"""The id of the entry that the values without one of their own share. No value has this id."""


@dataclass(slots=True)
class Entry:
    """The requests of one value, or of all others."""

    id: int
    charge: float = 0.0
    """Learned by the controller, before weights; 0 while nothing is learned."""
    settles: float = 0.0
    work: float = 0.0
    work_squared: float = 0.0


def learn_id(learn_by: Sequence[str], descriptor: Mapping[str, str]) -> int:
    """Return the id of the values that a descriptor has in these dimensions."""
    text = "\0".join(descriptor.get(name, "\1") for name in learn_by)
    return crc32(text.encode("utf-8", "surrogatepass")) or 1


def find(entries: Sequence[Entry], id_: int) -> Entry | None:
    """Return the entry of an id; None if it has none yet."""
    others = 0
    rest = None
    for entry in entries:
        if entry.id == id_:
            return entry
        if entry.id == REST:
            rest = entry
        else:
            others += 1
    return rest if others >= ENTRIES_MAX else None


def make(entries: list[Entry], id_: int) -> Entry:
    """Return the entry of an id, made if there is none."""
    found = find(entries, id_)
    if found is None:
        others = sum(entry.id != REST for entry in entries)
        found = Entry(id_ if others < ENTRIES_MAX else REST)
        entries.append(found)
    return found


def is_sound(entries: Sequence[Entry], *, most: float) -> bool:
    """True if the controller could have set these charges."""
    return all(0 <= entry.charge <= most for entry in entries)
