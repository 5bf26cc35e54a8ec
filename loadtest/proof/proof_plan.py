"""The plan of a proof: the fleet, the load, the kills, and the bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadtest.locust.limits import WorkLimit

Victim = Literal["controller", "api node", "primary"]

PRIMARIES, API_NODES, CONTROLLERS, PARTITIONS = 3, 3, 2, 6
LEASE_MS = 2_000
NODE_TIMEOUT_MS = 2_000
"""After this long without an answer the cluster counts a node as failed; then a replica is elected."""
NAMESPACES = f"namespaces:\n  default: {{partitions: {PARTITIONS}, partition_by: [tenant]}}\n"

SHARED = WorkLimit(name="shared", rate=300.0, capacity=150.0, debt_max=150.0)
TENANT = WorkLimit(name="tenant", rate=80.0, capacity=40.0, debt_max=40.0, per=("tenant",))

RECOVERED_WITHIN_S: dict[Victim, float] = {
    "controller": 2 * LEASE_MS / 1000 + 3,
    "api node": 20.0,
    "primary": NODE_TIMEOUT_MS / 1000 + 10,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    seconds: float
    kills: tuple[tuple[float, Victim], ...]
    """Time in seconds from the first request, and the victim."""
    users: int = 30
    tenants: int = 20
    think_ms: float = 80.0
    deadline_ms: int = 100
    allowance_ms: float = 100.0
    """Time beyond the deadline, measured by the probe: some fifteen processes share the cores of one machine."""

    @property
    def late_ms(self) -> float:
        """A call that takes longer counts as late."""
        return self.deadline_ms + self.allowance_ms


FULL = Plan(seconds=60, kills=((12, "controller"), (24, "api node"), (36, "primary")))
SHORT = Plan(
    seconds=15,
    kills=((1, "controller"), (2, "api node"), (5, "primary")),
    users=15,
    deadline_ms=1_000,
    allowance_ms=2_000,
)
"""For tests on busy machines: it proves little about time, and everything about work."""
