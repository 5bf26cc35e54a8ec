"""One bucket's part in a cycle of the controller: what happened → averages → cap, charge and mechanism.

    step(state, record) → state, and what to write into the record

anchor    the first reading, or one that cannot be compared: begin from here, hold everything (F-P8)
wait      nothing was done yet: hold, and let the sample grow, for at most WAIT_CYCLES_MAX cycles
steer     smooth the sample (R1), then move the cap (R2–R6), the charge (W8) and the mechanism (R10)
lend      an auto bucket counts requests for LENT_CYCLES' worth of work at the committed rate, renewed when half of it
          is done: costs that jump, or a controller that is gone, leave it counting work

Waiting makes the cycle as long as a slow bucket needs: with two requests a second, samples of 100 ms would read 500, 0,
0, 0, 0 units/s where one of 500 ms reads 100, and the cap would follow that noise.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from limiter.model.bucket.bucket import Record
from limiter.model.control import caps, learning, mechanism, sampling, smoothing
from limiter.model.control.caps import CapParams, Reason, cap_params
from limiter.model.control.learning import Learning, LearningParams, learning_params
from limiter.model.control.mechanism import Pace
from limiter.model.control.sampling import Counters, Sample
from limiter.model.control.smoothing import Load, Moments
from limiter.model.control.value import Value
from limiter.model.policy.choices import Mechanism
from limiter.model.policy.policy import Policy

CYCLE_S = 0.1
WAIT_CYCLES_MAX = 10.0
LENT_CYCLES = 10.0


class ControlParams(NamedTuple):
    """What a policy says to the controller, beside what its buckets' records hold."""

    cap: CapParams | None = None
    """None if requests are never counted: by mechanism `work`, and by a quota, which has no rate to steer."""
    is_auto: bool = False
    """Whether the mechanism is chosen while running."""
    learning: LearningParams | None = None


class State(Value, frozen=True):
    """What the controller remembers of a bucket."""

    counters: Counters | None = None
    """Where the sample that is being taken begins."""
    is_waiting: bool = False
    """Whether that sample has already begun to grow."""
    load: Load = Load()
    moments: Moments = Moments()
    pace: Pace = Pace()
    learning: Learning = Learning()
    was_set: bool = False
    """Whether the cap was last set, or lowered since, without any rejections."""


class Moved(Value, frozen=True):
    """What to write into a record, where it differs; None leaves it as it is."""

    cap: float | None = None
    charge: float | None = None
    requests_for: float | None = None
    """An auto bucket is to count requests until so much more work was settled; 0 = it is to count work again."""
    reason: Reason | None = None


def control_params(policy: Policy) -> ControlParams:
    """A policy's part in control, resolved."""
    counts_work = policy.quota is not None or policy.mechanism is Mechanism.WORK
    cap = None if counts_work else cap_params(policy)
    return ControlParams(cap, policy.mechanism is Mechanism.AUTO, learning_params(policy))


def step(
    state: State,
    record: Record | None,
    params: ControlParams,
    *,
    now_us: float,
    since_us: float,
    cycle_s: float = CYCLE_S,
) -> tuple[State, Moved]:
    """One bucket's cycle. `since_us` is the cycle before this: until then, a bucket not waiting has rested."""
    counters = sampling.read(record, now_us)
    if record is None or counters is None:
        return state, HELD
    if state.counters is None:
        return _anchored(state, counters), HELD
    if state.counters.read_us < since_us < now_us and not state.is_waiting:
        state = _rested(state, state.counters, since_us, cycle_s)
    assert state.counters is not None
    sample = sampling.difference(state.counters, counters)
    if sample is None:
        return _anchored(state, counters), HELD
    cycles = sample.elapsed_s / cycle_s
    if cycles < WAIT_CYCLES_MAX and not sample.is_telling:
        return replace(state, is_waiting=True), HELD
    return _steered(state, counters, sample, cycles, record, params, LENT_CYCLES * cycle_s)


