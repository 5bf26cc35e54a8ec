"""Reservations that were never settled, counted by policy (W14).

Nothing is stored for a reservation until its first settle, and that may reach another node than its acquire. So each
node counts three things, which only grow. Summed over all nodes, `due − settled − renewed` were never settled, of
`due − renewed` in all:

    due       reservations that it granted or renewed, once their last moment to be settled is over
    settled   reservations that it settled, once that moment is over
    renewed   reservations that it moved to a later time, once their former moment is over

Times are kept in slots, so that memory does not grow with reservations: ten seconds wide, and ten minutes for
reservations that live longer.
"""

from __future__ import annotations

from collections.abc import Mapping

Key = tuple[str, str]
"""Namespace and policy."""

NARROW_US = 10_000_000
WIDE_US = 600_000_000


def _slot(over_us: float, life_us: float) -> float:
    """Return the end of a reservation's slot; the same wherever it is granted, renewed and settled."""
    width = NARROW_US if life_us <= WIDE_US else WIDE_US
    return (over_us // width + 1) * width


class Expiries:
    """The ends of one node's reservations. Times are the store's (us)."""

    __slots__ = ("_last", "_last_end_us", "_open", "_totals")

    def __init__(self) -> None:
        self._open: dict[float, dict[Key, list[int]]] = {}
        """By the end of the slot: for each policy the number granted, settled and renewed."""
        self._totals: tuple[dict[Key, int], dict[Key, int], dict[Key, int]] = ({}, {}, {})
        self._last: dict[Key, list[int]] = {}
        self._last_end_us = 0.0

    def granted(self, key: Key, over_us: float, life_us: float, count: int = 1) -> None:
        """Count reservations that can be settled until `over_us`; `life_us` is from the acquire to then."""
        # Nearly all fall into the same slot as the one before, so the hot path tries that first.
        if life_us <= WIDE_US and 0 < self._last_end_us - over_us <= NARROW_US:
            entry = self._last.get(key)
            if entry is not None:
                entry[0] += count
                return
        end_us = _slot(over_us, life_us)
        self._entry(key, end_us)[0] += count
        if life_us <= WIDE_US:
            self._last, self._last_end_us = self._open[end_us], end_us

    def settled(self, key: Key, over_us: float, life_us: float) -> None:
        """Count one that could have been settled until `over_us`, and was."""
        self._entry(key, _slot(over_us, life_us))[1] += 1

    def renewed(self, key: Key, over_us: float, until_us: float, life_us: float) -> None:
        """Count one that could have been settled until `over_us`, and now can be until `until_us`."""
        self._entry(key, _slot(over_us, life_us))[2] += 1
        self.granted(key, until_us, life_us)

    def _entry(self, key: Key, end_us: float) -> list[int]:
        slot = self._open.get(end_us)
        if slot is None:
            slot = self._open[end_us] = {}
        entry = slot.get(key)
        if entry is None:
            entry = slot[key] = [0, 0, 0]
        return entry

    def totals(self, now_us: float) -> tuple[Mapping[Key, int], Mapping[Key, int], Mapping[Key, int]]:
        """Return how many are due by now, and how many of those were settled and renewed, by policy."""
        self._last_end_us = 0.0  # its slot may be removed
        for end_us in [end_us for end_us in self._open if end_us <= now_us]:
            for key, counts in self._open.pop(end_us).items():
                for total, count in zip(self._totals, counts, strict=True):
                    total[key] = total.get(key, 0) + count
        return self._totals
