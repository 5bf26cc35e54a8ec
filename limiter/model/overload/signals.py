"""Reports of services about their load (G5): the reference for `lua/signal.lua`.

    reports = those of other sources, not older than SIGNAL_TTL_US, at most SOURCES_MAX − 1 · the new one

The load that several sources report is the mean of the recent reports, one per source: a source that is gone drops out,
and one that reports more often has no more weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SIGNAL_TTL_US = 60_000_000
SOURCES_MAX = 64
"""Most sources that are kept: the newest reports stand for a larger fleet."""


class Report(NamedTuple):
    """The latest report of one source."""

    source: bytes
    reported_us: float
    loads: Mapping[str, float]


def add(reports: Sequence[Report], report: Report) -> tuple[Report, ...]:
    """Return the reports with a new one added, oldest first."""
    now_us = report.reported_us
    others = [
        other
        for other in reports
        if other.source != report.source and now_us - SIGNAL_TTL_US < other.reported_us <= now_us
    ]
    return (*others[-(SOURCES_MAX - 1) :], report)


def latest_us(reports: Iterable[Report]) -> float:
    """Return the time of the latest report; 0 without reports."""
    return max((report.reported_us for report in reports), default=0.0)


def loads(reports: Iterable[Report], *, since_us: float) -> dict[str, float]:
    """Return every signal's mean over the sources that reported it since a time."""
    found: dict[str, list[float]] = {}
    for report in reports:
        if report.reported_us > since_us:
            for name, load in report.loads.items():
                found.setdefault(name, []).append(load)
    return {name: sum(values) / len(values) for name, values in found.items()}
