"""The throttle of a bucket, moved by whether its callers were answered as soon as they expected (Q1–Q5).

    share of misses = missed / settled over a moving window            overloaded: share > threshold
    refused         = min(100, M · P) % of the requests of rank P      high priority = low rank; rank 0 never

mode damped, at the end of each interval
    raise    overloaded, and this interval missed too many by itself:  M += step_up
    wait     overloaded, but only by what the window remembers,
             or nobody is admitted any more:                           M stays
    calm     not overloaded, at most calm_intervals in a row:          M stays
    lower    not overloaded for longer:                                M −= step_down, down to its initial value

mode ideal: the highest rate at which expectations are just met; slack = expected − actual
    raise    as above, and wait where nobody is admitted any more
    tighten  the least slack is below the band:                        M += small step
    loosen   it is above the band, or nobody was served:               M −= small step, down to the initial value
    hold     it is inside
    small step = ideal_step, or so much of it as moves 4 % of what is admitted, or ideal_step % of what is asked

No evidence counts twice: a window that still remembers an overload raises nothing once an interval by itself is
fine, and the least slack is taken over the intervals since M last moved. Without this, a window of ten intervals
would answer one bad second with ten large steps. And where everybody who can be refused is, a larger M would only
take longer to come down.

Why the small step is bounded: of a load of rank 4 and ten times what can be served, a quarter of M is a tenth of what
can be served: one step led from spare time to an overload. As refusals go with M, a step moves step / M of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple

THROTTLE_MAX = 100.0
"""With rank 1, beyond this a larger throttle refuses no more."""

IDEAL_SHARE = 0.04
"""Of what is admitted: what a small step of the ideal mode may move in any case."""

INTERVALS_MAX = 1000
"""A bucket that nobody looked at for longer is judged for so many intervals."""

COUNT_MAX = 2.0**53
"""Of settles in one sample; what says more is damaged. Floats count no further, and sums of such stay finite."""

_ALMOST = 1 - 1e-9
"""Ten cycles of 0.1 s make an interval of 1 s, whatever the sum of the floats."""


class Mode(StrEnum):
    """How the throttle is released."""

    DAMPED = "damped"
    IDEAL = "ideal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationParams:
    """What a policy says of expectations, resolved."""

    expected_latency_ms: float = 200.0
    expected_by: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Other defaults, by the value of a dimension: {operation: {report: 5000}}."""
    mode: Mode = Mode.DAMPED
    threshold: float = 0.05
    """A share: above it, the bucket is overloaded."""
    window_s: float = 10.0
    interval_s: float = 1.0
    step_up: float = 10.0
    step_down: float = 1.0
    calm_intervals: int = 3
    initial: float = 0.0
    ideal_band_ms: tuple[float, float] = (5.0, 20.0)
    ideal_step: float = 0.25
    """At most: see above."""
    throttle_max: float = THROTTLE_MAX
    """Where the most critical class that can be refused is refused wholly."""

    @property
    def window_intervals(self) -> int:
        """How many intervals the window holds."""
        return max(1, round(self.window_s / self.interval_s))


class ExpectationSample(NamedTuple):
    """What was settled since the last sample."""

    elapsed_s: float
    settled: float = 0.0
    missed: float = 0.0
    slack_min_ms: float = math.inf
    """The least of expected − actual; infinite if nothing was settled."""
    admitted: float = math.inf
    """How many were let through; infinite if nobody knows."""
    refused: float = 0.0
    """How many were not, of the classes that are not wholly refused."""


class Interval(NamedTuple):
    """What was settled in one interval."""

    settled: float = 0.0
    missed: float = 0.0
    slack_min_ms: float = math.inf
    admitted: float = 0.0
    refused: float = 0.0


NOTHING = Interval()

Rule = Literal["raise", "wait", "calm", "lower", "tighten", "loosen", "hold"]


class Reason(NamedTuple):
    """Why the throttle is what it is; in words as text (R11)."""

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
        """Say it: "12 % missed 200 ms (threshold 5 %): M 10 → 20"."""
        if self.rule in ("tighten", "loosen", "hold"):
            low_ms, high_ms = self.band_ms
            slack = "nobody was served" if self.slack_min_ms == math.inf else f"least slack {self.slack_min_ms:.3g} ms"
            told = f"{slack} (band {low_ms:g} to {high_ms:g} ms)"
        else:
            told = f"{self.missed_share:.3g} % missed {self.expected_ms:g} ms (threshold {self.threshold:g} %)"
        if self.rule == "wait":
            told += ", but not of those that this throttle let in"
        if self.rule in ("calm", "lower"):
            told += f", calm for {self.calm}"
        moved = f"M {self.before:g} → {self.after:g}" if self.after != self.before else f"M stays {self.after:g}"
        return f"{told}: {moved}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationState:
    """The throttle, and what is remembered to move it."""

    throttle: float = 0.0
    overloaded: bool = False
    calm: int = 0
    """Consecutive intervals that were not overloaded."""
    intervals: tuple[Interval, ...] = ()
    """The window: newest last."""
    unmoved: int = 0
    """Intervals since the throttle last moved."""
    open: Interval = NOTHING
    open_s: float = 0.0
    reason: Reason | None = None
    """Of the interval that ended with this step, if one did."""


def start(params: ExpectationParams) -> ExpectationState:
    """A bucket of which nothing is known."""
    return ExpectationState(throttle=params.initial)


