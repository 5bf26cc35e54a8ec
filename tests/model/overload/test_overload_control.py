"""The three controllers of one bucket as one step: what they ask for together, and when they run."""

import math
from typing import Any

import pytest

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, Flags, Params, Record, fresh, histogram_step
from limiter.model.overload import expectations, response_time
from limiter.model.overload.overload_block import Overload
from limiter.model.overload.overload_control import (
    OverloadParams,
    OverloadState,
    Reason,
    overload_params,
    pack_state,
    step,
    unpack_state,
)
from limiter.model.overload.shedding import CLASS_NUMBERS, ShedOrder, obey
from limiter.model.overload.signals import Report, add
from limiter.model.policy.criticality import Criticality

CYCLE_US = 100_000
START_US = 1_790_000_000_000_000
CRITICAL, SHEDDABLE = Criticality.CRITICAL, Criticality.SHEDDABLE


class World:
    """One bucket with its controllers, in virtual time."""

    def __init__(self, **block: Any) -> None:
        self.params: OverloadParams = overload_params(Overload.model_validate(block))
        terms = Params(flags=Flags.OVERLOAD | Flags.HISTOGRAM, committed=1.0, capacity=1.0, debt_max=1.0)
        self.record: Record = fresh(terms, START_US)
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
            obey(self.known, order, rate_max=2.0**53)
        return order

    def cycles(self, count: int) -> None:
        for _ in range(count):
            self.cycle()

    @property
    def known(self) -> Any:
        assert self.record.shedding is not None
        return self.record.shedding

    def serve(self, count: int, *, latency_ms: float, expected_ms: float = 100.0, of: Criticality = CRITICAL) -> None:
        number, known = CLASS_NUMBERS[of], self.known
        self.record.admitted += count
        known.timed[number] += count
        known.missed[number] += count * (latency_ms > expected_ms)
        known.slack_min_ms = min(known.slack_min_ms, expected_ms - latency_ms)
        self.record.histogram[number * HISTOGRAM_STEPS + histogram_step(latency_ms)] += count

    def report(self, load: float, source: bytes = b"host-1") -> None:
        self.reports = add(self.reports, Report(source, self.now_us, {"cpu": load}))


def test_q_a_second_of_misses_raises_the_throttle_and_refuses_by_rank() -> None:
    world = World(expectations={"step_up": 10})
    for _ in range(10):
        world.serve(5, latency_ms=500)
        world.cycle()
    assert world.known.refused_shares == pytest.approx([0.0, 0.1, 0.2, 0.4])
    assert world.known.overloaded == 1
    assert [type(reason) for reason in world.reasons] == [expectations.Reason]
    assert "100 % missed" in str(world.reasons[0])


def test_q6_another_block_takes_effect_at_the_next_step() -> None:
    world = World(expectations={})
    for _ in range(10):
        world.serve(5, latency_ms=500)
        world.cycle()
    assert world.known.refused_shares[3] > 0
    ranks = {"critical_plus": 0, "critical": 0, "sheddable_plus": 0, "sheddable": 10}
    world.params = overload_params(Overload.model_validate({"expectations": {}, "ranks": ranks}))
    world.cycles(10)
    assert world.known.refused_shares == pytest.approx([0.0, 0.0, 0.0, 1.0])
    world.params = overload_params(Overload.model_validate({"utilisation": {}}))
    world.cycles(20)
    assert world.known.refused_shares == [0.0] * 4, "what is not asked for any more is taken back"
    assert world.known.overloaded == 0


def test_q5_the_least_slack_counts_once() -> None:
    """One bad answer tightens the throttle once, although its slack can be read in two epochs."""
    world = World(expectations={"mode": "ideal", "expected_latency_ms": 100, "ideal_band_ms": [5, 20], "ideal_step": 1})
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


def test_q5_the_small_step_goes_by_the_classes_that_are_refused_in_part() -> None:
    """At M = 30 the low class is refused wholly and says nothing; of the middle one 4 % of the admitted may move."""
    world = World(expectations={"mode": "ideal", "expected_latency_ms": 100, "initial": 30, "step_up": 50})
    world.serve(30, latency_ms=97)
    world.known.refused[:] = [0.0, 0.0, 300.0, 10_000.0]
    world.cycles(10)
    assert [reason.after for reason in world.reasons] == [pytest.approx(30 + 0.04 * 30 * 30 / 300)]


def test_s1_a_class_runs_after_enough_samples_and_is_cut_by_its_own_times() -> None:
    world = World(response_time={"target_ms": 100, "nreq": 100})
    world.serve(99, latency_ms=500, of=SHEDDABLE)
    assert world.cycle() is None
    world.serve(1, latency_ms=500, of=SHEDDABLE)
    assert world.cycle() is not None
    assert world.known.rates == pytest.approx([0.0, 0.0, 0.0, 100 / 0.2 / 1.2]), "from what was served in 0.2 s"
    assert world.known.overloaded == 1
    (reason,) = world.reasons
    assert isinstance(reason, response_time.Reason)
    assert (reason.criticality, reason.rule) == (SHEDDABLE, "cut")


def test_s1_or_after_a_second() -> None:
    world = World(response_time={"target_ms": 100})
    world.serve(3, latency_ms=500)
    world.cycles(9)
    assert world.known.rates == [0.0] * 4
    world.cycle()
    assert world.known.rates[1] == pytest.approx(3 / 1.2)


def test_s3_a_class_above_its_target_has_the_lower_ones_yield() -> None:
    world = World(response_time={"target_ms": 100})
    for _ in range(11):
        world.serve(10, latency_ms=500, of=CRITICAL)
        world.serve(10, latency_ms=50, of=SHEDDABLE)
        world.cycle()
    assert world.known.rates[1] == 5000
    assert world.known.rates[3] <= 500


