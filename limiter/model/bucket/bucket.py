"""One bucket: the reference for `lua/lib/record.lua`, operation for operation.

    balance = min(capacity, balance + elapsed · rate)      a rate bucket between two requests (W1)
    balance = capacity at the start of each window         a quota (P4)
    balance = balance · new rate / old rate                when it begins to count in another unit (R10)
    unit    = requests while work settled < requests_until  an auto bucket; then work, until the controller lends more
    terms   = share · the policy's                         where partitions divide a limit (R9, B5)
    block   = see `limiter.model.bucket.block`             where a policy blocks a key (W17)
    slots   = see `limiter.model.bucket.in_flight`         where open reservations are counted (W18, S9)

Both sides compute in float64 in the same order, so that a test can compare them bit for bit. The order of
operations below is therefore part of the meaning: `a * b / c` is not `a * (b / c)`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import IntFlag

from limiter.model.bucket import in_flight, lending
from limiter.model.bucket.block import Block, BlockTerms
from limiter.model.bucket.in_flight import InFlightTerms, Slots
from limiter.model.bucket.learned import Entry
from limiter.model.bucket.lending import Book, LendTerms, Lent
from limiter.model.overload import shedding
from limiter.model.overload.shedding import CLASSES, OverloadTerms, Shedding

STEP_BACK_MAX_US = in_flight.STEP_BACK_MAX_US
"""A clock that steps back by at most this waits for the past to catch up; a larger step re-anchors (F-T1, F-T2)."""

IDLE_TTL_S = 600
"""How long a full bucket is kept, for its statistics and its learned charge."""

TTL_MAX_S = 366 * 86_400
KEPT_LONGER_S = 60
"""Added to the expiry, so that it need not be moved with every use."""

KEPT_MAX_S = 2**32 - 1
ATTEMPTS_MAX = 2**32 - 1
"""The most second or further attempts that are counted."""

LENT_TTL_S = 86_400
"""How long a bucket that lends is kept: a leap of the clock must not end it."""

RATE_MAX = 2.0**53
BURST_MAX_S = 1e6

OCTAVES = 26
OCTAVE_MIN = -3
STEPS = 7
HISTOGRAM_STEPS = OCTAVES * STEPS
"""Latency histogram: 0.0625 ms to 70 minutes, seven steps to an octave, each 2^(1/7) times as wide as the last."""

STEP_EDGES = tuple(0.5 * 2 ** (step / STEPS) for step in range(1, STEPS))
"""Lower ends of the steps of an octave except the first, as mantissas of a latency."""

COUNT_MAX = 2**32 - 1
"""The most latencies that one step counts."""


class Flags(IntFlag):
    """How a bucket counts, and its policy's treatment of it. A record keeps all but the last."""

    NONE = 0
    QUOTA = 1
    COUNTS_REQUESTS = 2
    HISTOGRAM = 4
    DIVIDED = 8
    """The limit is divided over partitions: params hold the whole, each record a share of it."""
    AUTO = 16
    """The record's own COUNTS_REQUESTS says how it counts; the controller lends that for some work at a time (R10)."""
    OVERLOAD = 32
    """The policy has an `overload` block: the record counts by class (`limiter.model.overload.shedding`)."""
    BLOCK = 64
    """The policy blocks a key for a time after many refusals (`limiter.model.bucket.block`)."""
    IN_FLIGHT = 128
    """Open reservations are counted (`limiter.model.bucket.in_flight`)."""
    LEARNS = 256
    """The charge is learned before weights, and by the values of `learn_by` (`limiter.model.bucket.learned`)."""
    LENDS = 512
    """Holders may be lent parts of the limit (`limiter.model.bucket.lending`)."""
    REFUNDS = 1024
    """Refunds have a settle threshold of their own (W19)."""
    SHADOW = 32768


