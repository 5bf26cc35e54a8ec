"""Tallies with the names and labels of their metrics, at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from limiter.metrics import catalogue
from limiter.metrics.catalogue import Definition
from limiter.model.bucket.expiry import Expiries
from limiter.model.policy.policy_set import PolicySet
from limiter.model.tally import CallTally, DecisionTally, Histogram, LeaseTally, SettleTally, Unanswered

Labels = tuple[str, ...]

POLICIES_FROM_ZERO_MAX = 200
"""Policies whose counters are shown as 0 before anything was counted."""


class Reading(NamedTuple):
    """One metric: a value, or a histogram, for each combination of label values."""

    definition: Definition
    values: Mapping[Labels, float | Histogram]


def plain(definition: Definition, value: float) -> Reading:
    """Return a metric without labels."""
    return Reading(definition, {(): value})


def labelled(definition: Definition, values: Mapping[str, float]) -> Reading:
    """Return a metric with one label."""
    return Reading(definition, {(label,): value for label, value in values.items()})


def decisions(tally: DecisionTally) -> Iterator[Reading]:
    yield Reading(
        catalogue.DECISIONS,
        {
            ("granted", "none"): tally.granted,
            **{("refused", reason): count for reason, count in tally.refused.items()},
            **{("undecided", reason): count for reason, count in tally.undecided.items()},
        },
    )
    yield labelled(catalogue.DEGRADED, {"granted": tally.degraded_granted, "refused": tally.degraded_refused})
    yield labelled(catalogue.UNCOVERED, {str(known).lower(): count for known, count in tally.uncovered.items()})
    yield plain(catalogue.SHADOW_DENIED, tally.denied_in_shadow)
    yield plain(catalogue.REPEATED, tally.repeated)
    yield labelled(catalogue.RETRIES, {"2": tally.second_attempts, "3+": tally.further_attempts})
    yield plain(catalogue.DRY_RUNS, tally.dry_runs)
    yield plain(catalogue.REPLAYED, tally.replayed)
    yield plain(catalogue.WORK_ADMITTED, tally.work_admitted)


def leases(tally: LeaseTally) -> Reading:
    """Return requests for leases by outcome."""
    return labelled(catalogue.LEASE_REQUESTS, {str(outcome): count for outcome, count in tally.outcomes.items()})


def settles(tally: SettleTally) -> Iterator[Reading]:
    outcomes = {
        "settled": tally.settled,
        "late": tally.late,
        "progress": tally.progress,
        "duplicate": tally.duplicate,
    }
    yield labelled(catalogue.SETTLES, outcomes)
    yield plain(catalogue.WORK_SETTLED, tally.work)
    yield labelled(catalogue.WORK_CORRECTED, {"debited": tally.debited, "refunded": tally.refunded})
    yield plain(catalogue.WORK_UNCOLLECTED, tally.uncollected)


def reservations(expiries: Expiries, now_us: int, policies: PolicySet) -> Iterator[Reading]:
    """Count reservations that fell due; unsettled are the due less the settled and renewed, over all nodes."""
    due = (catalogue.RESERVATIONS_DUE, catalogue.RESERVATIONS_DUE_SETTLED, catalogue.RESERVATIONS_DUE_RENEWED)
    counts = zip(due, expiries.totals(now_us), strict=True)
    # A query sees no growth in a counter that begins at 1, so the counters of the first policies begin at 0.
    shown = [(policy.namespace, policy.name) for policy in policies.policies[:POLICIES_FROM_ZERO_MAX]]
    for definition, found in counts:
        yield Reading(definition, {key: found.get(key, 0) for key in {*shown, *found}})


def store_calls(tallies: Mapping[str, CallTally]) -> Iterator[Reading]:
    """Return calls to the store, by operation."""
    yield Reading(catalogue.CALL_OPERATIONS, {(name,): tally.operations for name, tally in tallies.items()})
    yield Reading(catalogue.CALL_SECONDS, {(name,): tally.seconds for name, tally in tallies.items()})


def unanswered(counts: Mapping[str, Mapping[Unanswered, int]]) -> Reading:
    """Return operations that the store did not answer, by operation and reason."""
    values: dict[Labels, float] = {}
    for name, reasons in counts.items():
        values |= {(name, reason): count for reason, count in reasons.items()}
    return Reading(catalogue.UNANSWERED, values)


def http(requests: Mapping[tuple[bytes, int], int], *, busy_batches: int) -> Iterator[Reading]:
    """Return HTTP answers, by route and status."""
    counted: dict[Labels, float] = {}
    for (route, status), count in list(requests.items()):
        counted[route.decode("ascii"), str(status)] = count
    yield Reading(catalogue.HTTP_REQUESTS, counted)
    yield plain(catalogue.BUSY_BATCHES, busy_batches)


def plain_histogram(definition: Definition, histogram: Histogram) -> Reading:
    """Return a histogram without labels."""
    return Reading(definition, {(): histogram})
