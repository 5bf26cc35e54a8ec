"""One bucket's cycle: from its record to what is written back, and when it is left alone."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from limiter.model.bucket.bucket import Flags, Record, fresh
from limiter.model.control.cycle_step import HELD, WAIT_CYCLES_MAX, ControlParams, Moved, State, control_params, step
from limiter.model.control.kept_state import pack, unpack
from limiter.model.control.policy_memory import PolicyMemory
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy

CYCLE_US = 100_000


def policy(**fields: object) -> ControlParams:
    return control_params(read_policy({"name": "p", "rate": 100, **fields}))


REQUESTS = policy(mechanism="requests")
PUBLISHED = policy(mechanism="requests", steering={"rules": "published"})
WORK = policy(mechanism="work")
AUTO = policy(mechanism="auto", charge="learned")
LEARNED = policy(charge="learned")


def bucket(*, counts_requests: bool = False, rate: float = 100.0) -> Record:
    record = fresh(Limit(read_policy({"name": "p", "rate": 100})).params(0), 0)
    return replace(record, flags=Flags.COUNTS_REQUESTS if counts_requests else Flags.NONE, rate=rate)


def lent(work: float) -> Record:
    return replace(bucket(counts_requests=True), requests_until=work)


class Watched:
    """A bucket, and a controller that looks at it every cycle and writes what it decided."""

    def __init__(self, record: Record, params: ControlParams) -> None:
        self.record, self.params, self.state, self.now_us = record, params, State(), 0
        self.cycle()

    def cycle(self, *, requests: float = 0, refused: float = 0, works: tuple[float, ...] = ()) -> Moved:
        record = self.record
        record.requests += requests
        record.refused += refused
        record.admitted += requests - refused
        record.work_settled += sum(works)
        record.work_squared += sum(work * work for work in works)
        record.settles += len(works)
        self.now_us += CYCLE_US
        self.state, moved = step(self.state, record, self.params, now_us=self.now_us, since_us=self.now_us - CYCLE_US)
        record.rate = record.rate if moved.cap is None else moved.cap
        record.charge = record.charge if moved.charge is None else moved.charge
        return moved


def test_the_first_reading_is_only_where_to_begin() -> None:
    state, moved = step(State(), bucket(), REQUESTS, now_us=1, since_us=0)
    assert moved == HELD
    assert state.counters is not None


def test_r2_a_cap_is_steered_from_what_the_record_holds() -> None:
    watched = Watched(bucket(counts_requests=True, rate=90.0), REQUESTS)
    watched.cycle(requests=3, works=(4.0,) * 3)
    watched.cycle(requests=20, refused=10, works=(4.0,) * 10)
    moved = watched.cycle(requests=20, refused=10, works=(4.0,) * 10)
    assert moved.reason is not None
    assert (moved.reason.rule, moved.reason.committed) == ("lower", 100.0)
    assert moved.cap is not None
    assert moved.cap < moved.reason.before
    assert moved.requests_for is None, "the policy says how it counts"


def test_s10_the_published_rules_go_by_the_work_that_is_settled() -> None:
    watched = Watched(bucket(counts_requests=True, rate=30.0), PUBLISHED)
    moved = watched.cycle(requests=20, refused=10, works=(4.0,) * 10)
    assert moved.reason is not None
    assert (moved.reason.rule, moved.reason.before, moved.reason.committed) == ("lower", 30.0, 100.0)
    assert moved.cap == pytest.approx(15.0)
    assert watched.cycle(requests=20, refused=10).cap is None, "nothing was settled, so it waits"


def test_r15_a_bucket_that_is_new_starts_from_what_the_policys_other_keys_cost() -> None:
    record = bucket(counts_requests=True, rate=30.0)
    state, moved = step(State(), record, REQUESTS, now_us=1, since_us=0, memory=PolicyMemory(work=50.0))
    assert moved.cap == pytest.approx(1.2 * 100 / 50)
    assert moved.reason is not None
    assert moved.reason.rule == "start"
    assert state.caps.cost.work == 50.0


def test_r15_a_bucket_that_was_idle_for_so_long_that_its_record_is_gone_starts_from_what_it_knew() -> None:
    watched = Watched(bucket(counts_requests=True, rate=30.0), REQUESTS)
    for _ in range(40):
        watched.cycle(requests=4, refused=2, works=(5.0,) * 2)
    kept = unpack(pack(watched.state, []))
    assert kept is not None
    fresh_one = bucket(counts_requests=True, rate=30.0)
    fresh_one.requests = fresh_one.admitted = 1.0
    state, moved = step(kept.state, fresh_one, REQUESTS, now_us=1e12, since_us=1e12 - CYCLE_US)
    assert moved.cap == pytest.approx(24.0, rel=0.05)
    assert state.caps.cost.work == pytest.approx(5.0)


def test_r15_a_controller_that_takes_over_without_a_past_holds_the_cap_and_guesses_from_the_record() -> None:
    record = replace(bucket(counts_requests=True, rate=7.0), settles=100.0, work_settled=900.0, requests=120.0)
    state, moved = step(State(), record, REQUESTS, now_us=1, since_us=0, memory=PolicyMemory(work=50.0))
    assert moved == HELD
    assert (state.caps.cost.work, state.caps.cost.requests) == (9.0, 1.0)


def test_r14_a_policy_may_have_a_longer_cycle_than_the_controller() -> None:
    watched = Watched(bucket(counts_requests=True, rate=30.0), policy(mechanism="requests", steering={"cycle": "1s"}))
    reasons = [watched.cycle(requests=4, refused=2, works=(5.0,) * 2).reason for _ in range(40)]
    assert sum(reason is not None for reason in reasons) == 4
    last = [reason for reason in reasons if reason][-1]
    assert last.work_rate == pytest.approx(100.0, rel=0.2)


def test_a_bucket_that_counts_work_has_no_cap_to_steer() -> None:
    assert Watched(bucket(), WORK).cycle(requests=10, works=(4.0,) * 10) == HELD


def test_w8_a_charge_is_learned_by_whatever_mechanism() -> None:
    watched = Watched(bucket(), LEARNED)
    for _ in range(30):
        watched.cycle(requests=10, works=(4.0,) * 10)
    assert watched.record.charge == pytest.approx(4.0)


def test_a_quota_has_no_cap_but_may_learn() -> None:
    params = control_params(read_policy({"name": "q", "quota": {"work": 9, "period": "day"}, "charge": "learned"}))
    assert params.cap is None
    assert params.learning is not None


def test_r10_auto_begins_to_count_requests_with_the_cap_that_fits() -> None:
    watched = Watched(bucket(), AUTO)
    for _ in range(100):
        moved = watched.cycle(requests=10, works=(2.0,) * 10)
        if moved.requests_for:
            break
    assert moved.cap == pytest.approx(50.0)
    assert moved.reason is not None
    assert moved.reason.sentence == "100 units/s ÷ 2 units/request → 50 rps"
    assert moved.requests_for == 100, "for ten cycles' work, a second's"


def test_r10_requests_are_lent_anew_when_half_of_their_work_is_done() -> None:
    watched = Watched(lent(100.0), AUTO)
    for _ in range(5):
        assert watched.cycle(requests=10, works=(1.0,) * 10).requests_for is None
    assert watched.cycle(requests=10, works=(1.0,) * 10).requests_for == 100


def test_r10_what_it_was_lent_having_ended_it_counts_requests_again_at_the_next_look() -> None:
    """The controller was away for a while, and nothing has changed."""
    watched = Watched(bucket(), AUTO)
    while not watched.cycle(requests=10, works=(1.0,) * 10).requests_for:
        pass
    assert not watched.record.counts_requests, "by now"
    moved = watched.cycle(requests=10, works=(1.0,) * 10)
    assert (moved.requests_for, moved.cap) == (100, 100)


def test_r10_costs_that_jumped_while_it_counted_requests_are_charged_though_it_counts_work_by_now() -> None:
    watched = Watched(bucket(), AUTO)
    while not watched.cycle(requests=10, works=(1.0,) * 10).requests_for:
        pass
    moved = watched.cycle(requests=10, works=(50.0,) * 10)
    assert moved.requests_for is None
    assert moved.charge is not None
    assert moved.charge > 30


def test_r10_auto_goes_back_to_work_in_the_cycle_in_which_costs_jump() -> None:
    watched = Watched(lent(1e9), AUTO)
    for _ in range(50):
        assert watched.cycle(requests=10, works=(1.0,) * 10).requests_for is None
    moved = watched.cycle(requests=10, works=(50.0,) * 10)
    assert moved.requests_for == 0
    assert moved.charge is not None
    assert moved.charge > 30, "it begins with what requests cost now, not with what they did"


def test_r8_a_flood_that_rejects_nothing_is_set_a_cap_and_then_lowered() -> None:
    watched = Watched(bucket(counts_requests=True, rate=400.0), REQUESTS)
    for _ in range(20):
        watched.cycle(requests=2, works=(1.0,) * 2)
    reasons = [watched.cycle(requests=20, works=(1.0,) * 20).reason for _ in range(9)]
    rules = [reason.rule for reason in reasons if reason is not None]
    assert rules[-1] == "lower"
    assert watched.record.rate < 120


def test_a_state_survives_being_stored() -> None:
    """F-P7: a new owner goes on where the old one stopped."""
    watched = Watched(bucket(counts_requests=True), AUTO)
    for state in (State(), watched.state):
        assert msgpack.decode(msgpack.encode(state), type=State) == state
    watched.cycle(requests=10, refused=2, works=(3.0,) * 8)
    assert msgpack.decode(msgpack.encode(watched.state), type=State) == watched.state


def test_a_slow_bucket_is_sampled_as_long_as_it_takes() -> None:
    """Two requests of 50 units a second: 100 units/s, not 500 in one cycle and none in four."""
    watched = Watched(bucket(counts_requests=True, rate=2.0), REQUESTS)
    caps = []
    for cycle in range(300):
        watched.cycle(requests=1, refused=0 if cycle % 5 == 4 else 1, works=(50.0,) if cycle % 5 == 4 else ())
        caps.append(watched.record.rate)
    assert watched.state.caps.work_rate == pytest.approx(100.0, rel=0.2)
    assert max(caps[100:]) < 1.05 * min(caps[100:]), "and the cap does not follow that noise"


def test_s10_with_the_published_rules_waiting_ends() -> None:
    watched = Watched(bucket(counts_requests=True, rate=0.2), PUBLISHED)
    watched.cycle(requests=1, works=(1.0,))
    for _ in range(int(WAIT_CYCLES_MAX) - 1):
        assert watched.cycle(requests=5, refused=5) == HELD
    assert watched.cycle(requests=5, refused=5).cap == pytest.approx(0.4)


def test_r5_a_bucket_that_nobody_asks_keeps_its_cap() -> None:
    watched = Watched(bucket(counts_requests=True, rate=20.0), REQUESTS)
    watched.cycle(requests=20, refused=5, works=(1.0,) * 15)
    for _ in range(10):
        watched.cycle()
    before = watched.record.rate
    for _ in range(100):
        watched.cycle()
    assert watched.record.rate == before


def test_a_burst_after_a_rest_is_not_taken_for_the_average_of_the_rest() -> None:
    """A bucket is read only in cycles in which it was touched: the time before is known to have been idle."""
    watched = Watched(bucket(counts_requests=True, rate=20.0), REQUESTS)
    watched.cycle(requests=10, works=(1.0,) * 10)
    watched.now_us += 30_000_000
    moved = watched.cycle(requests=100, works=(1.0,) * 100)
    assert moved.reason is not None
    assert moved.reason.work_rate == pytest.approx(0.3 * 1000)


@pytest.mark.parametrize("field", ["requests", "work_settled", "settles", "work_squared"])
def test_f_p8_a_record_that_is_no_number_holds_everything(field: str) -> None:
    watched = Watched(bucket(counts_requests=True), AUTO)
    watched.cycle(requests=10, works=(1.0,) * 10)
    broken = replace(watched.record, **{field: math.nan})  # type: ignore[arg-type]
    assert step(watched.state, broken, AUTO, now_us=1e9, since_us=0) == (watched.state, HELD)


def test_f_p8_a_record_that_is_absent_holds_everything() -> None:
    watched = Watched(bucket(counts_requests=True), AUTO)
    assert step(watched.state, None, AUTO, now_us=1e9, since_us=0) == (watched.state, HELD)


@pytest.mark.parametrize("committed", [math.nan, math.inf, 0.0, -1.0])
def test_f_p8_a_committed_rate_that_is_none_steers_nothing(committed: float) -> None:
    watched = Watched(replace(bucket(counts_requests=True), committed=committed), REQUESTS)
    assert watched.cycle(requests=10, works=(1.0,) * 10).cap is None


def test_f_p8_a_reading_too_old_is_only_where_to_begin() -> None:
    watched = Watched(bucket(counts_requests=True), REQUESTS)
    watched.cycle(requests=10, works=(1.0,) * 10)
    state = watched.state
    watched.record.work_settled += 1e9
    after, moved = step(state, watched.record, REQUESTS, now_us=watched.now_us + 1e9, since_us=watched.now_us)
    assert moved == HELD
    assert after.caps.cost == state.caps.cost
    assert after.caps.rate < 0, "how many were admitted per second a while ago says nothing of now"


counts = st.integers(0, 50)
cycles = st.lists(st.tuples(counts, counts, st.lists(st.floats(0, 1e6), max_size=20)), max_size=40)


@given(cycles, st.booleans(), st.sampled_from([REQUESTS, AUTO]))
def test_f_p8_no_history_moves_a_cap_out_of_its_bounds(
    history: list[tuple[int, int, list[float]]], counts_requests: bool, params: ControlParams
) -> None:
    watched = Watched(bucket(counts_requests=counts_requests, rate=30.0), params)
    for admitted, refused, works in history:
        moved = watched.cycle(requests=admitted + refused, refused=refused, works=tuple(works))
        if moved.cap is not None:
            assert 0 < moved.cap < math.inf
        if moved.charge is not None:
            assert 0 < moved.charge < math.inf


def test_a_bucket_with_nothing_to_steer_or_learn_keeps_no_counters() -> None:
    """After its policy was changed, too; with another policy it begins from the record again."""
    counted, fixed = policy(mechanism="requests"), policy(mechanism="work", charge=1)
    record = bucket()
    state, _ = step(State(), record, counted, now_us=1_000_000, since_us=0)
    assert state.counters is not None
    state, moved = step(state, record, fixed, now_us=1_100_000, since_us=1_000_000)
    assert state.counters is None
    assert moved is HELD
    state, _ = step(state, record, counted, now_us=1_200_000, since_us=1_100_000)
    assert state.counters is not None
