"""The controllers of one bucket as one step: what they ask for together, when they run, and what is kept."""

import math
from typing import Any

import pytest

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, Record, fresh, histogram_step
from limiter.model.overload import expectations, published_expectations, response_time
from limiter.model.overload.overload_block import Overload
from limiter.model.overload.overload_control import LimitReason, Reason, note, step
from limiter.model.overload.overload_state import OverloadState, overload_params, pack_state, seen, unpack_state
from limiter.model.overload.shedding import CLASS_NUMBERS, Shedding, ShedOrder, State, lapse, obey
from limiter.model.overload.signals import Report, add
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy

CYCLE_US = 100_000
START_US = 1_790_000_000_000_000
PLUS, CRITICAL, _, SHEDDABLE = Criticality
SHORT = {"window_s": 1}


class World:
    """One bucket with its controllers, in virtual time."""

    def __init__(self, **block: Any) -> None:
        self.params = overload_params(Overload.model_validate(block))
        self.record: Record = record_of(block)
        self.state = OverloadState()
        self.reports: tuple[Report, ...] = ()
        self.now_us = START_US
        self.reasons: list[Reason] = []
        self.cycle()

    @property
    def is_resting(self) -> bool:
        """Whether nothing will change until somebody asks for the bucket, or reports its load."""
        return self.state.reading is not None and self.state.reading.is_resting

    def cycle(self) -> ShedOrder | None:
        since_us, self.now_us = self.now_us, self.now_us + CYCLE_US
        self.state, order, reasons = step(
            self.state, self.record, self.reports, self.params, now_us=self.now_us, since_us=since_us
        )
        self.reasons += reasons
        if order is not None:
            obey(self.known, order, rate_max=2.0**53, now_us=self.now_us)
        return order

    def cycles(self, count: int) -> None:
        for _ in range(count):
            self.cycle()

    @property
    def known(self) -> Shedding:
        assert self.record.shedding is not None
        return self.record.shedding

    def serve(self, count: int, *, latency_ms: float, expected_ms: float = 100.0, of: Criticality = CRITICAL) -> None:
        number, known = CLASS_NUMBERS[of], self.known
        self.record.admitted += count
        known.asked[number] += count
        known.timed[number] += count
        known.seconds += count * latency_ms / 1000
        known.median_ms = latency_ms
        known.late[number] += count * (latency_ms > 100)
        self.record.missed += count * (latency_ms > expected_ms)
        known.slack_min_ms = min(known.slack_min_ms, expected_ms - latency_ms)
        if self.record.histogram:
            self.record.histogram[number * HISTOGRAM_STEPS + histogram_step(latency_ms)] += count

    def refuse(self, count: int, of: Criticality = CRITICAL) -> None:
        number, known = CLASS_NUMBERS[of], self.known
        known.asked[number] += count
        known.refused[number] += count

    def hold(self, count: int) -> None:
        """So many are admitted and not settled."""
        assert self.record.slots is not None
        self.record.slots.present += count
        self.record.admitted += count
        self.known.asked[1] += count

    def report(self, load: float, source: bytes = b"host-1") -> None:
        self.reports = add(self.reports, Report(source, self.now_us, {"cpu": load}))

    def serving(self, cycles: int, count: int, **more: Any) -> None:
        for _ in range(cycles):
            self.serve(count, **more)
            self.cycle()


def record_of(block: dict[str, Any]) -> Record:
    return fresh(Limit(read_policy({"name": "p", "rate": 1, "overload": block})).terms, START_US)


PUBLISHED = {"rules": "published", "target_ms": 100}


def test_q_a_second_of_misses_raises_the_throttle_and_refuses_by_rank() -> None:
    world = World(expectations={"step_up": 10, **SHORT})
    world.serving(20, 5, latency_ms=50)
    world.serving(10, 5, latency_ms=500)
    assert world.known.refused_shares == pytest.approx([0.0, 0.1, 0.2, 0.4])
    assert world.known.state == State.OVERLOADED
    assert type(world.reasons[-1]) is expectations.Reason
    assert "100 % missed" in str(world.reasons[-1])


def test_q6_another_block_takes_effect_at_the_next_step() -> None:
    world = World(expectations=SHORT)
    world.serving(20, 5, latency_ms=50)
    world.serving(10, 5, latency_ms=500)
    assert world.known.refused_shares[3] > 0
    ranks = {"critical_plus": 0, "critical": 0, "sheddable_plus": 0, "sheddable": 10}
    world.params = overload_params(Overload.model_validate({"expectations": SHORT, "ranks": ranks}))
    world.cycles(10)
    assert world.known.refused_shares == pytest.approx([0.0, 0.0, 0.0, 1.0])
    world.params = overload_params(Overload.model_validate({"utilisation": {}}))
    world.cycles(20)
    assert world.known.refused_shares == [0.0] * 4, "what is not asked for any more is taken back"
    assert world.known.state == State.CALM


