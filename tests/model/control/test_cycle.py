"""One bucket's cycle: from its record to what is written back, and when it is left alone."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from limiter.model.bucket.bucket import Flags, Record, fresh
from limiter.model.control.cycle import HELD, WAIT_CYCLES_MAX, ControlParams, Moved, State, control_params, step
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy

CYCLE_US = 100_000


def policy(**fields: object) -> ControlParams:
    return control_params(read_policy({"name": "p", "rate": 100, **fields}))


REQUESTS = policy(mechanism="requests")
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
    watched = Watched(bucket(counts_requests=True, rate=30.0), REQUESTS)
    moved = watched.cycle(requests=20, refused=10, works=(4.0,) * 10)
    assert moved.reason is not None
    assert (moved.reason.rule, moved.reason.before, moved.reason.committed) == ("lower", 30.0, 100.0)
    assert moved.cap == pytest.approx(30 - 300 / 4 / 3 if 300 / 4 / 3 < 15 else 15)
    assert moved.requests_for is None, "the policy says how it counts"


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
    watched = Watched(bucket(counts_requests=True, rate=100.0), REQUESTS)
    rules = [watched.cycle(requests=2, works=(50.0,) * 2).reason for _ in range(3)]
    assert [reason and reason.rule for reason in rules] == ["set", "lower", "lower"]


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
    for cycle in range(50):
        watched.cycle(requests=1, refused=0 if cycle % 5 == 4 else 1, works=(50.0,) if cycle % 5 == 4 else ())
    assert watched.state.load.work_rate == pytest.approx(100.0)
    assert watched.record.rate == pytest.approx(2.0)


def test_waiting_ends() -> None:
    watched = Watched(bucket(counts_requests=True, rate=0.2), REQUESTS)
    watched.cycle(requests=1, works=(1.0,))
    for _ in range(int(WAIT_CYCLES_MAX) - 1):
        assert watched.cycle(requests=5, refused=5) == HELD
    assert watched.cycle(requests=5, refused=5).cap == pytest.approx(0.4)


def test_r5_a_bucket_that_nobody_asks_keeps_its_cap() -> None:
    watched = Watched(bucket(counts_requests=True, rate=20.0), REQUESTS)
    watched.cycle(requests=20, refused=5, works=(1.0,) * 15)
    before = watched.record.rate
    for _ in range(100):
        watched.cycle()
    assert watched.record.rate == before


def test_a_burst_after_a_rest_is_not_taken_for_the_average_of_the_rest() -> None:
    """A bucket is read only in cycles in which it was touched: the time before is known to have been idle."""
    watched = Watched(bucket(counts_requests=True, rate=20.0), REQUESTS)
    watched.cycle(requests=10, works=(1.0,) * 10)
    watched.now_us += 30_000_000
    watched.cycle(requests=100, works=(1.0,) * 100)
    assert watched.state.load.work_rate == pytest.approx(0.3 * 1000)


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
    assert after.load == state.load


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
            assert 0.1 <= moved.cap <= 100.0
        if moved.charge is not None:
            assert 0 < moved.charge < math.inf
