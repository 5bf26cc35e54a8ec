"""The controller against workloads in virtual time: where it settles, how far it overshoots, and what auto gains."""

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from limiter.model.control.cycle import CYCLE_S, WAIT_CYCLES_MAX
from limiter.model.policy.choices import Mechanism
from loadtest.simulation.score import Score, score, settled_after_s, work_above, work_rates
from loadtest.simulation.workloads import COMMITTED, WORKLOADS
from loadtest.simulation.world import LATENCY_S, Point, Run, simulate

ROOT = Path(__file__).resolve().parent.parent.parent
CHANGE_S = 20.0
SEEDS = (1, 2, 3)
TOLERANCE = 0.02
"""How much worse than the better fixed mechanism `auto` may be, as a share of the possible work …"""
EXCESS = 0.025
"""… and how much more above the limit it may admit: counting requests, a jump in cost is not debited at once."""


@cache
def run(workload: str, mechanism: Mechanism, seed: int = 1) -> Run:
    return simulate(WORKLOADS[workload], mechanism, seed=seed)


@cache
def scored(workload: str, mechanism: Mechanism) -> Score:
    """Of a few runs together: one alone may hang on whether a request of hundreds of units came early or late."""
    runs = [score(run(workload, mechanism, seed), committed=COMMITTED, capacity=COMMITTED) for seed in SEEDS]
    return Score(*map(sum, zip(*runs, strict=True)))


def points(workload: str, mechanism: Mechanism, tenant: str = "a", *, from_s: float = 0.0) -> list[Point]:
    return [point for point in run(workload, mechanism).points[tenant] if point.at_s > from_s]


def caps(workload: str, *, from_s: float) -> list[float]:
    return [point.cap for point in points(workload, Mechanism.REQUESTS, from_s=from_s)]


def oscillation(values: list[float]) -> float:
    """Standard deviation, as a share of the mean."""
    return pstdev(values) / fmean(values)


@pytest.mark.parametrize(("workload", "cap"), [("steady-small", 100.0), ("steady-large", 2.0)])
def test_r8_the_cap_settles_where_the_limit_is_used_up(workload: str, cap: float) -> None:
    """R8: C = 100: requests of 1 unit → 100 rps, of 50 units → 2 rps."""
    assert fmean(caps(workload, from_s=15.0)) == pytest.approx(cap, rel=0.08)
    assert settled_after_s(points(workload, Mechanism.REQUESTS), from_s=0.0, value=cap, within=0.2) < 10
    assert fmean(work_rates(points(workload, Mechanism.REQUESTS, from_s=15.0))[10:]) == pytest.approx(100, rel=0.08)


@pytest.mark.parametrize(("workload", "cap", "seconds"), [("cost-up", 2.0, 8.0), ("cost-down", 100.0, 3.0)])
def test_r8_a_change_of_cost_by_fifty_settles_in_seconds(workload: str, cap: float, seconds: float) -> None:
    watched = points(workload, Mechanism.REQUESTS)
    assert settled_after_s(watched, from_s=CHANGE_S, value=cap, within=0.1) < seconds


@pytest.mark.parametrize("workload", ["steady-small", "steady-large", "cost-up", "cost-down"])
def test_r8_f_p9_no_oscillation_lasts(workload: str) -> None:
    """F-P9: damped. In the last ten seconds the cap hardly moves."""
    assert oscillation(caps(workload, from_s=30.0)) < 0.06


def test_r8_a_change_of_cost_never_undershoots_by_more_than_damping_allows() -> None:
    """From 100 rps to 2: the lowest cap on the way, and the highest after it."""
    after = caps("cost-up", from_s=CHANGE_S)
    lowest = after.index(min(after))
    assert min(after) > 2.0 / 2
    assert max(after[lowest:]) < 2.0 * 1.2


@pytest.mark.parametrize(("workload", "cap"), [("cost-up", 2.0), ("cost-down", 100.0)])
def test_r8_the_way_from_one_to_the_other_never_stands_still(workload: str, cap: float) -> None:
    watched = points(workload, Mechanism.REQUESTS, from_s=CHANGE_S + LATENCY_S[1] + CYCLE_S)
    settled_s = CHANGE_S + settled_after_s(watched, from_s=CHANGE_S, value=cap, within=0.1)
    moved_s = CHANGE_S
    for before, after in itertools.pairwise(watched):
        if after.cap != before.cap:
            moved_s = after.at_s
        assert after.at_s > settled_s or after.at_s - moved_s <= WAIT_CYCLES_MAX * CYCLE_S + 1e-6


def test_r8_the_overshoot_of_a_cap_is_over_within_a_second_and_of_work_within_two() -> None:
    """R2 takes X/f/3 off in each cycle: about ten cycles for a factor of fifty."""
    after = points("cost-up", Mechanism.REQUESTS, from_s=CHANGE_S)
    assert after[11].cap < 2.0 * 2
    assert max(work_rates(after)[20:]) <= 1.5 * COMMITTED
    admissions = [(at_s, work) for at_s, work in run("cost-up", Mechanism.REQUESTS).admissions["a"] if at_s > CHANGE_S]
    assert work_above(admissions, committed=COMMITTED, capacity=COMMITTED) < 2500, "of 100 000 offered in that time"