def expected_ms(requested_ms: float | None, descriptor: Mapping[str, str], params: ExpectationParams) -> float:
    """How soon a request expects its answer: its own word, else the first table listing it, else the default (Q1)."""
    if requested_ms is not None:
        return requested_ms
    for dimension, table in params.expected_by.items():
        listed_ms = table.get(descriptor.get(dimension, ""))
        if listed_ms is not None:
            return listed_ms
    return params.expected_latency_ms


def refusal_share(throttle: float, rank: float) -> float:
    """The share of a rank's requests that is refused (Q4)."""
    return min(1.0, throttle * rank / 100)


def step(state: ExpectationState, sample: ExpectationSample, params: ExpectationParams) -> ExpectationState:
    """Gather a sample; at the end of an interval judge it and move the throttle. What is no number holds (F-P8)."""
    if not _is_sound(sample):
        return replace(state, reason=None)
    current = _gather(state.open, sample)
    # A time beyond what is judged anyway would only overflow.
    open_s = state.open_s + min(sample.elapsed_s, (INTERVALS_MAX + 1) * params.interval_s)
    ended = math.floor(open_s / (params.interval_s * _ALMOST))
    if ended < 1:
        return replace(state, open=current, open_s=open_s, reason=None)
    state = _close(state, current, params)
    for _ in range(min(ended - 1, INTERVALS_MAX)):  # nothing was settled in the others; a bucket at rest stays so
        state = _close(state, NOTHING, params)
        if _is_at_rest(state, params):
            break
    return replace(state, open=NOTHING, open_s=max(0.0, open_s - ended * params.interval_s))


def _is_sound(sample: ExpectationSample) -> bool:
    counts = (sample.settled, sample.missed, sample.refused)
    if not (0 <= sample.elapsed_s < math.inf and all(0 <= number <= COUNT_MAX for number in counts)):
        return False
    return sample.admitted >= 0 and sample.slack_min_ms > -math.inf


def _gather(current: Interval, sample: ExpectationSample) -> Interval:
    return Interval(
        current.settled + sample.settled,
        current.missed + sample.missed,
        min(current.slack_min_ms, sample.slack_min_ms),
        current.admitted + sample.admitted,
        current.refused + sample.refused,
    )


def _is_at_rest(state: ExpectationState, params: ExpectationParams) -> bool:
    return state.throttle == params.initial and not any(interval.settled for interval in state.intervals)


def _close(state: ExpectationState, interval: Interval, params: ExpectationParams) -> ExpectationState:
    """Judge one whole interval."""
    window = (*state.intervals, interval)[-params.window_intervals :]
    overloaded = missed_share(window) > params.threshold
    missing_now = missed_share((interval,)) > params.threshold
    calm = 0 if overloaded else state.calm + 1
    slack_min_ms = min(past.slack_min_ms for past in window[-(state.unmoved + 1) :])
    if overloaded and missing_now:
        rule: Rule = "raise" if interval.admitted > 0 else "wait"
    elif params.mode is Mode.IDEAL:
        rule = _ideal_rule(slack_min_ms, params)
    else:
        rule = _damped_rule(overloaded, calm, params)
    moved = state.throttle + _move(rule, interval, state.throttle, params)
    throttle = min(max(moved, params.initial), params.throttle_max)
    reason = Reason(
        rule=rule,
        before=state.throttle,
        after=throttle,
        missed_share=missed_share(window) * 100,
        threshold=params.threshold * 100,
        expected_ms=params.expected_latency_ms,
        slack_min_ms=slack_min_ms,
        band_ms=params.ideal_band_ms,
        calm=calm,
    )
    unmoved = 0 if throttle != state.throttle else state.unmoved + 1
    return ExpectationState(
        throttle=throttle, overloaded=overloaded, calm=calm, intervals=window, unmoved=unmoved, reason=reason
    )


def missed_share(window: tuple[Interval, ...]) -> float:
    """The share of the settled that missed their expectation; 0 if nothing was settled: nobody waited (Q2)."""
    settled = math.fsum(interval.settled for interval in window)
    missed = math.fsum(interval.missed for interval in window)
    return min(1.0, missed / settled) if settled > 0 else 0.0


def _damped_rule(overloaded: bool, calm: int, params: ExpectationParams) -> Rule:
    if overloaded:
        return "wait"
    return "lower" if calm > params.calm_intervals else "calm"


def _ideal_rule(slack_min_ms: float, params: ExpectationParams) -> Rule:
    low_ms, high_ms = params.ideal_band_ms
    if slack_min_ms < low_ms:
        return "tighten"
    return "loosen" if slack_min_ms > high_ms else "hold"


def _move(rule: Rule, interval: Interval, throttle: float, params: ExpectationParams) -> float:
    match rule:
        case "raise":
            return params.step_up
        case "lower":
            return -params.step_down
        case "tighten":
            return _small_step(interval, throttle, params)
        case "loosen":
            return -_small_step(interval, throttle, params)
        case _:
            return 0.0


def _small_step(interval: Interval, throttle: float, params: ExpectationParams) -> float:
    """How far the throttle moves in ideal mode."""
    step = params.ideal_step
    if not interval.refused or not throttle:
        return step
    allowed = max(IDEAL_SHARE * interval.admitted, step / 100 * (interval.admitted + interval.refused))
    return min(step, allowed * throttle / interval.refused)
