"""One field of a request, met in three places.

reserve   how much of a bucket a class leaves for the others      W11, `limiter.model.admission`
rank      how readily a class is refused: high priority, low rank  Q4, G5
class     whose response time comes first                          S3: who has the greater rank yields

A class of rank 0 is never refused by a throttle or by utilisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Criticality(StrEnum):
    """How much a request matters, most first (G4)."""

    CRITICAL_PLUS = "critical_plus"
    CRITICAL = "critical"
    SHEDDABLE_PLUS = "sheddable_plus"
    SHEDDABLE = "sheddable"


Ranks = Mapping[Criticality, float]

RANKS: Ranks = {
    Criticality.CRITICAL_PLUS: 0.0,
    Criticality.CRITICAL: 1.0,
    Criticality.SHEDDABLE_PLUS: 2.0,
    Criticality.SHEDDABLE: 4.0,
}
"""P of Q4, where a policy names no other."""


def descending(ranks: Ranks) -> tuple[Criticality, ...]:
    """The classes, most critical first; of equal rank in the order of their declaration."""
    return tuple(sorted(ranks, key=ranks.__getitem__))


def shed_order(ranks: Ranks) -> tuple[float, ...]:
    """The distinct ranks that may be refused, least critical first."""
    return tuple(sorted({rank for rank in ranks.values() if rank > 0}, reverse=True))
