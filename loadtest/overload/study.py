"""An experiment as a whole: the same load with this control and with that, and the claims made of it.

a study   = load + backend + variants of the policy
            real: each variant runs on fresh processes; virtual: in the workbench, in virtual time
shown as  = a picture over time, a table beside the published figures, one of each variant, and claims that hold or not
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.machine import Machine
from loadtest.overload.user_calls import Call
from loadtest.overload.users import Crowd, Moment, by_second, moment
from loadtest.overload.variant import Variant
from loadtest.overload.virtual_time import Point
from loadtest.plot import Chart

SHAPE = "shape"
"""In place of a published figure that is not known: the shapes of the curves are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of words, the first column a name."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As it stands in the documents: words to the left, numbers to the right."""
        rule = ["---" if index == 0 else "---:" for index in range(len(self.head))]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.head, rule, *self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sentence that is true or not."""

    text: str
    holds: bool
    runs: Sequence[str] = ()
    """Labels of the variants that it is about; none: of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One measure: published, by the published rules here, and by the default rules here."""

    measure: str
    published: str
    by_published_rules: str
    by_ours: str


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of one variant."""

    calls: Sequence[Call]
    points: Sequence[Point] = ()
    """Of a virtual run: what control did, cycle by cycle."""
    machine: Machine | None = None
    """Of a real run."""


Results = Mapping[str, Run]
"""By the label of the variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is done, with what, and how it is shown."""

    name: str
    figure: str
    """The published figures that it repeats."""
    title: str
    asks: str
    """Who asks what of whom, in a few sentences."""
    settings: Sequence[str] = ()
    """Choices of this experiment, each with its reason."""
    is_virtual: bool
    crowds: Sequence[Crowd]
    backend: BackendTerms = field(default_factory=BackendTerms)
    variants: Sequence[Variant]
    target_s: float = 1.0
    picture: Callable[[Study, Results], Chart]
    table: Callable[[Study, Results], Table]
    beside: Callable[[Study, Results], list[Beside]]
    claims: Callable[[Study, Results], list[Claim]]

    @property
    def seconds(self) -> float:
        """How long one variant takes."""
        return max(crowd.seconds for crowd in self.crowds)

    def shortened(self, share: float) -> Study:
        """The same with less of everything, to see that it runs."""
        variants = [replace(variant, crowds=[crowd.shortened(share) for crowd in variant.crowds])
                    for variant in self.variants]  # fmt: skip
        return replace(self, crowds=[crowd.shortened(share) for crowd in self.crowds], variants=variants)


def during(calls: Iterable[Call], from_s: float, to_s: float, kind: str = "", criticality: str = "") -> Moment:
    """The answers of a stretch of time, of all or of some requests."""
    chosen = [
        one
        for one in calls
        if from_s <= one.second < to_s
        and kind in ("", one.ask.kind)
        and criticality in ("", one.ask.criticality)
    ]  # fmt: skip
    return moment(int(from_s), chosen)


def over_time(calls: Iterable[Call], value: Callable[[Moment], float | None]) -> list[tuple[float, float]]:
    """A value of every second, drawn in its middle; a gap where there is none."""
    points = [(one.second + 0.5, value(one)) for one in by_second(calls)]
    return [(x, nan if y is None else y) for x, y in points]


def p90_s(one: Moment) -> float | None:
    """The 90th percentile of the response times (s)."""
    return None if one.p90_ms is None else one.p90_ms / 1000


def peak_s(calls: Iterable[Call], from_s: float, to_s: float) -> float:
    """The highest 90th percentile of a single second."""
    found = [one.p90_ms / 1000 for one in by_second(calls) if from_s <= one.second < to_s and one.p90_ms is not None]
    return max(found, default=0.0)


def shown_s(one: Moment) -> str:
    """The 90th percentile for a table."""
    value = p90_s(one)
    return "–" if value is None else f"{value:.2f} s"


def shown_share(one: Moment) -> str:
    """The share that was refused, for a table."""
    return f"{one.refused_share:.1%}"


def late_share(calls: Iterable[Call], from_s: float, to_s: float, expected_s: float) -> float:
    """Of the served, the share that took longer than expected."""
    served = [one for one in calls if one.outcome == "served" and from_s <= one.second < to_s]
    late = sum(one.count for one in served if one.latency_ms > 1000 * expected_s)
    return late / max(1, sum(one.count for one in served))
