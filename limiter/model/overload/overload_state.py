"""Inputs and state of overload control in one bucket: a policy's terms, its controllers' state, a record's counters.

params     the `overload` block, resolved for one of the partitions that divide the bucket (S8)
state      of each controller, and of all together: the asking classes, the start of the sample
reading    a record's cumulative counters at a time; the difference of two of them is a sample

The store keeps the state without the reading: a new owner begins a sample of its own, but knows the limit, the
throttle, the quality and the response time without a queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as replace_params
from struct import Struct as Layout
from typing import Any, NamedTuple

from msgspec import MsgspecError, Struct, msgpack, to_builtins
from msgspec.structs import replace

from limiter.model.bucket.bucket import Record
from limiter.model.bucket.in_flight import Slots
from limiter.model.overload import histogram
from limiter.model.overload.expectations import ExpectationParams, ExpectationState, Mode, Rules
from limiter.model.overload.in_flight_limit import LimitParams, LimitState
from limiter.model.overload.overload_block import CountedIn, Overload, ResponseRules, by_class
from limiter.model.overload.published_expectations import PublishedState
from limiter.model.overload.quality import FULL, Quality, QualityParams
from limiter.model.overload.response_time import ResponseTimeParams, ResponseTimeState
from limiter.model.overload.shedding import NO_CLASS, FourFloats
from limiter.model.overload.utilisation import UtilisationParams, UtilisationState
from limiter.model.policy.criticality import Criticality, Ranks

PERCENTILE_S = 5.0
"""Time between two updates of the shown percentile."""

ASKED_S = 10.0
"""Time without requests after which a class no longer shields those below it (S8)."""

NEVER_TIMED: FourFloats = (math.inf,) * 4

ALL = Criticality.CRITICAL
"""Name of the only controller without classes."""


class Terms(NamedTuple):
    """Targets and ranks for the limit on requests in flight."""

    limit: LimitParams
    targets_s: FourFloats
    ranks: FourFloats
    """Ranks of the classes; all equal without classes."""
    in_work: bool = False
    is_limiting: bool = True
    """False with `degrade: only`, which refuses no requests."""
    quality: QualityParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadParams:
    """A policy's `overload` block, resolved for one of the partitions that divide its buckets."""

    ranks: Ranks
    ranks_by_class: FourFloats
    expectations: ExpectationParams | None = None
    limit: Terms | None = None
    response_time: ResponseTimeParams | None = None
    """Parameters of the published rules."""
    with_classes: bool = True
    utilisation: UtilisationParams | None = None
    percentile: float = 0.0
    """The percentile to show; 0 if the policy keeps no histogram (S7)."""
    is_followed: bool = False
    """True if every cycle needs a step, because a value depends on the requests in flight."""

    @property
    def is_published(self) -> bool:
        """True if expectations use the published rules."""
        return self.expectations is not None and self.expectations.rules is Rules.PUBLISHED


class Reading(Struct, frozen=True, gc=False):
    """A record's counters at a time."""

    read_us: float
    in_flight: float
    admitted: float
    work_charged: float
    asked: FourFloats
    refused: FourFloats
    timed: FourFloats
    late: float
    missed: float
    seconds: float
    failed: float = 0.0
    histograms: tuple[float, ...] = ()


class Anchor(Struct, frozen=True, gc=False):
    """The reading at which the controllers last ran, as it is remembered of each bucket until they run again."""

    read_us: float
    in_flight: float
    counts: bytes
    """The counters, packed: as objects they would take three times the memory."""
    histograms: tuple[float, ...] = ()
    due_us: float = 0.0
    """Time at which a controller is due even without requests."""
    due_timed: FourFloats = NEVER_TIMED
    """Count of a class's samples at which its controller is due."""
    is_resting: bool = False


class Between(NamedTuple):
    """The counts between two readings."""

    elapsed_s: float
    in_flight: float
    """Requests in flight now, or their charges."""
    admitted: float
    work_charged: float
    asked: FourFloats
    refused: FourFloats
    timed: float
    late: float
    missed: float
    seconds: float
    failed: float


class Histograms(NamedTuple):
    """Counts of latencies at a time."""

    read_us: float
    counts: tuple[float, ...]


