"""Q7 as a table in docs/overload.md: a backend of 3000 requests/s offered more, under three throttles. Virtual time.

python -m loadtest.simulation.overload_table        rewrites the table; the same seed, the same table
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from limiter.model.overload.expectations import ExpectationParams, Mode
from limiter.model.policy.criticality import Criticality
from loadtest.overload.page import OVERVIEW, with_table
from loadtest.overload.study import Table
from loadtest.simulation.overload import ByExpectations, Offered, OnOff, Outcome, Simulation, Throttle

CAPACITY = 3000.0
EXPECTED_MS = 200.0
SECONDS = 240
SETTLED_S = 120
NAME = "simulated"
DOCS = Path(__file__).resolve().parents[2] / "docs"

PLUS, CRITICAL, SHEDDABLE_PLUS, SHEDDABLE = Criticality
ALIKE = {CRITICAL: 1.0}
LOW = {SHEDDABLE: 1.0}
MIXED = {PLUS: 0.05, CRITICAL: 0.25, SHEDDABLE_PLUS: 0.3, SHEDDABLE: 0.4}


def on_off() -> Throttle:
    """Refuses everybody or nobody."""
    return OnOff(ExpectationParams())


def damped() -> Throttle:
    """Q3."""
    return ByExpectations(ExpectationParams())


def ideal() -> Throttle:
    """Q5."""
    return ByExpectations(ExpectationParams(mode=Mode.IDEAL))


MIXES: Mapping[str, Offered] = {"four classes": MIXED, "`critical` alone": ALIKE, "`sheddable` alone": LOW}
THROTTLES: Mapping[str, Callable[[], Throttle]] = {"on or off": on_off, "`damped`": damped, "`ideal`": ideal}


def offered(mix: Offered, times: float) -> Offered:
    """So many times what the backend can do, requests a second by class."""
    return {criticality: share * times * CAPACITY for criticality, share in mix.items()}


def run(throttle: Callable[[], Throttle], mix: Offered, times: float, seed: int) -> Outcome:
    """One run from a standing start."""
    return Simulation(throttle(), offered(mix, times), expected_ms=EXPECTED_MS, seed=seed).run(SECONDS)


def table(seed: int = 1) -> Table:
    """What became of it in the last two minutes."""
    rows = [
        [f"{times}×, {name}", *(_shown(run(throttle, mix, times, seed)) for throttle in THROTTLES.values())]
        for name, mix in MIXES.items()
        for times in (2, 10)
    ]
    return Table(head=("offered", *THROTTLES), rows=rows)


def _shown(outcome: Outcome) -> str:
    late = outcome.since(SETTLED_S)
    return f"{late.admitted_mean():.0f}/s, {late.missed_share():.0%} late, {late.transitions()} changes"


def main() -> None:
    """Write it."""
    page = DOCS / OVERVIEW
    told = table().markdown()
    page.write_text(with_table(page.read_text(), NAME, told))
    print(told)


if __name__ == "__main__":
    main()