KIND = Flags.QUOTA | Flags.COUNTS_REQUESTS
RECORD_FLAGS = (
    KIND
    | Flags.HISTOGRAM
    | Flags.DIVIDED
    | Flags.AUTO
    | Flags.OVERLOAD
    | Flags.BLOCK
    | Flags.IN_FLIGHT
    | Flags.LEARNS
    | Flags.LENDS
    | Flags.REFUNDS
)
WEIGHS = Flags.AUTO | Flags.LEARNS
"""Beside a cap of requests: a request counts by its weight in the statistics, so that work per request is before
weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """A policy's terms for its buckets, in units and seconds: of the whole limit, even if it is divided."""

    flags: Flags = Flags.NONE
    committed: float = 0.0
    """The policy's rate (units of work per second), at which a bucket of work refills."""
    cap: float = 0.0
    """Requests per second at which a bucket that counts requests starts; steered from there on."""
    capacity: float
    """The most work that a bucket holds; the limit of a quota."""
    burst: float = 0.0
    """The most requests that a bucket holds when it counts requests: the fixed part."""
    burst_s: float = 0.0
    """The part given as time at the cap, which follows the cap (R7)."""
    debt_max: float
    """The debt bound in work. A request bucket may owe for the same time: `debt_max · cap / committed` requests."""
    settle_threshold: float = 0.0
    """Units if positive, a share of the charge if negative (W6)."""
    stop_debt: float = math.inf
    """Debt beyond which progress is answered with *stop* (W7)."""
    window_start_us: int = 0
    window_end_us: int = 0
    partitions: int = 1
    """Number of partitions that divide this limit."""
    block: BlockTerms | None = None
    """When a key is blocked, and for how long (W17)."""
    overload: OverloadTerms | None = None
    """Terms of the `overload` block for the scripts; None without OVERLOAD."""
    in_flight: InFlightTerms | None = None
    """How open reservations are counted and limited (W18, S9): with IN_FLIGHT something, else None."""
    refund_threshold: float = 0.0
    """With REFUNDS: the settle threshold of refunds, as `settle_threshold`, which is for debits then (W19)."""
    lending: LendTerms | None = None
    """How parts of the limit are lent (B8)."""

    # Derived, because testing an enum for each request is expensive.
    is_quota: bool = field(init=False, repr=False, compare=False)
    """A limit over a calendar window instead of a rate (P4)."""
    counts_requests: bool = field(init=False, repr=False, compare=False)
    """One token per request, whatever its work (R)."""
    is_divided: bool = field(init=False, repr=False, compare=False)
    is_auto: bool = field(init=False, repr=False, compare=False)
    is_shadow: bool = field(init=False, repr=False, compare=False)
    """Counts and reports, but refuses nothing (P11)."""
    whole_capacity: float = field(init=False, repr=False, compare=False)
    """Initial balance of an undivided bucket, in the unit of minimums."""

    def __post_init__(self) -> None:
        flags = self.flags
        capacity = self.capacity
        if flags & KIND == Flags.COUNTS_REQUESTS:
            capacity = max(1.0, self.burst + self.burst_s * self.cap)
        overload = self.overload or OverloadTerms() if Flags.OVERLOAD in flags else None
        places = self.in_flight or InFlightTerms() if Flags.IN_FLIGHT in flags else None
        object.__setattr__(self, "overload", overload)
        object.__setattr__(self, "in_flight", places)
        object.__setattr__(self, "is_quota", Flags.QUOTA in flags)
        object.__setattr__(self, "counts_requests", Flags.COUNTS_REQUESTS in flags)
        object.__setattr__(self, "is_divided", Flags.DIVIDED in flags)
        object.__setattr__(self, "is_auto", Flags.AUTO in flags)
        object.__setattr__(self, "is_shadow", Flags.SHADOW in flags)
        object.__setattr__(self, "whole_capacity", capacity)
        for name in ("committed", "cap", "burst", "burst_s", "debt_max", "stop_debt"):
            assert getattr(self, name) >= 0, name
        assert math.isfinite(self.settle_threshold + self.refund_threshold), "settle_threshold"
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
        assert (Flags.LENDS in flags) == (self.lending is not None), "lending"
        assert not (self.is_auto and self.lending), "an auto bucket lends nothing: its unit may change"

    def holds(self, now_us: int) -> bool:
        """True if a decision at this time may use these parameters: a quota's window must contain it (F-T4)."""
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
    """The learned charge (W8); 0 while nothing is learned."""
    second_attempts: int = 0
    """Requests that say that they are second attempts (G6)."""
    further_attempts: int = 0
    """Those tried more often than that."""
    work_settled: float = 0.0
    work_squared: float = 0.0
    settles: float = 0.0
    missed: float = 0.0
    uncollected: float = 0.0
    rate: float
    """For a quota: the end of its window (us)."""
    capacity: float
    committed: float
    """This bucket's share of the policy's rate. For a quota: the start of its window (us)."""
    debt_max: float
    settle_threshold: float
    stop_debt: float
    histogram: list[int] = field(default_factory=list)
    """Counts of latencies; with overload control those of each class, one after the other."""
    share: float = 0.0
    """Share of a divided limit, as the controller gave it (B5)."""
    share_until_us: float = 0.0
    """When the share ends, and the bucket falls back to an equal part."""
    share_partitions: float = 0.0
    """Number of partitions that the share is of: with another number it is void."""
    requests_until: float = 0.0
    """The `work_settled` at which an auto bucket that counts requests counts work again, unless the controller lends
    more."""
    shedding: Shedding | None = None
    """State of overload control, if the policy has any."""
    block: Block | None = None
    """Refusals of this key, and until when it is blocked, where the policy blocks (W17)."""
    slots: Slots | None = None
    """Open reservations, where they are counted."""
    learned: list[Entry] = field(default_factory=list)
    """Charges by the values of `learn_by`, where the policy has any (W15)."""
    lent: Lent | None = None
    """Parts that are lent, where the policy lends (B8)."""
    book: Book | None = None
    """The sums of what is lent; only requests for leases look into it."""

    @property
    def is_quota(self) -> bool:
        """True if the balance is of a calendar window."""
        return Flags.QUOTA in self.flags

    @property
    def counts_requests(self) -> bool:
        """True if the balance is in requests."""
        return Flags.COUNTS_REQUESTS in self.flags


