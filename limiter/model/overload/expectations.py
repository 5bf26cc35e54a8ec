"""The throttle M of a bucket, moved by the share of callers that were answered later than they expected (Q).

    refused share of rank P = min(1, M · P / 100)        high priority = low rank; rank 0 is never refused (Q4)
    admitted(M)             = Σ asked · (1 − refused share)         straight between the corners M = 100 / P

mode ideal: M is solved from the limit on what is in flight, not searched in steps (Q9)
    limit   = `in_flight_limit.step` with target = expected, allowed = 1 − ideal_target, none until answers are known
    allowed = served per second + (limit − in flight) / max(SETTLE_S, expected)
    M       = the least for which Σ asked · (1 − refused share) ≤ allowed                           every cycle

mode damped: the published steps, each bounded by the requests that it moves (Q3, Q10); at the end of an interval
    share of misses = missed / settled over a moving window                 overloaded: share > threshold
    raise    overloaded, and the interval missed too many by itself:  M += step_up, at most UP of what is let in
    wait     overloaded, but only by what the window remembers:       M stays
    calm     not overloaded, at most calm_intervals in a row:         M stays
    lower    not overloaded for longer:                               M −= step_down, at most DOWN more than is let in,
                                                                      or BACK of the way to where it was last raised,
                                                                      or LEAST of what is asked; down to `initial`
    hung     fewer than min_samples answers, and so many in flight for longer than expected: those missed (Q8)
    few      fewer than min_samples answers in all: they say nothing
    base     the mean is no longer than while nobody was refused: only failures missed, load is not the cause

`rules: published` runs `limiter.model.overload.published_expectations` instead (S10).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from limiter.model.overload import in_flight_limit
from limiter.model.overload.in_flight_limit import LimitParams, LimitSample, LimitState
from limiter.model.overload.shedding import FourFloats
from limiter.model.policy.criticality import Criticality

THROTTLE_MAX = 100.0
"""Largest useful throttle: at 100 all requests of rank 1 are refused."""

UP, DOWN, BACK, LEAST = 0.2, 0.05, 0.25, 0.01
KNEE = 1.1
"""A mean response time up to KNEE · base is not caused by load."""
LEARN, FADE = 0.1, 1 / 60
"""Part of the difference by which base moves in an interval: down, up."""
FIRST = 2
"""First intervals, in which nothing counts as missed: the backend may have been overloaded before."""
SETTLE_S = 0.5
"""Least time in which requests in flight above the limit are worked off."""
ASKED_S = 1.0
"""Averaging time of requests by class."""

CLASS = "criticality"
"""Name of the class in `expected_by`: the class is not a dimension of the descriptor."""

INTERVALS_MAX = 1000
"""Most intervals that one step judges, after a bucket was not read for longer."""

COUNT_MAX = 2.0**53
"""Most settles in one sample; a larger count is damaged. Floats are exact up to here, and their sums stay finite."""

ALMOST = 1 - 1e-9
"""Tolerance with which ten cycles of 0.1 s make an interval of 1 s in spite of rounding."""


class Mode(StrEnum):
    """Method by which the throttle is found."""

    DAMPED = "damped"
    IDEAL = "ideal"


class Rules(StrEnum):
    """Rules that move the throttle: those of this module, or the published ones."""

    BOUNDED = "bounded"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationParams:
    """A policy's `expectations`, resolved."""

    expected_latency_ms: float = 200.0
    expected_by: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Other defaults, by the value of a dimension or by class: {operation: {report: 5000}}."""
    expected_min_ms: float = 0.0
    """Least expectation; a request that states a shorter time gets this one (Q12)."""
    mode: Mode = Mode.DAMPED
    rules: Rules = Rules.BOUNDED
    ranks: FourFloats = (0.0, 1.0, 2.0, 4.0)
    """Ranks in the order of the classes."""
    threshold: float = 0.05
    """Share of misses above which the bucket is overloaded."""
    ideal_target: float = 0.99
    """Share of answers that should come in time."""
    min_samples: float = 20.0
    """Answers needed for a share to be meaningful."""
    window_s: float = 10.0
    interval_s: float = 1.0
    step_up: float = 10.0
    step_down: float = 1.0
    calm_intervals: int = 3
    initial: float = 0.0
    ideal_band_ms: tuple[float, float] = (5.0, 20.0)
    ideal_step: float = 0.25
    """Largest step. This and `ideal_band_ms` belong to the published rules."""
    throttle_max: float = THROTTLE_MAX
    """Throttle at which the most critical class that can be refused is refused completely."""

    @property
    def window_intervals(self) -> int:
        """Number of intervals in the window."""
        return max(1, round(self.window_s / self.interval_s))

    @property
    def expected_s(self) -> float:
        """The default expectation."""
        return self.expected_latency_ms / 1000


class ExpectationSample(NamedTuple):
    """A record's counters since the last sample, and its requests in flight now."""

    elapsed_s: float
    in_flight: float = 0.0
    settled: float = 0.0
    missed: float = 0.0
    """Requests settled later than expected, or with an outcome that counts as missed."""
    seconds: float = 0.0
    """Sum of the response times."""
    admitted: float = 0.0
    asked: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    """Requests by class."""
    refused: float = 0.0
    slack_min_ms: float = math.inf
    """Minimum of expected − actual; infinite if nothing was settled. Only the published rules use it."""
    failed: float = 0.0
    """Those of the missed that were failures, however fast (Q8)."""


