"""One field of a request, met in three places.

reserve   how much of a bucket a class leaves for the others      W11, `limiter.model.bucket.admission`
rank      how readily a class is refused: high priority, low rank  Q4, G5
class     whose response time comes first                          S3: who has the greater rank yields

A class of rank 0 is never refused by a throttle or by utilisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple


class Criticality(StrEnum):
    """How much a request matters, most first (G4)."""

    CRITICAL_PLUS = "critical_plus"
    CRITICAL = "critical"
    SHEDDABLE_PLUS = "sheddable_plus"
    SHEDDABLE = "sheddable"


_ORDER = {criticality: number for number, criticality in enumerate(Criticality)}


class Classes(NamedTuple):
    """What policies and their namespace say of the class of a request (G4, Q12)."""

    tables: tuple[tuple[str, Mapping[str, Criticality]], ...] = ()
    """A dimension, and the classes that its values are assigned."""
    default: Criticality | None = None
    """Of requests that claim none and are assigned none; None: the node's."""


NO_CLASSES = Classes()


def lowest(classes: Iterable[Criticality]) -> Criticality:
    """The least critical of some classes."""
    return max(classes, key=_ORDER.__getitem__)


def class_of(
    claimed: Criticality | None,
    descriptor: Mapping[str, str],
    classes: Classes,
    *,
    default: Criticality,
    highest: Criticality | None,
) -> Criticality:
    """The class of a request: the lowest of what it claims, what it is assigned and the highest that its key may have.

    Who claims none has what is assigned, or else a default: of the policies or the namespace, or else the node's.
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
"""P of Q4, where a policy names no other."""


def descending(ranks: Ranks) -> tuple[Criticality, ...]:
    """The classes, most critical first; of equal rank in the order of their declaration."""
    return tuple(sorted(ranks, key=ranks.__getitem__))


def shed_order(ranks: Ranks) -> tuple[float, ...]:
    """The distinct ranks that may be refused, least critical first."""
    return tuple(sorted({rank for rank in ranks.values() if rank > 0}, reverse=True))
