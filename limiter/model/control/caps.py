"""The cap of a request bucket, steered by the work its requests do (R2–R6, R12–R15).

    f   work per request       a mean of many, see `limiter.model.control.costs`
    a   requests per second    admitted, smoothed by R1's 0.3; when the cap moves, a moves along with it
    L   work per second        a · f: what is being admitted now. It waits for no request to be settled
    C   committed work per second

lower    L > C, rejecting        cap − (L − C) / f / lower_cycles      at most halved in a step
raise    L < C, rejecting        cap + (C − L) / f / raise_cycles      at most doubled in a step
set      L > C, not rejecting    safety · L / f                        where the cap is above that; else `lower`
hold     neither                 cap                                   never raised without rejections (R5, F-P8)
blind    nothing settled yet     first cap · BLIND_S / (BLIND_S + t)   t: since the first request was admitted (R15)
start    the first settles       at most safety · C / f                also: a bucket that begins again, or that begins
                                                                       to count requests, where f is known

A cap stays within [least of floor and C / largest work, ROOM · C / smallest work], so no bound beats the limit (R13).
A cycle in which fewer than FEW requests fit counts as that part of a cycle, in each average and each move, and there
`lower` is no faster than `raise`: few requests are mostly noise, and must not pull the cap to one side.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from limiter.model.bucket.bucket import RATE_MAX
from limiter.model.control import costs
from limiter.model.control.costs import Cost
from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import REJECTION_RATE_MIN, SMOOTHING, Smoothing
from limiter.model.control.value import Value
from limiter.model.policy.fields.kinds import rate_per_s
from limiter.model.policy.limit import first_cap
from limiter.model.policy.policy import Policy

STEP_MAX = 2.0
"""Largest factor by which a step multiplies or divides the cap (F-P8)."""
FEW = 2.0
"""Requests that a cycle needs to count in full."""
BLIND_S = 1.0
BLIND_MAX_S = 60.0
"""Default lifetime of a reservation: a request not settled by then never will be; its charge stands for its work."""
ROOM = 4.0
"""A bucket that holds one token loses its refill while idle: its cap must exceed C / f to make up for that."""
MOVE_MIN = 1e-3
"""Relative: a smaller move of the cap is not written, but the next step continues from it."""

Rule = Literal["lower", "raise", "set", "hold", "start", "blind"]


class CapParams(NamedTuple):
    """A policy's steering, resolved."""

    lower_cycles: float = 3.0
    """n of R2"""
    raise_cycles: float = 4.0
    """m of R3"""
    safety: float = 1.2
    """s of R4"""
    floor: float = 0.1
    """Requests per second."""
    largest_work: float = 0.0
    """F: the declared maximum of work per token; 0 if not declared."""
    smallest_work: float = 0.0
    """The declared minimum of work per token; 0 if not declared."""
    smoothing: Smoothing = SMOOTHING
    first: float = 0.3
    """The first cap, as a share of C; 0 if unknown."""
    is_published: bool = False
    """True if the plain published rules move the cap (`limiter.model.control.published_caps`)."""


class CapState(Value, frozen=True):
    """State of the steering of one bucket's cap."""

    cap: float = 0.0
    """The computed cap; 0 before the first step."""
    written: float = 0.0
    """The cap in the record, or about to be written there: at most MOVE_MIN from `cap`."""
    rate: float = -1.0
    """a; negative while unknown."""
    rejected: float = 0.0
    """Share of requests that are rejected."""
    blind_s: float = 0.0
    """Time during which requests were admitted and none was settled."""
    cost: Cost = Cost()

    @property
    def is_rejecting(self) -> bool:
        """True if the rejection rate is above the threshold that counts as zero (R1)."""
        return self.rejected >= REJECTION_RATE_MIN

    @property
    def work_rate(self) -> float:
        """L: work units per second."""
        return self.rate * self.cost.work if self.rate > 0 else 0.0


