"""The balance that a request of a class needs, and when the bucket will have it.

minimum of a class  = max(minimum, reserve)   a class that must leave something for others (W11)
                      min(minimum, reserve)   a class that may borrow: its reserve is negative
minimum of a bucket = minimum · part          of one that holds a part of the whole capacity; one token stays one
wait                = (minimum − balance) / rate
"""

from __future__ import annotations

import math


def class_minimum(minimum: float, reserve: float | None) -> float:
    """Return the balance that a class needs, from the policy's minimum and the class's reserve (both in units)."""
    if reserve is None:
        return minimum
    return max(minimum, reserve) if reserve >= 0 else min(minimum, reserve)


def part_of_minimum(minimum: float, *, part: float, capacity: float) -> float:
    """Return the minimum of a bucket that holds a part of the whole capacity, or counts in another unit.

    The minimum never scales below one token: less would admit on a fraction, or never.
    """
    if minimum <= 0:
        return minimum * part
    if part > 1 and minimum <= 1:
        return minimum
    return max(minimum * part, min(minimum, 1.0, capacity))


def needed(minimum: float, charge: float, *, debt_max: float, capacity: float, covered: bool) -> float:
    """Return the balance that a request needs: its minimum, and room for its charge above the debt bound (W3, W5).

    `covered`: the balance has to cover the charge, as in a quota (P4) and where a policy says so (W13). Otherwise a
    charge too large for any balance waits for a full bucket.
    """
    return max(minimum, charge if covered else min(charge - debt_max, capacity))


def wait_us(*, balance: float, need: float, rate: float, capacity: float) -> float:
    """Return the time until a rate bucket has the needed balance, without other requests; infinite if it never will."""
    if balance >= need:
        return 0.0
    if need > capacity or rate <= 0:
        return math.inf
    return (need - balance) / rate * 1e6