def _steered(
    state: State,
    counters: Counters,
    sample: Sample,
    cycles: float,
    record: Record,
    params: ControlParams,
    lent_s: float,
) -> tuple[State, Moved]:
    """Smooth a sample that tells something, and move what it speaks for."""
    load = smoothing.follow(state.load, sample, cycles=cycles)
    charge, moments, pace, learned = None, state.moments, state.pace, state.learning
    if params.learning is not None or params.is_auto:
        moments = smoothing.gather(moments, sample)
    if params.learning is not None:
        charge, learned = learning.step(record.charge, learned, moments, sample, params.learning)
        charge = None if charge == record.charge else charge
    if params.cap is None or not 0 < record.committed < inf:
        moved = Moved(None, charge)
    elif params.is_auto:
        pace = mechanism.follow(pace, sample, cycles=cycles)
        counted = record.counts_requests
        was_counted = counted or pace.is_suited  # in the second case, until what it was lent ended
        counts, pace = mechanism.step(pace, moments, counts_requests=counted, elapsed_s=sample.elapsed_s)
        if counted and counts:
            moved = _moved_cap(state, load, record, params.cap, counters.read_us, charge)
        elif counts:
            moved = _begun_requests(load, moments, record, params.cap, counters.read_us, charge)
        else:
            begun = _begun_charge(charge or record.charge, load, params) if was_counted else charge
            moved = Moved(None, begun, 0.0 if counted else None)
        if counts:
            moved = _lent(moved, record, lent_s)
    else:
        moved = _moved_cap(state, load, record, params.cap, counters.read_us, charge)
    was_set = moved.reason is not None and moved.reason.rule in _UNREJECTED and not load.is_rejecting
    return State(counters, False, load, moments, pace, learned, was_set), moved


def _anchored(state: State, counters: Counters) -> State:
    return replace(state, counters=counters, is_waiting=False)


def _rested(state: State, counters: Counters, since_us: float, cycle_s: float) -> State:
    cycles = (since_us - counters.read_us) / 1e6 / cycle_s
    return replace(
        state,
        counters=replace(counters, read_us=since_us),
        load=smoothing.rest(state.load, cycles=cycles),
        pace=mechanism.rest(state.pace, cycles=cycles),
    )


def _lent(moved: Moved, record: Record, lent_s: float) -> Moved:
    """Requests are counted for some work only, at the committed rate as much as this time allows."""
    lent = record.committed * lent_s
    if record.counts_requests and record.requests_until - record.work_settled >= lent / 2:
        return moved
    return replace(moved, requests_for=lent)


def _begun_charge(charge: float, load: Load, params: ControlParams) -> float | None:
    """The first charge of a bucket that counted requests: if costs have just jumped, what they jumped to."""
    if params.learning is None or load.work_per_request is None:
        return None
    return min(max(charge, load.work_per_request), params.learning.charge_max)


def _begun_requests(
    load: Load, moments: Moments, record: Record, params: CapParams, now_us: float, charge: float | None
) -> Moved:
    """The first cap of a bucket that counted work: it goes by many requests, not only the last."""
    load = replace(load, work_per_request=moments.mean)
    cap = caps.start(load, params, committed=record.committed)
    return Moved(cap, charge, None, _reason(load, record, now_us, "start", cap))


def _moved_cap(
    state: State, load: Load, record: Record, params: CapParams, now_us: float, charge: float | None
) -> Moved:
    rule, cap = caps.step(record.rate, load, params, committed=record.committed, was_set=state.was_set)
    reason = _reason(load, record, now_us, rule, cap)
    return Moved(None if cap == record.rate else cap, charge, None, reason)


def _reason(load: Load, record: Record, now_us: float, rule: caps.Rule, cap: float) -> Reason:
    return Reason(
        now_us,
        record.committed,
        load.work_rate or 0.0,
        load.work_per_request or 0.0,
        load.rejection_rate if load.is_rejecting else 0.0,
        rule,
        record.rate,
        cap,
    )


HELD = Moved()

_UNREJECTED = ("set", "lower")
