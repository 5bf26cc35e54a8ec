"""Overload control's state in one bucket, and its refusals: the reference for the scripts' part in it.

    turned away   in flight >= limit of the class           S9: all classes together, in requests or in work (S11)
                  or draw < refused share of the class      Q4, G5: the draw in [0, 1) is the node's
                  or the class is limited and has no token  S3: tokens = min(max(1, rate), tokens + elapsed · rate);
                                                            a request takes one, or its charge where rates are in work

    yields        a request whose customer is above its committed rate (S11), or that expects its answer sooner than
                  half of the answers come (Q13): it takes the refusals of others of its class. Once one of the others
                  was refused, one that yields is refused although its draw admits it, and one of the others is spared
                  although its draw refuses it; at most AHEAD_MAX are refused ahead. So the refused share is right
                  whoever asks, and nothing changes where all yield or none does. A limit spares nobody: those that
                  yield are refused from nine tenths of it on, AHEAD_MAX for each of the others that was refused

    lent          quality, state, shares and rates hold until `lent_until_us`; without a controller they end (Q11).
                  Limits stay.

The controller sets them; requests and settles count. Classes stand in the order of `Criticality`: the first is the most
critical.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal, NamedTuple

from limiter.model.policy.criticality import Criticality

CLASSES = tuple(Criticality)
CLASS_NUMBERS = {criticality: number for number, criticality in enumerate(CLASSES)}
"""Numbers of the classes in scripts and reservations."""

QUALITY_FULL = 1.0

LENT_FOR_US = 10_000_000
"""Time after which a throttle ends unless the controller renews it (Q11)."""

LENT_FOR_MAX_US = 60_000_000

RECENT = 50.0
"""Number of a class's latest requests, about, over which its refused share is measured (S8)."""

RECENT_MIN = 10.0
"""Least number of requests in that average, so that two refusals of the first three have little weight."""

OVERLOADED_SHARE = 0.2
"""Refused share of a class from which on its refusals report an overload, even if the controller does not (S8)."""

AHEAD_MAX = 10.0
"""Most requests of a class that are refused ahead of others, and those that one refused at its limit is worth."""

YIELD_LIMIT = 0.9
"""Part of the limit from which on requests that yield are refused."""

MEDIAN_STEP = 1.05
"""Factor by which one answer moves the median response time."""

FourFloats = tuple[float, float, float, float]
"""A number for each class."""

NO_CLASS: FourFloats = (0.0, 0.0, 0.0, 0.0)


class State(IntEnum):
    """A bucket's state, as answers report it."""

    CALM = 0
    DEGRADED = 1
    """Answers should be cheaper than usual (S4); nobody is refused for it."""
    RECOVERING = 2
    """It was overloaded, and throttles are being released."""
    OVERLOADED = 3
    """Callers should slow down (Q6)."""

    @property
    def word(self) -> Literal["calm", "degraded", "recovering", "overloaded"]:
        """The name that answers use."""
        return _WORDS[self]


_WORDS: tuple[Literal["calm", "degraded", "recovering", "overloaded"], ...] = (
    "calm", "degraded", "recovering", "overloaded",
)  # fmt: skip


class OverloadTerms(NamedTuple):
    """The terms of a policy's `overload` block for the scripts."""

    targets_ms: FourFloats = NO_CLASS
    """Response time above which an answer is late, by class; 0: no target."""
    limit_initial: float = 0.0
    """Limit on requests in flight until the controller has read the bucket; 0: not limited (S8)."""


def _zeros() -> list[float]:
    return [0.0] * len(CLASSES)


