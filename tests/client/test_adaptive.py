"""Adaptive throttling against services in virtual time, with random arrivals and draws; several seeds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from limiter.client.adaptive import AdaptiveThrottle

SEEDS = [1, 2, 3]
STEP_S = 0.1
KEY = ("orders", "critical")

Change = Callable[[float], float]


def always(value: float) -> Change:
    return lambda now_s: value


HUNDRED, UNLIMITED, NOTHING = always(100.0), always(1e9), always(0.0)


@dataclass
class Seen:
    """Sums of one second, or of several."""

    asked: int = 0
    sent: int = 0
    accepted: int = 0

    @property
    def sent_share(self) -> float:
        return self.sent / max(1, self.asked)


@dataclass
class Service:
    """Refuses a share by draw, then whatever it cannot do: `capacity` a second, a bucket one second deep.

    Answers come `delay_s` later. The share that an answer tells is the one that it was drawn with.
    """

    seed: int
    demand: Change = HUNDRED
    capacity: Change = UNLIMITED
    share: Change = NOTHING
    delay_s: float = 0.0
    throttle: AdaptiveThrottle = field(default_factory=AdaptiveThrottle)

    def seconds(self, count: int) -> list[Seen]:
        """Run for so many seconds; sums of each."""
        return list(self._seconds(count))

    def _seconds(self, count: int) -> Iterator[Seen]:
        draw = Random(self.seed)
        tokens = 0.0
        answers: list[tuple[float, bool, float]] = []
        for second in range(count):
            seen = Seen()
            for step in range(round(1 / STEP_S)):
                now_s = second + step * STEP_S
                tokens = min(tokens + self.capacity(now_s) * STEP_S, self.capacity(now_s))
                while answers and answers[0][0] <= now_s:
                    _, accepted, told = answers.pop(0)
                    self.throttle.answered(KEY, now_s, accepted=accepted, refused_share=told)
                for _ in range(arrivals(draw, self.demand(now_s) * STEP_S)):
                    seen.asked += 1
                    if self.throttle.rejects(KEY, now_s, draw.random()):
                        continue
                    seen.sent += 1
                    share = self.share(now_s)
                    accepted = draw.random() >= share and tokens >= 1
                    tokens -= accepted
                    seen.accepted += accepted
                    answers.append((now_s + self.delay_s, accepted, share))
                if self.delay_s == 0:
                    while answers:
                        _, accepted, told = answers.pop(0)
                        self.throttle.answered(KEY, now_s, accepted=accepted, refused_share=told)
            yield seen


def arrivals(draw: Random, mean: float) -> int:
    """Draw a number of random arrivals (Poisson)."""
    count, left = 0, mean - draw.expovariate(1)
    while left > 0:
        count += 1
        left -= draw.expovariate(1)
    return count


def together(seconds: list[Seen]) -> Seen:
    return Seen(*(sum(getattr(one, name) for one in seconds) for name in ("asked", "sent", "accepted")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("delay_s", [0.0, 1.0])
@pytest.mark.parametrize("k", [1.5, 2.0, 3.0])
def test_g3_a_service_that_accepts_ten_of_a_hundred_is_sent_k_times_ten(k: float, delay_s: float, seed: int) -> None:
    service = Service(seed, capacity=always(10.0), delay_s=delay_s, throttle=AdaptiveThrottle(k=k))
    last = together(service.seconds(600)[240:])
    assert 100 * last.sent_share == pytest.approx(10 * k, abs=5)
    assert last.accepted / 360 == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.95, 0.99, 1.0])
def test_g3_a_service_that_refuses_by_share_is_asked_for_everything(share: float, seed: int) -> None:
    """Its tenth of full demand is served, where it refuses 90 %."""
    seconds = Service(seed, share=always(share)).seconds(600)
    assert together(seconds).sent_share > 0.999
    assert together(seconds).accepted / 60_000 == pytest.approx(1 - share, abs=0.01)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("demand", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("share", [0.9, 0.98])
def test_g3_an_unlucky_draw_rejects_nobody_where_few_ask(share: float, demand: float, seed: int) -> None:
    seconds = Service(seed, demand=always(demand), share=always(share)).seconds(3600)
    assert together(seconds).sent_share > 0.99


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_g3_of_a_share_and_a_limit_k_times_the_limit_passes_the_draw(share: float, seed: int) -> None:
    last = together(Service(seed, capacity=always(10.0), share=always(share)).seconds(600)[240:])
    assert 100 * last.sent_share * (1 - share) == pytest.approx(20, abs=5)
    assert last.accepted / 360 == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("seed", SEEDS)
def test_g3_a_share_that_comes_and_goes_rejects_nobody(seed: int) -> None:
    seconds = Service(seed, share=lambda now_s: 0.9 if 100 <= now_s % 300 < 200 else 0.0).seconds(900)
    assert together(seconds).sent_share > 0.999


@pytest.mark.parametrize("seed", SEEDS)
def test_g3_a_share_that_moves_all_the_time_rejects_nobody(seed: int) -> None:
    """As damped control moves it: up in steps, down slowly."""
    seconds = Service(seed, share=lambda now_s: 0.95 - (now_s % 60) / 60 * 0.95).seconds(900)
    assert together(seconds).sent_share > 0.999


@pytest.mark.parametrize("seed", SEEDS)
def test_g3_a_limit_beneath_a_share_is_found_again_when_the_share_ends(seed: int) -> None:
    seconds = Service(seed, capacity=always(10.0), share=lambda now_s: 0.8 if now_s < 600 else 0.0).seconds(1200)
    assert 100 * together(seconds[240:600]).sent_share * 0.2 == pytest.approx(20, abs=5)
    assert 100 * together(seconds[840:]).sent_share == pytest.approx(20, abs=5)


@pytest.mark.parametrize("seed", SEEDS)
def test_g3_demand_that_jumps_is_throttled_to_the_same(seed: int) -> None:
    demand = [15.0, 200.0, 50.0]
    seconds = Service(seed, demand=lambda now_s: demand[int(now_s // 400)], capacity=always(10.0)).seconds(1200)
    calm, crowd, less = (together(seconds[begin : begin + 200]) for begin in (200, 600, 1000))
    assert calm.sent_share > 0.99, "two thirds are accepted"
    assert crowd.sent / 200 == pytest.approx(20, abs=5)
    assert less.sent / 200 == pytest.approx(20, abs=5)


@pytest.mark.parametrize("seed", SEEDS)
def test_g3_a_service_that_recovers_is_asked_for_everything_again(seed: int) -> None:
    seconds = Service(seed, capacity=lambda now_s: 0.0 if now_s < 300 else 1e9).seconds(800)
    assert 0.04 < together(seconds[200:300]).sent_share < 0.06, "p_max leaves a twentieth"
    minutes = [together(seconds[begin : begin + 60]).sent_share for begin in range(300, 720, 60)]
    assert all(later > earlier - 0.02 for earlier, later in pairwise(minutes))
    assert together(seconds[700:]).sent_share > 0.99


def test_g3_a_measured_share_that_is_passed_as_drawn_would_hide_the_limit() -> None:
    """A caller of `answered` must know the difference: the share of a limit on what is in flight is not a draw."""
    measured = Service(1, capacity=always(10.0))
    assert 100 * together(measured.seconds(600)[240:]).sent_share == pytest.approx(20, abs=5)
    throttle = AdaptiveThrottle()
    for number in range(6000):
        throttle.answered(KEY, number / 100, accepted=number % 10 == 0, refused_share=0.9)
        throttle.rejects(KEY, number / 100, 1.0)
    assert throttle.probability(KEY, 60.0) == 0.0


def asked(
    throttle: AdaptiveThrottle, count: int, *, key: object = KEY, accepted: bool = False, now_s: float = 0
) -> None:
    for _ in range(count):
        throttle.rejects(key, now_s, 1.0)
        throttle.answered(key, now_s, accepted=accepted)


def test_g3_the_probability_is_the_published_one() -> None:
    throttle = AdaptiveThrottle()
    asked(throttle, 10, accepted=True)
    asked(throttle, 90)
    assert throttle.probability(KEY, 1.0) == pytest.approx((100 - 2 * 10) / 101)
    assert throttle.rejects(KEY, 1.0, 0.79) is True
    assert throttle.rejects(KEY, 1.0, 0.81) is False


def test_g3_a_local_rejection_counts_as_a_request_and_not_as_an_accept() -> None:
    throttle = AdaptiveThrottle()
    asked(throttle, 10, accepted=True)
    asked(throttle, 20)
    before = throttle.probability(KEY, 0.0)
    assert before == pytest.approx(10 / 31)
    for _ in range(10):
        assert throttle.rejects(KEY, 0.0, 0.0)
    assert throttle.probability(KEY, 0.0) == pytest.approx(20 / 41)


def test_g3_a_lucky_draw_counts_no_more_accepts_than_there_were_answers() -> None:
    throttle = AdaptiveThrottle()
    asked(throttle, 99)
    assert sum(throttle.rejects(KEY, 0.0, 0.0) for _ in range(900)) == 900
    assert not throttle.rejects(KEY, 0.0, 0.99)
    throttle.answered(KEY, 0.0, accepted=True, refused_share=0.999)
    assert throttle.probability(KEY, 0.0) == pytest.approx((1000 - 2 * 100) / 1001)


def test_g3_few_requests_reject_nothing_and_p_max_lets_some_through() -> None:
    throttle = AdaptiveThrottle(requests_min=20, p_max=0.9)
    asked(throttle, 19)
    assert throttle.probability(KEY, 0.0) == 0.0
    asked(throttle, 1)
    assert throttle.probability(KEY, 0.0) == 0.9


def test_g3_a_burst_that_waits_for_its_first_answers_is_not_rejected() -> None:
    throttle = AdaptiveThrottle()
    assert not any(throttle.rejects(KEY, 0.0, 0.0) for _ in range(500))
    assert throttle.probability(KEY, 9.9) == 0.0
    assert throttle.probability(KEY, 10.1) == 0.95, "nobody has answered for a long time"


def test_g3_what_is_older_than_two_minutes_is_forgotten() -> None:
    throttle = AdaptiveThrottle()
    asked(throttle, 100)
    assert throttle.probability(KEY, 114.9) == 0.95
    assert throttle.probability(KEY, 120.0) == 0.0


def test_g3_time_that_goes_back_moves_nothing() -> None:
    throttle = AdaptiveThrottle()
    asked(throttle, 100, now_s=100.0)
    assert throttle.probability(KEY, 3.0) == 0.95


def test_g3_classes_and_targets_are_throttled_apart() -> None:
    throttle = AdaptiveThrottle()
    asked(throttle, 100, key=("orders", "sheddable"))
    asked(throttle, 100, key=("orders", "critical"), accepted=True)
    assert throttle.probability(("orders", "sheddable"), 0.0) == 0.95
    assert throttle.probability(("orders", "critical"), 0.0) == 0.0
    assert throttle.probability(("stock", "sheddable"), 0.0) == 0.0


def test_the_key_that_was_not_used_for_longest_is_forgotten_first() -> None:
    throttle = AdaptiveThrottle(keys_max=2)
    asked(throttle, 100, key="a")
    asked(throttle, 100, key="b")
    throttle.rejects("a", 0.0, 1.0)
    asked(throttle, 1, key="c")
    assert len(throttle) == 2
    assert throttle.probability("a", 0.0) == 0.95
    assert throttle.probability("b", 0.0) == 0.0


def test_a_throttle_with_senseless_numbers_is_refused() -> None:
    for wrong in ({"k": 0.5}, {"p_max": 1.0}, {"window_s": 0.0}, {"keys_max": 0}):
        with pytest.raises(ValueError, match="must be"):
            AdaptiveThrottle(**wrong)


def test_what_waits_never_counts_where_every_request_is_answered_in_the_end() -> None:
    patient, other = (AdaptiveThrottle(window_s=10.0, is_always_answered=known) for known in (True, False))
    for throttle in (patient, other):
        for number in range(100):
            assert not throttle.rejects("k", 1.0 + number / 1000, 0.99)
    assert patient.probability("k", 4.0) == 0.0
    assert other.probability("k", 4.0) > 0.0, "nobody knows whether they will be answered"
    for _ in range(100):
        patient.answered("k", 4.0, accepted=False)
    assert patient.probability("k", 4.0) > 0.9
