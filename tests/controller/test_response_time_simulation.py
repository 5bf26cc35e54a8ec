"""S6 in virtual time and with seeds: a spike, and classes, against one worker that can do 50 requests a second."""

from functools import cache

import pytest

from limiter.model.policy.criticality import Criticality
from loadtest.simulation.backends import Fifo
from loadtest.simulation.distributions import constant
from loadtest.simulation.gates import Guarded
from loadtest.simulation.service import Closed, Gate, Seen, Traffic, World
from loadtest.simulation.yardsticks import Everyone

PLUS, CRITICAL, _, SHEDDABLE = range(len(Criticality))
SERVICE_S, TARGET_S = 0.02, 1.0
CAPACITY = 1 / SERVICE_S
SEEDS = range(3)


def world(gate: Gate, closed: Closed, seed: int, seconds: int) -> Seen:
    return World(Traffic(closed=closed), gate, Fifo(1, constant(SERVICE_S), seed), seed, seconds, TARGET_S).run()


def control(seed: int, **more: object) -> Gate:
    return Guarded({"response_time": {"target_ms": TARGET_S * 1000, **more}}, seed=seed)


@cache
def spike(seed: int, *, with_control: bool = True) -> Seen:
    closed = Closed(users=lambda now_s: 3 if now_s < 5 else 1000)
    return world(control(seed) if with_control else Everyone(), closed, seed, 65)


@pytest.mark.parametrize("seed", SEEDS)
def test_s6_with_control_p90_settles_near_the_target_and_without_it_grows(seed: int) -> None:
    assert spike(seed).percentile_s(25, 65) == pytest.approx(TARGET_S, rel=0.15)
    assert spike(seed, with_control=False).percentile_s(25, 65) > 10 * TARGET_S


@pytest.mark.parametrize("seed", SEEDS)
def test_s9_the_worker_stays_busy(seed: int) -> None:
    assert spike(seed).served(15, 65) >= 0.97 * CAPACITY
    assert min(map(len, spike(seed).latencies_s[15:65])) >= 0.9 * CAPACITY


@pytest.mark.parametrize("seed", SEEDS)
def test_s6_of_two_classes_of_equal_load_the_high_one_is_refused_clearly_less(seed: int) -> None:
    closed = Closed(users=lambda _: 250, mix=(0.0, 1.0, 0.0, 1.0))
    found = world(control(seed), closed, seed, 60)
    high, low = (found.refused_share(20, 60, number) for number in (CRITICAL, SHEDDABLE))
    assert low - high > 0.3
    found = world(control(seed, classes=False), closed, seed, 60)
    high, low = (found.refused_share(20, 60, number) for number in (CRITICAL, SHEDDABLE))
    assert high == pytest.approx(low, abs=0.06)


@pytest.mark.parametrize("seed", SEEDS)
def test_s8_a_few_requests_of_a_higher_class_do_not_keep_the_others_low(seed: int) -> None:
    closed = Closed(users=lambda _: 250, mix=(1.0, 30.0, 0.0, 0.0))
    found = world(control(seed), closed, seed, 60)
    assert found.served(20, 60) > 0.95 * CAPACITY
    assert found.refused_share(20, 60, PLUS) < 0.02
    assert found.refused_share(20, 60, CRITICAL) > 0.4


def test_a_load_that_can_be_served_is_left_alone() -> None:
    found = world(control(1), Closed(users=lambda _: 60), 1, 30)
    assert found.refused_share(0, 30) == 0


def test_one_seed_one_result() -> None:
    assert spike.__wrapped__(9).admitted == spike(9).admitted
    assert spike(9).admitted != spike(8).admitted