def fresh(params: Params, now_us: int) -> Record:
    """Make a bucket that was never used, or so long ago that it is full again."""
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
        histogram=_no_latencies(params.flags),
        block=_no_block(params),
        slots=_no_slots(params, now_us),
    )
    _begin_lending(record, params)
    share = share_of(record, params, now_us)
    record.shedding = _no_shedding(params, share)
    _begin_terms(record, params, share)
    _adopt_bounds(record, params, share)
    record.balance = record.capacity
    return record


def share_of(record: Record, params: Params, now_us: int) -> float:
    """Return the share of a divided limit that a bucket holds: the one given to it, otherwise an equal part (B5)."""
    if not params.is_divided:
        return 1.0
    if now_us < record.share_until_us and record.share_partitions == params.partitions:
        return record.share
    return 1.0 / params.partitions


def _burst_of(params: Params, share: float, cap: float) -> float:
    """Return the burst of a share: at least one token, since less could never admit anything."""
    return max(1.0, params.burst * share + params.burst_s * cap)


def _begin_terms(record: Record, params: Params, share: float) -> None:
    """Set the initial rates and capacity, by the unit that the flags say."""
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
    """Set the debt bound: a request bucket may owe for as long as a work bucket."""
    if record.flags & KIND == Flags.COUNTS_REQUESTS:
        record.debt_max = params.debt_max * record.rate / params.committed
        record.stop_debt = params.stop_debt * record.rate / params.committed
    else:
        record.debt_max = params.debt_max * share
        record.stop_debt = params.stop_debt * share
    record.settle_threshold = params.settle_threshold


def _no_latencies(flags: Flags) -> list[int]:
    if Flags.HISTOGRAM not in flags:
        return []
    return [0] * (HISTOGRAM_STEPS * (len(CLASSES) if Flags.OVERLOAD in flags else 1))


def _no_shedding(params: Params, share: float) -> Shedding | None:
    return None if params.overload is None else shedding.begin(params.overload, share)


def _no_slots(params: Params, now_us: int) -> Slots | None:
    return None if params.in_flight is None else in_flight.begin(params.in_flight, now_us)


def _no_block(params: Params) -> Block | None:
    return None if params.block is None else Block()


def _begin_lending(record: Record, params: Params) -> None:
    record.lent, record.book = (None, None) if params.lending is None else (Lent(), Book())


def advance(record: Record, params: Params, now_us: int) -> None:
    """Bring a bucket to now under its old terms, then to the current terms of the policy (W9)."""
    stepped_back = record.updated_us - now_us > STEP_BACK_MAX_US
    refill(record, now_us)
    if params.is_quota and record.is_quota:
        _roll(record, params, stepped_back=stepped_back)
    adopt(record, params, now_us)


def refill(record: Record, now_us: int) -> None:
    """Credit the time since the last update; none for a clock that went back (W1, F-T1, F-T2)."""
    elapsed_us = now_us - record.updated_us
    if elapsed_us > 0:
        if record.is_quota:
            pass
        elif record.lent is not None:
            lending.refill(record, record.lent, elapsed_us)
        else:
            record.balance = min(record.balance + elapsed_us * record.rate / 1e6, record.capacity)
        if record.shedding is not None:
            kept = 1.0 if record.lent is None else 1.0 - record.lent.rate
            shedding.refill(record.shedding, elapsed_us * kept)
        record.updated_us = float(now_us)
    elif elapsed_us < -STEP_BACK_MAX_US:
        if record.lent is not None:
            record.lent.shift_us -= elapsed_us  # its own time stands still
        record.updated_us = float(now_us)
    if record.shedding is not None:
        shedding.lapse(record.shedding, now_us)
    if record.slots is not None:
        in_flight.roll(record.slots, now_us)


def _roll(record: Record, params: Params, *, stepped_back: bool) -> None:
    """Enter a later window with a full balance. An earlier one means that the clock went back; it forgives nothing."""
    start = float(params.window_start_us)
    if start > record.committed:
        record.balance = record.capacity
        record.committed = start
    elif stepped_back:
        record.committed = start
    record.rate = float(params.window_end_us)


