"""How the backend of an experiment is built, be it a process or a part of a virtual world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_COST = 0.2
"""What remains of the cost at quality 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowing:
    """Answers take `base_ms`, and `ms_per_excess` longer for each request per second above the capacity (Q7)."""

    capacity: float
    base_ms: float = 170.0
    ms_per_excess: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTerms:
    """Workers, and how long a request of each kind takes one of them."""

    costs_ms: Mapping[str, float] = field(default_factory=lambda: {"cheap": 20.0})
    workers: int = 1
    is_even: bool = True
    """Every request of a kind takes as long as the others; otherwise exponential, in virtual time."""
    slows: Slowing | None = None
    """A backend without workers, in place of one with them."""
    hangs: tuple[float, float] | None = None
    """From when to when (s) nothing is answered; of a backend that slows down."""

    def cost_ms(self, kind: str, quality: float) -> float:
        """How long a request takes a worker: cheaper work at lower quality (S4)."""
        return self.costs_ms[kind] * (LEAST_COST + (1 - LEAST_COST) * quality)

    @property
    def arguments(self) -> list[str]:
        """For the command line of the process."""
        costs = [f"{kind}={cost_ms:g}" for kind, cost_ms in self.costs_ms.items()]
        slows = []
        if self.slows is not None:
            slows = ["--slows", f"{self.slows.capacity:g}", f"{self.slows.base_ms:g}", f"{self.slows.ms_per_excess:g}"]
        return ["--workers", str(self.workers), "--costs", *costs, *slows]
