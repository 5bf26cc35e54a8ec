"""The admission rate of a bucket, steered by a percentile of its response times (S1–S4).

    cur  = α·cur + (1 − α)·samp          the weight is on the old value: α = 0.7 here is a = 0.3 of R1
    err  = (cur − target) / target       runs after nreq samples or timeout_s, for each class by itself

    raise     err < err_i, no higher class above its target:  rate += −(err − c_i)·adj_i
    resume    as raise, after a cut, no higher class refused: rate = served/s while it was above ÷ adj_d, once
    hold      err_i ≤ err ≤ err_d, or a higher class is above its target, or nothing was measured
    cut       err > err_d, and nobody yields:                 min(rate, served/s) ÷ adj_d
    drain     as cut, rate ≤ served/s ÷ min(4, cur/target):   rate stays: what is slow now was let in before
              or err > err_d, but samp ≤ target:              nothing moves: only the average remembers
    yield     err > err_d, lower classes above the floor:     their min(rate, served/s) ÷ adjlo_d
    count     err > err_d, lower classes all at the floor:    from the lc_thresh-th time on cut, until err ≤ err_d
    probe     nothing was measured, for all were refused:     rate doubled, up to one request a run

Beyond the published rules:
    served    A rate above what was served only lengthens the queue: it is brought down to what was served, and divided
              then (as R4 sets caps by what is done). From 5000 requests/s it would take twenty runs to reach what a
              backend of 150 can do, and its queue would be minutes long by then.
    drain     A queue of 20 s is told of for 20 s, whatever the rate is by now. Dividing it all the while would end at
              the floor; at a quarter of what is served a long queue goes nearly as fast, and a short one needs less.
    resume    What a queue came out of is what the backend can do. From a quarter of it, two requests a second more each
              second would leave half of the backend idle for half a minute.
    probe     A rate that lets nobody in is told nothing: at 0.05 requests/s there is a sample every 20 s, and a class
              at the floor would stay there for minutes after the overload has gone.

With `degrade`, cheaper work comes before refusals, and is given up after them:
    degrade   err > err_d, quality above its floor:           quality −= quality_decrease; no rate moves
    restore   err < err_i, nobody refused in the last runs:   quality += quality_increase
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from limiter.model.overload import histogram
from limiter.model.overload.histogram import percentile
from limiter.model.policy.criticality import RANKS, Criticality, Ranks, descending

DRAIN_MAX = 4.0
"""So many times more is served than let in, at most, while a queue drains."""

_ALMOST = 1 - 1e-9
_QUALITY_GRAIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTimeParams:
    """What a policy says of response times, resolved; the published values where it says nothing."""

    target_ms: float = 1000.0
    targets_ms: Mapping[Criticality, float] = field(default_factory=dict)
    """Classes with a target of their own."""
    ranks: Ranks = field(default_factory=lambda: RANKS)
    percentile: float = 90.0
    nreq: int = 100
    timeout_s: float = 1.0
    alpha: float = 0.7
    err_d: float = 0.0
    err_i: float = -0.5
    adj_d: float = 1.2
    adj_i: float = 2.0
    c_i: float = -0.1
    rate_min: float = 0.05
    rate_max: float = 5000.0
    rate_initial: float = 5000.0
    adjlo_d: float = 10.0
    lc_thresh: int = 20
    degrade: bool = False
    quality_min: float = 0.0
    quality_decrease: float = 0.1
    quality_increase: float = 0.02

    def target_of(self, criticality: Criticality) -> float:
        """A class's own target, or everybody's."""
        return self.targets_ms.get(criticality, self.target_ms)


class ClassSample(NamedTuple):
    """What one class saw since the last sample."""

    histogram: Sequence[float]
    """Latencies of the settled, in the steps of `limiter.model.overload.histogram`."""
    refused: float = 0.0
    """By the rate that this controller steers."""


class ResponseTimeSample(NamedTuple):
    """What a bucket saw since the last sample. Classes of which nothing is known may be absent."""

    elapsed_s: float
    classes: Mapping[Criticality, ClassSample]


Rule = Literal["raise", "resume", "hold", "cut", "drain", "yield", "count", "probe", "degrade", "restore"]


class Reason(NamedTuple):
    """What one class's controller did, and why; in words as text (R11)."""

    criticality: Criticality
    rule: Rule
    percentile: float
    measured_ms: float | None
    current_ms: float | None
    target_ms: float
    before: float
    """Of the rate; of the quality, where the rule is degrade or restore."""
    after: float
    low_count: int

    def __str__(self) -> str:
        """Say it: "critical: p90 1340 ms (target 1000 ms): 120 → 100 requests/s"."""
        told = "nothing was measured"
        if self.current_ms is not None and self.measured_ms is not None:
            told = f"p{self.percentile:g} {self.current_ms:.4g} ms (target {self.target_ms:g} ms)"
        return f"{self.criticality}: {told}: {self._moved()}"

    def _moved(self) -> str:
        moved = f"{self.before:.4g} → {self.after:.4g}"
        if self.rule in ("degrade", "restore"):
            return f"quality {moved}"
        if self.rule == "yield":
            return f"lower classes yield, {self.after:.4g} requests/s stay"
        if self.rule == "drain":
            return f"the queue drains, {self.after:.4g} requests/s stay"
        if self.rule == "resume":
            return f"the queue is gone, back to about what was served: {moved} requests/s"
        if self.rule == "count":
            return f"lower classes are at the floor ({self.low_count}), {self.after:.4g} requests/s stay"
        return f"{moved} requests/s" if self.after != self.before else f"{self.after:.4g} requests/s stay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassState:
    """The controller of one class."""

    rate: float
    """Requests a second."""
    current_ms: float | None = None
    error: float = 0.0
    above: bool = False
    """Above its target when it last ran."""
    refusing: bool = False
    """Its rate refused somebody before it last ran."""
    served_rate: float = math.inf
    """Requests a second that were answered, smoothed; infinite if that is not known."""
    busy_rate: float = 0.0
    """The same while it was above its target; 0 if it never was, or has resumed since."""
    low_count: int = 0
    """Runs above the target while lower classes had nothing left to give."""
    pending: tuple[float, ...] = histogram.EMPTY
    pending_count: float = 0.0
    pending_refused: float = 0.0
    pending_s: float = 0.0

    def divided(self, by: float) -> float:
        """The rate, or what was served if that is less, divided."""
        return min(self.rate, self.served_rate) / by


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTimeState:
    """The controllers of a bucket: one for each class that was seen."""

    classes: Mapping[Criticality, ClassState] = field(default_factory=dict)
    quality: float = 1.0
    reasons: tuple[Reason, ...] = ()
    """Of the controllers that ran in this step."""

    @property
    def overloaded(self) -> bool:
        """Whether any class is above its target."""
        return any(one.above for one in self.classes.values())


