"""Q7: a backend of 3000 requests a second, offered 2 and 10 times that, in virtual time and with seeds."""

from collections.abc import Callable

import pytest

from limiter.model.overload.utilisation import UtilisationParams
from loadtest.overload.page import OVERVIEW, with_table
from loadtest.simulation.overload import ByUtilisation, Offered, Throttle
from loadtest.simulation.overload_table import (
    ALIKE,
    CAPACITY,
    DOCS,
    LOW,
    MIXED,
    NAME,
    SETTLED_S,
    damped,
    ideal,
    offered,
    on_off,
    run,
    table,
)

SEEDS = range(3)  # a failing case is named for its seed


def busy() -> Throttle:
    return ByUtilisation(UtilisationParams(target=1.0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.parametrize("mix", [ALIKE, MIXED, LOW], ids=["alike", "mixed", "low"])
def test_q7_the_ideal_mode_holds_the_backend_within_a_tenth_of_what_it_can_do(
    mix: Offered, times: float, seed: int
) -> None:
    whole = run(ideal, mix, times, seed)
    late = whole.since(SETTLED_S)
    assert all(abs(second.admitted_in_all - CAPACITY) <= 0.1 * CAPACITY for second in late.seconds)
    assert late.missed_share() < 0.01
    # Into the overload and out of it, once; at 2× the first second already speaks of it.
    assert whole.transitions() <= 2
    assert late.transitions() == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.parametrize("mix", [ALIKE, MIXED], ids=["alike", "mixed"])
def test_q7_the_damped_mode_brings_it_under_and_seldom_looks_over(mix: Offered, times: float, seed: int) -> None:
    late = run(damped, mix, times, seed).since(SETTLED_S)
    assert late.admitted_mean() <= 1.1 * CAPACITY
    naive = run(on_off, mix, times, seed).since(SETTLED_S)
    assert late.transitions() * 3 < naive.transitions()
    assert late.missed_share() * 2 < naive.missed_share()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("times", [2, 10])
def test_the_naive_throttle_oscillates(times: float, seed: int) -> None:
    late = run(on_off, ALIKE, times, seed).since(SETTLED_S)
    assert late.transitions() > len(late.seconds) / 4
    admitted = [second.admitted_in_all for second in late.seconds]
    assert min(admitted) == 0
    assert max(admitted) > 0.9 * times * CAPACITY
    assert late.missed_share() > 0.4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.parametrize("mix", [ALIKE, MIXED, LOW], ids=["alike", "mixed", "low"])
def test_g5_utilisation_holds_the_load_at_its_target(mix: Offered, times: float, seed: int) -> None:
    late = run(busy, mix, times, seed).since(SETTLED_S)
    assert late.admitted_mean() == pytest.approx(CAPACITY, rel=0.02)
    assert all(abs(second.admitted_in_all - CAPACITY) <= 0.1 * CAPACITY for second in late.seconds)
    assert late.transitions() == 0


@pytest.mark.parametrize("throttle", [ideal, damped, busy])
def test_q4_the_victims_are_the_low_priorities(throttle: Callable[[], Throttle]) -> None:
    late = run(throttle, MIXED, 4, seed=1).since(SETTLED_S)
    served = [late.admitted_of(name) / rate for name, rate in offered(MIXED, 4).items()]
    assert served == sorted(served, reverse=True)
    assert served[0] > 0.99
    assert served[-1] < 0.1


def test_a_load_that_can_be_served_is_left_alone() -> None:
    for throttle in (ideal, damped, busy):
        outcome = run(throttle, MIXED, 0.8, seed=3)
        assert sum(second.offered - second.admitted_in_all for second in outcome.seconds) == 0


def test_one_seed_one_result() -> None:
    assert run(ideal, MIXED, 2, seed=9) == run(ideal, MIXED, 2, seed=9)
    assert run(ideal, MIXED, 2, seed=9) != run(ideal, MIXED, 2, seed=10)


def test_the_page_shows_these_simulations() -> None:
    page = (DOCS / OVERVIEW).read_text()
    assert f"<!-- {NAME} -->" in page
    assert with_table(page, NAME, table().markdown()) == page
