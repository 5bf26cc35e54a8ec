"""A node's counters, none of which counts anything twice."""

import time
from typing import Any

import pytest
from msgspec.structs import replace

from limiter.model.bucket.contract import Decision, Granted, Refused, Settled
from limiter.model.tally import CallTally, DecisionTally, Histogram, SettleTally

COST_MAX_S = 1e-6
"""That one acquire may cost more for being counted."""


def granted(**more: Any) -> Granted:
    return replace(Granted("r", charged=3.0, expires_in_ms=1000, limits=()), **more)


def refused(**more: Any) -> Refused:
    base = Refused(policy="p", reason="work", retry="after", retry_after_ms=1, limits=(), detail="")
    return replace(base, **more)


def settled(**more: Any) -> Settled:
    first = Settled(5.0, adjusted=2.0, stop=False, duplicate=False, late=False, limits=(), uncollected=1.0)
    return replace(first, **more)


def counted(*decisions: Decision, dry_run: bool = False) -> DecisionTally:
    tally = DecisionTally()
    for decision in decisions:
        tally.count(decision, dry_run=dry_run)
    return tally


def test_a_value_on_a_bound_is_within_it() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (0.5, 1, 1.5, 4, 5):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum) == ([2, 1, 1, 1], 12)
    assert list(histogram.cumulative) == [2, 3, 4, 5]


def test_decisions_are_counted_by_what_they_are() -> None:
    tally = counted(granted(), granted(degraded=True), refused(), refused(reason="overload", degraded=True))
    assert (tally.granted, tally.degraded_granted, tally.degraded_refused) == (2, 1, 1)
    assert {reason: count for reason, count in tally.refused.items() if count} == {"work": 1, "overload": 1}
    assert tally.work_admitted == 6


def test_a_dry_run_admits_nothing() -> None:
    tally = counted(granted(), refused(), dry_run=True)
    assert (tally.dry_runs, tally.granted, tally.work_admitted, sum(tally.refused.values())) == (2, 0, 0, 0)


def test_a_repeated_answer_admits_nothing_again() -> None:
    tally = counted(granted(replayed=True), refused(replayed=True))
    assert (tally.replayed, tally.granted, tally.work_admitted, sum(tally.refused.values())) == (2, 0, 0, 0)


@pytest.mark.parametrize(
    ("answer", "final", "expected"),
    [
        (settled(), True, {"settled": 1, "work": 5, "debited": 2, "uncollected": 1}),
        (settled(adjusted=-2.0), True, {"settled": 1, "work": 5, "refunded": 2, "uncollected": 1}),
        (settled(late=True), True, {"late": 1, "work": 5, "debited": 2, "uncollected": 1}),
        (settled(), False, {"progress": 1}),
        (settled(duplicate=True), True, {"duplicate": 1}),
    ],
)
def test_a_reservation_s_work_is_counted_once_when_it_ends(
    answer: Settled, final: bool, expected: dict[str, float]
) -> None:
    tally = SettleTally()
    tally.count(answer, final=final)
    names = [name for name in SettleTally.__slots__ if name != "unanswered"]
    assert {name: getattr(tally, name) for name in names if getattr(tally, name)} == expected


def test_counting_an_acquire_costs_less_than_a_microsecond() -> None:
    """The decision itself, its share of a call of eight operations, and its HTTP answer."""
    tally, call, requests = DecisionTally(), CallTally(), {(b"/v1/acquire", 200): 0}
    grant = granted()

    def count_eight() -> None:
        for _ in range(8):
            tally.count(grant, dry_run=False)
            key = (b"/v1/acquire", 200)
            requests[key] = requests.get(key, 0) + 1
        call.operations.observe(8)
        call.seconds.observe(0.002)

    def nothing_eight() -> None:
        for _ in range(8):
            pass

    assert (best_s(count_eight) - best_s(nothing_eight)) / 8 < COST_MAX_S


def best_s(what: Any, *, times: int = 200, loops: int = 50) -> float:
    """The shortest processor time of many: others on this machine only ever add."""
    found = []
    for _ in range(times):
        began_s = time.process_time()
        for _ in range(loops):
            what()
        found.append((time.process_time() - began_s) / loops)
    return min(found)
