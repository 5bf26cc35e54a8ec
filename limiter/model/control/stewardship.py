"""The controller's operations on a slot that it owns: the reference for `lua/lease.lua`, `sample.lua`, `steer.lua`.

    owner   the controller that holds the lease; its fence number grows each time the lease is taken (F-P7)
    sample  take the names of the buckets that changed, so that they are listed again when they next change
    steer   set absolute values: cap, learned charge, unit, share, overload control; invalid ones are ignored (F-P8)

A share ends by itself: a controller that is gone leaves equal parts behind, never more than the limit (B5).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from limiter.model.bucket import learned
from limiter.model.bucket.bucket import (
    KIND,
    RATE_MAX,
    RECORD_FLAGS,
    Flags,
    Params,
    Record,
    adopt,
    advance,
    recount,
    refill,
    share_of,
)
from limiter.model.overload import shedding
from limiter.model.overload.shedding import ShedOrder

SHARE_MIN = 1e-6
"""A smaller share would starve its partition, and is ignored."""

SHARE_FOR_MAX_US = 3_600_000_000
"""Longest time for which a share is lent."""


class Lease(NamedTuple):
    """The right to steer a slot until another controller takes it."""

    owner: bytes
    fence: int
    left_ms: int = 0
    """Time left when it was taken."""


class Steer(NamedTuple):
    """Absolute values for one bucket; None leaves a value unchanged."""

    bucket: str
    params: Params
    cap: float | None = None
    """Requests per second of a bucket that counts requests."""
    charge: float | None = None
    """The learned charge (W8)."""
    requests_for: float | None = None
    """Work to be settled until an auto bucket stops counting requests (R10); 0 = count work at once."""
    share: float | None = None
    """Part of a divided rate limit. A quota's division is fixed: used work cannot be taken back."""
    share_for_us: int = 0
    state: bytes | None = None
    """The controller's own state, kept as long as the bucket."""
    overload: ShedOrder | None = None
    """Order for a bucket whose policy has an `overload` block."""
    charges: tuple[tuple[int, float], ...] = ()
    """Charges learned by the values of `learn_by`: ids and charges (W15)."""
    lasts: bool = False
    """True if the state outlives its bucket by a day (R15)."""

    @property
    def only_keeps(self) -> bool:
        """True if nothing but the state is written, and the bucket stays unchanged."""
        return (self.cap, self.charge, self.requests_for, self.share, self.overload) == (None,) * 5 and not self.charges


class SteerStatus(IntEnum):
    """Result of a steer."""

    DONE = 1
    ABSENT = 2
    """The bucket does not exist, and no share required its creation."""
    CORRUPT = 3
    """The value is not a valid record, and stays unchanged (F-S11)."""


def gives_share(steer: Steer) -> bool:
    """Return True if the bucket is divided and the share is valid."""
    if steer.share is None or not steer.params.is_divided or steer.params.is_quota:
        return False
    return SHARE_MIN <= steer.share <= 1 and 0 < steer.share_for_us <= SHARE_FOR_MAX_US


def steer_bucket(record: Record, steer: Steer, now_us: int) -> None:
    """Refill a bucket up to now, then set the values."""
    params = steer.params
    caps_only = _caps_only(record, steer)
    if caps_only:
        # The adoption below covers both the policy and the cap.
        refill(record, now_us)
        assert steer.cap is not None
        record.rate, record.committed = steer.cap, params.committed * share_of(record, params, now_us)
    elif params.holds(now_us):
        advance(record, params, now_us)
    else:
        refill(record, now_us)
    if steer.overload is not None and record.shedding is not None:
        shedding.obey(record.shedding, steer.overload, rate_max=RATE_MAX, now_us=now_us)
    if steer.charge is not None and 0 < steer.charge <= RATE_MAX:
        record.charge = steer.charge
    for id_, charge in steer.charges:
        if Flags.LEARNS in record.flags and 0 < charge <= RATE_MAX:
            learned.make(record.learned, id_).charge = charge
    if params.is_quota:
        return
    if gives_share(steer):
        assert steer.share is not None
        record.share, record.share_until_us = steer.share, float(now_us + steer.share_for_us)
        record.share_partitions = float(params.partitions)
        adopt(record, params, now_us)
    if not caps_only:
        _set_unit_and_cap(record, steer, now_us)
    adopt(record, params, now_us)


def _caps_only(record: Record, steer: Steer) -> bool:
    """Return True if the record has its policy's kind and takes a cap but no share, as most rows do."""
    if steer.cap is None or steer.share is not None or record.flags & KIND != Flags.COUNTS_REQUESTS:
        return False
    return record.flags == steer.params.flags & RECORD_FLAGS and 0 < steer.cap <= RATE_MAX


def _set_unit_and_cap(record: Record, steer: Steer, now_us: int) -> None:
    params = steer.params
    cap = steer.cap if steer.cap is not None and 0 < steer.cap <= RATE_MAX else None
    requests_for = steer.requests_for
    if requests_for is not None and not (params.is_auto and 0 <= requests_for <= RATE_MAX):
        requests_for = None
    # Work too small to change the sum lends nothing: the bucket would only change its unit and back.
    lends = requests_for is not None and record.work_settled + requests_for > record.work_settled
    if requests_for is not None and lends != record.counts_requests:
        share = share_of(record, params, now_us)
        recount(record, params, share, record.flags ^ Flags.COUNTS_REQUESTS, cap=cap if lends else None)
    elif cap is not None and record.flags & KIND == Flags.COUNTS_REQUESTS:
        record.rate = cap
    if requests_for is not None:
        record.requests_until = record.work_settled + requests_for