def test_s10_the_published_rules_of_expectations_are_selectable() -> None:
    world = World(expectations={"rules": "published"})
    world.serving(10, 5, latency_ms=500)
    assert world.known.refused_shares == pytest.approx([0.0, 0.1, 0.2, 0.4])
    assert type(world.reasons[0]) is published_expectations.Reason
    assert note(world.reasons[0], 0.0).controller == "expectations"


def test_q5_the_least_slack_counts_once() -> None:
    """One bad answer tightens the throttle once, although its slack can be read in two epochs."""
    band = {"ideal_band_ms": [5, 20], "ideal_step": 1, "window_s": 1}
    world = World(expectations={"rules": "published", "mode": "ideal", "expected_latency_ms": 100, **band})
    world.serve(1, latency_ms=99)
    world.cycle()
    world.known.slack_before_ms, world.known.slack_min_ms = world.known.slack_min_ms, math.inf
    world.serve(1, latency_ms=90)
    world.cycles(9)
    moved = [str(reason) for reason in world.reasons]
    assert moved == ["least slack 1 ms (band 5 to 20 ms): M 0 → 1"]
    world.serve(1, latency_ms=90)
    world.cycles(10)
    assert str(world.reasons[-1]).startswith("least slack 10 ms")


def test_s10_the_published_rules_of_response_times_are_selectable() -> None:
    world = World(response_time={**PUBLISHED, "nreq": 100})
    assert world.known.rates == [100.0] * 4, "limited from the start (S8)"
    world.serve(99, latency_ms=500, of=SHEDDABLE)
    world.cycle()
    assert world.known.rates[3] == 100
    world.serve(1, latency_ms=500, of=SHEDDABLE)
    assert world.cycle() is not None
    assert world.known.rates[3] == pytest.approx(100 / 1.2)
    assert world.known.state == State.OVERLOADED
    (reason,) = world.reasons
    assert isinstance(reason, response_time.Reason)
    assert (reason.criticality, reason.rule) == (SHEDDABLE, "cut")


def test_s1_or_after_a_second() -> None:
    world = World(response_time=PUBLISHED)
    world.serve(3, latency_ms=500)
    world.cycles(9)
    assert world.known.rates[1] == 100
    world.cycles(2)
    assert world.known.rates[1] == pytest.approx(100 / 1.2)


def test_s4_quality_falls_before_anybody_is_refused_by_the_published_rules() -> None:
    world = World(response_time={**PUBLISHED, "degrade": True, "quality_decrease": 0.25})
    qualities = []
    for _ in range(5):
        world.serve(100, latency_ms=500)
        world.cycle()
        qualities.append((world.known.quality, world.known.rates[1]))
    assert qualities == [(0.75, 100), (0.5, 100), (0.25, 100), (0.0, 100), (0.0, pytest.approx(100 / 1.2))]


def test_s9_late_answers_lower_the_limit_and_say_so() -> None:
    world = World(response_time={"target_ms": 100})
    assert world.known.limits == [20.0] * 4
    for _ in range(40):
        world.serve(10, latency_ms=300)
        world.refuse(5)
        world.cycle()
    assert world.known.limits[1] < 10
    assert world.known.state == State.OVERLOADED
    cut = next(reason for reason in world.reasons if reason.rule == "cut")
    assert isinstance(cut, LimitReason)
    assert " % later than 100 ms (allowed 10 %), mean 300 ms: limit 20.03 → 7.52 in flight" in str(cut)
    assert note(cut, 0.0).controller == "response_time"
    assert (seen(world.state).late_share or 0) > 0.8
    assert seen(world.state).target_ms == 100


def test_s8_the_states_of_a_bucket_in_the_order_they_come_and_go() -> None:
    world = World(response_time={"target_ms": 100})
    told = [State.CALM]
    for cycle in range(300):
        is_late = 50 <= cycle < 100
        world.serve(10, latency_ms=300 if is_late else 20)
        if is_late:
            world.refuse(5)
        world.cycle()
        if world.known.state != told[-1]:
            told.append(State(int(world.known.state)))
    assert told == [State.CALM, State.OVERLOADED, State.RECOVERING, State.CALM]