class Reason(Value, frozen=True):
    """Why a cap is what it is (R11)."""

    at_us: float
    committed: float
    work_rate: float
    work_per_request: float
    rejection_rate: float
    rule: Rule
    before: float
    after: float

    @property
    def sentence(self) -> str:
        """Return the reasoning in words: `1000 units/s ÷ 12.4 units/request → 80.6 rps`."""
        cost = f"÷ {self.work_per_request:.3g} units/request"
        off = f"{abs(self.work_rate - self.committed):.4g}"
        moved = f"{self.before:.3g} → {self.after:.3g} rps"
        match self.rule:
            case "lower":
                return f"{self.work_rate:.4g} units/s, {off} above the rate: {off} {cost}, over some cycles: {moved}"
            case "raise":
                return f"{self.work_rate:.4g} units/s, {off} below the rate: {off} {cost}, over some cycles: {moved}"
            case "set":
                return f"{self.work_rate:.4g} units/s {cost}, plus a margin: {moved}"
            case "start":
                return f"{self.committed:.4g} units/s {cost} → {self.after:.3g} rps"
            case "blind":
                return f"no request was settled yet, so nobody knows what they cost: {moved}"
            case "hold":
                each = f"{self.work_per_request:.3g} units/request"
                return f"{self.work_rate:.4g} of {self.committed:.4g} units/s, {each}: stays at {self.after:.3g} rps"


def cap_params(policy: Policy) -> CapParams:
    """Resolve a policy's steering."""
    steering = policy.steering
    smoothing = steering.smoothing
    return CapParams(
        steering.lower_cycles,
        steering.raise_cycles,
        steering.safety,
        policy.floor,
        policy.largest_work or 0.0,
        policy.min_work or 0.0,
        Smoothing(smoothing.work_per_request, smoothing.work_rate, smoothing.rejection),
        0.0 if policy.rate is None else first_cap(policy) / rate_per_s(policy.rate),
        steering.rules == "published",
    )


def bounded(cap: float, params: CapParams, *, smallest: float, largest: float, committed: float) -> float:
    """Return the cap within its bounds, by the declared or measured work of requests; 0 stands for unknown."""
    # Compared, not min(max()): this runs for every bucket in every cycle.
    if params.largest_work > largest:
        largest = params.largest_work
    least = committed / largest if largest > 0 else 0.0
    if params.floor < least:
        least = params.floor
    if not smallest > 0 or 0 < params.smallest_work < smallest:
        smallest = params.smallest_work
    most = ROOM * committed / smallest if smallest > 0 else RATE_MAX
    if cap > most:
        cap = most
    if cap < least:
        cap = least
    return cap


def known(state: CapState, held: float) -> CapState:
    """Return the state for a record with this cap: a changed share or policy has moved it in proportion."""
    if state.written == held:
        return state
    if not (state.written > 0 and state.cap > 0):
        return CapState(held, held, state.rate, state.rejected, state.blind_s, state.cost)
    part = held / state.written
    rate = state.rate * part if state.rate > 0 else state.rate
    return CapState(state.cap * part, held, rate, state.rejected, state.blind_s, state.cost)


def follow(state: CapState, sample: Sample, params: CapParams, *, cycle_s: float) -> CapState:
    """Update the averages with a sample, without moving the cap."""
    rate, rejected, blind_s, cost, _ = _smoothed(state, sample, params, cycle_s)
    return CapState(state.cap, state.written, rate, rejected, blind_s, cost)


