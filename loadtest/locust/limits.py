"""The limits of a run, and whether the admitted work kept to them.

A bucket of rate r and capacity C that may go D into debt admits at most C + D + r·W in any W seconds. Seen from
outside, with work put in and r flowing out, the same bound is a level:

    level = max(0, level − r·dt) + work ≤ C + D
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimit:
    """One policy of a run."""

    name: str
    rate: float
    capacity: float
    debt_max: float
    per: tuple[str, ...] = ()
    reserve: str = ""
    """The `reserve` of a policy file."""

    @property
    def slack(self) -> float:
        """C + D: the most that a correct bucket admits beyond its rate."""
        return self.capacity + self.debt_max

    def policy(self, service: str) -> str:
        """Return the policy as in a policy file."""
        fields = (
            f"name: {self.name}",
            f"match: {{service: {service}}}",
            f"per: [{', '.join(self.per)}]",
            f"rate: {self.rate:g}",
            f"capacity: {self.capacity:g}",
            f"max_debt: {self.debt_max:g}",
            "on_store_failure: local",
            *([f"reserve: {self.reserve}"] if self.reserve else []),
        )
        return f"  - {{{', '.join(fields)}}}\n"


def policy_file(limits: Iterable[WorkLimit], *, service: str, namespaces: str = "") -> str:
    """Return a whole policy file."""
    return namespaces + "policies:\n" + "".join(limit.policy(service) for limit in limits)


def level_max(admissions: Iterable[tuple[float, float]], rate: float) -> float:
    """Return the highest level that admissions reach: pairs of time (s) and amount, in order of time; refunds below
    0."""
    level = highest = last_s = 0.0
    for at_s, work in admissions:
        level = max(0.0, max(0.0, level - rate * max(0.0, at_s - last_s)) + work)
        last_s, highest = at_s, max(highest, level)
    return highest
