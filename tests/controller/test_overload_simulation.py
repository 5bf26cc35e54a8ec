"""Q7 and G5 in virtual time: a backend that slows down with the excess, offered 2 and 10 times what it can do."""

from functools import cache
from typing import Any

import pytest

from limiter.model.overload.signals import Report
from loadtest.simulation.backends import Slowing
from loadtest.simulation.distributions import Draw
from loadtest.simulation.gates import Guarded
from loadtest.simulation.service import Gate, Seen, Traffic, World
from loadtest.simulation.steered import BEGIN_US, BUCKET
from loadtest.simulation.yardsticks import OnOff

CAPACITY = 1000.0
SLOPE_S = 0.0003
"""A third of Q7's backend, so that a run is a third as long."""
EXPECTED_S = 0.2
SECONDS, SETTLED_S = 50, 30
MIXES = {"alike": (0.0, 1.0, 0.0, 0.0), "mixed": (0.05, 0.25, 0.3, 0.4), "low": (0.0, 0.0, 0.0, 1.0)}


def little_noise() -> Draw:
    return lambda chance: max(0.01, chance.gauss(1.0, 0.01))


class Reporting(Guarded):
    """The product's utilisation control, told once a second how busy the backend is (G5)."""

    def __init__(self, seed: int) -> None:
        super().__init__({"utilisation": {"target": 1.0}}, seed=seed)
        self._admitted = 0

    def ask(self, now_s: float, class_number: int) -> object | None:
        ticket = super().ask(now_s, class_number)
        self._admitted += ticket is not None
        return ticket

    def look(self, now_s: float) -> None:
        if round(now_s * 10) % 10 == 0:
            load, self._admitted = self._admitted / CAPACITY, 0
            now_us = BEGIN_US + round(now_s * 1e6)
            self.steered.store.reports[BUCKET] = (Report(b"backend", now_us, {"load": load}),)
        super().look(now_s)


def gate(law: str, seed: int) -> Gate:
    if law == "on-off":
        return OnOff(EXPECTED_S, allowed=0.05)
    if law == "utilisation":
        return Reporting(seed)
    block: dict[str, Any] = {"expectations": {"expected_latency_ms": EXPECTED_S * 1000, "mode": law}}
    return Guarded(block, seed=seed)


@cache
def seen(law: str, mix: str, times: float, seed: int) -> Seen:
    """Five seconds at half load, so that the bucket was seen healthy, then the load."""
    parts = MIXES[mix]

    def rates(now_s: float) -> list[float]:
        return [part * CAPACITY * (0.5 if now_s < 5 else times) for part in parts]

    backend = Slowing(little_noise(), seed, capacity=CAPACITY, slope_s=SLOPE_S)
    return World(Traffic(rates=rates), gate(law, seed), backend, seed, SECONDS, EXPECTED_S).run()


@pytest.mark.slow
@pytest.mark.parametrize(("mix", "times"), [("alike", 2), ("low", 10), ("mixed", 10)])
def test_q7_the_ideal_mode_holds_the_backend_near_what_it_can_do(mix: str, times: float) -> None:
    """Q9: all expect 200 ms, and answers take longer in the overload; shares are drawn right nevertheless (Q13)."""
    found = seen("ideal", mix, times, 1)
    assert found.admitted_rate(SETTLED_S, SECONDS) == pytest.approx(CAPACITY, rel=0.1)
    assert found.wobble(SETTLED_S, SECONDS) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 10])
def test_q7_the_damped_mode_brings_it_under_and_serves_most_of_it(times: float) -> None:
    """Q10"""
    found, naive = seen("damped", "alike", times, 1), seen("on-off", "alike", times, 1)
    assert 0.75 * CAPACITY <= found.admitted_rate(SETTLED_S, SECONDS) <= 1.1 * CAPACITY
    assert found.missed(SETTLED_S, SECONDS - 5) * 2 < naive.missed(SETTLED_S, SECONDS - 5)


@pytest.mark.parametrize("times", [2, 10])
def test_the_naive_throttle_oscillates(times: float) -> None:
    found = seen("on-off", "alike", times, 1)
    admitted = [sum(second) for second in found.admitted[SETTLED_S:SECONDS]]
    assert min(admitted) == 0
    assert max(admitted) > 0.9 * times * CAPACITY
    assert found.missed(SETTLED_S, SECONDS - 5) > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 10])
@pytest.mark.parametrize("mix", ["alike", "mixed"])
def test_g5_utilisation_holds_the_load_at_its_target(mix: str, times: float) -> None:
    found = seen("utilisation", mix, times, 1)
    assert found.admitted_rate(SETTLED_S, SECONDS) == pytest.approx(CAPACITY, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("law", ["ideal", "damped", "utilisation"])
def test_q4_the_victims_are_the_low_priorities(law: str) -> None:
    found = seen(law, "mixed", 2, 1)
    refused = [found.refused_share(SETTLED_S, SECONDS, number) for number in range(4)]
    assert refused == sorted(refused)
    assert refused[0] == 0
    assert refused[-1] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("law", ["ideal", "damped", "utilisation"])
def test_a_load_that_can_be_served_is_left_alone(law: str) -> None:
    assert seen(law, "alike", 0.8, 3).refused_share(0, SECONDS) <= 0.001