def _smoothed(
    state: CapState, sample: Sample, params: CapParams, cycle_s: float
) -> tuple[float, float, float, Cost, float]:
    """Return rate, rejected share, time without settles and cost after a sample, and the cycles that it counts as."""
    cap, rate, smoothing = state.cap, state.rate, params.smoothing
    pace = max(cap, rate)
    long_s = FEW / pace if pace * cycle_s < FEW and pace > 0 else cycle_s
    elapsed_s, idle_s, rejected = sample.elapsed_s, sample.idle_s, state.rejected
    if idle_s > 0:
        # Requests after a rest are not spread over the whole rest, but over one cycle at least.
        merged_s = min(max(long_s - elapsed_s, 0.0), idle_s)
        elapsed_s += merged_s
        rested = (idle_s - merged_s) / long_s
        rate = rate * (1.0 - smoothing.work_rate) ** rested if rate > 0 else rate
        rejected *= (1.0 - smoothing.rejection) ** rested
    part = elapsed_s / long_s
    seen = sample.admitted / elapsed_s
    if rate < 0:
        rate = min(seen, cap) if cap > 0 else seen
    else:
        rate += (1.0 - (1.0 - smoothing.work_rate) ** part) * (seen - rate)
    refused = sample.refused / sample.requests if sample.requests > 0 else 0.0
    if refused or rejected:  # most buckets reject nothing
        rejected += (1.0 - (1.0 - smoothing.rejection) ** part) * (refused - rejected)
    cost, blind_s = state.cost, state.blind_s
    if sample.is_reported or blind_s >= BLIND_MAX_S:
        if sample.settles or sample.work:
            cost = costs.learn(
                cost,
                work=sample.work,
                work_squared=sample.work_squared,
                settles=sample.settles,
                alpha=smoothing.work_per_request,
            )
    elif blind_s or sample.admitted:
        blind_s += sample.elapsed_s + idle_s if blind_s else sample.elapsed_s
    return rate, rejected, blind_s, cost, part


def step(
    state: CapState, sample: Sample, params: CapParams, *, held: float, committed: float, cycle_s: float
) -> tuple[Rule, float, CapState]:
    """Move the cap by the difference of admitted work and committed rate, spread over a few cycles.

    `held` is the cap in the record. Returns the rule, the L that it used, and the state after it.
    """
    before = known(state, held)
    rate, rejected, blind_s, cost, part = _smoothed(before, sample, params, cycle_s)
    cap, is_rejecting = before.cap, rejected >= REJECTION_RATE_MIN
    work_rate = rate * cost.work
    if not cost.work > 0:
        rule: Rule = "blind"
        moved = _blinded(before, blind_s, params, committed)
    elif not before.cost.work > 0:
        rule, moved = "start", min(cap, params.safety * committed / cost.work)
    else:
        rule, moved = _moved(cap, rate, cost.work, params, part, committed, is_rejecting=is_rejecting)
    moved = bounded(moved, params, smallest=cost.smallest, largest=cost.largest, committed=committed)
    if is_rejecting and cost.work > 0 and cap > 0:
        rate *= moved / cap  # admissions are about to follow the cap
    elif rate > moved:
        rate = moved
    written = held if abs(moved - held) <= MOVE_MIN * held else moved
    return rule, work_rate, CapState(moved, written, rate, rejected, blind_s, cost)


def _moved(
    cap: float, rate: float, work: float, params: CapParams, part: float, committed: float, *, is_rejecting: bool
) -> tuple[Rule, float]:
    """Apply R2 to R5; return the rule and the cap."""
    above = rate * work - committed
    if above > 0:
        if not is_rejecting and cap > params.safety * rate:
            return "set", params.safety * rate  # = safety · L / f
        cycles = params.lower_cycles
        if part < 1:
            cycles = max(cycles, params.raise_cycles) / part
        after = cap - above / work / cycles
        return "lower", max(after, cap / STEP_MAX)
    if above == 0 or not is_rejecting:
        return "hold", cap
    after = cap - above / work / params.raise_cycles * min(part, 1.0)
    return "raise", min(after, cap * STEP_MAX)


def _blinded(before: CapState, blind_s: float, params: CapParams, committed: float) -> float:
    """Return the cap while the cost of requests is unknown: it falls, but not below C / the largest work."""
    fallen = before.cap * (BLIND_S + before.blind_s) / (BLIND_S + blind_s)
    if params.largest_work > 0:
        return max(fallen, min(before.cap, committed / params.largest_work))
    return fallen


def start(state: CapState, params: CapParams, *, committed: float, margin: float) -> CapState:
    """Set the first cap of a bucket whose work per request is already known: C / f, times a margin."""
    cost = state.cost
    cap = bounded(
        margin * committed / cost.work, params, smallest=cost.smallest, largest=cost.largest, committed=committed
    )
    return CapState(cap, cap, min(state.rate, cap), state.rejected, 0.0, cost)


def forgotten(state: CapState) -> CapState:
    """Return the state after a long pause, of which only the work per request is kept."""
    return CapState(state.cap, state.written, -1.0, 0.0, state.blind_s, state.cost)