def test_s11_degradation_alone_is_degraded_not_overloaded() -> None:
    world = World(response_time={"target_ms": 100, "degrade": "only"})
    world.serving(60, 10, latency_ms=300)
    assert world.known.limits == [0.0] * 4
    assert world.known.quality < 1
    assert world.known.state == State.DEGRADED
    assert "quality 1 → 0.9" in " ".join(map(str, world.reasons))


def test_q8_some_in_flight_and_no_answer_is_overloaded() -> None:
    world = World(response_time={"target_ms": 100})
    world.serving(30, 10, latency_ms=20)
    world.hold(30)
    world.cycles(2)
    assert world.known.state == State.CALM
    world.cycles(2)
    assert world.known.state == State.OVERLOADED
    assert str(world.reasons[-1]).startswith("nobody is answered for twice the target of 100 ms")


def test_q13_how_long_answers_take_is_told_while_the_bucket_is_overloaded() -> None:
    world = World(response_time={"target_ms": 100})
    world.serving(30, 10, latency_ms=20)
    assert world.known.response_ms == 0
    for _ in range(40):
        world.serve(10, latency_ms=300)
        world.refuse(5)
        world.cycle()
    assert world.known.response_ms == pytest.approx(300, rel=0.1)


def test_s7_the_percentile_is_shown_where_the_policy_pays_for_it() -> None:
    paying, thrifty = (World(response_time={"percentiles": paid}) for paid in (True, False))
    for world in (paying, thrifty):
        world.serving(60, 9, latency_ms=81)
        assert len(pack_state(world.state)) < 1000
    assert seen(paying.state).percentile_ms == pytest.approx(81, rel=0.05)
    assert seen(thrifty.state).percentile_ms is None
    assert not thrifty.record.histogram


def test_g5_reports_above_the_target_refuse_the_least_critical_first() -> None:
    world = World(utilisation={"target": "50%"})
    for criticality in Criticality:
        world.serve(1, latency_ms=1, of=criticality)
    for _ in range(20):
        world.report(1.0)
        world.cycle()
    shares = world.known.refused_shares
    assert shares[3] > 0
    assert shares[:3] == [0.0, 0.0, 0.0]
    assert world.known.state == State.OVERLOADED
    assert str(world.reasons[0]).startswith("cpu 1 (target 0.5)")


def test_s8_utilisation_refuses_the_only_class_that_asks_at_once() -> None:
    world = World(utilisation={"target": "50%"})
    for _ in range(20):
        world.serve(1, latency_ms=1, of=CRITICAL)
        world.report(1.0)
        world.cycle()
    assert world.known.refused_shares[1] > 0.2
    assert world.known.refused_shares[0] == 0, "rank 0 is never refused"


def test_g5_the_load_of_several_hosts_is_their_mean_whoever_spoke_last() -> None:
    world = World(utilisation={"target": "80%"})
    world.report(1.0, b"busy")
    world.report(0.2, b"idle")
    for _ in range(30):
        world.report(0.2, b"idle")
        world.cycle()
        assert world.state.utilisation is not None
        assert world.state.utilisation.signals["cpu"].load == pytest.approx(0.6)
    assert world.known.refused_shares == [0.0] * 4


def test_the_strictest_controller_decides_the_share() -> None:
    world = World(expectations={"step_up": 1, "step_down": 0.5, **SHORT}, utilisation={"target": "50%"})
    for criticality in Criticality:
        world.serve(1, latency_ms=1, of=criticality)
    world.serving(20, 5, latency_ms=50)
    for _ in range(10):
        world.serve(5, latency_ms=500)
        world.report(4.0)
        world.cycle()
    by_expectations, by_utilisation = 0.01, world.known.refused_shares[3]
    assert by_utilisation > 0.04
    assert world.known.refused_shares[1] == pytest.approx(by_expectations), "utilisation spares this class so far"


def test_a_cycle_in_which_nothing_is_due_changes_nothing() -> None:
    world = World(expectations={}, response_time=PUBLISHED, utilisation={})
    world.serve(5, latency_ms=50)
    world.cycle()
    before = world.state
    assert world.cycle() is None
    assert world.state is before


def test_q11_throttles_outlast_intervals_that_are_longer_than_they_are_lent() -> None:
    world = World(expectations={"initial": 20, "interval_s": 50, "window_s": 50})
    world.serving(300, 1, latency_ms=1)
    assert world.known.lent_until_us > world.now_us


