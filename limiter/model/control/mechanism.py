"""Which mechanism suits a bucket of a policy with `mechanism: auto` (R10).

    variation = standard deviation ÷ mean

work        few requests a second, or work that varies from request to request, or requests that come in bursts: at once
requests    many, alike and evenly spread, and that for PATIENCE_S without a break; lent for some work at a time, see
            `limiter.model.control.cycle`
between     the thresholds lie apart: what is in force stays

Work is the safe one: it debits what was done. So the way there is short and the way back is long.
"""

from __future__ import annotations

from math import sqrt

from limiter.model.control.sampling import Sample
from limiter.model.control.smoothing import Moments, smooth
from limiter.model.control.value import Value

RATE_HIGH = 50.0
"""Requests a second from which counting requests is worth while …"""
RATE_LOW = 20.0
"""… and below which it no longer is."""
VARIATION_EVEN = 0.5
VARIATION_UNEVEN = 1.0
PATIENCE_S = 3.0
MANY_REQUESTS = 20.0
"""With fewer reports the spread of work is not known."""

PACE_ALPHA = 0.05


class Pace(Value, frozen=True):
    """How many requests are admitted a second, and how evenly."""

    rate: float | None = None
    rate_squared: float | None = None
    """Mean square, less what chance alone makes of it: for requests independent of one another it is the square."""
    suits_requests_s: float = 0.0
    """For how long counting requests would have suited."""

    @property
    def is_suited(self) -> bool:
        """Whether requests are counted, or would be if the controller had looked in time."""
        return self.suits_requests_s >= PATIENCE_S

    @property
    def variation(self) -> float:
        """Coefficient of variation of the rate, beyond that of chance."""
        if not self.rate or self.rate_squared is None:
            return 0.0
        squared = self.rate_squared / self.rate / self.rate - 1.0
        return sqrt(squared) if squared > 0 else 0.0


def follow(pace: Pace, sample: Sample, *, cycles: float) -> Pace:
    """The pace after a sample."""
    rate = sample.admitted / sample.elapsed_s
    rate_squared = rate * (rate - 1.0 / sample.elapsed_s)
    return Pace(
        smooth(pace.rate, rate, PACE_ALPHA, cycles),
        smooth(pace.rate_squared, rate_squared, PACE_ALPHA, cycles),
        pace.suits_requests_s,
    )


def rest(pace: Pace, *, cycles: float) -> Pace:
    """The pace after a time in which nobody asked."""
    if pace.rate is None:
        return pace
    return Pace(
        smooth(pace.rate, 0.0, PACE_ALPHA, cycles),
        smooth(pace.rate_squared, 0.0, PACE_ALPHA, cycles),
        suits_requests_s=0.0,
    )


def step(pace: Pace, moments: Moments, *, counts_requests: bool, elapsed_s: float) -> tuple[bool, Pace]:
    """Whether to count requests from now on."""
    if counts_requests:
        stays = _stays_suited(pace, moments)
        return stays, pace if stays else Pace(pace.rate, pace.rate_squared)
    suits_requests_s = pace.suits_requests_s + elapsed_s if _is_suited(pace, moments) else 0.0
    pace = Pace(pace.rate, pace.rate_squared, suits_requests_s)
    return pace.is_suited, pace


def explain(pace: Pace, moments: Moments, *, counts_requests: bool) -> str:
    """Why a bucket counts as it does, in words."""
    rate = f"{pace.rate or 0.0:.3g} requests/s"
    if counts_requests:
        return f"{rate}, each within {moments.variation:.2g} of the mean work: counting requests is enough"
    if pace.rate is None or pace.rate < RATE_HIGH:
        return f"{rate}, fewer than {RATE_HIGH:.3g}: work is counted"
    if moments.requests < MANY_REQUESTS:
        return f"{rate}, but few of them have reported their work"
    if moments.variation > VARIATION_EVEN:
        return f"work varies by {moments.variation:.2g} of its mean, more than {VARIATION_EVEN:.2g}"
    if pace.variation > VARIATION_EVEN:
        return f"requests come in bursts: their rate varies by {pace.variation:.2g}, more than {VARIATION_EVEN:.2g}"
    if pace.is_suited:
        return f"{rate} and even, but the allowance for counting requests is used up until the next cycle"
    return f"{rate} and even for {pace.suits_requests_s:.1f} s; requests are counted after {PATIENCE_S:.1f} s"


def _stays_suited(pace: Pace, moments: Moments) -> bool:
    if pace.rate is None or pace.rate < RATE_LOW:
        return False
    return moments.variation <= VARIATION_UNEVEN and pace.variation <= VARIATION_UNEVEN


def _is_suited(pace: Pace, moments: Moments) -> bool:
    if pace.rate is None or pace.rate < RATE_HIGH or moments.requests < MANY_REQUESTS:
        return False
    return moments.variation <= VARIATION_EVEN and pace.variation <= VARIATION_EVEN
