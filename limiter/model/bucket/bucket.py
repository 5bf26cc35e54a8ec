"""One bucket: the reference for `lua/lib/record.lua`, operation for operation.

    balance = min(capacity, balance + elapsed · rate)      a rate bucket between two requests (W1)
    balance = capacity at the start of each window         a quota (P4)
    balance = balance · new rate / old rate                when it begins to count in another unit (R10)
    unit    = requests while work settled < requests_until  an auto bucket; work from then on, until it is lent anew
    terms   = share · the policy's                         where partitions divide a limit (R9, B5)
    block   = see `limiter.model.bucket.block`                    where a policy blocks a key (W17)

Both sides compute in float64 in the same order, so that a test can compare them bit for bit. The order of
operations below is therefore part of the meaning: `a * b / c` is not `a * (b / c)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntFlag

from limiter.model.bucket.block import Block, BlockTerms
from limiter.model.overload import shedding
from limiter.model.overload.shedding import CLASSES, Shedding

STEP_BACK_MAX_US = 1_000_000
"""A clock that steps back by at most this waits for the past to catch up; a larger step re-anchors (F-T1, F-T2)."""

IDLE_TTL_S = 600
"""A bucket that is full again is kept this long, for its statistics and its learned charge."""

TTL_MAX_S = 366 * 86_400
KEPT_LONGER_S = 60
"""Beyond that, so that a key's expiry need not be moved with every use."""

KEPT_MAX_S = 2**32 - 1
ROOM_SIZE = 24

RATE_MAX = 2.0**53
BURST_MAX_S = 1e6

OCTAVES = 18
OCTAVE_MIN = -2
STEPS = 4
HISTOGRAM_STEPS = OCTAVES * STEPS
"""Latency histogram: 0.125 ms to 32 s, four steps to an octave."""


class Flags(IntFlag):
    """How a bucket counts, and how its policy wants it treated. A record keeps all but the last."""

    NONE = 0
    QUOTA = 1
    COUNTS_REQUESTS = 2
    HISTOGRAM = 4
    DIVIDED = 8
    """The limit is divided over partitions: params say the whole, each record holds a share of it."""
    AUTO = 16
    """The record's own COUNTS_REQUESTS says how it counts; the controller lends that for some work at a time (R10)."""
    OVERLOAD = 32
    """The policy has an `overload` block: the record knows of classes (`limiter.model.overload.shedding`)."""
    BLOCK = 64
    """The policy blocks a key for a time after many refusals (`limiter.model.bucket.block`)."""
    SHADOW = 32768


