"""The number of users over time: steady, ramp, spike, soak.

A shape consists of stretches, each a share of the duration in which the users go from one multiple of the nominal
number to another in a straight line. The same shape fits five seconds and five hours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a run."""

    share: float
    from_users: float
    """Multiples of the nominal number."""
    to_users: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A course of the number of users, and its default duration."""

    default_s: float
    stretches: tuple[Stretch, ...]


SHAPES = {
    "steady": Shape(30, (Stretch(share=1.0, from_users=1.0, to_users=1.0),)),
    "ramp": Shape(
        30, (Stretch(share=0.8, from_users=0.1, to_users=2.0), Stretch(share=0.2, from_users=2.0, to_users=2.0))
    ),
    "spike": Shape(
        30,
        (
            Stretch(share=0.3, from_users=0.4, to_users=0.4),
            Stretch(share=0.4, from_users=3.0, to_users=3.0),
            Stretch(share=0.3, from_users=0.4, to_users=0.4),
        ),
    ),
    "soak": Shape(
        600, (Stretch(share=0.05, from_users=0.1, to_users=1.0), Stretch(share=0.95, from_users=1.0, to_users=1.0))
    ),
}


def users_at(shape: Shape, at_s: float, *, duration_s: float, nominal_users: int) -> int | None:
    """Return the number of users; None once the run is over."""
    began_s = 0.0
    for stretch in shape.stretches:
        lasts_s = stretch.share * duration_s
        if at_s < began_s + lasts_s:
            gone = max(0.0, at_s - began_s) / lasts_s
            multiple = stretch.from_users + (stretch.to_users - stretch.from_users) * gone
            return max(1, round(multiple * nominal_users))
        began_s += lasts_s
    return None
