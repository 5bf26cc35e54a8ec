"""Random draws of users: the cost of a request and its tenant. The same seed draws the same.

Constant       every request costs the same
Bimodal        most are cheap, some expensive
Pareto         few cost nearly everything: P(X > x) = (least / x)^alpha, cut off at most
Zipf           the tenant of rank k is asked for in proportion to 1 / k^exponent
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Protocol


class Cost(Protocol):
    """The work of one request, in units."""

    @property
    def mean(self) -> float:
        """The estimate of a caller who knows the workload."""

    def draw(self, draws: Random) -> float:
        """Return the real cost of one request."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Every request costs the same."""

    work: float

    @property
    def mean(self) -> float:
        return self.work

    def draw(self, draws: Random) -> float:
        return self.work


@dataclass(frozen=True, slots=True, kw_only=True)
class Bimodal:
    """Most are cheap, a share is expensive."""

    cheap: float
    expensive: float
    expensive_share: float

    @property
    def mean(self) -> float:
        return self.cheap + (self.expensive - self.cheap) * self.expensive_share

    def draw(self, draws: Random) -> float:
        return self.expensive if draws.random() < self.expensive_share else self.cheap


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """Heavy-tailed, and cut off, so that a run of a minute has a mean at all."""

    least: float
    alpha: float
    most: float

    @property
    def mean(self) -> float:
        """E[min(X, most)], for an alpha other than 1."""
        tail = math.pow(self.least, self.alpha) * math.pow(self.most, 1 - self.alpha)
        return (self.alpha * self.least - tail) / (self.alpha - 1)

    def draw(self, draws: Random) -> float:
        """Return a cost; the tail is cut off at `most`, not drawn again."""
        return min(self.most, self.least * draws.paretovariate(self.alpha))


class Zipf:
    """Ranks from 0 on, the first the most popular."""

    def __init__(self, count: int, exponent: float) -> None:
        self._heights = list(accumulate(math.pow(rank, -exponent) for rank in range(1, count + 1)))

    def draw(self, draws: Random) -> int:
        return bisect_left(self._heights, draws.random() * self._heights[-1])

    def share(self, rank: int) -> float:
        """Return the probability of a rank."""
        below = self._heights[rank - 1] if rank else 0.0
        return (self._heights[rank] - below) / self._heights[-1]


@dataclass(frozen=True, slots=True)
class Operation:
    """A kind of request, and how often users send it."""

    name: str
    weight: float
    cost: Cost


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as its user knows it: the estimate before, the cost after."""

    tenant: str
    operation: str
    criticality: str
    estimate: float
    cost: float


OPERATIONS = (
    Operation("read", 0.6, Constant(1.0)),
    Operation("write", 0.3, Bimodal(cheap=2.0, expensive=20.0, expensive_share=0.1)),
    Operation("scan", 0.1, Pareto(least=2.0, alpha=1.5, most=100.0)),
)
MILD_OPERATIONS = (
    Operation("read", 0.6, Constant(1.0)),
    Operation("write", 0.3, Bimodal(cheap=2.0, expensive=10.0, expensive_share=0.1)),
    Operation("scan", 0.1, Pareto(least=2.0, alpha=1.5, most=20.0)),
)
"""No request costs more than a small bucket may owe, so admissions can be checked against C + D to the unit."""
WORKLOADS = {"mixed": OPERATIONS, "mild": MILD_OPERATIONS}
CLASSES = {"critical_plus": 0.1, "critical": 0.5, "sheddable_plus": 0.2, "sheddable": 0.2}


class Workload:
    """Draws whole requests."""

    def __init__(
        self, *, tenants: int = 50, zipf_exponent: float = 1.1, operations: Sequence[Operation] = OPERATIONS
    ) -> None:
        self._tenants = Zipf(tenants, zipf_exponent)
        self._operations = operations
        self._weights = [operation.weight for operation in operations]

    @property
    def mean_cost(self) -> float:
        """Mean cost of a request (units)."""
        return sum(one.weight * one.cost.mean for one in self._operations) / sum(self._weights)

    def draw(self, draws: Random) -> Ask:
        """Return the next request."""
        (operation,) = draws.choices(self._operations, self._weights)
        (criticality,) = draws.choices(list(CLASSES), list(CLASSES.values()))
        return Ask(
            tenant=f"t{self._tenants.draw(draws)}",
            operation=operation.name,
            criticality=criticality,
            estimate=round(operation.cost.mean, 1),
            cost=operation.cost.draw(draws),
        )
