"""An experiment as a whole: the same load with this control and with that, and what is told of it.

a study  = load + backend + variants of the policy          each variant runs on fresh processes
told as  = a table of what happened once it had settled, a picture over time, and claims that hold or do not
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from random import Random
from typing import Any

from loadtest.overload.calls import Ask, Call
from loadtest.overload.stage import BackendTerms, Stage, stage
from loadtest.overload.users import Experiment, Moment, Phase, by_second, moment
from loadtest.plot import Chart

LIMIT = {"name": "backend", "match": {"service": "backend"}, "rate": 1_000_000}
"""A limit that never binds: what is refused, overload control refused."""


STILL_MAX_S = 2.0


class StoodStill(Exception):
    """What was measured says more of the machine than of the control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to control the load."""

    label: str
    overload: Mapping[str, Any] | None = None
    per: tuple[str, ...] = ()
    """Dimensions with a bucket, and so with controllers, for each of their values."""

    @property
    def policy(self) -> dict[str, Any]:
        """As it stands in a policy file."""
        policy: dict[str, Any] = {**LIMIT, "per": list(self.per)}
        return policy if self.overload is None else {**policy, "overload": dict(self.overload)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What happened, a row for each variant and whatever it is told by."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As it stands in the documents: words to the left, numbers to the right."""
        rule = ["---" if index == 0 else "---:" for index in range(len(self.head))]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.head, rule, *self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something that ought to be so."""

    text: str
    holds: bool


Results = Mapping[str, Sequence[Call]]
"""The calls of every variant, by its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is done, with what, and how it is told."""

    name: str
    title: str
    asks: str
    """What is done to whom, in a sentence or two."""
    settings: Sequence[str]
    """Parameters that are not the published ones, each with its reason."""
    choose: Callable[[Random], Ask]
    phases: Sequence[Phase]
    think_s: float = 2.0
    backend: BackendTerms
    variants: Sequence[Variant]
    picture: Callable[[Study, Results], Chart]
    table: Callable[[Study, Results], Table]
    claims: Callable[[Study, Results], list[Claim]]

    @property
    def seconds(self) -> float:
        """How long one variant takes."""
        return sum(phase.seconds for phase in self.phases)

    def starts_s(self) -> list[float]:
        """When each phase begins."""
        return [sum(phase.seconds for phase in self.phases[:number]) for number in range(len(self.phases))]

    def shortened(self, share: float) -> Study:
        """The same with less of everything, to see that it runs."""
        phases = [
            replace(
                phase,
                seconds=phase.seconds * share,
                users=round(phase.users * share + 0.499),
                rate=phase.rate * share,
            )
            for phase in self.phases
        ]
        return replace(self, phases=phases, think_s=self.think_s * share)


def run(study: Study, say: Callable[[str], None]) -> Results:
    """Every variant, one after the other."""
    results = {}
    for variant in study.variants:
        say(f"{study.name}: {variant.label}, {study.seconds:.0f} s")
        with stage([variant.policy], study.backend) as processes:
            results[variant.label] = asyncio.run(_run(study, processes))
    return results


async def _run(study: Study, processes: Stage) -> list[Call]:
    experiment = Experiment(processes.backend, processes.headgate, study.choose, think_s=study.think_s)
    try:
        calls = await experiment.run(study.phases)
    finally:
        processes.backend.close()
        processes.headgate.close()
    if experiment.stood_still_s > STILL_MAX_S:
        raise StoodStill(
            f"this machine stood still for {experiment.stood_still_s:.1f} s: try again when it is less busy"
        )
    # Between the end and its noticing there is time to refuse somebody, which is no second of its own.
    return [one for one in calls if one.began_s + one.latency_ms / 1000 < study.seconds]


def during(calls: Iterable[Call], from_s: float, to_s: float, kind: str = "", criticality: str = "") -> Moment:
    """What was answered in a stretch of time, of all or of some."""
    chosen = [
        one
        for one in calls
        if from_s <= one.began_s + one.latency_ms / 1000 < to_s
        and kind in ("", one.ask.kind)
        and criticality in ("", one.ask.criticality)
    ]
    return moment(int(from_s), chosen)


def over_time(calls: Iterable[Call], value: Callable[[Moment], float | None]) -> list[tuple[float, float]]:
    """A value of every second, drawn in its middle; a gap where there is none."""
    points = [(one.second + 0.5, value(one)) for one in by_second(calls)]
    return [(x, nan if y is None else y) for x, y in points]


def p90_s(one: Moment) -> float | None:
    """The 90th percentile of the response times (s)."""
    return None if one.p90_ms is None else one.p90_ms / 1000


def shown_s(one: Moment) -> str:
    """The same for a table."""
    value = p90_s(one)
    return "–" if value is None else f"{value:.2f} s"


def shown_share(one: Moment) -> str:
    """The share that was refused, for a table."""
    return f"{one.refused_share:.1%}"
