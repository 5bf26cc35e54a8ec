"""One bucket: the reference for `lua/lib/record.lua`, operation for operation.

    balance = min(capacity, balance + elapsed · rate)      a rate bucket between two requests (W1)
    balance = capacity at the start of each window         a quota (P4)

Both sides compute in float64 in the same order, so that a test can compare them bit for bit. The order of
operations below is therefore part of the meaning: `a * b / c` is not `a * (b / c)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntFlag

STEP_BACK_MAX_US = 1_000_000
"""A clock that steps back by at most this waits for the past to catch up; a larger step re-anchors (T1, T2)."""

IDLE_TTL_MS = 600_000
"""A bucket that is full again is kept this long, for its statistics and its learned charge."""

TTL_MAX_MS = 366 * 86_400_000

RATE_MAX = 2.0**53
BURST_MAX_S = 1e6

OCTAVES = 18
OCTAVE_MIN = -2
STEPS = 4
HISTOGRAM_STEPS = OCTAVES * STEPS
"""Latency histogram: 0.125 ms to 32 s, four steps to an octave."""


class Flags(IntFlag):
    """How a bucket counts, and how its policy wants it treated. A record keeps the first three."""

    NONE = 0
    QUOTA = 1
    COUNTS_REQUESTS = 2
    HISTOGRAM = 4
    SHADOW = 8


KIND = Flags.QUOTA | Flags.COUNTS_REQUESTS
RECORD_FLAGS = KIND | Flags.HISTOGRAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """What a policy says of one bucket, resolved to units and seconds."""

    flags: Flags = Flags.NONE
    committed: float = 0.0
    """The policy's rate (units of work a second)."""
    rate: float = 0.0
    """Refill a second: the committed rate; for a request bucket the cap it starts with."""
    capacity: float
    """Work units; a request bucket's fixed part of its burst; a quota's limit."""
    burst_s: float = 0.0
    """A request bucket's burst as time at its cap: follows the cap (R7)."""
    debt_max: float
    settle_threshold: float = 0.0
    """W6: units if positive, a share of the charge if negative."""
    stop_debt: float = math.inf
    """W7: debt beyond which progress is answered with *stop*."""
    window_start_us: int = 0
    window_end_us: int = 0

    # Derived, because asking an enum for each request is dear.
    is_quota: bool = field(init=False, repr=False, compare=False)
    """A limit over a calendar window instead of a rate (P4)."""
    counts_requests: bool = field(init=False, repr=False, compare=False)
    """One token a request, whatever its work (R)."""
    is_shadow: bool = field(init=False, repr=False, compare=False)
    """Counts and reports, refuses nothing (P11)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_quota", Flags.QUOTA in self.flags)
        object.__setattr__(self, "counts_requests", Flags.COUNTS_REQUESTS in self.flags)
        object.__setattr__(self, "is_shadow", Flags.SHADOW in self.flags)
        for name in ("committed", "rate", "burst_s", "debt_max", "stop_debt"):
            assert getattr(self, name) >= 0, name
        for name in ("committed", "rate", "capacity", "burst_s", "debt_max", "settle_threshold"):
            assert math.isfinite(getattr(self, name)), name
        for name in ("committed", "rate", "capacity", "debt_max"):
            assert getattr(self, name) <= RATE_MAX, name
        assert self.burst_s <= BURST_MAX_S, "burst_s"
        assert self.is_quota or (self.committed > 0 and self.rate > 0), "rate"
        assert self.capacity > 0 or (self.counts_requests and not self.is_quota), "capacity"
        assert not self.is_quota or 0 <= self.window_start_us < self.window_end_us < RATE_MAX, "window"

    def holds(self, now_us: int) -> bool:
        """Whether a decision at this time may use these parameters: a quota's window must hold it (T4)."""
        return not self.is_quota or self.window_start_us <= now_us < self.window_end_us