def test_q11_what_is_in_force_is_lent_again_about_every_three_seconds() -> None:
    world = World(expectations={"initial": 20})
    orders = []
    for _ in range(100):
        world.serve(1, latency_ms=1)
        orders.append(world.cycle() is not None)
    assert 2 <= sum(orders) <= 4
    assert world.known.lent_until_us > world.now_us
    lapse(world.known, world.now_us + 10_000_000)
    assert world.known.refused_shares == [0.0] * 4


@pytest.mark.parametrize("block", [{"expectations": {"window_s": 2, "calm_intervals": 0}}, {"response_time": {}}])
def test_a_bucket_comes_to_rest_and_what_comes_then_is_judged_by_itself(block: dict[str, Any]) -> None:
    world = World(**block)
    world.serving(20, 5, latency_ms=50)
    for _ in range(20):
        world.serve(5, latency_ms=1500)
        world.refuse(5)
        world.cycle()
    assert world.known.state == State.OVERLOADED
    assert not world.is_resting
    world.cycles(2000)
    assert world.is_resting
    assert world.known.refused_shares == [0.0] * 4, "throttles are released while nobody asks"
    assert "response_time" not in block or world.known.limits[1] >= 15, "and the limit comes back"
    world.now_us += 3_600_000_000
    for _ in range(30):
        world.serve(5, latency_ms=1500)
        world.refuse(5)
        world.cycle()
    assert world.known.state == State.OVERLOADED, "an hour of rest does not dilute a second of misses"


def test_what_is_in_flight_does_not_rest() -> None:
    """Silence is not calm (Q8)."""
    world = World(response_time={"target_ms": 100})
    world.hold(1)
    world.cycles(90)
    assert not world.is_resting
    world.cycles(300)
    assert world.is_resting, "its slot is over"


def test_f_p8_a_bucket_that_began_anew_counts_from_zero() -> None:
    world = World(response_time={"target_ms": 100})
    world.serving(30, 50, latency_ms=50)
    world.record = record_of({"response_time": {"target_ms": 100}})
    world.serve(20, latency_ms=50)
    world.cycle()
    assert world.state.limit is not None
    assert world.state.limit.served_rate > 0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_f_p8_counters_that_are_no_numbers_hold_everything(broken: float) -> None:
    world = World(expectations={}, response_time={}, utilisation={})
    world.serve(500, latency_ms=5000)
    world.known.timed[0] = broken
    before = world.state
    assert world.cycle() is None
    world.cycles(10)
    assert (world.state.expectations, world.state.limit) == (before.expectations, before.limit)


def test_f_p8_no_record_or_one_without_overload_control_holds() -> None:
    world = World(expectations={})
    state = world.state
    assert step(state, None, (), world.params, now_us=world.now_us) == (state, None, ())
    world.record.shedding = None
    assert step(state, world.record, (), world.params, now_us=world.now_us) == (state, None, ())


def test_f_t2_a_clock_that_went_back_begins_a_new_sample() -> None:
    world = World(expectations=SHORT)
    world.serving(20, 5, latency_ms=50)
    world.serve(50, latency_ms=5000)
    world.now_us -= 3_600_000_000
    world.cycle()
    world.serving(20, 5, latency_ms=5000)
    assert world.known.refused_shares[3] > 0


def test_f_p7_a_new_owner_goes_on_where_the_old_one_stopped() -> None:
    world = World(expectations=SHORT, response_time={"target_ms": 100, "degrade": True}, utilisation={"target": "50%"})
    world.serving(80, 20, latency_ms=50)
    for _ in range(40):
        world.serve(20, latency_ms=500)
        world.report(2.0)
        world.cycle()
    raw = pack_state(world.state)
    assert len(raw) < 1500
    again, old = unpack_state(raw), world.state
    assert old.limit is not None
    assert old.limit.base_s > 0, "what healthy looked like is kept"
    assert (again.utilisation, again.limit, again.quality) == (old.utilisation, old.limit, old.quality)
    assert again.expectations is not None
    assert old.expectations is not None
    assert again.expectations.throttle == old.expectations.throttle
    assert again.expectations.base_s == old.expectations.base_s
    before = list(world.known.refused_shares)
    world.state = again
    world.cycle()
    assert world.known.refused_shares == before


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x90", b"noise"])
def test_a_state_that_cannot_be_read_is_forgotten(raw: bytes) -> None:
    assert unpack_state(raw) == OverloadState()


def test_a_limit_that_hardly_moved_is_not_written() -> None:
    world = World(response_time={"target_ms": 100})
    writes = 0
    for cycle in range(200):
        world.serve(10 + cycle % 2, latency_ms=20)
        writes += world.cycle() is not None
    assert writes <= 5
