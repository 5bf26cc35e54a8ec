"""The choice of mechanism for a bucket of a policy with `mechanism: auto` (R10, R16).

    variation = standard deviation ÷ mean

work        few requests per second, or work that varies from request to request or over the last minute, or requests
            that come in bursts: at once
requests    many, alike, evenly spread and as expensive as a minute ago, and that for `patience_s` without a break; lent
            for some work at a time, see `limiter.model.control.cycle_step`
large       one request costs more than the bucket holds: requests are counted, however few they are. A bucket of work
            would lose what refills while it is full and nobody asks
between     the thresholds lie apart: what is in force stays

Work is the safe one: it debits what was done. So the way there is short and the way back is long.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

from limiter.model.control.costs import Cost
from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import Moments, gather, smooth
from limiter.model.control.value import Value
from limiter.model.policy.policy import Policy

MANY_REQUESTS = 20.0
"""Reports below which the spread of work is unknown."""
MINUTE_S = 60.0
"""Time constant of the moments that show if costs are even over time."""
OVER_TIME = 1.2
"""Requests stay counted while the variation over the last minute is at most `even` times this."""
LARGE_REQUESTS = 3.0
"""Reports needed before a request counts as more expensive than the bucket's capacity …"""
LARGE_STAYS = 0.5
"""… until it costs less than this part of the capacity."""

PACE_ALPHA = 0.05


class AutoParams(NamedTuple):
    """A policy's thresholds (R14)."""

    rate_high: float = 50.0
    """Requests per second above which requests become counted …"""
    rate_low: float = 20.0
    """… and below which work is counted again."""
    even: float = 0.5
    """The most that work and pace may vary for requests to become counted …"""
    uneven: float = 1.0
    """… and to stay counted."""
    patience_s: float = 3.0
    capacity_s: float = 1.0
    """The bucket's capacity, as time at the committed rate."""


class Pace(Value, frozen=True):
    """Rate of admitted requests, and its evenness."""

    rate: float | None = None
    rate_squared: float | None = None
    """Mean square, less the part due to chance: for independent requests it is the square of the mean."""
    suits_requests_s: float = 0.0
    """Time for which the conditions for counting requests have been met."""

    @property
    def variation(self) -> float:
        """Coefficient of variation of the rate, beyond that of chance."""
        if not self.rate or self.rate_squared is None:
            return 0.0
        squared = self.rate_squared / self.rate / self.rate - 1.0
        return sqrt(squared) if squared > 0 else 0.0


def follow(pace: Pace, sample: Sample, *, cycles: float) -> Pace:
    """Return the pace after a sample."""
    rate = sample.admitted / sample.elapsed_s
    rate_squared = rate * (rate - 1.0 / sample.elapsed_s)
    return Pace(
        smooth(pace.rate, rate, PACE_ALPHA, cycles),
        smooth(pace.rate_squared, rate_squared, PACE_ALPHA, cycles),
        pace.suits_requests_s,
    )


def rest(pace: Pace, *, cycles: float) -> Pace:
    """Return the pace after a time without requests."""
    if pace.rate is None:
        return pace
    return Pace(
        smooth(pace.rate, 0.0, PACE_ALPHA, cycles),
        smooth(pace.rate_squared, 0.0, PACE_ALPHA, cycles),
        suits_requests_s=0.0,
    )


class Signs(NamedTuple):
    """The measurements that decide the mechanism."""

    pace: Pace
    moments: Moments
    """Of the last requests."""
    minute: Moments
    """Of the last minute."""
    cost: Cost
    capacity: float
    """Work units that the bucket holds while it counts work."""

    @property
    def is_large(self) -> bool:
        """True if one request costs more than the bucket's capacity."""
        return self.cost.requests >= LARGE_REQUESTS and self.cost.work > self.capacity

    @property
    def stays_large(self) -> bool:
        """True if one request costs enough to keep the current mechanism."""
        return self.cost.work > LARGE_STAYS * self.capacity


def gather_minute(minute: Moments, sample: Sample) -> Moments:
    """Return the moments of the last minute after a sample."""
    return gather(minute, sample, requests=inf, seconds=MINUTE_S)


def is_suited(pace: Pace, params: AutoParams) -> bool:
    """Return True if requests have suited for long enough to be counted."""
    return pace.suits_requests_s >= params.patience_s


def step(signs: Signs, params: AutoParams, *, counts_requests: bool, elapsed_s: float) -> tuple[bool, Pace]:
    """Return True if requests are counted from now on, and the pace."""
    pace = signs.pace
    if counts_requests:
        stays = signs.stays_large or _stays_suited(signs, params)
        return stays, pace if stays else Pace(pace.rate, pace.rate_squared)
    if signs.is_large:
        suits_requests_s = params.patience_s
    else:
        suits_requests_s = pace.suits_requests_s + elapsed_s if _is_suited(signs, params) else 0.0
    pace = Pace(pace.rate, pace.rate_squared, suits_requests_s)
    return is_suited(pace, params), pace


def explain(signs: Signs, params: AutoParams, *, counts_requests: bool) -> str:
    """Return the reason for a bucket's mechanism, in words."""
    pace, moments, minute = signs.pace, signs.moments, signs.minute
    rate = f"{pace.rate or 0.0:.3g} requests/s"
    if signs.is_large or (counts_requests and signs.stays_large):
        held = f"{signs.cost.work:.3g} units, and the bucket holds {signs.capacity:.3g}"
        return f"a request costs {held}: {'requests are' if counts_requests else 'requests will be'} counted"
    if counts_requests:
        return f"{rate}, each within {moments.variation:.2g} of the mean work: counting requests is enough"
    if pace.rate is None or pace.rate < params.rate_high:
        return f"{rate}, fewer than {params.rate_high:.3g}: work is counted"
    if moments.requests < MANY_REQUESTS:
        return f"{rate}, but few of them have reported their work"
    if moments.variation > params.even:
        return f"work varies by {moments.variation:.2g} of its mean, more than {params.even:.2g}"
    if minute.variation > params.even:
        return f"work varied by {minute.variation:.2g} of its mean over the last minute, more than {params.even:.2g}"
    if pace.variation > params.even:
        return f"requests come in bursts: their rate varies by {pace.variation:.2g}, more than {params.even:.2g}"
    if is_suited(pace, params):
        return f"{rate} and even, but the allowance for counting requests is used up until the next cycle"
    return f"{rate} and even for {pace.suits_requests_s:.1f} s; requests are counted after {params.patience_s:.1f} s"


def _stays_suited(signs: Signs, params: AutoParams) -> bool:
    pace = signs.pace
    if pace.rate is None or pace.rate < params.rate_low or signs.minute.variation > OVER_TIME * params.even:
        return False
    return signs.moments.variation <= params.uneven and pace.variation <= params.uneven


def _is_suited(signs: Signs, params: AutoParams) -> bool:
    pace, moments = signs.pace, signs.moments
    if pace.rate is None or pace.rate < params.rate_high or moments.requests < MANY_REQUESTS:
        return False
    return max(moments.variation, signs.minute.variation, pace.variation) <= params.even


def auto_params(policy: Policy) -> AutoParams:
    """Resolve a policy's thresholds."""
    assert policy.rate is not None
    auto = policy.steering.auto
    return AutoParams(auto.rate_high, auto.rate_low, auto.even, auto.uneven, auto.patience_s, policy.held_s)