class Interval(NamedTuple):
    """Counts of the requests settled in one interval."""

    settled: float = 0.0
    missed: float = 0.0
    seconds: float = 0.0
    admitted: float = 0.0
    failed: float = 0.0


NOTHING = Interval()

Rule = Literal["raise", "wait", "calm", "lower", "cut", "refuse", "futile"]


class Reason(NamedTuple):
    """Reason for the throttle; `str` gives it in words (R11)."""

    rule: Rule
    before: float
    after: float
    missed_share: float
    """Per cent."""
    threshold: float
    """Per cent of answers that may miss."""
    expected_ms: float
    calm: int = 0
    """Calm intervals, in mode damped."""
    limit: float = 0.0
    """Limit on requests in flight, in mode ideal."""

    def __str__(self) -> str:
        """Return the reason in words: "12 % missed 200 ms (threshold 5 %): M 10 → 20"."""
        told = f"{self.missed_share:.3g} % missed {self.expected_ms:g} ms (threshold {self.threshold:.3g} %)"
        if self.rule == "wait":
            told += ", but not of those that this throttle let in"
        elif self.rule == "lower" or (self.rule == "calm" and self.calm):
            told += f", calm for {self.calm}"
        elif self.rule == "futile":
            told += ", but fewer in flight are answered as slowly: load is not the cause"
        if 0 < self.limit < math.inf:
            told += f", {self.limit:.4g} may be in flight"
        moved = f"M {self.before:.4g} → {self.after:.4g}" if self.after != self.before else f"M stays {self.after:.4g}"
        return f"{told}: {moved}"


class ExpectationState(Struct, frozen=True, array_like=True):
    """The throttle, and the state that moves it."""

    throttle: float = 0.0
    overloaded: bool = False
    asked_rates: tuple[float, float, float, float] | None = None
    """Requests per second by class, averaged."""
    limit: LimitState | None = None
    """Limit on requests in flight, in mode ideal."""
    noted: float = 0.0
    """Throttle of the last reason, in mode ideal: not every cycle gives a reason."""
    calm: int = 0
    """Consecutive intervals that were not overloaded. This and the fields below are for mode damped."""
    intervals: tuple[Interval, ...] = ()
    """The window: newest last."""
    seen: int = 0
    """Intervals that were judged, counted up to FIRST."""
    bad_rate: float = 0.0
    """Requests per second admitted when the throttle was last raised."""
    base_s: float = 0.0
    """Mean response time while nobody is refused; 0: unknown."""
    open: Interval = NOTHING
    open_s: float = 0.0
    is_hung: bool = False
    reason: Reason | None = None
    """Reason of this step, if it has one."""


def start(params: ExpectationParams) -> ExpectationState:
    """Return the state of a new bucket."""
    return ExpectationState(throttle=params.initial)


def expected_ms(
    requested_ms: float | None,
    descriptor: Mapping[str, str],
    params: ExpectationParams,
    criticality: Criticality | None = None,
) -> float:
    """Return the expectation of a request: its own, else from the first table listing it, else the default (Q1, Q13).

    The policy's minimum applies to all (Q12).
    """
    if requested_ms is not None:
        return max(requested_ms, params.expected_min_ms)
    for dimension, table in params.expected_by.items():
        value = criticality if dimension == CLASS else descriptor.get(dimension)
        listed_ms = None if value is None else table.get(value)
        if listed_ms is not None:
            return max(listed_ms, params.expected_min_ms)
    return max(params.expected_latency_ms, params.expected_min_ms)


def refusal_share(throttle: float, rank: float) -> float:
    """Return the share of a rank's requests that is refused."""
    return min(1.0, throttle * rank / 100)


def admitted(throttle: float, asked: Sequence[float], ranks: Sequence[float]) -> float:
    """Return the requests per second that a throttle admits, from those asked by class."""
    total = 0.0
    for rate, rank in zip(asked, ranks, strict=True):
        total += rate * (1 - min(1.0, throttle * rank / 100))
    return total


