"""S6 in virtual time and with seeds: a spike, and two classes, against one worker that can do 50 requests a second."""

import pytest

from limiter.model.overload.overload_block import ResponseTime
from limiter.model.overload.response_time import ResponseTimeParams
from limiter.model.policy.criticality import RANKS, Criticality
from loadtest.overload.studies import PACE, TARGET_S
from loadtest.simulation.queue import SERVICE_S, Second, Simulation, p90_s, refused_share

PLUS, CRITICAL, _, SHEDDABLE = Criticality
CAPACITY = 1 / SERVICE_S
SEEDS = range(3)


def params(**more: object) -> ResponseTimeParams:
    return ResponseTime.model_validate({**PACE, **more}).params(RANKS)


def spike(control: ResponseTimeParams | None, seed: int) -> list[Second]:
    simulation = Simulation(control, [CRITICAL], seed=seed)
    simulation.run(5, users=3)
    return simulation.run(60, users=1000)


@pytest.mark.parametrize("seed", SEEDS)
def test_s6_with_control_p90_settles_near_the_target_and_without_it_grows(seed: int) -> None:
    assert p90_s(spike(params(), seed)[20:]) <= 2 * TARGET_S
    assert p90_s(spike(None, seed)[20:]) > 10 * TARGET_S


@pytest.mark.parametrize("seed", SEEDS)
def test_s2_once_the_queue_is_gone_the_worker_is_soon_busy_again(seed: int) -> None:
    seconds = spike(params(), seed)
    gone = next(at for at, second in enumerate(seconds) if at > 3 and second.waiting < 5)
    after = seconds[gone + 3 :]
    assert sum(second.served for second in after) > 0.9 * CAPACITY * len(after)
    assert min(second.served for second in after) > 0.5 * CAPACITY


@pytest.mark.parametrize("seed", SEEDS)
def test_s3_of_two_classes_of_equal_load_the_high_one_is_refused_clearly_less(seed: int) -> None:
    def shares(**more: object) -> tuple[float, float]:
        late = Simulation(params(**more), [CRITICAL, SHEDDABLE], seed=seed).run(60, users=250)[20:]
        return refused_share(late, CRITICAL), refused_share(late, SHEDDABLE)

    high, low = shares()
    assert low - high > 0.3
    high, low = shares(classes=False)
    assert high == pytest.approx(low, abs=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_s3_a_few_requests_of_a_higher_class_do_not_keep_the_others_low(seed: int) -> None:
    late = Simulation(params(), [PLUS, *[CRITICAL] * 30], seed=seed).run(60, users=250)[20:]
    assert sum(second.served for second in late) > 0.8 * CAPACITY * len(late)
    assert refused_share(late, PLUS) == 0
    assert refused_share(late, CRITICAL) > 0.5


def test_a_load_that_can_be_served_is_left_alone() -> None:
    seconds = Simulation(params(), [CRITICAL], seed=1).run(30, users=60)
    assert refused_share(seconds, CRITICAL) == 0


def test_one_seed_one_result() -> None:
    assert spike(params(), 9) == spike(params(), 9)