@dataclass(slots=True, kw_only=True)
class Shedding:
    """Overload control's part of a record, in the order of its layout. The record itself counts misses."""

    quality: float = QUALITY_FULL
    """Quality that answers should have, 0 to 1 (S4)."""
    state: float = 0.0
    """The number of a `State`."""
    lent_until_us: float = 0.0
    """Time at which quality, state, shares and rates end; 0: none is in force, whatever their values (Q11)."""
    response_ms: float = 0.0
    """Median response time while the bucket is overloaded; 0: unknown, or it is not (Q13)."""
    refused_shares: list[float] = field(default_factory=_zeros)
    """The share of each class's requests that is to be refused (Q4)."""
    rates: list[float] = field(default_factory=_zeros)
    """Requests per second of each class; 0: not limited (S3)."""
    tokens: list[float] = field(default_factory=_zeros)
    """Requests that each class may send at once, or their work; below 0 after a request that was charged more (S11)."""
    limits: list[float] = field(default_factory=_zeros)
    """Requests in flight, of all classes together, at which each class is refused; 0: not limited (S9)."""
    asked: list[float] = field(default_factory=_zeros)
    """Requests of each class, so far."""
    refused: list[float] = field(default_factory=_zeros)
    """Those of them that were turned away."""
    refused_recently: list[float] = field(default_factory=_zeros)
    """The share of the latest requests of each class that was turned away, about `RECENT` of them (S8)."""
    timed: list[float] = field(default_factory=_zeros)
    """Settled requests of each class, so far; each has taken a known time (Q8)."""
    late: list[float] = field(default_factory=_zeros)
    """Those of them that took longer than the target of their class, or failed where the policy counts that."""
    seconds: float = 0.0
    """Sum of the response times of all of them."""
    slack_min_ms: float = math.inf
    """Minimum of expected − actual since the bucket was last listed as touched (Q5)."""
    slack_before_ms: float = math.inf
    """The same between the last two listings, so that a read just after a listing finds both."""
    ahead: list[float] = field(default_factory=_zeros)
    """Requests of each class that were refused so that others are spared, plus 1; 0: none of the others was refused yet
    (Q13, S11)."""
    median_ms: float = 0.0
    """Median response time of the answers that did not fail, about; 0: unknown (Q13)."""
    failed: float = 0.0
    """Settled requests whose outcome counts as late, however fast the answer (Q8)."""

    def copy(self) -> Shedding:
        """Return an independent copy."""
        copied = replace(self)
        for name in _LISTS:
            setattr(copied, name, list(getattr(self, name)))
        return copied


_LISTS = tuple(name for name in Shedding.__dataclass_fields__ if isinstance(getattr(Shedding(), name), list))


class ShedOrder(NamedTuple):
    """The controller's order for a bucket's overload control, in absolute values."""

    quality: float = QUALITY_FULL
    state: State = State.CALM
    lent_for_us: int = LENT_FOR_US
    """Time for which all values but the limits hold."""
    response_ms: float = 0.0
    refused_shares: FourFloats = NO_CLASS
    rates: FourFloats = NO_CLASS
    limits: FourFloats = NO_CLASS


def begin(terms: OverloadTerms, share: float) -> Shedding:
    """Return the state of a new bucket with a share of its limit: it may be limited from the start (S8)."""
    limit = max(1.0, terms.limit_initial * share) if terms.limit_initial > 0 else 0.0
    return Shedding(limits=[limit] * len(CLASSES))


def refill(shedding: Shedding, elapsed_us: float) -> None:
    """Credit each limited class the time that has passed: a second's worth of requests at most, and one at least."""
    if shedding.lent_until_us == 0:
        return
    for number, rate in enumerate(shedding.rates):
        if rate > 0:
            shedding.tokens[number] = min(shedding.tokens[number] + elapsed_us * rate / 1e6, max(1.0, rate))


def lapse(shedding: Shedding, now_us: int) -> None:
    """End lent values whose time is over, or would be longer because the clock went back (Q11)."""
    until_us = shedding.lent_until_us
    if until_us > 0 and not now_us < until_us <= now_us + LENT_FOR_MAX_US:
        _end(shedding)