class OverloadState(Struct, frozen=True, kw_only=True, gc=False):
    """State of the controllers of one bucket."""

    expectations: ExpectationState | None = None
    published: PublishedState | None = None
    """State of expectations by the published rules."""
    limit: LimitState | None = None
    noted_limit: float = 0.0
    is_hung: bool = False
    target_ms: float = 0.0
    """The shortest target of the asking classes; 0 if none applies."""
    percentile_ms: float = 0.0
    """Percentile of the last PERCENTILE_S; 0 while unknown. Only if the policy keeps a histogram."""
    shown: Histograms | None = None
    """Histograms at the start of the percentile's sample."""
    charge: float = 0.0
    """Mean charge of a request; 0 while unknown. Only if limits count work."""
    quality: Quality = FULL
    response_time: ResponseTimeState | None = None
    utilisation: UtilisationState | None = None
    asked_us: FourFloats = (-math.inf,) * 4
    """Time of the last request of each class."""
    asked_parts: FourFloats = NO_CLASS
    """Each class's part of all requests, averaged. Only for rates without classes."""
    reported_us: float = 0.0
    """Time of the newest report that was used."""
    reading: Anchor | None = None
    slack_min_ms: float = math.inf
    """Least slack since the controllers last ran."""
    slacks_seen: tuple[float, float] = (math.inf, math.inf)
    """Slack in the record at the last reading, so that none counts twice."""


def overload_params(overload: Overload, *, partitions: int = 1) -> OverloadParams:
    """Resolve a policy's block; limits and rates of a divided bucket are divided as well (S8)."""
    ranks = overload.all_ranks()
    timing, limit, rates = overload.response_time, None, None
    if timing is not None and timing.rules is ResponseRules.PUBLISHED:
        rates = timing.params(ranks).divided(partitions)
    elif timing is not None:
        a, b, c, d = (target_ms / 1000 for target_ms in timing.targets_by_class())
        limit = Terms(
            timing.limit_params().divided(partitions),
            (a, b, c, d),
            by_class(ranks) if timing.classes else (1.0, 1.0, 1.0, 1.0),
            timing.counted_in is CountedIn.WORK,
            timing.degrade != "only",
            timing.quality_params(),
        )
    missing = overload.expectations.params(ranks) if overload.expectations else None
    is_solved = missing is not None and missing.mode is Mode.IDEAL and missing.rules is Rules.BOUNDED
    return OverloadParams(
        ranks=ranks,
        ranks_by_class=by_class(ranks),
        expectations=missing,
        limit=limit,
        response_time=rates,
        with_classes=timing is None or timing.classes,
        percentile=timing.percentile if timing is not None and (timing.percentiles or rates is not None) else 0.0,
        utilisation=overload.utilisation.params(ranks) if overload.utilisation else None,
        is_followed=limit is not None or is_solved,
    )


def asks(state: OverloadState, now_us: float) -> tuple[bool, bool, bool, bool]:
    """Return for each class True if it has asked recently."""
    since_us = now_us - ASKED_S * 1e6
    a, b, c, d = state.asked_us
    return a > since_us, b > since_us, c > since_us, d > since_us


def asking_ranks(state: OverloadState, params: OverloadParams, now_us: float) -> list[float]:
    """Return the ranks of the asking classes."""
    who_asks = asks(state, now_us)
    return [rank for rank, is_asking in zip(params.ranks_by_class, who_asks, strict=True) if is_asking]


def pack_state(state: OverloadState) -> bytes:
    """Return the state as bytes for a new owner, without the start of the sample: the owner begins its own."""
    known = state.response_time
    if known is not None:
        classes = {name: replace_params(one, pending=(), pending_count=0.0) for name, one in known.classes.items()}
        known = replace_params(known, classes=classes, reasons=())
    missing, published = state.expectations, state.published
    return msgpack.encode(
        replace(
            state,
            expectations=None if missing is None else replace(missing, reason=None),
            published=None if published is None else replace(published, reason=None),
            response_time=known,
            shown=None,
            reading=None,
            slack_min_ms=math.inf,
            slacks_seen=(math.inf, math.inf),
        )
    )


def unpack_state(raw: bytes) -> OverloadState:
    """Return the state that `pack_state` packed; an empty one if the bytes are unreadable or contain NaN (F-P8)."""
    try:
        state = _DECODER.decode(raw)
    except (MsgspecError, ValueError):  # ValueError: a name that is not UTF-8
        return OverloadState()
    if any(map(math.isnan, _numbers(to_builtins(state)))):
        return OverloadState()
    known = state.response_time
    if known is None:
        return state
    classes = {name: replace_params(one, pending=histogram.EMPTY) for name, one in known.classes.items()}
    return replace(state, response_time=replace_params(known, classes=classes))


class Seen(NamedTuple):
    """The controllers' figures, for fields and metrics (S10)."""

    throttle: float | None
    """M; None without expectations."""
    late_share: float | None
    """Share of recent answers that were late and count; None if not measured."""
    target_ms: float | None
    percentile_ms: float | None
    """None if the policy keeps no histogram, or without recent answers."""


NOTHING_SEEN = Seen(None, None, None, None)


