"""The throttle of a bucket by the published rules, `rules: published` (Q3, Q5, S10).

    share of misses = missed / settled over a moving window            overloaded: share > threshold

mode damped, at the end of each interval
    raise    overloaded:                                     M += step_up
    calm     not overloaded, at most calm_intervals in a row: M stays
    lower    not overloaded for longer:                      M −= step_down, down to its initial value

mode ideal: slack = expected − actual, the least in the window
    raise    overloaded:                                     M += step_up
    tighten  the least slack is below the band:              M += ideal_step
    loosen   it is above the band, or nobody was served:     M −= ideal_step, down to the initial value
    hold     it is inside

`limiter.model.overload.expectations` has the rules that are used by default, and overload.md the two side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from limiter.model.overload.expectations import (
    ALMOST,
    COUNT_MAX,
    INTERVALS_MAX,
    ExpectationParams,
    ExpectationSample,
    Mode,
)


class Interval(NamedTuple):
    """Counts of the requests settled in one interval."""

    settled: float = 0.0
    missed: float = 0.0
    slack_min_ms: float = math.inf


NOTHING = Interval()

Rule = Literal["raise", "calm", "lower", "tighten", "loosen", "hold"]


class Reason(NamedTuple):
    """Reason for the throttle; `str` gives it in words (R11)."""

    rule: Rule
    before: float
    after: float
    missed_share: float
    threshold: float
    expected_ms: float
    slack_min_ms: float
    band_ms: tuple[float, float]
    calm: int

    def __str__(self) -> str:
        """Return the reason in words: "12 % missed 200 ms (threshold 5 %): M 10 → 20"."""
        if self.rule in ("tighten", "loosen", "hold"):
            low_ms, high_ms = self.band_ms
            slack = "nobody was served" if self.slack_min_ms == math.inf else f"least slack {self.slack_min_ms:.3g} ms"
            told = f"{slack} (band {low_ms:g} to {high_ms:g} ms)"
        else:
            told = f"{self.missed_share:.3g} % missed {self.expected_ms:g} ms (threshold {self.threshold:g} %)"
        if self.rule in ("calm", "lower"):
            told += f", calm for {self.calm}"
        moved = f"M {self.before:g} → {self.after:g}" if self.after != self.before else f"M stays {self.after:g}"
        return f"{told}: {moved}"


class PublishedState(Struct, frozen=True, array_like=True):
    """The throttle, and the state that moves it."""

    throttle: float = 0.0
    overloaded: bool = False
    calm: int = 0
    """Consecutive intervals that were not overloaded."""
    intervals: tuple[Interval, ...] = ()
    """The window: newest last."""
    open: Interval = NOTHING
    open_s: float = 0.0
    reason: Reason | None = None
    """Reason of the interval that ended with this step, if one did."""


def start(params: ExpectationParams) -> PublishedState:
    """Return the state of a new bucket."""
    return PublishedState(throttle=params.initial)


def step(state: PublishedState, sample: ExpectationSample, params: ExpectationParams) -> PublishedState:
    """Add a sample; at the end of an interval judge it and move the throttle. Invalid ones change nothing (F-P8)."""
    if not _is_sound(sample):
        return replace(state, reason=None)
    current = Interval(
        state.open.settled + sample.settled,
        state.open.missed + sample.missed,
        min(state.open.slack_min_ms, sample.slack_min_ms),
    )
    # A longer time would not be judged, and would overflow.
    open_s = state.open_s + min(sample.elapsed_s, (INTERVALS_MAX + 1) * params.interval_s)
    ended = math.floor(open_s / (params.interval_s * ALMOST))
    if ended < 1:
        return replace(state, open=current, open_s=open_s, reason=None)
    state = _close(state, current, params)
    for _ in range(min(ended - 1, INTERVALS_MAX)):  # the other intervals are empty; a bucket at rest stays at rest
        state = _close(state, NOTHING, params)
        if state.throttle == params.initial and not any(interval.settled for interval in state.intervals):
            break
    return replace(state, open=NOTHING, open_s=max(0.0, open_s - ended * params.interval_s))


def _is_sound(sample: ExpectationSample) -> bool:
    counts = (sample.settled, sample.missed)
    if not (0 <= sample.elapsed_s < math.inf and all(0 <= number <= COUNT_MAX for number in counts)):
        return False
    return sample.slack_min_ms > -math.inf


def _close(state: PublishedState, interval: Interval, params: ExpectationParams) -> PublishedState:
    """Judge one whole interval."""
    window = (*state.intervals, interval)[-params.window_intervals :]
    share = missed_share(window)
    overloaded = share > params.threshold
    calm = 0 if overloaded else state.calm + 1
    slack_min_ms = min(past.slack_min_ms for past in window)
    rule = _rule(slack_min_ms, params, overloaded=overloaded, calm=calm)
    throttle = min(max(state.throttle + _move(rule, params), params.initial), params.throttle_max)
    reason = Reason(
        rule=rule,
        before=state.throttle,
        after=throttle,
        missed_share=share * 100,
        threshold=params.threshold * 100,
        expected_ms=params.expected_latency_ms,
        slack_min_ms=slack_min_ms,
        band_ms=params.ideal_band_ms,
        calm=calm,
    )
    return PublishedState(throttle=throttle, overloaded=overloaded, calm=calm, intervals=window, reason=reason)


def missed_share(window: Sequence[Interval]) -> float:
    """Return the share of settled requests that missed their expectation; 0 if nothing was settled (Q2)."""
    settled = math.fsum(interval.settled for interval in window)
    missed = math.fsum(interval.missed for interval in window)
    return min(1.0, missed / settled) if settled > 0 else 0.0


def _rule(slack_min_ms: float, params: ExpectationParams, *, overloaded: bool, calm: int) -> Rule:
    if overloaded:
        return "raise"
    if params.mode is Mode.DAMPED:
        return "lower" if calm > params.calm_intervals else "calm"
    low_ms, high_ms = params.ideal_band_ms
    if slack_min_ms < low_ms:
        return "tighten"
    return "loosen" if slack_min_ms > high_ms else "hold"


def _move(rule: Rule, params: ExpectationParams) -> float:
    match rule:
        case "raise":
            return params.step_up
        case "lower":
            return -params.step_down
        case "tighten":
            return params.ideal_step
        case "loosen":
            return -params.ideal_step
        case _:
            return 0.0