def _end(shedding: Shedding) -> None:
    shedding.quality, shedding.state, shedding.lent_until_us, shedding.response_ms = QUALITY_FULL, 0.0, 0.0, 0.0
    shedding.refused_shares, shedding.rates, shedding.tokens = _zeros(), _zeros(), _zeros()
    shedding.ahead = _zeros()


class Turn(NamedTuple):
    """The decision on one request, and its class's `ahead` once it is in force."""

    is_refused: bool
    ahead: float


def turns_away(
    shedding: Shedding,
    number: int,
    draw: float,
    *,
    in_flight: float,
    expected_ms: float,
    over_committed: bool,
    free: float = 1.0,
    requests: float = 1.0,
) -> Turn:
    """Decide if a request is turned away. `free` is the part of the limit that is not lent (B8).

    An expectation of −inf means that the draw is that of a session: it is not exchanged (S13).
    """
    is_lent, ahead = shedding.lent_until_us > 0, shedding.ahead[number]
    is_exchanged = expected_ms != -math.inf
    yields = over_committed or (is_lent and is_exchanged and expected_ms < shedding.response_ms)
    limit = shedding.limits[number] * free
    if limit > 0:
        if in_flight >= limit:
            return Turn(True, ahead if yields else _fewer_ahead(ahead, requests))
        if yields and 1 <= ahead < 1 + AHEAD_MAX and in_flight >= limit * YIELD_LIMIT:
            return Turn(True, ahead + requests)
    if not is_lent:
        return Turn(False, ahead)
    share, rate = shedding.refused_shares[number], shedding.rates[number]
    is_drawn = draw < share
    is_spared = is_drawn and is_exchanged and not yields and ahead >= 1 + requests
    if is_drawn and not is_spared:
        return Turn(True, ahead if yields or ahead > 1 else 1.0)
    if rate != 0 and shedding.tokens[number] < 1:
        return Turn(True, ahead if yields else _fewer_ahead(ahead, requests))
    if is_spared:
        return Turn(False, ahead - requests)
    if yields and is_exchanged and 1 <= ahead < 1 + AHEAD_MAX and (share > 0 or rate != 0):
        return Turn(True, ahead + requests)
    return Turn(False, ahead)


def _fewer_ahead(ahead: float, requests: float) -> float:
    """Return `ahead` after one that does not yield was refused at a limit."""
    fewer = ahead - AHEAD_MAX * requests
    return fewer if fewer > 1 else 1.0


def ask(shedding: Shedding, number: int, requests: float, *, refused: bool) -> None:
    """Count requests of a class, turned away or not."""
    asked = shedding.asked[number] + requests
    shedding.asked[number] = asked
    if refused:
        shedding.refused[number] += requests
    told, recently = 1.0 if refused else 0.0, shedding.refused_recently[number]
    weight = min(1.0, requests / min(max(asked, RECENT_MIN), RECENT))
    shedding.refused_recently[number] = recently + (told - recently) * weight


def take(shedding: Shedding, number: int, requests: float, work: float | None = None) -> None:
    """Debit a class for admitted requests, or for their work where rates are in work (S11)."""
    if shedding.lent_until_us > 0 and shedding.rates[number] > 0:
        tokens = shedding.tokens[number]
        if work is not None:
            shedding.tokens[number] = tokens - work
        else:
            shedding.tokens[number] = tokens - requests if requests < tokens else 0.0


def share_told(shedding: Shedding, number: int) -> float:
    """Return the refused share of a class, as answers report it: the larger of the set and the measured share."""
    recently = shedding.refused_recently[number]
    return max(shedding.refused_shares[number], recently) if shedding.lent_until_us > 0 else recently


def state_told(shedding: Shedding, number: int, *, turned_away: bool) -> State:
    """Return the bucket's state, as the answer to a request of a class reports it."""
    if turned_away and share_told(shedding, number) >= OVERLOADED_SHARE:
        return State.OVERLOADED
    return State(int(shedding.state)) if shedding.lent_until_us > 0 else State.CALM