def smooth(current: float | None, sample: float, alpha: float) -> float:
    """S2's convention: α is the weight of the old value. The first sample is taken as it is."""
    return sample if current is None else alpha * current + (1 - alpha) * sample


def step(state: ResponseTimeState, sample: ResponseTimeSample, params: ResponseTimeParams) -> ResponseTimeState:
    """Gather a sample, and run the controllers that are due, most critical first. What is no number holds (F-P8)."""
    if not 0 <= sample.elapsed_s < math.inf:
        return replace(state, reasons=())
    quality = min(max(state.quality, params.quality_min), 1.0) if params.degrade else 1.0
    bucket = _Bucket(_gather(state.classes, sample, params), quality, params)
    for criticality in descending(params.ranks):
        if criticality in bucket.classes and _is_due(bucket.classes[criticality], params):
            bucket.run(criticality)
    return ResponseTimeState(classes=bucket.classes, quality=bucket.quality, reasons=tuple(bucket.reasons))


def _gather(
    classes: Mapping[Criticality, ClassState], sample: ResponseTimeSample, params: ResponseTimeParams
) -> dict[Criticality, ClassState]:
    """Every class with what it saw added, and its rate inside the bounds of the policy as it is now."""
    gathered = {}
    for criticality in {**classes, **sample.classes}:
        one = classes.get(criticality) or ClassState(rate=params.rate_initial)
        more = sample.classes.get(criticality) or ClassSample(())
        counted = histogram.count(more.histogram)
        gathered[criticality] = replace(
            one,
            rate=_bounded(one.rate, params),
            pending=histogram.added(one.pending, more.histogram) if counted else one.pending,
            pending_count=one.pending_count + counted,
            pending_refused=one.pending_refused + (more.refused if 0 <= more.refused < math.inf else 0.0),
            pending_s=one.pending_s + sample.elapsed_s,
        )
    return gathered


def _is_due(one: ClassState, params: ResponseTimeParams) -> bool:
    return one.pending_s >= params.timeout_s * _ALMOST or one.pending_count >= params.nreq


def _served_rate(one: ClassState, params: ResponseTimeParams) -> float:
    """What is pending as a rate, smoothed as response times are: few requests come unevenly."""
    if not one.pending_s:
        return one.served_rate
    rate = one.pending_count / one.pending_s
    return rate if one.served_rate == math.inf else smooth(one.served_rate, rate, params.alpha)


def _bounded(rate: float, params: ResponseTimeParams) -> float:
    return min(max(rate, params.rate_min), params.rate_max)


