"""One bucket's step in a cycle of the controller: sample → averages → cap, charge and mechanism.

    step(state, record) → state, and the values to write into the record

begin     the first reading, or one of a record that began again: from here on; where the work of requests is known, by
          the bucket's past or by the policy's other keys, the cap starts from it (R15)
anchor    a reading that cannot be compared: continue from here, hold everything (F-P8)
wait      less than the policy's cycle has passed, or there is nothing to learn from yet: hold, and let the sample grow
steer     move the cap (R2–R6), the charge (W8) and the mechanism (R10)
lend      an auto bucket counts requests for LENT_CYCLES' worth of work at the committed rate, renewed when half of it
          is done: costs that jump, or a controller that is gone, leave it counting work
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from msgspec import field
from msgspec.structs import replace

from limiter.model.bucket.bucket import Flags
from limiter.model.control import (
    caps,
    costs,
    learning,
    learning_apart,
    mechanism,
    published_caps,
    sampling,
    smoothing,
)
from limiter.model.control.caps import MOVE_MIN, CapParams, CapState, Reason, cap_params
from limiter.model.control.learning import Learning, LearningParams, learning_params
from limiter.model.control.learning_apart import Apart, Charges
from limiter.model.control.mechanism import AutoParams, Pace, Signs, auto_params
from limiter.model.control.policy_memory import PolicyMemory
from limiter.model.control.sampling import STALE_S, Counters, Sample, Seen
from limiter.model.control.smoothing import REJECTION_RATE_MIN, Load, Moments
from limiter.model.control.value import Value
from limiter.model.policy.choices import Mechanism
from limiter.model.policy.fields.kinds import seconds
from limiter.model.policy.policy import Policy

CYCLE_S = 0.1
WAIT_CYCLES_MAX = 10.0
LENT_CYCLES = 10.0
LENT_REQUESTS = 4.0
"""Least number of requests lent where one request costs more than the bucket's capacity."""
STALE_REQUESTS = 10.0
"""A reading stays usable while fewer requests than these fit into the time since then."""


NOTHING_KNOWN = PolicyMemory()
NO_CHARGES: Charges = ()
NONE_APART: dict[int, Apart] = {}
"""Shared by all buckets without `learn_by`, and never changed."""


class ControlParams(NamedTuple):
    """The controller's parameters from a policy, in addition to the terms in the records."""

    cap: CapParams | None = None
    """None if requests are never counted: by mechanism `work`, and by a quota, which has no rate to steer."""
    auto: AutoParams | None = None
    """None unless the mechanism is `auto`."""
    learning: LearningParams | None = None
    cycle_s: float = 0.0
    """The policy's own cycle, where it is longer than the controller's (R14)."""

    @property
    def is_empty(self) -> bool:
        """True if nothing is steered or learned: limits of work whose charge is fixed."""
        return self.cap is None and self.learning is None and self.auto is None

    @property
    def is_auto(self) -> bool:
        """True if the mechanism is `auto`, chosen while running."""
        return self.auto is not None


class State(Value, frozen=True):
    """The controller's state of one bucket."""

    counters: Counters | None = None
    """Counters at the start of the current sample."""
    is_waiting: bool = False
    """True once the current sample has been extended by a cycle."""
    caps: CapState = CapState()
    load: Load | None = None
    """Only for a policy with the published rules."""
    moments: Moments = Moments()
    minute: Moments = Moments()
    """Moments of the last minute, for an auto bucket; `moments` cover the last requests."""
    pace: Pace = Pace()
    learning: Learning = Learning()
    apart: dict[int, Apart] = field(default_factory=dict)
    """Learned charges by id of the values of `learn_by`, if the policy has any (W15)."""


class Moved(Value, frozen=True):
    """Values to write into a record; None leaves a value unchanged."""

    cap: float | None = None
    charge: float | None = None
    requests_for: float | None = None
    """Work to be settled until an auto bucket stops counting requests; 0 = count work at once."""
    reason: Reason | None = None
    charges: Charges = ()
    """Charges learned by the values of `learn_by`."""


class _Turn(NamedTuple):
    """Inputs of one step."""

    record: Seen
    params: ControlParams
    cap_params: CapParams
    now_us: float
    cycle_s: float


