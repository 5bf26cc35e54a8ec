"""What a class of request needs to find in a bucket, and when it will.

minimum of a class = max(minimum, reserve)   a class that must leave something for others (W11)
                     min(minimum, reserve)   a class that may borrow: its reserve is negative
wait               = (minimum − balance) / rate
"""

from __future__ import annotations

import math


def class_minimum(minimum: float, reserve: float | None) -> float:
    """Balance that a request of a class needs, from the policy's minimum and the class's reserve (both in units)."""
    if reserve is None:
        return minimum
    return max(minimum, reserve) if reserve >= 0 else min(minimum, reserve)


def wait_us(*, balance: float, need: float, rate: float, capacity: float) -> float:
    """How long until a rate bucket will hold what is needed, if nobody else asks; infinite if it never will."""
    if balance >= need:
        return 0.0
    if need > capacity or rate <= 0:
        return math.inf
    return (need - balance) / rate * 1e6