KIND = Flags.QUOTA | Flags.COUNTS_REQUESTS
RECORD_FLAGS = KIND | Flags.HISTOGRAM | Flags.DIVIDED | Flags.AUTO | Flags.OVERLOAD | Flags.BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """What a policy says of its buckets, resolved to units and seconds: the whole limit, even where it is divided."""

    flags: Flags = Flags.NONE
    committed: float = 0.0
    """The policy's rate (units of work a second); what a bucket of work refills at."""
    cap: float = 0.0
    """Requests a second that a bucket starts with when it counts requests; steered from there on."""
    capacity: float
    """Most work a bucket may hold; a quota's limit."""
    burst: float = 0.0
    """Most requests a bucket may hold when it counts requests: the fixed part."""
    burst_s: float = 0.0
    """And the part given as time at the cap, which follows the cap (R7)."""
    debt_max: float
    """Work that may be owed. A request bucket may owe for as long: `debt_max · cap / committed` requests."""
    settle_threshold: float = 0.0
    """W6: units if positive, a share of the charge if negative."""
    stop_debt: float = math.inf
    """W7: debt beyond which progress is answered with *stop*."""
    window_start_us: int = 0
    window_end_us: int = 0
    partitions: int = 1
    """How many partitions divide this limit."""
    block: BlockTerms | None = None
    """When a key is blocked, and for how long (W17)."""

    # Derived, because asking an enum for each request is dear.
    is_quota: bool = field(init=False, repr=False, compare=False)
    """A limit over a calendar window instead of a rate (P4)."""
    counts_requests: bool = field(init=False, repr=False, compare=False)
    """One token a request, whatever its work (R)."""
    is_divided: bool = field(init=False, repr=False, compare=False)
    is_auto: bool = field(init=False, repr=False, compare=False)
    is_shadow: bool = field(init=False, repr=False, compare=False)
    """Counts and reports, refuses nothing (P11)."""
    whole_capacity: float = field(init=False, repr=False, compare=False)
    """What an undivided bucket holds at the start, in the unit that minimums are given in."""

    def __post_init__(self) -> None:
        flags = self.flags
        capacity = self.capacity
        if flags & KIND == Flags.COUNTS_REQUESTS:
            capacity = max(1.0, self.burst + self.burst_s * self.cap)
        object.__setattr__(self, "is_quota", Flags.QUOTA in flags)
        object.__setattr__(self, "counts_requests", Flags.COUNTS_REQUESTS in flags)
        object.__setattr__(self, "is_divided", Flags.DIVIDED in flags)
        object.__setattr__(self, "is_auto", Flags.AUTO in flags)
        object.__setattr__(self, "is_shadow", Flags.SHADOW in flags)
        object.__setattr__(self, "whole_capacity", capacity)
        for name in ("committed", "cap", "burst", "burst_s", "debt_max", "stop_debt"):
            assert getattr(self, name) >= 0, name
        assert math.isfinite(self.settle_threshold), "settle_threshold"
        for name in ("committed", "cap", "capacity", "burst", "debt_max"):
            assert getattr(self, name) <= RATE_MAX, name
        assert self.burst_s <= BURST_MAX_S, "burst_s"
        assert self.capacity > 0, "capacity"
        assert self.is_quota or self.committed > 0, "committed"
        assert self.is_quota or not (self.counts_requests or self.is_auto) or self.cap > 0, "cap"
        assert not self.is_quota or 0 <= self.window_start_us < self.window_end_us < RATE_MAX, "window"
        assert not (self.is_auto and flags & KIND), "an auto bucket says for itself how it counts"
        assert self.is_divided == (self.partitions > 1), "partitions"
        assert (Flags.BLOCK in flags) == (self.block is not None), "block"

    def holds(self, now_us: int) -> bool:
        """Whether a decision at this time may use these parameters: a quota's window must hold it (F-T4)."""
        return not self.is_quota or self.window_start_us <= now_us < self.window_end_us


@dataclass(slots=True, kw_only=True)
class Record:
    """The live state of one bucket, in the order of its layout."""

    flags: Flags
    updated_us: float
    balance: float
    requests: float = 0.0
    admitted: float = 0.0
    refused: float = 0.0
    work_charged: float = 0.0
    epoch: int = -1
    """The sampling epoch in which this bucket was last listed as touched."""
    kept_until_s: int = 0
    """When the key expires: at least as long as it is needed, moved about once a minute."""
    charge: float = 0.0
    """Learned by the controller (W8); 0 while nothing is learned."""
    room: bytes = bytes(ROOM_SIZE)
    """For what is in flight and for attempts, which are not counted yet: kept as it is."""
    work_settled: float = 0.0
    work_squared: float = 0.0
    settles: float = 0.0
    missed: float = 0.0
    uncollected: float = 0.0
    rate: float
    """For a quota: the end of its window (us)."""
    capacity: float
    committed: float
    """The policy's rate, as far as this bucket's share of it goes. For a quota: the start of its window (us)."""
    debt_max: float
    settle_threshold: float
    stop_debt: float
    histogram: list[float] = field(default_factory=list)
    """Counts of latencies; with overload control those of each class, one after the other."""
    share: float = 0.0
    """Part of a divided limit, as the controller gave it (B5)."""
    share_until_us: float = 0.0
    """When that ends, and the bucket falls back to an equal part."""
    share_partitions: float = 0.0
    """Of how many partitions it was a part: with another number of them it means nothing."""
    requests_until: float = 0.0
    """The `work_settled` at which an auto bucket that counts requests counts work again, unless it is lent more."""
    shedding: Shedding | None = None
    """What overload control goes by, where the policy has any."""
    block: Block | None = None
    """Refusals of this key, and until when it is blocked, where the policy blocks (W17)."""

    @property
    def is_quota(self) -> bool:
        """Whether the balance is what is left of a calendar window's limit."""
        return Flags.QUOTA in self.flags

    @property
    def counts_requests(self) -> bool:
        """Whether the balance is in requests."""
        return Flags.COUNTS_REQUESTS in self.flags


