"""The cap of a request bucket: each rule with the sources' own figures, and what no input can make it do."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.model.bucket.bucket import RATE_MAX, fresh
from limiter.model.control.caps import (
    BLIND_MAX_S,
    MOVE_MIN,
    ROOM,
    STEP_MAX,
    CapParams,
    CapState,
    Reason,
    Rule,
    bounded,
    cap_params,
    known,
    start,
    step,
)
from limiter.model.control.costs import Cost
from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import Smoothing
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy

PARAMS = CapParams()
REJECTING = 0.2
CYCLE_S = 0.1


def sample(
    *, admitted: float = 0.0, refused: float = 0.0, works: tuple[float, ...] = (), elapsed_s: float = 0.1,
    idle_s: float = 0.0, is_reported: bool = True,
) -> Sample:  # fmt: skip
    squares = math.fsum(work * work for work in works)
    return Sample(
        elapsed_s, admitted + refused, admitted, refused, math.fsum(works), len(works), squares, is_reported, idle_s
    )


def at(cap: float, *, rate: float, work: float, rejected: float = 0.0) -> CapState:
    """A state that has seen so many admitted per second for so long that another cycle alike moves no average."""
    return CapState(cap, cap, rate, rejected, 0.0, Cost(work, 200.0, 0.1, smallest=work / 1e6, largest=work))


def moved(state: CapState, params: CapParams = PARAMS, *, committed: float) -> tuple[Rule, float]:
    """One more cycle like those before."""
    admitted, share = state.rate * CYCLE_S, state.rejected
    more = sample(admitted=admitted, refused=admitted * share / (1 - share))
    rule, _, after = step(state, more, params, held=state.cap, committed=committed, cycle_s=CYCLE_S)
    return rule, after.cap


def test_r2_forty_units_too_many_at_four_a_request_lower_the_cap_by_3_33() -> None:
    """R2: X = 40, f = 4, n = 3 → −3.33 rps"""
    rule, cap = moved(at(35.0, rate=35.0, work=4.0, rejected=REJECTING), committed=100)
    assert rule == "lower"
    assert cap - 35 == pytest.approx(-3.33, abs=0.004)


def test_r3_raising_is_slower_than_lowering() -> None:
    """R3: Y/f/m, m = 4"""
    rule, cap = moved(at(30.0, rate=15.0, work=4.0, rejected=REJECTING), committed=100)
    assert rule == "raise"
    assert cap - 30 == pytest.approx(40 / 4 / 4)


@pytest.mark.parametrize("before", [61.0, 500.0, 5000.0])
def test_r4_sets_a_fifth_more_than_what_is_done_whatever_the_cap_was(before: float) -> None:
    """R4: s·L/f, s = 1.2: L = 2500, f = 50 → 60 rps"""
    rule, cap = moved(at(before, rate=50.0, work=50.0), committed=1000)
    assert rule == "set"
    assert cap == pytest.approx(60.0)


def test_r4_never_raises_a_cap() -> None:
    """R4: one that is already below s·L/f is lowered by R2 instead, so it never stands still above the limit (R8)."""
    rule, cap = moved(at(55.0, rate=50.0, work=50.0), committed=1000)
    assert rule == "lower"
    assert cap == pytest.approx(55 - 1500 / 50 / 3)


def test_r5_nothing_is_raised_without_rejections() -> None:
    assert moved(at(50.0, rate=2.0, work=4.0), committed=100) == ("hold", 50.0)
    assert moved(at(50.0, rate=2.0, work=4.0, rejected=0.0009), committed=100) == ("hold", 50.0)


def test_r12_the_work_being_admitted_counts_whether_or_not_anybody_has_settled() -> None:
    """R12: L = admitted per second · f. Requests of 10 s look as those of 10 ms do."""
    state = at(100.0, rate=100.0, work=10.0, rejected=REJECTING)
    asked = sample(admitted=10, refused=10)
    rule, work_rate, after = step(state, asked, PARAMS, held=100.0, committed=100.0, cycle_s=CYCLE_S)
    assert rule == "lower"
    assert work_rate == pytest.approx(1000.0)
    assert after.cap == pytest.approx(100 - 900 / 10 / 3 if 900 / 10 / 3 < 50 else 50)
    assert after.rate == pytest.approx(after.cap), "what is admitted is about to follow the cap"


def test_a_cycle_in_which_few_requests_fit_counts_as_that_part_of_one() -> None:
    """0.2 requests per second: a hundredth of the two that a cycle needs, and down no faster than up."""
    _, down = moved(at(0.2, rate=0.3, work=500.0, rejected=REJECTING), committed=100)
    _, up = moved(at(0.2, rate=0.1, work=500.0, rejected=REJECTING), committed=100)
    assert down == pytest.approx(0.2 - 50 / 500 / 4 * 0.1 * 0.3 / 2)
    assert up == pytest.approx(0.2 + 50 / 500 / 4 * 0.1 * 0.2 / 2)


def test_what_comes_after_a_rest_is_not_spread_over_the_rest() -> None:
    state = at(100.0, rate=100.0, work=1.0)
    burst = sample(admitted=100, idle_s=30.0)
    _, work_rate, _ = step(state, burst, PARAMS, held=100.0, committed=1e6, cycle_s=CYCLE_S)
    assert work_rate == pytest.approx(0.3 * 1000, rel=0.01)


def test_a_slow_bucket_is_sampled_over_as_long_as_it_needs_though_nobody_asked_meanwhile() -> None:
    """A request in five seconds: 0.2 per second, not 10 in one cycle and none in forty-nine."""
    state = at(0.2, rate=0.2, work=500.0, rejected=REJECTING)
    for _ in range(50):
        one = sample(admitted=1, elapsed_s=0.1, idle_s=4.9)
        _, _, state = step(state, one, PARAMS, held=state.written, committed=100.0, cycle_s=CYCLE_S)
    assert state.rate == pytest.approx(0.2, rel=0.05)


def test_small_moves_add_up_though_they_are_not_written() -> None:
    """A move of less than a thousandth is not worth a write, but not lost."""
    state, held = at(0.2, rate=0.18, work=500.0, rejected=REJECTING), 0.2
    for _ in range(400):
        few = sample(admitted=0.018, refused=0.1)
        _, _, after = step(state, few, PARAMS, held=held, committed=100.0, cycle_s=CYCLE_S)
        assert abs(after.cap / after.written - 1) <= MOVE_MIN * 1.001
        assert after.written in (held, after.cap)
        state, held = after, after.written
    assert held > 0.205


def test_b5_a_share_that_moved_moves_what_is_known_along() -> None:
    state = known(at(20.0, rate=10.0, work=5.0), 5.0)
    assert (state.cap, state.rate, state.written) == (5.0, 2.5, 5.0)


def test_r15_until_somebody_has_settled_the_cap_falls() -> None:
    """From 30 rps: a half after a second, a tenth after nine; nobody knows what requests cost."""
    state = CapState()
    caps = []
    for _ in range(90):
        asked = sample(admitted=1, refused=1, is_reported=False)
        rule, _, state = step(state, asked, PARAMS, held=state.written or 30.0, committed=100.0, cycle_s=CYCLE_S)
        caps.append(state.cap)
        assert rule == "blind"
    assert caps[9] == pytest.approx(15.0, rel=0.01)
    assert caps[-1] == pytest.approx(3.0, rel=0.01)
    first = sample(admitted=1, works=(500.0,))
    rule, _, state = step(state, first, PARAMS, held=state.written, committed=100.0, cycle_s=CYCLE_S)
    assert rule == "start"
    assert state.cap == pytest.approx(1.2 * 100 / 500)


def test_r15_a_declared_largest_work_needs_no_fall_below_what_it_allows() -> None:
    state, params = CapState(), CapParams(largest_work=50.0)
    for _ in range(200):
        asked = sample(admitted=1, is_reported=False)
        _, _, state = step(state, asked, params, held=state.written or 2.0, committed=100.0, cycle_s=CYCLE_S)
    assert state.cap == pytest.approx(2.0)


def test_r15_after_a_minute_without_any_settle_what_was_charged_stands_for_the_work() -> None:
    state = CapState()
    for _ in range(round(BLIND_MAX_S / CYCLE_S) + 2):
        asked = sample(admitted=1, refused=2, works=(4.0,), is_reported=False)
        _, _, state = step(state, asked, PARAMS, held=state.written or 30.0, committed=100.0, cycle_s=CYCLE_S)
    assert state.cost.work == 4.0


def test_r15_where_nothing_settles_any_more_the_cap_stays() -> None:
    state = at(20.0, rate=20.0, work=5.0, rejected=REJECTING)
    for _ in range(600):
        asked = sample(admitted=2, refused=2)
        _, _, state = step(state, asked, PARAMS, held=state.written, committed=100.0, cycle_s=CYCLE_S)
    assert state.cap == pytest.approx(20.0, rel=0.01)


def test_r13_no_floor_beats_the_limit() -> None:
    """R13: requests of 5000 units at C = 100: the floor of 0.1 would admit 500 units/s."""
    state = at(0.1, rate=0.1, work=5000.0, rejected=REJECTING)
    for _ in range(200):
        few = sample(admitted=state.cap * 10, refused=10.0, elapsed_s=10.0)
        _, _, state = step(state, few, PARAMS, held=state.written, committed=100.0, cycle_s=CYCLE_S)
    assert state.cap == pytest.approx(0.02, rel=0.05)
    assert bounded(0.0, CapParams(largest_work=5000.0), smallest=0.0, largest=0.0, committed=100.0) == 0.02
    assert bounded(0.0, PARAMS, smallest=1.0, largest=10.0, committed=100.0) == 0.1


def test_r13_the_smallest_work_bounds_a_cap_only_loosely() -> None:
    assert bounded(1e9, PARAMS, smallest=2.0, largest=2.0, committed=100.0) == ROOM * 50
    assert bounded(1e9, CapParams(smallest_work=1.0), smallest=2.0, largest=2.0, committed=100.0) == ROOM * 100
    assert bounded(1e99, PARAMS, smallest=0.0, largest=0.0, committed=100.0) == RATE_MAX


@pytest.mark.parametrize(
    ("steering", "cap"), [({"initial": "C/F"}, 2.0), ({"initial": "C"}, 100.0), ({}, 2.0), ({"initial": 7}, 7.0)]
)
def test_r6_r15_the_first_cap_is_c_over_f_or_c_or_a_share_of_c(steering: dict[str, object], cap: float) -> None:
    """R6: C/F, C, or b·C with b = 0.3. R15: where F is declared, C/F is the default."""
    document = {"name": "p", "rate": 100, "mechanism": "requests", "charge": "learned", "max_work": 50}
    policy = read_policy({**document, "steering": steering})
    assert fresh(Limit(policy).params(0), 0).rate == pytest.approx(cap)


def test_r13_the_first_cap_and_the_floor_heed_weights() -> None:
    """A request of weight 0.5 that does all of max_work takes half a token: two of them to a token are twice F."""
    weights = {"operation": {"read": 0.5, "write": 3}, "consistency": {"none": 0}}
    policy = read_policy({"name": "p", "rate": 100, "mechanism": "requests", "max_work": 50, "weights": weights})
    assert policy.largest_work == 100.0
    assert fresh(Limit(policy).params(0), 0).rate == pytest.approx(1.0)
    assert cap_params(policy).largest_work == 100.0
    only = {"match": {"operation": "write"}, "weights": {"operation": {"write": 4}}}
    heavy = read_policy({"name": "p", "rate": 100, "mechanism": "requests", "max_work": 50, **only})
    assert heavy.largest_work == 12.5, "four tokens for at most 50 units"


@pytest.mark.parametrize(("work", "cap"), [(1.0, 100.0), (50.0, 2.0)])
def test_r8_a_hundred_units_are_a_hundred_requests_of_one_or_two_of_fifty(work: float, cap: float) -> None:
    """R8: C = 100. At the right cap no rule moves it."""
    state = at(cap, rate=cap, work=work, rejected=REJECTING)
    assert start(state, PARAMS, committed=100.0, margin=1.0).cap == cap
    assert moved(state, committed=100.0)[1] == pytest.approx(cap)


def test_r9_each_partition_steers_by_its_own_share() -> None:
    """R9: 100 over ten partitions → 10 each."""
    committed = fresh(Limit(read_policy({"name": "p", "rate": 100}), partitions=10).params(0), 0).committed
    assert committed == pytest.approx(10.0)
    assert start(at(1.0, rate=1.0, work=1.0), PARAMS, committed=committed, margin=1.0).cap == pytest.approx(10.0)


def test_f_p8_a_step_at_most_halves_or_doubles() -> None:
    assert moved(at(100.0, rate=200.0, work=1e3, rejected=0.5), committed=100)[1] == pytest.approx(50.0)
    assert moved(at(40.0, rate=40.0, work=1.0, rejected=0.5), committed=1e6)[1] == pytest.approx(80.0)


counts = st.floats(0, 1e6)
samples = st.builds(
    lambda elapsed_s, admitted, refused, works, idle_s, is_reported: sample(
        elapsed_s=elapsed_s, admitted=admitted, refused=refused, works=tuple(works), idle_s=idle_s,
        is_reported=is_reported,
    ),
    st.floats(1e-3, 60), counts, counts, st.lists(st.floats(0, 1e9), max_size=5), st.floats(0, 60), st.booleans(),
)  # fmt: skip
params = st.builds(
    CapParams, st.floats(1, 10), st.floats(1, 10), st.floats(1, 3), st.floats(1e-3, 1), st.sampled_from([0.0, 1e3]),
    st.sampled_from([0.0, 0.5]), st.builds(Smoothing, *[st.floats(0.01, 1)] * 3),
)  # fmt: skip


@given(
    first=st.floats(1e-3, 1e6), history=st.lists(samples, max_size=12), params=params, committed=st.floats(1e-3, 1e9)
)
def test_r6_f_p8_no_history_moves_a_cap_out_of_its_bounds(
    first: float, history: list[Sample], params: CapParams, committed: float
) -> None:
    state, held = CapState(), first
    for one in history:
        rule, work_rate, after = step(state, one, params, held=held, committed=committed, cycle_s=CYCLE_S)
        assert 0 < after.cap <= RATE_MAX
        assert after.written in (held, after.cap)
        assert math.isfinite(work_rate)
        assert 0 <= after.rejected <= 1
        if rule in ("lower", "raise"):
            least = min(params.floor, committed / max(after.cost.largest, params.largest_work))
            before = known(state, held).cap
            most = ROOM * committed / (after.cost.smallest or 1)
            assert (
                after.cap in (pytest.approx(least), pytest.approx(most))
                or (before / STEP_MAX * (1 - 1e-9) <= after.cap <= before * STEP_MAX * (1 + 1e-9))
                or params.smallest_work
            )
        state, held = after, after.written


def test_a_policy_says_how_to_steer() -> None:
    """R14: tuning is per policy."""
    smoothing = {"work_per_request": 0.5, "work_rate": 0.2, "rejection": 0.9}
    steering = {"lower_cycles": 5, "raise_cycles": 6, "safety": 1.5, "floor": 0.2, "smoothing": smoothing}
    policy = {"name": "p", "rate": 1, "mechanism": "auto", "steering": steering, "min_work": 3}
    assert cap_params(read_policy(policy)) == CapParams(5, 6, 1.5, 0.2, 0.0, 3, Smoothing(0.5, 0.2, 0.9))
    assert cap_params(read_policy({"name": "p", "rate": 1})) == CapParams()
    published = {"name": "p", "rate": 1, "mechanism": "requests", "steering": {"rules": "published"}}
    assert cap_params(read_policy(published)).is_published


@pytest.mark.parametrize(
    ("fields", "floor", "first"),
    [
        ({"rate": 100}, 0.1, 30.0),
        ({"rate": 0.2}, 0.06, 0.06),
        ({"rate": "6/m"}, 0.03, 0.03),
        ({"rate": 100, "per": ["customer"], "rates": {"customer": {"slow": 0.2}}}, 0.06, 30.0),
        ({"rate": 1, "steering": {"floor": 0.5}}, 0.5, 0.5),
        ({"rate": 100, "steering": {"initial": 0.1}}, 0.1, 0.1),
    ],
)
def test_the_defaults_of_the_floor_and_of_the_first_cap_agree(
    fields: dict[str, Any], floor: float, first: float
) -> None:
    """R6: a cap that starts below the lowest there is would be lifted by the first cycle."""
    policy = read_policy({"name": "p", "mechanism": "requests", **fields})
    assert cap_params(policy).floor == pytest.approx(floor)
    assert Limit(policy).terms.cap == pytest.approx(first)


SPREAD = "140 ÷ 12.4 units/request, over some cycles"


@pytest.mark.parametrize(
    ("rule", "before", "after", "work_rate", "sentence"),
    [
        ("start", 0, 80.645, 0, "1000 units/s ÷ 12.4 units/request → 80.6 rps"),
        ("lower", 90, 86.2, 1140, f"1140 units/s, 140 above the rate: {SPREAD}: 90 → 86.2 rps"),
        ("raise", 70, 72.8, 860, f"860 units/s, 140 below the rate: {SPREAD}: 70 → 72.8 rps"),
        ("set", 500, 242, 2500, "2500 units/s ÷ 12.4 units/request, plus a margin: 500 → 242 rps"),
        ("hold", 80, 80, 500, "500 of 1000 units/s, 12.4 units/request: stays at 80 rps"),
        ("blind", 30, 15, 0, "no request was settled yet, so nobody knows what they cost: 30 → 15 rps"),
    ],
)  # fmt: skip
def test_r11_each_rule_explains_itself_in_a_sentence(
    rule: Rule, before: float, after: float, work_rate: float, sentence: str
) -> None:
    assert Reason(0.0, 1000.0, work_rate, 12.4, 0.1, rule, before, after).sentence == sentence