def control_params(policy: Policy) -> ControlParams:
    """Resolve a policy's parameters for the controller."""
    counts_work = policy.quota is not None or policy.mechanism is Mechanism.WORK
    cap = None if counts_work else cap_params(policy)
    auto = auto_params(policy) if policy.mechanism is Mechanism.AUTO and policy.rate is not None else None
    cycle_s = 0.0 if policy.steering.cycle is None else seconds(policy.steering.cycle)
    return ControlParams(cap, auto, learning_params(policy), cycle_s)


def step(
    state: State,
    record: Seen | None,
    params: ControlParams,
    *,
    now_us: float,
    since_us: float,
    cycle_s: float = CYCLE_S,
    memory: PolicyMemory = NOTHING_KNOWN,
) -> tuple[State, Moved]:
    """Run one bucket's cycle. `since_us` is the previous cycle: a bucket that is not waiting rested until then.

    `memory` holds values learned from the policy's other buckets. Where nothing is steered, no counters are kept.
    """
    if params.is_empty:
        return state if state.counters is None else replace(state, counters=None, is_waiting=False), HELD
    counters = sampling.read(record, now_us)
    if record is None or counters is None:
        return state, HELD
    cap = params.cap if 0 < record.committed < inf else None
    then = state.counters
    if then is None or sampling.has_begun_again(then, counters):
        return _begun(state, counters, record, params, cap, memory)
    idle_s = (since_us - then.read_us) / 1e6 if then.read_us < since_us < now_us and not state.is_waiting else 0.0
    stale_s = STALE_S if cap is None else max(STALE_S, STALE_REQUESTS / record.rate)
    sample = sampling.difference(then, counters, idle_s=idle_s, stale_s=stale_s)
    if sample is None:
        return _anchored(state, counters), HELD
    if params.cycle_s > cycle_s:
        cycle_s = params.cycle_s
        if sample.elapsed_s < cycle_s * 0.95:  # cycles vary in length
            return replace(state, is_waiting=True), HELD
    if cap is None or cap.is_published:
        if not sample.is_telling and sample.elapsed_s < WAIT_CYCLES_MAX * cycle_s:
            return replace(state, is_waiting=True), HELD
        if cap is None:
            return _learned(state, counters, sample, record, params)
    if params.auto is None and not cap.is_published:
        return _capped(state, counters, sample, record, params, cap, now_us, cycle_s)
    return _steered(state, counters, sample, _Turn(record, params, cap, now_us, cycle_s))


def _begun(
    state: State, counters: Counters, record: Seen, params: ControlParams, cap: CapParams | None, memory: PolicyMemory
) -> tuple[State, Moved]:
    """Begin a bucket that is new, or new to this controller."""
    charge, charges = _taught(state, record, params, memory)
    state, moved = _begun_cap(replace(_anchored(state, counters), apart=NONE_APART), counters, record, cap, memory.work)
    return state, replace(moved, charge=charge, charges=charges) if charge or charges else moved


def _taught(state: State, record: Seen, params: ControlParams, memory: PolicyMemory) -> tuple[float | None, Charges]:
    """Return the first charges for a record without any: the bucket's own if remembered, otherwise the policy's."""
    if params.learning is None:
        return None, ()
    charge = None
    if not record.charge > 0:
        own = learning.target(state.moments, params.learning)
        charge = min(own or memory.charge, params.learning.charge_max) or None
    if Flags.LEARNS not in record.flags:
        return charge, ()
    present = {entry.id for entry in record.learned if entry.charge > 0}
    taught = {id_: learned for id_, (_, learned) in memory.charges.items()}
    taught |= {id_: learning.target(apart.moments, params.learning) for id_, apart in state.apart.items()}
    return charge, tuple((id_, learned) for id_, learned in taught.items() if learned > 0 and id_ not in present)