def fresh(params: Params, now_us: int) -> Record:
    """Make a bucket that was never used, or not for so long that it is full again."""
    record = Record(
        flags=params.flags & RECORD_FLAGS,
        updated_us=float(now_us),
        balance=0.0,
        rate=0.0,
        capacity=0.0,
        committed=0.0,
        debt_max=0.0,
        settle_threshold=0.0,
        stop_debt=0.0,
        histogram=_no_latencies(params),
        shedding=_no_shedding(params),
        block=_no_block(params),
    )
    share = share_of(record, params, now_us)
    _begin_terms(record, params, share)
    _adopt_bounds(record, params, share)
    record.balance = record.capacity
    return record


def share_of(record: Record, params: Params, now_us: int) -> float:
    """The part of a divided limit that a bucket holds: what it was given, or else an equal part (B5)."""
    if not params.is_divided:
        return 1.0
    if now_us < record.share_until_us and record.share_partitions == params.partitions:
        return record.share
    return 1.0 / params.partitions


def _burst_of(params: Params, share: float, cap: float) -> float:
    """Fewer than one token could never admit anything."""
    return max(1.0, params.burst * share + params.burst_s * cap)


def _begin_terms(record: Record, params: Params, share: float) -> None:
    """The rates and the capacity that a bucket starts with, by how its flags say it counts."""
    if params.is_quota:
        record.rate, record.committed = float(params.window_end_us), float(params.window_start_us)
        record.capacity = params.capacity * share
    elif record.counts_requests:
        record.rate, record.committed = params.cap * share, params.committed * share
        record.capacity = _burst_of(params, share, record.rate)
    else:
        record.rate = record.committed = params.committed * share
        record.capacity = params.capacity * share


def _adopt_bounds(record: Record, params: Params, share: float) -> None:
    """How much may be owed: by a request bucket for as long as by a work bucket."""
    if record.flags & KIND == Flags.COUNTS_REQUESTS:
        record.debt_max = params.debt_max * record.rate / params.committed
        record.stop_debt = params.stop_debt * record.rate / params.committed
    else:
        record.debt_max = params.debt_max * share
        record.stop_debt = params.stop_debt * share
    record.settle_threshold = params.settle_threshold


def _no_latencies(params: Params) -> list[float]:
    if Flags.HISTOGRAM not in params.flags:
        return []
    return [0.0] * (HISTOGRAM_STEPS * (len(CLASSES) if Flags.OVERLOAD in params.flags else 1))


def _no_shedding(params: Params) -> Shedding | None:
    return Shedding() if Flags.OVERLOAD in params.flags else None


def _no_block(params: Params) -> Block | None:
    return None if params.block is None else Block()


def advance(record: Record, params: Params, now_us: int) -> None:
    """Bring a bucket to now under its old terms, then to the terms of the policy (W9)."""
    stepped_back = record.updated_us - now_us > STEP_BACK_MAX_US
    refill(record, now_us)
    if params.is_quota and record.is_quota:
        _roll(record, params, stepped_back=stepped_back)
    adopt(record, params, now_us)


def refill(record: Record, now_us: int) -> None:
    """Credit the time since the last update; none for a clock that went back (W1, F-T1, F-T2)."""
    elapsed_us = now_us - record.updated_us
    if elapsed_us > 0:
        if not record.is_quota:
            record.balance = min(record.balance + elapsed_us * record.rate / 1e6, record.capacity)
        if record.shedding is not None:
            shedding.refill(record.shedding, elapsed_us)
        record.updated_us = float(now_us)
    elif elapsed_us < -STEP_BACK_MAX_US:
        record.updated_us = float(now_us)


def _roll(record: Record, params: Params, *, stepped_back: bool) -> None:
    """Enter a later window afresh; an earlier one means that the clock went back, and forgives nothing."""
    start = float(params.window_start_us)
    if start > record.committed:
        record.balance = record.capacity
        record.committed = start
    elif stepped_back:
        record.committed = start
    record.rate = float(params.window_end_us)


