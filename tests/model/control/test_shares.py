"""Shares of a divided limit: they follow demand, and never sum to more than one, whatever gets lost (B5)."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limiter.model.control.shares import (
    FLOOR,
    LOWERED_FOR_S,
    MARGIN_S,
    RAISED_FOR_S,
    Held,
    Write,
    at,
    confirmed,
    follow,
    is_due,
    is_needed,
    lowers,
    plan,
    raises,
    target,
    unconfirmed,
    weight,
)

ONE = 1 + 1e-12  # n times 1/n may be that in floating point


def equal(count: int) -> list[Held]:
    return [Held(1 / count, math.inf)] * count


def divided(demand: list[float]) -> list[float]:
    """The shares after one round in which everything arrived."""
    held = equal(len(demand))
    lowered, raised = plan(held, demand, 0.0)
    return at(confirmed(confirmed(held, lowered, 0.0), raised, 0.0), 0.0)


def test_r9_ten_partitions_without_demand_hold_a_tenth_each() -> None:
    """R9: 100 over ten → 10 each."""
    assert [100 * share for share in divided([0.0] * 10)] == pytest.approx([10.0] * 10)


def test_r9_ten_partitions_of_equal_demand_hold_a_tenth_each() -> None:
    assert divided([7.0] * 10) == pytest.approx([0.1] * 10)


def test_b5_shares_follow_demand() -> None:
    assert divided([30.0, 10.0]) == pytest.approx([0.9 * 0.75 + 0.05, 0.9 * 0.25 + 0.05])


def test_b5_everybody_keeps_a_floor() -> None:
    assert divided([100.0, 0.0, 0.0, 0.0])[1:] == pytest.approx([FLOOR / 4] * 3)


def test_b5_small_differences_are_left_alone() -> None:
    assert plan(equal(4), [1.02, 1.0, 1.0, 0.98], 0.0) == ([], [])


def test_b5_what_is_lowered_comes_first() -> None:
    lowered, raised = plan(equal(2), [30.0, 10.0], 0.0)
    assert [write.partition for write in lowered] == [1]
    assert [write.partition for write in raised] == [0]


def test_b5_what_is_above_an_equal_share_ends_before_what_is_below() -> None:
    lowered, raised = plan(equal(2), [30.0, 10.0], 0.0)
    assert (lowered[0].for_s, raised[0].for_s) == (LOWERED_FOR_S, RAISED_FOR_S)
    assert MARGIN_S > 0


def test_b5_nothing_is_raised_before_the_lowering_is_confirmed() -> None:
    held = equal(2)
    lowered, _ = plan(held, [30.0, 10.0], 0.0)
    wanted = target(at(held, 0.0), [30.0, 10.0])
    assert raises(unconfirmed(held, lowered, 0.0), wanted, 0.0) == []


def test_b5_what_was_lowered_in_part_makes_room_for_a_part() -> None:
    held = equal(4)
    wanted = target(at(held, 0.0), [100.0, 0.0, 0.0, 0.0])
    lowered = lowers(held, wanted, 0.0)
    (raised,) = raises(confirmed(held, lowered[:1], 0.0), wanted, 0.0)
    assert raised.partition == 0
    assert raised.share == pytest.approx(0.25 + 0.25 * (1 - FLOOR))


def test_b5_shares_are_renewed_lower_ones_first() -> None:
    demand = [30.0, 10.0]
    held = equal(2)
    for now_s in (0.0, 3.0):
        lowered, raised = plan(held, demand, now_s)
        assert ([write.partition for write in lowered], [write.partition for write in raised]) == ([1], [0])
        held = confirmed(confirmed(held, lowered, now_s), raised, now_s)
    assert [lent.until_s for lent in held] == [3.0 + RAISED_FOR_S, 3.0 + LOWERED_FOR_S]


def test_b5_a_dead_controller_leaves_equal_shares() -> None:
    held = equal(2)
    lowered, raised = plan(held, [30.0, 10.0], 0.0)
    held = confirmed(confirmed(held, lowered, 0.0), raised, 0.0)
    assert at(held, RAISED_FOR_S)[0] == 0.5
    assert at(held, RAISED_FOR_S)[1] < 0.5, "still lowered, while the other may not have ended"
    assert at(held, LOWERED_FOR_S) == [0.5, 0.5]


@pytest.mark.parametrize("demand", [[math.nan, 1.0], [math.inf, 1.0], [-1.0, 5.0], [1e308, 1e308, 1e308]])
def test_f_p8_demand_that_is_no_number_moves_nothing(demand: list[float]) -> None:
    shares = [1 / len(demand)] * len(demand)
    assert target(shares, demand) == shares


def test_demand_is_smoothed_and_nonsense_is_overlooked() -> None:
    assert follow(None, 10.0) == 10.0
    assert follow(10.0, 20.0) == pytest.approx(11.0)
    for nonsense in (math.nan, math.inf, -1.0):
        assert follow(10.0, nonsense) == 10.0
        assert follow(None, nonsense) == 0.0


demands = st.integers(1, 12).flatmap(lambda count: st.lists(st.floats(0, 1e9), min_size=count, max_size=count))


@settings(deadline=None)
@given(demands)
def test_b5_a_target_gives_away_all_of_the_limit_and_no_more(demand: list[float]) -> None:
    wanted = target([0.0] * len(demand), demand)
    assert 1 - 1e-6 < math.fsum(wanted) <= 1
    assert min(wanted) >= FLOOR / len(demand) * (1 - 1e-6)


@settings(deadline=None)
@given(demands, st.randoms(use_true_random=False))
def test_b5_a_plan_never_sums_above_one_however_much_of_it_is_written(demand: list[float], draw: Random) -> None:
    """In whatever order within lowering and within raising."""
    held = equal(len(demand))
    shuffled = [draw.random() * 100 for _ in demand]
    for wanted in (shuffled, demand):
        lowered, raised = plan(held, wanted, 0.0)
        draw.shuffle(lowered)
        draw.shuffle(raised)
        for writes in (lowered, raised):
            for write in writes:
                held = confirmed(held, [write], 0.0)
                assert math.fsum(at(held, 0.0)) <= ONE


class Partitions:
    """What partitions really hold: writes may be lost, arrive late, or arrive without an answer."""

    def __init__(self, count: int) -> None:
        self.held = equal(count)

    def write(self, write: Write, now_s: float) -> None:
        self.held = confirmed(self.held, [write], now_s)

    def sum_at(self, now_s: float) -> float:
        return math.fsum(at(self.held, now_s))

    def most_from(self, now_s: float) -> float:
        """The largest sum from now on, if nothing more is written."""
        ends = [lent.until_s for lent in self.held if now_s < lent.until_s < math.inf]
        return max(self.sum_at(moment) for moment in [now_s, *ends])


@settings(deadline=None)
@given(
    count=st.integers(1, 8),
    rounds=st.integers(1, 12),
    lost=st.sampled_from([0.0, 0.1, 0.5]),
    draw=st.randoms(use_true_random=False),
)
def test_b5_shares_never_sum_above_one_whatever_is_lost_late_or_unanswered(
    count: int, rounds: int, lost: float, draw: Random
) -> None:
    """A controller that sends, and partitions of which each write may get lost on the way there or back."""
    partitions, held, now_s = Partitions(count), equal(count), 0.0
    for _ in range(rounds):
        demand = [draw.choice([0.0, draw.random() * 100]) for _ in range(count)]
        wanted = target(at(held, now_s), demand)
        for writes_of in (lowers, raises):
            writes, sent_s = writes_of(held, wanted, now_s), now_s
            draw.shuffle(writes)
            answered = []
            for write in writes:
                now_s += draw.random() * 0.1
                arrives, answers = draw.random() >= lost, draw.random() >= lost
                if arrives:
                    partitions.write(write, now_s)
                    assert partitions.most_from(now_s) <= ONE
                if arrives and answers:
                    answered.append(write)
            # Below an equal share the earliest end counts (from sending), above it the latest (from the answer).
            held = unconfirmed(held, [write for write in writes if write not in answered], now_s)
            for write in answered:
                held = confirmed(held, [write], sent_s if write.share < 1 / count else now_s)
        assert all(
            real <= known + 1e-12 for real, known in zip(at(partitions.held, now_s), at(held, now_s), strict=True)
        )
        now_s += draw.choice([0.0, 1.0, 3.0, 12.0, 20.0]) * draw.random()
        assert partitions.sum_at(now_s) <= ONE


def test_little_demand_needs_no_more_than_an_equal_share() -> None:
    assert not is_needed([0.0, 20.0], committed=100.0)
    assert is_needed([0.0, 30.0], committed=100.0)


@pytest.mark.parametrize("cycles", [1, 10, 100])
def test_a_demand_that_begins_with_none_is_known_by_its_weight(cycles: int) -> None:
    demand = 0.0
    for _ in range(cycles):
        demand = follow(demand, 50.0)
    assert demand / weight(cycles) == pytest.approx(50.0)


@pytest.mark.parametrize("demand", [[0.0, math.nan], [math.nan, 0.0], [math.nan, math.nan], [90.0, math.nan]])
def test_f_p8_shares_stay_where_the_demand_is_not_known(demand: list[float]) -> None:
    held = [Held(0.8, 10.0), Held(0.2, 15.0)]
    assert is_needed(demand, committed=100.0), "what is lent is lent anew"
    assert target(at(held, 4.0), demand) == [0.8, 0.2]


def test_shares_are_lent_anew_before_they_end() -> None:
    held = [Held(0.8, 10.0), Held(0.2, 15.0)]
    wanted = [0.8, 0.2]
    assert not is_due(held, wanted, now_s=4.0)
    assert is_due(held, wanted, now_s=6.0)
    assert is_due(held, [0.7, 0.3], now_s=4.0), "they are to move"
    assert not is_due([Held(0.5, 0.0), Held(0.5, 0.0)], [0.5, 0.5], now_s=4.0), "nothing was lent"