class _Bucket:
    """One step in the making: the classes act on each other and on the one quality."""

    def __init__(self, classes: dict[Criticality, ClassState], quality: float, params: ResponseTimeParams) -> None:
        self.classes = classes
        self.quality = quality
        self.params = params
        self.reasons: list[Reason] = []

    def run(self, criticality: Criticality) -> None:
        """Run the controller of one class on what is pending."""
        before, quality = self._measure(criticality), self.quality
        rule = self._rule(criticality)
        if rule == "yield":
            self._lower(self._lower_than(criticality))
        elif rule in ("degrade", "restore"):
            by = -self.params.quality_decrease if rule == "degrade" else self.params.quality_increase
            self.quality = _quality(quality + by, self.params)
        self._move(criticality, rule)
        self._explain(criticality, rule, before, quality)

    def _measure(self, criticality: Criticality) -> ClassState:
        """Take in what is pending; give back what the class was."""
        before, params = self.classes[criticality], self.params
        measured_ms = percentile(before.pending, params.percentile)
        target_ms = params.target_of(criticality)
        current_ms, error, above = before.current_ms, before.error, False
        served_rate, busy_rate = _served_rate(before, params), before.busy_rate
        if measured_ms is not None:
            current_ms = smooth(current_ms, measured_ms, params.alpha)
            error = (current_ms - target_ms) / target_ms
            above = error > params.err_d
            if above and measured_ms > target_ms and served_rate < math.inf:
                busy_rate = served_rate
        self.classes[criticality] = replace(
            before,
            current_ms=current_ms,
            error=error,
            above=above,
            refusing=before.pending_refused > 0,
            served_rate=served_rate,
            busy_rate=busy_rate,
            low_count=before.low_count if above else 0,
            pending=histogram.EMPTY,
            pending_count=0.0,
            pending_refused=0.0,
            pending_s=0.0,
        )
        self._measured_ms = measured_ms
        return before

    def _rule(self, criticality: Criticality) -> Rule:
        one, params = self.classes[criticality], self.params
        if one.above:
            return self._rule_above(criticality)
        if self._measured_ms is None:
            is_shut = one.refusing and one.rate < 1 / params.timeout_s and not self._is_above(self.classes)
            return "probe" if is_shut else "hold"
        if one.error >= params.err_i or self._is_above(self._higher_than(criticality)):
            return "hold"
        if self.quality < 1.0 and not any(other.refusing for other in self.classes.values()):
            return "restore"
        is_held_back = any(self.classes[name].refusing for name in self._higher_than(criticality))
        return "resume" if one.rate < one.busy_rate / params.adj_d and not is_held_back else "raise"

    def _rule_above(self, criticality: Criticality) -> Rule:
        one, params = self.classes[criticality], self.params
        lower = self._lower_than(criticality)
        assert self._measured_ms is not None
        if self._measured_ms <= params.target_of(criticality):
            return "drain"
        if params.degrade and self.quality > params.quality_min:
            return "degrade"
        if not lower:
            return self._cut_or_drain(one)
        if any(self.classes[name].rate > params.rate_min for name in lower):
            return "yield"
        return self._cut_or_drain(one) if one.low_count + 1 >= params.lc_thresh else "count"

    def _cut_or_drain(self, one: ClassState) -> Rule:
        draining = one.rate * min(DRAIN_MAX, 1 + one.error) <= one.served_rate < math.inf
        return "drain" if draining else "cut"

    def _move(self, criticality: Criticality, rule: Rule) -> None:
        """Move the class's own rate, and count."""
        one, params = self.classes[criticality], self.params
        rate, busy_rate, low_count = one.rate, one.busy_rate, one.low_count
        if rule == "cut":
            rate = one.divided(params.adj_d)
        elif rule == "raise":
            rate += -(one.error - params.c_i) * params.adj_i
        elif rule == "resume":
            rate, busy_rate = busy_rate / params.adj_d, 0.0
        elif rule == "probe":
            rate = min(2 * rate, 1 / params.timeout_s)
        if rule == "count":
            low_count += 1
        rate = _bounded(rate, params)
        self.classes[criticality] = replace(one, rate=rate, busy_rate=busy_rate, low_count=low_count)

    def _lower(self, names: Iterable[Criticality]) -> None:
        for name in names:
            one = self.classes[name]
            self.classes[name] = replace(one, rate=_bounded(one.divided(self.params.adjlo_d), self.params))

    def _lower_than(self, criticality: Criticality) -> list[Criticality]:
        ranks = self.params.ranks
        return [name for name in self.classes if ranks[name] > ranks[criticality]]

    def _higher_than(self, criticality: Criticality) -> list[Criticality]:
        ranks = self.params.ranks
        return [name for name in self.classes if ranks[name] < ranks[criticality]]

    def _is_above(self, names: Iterable[Criticality]) -> bool:
        return any(self.classes[name].above for name in names)

    def _explain(self, criticality: Criticality, rule: Rule, before: ClassState, quality: float) -> None:
        one = self.classes[criticality]
        on_quality = rule in ("degrade", "restore")
        self.reasons.append(
            Reason(
                criticality=criticality,
                rule=rule,
                percentile=self.params.percentile,
                measured_ms=self._measured_ms,
                current_ms=one.current_ms,
                target_ms=self.params.target_of(criticality),
                before=quality if on_quality else before.rate,
                after=self.quality if on_quality else one.rate,
                low_count=one.low_count,
            )
        )


def _quality(quality: float, params: ResponseTimeParams) -> float:
    """Inside its bounds, and exactly on one that is almost reached."""
    if quality < params.quality_min + _QUALITY_GRAIN:
        return params.quality_min
    return 1.0 if quality > 1.0 - _QUALITY_GRAIN else quality