def _begun_cap(
    state: State, counters: Counters, record: Seen, cap: CapParams | None, policy_work: float
) -> tuple[State, Moved]:
    """Set the first cap from the known work of requests."""
    if cap is None:
        return state, HELD
    known = state.caps
    if not known.cost.is_known:
        has_settled = record.settles > 0 and record.work_settled > 0
        own = record.work_settled / record.settles if has_settled else 0.0
        if own > 0 and not _is_first_cap(record, cap):
            # The record's totals give a first guess, and the cap stays as the last controller left it.
            return replace(state, caps=replace(known, cost=costs.guessed(own))), HELD
        if not (policy_work > 0 or own > 0):
            return state, HELD
        known = replace(known, cost=costs.guessed(policy_work or own))
    if not record.counts_requests or cap.is_published:
        return replace(state, caps=known), HELD
    started = caps.start(known, cap, committed=record.committed, margin=cap.safety)
    reason = _reason(started, record, counters.read_us, "start", 0.0)
    return replace(state, caps=started), Moved(started.cap, reason=reason)


def _is_first_cap(record: Seen, cap: CapParams) -> bool:
    """True if no controller has moved the cap yet."""
    return abs(record.rate - cap.first * record.committed) <= 1e-9 * record.rate


def _learned(
    state: State, counters: Counters, sample: Sample, record: Seen, params: ControlParams
) -> tuple[State, Moved]:
    """Step a bucket without a cap: only its charge moves."""
    if params.learning is None:
        return replace(state, counters=counters, is_waiting=False), HELD
    moments = smoothing.gather(state.moments, sample)
    charge, learned = learning.step(record.charge, state.learning, moments, sample, params.learning)
    apart, charges = _learned_apart(state, record, sample, params)
    moved = HELD if charge == record.charge and not charges else Moved(None, charge, charges=charges)
    return State(counters, False, state.caps, state.load, moments, state.minute, state.pace, learned, apart), moved


def _learned_apart(
    state: State, record: Seen, sample: Sample, params: ControlParams
) -> tuple[dict[int, Apart], Charges]:
    if params.learning is None or not record.learned:
        return state.apart, ()
    return learning_apart.step(state.apart, record.learned, params.learning, elapsed_s=sample.elapsed_s)


def _capped(
    state: State,
    counters: Counters,
    sample: Sample,
    record: Seen,
    params: ControlParams,
    cap: CapParams,
    now_us: float,
    cycle_s: float,
) -> tuple[State, Moved]:
    """Step a bucket that always counts requests: the most common case, so it creates as few values as possible."""
    charge, moments, learned, apart, charges = None, state.moments, state.learning, state.apart, NO_CHARGES
    if params.learning is not None:
        moments = smoothing.gather(moments, sample)
        charge, learned = learning.step(record.charge, learned, moments, sample, params.learning)
        if charge == record.charge:
            charge = None
        if record.learned:
            apart, charges = _learned_apart(state, record, sample, params)
    held, committed = record.rate, record.committed
    rule, work_rate, known = caps.step(state.caps, sample, cap, held=held, committed=committed, cycle_s=cycle_s)
    rejected = known.rejected if known.rejected >= REJECTION_RATE_MIN else 0.0
    reason = Reason(now_us, committed, work_rate, known.cost.work, rejected, rule, held, known.cap)
    moved = Moved(None if known.written == held else known.cap, charge, None, reason, charges)
    return State(counters, False, known, None, moments, state.minute, state.pace, learned, apart), moved


def _steered(state: State, counters: Counters, sample: Sample, turn: _Turn) -> tuple[State, Moved]:
    """Step a bucket of mechanism `auto`, or one with the published rules."""
    params, record = turn.params, turn.record
    charge, moments, minute, pace, learned = None, state.moments, state.minute, state.pace, state.learning
    if params.learning is not None or params.auto is not None:
        moments = smoothing.gather(moments, sample)
    if params.learning is not None:
        charge, learned = learning.step(record.charge, learned, moments, sample, params.learning)
        charge = None if charge == record.charge else charge
    load = state.load
    if turn.cap_params.is_published:
        load = _followed(load or Load(), sample, turn)
    if params.auto is None or record.counts_requests:
        known, moved = _moved_cap(state.caps, load, sample, turn, charge)
    else:
        known, moved = caps.follow(state.caps, sample, turn.cap_params, cycle_s=turn.cycle_s), Moved(None, charge)
    if params.auto is not None:
        minute = mechanism.gather_minute(minute, sample)
        pace = _paced(pace, sample, turn)
        signs = Signs(pace, moments, minute, known.cost, params.auto.capacity_s * record.committed)
        known, pace, moved = _chosen(known, signs, sample, turn, moved)
    apart, charges = _learned_apart(state, record, sample, params)
    if charges:
        moved = replace(moved, charges=charges)
    return State(counters, False, known, load, moments, minute, pace, learned, apart), moved


