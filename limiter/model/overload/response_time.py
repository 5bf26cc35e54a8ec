"""The admission rate of a bucket, steered by a percentile of its response times: `rules: published` (S1–S4, S10).

    cur  = α·cur + (1 − α)·samp          the weight is on the old value: α = 0.7 here is a = 0.3 of R1
    err  = (cur − target) / target       runs after nreq samples or timeout_s, for each class by itself

    raise     err < err_i, no higher class above its target:  rate += −(err − c_i)·adj_i
    hold      err_i ≤ err ≤ err_d, or a higher class is above its target, or nothing was measured
    cut       err > err_d, and nobody yields:                 rate ÷ adj_d
    yield     err > err_d, lower classes above the floor:     their rates ÷ adjlo_d
    count     err > err_d, lower classes all at the floor:    from the lc_thresh-th time on cut, until err ≤ err_d

With `degrade`, cheaper work comes before refusals (S4); with `degrade: only` nobody is refused (S11):
    degrade   err > err_d, quality above its floor:           quality −= quality_decrease; no rate moves
    restore   err ≤ err_d, nobody refused in the last runs:   quality += quality_increase

A class that has not asked of late yields nothing and shields nobody (S8). Without classes all are measured as one, and
each has a part of the one rate, as large as its part of what is asked.

`limiter.model.overload.in_flight_limit` has the rule that is used by default, and overload.md the two side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from limiter.model.overload import histogram
from limiter.model.overload.histogram import percentile
from limiter.model.policy.criticality import RANKS, Criticality, Ranks, descending

_ALMOST = 1 - 1e-9
_QUALITY_GRAIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTimeParams:
    """A policy's parameters of the published rules, resolved; the published values are the defaults."""

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
    rate_initial: float = 100.0
    adjlo_d: float = 10.0
    lc_thresh: int = 20
    degrade: bool = False
    is_refusing: bool = True
    """False with `degrade: only`, under which rates do not move."""
    unit: str = "requests"
    """The unit of rates: requests, or units of work (S11)."""
    quality_min: float = 0.0
    quality_decrease: float = 0.1
    quality_increase: float = 0.02

    def target_of(self, criticality: Criticality) -> float:
        """Return a class's own target, or the common one."""
        return self.targets_ms.get(criticality, self.target_ms)

    def divided(self, partitions: int) -> ResponseTimeParams:
        """Return the parameters for one of the partitions that divide the bucket: rates are for the whole (S8)."""
        if partitions == 1:
            return self
        return replace(
            self,
            rate_min=self.rate_min / partitions,
            rate_max=self.rate_max / partitions,
            rate_initial=self.rate_initial / partitions,
            adj_i=self.adj_i / partitions,
        )


class ClassSample(NamedTuple):
    """Counts of one class since the last sample."""

    histogram: Sequence[float]
    """Latencies of settled requests, in the steps of `limiter.model.overload.histogram`."""
    refused: float = 0.0
    """Requests refused by the rate that this controller steers."""


class ResponseTimeSample(NamedTuple):
    """Counts of a bucket since the last sample, of the asking classes only."""

    elapsed_s: float
    classes: Mapping[Criticality, ClassSample]


Rule = Literal["raise", "hold", "cut", "yield", "count", "degrade", "restore"]


class Reason(NamedTuple):
    """Reason for a move by one class's controller; `str` gives it in words (R11)."""

    criticality: Criticality
    rule: Rule
    percentile: float
    measured_ms: float | None
    current_ms: float | None
    target_ms: float
    before: float
    """Value of the rate, or of the quality if the rule is degrade or restore."""
    after: float
    low_count: int
    unit: str = "requests"

    def __str__(self) -> str:
        """Return the reason in words: "critical: p90 1340 ms (target 1000 ms): 120 → 100 requests/s"."""
        told = "nothing was measured"
        if self.current_ms is not None and self.measured_ms is not None:
            told = f"p{self.percentile:g} {self.current_ms:.4g} ms (target {self.target_ms:g} ms)"
        return f"{self.criticality}: {told}: {self._moved()}"

    def _moved(self) -> str:
        moved = f"{self.before:.4g} → {self.after:.4g}"
        if self.rule in ("degrade", "restore"):
            return f"quality {moved}"
        if self.rule == "yield":
            return f"lower classes yield, {self.after:.4g} {self.unit}/s stay"
        if self.rule == "count":
            return f"lower classes are at the floor ({self.low_count}), {self.after:.4g} {self.unit}/s stay"
        return f"{moved} {self.unit}/s" if self.after != self.before else f"{self.after:.4g} {self.unit}/s stay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassState:
    """The controller of one class."""

    rate: float
    """Requests per second, or units of work."""
    current_ms: float | None = None
    error: float = 0.0
    above: bool = False
    """True if the class was above its target when the controller last ran."""
    refusing: bool = False
    """True if its rate refused a request before the controller last ran."""
    low_count: int = 0
    """Runs above the target while lower classes had nothing left to give."""
    pending: tuple[float, ...] = histogram.EMPTY
    pending_count: float = 0.0
    pending_refused: float = 0.0
    pending_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTimeState:
    """The controllers of a bucket: one for each class that was seen."""

    classes: Mapping[Criticality, ClassState] = field(default_factory=dict)
    quality: float = 1.0
    reasons: tuple[Reason, ...] = ()
    """Reasons of the controllers that ran in this step."""

    @property
    def is_above(self) -> bool:
        """True if any class is above its target."""
        return any(one.above for one in self.classes.values())

    @property
    def is_refusing(self) -> bool:
        """True if any rate refused a request recently."""
        return any(one.refusing for one in self.classes.values())