def solve(asked: Sequence[float], allowed: float, ranks: Sequence[float]) -> float:
    """Return the least throttle that admits at most `allowed` requests per second, or else the one that refuses all."""
    before = 0.0
    high = sum(asked)
    if high <= allowed:
        return 0.0
    for corner in sorted({100 / rank for rate, rank in zip(asked, ranks, strict=True) if rank > 0 and rate > 0}):
        low = admitted(corner, asked, ranks)
        if low <= allowed:
            return before + (corner - before) * (high - allowed) / (high - low)
        before, high = corner, low
    return before


def step(state: ExpectationState, sample: ExpectationSample, params: ExpectationParams) -> ExpectationState:
    """Move the throttle by the settled requests. An invalid sample changes nothing (F-P8)."""
    if not _is_sound(sample):
        return replace(state, reason=None)
    state = replace(state, asked_rates=_asked_rates(state.asked_rates, sample), reason=None)
    return _ideal(state, sample, params) if params.mode is Mode.IDEAL else _damped(state, sample, params)


def _is_sound(sample: ExpectationSample) -> bool:
    counts = (sample.in_flight, sample.settled, sample.missed, sample.seconds, sample.admitted, sample.refused)
    numbers = (*counts, sample.failed, *sample.asked)
    return 0 < sample.elapsed_s < math.inf and all(0 <= number <= COUNT_MAX for number in numbers)


def _asked_rates(
    known: tuple[float, float, float, float] | None, sample: ExpectationSample
) -> tuple[float, float, float, float]:
    a, b, c, d = (count / sample.elapsed_s for count in sample.asked)
    if known is None or not any(known):
        return a, b, c, d
    weight = min(1.0, sample.elapsed_s / ASKED_S)
    e, f, g, h = known
    return e + weight * (a - e), f + weight * (b - f), g + weight * (c - g), h + weight * (d - h)


# Mode ideal


def limit_params(params: ExpectationParams) -> LimitParams:
    """Return the parameters of the limit on requests in flight, from those of expectations."""
    return LimitParams(allowed=1 - params.ideal_target, min_samples=params.min_samples, is_limited_at_first=False)


def _ideal(state: ExpectationState, sample: ExpectationSample, params: ExpectationParams) -> ExpectationState:
    """Solve the throttle from the limit on requests in flight."""
    target_s, terms = params.expected_s, limit_params(params)
    known = state.limit or in_flight_limit.start(terms, target_s, base_s=state.base_s)
    limit = in_flight_limit.step(
        known,
        LimitSample(
            sample.elapsed_s,
            sample.in_flight,
            sample.settled,
            sample.missed,
            sample.refused,
            sample.seconds,
            target_s,
            sample.failed,
        ),
        terms,
    )
    assert state.asked_rates is not None
    allowed = limit.served_rate + (limit.limit - sample.in_flight) / max(SETTLE_S, target_s)
    throttle = max(params.initial, solve(state.asked_rates, max(0.0, allowed), params.ranks))
    is_hung = in_flight_limit.is_hung(limit, sample.in_flight, target_s)
    state = replace(
        state,
        throttle=throttle,
        limit=limit,
        base_s=limit.base_s,
        is_hung=is_hung,
        overloaded=limit.rule != "calm" or is_hung,
    )
    return _noted(state, known.rule, params)


def _noted(state: ExpectationState, rule_before: str, params: ExpectationParams) -> ExpectationState:
    """Add a reason to the state, if the rule changed or the throttle is a tenth off the last noted one."""
    limit, before = state.limit, state.noted
    assert limit is not None
    is_moved = abs(state.throttle - before) > max(0.1 * before, 0.1)
    if limit.rule == rule_before and not is_moved:
        return state
    reason = Reason(
        rule=limit.rule,
        before=before,
        after=state.throttle,
        missed_share=limit.late_share * 100,
        threshold=(1 - params.ideal_target) * 100,
        expected_ms=params.expected_latency_ms,
        limit=limit.limit,
    )
    return replace(state, reason=reason, noted=state.throttle)


# Mode damped


def _damped(state: ExpectationState, sample: ExpectationSample, params: ExpectationParams) -> ExpectationState:
    """Add a sample; at the end of an interval judge it and move the throttle."""
    current = Interval(
        state.open.settled + sample.settled,
        state.open.missed + sample.missed,
        state.open.seconds + sample.seconds,
        state.open.admitted + sample.admitted,
        state.open.failed + sample.failed,
    )
    # A longer time would not be judged, and would overflow.
    open_s = state.open_s + min(sample.elapsed_s, (INTERVALS_MAX + 1) * params.interval_s)
    ended = math.floor(open_s / (params.interval_s * ALMOST))
    if ended < 1:
        return replace(state, open=current, open_s=open_s)
    state = _close(state, current, sample.in_flight, params)
    for _ in range(min(ended - 1, INTERVALS_MAX)):  # the other intervals are empty; a bucket at rest stays at rest
        state = _close(state, NOTHING, 0.0, params)
        if state.throttle == params.initial and not any(interval.settled for interval in state.intervals):
            break
    return replace(state, open=NOTHING, open_s=max(0.0, open_s - ended * params.interval_s))


