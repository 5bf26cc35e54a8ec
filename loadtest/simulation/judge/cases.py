"""Cases that the judge plays, each by itself, and lines of tables that report their figures.

case      one scenario under one law with one seed; played in any process, in any order, with the same result
figures   what was measured, by name
line      a row of a table: figures over all seeds, the figure that is owed, the verdict, and who was better
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple, Protocol

Figures = Mapping[str, float]


class Case(NamedTuple):
    """One scenario under one law with one seed."""

    table: str
    scenario: str
    law: str
    seed: int


Played = Mapping[Case, Figures]


class Line(NamedTuple):
    """A row of a table."""

    row: str
    law: str
    cells: tuple[str, ...]
    owed: str = ""
    """The figure that holds for this row, in words; empty where none does."""
    holds: bool | None = None
    """None where nothing is owed: a yardstick, or a row that only shows."""
    note: str = ""
    """Yardsticks that are better in this row, and whatever else is to be said."""


class Table(Protocol):
    """One part of the judge."""

    title: str
    heads: tuple[str, ...]

    def cases(self, seeds: Sequence[int], *, brief: bool) -> list[Case]:
        """All that has to be played; the brief part is what the test suite plays."""

    def play(self, case: Case) -> Figures:
        """One of them."""

    def lines(self, played: Played) -> list[Line]:
        """The lines of the printed table."""


def of(played: Played, scenario: str, law: str, name: str) -> list[float]:
    """One figure of a scenario under a law, over the seeds."""
    return [figures[name] for case, figures in played.items() if (case.scenario, case.law) == (scenario, law)]


def mean_of(played: Played, scenario: str, law: str, name: str) -> float:
    """Its mean."""
    return fmean(of(played, scenario, law, name))


def median_of(played: Played, scenario: str, law: str, name: str) -> float:
    """Its median."""
    return median(of(played, scenario, law, name))


def within(low: float, value: float, high: float) -> bool:
    """True if a value lies between two others; a NaN lies nowhere."""
    return low <= value <= high
