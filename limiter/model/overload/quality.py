"""The quality of answers while a bucket is overloaded: cheaper work before refusals (S4, S8, S11).

    fall     answers are late, or requests were refused, and quality is above its floor:  quality −= decrease
    rise     answers are in time, and nobody was refused of late:                         quality += increase
    hold     anything else, and until max(1 s, target) has passed since it last moved: so long answers need to follow

While quality can still fall, the limit on what is in flight is ROOM · capacity · target, so that cheaper answers come
before refusals and the queue stays bounded meanwhile.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

ROOM = 2.0
_GRAIN = 1e-9

Rule = Literal["degrade", "restore"]


class QualityParams(NamedTuple):
    """A policy's parameters for lowering quality."""

    least: float = 0.0
    decrease: float = 0.1
    increase: float = 0.02


class Quality(NamedTuple):
    """The quality, and the time since it last moved."""

    value: float = 1.0
    unmoved_s: float = math.inf


FULL = Quality()


class Reason(NamedTuple):
    """Reason for a move of quality; `str` gives it in words (R11)."""

    rule: Rule
    before: float
    after: float
    late_share: float

    def __str__(self) -> str:
        """Return the reason in words: "23 % of the answers were late: quality 0.8 → 0.7"."""
        why = f"{self.late_share:.3g} % of the answers were late" if self.rule == "degrade" else "answers are in time"
        return f"{why}: quality {self.before:.4g} → {self.after:.4g}"


def step(
    quality: Quality, params: QualityParams, *, elapsed_s: float, target_s: float, is_late: bool, is_calm: bool
) -> Quality:
    """Move the quality, if it is due."""
    value, unmoved_s = min(max(quality.value, params.least), 1.0), quality.unmoved_s + elapsed_s
    moved = value
    if unmoved_s >= max(1.0, target_s) * (1 - _GRAIN):
        if is_late:
            moved = _bounded(value - params.decrease, params.least)
        elif is_calm:
            moved = _bounded(value + params.increase, params.least)
    return Quality(moved, unmoved_s if moved == value else 0.0)


def _bounded(value: float, least: float) -> float:
    """Return the value inside its bounds, and exactly at a bound that is almost reached."""
    if value < least + _GRAIN:
        return least
    return 1.0 if value > 1.0 - _GRAIN else value
