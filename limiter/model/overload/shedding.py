"""What overload control knows of one bucket, and whom it turns away: the reference for the scripts' part in it.

    turned away   draw < refused share of the class        Q4, G5: the draw in [0, 1) is the node's
                  or the class is limited and has no token  S3: tokens = min(max(1, rate), tokens + elapsed · rate)

The controller sets shares, rates, quality and whether callers are told to slow down; requests and settles count.
Classes stand in the order of `Criticality`: the first is the most critical.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from limiter.model.policy.criticality import Criticality

CLASSES = tuple(Criticality)
CLASS_NUMBERS = {criticality: number for number, criticality in enumerate(CLASSES)}
"""What scripts and reservations call a class."""

QUALITY_FULL = 1.0

FourFloats = tuple[float, float, float, float]
"""A number for each class."""

NO_CLASS: FourFloats = (0.0, 0.0, 0.0, 0.0)


def _zeros() -> list[float]:
    return [0.0] * len(CLASSES)


@dataclass(slots=True, kw_only=True)
class Shedding:
    """Overload control's part of a record, in the order of its layout."""

    quality: float = QUALITY_FULL
    """How good answers should be, 0 to 1 (S4)."""
    overloaded: float = 0.0
    """1 while callers should slow down (Q6)."""
    refused_shares: list[float] = field(default_factory=_zeros)
    """The share of each class's requests that is refused (Q4)."""
    rates: list[float] = field(default_factory=_zeros)
    """Requests a second of each class; 0: not limited (S3)."""
    tokens: list[float] = field(default_factory=_zeros)
    """Requests that each class may send at once."""
    refused: list[float] = field(default_factory=_zeros)
    """Requests of each class that were turned away, so far."""
    timed: list[float] = field(default_factory=_zeros)
    """Settled requests of each class that told how long they took, so far."""
    missed: list[float] = field(default_factory=_zeros)
    """Those of them that took longer than expected."""
    slack_min_ms: float = math.inf
    """The least of expected − actual since the bucket was last listed as touched (Q5)."""
    slack_before_ms: float = math.inf
    """The same between the last two listings: who reads just after one finds both."""

    def copy(self) -> Shedding:
        """The same, apart."""
        return Shedding(
            quality=self.quality,
            overloaded=self.overloaded,
            refused_shares=list(self.refused_shares),
            rates=list(self.rates),
            tokens=list(self.tokens),
            refused=list(self.refused),
            timed=list(self.timed),
            missed=list(self.missed),
            slack_min_ms=self.slack_min_ms,
            slack_before_ms=self.slack_before_ms,
        )


class ShedOrder(NamedTuple):
    """What the controller sets of a bucket's overload control, as absolute values."""

    quality: float = QUALITY_FULL
    overloaded: bool = False
    refused_shares: FourFloats = NO_CLASS
    rates: FourFloats = NO_CLASS


def refill(shedding: Shedding, elapsed_us: float) -> None:
    """Credit each limited class the time that has passed: a second's worth of requests at most, and one at least."""
    for number, rate in enumerate(shedding.rates):
        if rate > 0:
            shedding.tokens[number] = min(shedding.tokens[number] + elapsed_us * rate / 1e6, max(1.0, rate))


def turns_away(shedding: Shedding, number: int, draw: float) -> bool:
    """Whether a request is turned away."""
    if draw < shedding.refused_shares[number]:
        return True
    return shedding.rates[number] != 0 and shedding.tokens[number] < 1


def take(shedding: Shedding, number: int, requests: float) -> None:
    """Debit a class for requests that were let in."""
    if shedding.rates[number] > 0:
        tokens = shedding.tokens[number]
        shedding.tokens[number] = tokens - requests if requests < tokens else 0.0


def begin_epoch(shedding: Shedding) -> None:
    """Begin a new sampling epoch: the bucket is listed again."""
    shedding.slack_before_ms, shedding.slack_min_ms = shedding.slack_min_ms, math.inf


def count(shedding: Shedding, number: int, *, latency_ms: float, expected_ms: float) -> None:
    """One request of a class told how long it took (Q2, Q5)."""
    shedding.timed[number] += 1
    if latency_ms > expected_ms:
        shedding.missed[number] += 1
    slack_ms = expected_ms - latency_ms
    if slack_ms < shedding.slack_min_ms:
        shedding.slack_min_ms = slack_ms


def obey(shedding: Shedding, order: ShedOrder, *, rate_max: float) -> None:
    """Set what the controller decided; a number that makes no sense leaves what was there (F-P8)."""
    if 0 <= order.quality <= 1:
        shedding.quality = order.quality
    shedding.overloaded = float(order.overloaded)
    for number, share in enumerate(order.refused_shares):
        if 0 <= share <= 1:
            shedding.refused_shares[number] = share
    for number, rate in enumerate(order.rates):
        if 0 <= rate <= rate_max:
            _set_rate(shedding, number, rate)


def _set_rate(shedding: Shedding, number: int, rate: float) -> None:
    """A class that was not limited begins with a second's worth; one that was keeps what its new rate allows."""
    most, tokens = max(1.0, rate), shedding.tokens[number]
    if rate == 0:
        tokens = 0.0
    elif shedding.rates[number] == 0 or tokens > most:
        tokens = most
    shedding.rates[number], shedding.tokens[number] = rate, tokens


def is_sound(shedding: Shedding, *, rate_max: float) -> bool:
    """Whether the numbers are such as may have been set. Written so that NaN fails as well."""
    return (
        0 <= shedding.quality <= 1
        and shedding.overloaded in (0.0, 1.0)
        and all(0 <= share <= 1 for share in shedding.refused_shares)
        and all(0 <= rate <= rate_max for rate in shedding.rates)
        and all(0 <= tokens <= rate_max for tokens in shedding.tokens)
    )