def begin_epoch(shedding: Shedding) -> None:
    """Begin a new sampling epoch: the bucket is listed again."""
    shedding.slack_before_ms, shedding.slack_min_ms = shedding.slack_min_ms, math.inf


def count(shedding: Shedding, number: int, *, latency_ms: float, expected_ms: float, target_ms: float) -> None:
    """Count one answered request of a class. An expectation of −inf means that it failed, however fast (Q2, Q5, Q8)."""
    failed = expected_ms == -math.inf
    shedding.timed[number] += 1
    shedding.seconds += latency_ms / 1000
    if failed or 0 < target_ms < latency_ms:
        shedding.late[number] += 1
    if failed:
        shedding.failed += 1
    slack_ms = expected_ms - latency_ms
    if slack_ms < shedding.slack_min_ms and not failed:
        shedding.slack_min_ms = slack_ms
    if not failed:
        shedding.median_ms = _median_ms(shedding.median_ms, latency_ms)


def _median_ms(known_ms: float, latency_ms: float) -> float:
    """Return the median after one answer: a step towards it."""
    if not known_ms > 0:
        return latency_ms
    if latency_ms > known_ms:
        return known_ms * MEDIAN_STEP
    return known_ms / MEDIAN_STEP if latency_ms < known_ms else known_ms


def obey(shedding: Shedding, order: ShedOrder, *, rate_max: float, now_us: int) -> None:
    """Set the values of the controller's order; an invalid number leaves the old value (F-P8)."""
    if shedding.lent_until_us == 0:
        _end(shedding)
    if 0 <= order.quality <= 1:
        shedding.quality = order.quality
    if order.state in _STATES:
        shedding.state = float(order.state)
    if 0 < order.lent_for_us <= LENT_FOR_MAX_US:
        shedding.lent_until_us = float(now_us + order.lent_for_us)
    if 0 <= order.response_ms <= rate_max:
        shedding.response_ms = order.response_ms
    for number, share in enumerate(order.refused_shares):
        if 0 <= share <= 1:
            shedding.refused_shares[number] = share
    for number, rate in enumerate(order.rates):
        if 0 <= rate <= rate_max:
            _set_rate(shedding, number, rate)
    for number, limit in enumerate(order.limits):
        if 0 <= limit <= rate_max:
            shedding.limits[number] = limit


_STATES = frozenset(map(float, State))


def _set_rate(shedding: Shedding, number: int, rate: float) -> None:
    """Set a class's rate. A newly limited class begins with one second's tokens; others keep what the rate allows."""
    most, tokens = max(1.0, rate), shedding.tokens[number]
    if rate == 0:
        tokens = 0.0
    elif shedding.rates[number] == 0 or tokens > most:
        tokens = most
    shedding.rates[number], shedding.tokens[number] = rate, tokens


def is_sound(shedding: Shedding, *, rate_max: float) -> bool:
    """Return True if all values in force are valid. Written so that NaN fails as well."""
    if not (0 <= shedding.lent_until_us <= rate_max and _are_within(shedding.limits, 0, rate_max)):
        return False
    if not _are_within(shedding.ahead, 0, rate_max):
        return False
    return shedding.lent_until_us == 0 or (
        0 <= shedding.quality <= 1
        and shedding.state in _STATES
        and 0 <= shedding.response_ms <= rate_max
        and _are_within(shedding.refused_shares, 0, 1)
        and _are_within(shedding.rates, 0, rate_max)
        and _are_within(shedding.tokens, -rate_max, rate_max)
    )


def _are_within(values: list[float], least: float, most: float) -> bool:
    # Not a loop: a controller checks thousands of records in a tenth of a second.
    a, b, c, d = values
    return least <= a <= most and least <= b <= most and least <= c <= most and least <= d <= most
