"""The controller against workloads in virtual time: where it settles, how far it overshoots, and what auto gains."""

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from limiter.model.policy.choices import Mechanism
from loadtest.simulation.flow import Point
from loadtest.simulation.scores import near_after_s, score, work_rates
from loadtest.simulation.steered import CYCLE_S
from loadtest.simulation.workloads import CHANGE_S, COMMITTED, WARM_UP_S, WORKLOADS, play

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = (1, 2, 3)
TOLERANCE = 0.03
"""How much worse than the better fixed mechanism `auto` may be, as a share of the possible work …"""
EXCESS = 0.05
"""… and how much more above the limit it may admit: counting requests, a jump in cost is not debited at once. Requests
are counted for a second's work or four requests at a time, and four of 50 units are 2 s of the limit in these 30 s."""


@cache
def run(workload: str, mechanism: Mechanism, seed: int = 1) -> list[Point]:
    return play(WORKLOADS[workload], mechanism, seed=seed)


@cache
def scored(workload: str, mechanism: Mechanism) -> tuple[float, float]:
    """Share of the possible work within the limit, and above it, of a few runs together."""
    found = [score(run(workload, mechanism, seed), COMMITTED, from_s=WARM_UP_S) for seed in SEEDS]
    return fmean(figures.used for figures in found), fmean(figures.excess for figures in found)


def points(workload: str, mechanism: Mechanism, *, from_s: float = 0.0) -> list[Point]:
    return [point for point in run(workload, mechanism) if point.at_s > from_s]


def caps(workload: str, *, from_s: float) -> list[float]:
    return [point.cap for point in points(workload, Mechanism.REQUESTS, from_s=from_s)]


def oscillation(values: list[float]) -> float:
    """Standard deviation, as a share of the mean."""
    return pstdev(values) / fmean(values)


@pytest.mark.parametrize(("workload", "cap"), [("steady-small", 100.0), ("steady-large", 2.0), ("steady-long", 10.0)])
def test_r8_the_cap_settles_where_the_limit_is_used_up(workload: str, cap: float) -> None:
    """R8: C = 100: requests of 1 unit → 100 rps, of 50 units → 2 rps; of 10 units that take 2 s → 10 rps."""
    assert fmean(caps(workload, from_s=15.0)) == pytest.approx(cap, rel=0.08)
    assert near_after_s(points(workload, Mechanism.REQUESTS), from_s=0.0, value=cap, within=0.25) < 12
    assert fmean(work_rates(points(workload, Mechanism.REQUESTS, from_s=15.0))[10:]) == pytest.approx(100, rel=0.08)


@pytest.mark.parametrize(("workload", "cap", "seconds"), [("cost-up", 2.0, 15.0), ("cost-down", 100.0, 6.0)])
def test_r8_a_change_of_cost_by_fifty_settles_in_seconds(workload: str, cap: float, seconds: float) -> None:
    """Two requests per second take longer to be told from chance than a hundred."""
    watched = points(workload, Mechanism.REQUESTS)
    assert near_after_s(watched, from_s=CHANGE_S, value=cap, within=0.25) < seconds


@pytest.mark.parametrize("workload", ["steady-small", "steady-large", "cost-up", "cost-down"])
def test_r8_f_p9_no_oscillation_lasts(workload: str) -> None:
    """F-P9: damped. In the last ten seconds the cap hardly moves."""
    assert oscillation(caps(workload, from_s=30.0)) < 0.06


def test_r8_a_change_of_cost_never_undershoots_by_more_than_damping_allows() -> None:
    """From 100 rps to 2: the lowest cap on the way, and the highest after it."""
    after = caps("cost-up", from_s=CHANGE_S)
    lowest = after.index(min(after))
    assert min(after) > 2.0 / 2
    assert max(after[lowest:]) < 2.0 * 1.3


def test_r8_the_overshoot_of_work_is_over_within_five_seconds() -> None:
    """R2 takes X/f/3 off in each cycle, at most half of the cap: about ten cycles for a factor of fifty."""
    after = points("cost-up", Mechanism.REQUESTS, from_s=CHANGE_S)
    assert after[14].cap < 2.0 * 5
    assert max(work_rates(after)[50:]) <= 2.0 * COMMITTED


def test_a_flood_that_rejects_nothing_does_not_stay_above_the_limit() -> None:
    """R4 alone would leave the cap a fifth above what is done, ten times the limit, for good."""
    assert max(work_rates(points("steady-large", Mechanism.REQUESTS, from_s=5.0))[10:]) <= 2.0 * COMMITTED


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_r10_auto_is_as_good_as_the_better_mechanism(workload: str) -> None:
    """Work within the limit, less work above it."""
    auto, *fixed = (scored(workload, one) for one in (Mechanism.AUTO, Mechanism.WORK, Mechanism.REQUESTS))
    used, excess = max(fixed, key=lambda one: one[0] - one[1])
    # Pareto costs scatter: a single run is several points off by chance.
    assert auto[0] >= used - (0.05 if workload == "pareto" else TOLERANCE)
    assert auto[1] <= excess + (0.08 if workload == "pareto" else EXCESS)


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_r10_auto_changes_its_mind_seldom(workload: str) -> None:
    """Hysteresis: once for the start, twice for a change."""
    counted = [point.counts_requests for point in points(workload, Mechanism.AUTO)]
    assert sum(before != after for before, after in itertools.pairwise(counted)) <= 4