def test_s4_quality_falls_before_anybody_is_refused() -> None:
    world = World(response_time={"target_ms": 100, "degrade": True, "quality_decrease": 0.25})
    qualities = []
    for _ in range(5):
        world.serve(100, latency_ms=500)
        world.cycle()
        qualities.append((world.known.quality, world.known.rates[1]))
    assert qualities == [(0.75, 5000), (0.5, 5000), (0.25, 5000), (0.0, 5000), (0.0, pytest.approx(1000 / 1.2))]


def test_g5_reports_above_the_target_refuse_the_least_critical_first() -> None:
    world = World(utilisation={"target": "50%"})
    for _ in range(20):
        world.report(1.0)
        world.cycle()
    shares = world.known.refused_shares
    assert shares[3] > 0
    assert shares[:3] == [0.0, 0.0, 0.0]
    assert world.known.overloaded == 1
    assert str(world.reasons[0]).startswith("cpu 1 (target 0.5)")


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
    world = World(expectations={"step_up": 1, "step_down": 0.5}, utilisation={"target": "50%"})
    for _ in range(10):
        world.serve(5, latency_ms=500)
        world.report(4.0)
        world.cycle()
    by_expectations, by_utilisation = 0.01, world.known.refused_shares[3]
    assert by_utilisation > 0.04
    assert world.known.refused_shares[1] == pytest.approx(by_expectations), "utilisation spares this class so far"


def test_a_cycle_in_which_nothing_is_due_changes_nothing() -> None:
    world = World(expectations={}, response_time={}, utilisation={})
    world.serve(5, latency_ms=50)
    world.cycle()
    before = world.state
    assert world.cycle() is None
    assert world.state is before


def test_a_bucket_comes_to_rest_and_what_comes_then_is_judged_by_itself() -> None:
    world = World(expectations={"window_s": 2, "calm_intervals": 0}, response_time={"target_ms": 100})
    for _ in range(10):
        world.serve(5, latency_ms=500)
        world.cycle()
    assert not world.is_resting
    world.cycles(200)
    assert world.is_resting
    assert world.known.refused_shares == [0.0] * 4, "throttles are released while nobody asks"
    world.now_us += 3_600_000_000
    for _ in range(12):
        world.serve(5, latency_ms=500)
        world.cycle()
    assert world.known.refused_shares[3] > 0, "an hour of rest does not dilute a second of misses"


def test_f_p8_a_bucket_that_began_anew_counts_from_zero() -> None:
    world = World(response_time={"target_ms": 100, "nreq": 10})
    world.serve(50, latency_ms=50)
    world.cycle()
    world.record = World(response_time={}).record
    world.serve(20, latency_ms=500)
    world.cycles(10)
    assert world.reasons[-1].rule in ("cut", "hold")
    assert world.known.timed[1] == 20


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_f_p8_counters_that_are_no_numbers_hold_everything(broken: float) -> None:
    world = World(expectations={}, response_time={}, utilisation={})
    world.serve(500, latency_ms=5000)
    world.known.timed[0] = broken
    before = world.state
    assert world.cycle() is None
    world.cycles(10)
    assert world.state.expectations == before.expectations


def test_f_p8_no_record_or_one_without_overload_control_holds() -> None:
    world = World(expectations={})
    state = world.state
    assert step(state, None, (), world.params, now_us=world.now_us) == (state, None, ())
    world.record.shedding = None
    assert step(state, world.record, (), world.params, now_us=world.now_us) == (state, None, ())


def test_f_t2_a_clock_that_went_back_begins_a_new_sample() -> None:
    world = World(expectations={})
    world.serve(50, latency_ms=5000)
    world.now_us -= 3_600_000_000
    world.cycle()
    world.serve(5, latency_ms=5000)
    world.cycles(10)
    assert world.known.refused_shares[3] > 0


def test_f_p7_a_new_owner_goes_on_where_the_old_one_stopped() -> None:
    world = World(expectations={}, response_time={"target_ms": 100, "degrade": True}, utilisation={"target": "50%"})
    for _ in range(30):
        world.serve(20, latency_ms=500)
        world.report(2.0)
        world.cycle()
    raw = pack_state(world.state)
    assert len(raw) < 2000
    again = unpack_state(raw)
    old = world.state
    assert (again.expectations, again.utilisation) == (old.expectations, old.utilisation)
    assert old.response_time is not None
    assert again.response_time is not None
    assert again.response_time.quality == old.response_time.quality
    before = list(world.known.refused_shares)
    world.state = again
    world.cycle()
    assert world.known.refused_shares == before
    world.serve(100, latency_ms=500)
    world.cycles(10)
    assert world.known.refused_shares[1] > before[1]


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x90", b"noise"])
def test_a_state_that_cannot_be_read_is_forgotten(raw: bytes) -> None:
    assert unpack_state(raw) == OverloadState()


def test_a_bucket_at_rest_is_woken_by_refusals_alone() -> None:
    """Its rate was left at the floor, so nobody will be let in, and nothing settled will tell of anybody."""
    world = World(response_time={"target_ms": 100, "rate_initial": 0.05})
    world.serve(1, latency_ms=80)
    world.cycles(40)
    assert world.is_resting
    assert world.known.rates[1] == 0.05
    world.known.refused[1] += 1
    world.cycle()
    assert not world.is_resting
    for _ in range(60):
        world.known.refused[1] += 1
        world.cycle()
    assert world.known.rates[1] == 1.0
