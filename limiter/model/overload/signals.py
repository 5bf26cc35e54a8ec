"""What services report of their load (G5): the reference for `lua/signal.lua`.

    reports = those of other sources, not older than SIGNAL_TTL_US, at most SOURCES_MAX − 1 · the new one

The load that several sources report is their mean, over those that have been heard of lately: one that is gone falls
silent, and one that reports more often weighs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SIGNAL_TTL_US = 60_000_000
SOURCES_MAX = 64
"""Of a larger fleet the newest reports are kept: a sample of it."""


class Report(NamedTuple):
    """What one source last said."""

    source: bytes
    reported_us: float
    loads: Mapping[str, float]


def add(reports: Sequence[Report], report: Report) -> tuple[Report, ...]:
    """The reports with a new one, oldest first."""
    now_us = report.reported_us
    others = [
        other
        for other in reports
        if other.source != report.source and now_us - SIGNAL_TTL_US < other.reported_us <= now_us
    ]
    return (*others[-(SOURCES_MAX - 1) :], report)


def latest_us(reports: Iterable[Report]) -> float:
    """When anybody last reported; 0 if nobody did."""
    return max((report.reported_us for report in reports), default=0.0)


def loads(reports: Iterable[Report], *, since_us: float) -> dict[str, float]:
    """Every signal at the mean of the sources that reported it since a time."""
    found: dict[str, list[float]] = {}
    for report in reports:
        if report.reported_us > since_us:
            for name, load in report.loads.items():
                found.setdefault(name, []).append(load)
    return {name: sum(values) / len(values) for name, values in found.items()}
