"""A limit divided over partitions, by demand (B5).

    share = floor + (1 − n · floor) · demand ÷ total demand,    floor = FLOOR / n

no demand anywhere    equal shares, 1 / n
little of it          no partition needs more than an equal share: nothing is lent, and lent shares end
small differences     leave them
larger ones           lower first; once that is confirmed, raise, within the room that it made
unknown anywhere      leave them all, and renew lent shares (F-P8)

Shares are lent. One above 1/n ends first and falls back to 1/n, one below ends MARGIN_S later and rises to 1/n: a
controller that dies leaves equal shares behind, and never more than the limit on the way. A write that is not
confirmed counts as done or as not done, whichever is worse, so that at every moment the shares sum to at most one,
however many of the writes arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum, inf, isfinite
from typing import NamedTuple

from limiter.model.control.smoothing import smooth

FLOOR = 0.1
"""Least share of a partition, as a part of an equal share, so that new demand is served until its share grows."""
MOVE_MIN = 0.05
"""Differences below this part of an equal share are left alone."""
DEMAND_ALPHA = 0.1
RAISED_FOR_S = 10.0
MARGIN_S = 5.0
"""Extra time that a lowered share lasts. Longer than a write may take to arrive."""
LOWERED_FOR_S = RAISED_FOR_S + MARGIN_S
RENEW_S = RAISED_FOR_S / 2
"""Time left of a share at which it is renewed."""
NEED_MIN = 0.5
"""A partition with demand below this part of an equal share needs no more than an equal share."""

_TOTAL = 1.0 - 1e-9  # sums stay below one in spite of rounding


class Held(NamedTuple):
    """The largest share that one partition may hold, as far as is known."""

    share: float
    until_s: float
    """For a share below 1/n: the earliest time that it may end. Above: the latest."""


class Write(NamedTuple):
    """A share to be lent to a partition."""

    partition: int
    share: float
    for_s: float


def follow(demand: float | None, sample: float, *, cycles: float = 1.0) -> float:
    """Return the smoothed demand of a partition (work units per second, with refused requests) after a sample."""
    if not (isfinite(sample) and sample >= 0):
        return demand or 0.0
    return smooth(demand, sample, DEMAND_ALPHA, cycles)


def weight(cycles: float) -> float:
    """Return the ratio of smoothed to true demand, for an average that began at zero so many cycles ago."""
    missing: float = (1.0 - DEMAND_ALPHA) ** cycles
    return 1.0 - missing


def at(held: Sequence[Held], now_s: float) -> list[float]:
    """Return the largest share that each partition may hold at a time."""
    equal = 1.0 / len(held)
    return [lent.share if now_s < lent.until_s else equal for lent in held]


def target(shares: Sequence[float], demand: Sequence[float]) -> list[float]:
    """Return the shares that suit the demand; the present ones if it is unknown (F-P8) or has hardly moved."""
    equal = 1.0 / len(shares)
    total = sum(demand)
    if not (isfinite(total) and min(demand) >= 0):
        return list(shares)
    if total > 0:
        wanted = [_TOTAL * ((1.0 - FLOOR) * (one / total) + FLOOR * equal) for one in demand]
    else:
        wanted = [_TOTAL * equal] * len(shares)
    off = max(abs(one - other) for one, other in zip(wanted, shares, strict=True))
    return wanted if off > MOVE_MIN * equal else list(shares)


def is_needed(demand: Sequence[float], *, committed: float) -> bool:
    """Return True if an equal share may be too little for a partition's demand, or that demand is unknown (NaN)."""
    little = NEED_MIN * committed / len(demand)
    return not all(one <= little for one in demand)


def is_due(held: Sequence[Held], wanted: Sequence[float], now_s: float) -> bool:
    """Return True if shares must be moved, or renewed before they end."""
    equal = 1.0 / len(held)
    if list(wanted) != at(held, now_s):
        return True
    lent = [one for one in held if now_s < one.until_s and one.share != equal]
    return any(one.until_s - now_s < RENEW_S + (MARGIN_S if one.share < equal else 0.0) for one in lent)


def lowers(held: Sequence[Held], wanted: Sequence[float], now_s: float) -> list[Write]:
    """Return the first writes: shares that fall, and shares that stay below an equal share and must not end."""
    equal = 1.0 / len(held)
    raised_for_s = _raised_for_s(held, now_s)
    writes = []
    for partition, (share, goal) in enumerate(zip(at(held, now_s), wanted, strict=True)):
        if share < equal or goal <= equal < share:
            writes.append(Write(partition, min(share, goal), LOWERED_FOR_S))
        elif goal < share:
            # A share above, or equal to, an equal share must not outlast the lower ones.
            above = goal > equal and raised_for_s > 0
            writes.append(Write(partition, *((goal, raised_for_s) if above else (min(goal, equal), LOWERED_FOR_S))))
    return writes


def raises(held: Sequence[Held], wanted: Sequence[float], now_s: float) -> list[Write]:
    """Return the next writes, after the first are confirmed: shares that rise, as far as there is room."""
    equal = 1.0 / len(held)
    shares = at(held, now_s)
    room = max(0.0, _TOTAL - fsum(shares))
    asked = fsum(goal - share for share, goal in zip(shares, wanted, strict=True) if goal > share)
    part = min(1.0, room / asked) if asked > 0 else 0.0
    raised_for_s = _raised_for_s(held, now_s)
    writes = []
    for partition, (share, goal) in enumerate(zip(shares, wanted, strict=True)):
        risen = share + part * (goal - share) if goal > share else share
        if risen < equal and goal > share:
            writes.append(Write(partition, risen, LOWERED_FOR_S))
        elif risen > equal and goal >= share and raised_for_s > 0:
            writes.append(Write(partition, risen, raised_for_s))
    return writes


def plan(held: Sequence[Held], demand: Sequence[float], now_s: float) -> tuple[list[Write], list[Write]]:
    """Return the shares to lower, and the shares to raise once the first are confirmed."""
    wanted = target(at(held, now_s), demand)
    lowered = lowers(held, wanted, now_s)
    return lowered, raises(confirmed(held, lowered, now_s), wanted, now_s)


def confirmed(held: Sequence[Held], writes: Iterable[Write], sent_s: float) -> list[Held]:
    """Return the shares after these writes, sent at a time, are confirmed."""
    after = list(held)
    for write in writes:
        after[write.partition] = Held(write.share, sent_s + write.for_s)
    return after


def unconfirmed(held: Sequence[Held], writes: Iterable[Write], sent_s: float) -> list[Held]:
    """Return the shares if these writes are unconfirmed: in each partition the worse of done and not done."""
    equal = 1.0 / len(held)
    shares, after = at(held, sent_s), list(held)
    for write in writes:
        old = Held(shares[write.partition], held[write.partition].until_s)
        new = Held(write.share, sent_s + write.for_s)
        above = [lent.until_s for lent in (old, new) if lent.share > equal]
        until_s = max(above) if above else min(old.until_s, new.until_s)
        after[write.partition] = Held(max(old.share, new.share), until_s)
    return after


def _raised_for_s(held: Sequence[Held], now_s: float) -> float:
    """Return the time for which a share may exceed an equal one: no lower share may end before."""
    equal = 1.0 / len(held)
    lowered_until_s = min((lent.until_s for lent in held if now_s < lent.until_s and lent.share < equal), default=inf)
    return min(RAISED_FOR_S, lowered_until_s - MARGIN_S - now_s)
