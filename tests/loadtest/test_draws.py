"""Draws of users have the distribution that they claim, and the same seed draws the same."""

from collections import Counter
from random import Random
from statistics import fmean

import pytest

from loadtest.locust.draws import CLASSES, OPERATIONS, Bimodal, Constant, Cost, Pareto, Workload, Zipf

SEED = 20
DRAWS = 50_000
COSTS: list[Cost] = [
    Constant(3.0),
    Bimodal(cheap=2.0, expensive=20.0, expensive_share=0.1),
    Pareto(least=2.0, alpha=1.5, most=100.0),
]


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: type(cost).__name__)
def test_a_cost_has_the_mean_that_it_states(cost: Cost) -> None:
    draws = Random(SEED)
    assert fmean(cost.draw(draws) for _ in range(DRAWS)) == pytest.approx(cost.mean, rel=0.03)


def test_a_bimodal_cost_is_one_of_two() -> None:
    draws = Random(SEED)
    cost = Bimodal(cheap=2.0, expensive=20.0, expensive_share=0.25)
    drawn = Counter(cost.draw(draws) for _ in range(DRAWS))
    assert set(drawn) == {2.0, 20.0}
    assert drawn[20.0] / DRAWS == pytest.approx(0.25, abs=0.01)


def test_a_pareto_cost_has_its_tail_and_its_end() -> None:
    draws = Random(SEED)
    drawn = [Pareto(least=2.0, alpha=1.5, most=100.0).draw(draws) for _ in range(DRAWS)]
    assert 2.0 <= min(drawn) <= max(drawn) == 100.0
    assert sum(one > 8.0 for one in drawn) / DRAWS == pytest.approx((2.0 / 8.0) ** 1.5, rel=0.05)


def test_tenants_are_popular_by_their_rank() -> None:
    draws, zipf = Random(SEED), Zipf(20, 1.1)
    drawn = Counter(zipf.draw(draws) for _ in range(DRAWS))
    assert set(drawn) == set(range(20))
    assert drawn[0] / drawn[9] == pytest.approx(10**1.1, rel=0.15)
    for rank in (0, 1, 19):
        assert drawn[rank] / DRAWS == pytest.approx(zipf.share(rank), rel=0.15)
    assert sum(zipf.share(rank) for rank in range(20)) == pytest.approx(1.0)


def test_the_same_seed_asks_the_same() -> None:
    first, second = Random(SEED), Random(SEED)
    workload = Workload()
    asks = [workload.draw(first) for _ in range(200)]
    assert asks == [workload.draw(second) for _ in range(200)]
    assert {ask.criticality for ask in asks} == set(CLASSES)
    assert {ask.operation for ask in asks} == {operation.name for operation in OPERATIONS}


def test_a_workload_s_mean_is_that_of_its_costs() -> None:
    draws, workload = Random(SEED), Workload()
    assert fmean(workload.draw(draws).cost for _ in range(DRAWS)) == pytest.approx(workload.mean_cost, rel=0.03)