def seen(state: OverloadState) -> Seen:
    """Return the figures of a state."""
    missing, limit = state.published or state.expectations, state.limit
    late_share = None
    if limit is not None:
        late_share = limit.late_share
    elif missing is not None:
        solved = state.expectations.limit if state.expectations is not None else None
        settled = sum(interval.settled for interval in missing.intervals)
        missed = sum(interval.missed for interval in missing.intervals)
        late_share = solved.late_share if solved is not None else missed / settled if settled else 0.0
    return Seen(
        None if missing is None else missing.throttle,
        late_share,
        state.target_ms or None,
        state.percentile_ms or None,
    )


_DECODER = msgpack.Decoder(OverloadState)
_COUNTS = Layout("<18d")
_NEWS = Layout("<8d")
"""The first of them: requests and settles of each class."""


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, float | int):
        yield value
        return
    elif not isinstance(value, tuple | list):
        return
    for inner in value:
        yield from _numbers(inner)


def read(record: Record, now_us: float, *, with_histograms: bool = False) -> Reading | None:
    """Return the counters; None if one is NaN or infinite."""
    known = record.shedding
    assert known is not None
    a, b, c, d = known.asked
    e, f, g, h = known.refused
    i, j, k, m = known.timed
    late, in_flight = sum(known.late), in_flight_of(record, now_us)
    total = a + b + c + d + e + f + g + h + i + j + k + m + late + in_flight
    if not math.isfinite(total + record.admitted + record.missed + record.work_charged + known.seconds + known.failed):
        return None
    return Reading(
        now_us,
        in_flight,
        record.admitted,
        record.work_charged,
        (a, b, c, d),
        (e, f, g, h),
        (i, j, k, m),
        late,
        record.missed,
        known.seconds,
        known.failed,
        tuple(record.histogram) if with_histograms else (),
    )


def in_flight_of(record: Record, now_us: float) -> float:
    """Return the open reservations at a time, without those in time slots that are over by then."""
    slots: Slots | None = record.slots
    if slots is None:
        return 0.0
    end_us = slots.start_us + slots.length_us
    if now_us < end_us:
        return slots.present + slots.before
    next_us = slots.longest_us if slots.longest_us > 0 else slots.length_us
    return slots.present if now_us < end_us + next_us else 0.0


def anchored(now: Reading, *, due_us: float, due_timed: FourFloats = NEVER_TIMED, is_resting: bool = False) -> Anchor:
    """Return what is remembered of a reading."""
    counts = _COUNTS.pack(
        *now.asked, *now.timed, *now.refused, now.admitted, now.work_charged, now.late, now.missed, now.seconds,
        now.failed,
    )  # fmt: skip
    return Anchor(now.read_us, now.in_flight, counts, now.histograms, due_us, due_timed, is_resting)


def has_news(record: Record, then: Anchor, now_us: float) -> bool:
    """Return True if a request came, was settled or is no longer in flight since a reading."""
    known = record.shedding
    assert known is not None
    if not then.counts.startswith(_NEWS.pack(*known.asked, *known.timed)):
        return True
    return in_flight_of(record, now_us) != then.in_flight


def since(then: Anchor, now: Reading, *, read_us: float) -> Reading:
    """Return the start of the sample, at a time: the last reading, or zero if the bucket began again."""
    a, b, c, d, e, f, g, h, i, j, k, m, admitted, work_charged, late, missed, seconds, failed = _COUNTS.unpack(
        then.counts
    )
    if now.admitted < admitted or sum(now.asked) < a + b + c + d or sum(now.timed) < e + f + g + h:
        return Reading(read_us, 0.0, 0.0, 0.0, NO_CLASS, NO_CLASS, NO_CLASS, 0.0, 0.0, 0.0)
    return Reading(
        read_us,
        then.in_flight,
        admitted,
        work_charged,
        (a, b, c, d),
        (i, j, k, m),
        (e, f, g, h),
        late,
        missed,
        seconds,
        failed,
        then.histograms,
    )


def between(then: Reading, now: Reading) -> Between:
    """Return the sample between two readings."""
    a, b, c, d = now.asked
    e, f, g, h = then.asked
    i, j, k, m = now.refused
    n, o, p, q = then.refused
    asked = (a - e, b - f, c - g, d - h)
    return Between(
        (now.read_us - then.read_us) / 1e6,
        now.in_flight,
        now.admitted - then.admitted,
        now.work_charged - then.work_charged,
        asked if any(asked) else NO_CLASS,
        (i - n, j - o, k - p, m - q),
        0.0 if now.timed == then.timed else sum(now.timed) - sum(then.timed),
        now.late - then.late,
        now.missed - then.missed,
        now.seconds - then.seconds,
        now.failed - then.failed,
    )
