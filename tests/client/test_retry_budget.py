from random import Random

import pytest

from limiter.client.retry_budget import RetryBudget


def calls_of(budget: RetryBudget, requests: int, *, refused_share: float, rate: float, seed: int = 1) -> int:
    """Make so many requests a second apart by 1 / rate, each retried as long as the budget allows it."""
    draw = Random(seed)
    calls = 0
    for number in range(requests):
        now_s = number / rate
        budget.asked(now_s)
        attempt = 1
        calls += 1
        while draw.random() < refused_share and budget.may_retry(attempt, now_s):
            attempt += 1
            calls += 1
    return calls


@pytest.mark.parametrize("rate", [0.01, 1.0, 1000.0])
def test_g6_if_all_are_refused_there_are_at_most_eleven_calls_for_ten_requests(rate: float) -> None:
    budget = RetryBudget()
    assert calls_of(budget, 10_000, refused_share=1.0, rate=rate) == pytest.approx(11_000 + 10, abs=1)
    assert budget.retries <= 1010
    assert calls_of(budget, 10_000, refused_share=1.0, rate=rate) <= 11_000


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("refused_share", [0.02, 0.2, 0.6])
def test_g6_retries_never_exceed_a_tenth_of_the_requests_and_the_burst(refused_share: float, seed: int) -> None:
    budget = RetryBudget()
    calls = calls_of(budget, 5000, refused_share=refused_share, rate=100, seed=seed)
    assert calls - 5000 == budget.retries
    assert budget.retries <= 500 + 10
    if refused_share == 0.02:
        assert budget.refused == 0, "few failures are all retried"


def test_g6_a_request_has_three_attempts() -> None:
    budget = RetryBudget()
    budget.asked(0.0)
    assert [budget.may_retry(attempt, 0.0) for attempt in (1, 2, 3, 4)] == [True, True, False, False]
    assert (budget.requests, budget.retries, budget.refused) == (1, 2, 0)


def test_a_new_process_may_retry_a_few_times() -> None:
    budget = RetryBudget(burst=3)
    assert [budget.may_retry(1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert budget.refused == 1


def test_a_busy_client_may_retry_a_short_failure_and_an_idle_one_forgets_its_tokens() -> None:
    busy, idle = RetryBudget(), RetryBudget()
    for number in range(100_000):
        for budget in (busy, idle):
            budget.asked(number / 1000)
    assert busy.tokens(100.0) == pytest.approx(10 + 0.1 * 1000 * 10, rel=0.01), "a tenth of the last ten seconds"
    assert sum(busy.may_retry(1, 100.0) for _ in range(500)) == 500
    assert idle.tokens(400.0) == pytest.approx(10)


def test_time_that_goes_back_gives_nothing() -> None:
    budget = RetryBudget(burst=1)
    for _ in range(100):
        budget.asked(50.0)
    assert budget.tokens(10.0) == pytest.approx(11)
    assert budget.tokens(60.0) < 11


@pytest.mark.parametrize("wrong", [{"attempts_max": 0}, {"ratio": -0.1}, {"burst": -1}, {"keep_s": 0}])
def test_a_budget_with_senseless_numbers_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="attempts_max must be"):
        RetryBudget(**wrong)