@dataclass(slots=True, kw_only=True)
class Record:
    """The live state of one bucket, in the order of its layout."""

    flags: Flags
    updated_us: float
    balance: float
    rate: float
    """For a quota: the end of its window (us)."""
    capacity: float
    committed: float
    """For a quota: the start of its window (us)."""
    debt_max: float
    settle_threshold: float
    stop_debt: float
    charge: float = 0.0
    """Learned by the controller (W8); 0 while nothing is learned."""
    epoch: float = -1.0
    """The sampling epoch in which this bucket was last listed as touched."""
    requests: float = 0.0
    admitted: float = 0.0
    refused: float = 0.0
    work_charged: float = 0.0
    work_settled: float = 0.0
    work_squared: float = 0.0
    settles: float = 0.0
    missed: float = 0.0
    uncollected: float = 0.0
    histogram: list[float] = field(default_factory=list)

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
    rate, committed = params.rate, params.committed
    if params.is_quota:
        rate, committed = float(params.window_end_us), float(params.window_start_us)
    capacity = capacity_of(params, rate)
    return Record(
        flags=params.flags & RECORD_FLAGS,
        updated_us=float(now_us),
        balance=capacity,
        rate=rate,
        capacity=capacity,
        committed=committed,
        debt_max=params.debt_max,
        settle_threshold=params.settle_threshold,
        stop_debt=params.stop_debt,
        histogram=[0.0] * HISTOGRAM_STEPS if Flags.HISTOGRAM in params.flags else [],
    )


def capacity_of(params: Params, rate: float) -> float:
    """Most the balance may be. A burst below one token could never admit anything."""
    if not params.counts_requests or params.is_quota:
        return params.capacity
    return max(1.0, params.capacity + params.burst_s * rate)


def advance(record: Record, params: Params, now_us: int) -> None:
    """Bring a bucket to now under its old terms, then to the terms of the policy (W9)."""
    stepped_back = record.updated_us - now_us > STEP_BACK_MAX_US
    refill(record, now_us)
    if params.is_quota and record.is_quota:
        _roll(record, params, stepped_back=stepped_back)
    _adopt(record, params)


def refill(record: Record, now_us: int) -> None:
    """Credit the time since the last update; none for a clock that went back (W1, T1, T2)."""
    elapsed_us = now_us - record.updated_us
    if elapsed_us > 0:
        if not record.is_quota:
            record.balance = min(record.balance + elapsed_us * record.rate / 1e6, record.capacity)
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


def _adopt(record: Record, params: Params) -> None:
    """Let a changed policy reach the live bucket: debt survives, surplus is clamped, nothing is refilled."""
    if record.flags != params.flags & RECORD_FLAGS:
        _convert(record, params)
    if params.is_quota:
        record.balance = record.balance + (params.capacity - record.capacity)
        record.capacity = params.capacity
    else:
        if not params.counts_requests:
            record.rate = params.rate
        elif record.committed != params.committed:
            # The cap keeps its proportion to the committed rate.
            cap = record.rate * params.committed / record.committed
            record.rate = cap if 0 < cap < RATE_MAX else params.rate
        record.committed = params.committed
        record.capacity = capacity_of(params, record.rate)
    record.balance = min(record.balance, record.capacity)
    record.debt_max = params.debt_max
    record.settle_threshold = params.settle_threshold
    record.stop_debt = params.stop_debt


def _convert(record: Record, params: Params) -> None:
    """Keep the share of the capacity that was left, debt included, when a policy's mechanism changes (R10)."""
    renewed = fresh(params, 0)
    if record.flags & KIND != params.flags & KIND:
        record.balance = record.balance / record.capacity * renewed.capacity
        record.rate, record.capacity, record.committed = renewed.rate, renewed.capacity, renewed.committed
    record.flags, record.histogram = renewed.flags, renewed.histogram


def collectable(record: Record, amount: float) -> float:
    """How much of a debit the bucket can take before its debt reaches the bound (W5)."""
    return min(amount, max(0.0, record.balance + record.debt_max))


def ttl_ms(record: Record, now_us: int) -> int:
    """How long to keep the record: until it would be full, and a while longer."""
    if record.is_quota:
        ms = (record.rate - now_us) / 1000
    else:
        ms = (record.capacity - record.balance) / record.rate * 1000 if record.rate else math.inf
    if not ms < TTL_MAX_MS:
        return TTL_MAX_MS
    return max(0, math.ceil(ms)) + IDLE_TTL_MS


def histogram_step(latency_ms: float) -> int:
    """Which step of the histogram counts this latency: by exponent and mantissa, no logarithm."""
    if latency_ms < 0.125:
        return 0
    mantissa, exponent = math.frexp(latency_ms)
    step = (exponent - OCTAVE_MIN) * STEPS + math.floor((mantissa - 0.5) * 2 * STEPS)
    return min(step, HISTOGRAM_STEPS - 1)
