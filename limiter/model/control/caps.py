"""The cap of a request bucket, steered by the work its requests do (R2–R6).

    L work/second    f work/request    C committed work/second    X = L − C    Y = C − L

lower    rejecting, L > C        cap − X / f / lower_cycles        at most halved in a step
raise    rejecting, L < C        cap + Y / f / raise_cycles        at most doubled in a step
set      not rejecting, L > C    safety · L / f                    whatever the cap was; if that was done already and
                                                                   still nothing is rejected, `lower`
hold     neither, or not known   cap                               never raised without rejections (R5, F-P8)
start    no cap yet              C / f                             a bucket that begins to count requests (R10)

A cap stays within [floor, C / smallest work].
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Literal, NamedTuple

from limiter.model.control.smoothing import REJECTION_RATE_MIN, Load
from limiter.model.control.value import Value
from limiter.model.policy.policy import Policy

STEP_MAX = 2.0
"""By how much a step may multiply or divide the cap (F-P8)."""

Rule = Literal["lower", "raise", "set", "hold", "start"]


class CapParams(NamedTuple):
    """What a policy says of steering, beside its rate."""

    lower_cycles: float = 3.0
    """n of R2"""
    raise_cycles: float = 4.0
    """m of R3"""
    safety: float = 1.2
    """s of R4"""
    floor: float = 0.1
    """Requests a second."""
    smallest_work: float = 1.0
    """The least that one request weighs in this limit."""


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
        """The reasoning in words: `1000 units/s ÷ 12.4 units/request → 80.6 rps`."""
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
            case "hold":
                each = f"{self.work_per_request:.3g} units/request"
                return f"{self.work_rate:.4g} of {self.committed:.4g} units/s, {each}: stays at {self.after:.3g} rps"


def cap_params(policy: Policy) -> CapParams:
    """A policy's steering, resolved."""
    steering = policy.steering
    return CapParams(steering.lower_cycles, steering.raise_cycles, steering.safety, policy.floor, policy.smallest_work)


def bounded(cap: float, params: CapParams, *, committed: float) -> float:
    """The cap within [floor, C / smallest work]; where these cross, the limit counts for more than the floor."""
    # Compared, not min(max()): this runs for every bucket in every cycle.
    if cap < params.floor:
        cap = params.floor
    most = committed / params.smallest_work
    if cap > most:
        cap = most
    return cap


def start(load: Load, params: CapParams, *, committed: float) -> float:
    """The cap at which the limit would be used up exactly; the least possible while work per request is unknown."""
    if load.work_per_request is None or not isfinite(load.work_per_request):
        return bounded(0.0, params, committed=committed)
    return bounded(committed / max(load.work_per_request, params.smallest_work), params, committed=committed)


def step(cap: float, load: Load, params: CapParams, *, committed: float, was_set: bool = False) -> tuple[Rule, float]:
    """Move the cap by what the work rate is off the committed rate, spread over a few cycles (R2–R5).

    A cap set to a little more than what is being done limits nothing while demand stays the same: a limiter that set it
    again and again would stand still above its limit (R8).
    """
    if not 0 < cap < inf:
        return "start", start(load, params, committed=committed)
    work_rate, work_per_request = load.work_rate, load.work_per_request
    if work_rate is None or work_per_request is None or not isfinite(work_rate + work_per_request):
        return "hold", bounded(cap, params, committed=committed)
    above = work_rate - committed
    is_rejecting = load.rejection_rate >= REJECTION_RATE_MIN
    if above == 0 or (above < 0 and not is_rejecting):
        return "hold", bounded(cap, params, committed=committed)
    cost = work_per_request
    if cost < params.smallest_work:
        cost = params.smallest_work
    rule: Rule
    if above < 0:
        rule, after, most = "raise", cap - above / cost / params.raise_cycles, cap * STEP_MAX
        if after > most:
            after = most
    elif is_rejecting or was_set:
        rule, after, least = "lower", cap - above / cost / params.lower_cycles, cap / STEP_MAX
        if after < least:
            after = least
    else:
        rule, after = "set", params.safety * work_rate / cost
    return rule, bounded(after, params, committed=committed)