def _close(
    state: ExpectationState, interval: Interval, in_flight: float, params: ExpectationParams
) -> ExpectationState:
    """Judge one whole interval."""
    overdue = _overdue(state, interval, in_flight, params)
    is_hung = interval.settled < params.min_samples <= overdue
    if is_hung:
        interval = Interval(overdue, overdue, overdue * 2 * params.expected_s, interval.admitted)
    base_s = _base_s(state, interval, params)
    recent_s = _recent_s(state, interval, params)
    # The mean of few answers is uncertain.
    knee = KNEE + 2 / math.sqrt(interval.settled + 1)
    if state.seen < FIRST:
        interval = interval._replace(missed=0.0)
    elif recent_s and recent_s <= knee * base_s:
        interval = interval._replace(missed=interval.failed)
    window = (*state.intervals, interval)[-params.window_intervals :]
    overloaded = missed_share(window, params.min_samples) > params.threshold
    calm = 0 if overloaded else state.calm + 1
    rule, throttle, bad_rate = _moved(state, interval, params, overloaded=overloaded, calm=calm)
    reason = Reason(
        rule=rule,
        before=state.throttle,
        after=throttle,
        missed_share=missed_share(window, params.min_samples) * 100,
        threshold=params.threshold * 100,
        expected_ms=params.expected_latency_ms,
        calm=calm,
    )
    return ExpectationState(
        throttle=throttle,
        overloaded=overloaded,
        asked_rates=state.asked_rates,
        calm=calm,
        intervals=window,
        seen=min(state.seen + 1, FIRST),
        bad_rate=bad_rate,
        base_s=base_s,
        is_hung=is_hung,
        reason=reason,
    )


def _overdue(state: ExpectationState, interval: Interval, in_flight: float, params: ExpectationParams) -> float:
    """Return the least number in flight for longer than expected: all not admitted in the last intervals."""
    back = math.ceil(params.expected_s / params.interval_s * ALMOST) - 1
    recent = math.fsum(past.admitted for past in state.intervals[-back:]) if back > 0 else 0.0
    return max(0.0, in_flight - interval.admitted - recent)


def _base_s(state: ExpectationState, interval: Interval, params: ExpectationParams) -> float:
    """Return the mean while nobody is refused and most are in time: it falls faster than it rises."""
    recent_s, base_s = _recent_s(state, interval, params), state.base_s
    if interval.failed > params.threshold * interval.settled:  # errors may be faster than answers
        return base_s
    if not recent_s or not state.seen or state.throttle > 0 or recent_s >= max(params.expected_s, base_s):
        return base_s
    return base_s + (recent_s - base_s) * (LEARN if recent_s < base_s else FADE) if base_s else recent_s


def _recent_s(state: ExpectationState, interval: Interval, params: ExpectationParams) -> float:
    """Return the mean response time of an interval, or of the window if the interval has too few answers."""
    return mean_s((interval,), params) or mean_s((*state.intervals, interval), params)


def mean_s(window: Sequence[Interval], params: ExpectationParams) -> float:
    """Return the mean response time; 0 with too few answers."""
    settled = math.fsum(interval.settled for interval in window)
    return math.fsum(interval.seconds for interval in window) / settled if settled >= params.min_samples else 0.0


def missed_share(window: Sequence[Interval], min_samples: float = 0.0) -> float:
    """Return the share of settled requests that missed their expectation; 0 if too few were settled (Q2)."""
    settled = math.fsum(interval.settled for interval in window)
    missed = math.fsum(interval.missed for interval in window)
    return min(1.0, missed / settled) if settled > 0 and settled >= min_samples else 0.0


def _moved(
    state: ExpectationState, interval: Interval, params: ExpectationParams, *, overloaded: bool, calm: int
) -> tuple[Rule, float, float]:
    """Return the rule, the throttle, and the rate that was admitted when it was last raised."""
    asked, ranks, throttle = state.asked_rates or (0.0,) * 4, params.ranks, state.throttle
    let_in = admitted(throttle, asked, ranks)
    if overloaded:
        if interval.missed <= params.threshold * interval.settled or let_in <= 0:
            return "wait", throttle, state.bad_rate
        bounded = max(throttle, solve(asked, let_in * (1 - UP), ranks))
        return "raise", min(throttle + params.step_up, bounded, params.throttle_max), let_in
    if calm <= params.calm_intervals:
        return "calm", throttle, state.bad_rate
    more = max(DOWN * let_in, BACK * (state.bad_rate - let_in), LEAST * math.fsum(asked))
    bounded = min(throttle, solve(asked, let_in + more, ranks))
    return "lower", max(params.initial, throttle - params.step_down, bounded), state.bad_rate
