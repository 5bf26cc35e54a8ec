"""What the controller may do to a slot that it owns: the reference for `lua/lease.lua`, `sample.lua` and `steer.lua`.

    owner   the controller that holds the lease; its fence number grows each time the lease is taken (F-P7)
    sample  take the names of the buckets that changed, so that they are listed again when they next change
    steer   set absolute values: cap, learned charge, unit, share, overload control; what makes no sense is left (F-P8)

A share holds for a time only: a controller that is gone leaves equal parts behind, never more than the limit (B5).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

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
"""A share below this would starve its partition, and is not taken."""

SHARE_FOR_MAX_US = 3_600_000_000
"""Longest time that a share may be given for."""


class Lease(NamedTuple):
    """The right to steer a slot, as long as nobody else was given it."""

    owner: bytes
    fence: int
    left_ms: int = 0
    """How long it lasted when it was taken."""


class Steer(NamedTuple):
    """Absolute values for one bucket; None leaves what is there."""

    bucket: str
    params: Params
    cap: float | None = None
    """Requests a second of a bucket that counts requests."""
    charge: float | None = None
    """The learned charge (W8)."""
    requests_for: float | None = None
    """How an auto bucket is to count from now on (R10): requests until so much more work was settled; 0 = work."""
    share: float | None = None
    """Part of a divided rate limit. A quota's division stays: what one part has used cannot be taken back."""
    share_for_us: int = 0
    state: bytes | None = None
    """What the controller wants to find again, kept as long as the bucket."""
    overload: ShedOrder | None = None
    """Of a bucket whose policy has an `overload` block."""

    @property
    def only_keeps(self) -> bool:
        """Whether there is at most a state to keep, and the bucket is left alone."""
        return (self.cap, self.charge, self.requests_for, self.share, self.overload) == (None,) * 5


class SteerStatus(IntEnum):
    """What came of it."""

    DONE = 1
    ABSENT = 2
    """There is no such bucket, and no share that it had to be made for."""
    CORRUPT = 3
    """What stands there is not a record of ours, and stays untouched (F-S11)."""


def gives_share(steer: Steer) -> bool:
    """Whether a bucket takes the share that it is given."""
    if steer.share is None or not steer.params.is_divided or steer.params.is_quota:
        return False
    return SHARE_MIN <= steer.share <= 1 and 0 < steer.share_for_us <= SHARE_FOR_MAX_US


def steer_bucket(record: Record, steer: Steer, now_us: int) -> None:
    """Bring a bucket to now, then set what is to be set."""
    params = steer.params
    caps_only = _caps_only(record, steer)
    if caps_only:
        # One adoption, below, does for the policy and the cap.
        refill(record, now_us)
        assert steer.cap is not None
        record.rate, record.committed = steer.cap, params.committed * share_of(record, params, now_us)
    elif params.holds(now_us):
        advance(record, params, now_us)
    else:
        refill(record, now_us)
    if steer.overload is not None and record.shedding is not None:
        shedding.obey(record.shedding, steer.overload, rate_max=RATE_MAX)
    if steer.charge is not None and 0 < steer.charge <= RATE_MAX:
        record.charge = steer.charge
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
    """Whether a bucket that is of its policy's kind takes a cap, and no share: what most rows are about."""
    if steer.cap is None or steer.share is not None or record.flags & KIND != Flags.COUNTS_REQUESTS:
        return False
    return record.flags == steer.params.flags & RECORD_FLAGS and 0 < steer.cap <= RATE_MAX


def _set_unit_and_cap(record: Record, steer: Steer, now_us: int) -> None:
    params = steer.params
    cap = steer.cap if steer.cap is not None and 0 < steer.cap <= RATE_MAX else None
    requests_for = steer.requests_for
    if requests_for is not None and not (params.is_auto and 0 <= requests_for <= RATE_MAX):
        requests_for = None
    # So little work that the sum does not show it lends nothing: the bucket would change its unit there and back.
    lends = requests_for is not None and record.work_settled + requests_for > record.work_settled
    if requests_for is not None and lends != record.counts_requests:
        share = share_of(record, params, now_us)
        recount(record, params, share, record.flags ^ Flags.COUNTS_REQUESTS, cap=cap if lends else None)
    elif cap is not None and record.flags & KIND == Flags.COUNTS_REQUESTS:
        record.rate = cap
    if requests_for is not None:
        record.requests_until = record.work_settled + requests_for