def _moved_cap(
    known: CapState, load: Load | None, sample: Sample, turn: _Turn, charge: float | None
) -> tuple[CapState, Moved]:
    """Step the cap of a bucket that counts requests."""
    record, params = turn.record, turn.cap_params
    if load is None:
        rule, work_rate, known = caps.step(
            known, sample, params, held=record.rate, committed=record.committed, cycle_s=turn.cycle_s
        )
        reason = _reason(known, record, turn.now_us, rule, work_rate)
        return known, Moved(None if known.written == record.rate else known.cap, charge, None, reason)
    known = caps.follow(known, sample, params, cycle_s=turn.cycle_s)
    rule, cap = published_caps.step(record.rate, load, params, committed=record.committed)
    rejected = load.rejection_rate if load.is_rejecting else 0.0
    work_rate, work = load.work_rate or 0.0, load.work_per_request or 0.0
    reason = Reason(turn.now_us, record.committed, work_rate, work, rejected, rule, record.rate, cap)
    return known, Moved(None if abs(cap - record.rate) <= MOVE_MIN * cap else cap, charge, None, reason)


def _chosen(known: CapState, signs: Signs, sample: Sample, turn: _Turn, moved: Moved) -> tuple[CapState, Pace, Moved]:
    """Choose the unit that an auto bucket counts from now on, and its first values."""
    record, params = turn.record, turn.params
    assert params.auto is not None
    counted = record.counts_requests
    was_counted = counted or mechanism.is_suited(signs.pace, params.auto)  # until its lent requests ended
    counts, pace = mechanism.step(signs, params.auto, counts_requests=counted, elapsed_s=sample.elapsed_s)
    if counts and not counted and known.cost.is_known:
        known = caps.start(known, turn.cap_params, committed=record.committed, margin=1.0)
        moved = Moved(known.cap, moved.charge, None, _reason(known, record, turn.now_us, "start", known.work_rate))
    elif not counts:
        charge = _begun_charge(moved.charge or record.charge, sample, params) if was_counted else moved.charge
        moved = Moved(None, charge, 0.0 if counted else None)
    if not counts:
        return known, pace, moved
    lent = record.committed * LENT_CYCLES * turn.cycle_s
    if signs.stays_large:
        lent = max(lent, LENT_REQUESTS * signs.cost.work, 1.5 * signs.cost.largest)
    if counted and record.requests_until - record.work_settled >= lent / 2:
        return known, pace, moved
    return known, pace, replace(moved, requests_for=lent)


def _anchored(state: State, counters: Counters) -> State:
    return replace(state, counters=counters, is_waiting=False, caps=caps.forgotten(state.caps))


def _followed(load: Load, sample: Sample, turn: _Turn) -> Load:
    alphas = turn.cap_params.smoothing
    if sample.idle_s > 0:
        load = smoothing.rest(load, alphas, cycles=sample.idle_s / turn.cycle_s)
    return smoothing.follow(load, sample, alphas, cycles=sample.elapsed_s / turn.cycle_s)


def _paced(pace: Pace, sample: Sample, turn: _Turn) -> Pace:
    if sample.idle_s > 0:
        pace = mechanism.rest(pace, cycles=sample.idle_s / turn.cycle_s)
    return mechanism.follow(pace, sample, cycles=sample.elapsed_s / turn.cycle_s)


def _begun_charge(charge: float, sample: Sample, params: ControlParams) -> float | None:
    """Return the first charge of a bucket that counted requests: the new cost if costs have just jumped."""
    if params.learning is None or not sample.settles > 0:
        return charge or None
    return min(max(charge, sample.work / sample.settles), params.learning.charge_max)


def _reason(known: CapState, record: Seen, now_us: float, rule: caps.Rule, work_rate: float) -> Reason:
    rejected = known.rejected if known.is_rejecting else 0.0
    return Reason(now_us, record.committed, work_rate, known.cost.work, rejected, rule, record.rate, known.cap)


HELD = Moved()
