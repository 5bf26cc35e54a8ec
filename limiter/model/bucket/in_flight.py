"""How many reservations of a bucket are open (W18, S9): the reference for `lua/lib/record.lua`.

    in flight = admitted and not settled, over all nodes = this slot's count + that of the slot before

Nothing is stored for a reservation, so one that nobody settles leaves with its slot. A slot is as long as the longest
time to live that was admitted in the one before it, and longer as soon as a longer one comes; or it has the fixed
length that the policy's terms say.

    acquire     counts in the present slot
    roll        at the end of its length: before = present, present = 0; a length later both are gone
    settle      frees its place at once, in the slot that it was counted in
    progress    moves its place into the present slot

A place is counted for at least its time to live, and for at most two lengths. A clock that steps back a little lets
the slot begin then, one that steps back far makes one slot of both; one that jumps ahead empties them. A count never
falls below zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PLACES_MAX = 1_000_000
"""The highest limit that a policy may set."""

STEP_BACK_MAX_US = 1_000_000
"""A clock that steps back by at most this waits for the past to catch up; after a larger step the slots start again."""


class InFlightTerms(NamedTuple):
    """Terms of a policy for its open reservations."""

    limit: float = 0.0
    """Most of them at once, for the whole limit where it is divided; 0: not limited, only counted (W18)."""
    length_us: float = 0.0
    """Fixed length of a slot; 0: as long as the longest time to live."""
    in_work: bool = False
    """True if each reservation counts its charge instead of one (S11)."""


@dataclass(slots=True, kw_only=True)
class Slots:
    """Open reservations of one bucket, by when they were admitted."""

    present: float = 0.0
    """Counted since `start_us`."""
    before: float = 0.0
    """Counted from `before_us` to `start_us`."""
    start_us: float
    before_us: float
    length_us: float = 0.0
    longest_us: float = 0.0
    """The longest time to live in the present slot, where that decides on the next one's length."""
    refused: float = 0.0
    """Requests that found all places taken, so far (W18)."""

    @property
    def count(self) -> float:
        """How many are open."""
        return self.present + self.before


def begin(terms: InFlightTerms, now_us: int) -> Slots:
    """A bucket whose reservations are counted from now on: earlier ones never were, and their settles free nothing."""
    return Slots(start_us=float(now_us), before_us=float(now_us), length_us=terms.length_us)


def adopt(slots: Slots, terms: InFlightTerms) -> None:
    """Apply changed terms: a fixed length at once, any other from the next admitted time to live on."""
    if terms.length_us > 0:
        slots.length_us, slots.longest_us = terms.length_us, 0.0


def roll(slots: Slots, now_us: int) -> None:
    """Bring the slots to now."""
    if now_us < slots.start_us:
        if now_us < slots.start_us - STEP_BACK_MAX_US:
            slots.present, slots.before = slots.present + slots.before, 0.0
            slots.before_us = float(now_us)
        slots.start_us, slots.before_us = float(now_us), min(slots.before_us, float(now_us))
        return
    end_us = slots.start_us + slots.length_us
    if now_us < end_us:
        return
    next_us = slots.longest_us if slots.longest_us > 0 else slots.length_us
    if now_us < end_us + next_us:
        slots.before, slots.before_us, slots.start_us = slots.present, slots.start_us, end_us
    else:
        slots.before, slots.before_us, slots.start_us = 0.0, float(now_us), float(now_us)
    slots.present, slots.length_us, slots.longest_us = 0.0, next_us, 0.0


def add(slots: Slots, terms: InFlightTerms, amount: float, ttl_us: float) -> None:
    """Count a reservation that is admitted now, with its time to live."""
    slots.present += amount
    if terms.length_us > 0:
        return
    slots.longest_us = max(slots.longest_us, ttl_us)
    slots.length_us = max(slots.length_us, ttl_us)


def free(slots: Slots, amount: float, counted_us: float) -> None:
    """Free the place of a reservation that was counted at a time, unless its slot has been dropped.

    If its slot counts too few, the other one is reduced: a clock that went back may have counted it there.
    """
    if counted_us < slots.before_us:
        return
    if counted_us >= slots.start_us:
        lacking = min(0.0, slots.present - amount)
        slots.present = max(0.0, slots.present - amount)
        slots.before = max(0.0, slots.before + lacking)
    else:
        lacking = min(0.0, slots.before - amount)
        slots.before = max(0.0, slots.before - amount)
        slots.present = max(0.0, slots.present + lacking)


def limit_here(terms: InFlightTerms, share: float) -> float:
    """Return the most that may be open in a bucket with a share of the limit: at least one, to admit anything."""
    return max(1.0, terms.limit * share)


def until_us(slots: Slots) -> float:
    """Return the time until which a reservation may be counted; 0 if none is."""
    return slots.start_us + 2 * slots.length_us if slots.present + slots.before > 0 else 0.0


def is_sound(slots: Slots, *, most: float) -> bool:
    """Check that the numbers are such as may have been counted. Written so that NaN fails as well."""
    return (
        0 <= slots.present <= most
        and 0 <= slots.before <= most
        and 0 <= slots.before_us <= slots.start_us <= most
        and 0 <= slots.length_us <= most
        and 0 <= slots.longest_us <= most
        and 0 <= slots.refused <= most
    )
