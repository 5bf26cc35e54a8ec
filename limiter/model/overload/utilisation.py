"""Refusals while a service reports that it is too busy (G5).

    load   = max over signals of smoothed / target    smoothed += (1 − e^(−t / smoothing_s)) · (report − smoothed)
    level += log2(load) · t / (4 · smoothing_s)       t: since the report before
    admitted share of the k-th asking class, least critical first = 2^−max(0, level − CLASS_OCTAVES · k); k = 0, 1, …

    above target   the level rises by the excess in octaves: a load of twice the target is one octave
    at target      it stays: what is refused now is what keeps the load there
    below target   it falls likewise
    silent         no signal for longer than stale_s: it falls by SILENCE_OCTAVES; a shorter silence holds it (F-P8)

Each octave of level halves what the marginal class may send; the next class is touched when the one before it is
down to a quarter. As load goes with what is admitted, an octave of level is an octave of load however far
the offered load lies above the target and whichever class sends it, so one gain suits all. 1 / (4 · smoothing_s) is
the largest that does not overshoot behind a first-order filter. Rank 0 is never refused. A class in which nobody asks
has no octaves: the level would climb through it for seconds, and nothing would be refused (S8).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from limiter.model.policy.criticality import RANKS, Ranks, shed_order

CLASS_OCTAVES = 2.0
LAST_OCTAVES = 10.0
"""Octaves by which the last class that may be refused can be cut: to a thousandth."""
SILENCE_OCTAVES = -1.0
NEAR = 0.95
"""Part of the target above which the load still counts as too high."""
EXCESS_MAX = 4.0
"""Largest excess of a signal in octaves, so that one absurd report cannot move the level far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilisationParams:
    """A policy's parameters for utilisation, resolved."""

    target: float = 0.8
    targets: Mapping[str, float] = field(default_factory=dict)
    """Signals with a target of their own, in their own unit."""
    smoothing_s: float = 1.0
    stale_s: float = 10.0
    ranks: Ranks = field(default_factory=lambda: RANKS)


class UtilisationSample(NamedTuple):
    """Reports of services since the last sample; a signal with several reports has their mean."""

    elapsed_s: float
    loads: Mapping[str, float]
    asking: Sequence[float] | None = None
    """Ranks of the classes that asked recently; None: all of them."""


class Signal(NamedTuple):
    """One kind of load, smoothed."""

    load: float
    age_s: float = 0.0
    """Time since the last report."""
    covers_s: float = 0.0
    """Time that this step's report covers, since the report before; 0 without a report."""


Rule = Literal["shed", "release", "hold", "silent"]


class Reason(NamedTuple):
    """Reason for the level; `str` gives it in words (R11)."""

    rule: Rule
    signal: str
    load: float
    target: float
    before: float
    after: float

    def __str__(self) -> str:
        """Return the reason in words: "cpu 1.2 (target 0.8): level 0 → 0.073"."""
        told = f"{self.signal} {self.load:.3g} (target {self.target:g})" if self.signal else "no signal"
        moved = f"{self.before:.3g} → {self.after:.3g}" if self.after != self.before else f"stays {self.after:.3g}"
        return f"{told}: level {moved}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilisationState:
    """The level, and the smoothed signals it follows."""

    level: float = 0.0
    signals: Mapping[str, Signal] = field(default_factory=dict)
    load: float = 0.0
    """Load of the busiest signal, as a share of its target."""
    reason: Reason | None = None

    @property
    def is_refusing(self) -> bool:
        """True if requests are refused."""
        return self.level > 0

    @property
    def is_above(self) -> bool:
        """True if the load is at or near its target, around which it stays while requests are refused."""
        return self.load > NEAR


def asked_order(ranks: Ranks, asking: Iterable[float] | None = None) -> tuple[float, ...]:
    """Return the distinct asking ranks that may be refused, least critical first; the first rank if none asks."""
    order = shed_order(ranks)
    if asking is None:
        return order
    asked = frozenset(asking)
    return tuple([rank for rank in order if rank in asked]) or order[:1]


def level_max(order: Sequence[float]) -> float:
    """Return the level at which the most critical refusable class is cut to a thousandth; 0 if there is none."""
    return CLASS_OCTAVES * (len(order) - 1) + LAST_OCTAVES if order else 0.0


def refusal_share(level: float, rank: float, order: Sequence[float]) -> float:
    """Return the share of a rank's requests that is refused, given the asking ranks."""
    if rank <= 0:
        return 0.0
    first = CLASS_OCTAVES * sum(other > rank for other in order)
    return 1 - math.exp2(-max(0.0, level - first))


def step(state: UtilisationState, sample: UtilisationSample, params: UtilisationParams) -> UtilisationState:
    """Smooth the reports; move the level by the excess of the busiest signal. Invalid ones change nothing (F-P8)."""
    if not 0 <= sample.elapsed_s < math.inf:
        return state
    signals = _smoothed(state.signals, sample, params)
    busiest = max(signals, key=lambda name: signals[name].load / _target(name, params), default="")
    if busiest:
        load, target = signals[busiest].load, _target(busiest, params)
        octaves, covers_s = _octaves(load / target), signals[busiest].covers_s
        rule: Rule = "hold" if not covers_s or not octaves else "shed" if octaves > 0 else "release"
    else:
        load, target, octaves, covers_s, rule = 0.0, params.target, SILENCE_OCTAVES, sample.elapsed_s, "silent"
    # A late report must not move the level further than the filter can follow.
    moved = state.level + octaves * min(covers_s, params.smoothing_s) / (4 * params.smoothing_s)
    level = min(max(moved, 0.0), level_max(asked_order(params.ranks, sample.asking)))
    reason = Reason(rule=rule, signal=busiest, load=load, target=target, before=state.level, after=level)
    return UtilisationState(level=level, signals=signals, load=load / target, reason=reason)


def _target(name: str, params: UtilisationParams) -> float:
    return params.targets.get(name, params.target)


def _octaves(ratio: float) -> float:
    return max(-EXCESS_MAX, min(EXCESS_MAX, math.log2(ratio))) if ratio > 0 else -EXCESS_MAX


def _smoothed(signals: Mapping[str, Signal], sample: UtilisationSample, params: UtilisationParams) -> dict[str, Signal]:
    """Return every signal that is not stale. The first report is the average."""
    smoothed = {}
    for name in {**signals, **sample.loads}:
        known, load = signals.get(name), sample.loads.get(name, math.nan)
        covers_s = sample.elapsed_s + (known.age_s if known else 0.0)
        if 0 <= load < math.inf:
            weight = 1 - math.exp(-covers_s / params.smoothing_s)
            before = known.load if known else load
            smoothed[name] = Signal(before + weight * (load - before), 0.0, covers_s)
        elif known and covers_s <= params.stale_s:
            smoothed[name] = Signal(known.load, covers_s)
    return smoothed
