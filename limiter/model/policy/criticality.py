"""The class of a request, which is used in three places.

    reserve   how much of a bucket a class leaves for the others      W11, `limiter.model.bucket.admission`
    rank      how readily a class is refused: high priority, low rank  Q4, G5
    class     whose response time comes first                          S3: the class of greater rank yields

A class of rank 0 is never refused by a throttle or by utilisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple


class Criticality(StrEnum):
    """The classes, most important first (G4)."""

    CRITICAL_PLUS = "critical_plus"
    CRITICAL = "critical"
    SHEDDABLE_PLUS = "sheddable_plus"
    SHEDDABLE = "sheddable"


_ORDER = {criticality: number for number, criticality in enumerate(Criticality)}


class Classes(NamedTuple):
    """How policies and their namespace assign the class of a request (G4, Q12)."""

    tables: tuple[tuple[str, Mapping[str, Criticality]], ...] = ()
    """Dimensions, with the classes assigned to their values."""
    default: Criticality | None = None
    """The class of requests that claim none and are assigned none; None: the node's default."""


NO_CLASSES = Classes()


def lowest(classes: Iterable[Criticality]) -> Criticality:
    """Return the least critical of the classes."""
    return max(classes, key=_ORDER.__getitem__)


def class_of(
    claimed: Criticality | None,
    descriptor: Mapping[str, str],
    classes: Classes,
    *,
    default: Criticality,
    highest: Criticality | None,
) -> Criticality:
    """Return the class of a request: the lowest of its claim, its assigned classes and the highest class of its key.

    Without a claim it is the assigned class, otherwise the default of the policies, the namespace or the node.
    """
    found = [table[descriptor[name]] for name, table in classes.tables if descriptor.get(name) in table]
    if claimed is not None:
        found.append(claimed)
    elif not found:
        found.append(classes.default or default)
    if highest is not None:
        found.append(highest)
    return lowest(found)


Ranks = Mapping[Criticality, float]

RANKS: Ranks = {
    Criticality.CRITICAL_PLUS: 0.0,
    Criticality.CRITICAL: 1.0,
    Criticality.SHEDDABLE_PLUS: 2.0,
    Criticality.SHEDDABLE: 4.0,
}
"""The ranks P of Q4, unless a policy sets others."""


def descending(ranks: Ranks) -> tuple[Criticality, ...]:
    """Return the classes, most critical first; those of equal rank in the order of their declaration."""
    return tuple(sorted(ranks, key=ranks.__getitem__))


def shed_order(ranks: Ranks) -> tuple[float, ...]:
    """Return the distinct ranks that may be refused, least critical first."""
    return tuple(sorted({rank for rank in ranks.values() if rank > 0}, reverse=True))