def adopt(record: Record, params: Params, now_us: int) -> None:
    """Apply a changed policy, or share of one, to the live bucket: debt stays, surplus is clamped, no refill."""
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
        if params.lending is not None and capacity > record.capacity:
            share_before = min(1.0, max(share, record.committed / params.committed))
            bound = params.lending.bound
            lending.keep_lent(record, (bound * share_before, bound * share), capacity)
        record.committed = committed
    record.capacity = capacity
    record.balance = min(record.balance, lending.free_capacity(record))
    _adopt_bounds(record, params, share)
    if record.slots is not None and params.in_flight is not None:
        in_flight.adopt(record.slots, params.in_flight)


def _convert(record: Record, params: Params, now_us: int) -> None:
    """Change to the policy's present kind of bucket. An auto bucket counts requests only up to `requests_until`."""
    before, flags = record.flags, params.flags & RECORD_FLAGS
    if params.is_auto and before & KIND == Flags.COUNTS_REQUESTS and record.work_settled < record.requests_until:
        flags |= Flags.COUNTS_REQUESTS
    if record.lent is not None and record.lent.until_us > record.updated_us + record.lent.shift_us:
        flags |= Flags.LENDS  # what is lent stays lent until it ends, whatever the policy says by now
    if (before ^ flags) & (Flags.HISTOGRAM | Flags.OVERLOAD):
        record.histogram = _no_latencies(flags)
    if (before ^ flags) & Flags.BLOCK:
        record.block = _no_block(params)
    if (before ^ flags) & Flags.IN_FLIGHT:
        record.slots = _no_slots(params, now_us)
    if (before ^ flags) & Flags.LENDS:
        _begin_lending(record, params)
    if (before ^ flags) & Flags.DIVIDED:
        record.share = record.share_until_us = record.share_partitions = 0.0
    if (before ^ flags) & Flags.OVERLOAD:
        record.shedding = _no_shedding(params, share_of(record, params, now_us))
    if (before ^ flags) & Flags.AUTO:
        record.requests_until = 0.0
    if (before ^ flags) & Flags.LEARNS:
        record.learned, record.charge = [], 0.0
    if before & KIND != flags & KIND:
        share = share_of(record, params, now_us)
        recount(record, params, share, flags)
        if before & flags & Flags.AUTO:
            _repay(record, params, share)
    record.flags = flags


def _repay(record: Record, params: Params, share: float) -> None:
    """Charge the work that was settled beyond the lent amount, as any other work (W5)."""
    overrun = record.work_settled - record.requests_until
    if overrun > 0:
        _adopt_bounds(record, params, share)
        record.balance -= collectable(record, overrun)


def recount(record: Record, params: Params, share: float, flags: Flags, cap: float | None = None) -> None:
    """Count in another unit from now on; the balance keeps the time that it is worth, debt and surplus alike (R10).

    A quota has no such time: with one, the balance keeps its share of the capacity.
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
    """Return how much of a debit the bucket can take before its debt reaches the bound (W5)."""
    return min(amount, max(0.0, record.balance + record.debt_max))


def keep(record: Record, now_us: int) -> None:
    """Move the key's expiry if it is too early, or later than the record is needed."""
    needed_s = _needed_until_s(record, now_us)
    if not needed_s <= record.kept_until_s <= needed_s + 2 * KEPT_LONGER_S:
        record.kept_until_s = min(math.ceil(needed_s) + KEPT_LONGER_S, KEPT_MAX_S)


def _needed_until_s(record: Record, now_us: int) -> float:
    """Return the time at which the record is full and its share and block have ended, and a while longer."""
    left_s = (record.rate - now_us) / 1e6 if record.is_quota else (record.capacity - record.balance) / record.rate
    if Flags.DIVIDED in record.flags:
        left_s = max(left_s, (record.share_until_us - now_us) / 1e6)
    if record.block is not None:
        left_s = max(left_s, (record.block.counted_until_us - now_us) / 1e6, (record.block.until_us - now_us) / 1e6)
    if record.slots is not None:
        left_s = max(left_s, (in_flight.until_us(record.slots) - now_us) / 1e6)
    if record.lent is not None and record.lent.until_us > record.updated_us + record.lent.shift_us:
        left_s = max(left_s, LENT_TTL_S)
    if not left_s < TTL_MAX_S:
        return now_us / 1e6 + TTL_MAX_S
    return now_us / 1e6 + (max(0.0, left_s) + IDLE_TTL_S)


def histogram_step(latency_ms: float) -> int:
    """Return the histogram's step for a latency, from its exponent and mantissa; without a logarithm."""
    mantissa, exponent = math.frexp(latency_ms)
    if latency_ms <= 0 or exponent < OCTAVE_MIN:
        return 0
    step = (exponent - OCTAVE_MIN) * STEPS + bisect_right(STEP_EDGES, mantissa)
    return min(step, HISTOGRAM_STEPS - 1)