@pytest.mark.parametrize(
    ("workload", "counts_requests"),
    [("steady-small", True), ("bursty", False), ("pareto", False), ("cost-down", False)],
)
def test_r10_auto_ends_with_the_mechanism_that_suits(workload: str, counts_requests: bool) -> None:
    """R16: costs that were fifty times as high half a minute ago are not even over time yet."""
    assert points(workload, Mechanism.AUTO)[-1].counts_requests is counts_requests


def asleep(workload: str, mechanism: Mechanism) -> list[Point]:
    return [point for point in points(workload, mechanism) if 20.1 < point.at_s < 25.0]


@pytest.mark.parametrize("mechanism", [Mechanism.WORK, Mechanism.REQUESTS])
def test_f_p7_while_the_controller_sleeps_what_it_left_stays_in_force(mechanism: Mechanism) -> None:
    left = {(point.counts_requests, point.charge, repr(point.cap)) for point in asleep("paused", mechanism)}
    assert len(left) == 1
    # A cap that stands still repays nothing of what the costs' noise brings above the limit.
    assert scored("paused", mechanism)[1] < (0.06 if mechanism is Mechanism.REQUESTS else 0.005)


def test_f_p7_while_the_controller_sleeps_auto_counts_work() -> None:
    """It counts requests for a second's work at a time, and again once the controller has woken."""
    before = [point for point in points("paused", Mechanism.AUTO, from_s=18.0) if point.at_s < 19.95]
    assert all(point.counts_requests for point in before)
    assert not any(point.counts_requests for point in asleep("paused", Mechanism.AUTO)[20:])
    assert points("paused", Mechanism.AUTO, from_s=25.5)[0].counts_requests
    assert scored("paused", Mechanism.AUTO)[1] < 0.005


def test_f_p7_costs_that_rise_while_the_controller_sleeps_are_caught_when_it_wakes() -> None:
    """The worst case of counting requests: nobody looks while they cost ten times as much. Work is not affected."""
    assert scored("paused-cost", Mechanism.WORK)[1] < 0.05
    rates = work_rates(asleep("paused-cost", Mechanism.REQUESTS))
    assert max(rates) <= 10 * COMMITTED * 1.2, "never more than the cap, at the new cost"
    assert max(work_rates(points("paused-cost", Mechanism.REQUESTS, from_s=27.0))[10:]) <= 1.5 * COMMITTED


def test_f_p7_auto_needs_no_controller_to_see_that_costs_rise() -> None:
    assert not any(point.counts_requests for point in asleep("paused-cost", Mechanism.AUTO)[2:])
    assert max(work_rates(asleep("paused-cost", Mechanism.AUTO)[10:])[10:]) <= 1.5 * COMMITTED


def test_f_p8_half_the_samples_lost_still_settle() -> None:
    watched = points("lost-samples", Mechanism.REQUESTS)
    assert near_after_s(watched, from_s=CHANGE_S, value=10.0, within=0.25) < 10
    assert oscillation(caps("lost-samples", from_s=30.0)) < 0.1


def test_a_retry_storm_ends_with_its_cause() -> None:
    """80 requests/s fit again a few seconds after the spike: the cap was not driven down by retries."""
    for mechanism in Mechanism:
        watched = points("retry-storm", mechanism, from_s=28.0)
        assert sum(point.refused for point in watched) <= 0.02 * sum(point.asked for point in watched)


def test_a_cycle_is_a_tenth_of_a_second() -> None:
    first, second = points("steady-small", Mechanism.WORK)[:2]
    assert second.at_s - first.at_s == pytest.approx(CYCLE_S)


def test_the_command_prints_a_run_and_draws_a_picture(tmp_path: Path) -> None:
    svg = tmp_path / "run.svg"
    command = [sys.executable, "-m", "loadtest.simulation", "run", "steady-large", "--svg", str(svg)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.startswith("steady-large, mechanism auto: 20 requests/s of 50 units")
    assert "units/s" in printed
    assert len(printed.splitlines()) > 40
    words = "".join(ET.parse(svg).getroot().itertext())
    for word in ("time (s)", "units/s", "requests/s", "the limit", "work", "auto"):
        assert word in words


@pytest.mark.slow
def test_the_command_prints_every_workload_under_every_mechanism() -> None:
    command = [sys.executable, "-m", "loadtest.simulation", "workloads"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240).stdout
    assert [line.split()[0] for line in printed.splitlines()[2:]] == list(WORKLOADS)