def adopt(record: Record, params: Params, now_us: int) -> None:
    """Let a changed policy, or share of one, reach the live bucket: debt survives, surplus is clamped, no refill."""
    if record.flags != params.flags & RECORD_FLAGS:
        _convert(record, params, now_us)
    share = share_of(record, params, now_us)
    capacity = params.capacity * share
    if params.is_quota:
        record.balance = record.balance + (capacity - record.capacity)
    else:
        committed = params.committed * share
        if not record.counts_requests:
            record.rate = committed
        else:
            if record.committed != committed:
                # The cap keeps its proportion to the committed rate.
                cap = record.rate * committed / record.committed
                record.rate = cap if 0 < cap < RATE_MAX else params.cap * share
            capacity = _burst_of(params, share, record.rate)
        record.committed = committed
    record.capacity = capacity
    record.balance = min(record.balance, capacity)
    _adopt_bounds(record, params, share)


def _convert(record: Record, params: Params, now_us: int) -> None:
    """Become the kind of bucket that the policy wants now. An auto bucket counts requests only while lent that."""
    before, flags = record.flags, params.flags & RECORD_FLAGS
    if params.is_auto and before & KIND == Flags.COUNTS_REQUESTS and record.work_settled < record.requests_until:
        flags |= Flags.COUNTS_REQUESTS
    if (before ^ flags) & (Flags.HISTOGRAM | Flags.OVERLOAD):
        record.histogram = _no_latencies(params)
    if (before ^ flags) & Flags.OVERLOAD:
        record.shedding = _no_shedding(params)
    if (before ^ flags) & Flags.BLOCK:
        record.block = _no_block(params)
    if (before ^ flags) & Flags.DIVIDED:
        record.share = record.share_until_us = record.share_partitions = 0.0
    if (before ^ flags) & Flags.AUTO:
        record.requests_until = 0.0
    if before & KIND != flags & KIND:
        share = share_of(record, params, now_us)
        recount(record, params, share, flags)
        if before & flags & Flags.AUTO:
            _repay(record, params, share)
    record.flags = flags


def _repay(record: Record, params: Params, share: float) -> None:
    """What was settled beyond that for which requests could be counted is owed, as any other work (W5)."""
    overrun = record.work_settled - record.requests_until
    if overrun > 0:
        _adopt_bounds(record, params, share)
        record.balance -= collectable(record, overrun)


def recount(record: Record, params: Params, share: float, flags: Flags, cap: float | None = None) -> None:
    """Count in another unit from now on, with a balance worth as much time as before, debt and surplus alike (R10).

    Where a quota is involved there is no such time: the balance keeps its share of the capacity.
    """
    balance, rate, capacity = record.balance, record.rate, record.capacity
    timeless = params.is_quota or record.is_quota
    record.flags = flags
    _begin_terms(record, params, share)
    if cap is not None:
        record.rate = cap
    balance = balance / capacity * record.capacity if timeless else balance * record.rate / rate
    record.balance = max(-RATE_MAX, balance)


def collectable(record: Record, amount: float) -> float:
    """How much of a debit the bucket can take before its debt reaches the bound (W5)."""
    return min(amount, max(0.0, record.balance + record.debt_max))


def keep(record: Record, now_us: int) -> None:
    """Move the key's expiry where it is too early, or so late that the key would stay for nothing."""
    needed_s = _needed_until_s(record, now_us)
    if not needed_s <= record.kept_until_s <= needed_s + 2 * KEPT_LONGER_S:
        record.kept_until_s = min(math.ceil(needed_s) + KEPT_LONGER_S, KEPT_MAX_S)


def _needed_until_s(record: Record, now_us: int) -> float:
    """Until the record is full, its share and its block have ended, and a while longer."""
    left_s = (record.rate - now_us) / 1e6 if record.is_quota else (record.capacity - record.balance) / record.rate
    if Flags.DIVIDED in record.flags:
        left_s = max(left_s, (record.share_until_us - now_us) / 1e6)
    if record.block is not None:
        left_s = max(left_s, (record.block.counted_until_us - now_us) / 1e6, (record.block.until_us - now_us) / 1e6)
    if not left_s < TTL_MAX_S:
        return now_us / 1e6 + TTL_MAX_S
    return now_us / 1e6 + (max(0.0, left_s) + IDLE_TTL_S)


def histogram_step(latency_ms: float) -> int:
    """Which step of the histogram counts this latency: by exponent and mantissa, no logarithm."""
    if latency_ms < 0.125:
        return 0
    mantissa, exponent = math.frexp(latency_ms)
    step = (exponent - OCTAVE_MIN) * STEPS + math.floor((mantissa - 0.5) * 2 * STEPS)
    return min(step, HISTOGRAM_STEPS - 1)
