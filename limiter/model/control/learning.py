"""The charge of a request before its work is known, learned from earlier requests (W8).

    target = mean of recent settled work
    target = exp(ln(mean) − s²/2 + z·s),  s² = ln(1 + variation²)      a quantile

nothing learned yet            begin with the first reports, if the initial charge is off
off by less than the margin    leave the charge
off in few cycles              leave it: PATIENCE_CYCLES alike in a row are consistent
consistently off               move it to the target, at most doubled or halved in a step (F-P8)

A quantile is estimated from mean and spread as of a log-normal distribution: a bucket keeps sums, not each request's
work, and costs are positive with a long tail to the right. Where that is wrong, settling corrects the charge.
"""

from __future__ import annotations

from math import exp, isfinite, log, sqrt
from typing import NamedTuple

from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import Moments, smooth
from limiter.model.control.value import Value
from limiter.model.numbers import NUMBER_MAX
from limiter.model.policy.fields import quantity
from limiter.model.policy.policy import Policy

PATIENCE_CYCLES = 3
STEP_MAX = 2.0
CHARGE_MIN = 1e-3
"""Least charge, because 0 stands for no learned charge."""

ERROR_ALPHA = 0.3

_DEVIATIONS = {
    "mean": None,
    "p50": 0.0,
    "p90": 1.2815515655446004,
    "p95": 1.6448536269514722,
    "p99": 2.3263478740408408,
}


class LearningParams(NamedTuple):
    """A policy's parameters for its learned charge."""

    deviations: float | None = None
    """z: standard deviations above the median; None = the mean."""
    margin: float = -0.1
    """Units if positive, a share of the charge if negative."""
    initial: float = 1.0
    charge_max: float = NUMBER_MAX


class Learning(Value, frozen=True):
    """The error of a charge."""

    off_cycles: int = 0
    """Cycles in a row in which the target was beyond the margin: above it if positive, below it if negative."""
    error: float = 0.0
    """Smoothed (work − charge) ÷ charge: 0.5 means that requests do 1.5 times the work that they are charged."""


def learning_params(policy: Policy) -> LearningParams | None:
    """Resolve a policy's learning; None if its charge is fixed."""
    if not policy.learns:
        return None
    number, unit = quantity.parse(policy.learning.margin)
    return LearningParams(
        _DEVIATIONS[policy.learning.target],
        -number / 100 if unit == "%" else number,
        policy.learning.initial,
        policy.largest_work or NUMBER_MAX,
    )


def target(moments: Moments, params: LearningParams) -> float:
    """Return the charge that the moments call for."""
    mean = moments.mean
    if params.deviations is None or mean <= 0:
        return mean
    spread_squared = log(1.0 + moments.variation * moments.variation)
    return exp(log(mean) - spread_squared / 2 + params.deviations * sqrt(spread_squared))


def step(
    charge: float, learning: Learning, moments: Moments, sample: Sample, params: LearningParams
) -> tuple[float, Learning]:
    """Move the charge once it has been off by more than the margin for a few cycles; 0 means that none was learned."""
    is_first = not charge > 0
    if is_first:
        charge = params.initial
    if not sample.is_reported or sample.settles <= 0:
        return charge, learning
    wanted = moments.mean if params.deviations is None else target(moments, params)
    off = wanted - charge
    if not isfinite(off):
        return charge, learning
    error = smooth(learning.error, (sample.work / sample.settles - charge) / charge, ERROR_ALPHA)
    margin = params.margin
    if margin < 0:
        margin *= -charge
    off_cycles = 0 if -margin <= off <= margin else _off_cycles(learning.off_cycles, off)
    if is_first and off_cycles:
        charge = min(max(wanted, CHARGE_MIN), params.charge_max)
    elif off_cycles >= PATIENCE_CYCLES or off_cycles <= -PATIENCE_CYCLES:
        charge = min(max(wanted, charge / STEP_MAX, CHARGE_MIN), charge * STEP_MAX, params.charge_max)
    return charge, Learning(off_cycles, error)


def _off_cycles(before: int, off: float) -> int:
    return max(before, 0) + 1 if off > 0 else min(before, 0) - 1