def smooth(current: float | None, sample: float, alpha: float) -> float:
    """Return the average by S2's convention: α is the weight of the old value. The first sample is the average."""
    return sample if current is None else alpha * current + (1 - alpha) * sample


def step(state: ResponseTimeState, sample: ResponseTimeSample, params: ResponseTimeParams) -> ResponseTimeState:
    """Add a sample, and run the controllers that are due, most critical first. Invalid ones change nothing (F-P8)."""
    if not 0 <= sample.elapsed_s < math.inf:
        return replace(state, reasons=())
    quality = min(max(state.quality, params.quality_min), 1.0) if params.degrade else 1.0
    bucket = _Bucket(_gather(state.classes, sample, params), quality, params, frozenset(sample.classes))
    for criticality in descending(params.ranks):
        if criticality in bucket.classes and _is_due(bucket.classes[criticality], params):
            bucket.run(criticality)
    return ResponseTimeState(classes=bucket.classes, quality=bucket.quality, reasons=tuple(bucket.reasons))


def _gather(
    classes: Mapping[Criticality, ClassState], sample: ResponseTimeSample, params: ResponseTimeParams
) -> dict[Criticality, ClassState]:
    """Return every class with its sample added, and its rate inside the present bounds of the policy."""
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


def _bounded(rate: float, params: ResponseTimeParams) -> float:
    return min(max(rate, params.rate_min), params.rate_max)


class _Bucket:
    """The working state of one step: the classes act on each other and on the common quality."""

    def __init__(
        self,
        classes: dict[Criticality, ClassState],
        quality: float,
        params: ResponseTimeParams,
        asking: frozenset[Criticality],
    ) -> None:
        self.classes = classes
        self.quality = quality
        self.params = params
        self.asking = asking
        self.reasons: list[Reason] = []

    def run(self, criticality: Criticality) -> None:
        """Run the controller of one class on its pending samples."""
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
        """Add the pending samples; return the class's state before."""
        before, params = self.classes[criticality], self.params
        measured_ms = percentile(before.pending, params.percentile)
        target_ms = params.target_of(criticality)
        current_ms, error, above = before.current_ms, before.error, False
        if measured_ms is not None:
            current_ms = smooth(current_ms, measured_ms, params.alpha)
            error = (current_ms - target_ms) / target_ms
            above = error > params.err_d
        self.classes[criticality] = ClassState(
            rate=before.rate,
            current_ms=current_ms,
            error=error,
            above=above,
            refusing=before.pending_refused > 0,
            low_count=before.low_count if above else 0,
        )
        self._measured_ms = measured_ms
        return before

    def _rule(self, criticality: Criticality) -> Rule:
        one, params = self.classes[criticality], self.params
        if one.above:
            return self._rule_above(criticality)
        is_refusing = any(other.refusing for other in self.classes.values())
        if self.quality < 1.0 and not is_refusing and not self._is_above(self.classes):
            return "restore"
        if self._measured_ms is None or one.error >= params.err_i or not params.is_refusing:
            return "hold"
        return "hold" if self._is_above(self._higher_than(criticality)) else "raise"

    def _rule_above(self, criticality: Criticality) -> Rule:
        one, params = self.classes[criticality], self.params
        if params.degrade and self.quality > params.quality_min:
            return "degrade"
        if not params.is_refusing:
            return "hold"
        lower = self._lower_than(criticality)
        if any(self.classes[name].rate > params.rate_min for name in lower):
            return "yield"
        return "cut" if not lower or one.low_count + 1 >= params.lc_thresh else "count"

    def _move(self, criticality: Criticality, rule: Rule) -> None:
        """Move the class's own rate, and count."""
        one, params = self.classes[criticality], self.params
        rate, low_count = one.rate, one.low_count
        if rule == "cut":
            rate /= params.adj_d
        elif rule == "raise":
            rate += -(one.error - params.c_i) * params.adj_i
        elif rule == "count":
            low_count += 1
        self.classes[criticality] = replace(one, rate=_bounded(rate, params), low_count=low_count)

    def _lower(self, names: Iterable[Criticality]) -> None:
        for name in names:
            one = self.classes[name]
            self.classes[name] = replace(one, rate=_bounded(one.rate / self.params.adjlo_d, self.params))

    def _lower_than(self, criticality: Criticality) -> list[Criticality]:
        ranks = self.params.ranks
        return [name for name in self.classes if name in self.asking and ranks[name] > ranks[criticality]]

    def _higher_than(self, criticality: Criticality) -> list[Criticality]:
        ranks = self.params.ranks
        return [name for name in self.classes if name in self.asking and ranks[name] < ranks[criticality]]

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
                unit=self.params.unit,
            )
        )


def _quality(quality: float, params: ResponseTimeParams) -> float:
    """Return the quality inside its bounds, and exactly at a bound that is almost reached."""
    if quality < params.quality_min + _QUALITY_GRAIN:
        return params.quality_min
    return 1.0 if quality > 1.0 - _QUALITY_GRAIN else quality