def test_a_flood_that_rejects_nothing_does_not_stay_above_the_limit() -> None:
    """R4 alone would leave the cap a fifth above what is done, ten times the limit, for good."""
    assert max(work_rates(points("steady-large", Mechanism.REQUESTS, from_s=5.0))[10:]) <= 1.5 * COMMITTED


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_r10_auto_is_as_good_as_the_better_mechanism(workload: str) -> None:
    """Work within the limit, less work above it."""
    auto, *fixed = (scored(workload, one) for one in (Mechanism.AUTO, Mechanism.WORK, Mechanism.REQUESTS))
    better = max(fixed, key=lambda one: one.worth)
    assert auto.used >= better.used - TOLERANCE
    assert auto.excess <= better.excess + EXCESS
    assert auto.worth >= better.worth - TOLERANCE


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_r10_auto_changes_its_mind_seldom(workload: str) -> None:
    """Hysteresis: once for the start, twice for a change."""
    for tenant in run(workload, Mechanism.AUTO).points:
        counted = [point.counts_requests for point in points(workload, Mechanism.AUTO, tenant)]
        assert sum(before != after for before, after in itertools.pairwise(counted)) <= 3


@pytest.mark.parametrize(
    ("workload", "counts_requests"),
    [("steady-small", True), ("steady-large", False), ("bursty", False), ("pareto", False), ("cost-down", True)],
)
def test_r10_auto_ends_with_the_mechanism_that_suits(workload: str, counts_requests: bool) -> None:
    assert points(workload, Mechanism.AUTO)[-1].counts_requests is counts_requests


def test_r10_auto_leaves_requests_within_two_cycles_of_a_jump_in_cost() -> None:
    after = points("cost-up", Mechanism.AUTO, from_s=CHANGE_S)
    assert next(point.at_s for point in after if not point.counts_requests) <= CHANGE_S + 2 * CYCLE_S + 1e-6


@pytest.mark.parametrize("mechanism", Mechanism)
def test_g2_a_tenant_that_floods_its_limit_never_hurts_another(mechanism: Mechanism) -> None:
    watched = points("two-tenants", mechanism, "a", from_s=10.0)
    assert sum(point.refused for point in watched) <= 0.01 * sum(point.requests for point in watched)


def asleep(workload: str, mechanism: Mechanism) -> list[Point]:
    return [point for point in points(workload, mechanism) if 20.1 < point.at_s < 25.0]


@pytest.mark.parametrize("mechanism", [Mechanism.WORK, Mechanism.REQUESTS])
def test_f_p7_while_the_controller_sleeps_what_it_left_stays_in_force(mechanism: Mechanism) -> None:
    left = {(point.counts_requests, point.charge, repr(point.cap)) for point in asleep("paused", mechanism)}
    assert len(left) == 1
    assert scored("paused", mechanism).excess < 0.001


def test_f_p7_while_the_controller_sleeps_auto_counts_work() -> None:
    """It counts requests for a second's work at a time, and again once the controller has woken."""
    counted = [point.counts_requests for point in asleep("paused", Mechanism.AUTO)]
    assert counted[0]
    assert not any(counted[20:])
    assert points("paused", Mechanism.AUTO, from_s=25.5)[0].counts_requests
    assert scored("paused", Mechanism.AUTO).excess < 0.001


def test_f_p7_costs_that_rise_while_the_controller_sleeps_are_caught_when_it_wakes() -> None:
    """The worst case of counting requests: nobody looks while they cost ten times as much. Work is not affected."""
    assert scored("paused-cost", Mechanism.WORK).excess < 0.05
    rates = work_rates(asleep("paused-cost", Mechanism.REQUESTS))
    assert max(rates) <= 10 * COMMITTED * 1.1, "never more than the cap, at the new cost"
    assert max(work_rates(points("paused-cost", Mechanism.REQUESTS, from_s=26.5))[10:]) <= 1.5 * COMMITTED


def test_f_p7_auto_needs_no_controller_to_see_that_costs_rise() -> None:
    assert not any(point.counts_requests for point in asleep("paused-cost", Mechanism.AUTO)[2:])
    assert max(work_rates(asleep("paused-cost", Mechanism.AUTO)[10:])[10:]) <= 1.5 * COMMITTED


def test_f_p8_half_the_samples_lost_still_settle() -> None:
    watched = points("lost-samples", Mechanism.REQUESTS)
    assert settled_after_s(watched, from_s=CHANGE_S, value=10.0, within=0.25) < 10
    assert oscillation(caps("lost-samples", from_s=30.0)) < 0.1


def test_a_retry_storm_ends_with_its_cause() -> None:
    """80 requests/s fit again a few seconds after the spike: the cap was not driven down by retries."""
    for mechanism in Mechanism:
        watched = points("retry-storm", mechanism, from_s=28.0)
        assert sum(point.refused for point in watched) <= 0.02 * sum(point.requests for point in watched)


def test_a_seed_reproduces_everything() -> None:
    workload = WORKLOADS["pareto"]
    first, again, other = (simulate(workload, Mechanism.AUTO, seed=seed) for seed in (5, 5, 6))
    assert first.admissions == again.admissions
    assert first.admissions != other.admissions


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    svg = tmp_path / "run.svg"
    command = [sys.executable, "-m", "loadtest.simulation", "steady-large", "--svg", str(svg)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.startswith("steady-large, mechanism auto: 20 requests/s of 50 units")
    assert "units/s" in printed
    assert len(printed.splitlines()) > 40
    words = "".join(ET.parse(svg).getroot().itertext())
    for word in ("time (s)", "units/s", "requests/s", "the limit", "work", "auto"):
        assert word in words
