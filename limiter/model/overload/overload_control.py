"""One bucket's part in overload control: its three controllers on one record (Q, S, G5).

    step(state, record, reports) → state, what to set in the record, why

refused share of a class = the largest that any controller asks for; one draw is held against it
rate of a class          = what its response times allow; 0 where nobody measures them
quality                  = what response times ask for;     overloaded = any controller says so

idle     nothing is due: nothing is done but to remember the least slack
due      an interval of expectations ends, a class has nreq samples or timeout_s has passed, or somebody reported load:
         each controller takes what came since it last ran
rest     nothing came, nobody is refused and nothing is remembered: nothing is due until something comes
anchor   the first reading: begin from here. Counters that went back: the bucket began again, count from zero
hold     the record is absent, or a counter is no number (F-P8)

Counters are cumulative, so what came since the last run is a difference whenever it is wanted, and a cycle in which
nothing is due needs none. A bucket is looked at in every cycle until its reading `is_resting`, and from then on when it
was touched: throttles are released while nobody asks, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from msgspec import MsgspecError, msgpack, to_builtins

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, Record
from limiter.model.overload import expectations, histogram, response_time, signals, utilisation
from limiter.model.overload.expectations import ExpectationParams, ExpectationSample, ExpectationState
from limiter.model.overload.overload_block import Overload
from limiter.model.overload.response_time import ClassSample, ResponseTimeParams, ResponseTimeSample, ResponseTimeState
from limiter.model.overload.shedding import CLASSES, QUALITY_FULL, FourFloats, Shedding, ShedOrder
from limiter.model.overload.signals import Report
from limiter.model.overload.utilisation import UtilisationParams, UtilisationSample, UtilisationState
from limiter.model.policy.criticality import Criticality, Ranks

Reason = expectations.Reason | response_time.Reason | utilisation.Reason


class Note(NamedTuple):
    """A reason with its time, as it is kept and shown (R11)."""

    at_us: float
    controller: str
    """Which of the three: the name of its part of the block."""
    rule: str
    before: float
    after: float
    """Of the throttle, of the rate or the quality, or of the level."""
    sentence: str


_ALMOST_US = 1.0
"""Cycles of 100 ms make a second, whatever the last bit of their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadParams:
    """What a policy's `overload` block comes to."""

    ranks: Ranks
    expectations: ExpectationParams | None = None
    response_time: ResponseTimeParams | None = None
    utilisation: UtilisationParams | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A record's counters when the controllers last ran."""

    read_us: float
    admitted: float
    timed: FourFloats
    missed: float
    refused: FourFloats
    histograms: tuple[float, ...]
    due_us: float = 0.0
    """When a controller will have something to do even if nothing happens."""
    due_timed: FourFloats = (math.inf,) * 4
    """Or how many samples of a class will give it something to do."""
    is_resting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadState:
    """What the controllers of one bucket remember."""

    expectations: ExpectationState | None = None
    response_time: ResponseTimeState | None = None
    utilisation: UtilisationState | None = None
    reported_us: float = 0.0
    """The newest report that was taken in."""
    reading: Reading | None = None
    slack_min_ms: float = math.inf
    """The least since the controllers last ran."""
    slacks_seen: tuple[float, float] = (math.inf, math.inf)
    """What the record said of slack when it was last read: none of it counts twice."""


def overload_params(overload: Overload) -> OverloadParams:
    """A policy's block, resolved."""
    ranks = overload.all_ranks()
    return OverloadParams(
        ranks=ranks,
        expectations=overload.expectations.params(ranks) if overload.expectations else None,
        response_time=overload.response_time.params(ranks) if overload.response_time else None,
        utilisation=overload.utilisation.params(ranks) if overload.utilisation else None,
    )


def step(
    state: OverloadState,
    record: Record | None,
    reports: Sequence[Report],
    params: OverloadParams,
    *,
    now_us: float,
    since_us: float = 0.0,
) -> tuple[OverloadState, ShedOrder | None, tuple[Reason, ...]]:
    """One bucket's cycle: what its controllers know now, what to set where it differs, and why anything moved.

    `since_us` is the cycle before this: a bucket at rest has rested until then.
    """
    if record is None or record.shedding is None:
        return state, None, ()
    known, reading = record.shedding, state.reading
    slacks = (known.slack_min_ms, known.slack_before_ms)
    if reading is not None and slacks != state.slacks_seen:
        state = _with_slack(state, slacks)
    if (
        reading is not None
        and reading.read_us <= now_us < reading.due_us
        and not _is_due(known, reading, reports, state)
    ):
        return state, None, ()
    now = _read(record, now_us)
    if now is None:
        return state, None, ()
    if reading is None:
        return _anchored(state, now, slacks, params), _order(state, known, params), ()
    if now.read_us <= reading.read_us:  # the store's clock went back
        return _anchored(state, now, slacks, params), None, ()
    then = _since(reading, now)
    if reading.is_resting and then.read_us < since_us < now_us:
        then = replace(then, read_us=since_us)
    state, reasons = _run(state, then, now, reports, params)
    came = now.timed != then.timed or now.refused != then.refused
    return _anchored(state, now, slacks, params, came=came), _order(state, known, params), reasons


def note(reason: Reason, at_us: float) -> Note:
    """What to keep of a reason."""
    return Note(at_us, _CONTROLLERS[type(reason)], reason.rule, reason.before, reason.after, str(reason))


_CONTROLLERS: dict[type, str] = {
    expectations.Reason: "expectations",
    response_time.Reason: "response_time",
    utilisation.Reason: "utilisation",
}


def due_us(state: OverloadState) -> float:
    """When to look at the bucket again although nobody touched it; never, while it rests."""
    return math.inf if state.reading is None else state.reading.due_us


def reconsidered(state: OverloadState) -> OverloadState:
    """The same under another `overload` block: a sample by the new terms begins at the next step, not when due (Q6)."""
    return replace(state, reading=None)


def pack_state(state: OverloadState) -> bytes:
    """What a new owner needs to go on. Where a sample began is not kept: it begins one of its own."""
    known = state.response_time
    if known is not None:
        classes = {name: replace(one, pending=(), pending_count=0.0) for name, one in known.classes.items()}
        known = replace(known, classes=classes, reasons=())
    return msgpack.encode(
        replace(
            state,
            response_time=known,
            reading=None,
            slack_min_ms=math.inf,
            slacks_seen=(math.inf, math.inf),
        )
    )


def unpack_state(raw: bytes) -> OverloadState:
    """What `pack_state` packed; nothing is known if it cannot be read, or holds what is no number (F-P8)."""
    try:
        state = _DECODER.decode(raw)
    except (MsgspecError, ValueError):  # a name that is no UTF-8 is the latter
        return OverloadState()
    if any(map(math.isnan, _numbers(to_builtins(state)))):
        return OverloadState()
    known = state.response_time
    if known is None:
        return state
    classes = {name: replace(one, pending=histogram.EMPTY) for name, one in known.classes.items()}
    return replace(state, response_time=replace(known, classes=classes))


_DECODER = msgpack.Decoder(OverloadState)


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


def _is_due(known: Shedding, reading: Reading, reports: Sequence[Report], state: OverloadState) -> bool:
    """Whether what happened gives a controller something to do before its time."""
    for timed, due_timed in zip(known.timed, reading.due_timed, strict=True):
        if timed >= due_timed:
            return True
    if reading.is_resting and tuple(known.refused) != reading.refused:
        return True  # a rate that was left low turns everybody away: nothing else will come
    return bool(reports) and signals.latest_us(reports) > state.reported_us


def _with_slack(state: OverloadState, slacks: tuple[float, float]) -> OverloadState:
    """The least slack, now that the record says something new; what it said of the epoch before only once."""
    slack_min_ms, slack_before_ms = slacks
    least = min(state.slack_min_ms, slack_min_ms)
    if slack_before_ms not in state.slacks_seen:
        least = min(least, slack_before_ms)
    return replace(state, slack_min_ms=least, slacks_seen=slacks)


def _read(record: Record, now_us: float) -> Reading | None:
    """The counters; None if one is no number."""
    known = record.shedding
    assert known is not None
    a, b, c, d = known.timed
    e, f, g, h = known.refused
    missed = sum(known.missed)
    if not math.isfinite(record.admitted + a + b + c + d + e + f + g + h + missed):
        return None
    return Reading(now_us, record.admitted, (a, b, c, d), missed, (e, f, g, h), tuple(record.histogram))


def _since(then: Reading, now: Reading) -> Reading:
    """Where the sample begins: at the last reading, or at zero if the bucket began again."""
    began_anew = now.admitted < then.admitted or any(
        late < early for late, early in zip(now.timed + now.refused, then.timed + then.refused, strict=True)
    )
    return replace(then, admitted=0.0, timed=_ZEROS, missed=0.0, refused=_ZEROS, histograms=()) if began_anew else then


_ZEROS: FourFloats = (0.0, 0.0, 0.0, 0.0)


def _run(
    state: OverloadState, then: Reading, now: Reading, reports: Sequence[Report], params: OverloadParams
) -> tuple[OverloadState, tuple[Reason, ...]]:
    """Run every controller that the policy has on what came since the last run."""
    reasons: list[Reason] = []
    elapsed_s = (now.read_us - then.read_us) / 1e6
    missing, timing, busy = state.expectations, state.response_time, state.utilisation
    reported_us = state.reported_us
    if params.expectations is not None:
        missing = missing or expectations.start(params.expectations)
        sample = _expectation_sample(state, then, now, elapsed_s)
        sample = sample._replace(refused=_refused_in_part(missing.throttle, then, now, params.ranks))
        missing = expectations.step(missing, sample, params.expectations)
        reasons += [missing.reason] if missing.reason is not None else []
    if params.response_time is not None:
        timing = response_time.step(
            timing or ResponseTimeState(), _response_times(then, now, elapsed_s), params.response_time
        )
        reasons += timing.reasons
    if params.utilisation is not None:
        newest_us = signals.latest_us(reports)
        heard = newest_us > reported_us
        stale_us = now.read_us - params.utilisation.stale_s * 1e6
        loads = signals.loads(reports, since_us=stale_us) if heard else {}
        busy = utilisation.step(busy or UtilisationState(), UtilisationSample(elapsed_s, loads), params.utilisation)
        reported_us = max(reported_us, newest_us)
        if busy.reason is not None and (heard or busy.reason.before != busy.reason.after):
            reasons.append(busy.reason)
    state = OverloadState(expectations=missing, response_time=timing, utilisation=busy, reported_us=reported_us)
    return state, tuple(reasons)


def _expectation_sample(state: OverloadState, then: Reading, now: Reading, elapsed_s: float) -> ExpectationSample:
    timed = sum(now.timed) - sum(then.timed)
    slack_min_ms = math.inf
    if timed > 0:
        # No new slack: nobody had less than the least that is known already.
        slack_min_ms = state.slacks_seen[0] if state.slack_min_ms == math.inf else state.slack_min_ms
    return ExpectationSample(elapsed_s, timed, now.missed - then.missed, slack_min_ms, now.admitted - then.admitted)


def _refused_in_part(throttle: float, then: Reading, now: Reading, ranks: Ranks) -> float:
    """Refused requests of the classes that a larger or smaller throttle would refuse more or less of."""
    return math.fsum(
        after - before
        for criticality, before, after in zip(CLASSES, then.refused, now.refused, strict=True)
        if 0 < expectations.refusal_share(throttle, ranks[criticality]) < 1
    )


def _response_times(then: Reading, now: Reading, elapsed_s: float) -> ResponseTimeSample:
    """Of every class that was ever heard of."""
    classes: dict[Criticality, ClassSample] = {}
    for number, criticality in enumerate(CLASSES):
        if not now.timed[number] + now.refused[number]:
            continue
        counts: tuple[float, ...] = ()
        if now.timed[number] > then.timed[number]:
            first, last = number * HISTOGRAM_STEPS, (number + 1) * HISTOGRAM_STEPS
            counts = histogram.between(then.histograms[first:last], now.histograms[first:last])
        classes[criticality] = ClassSample(counts, now.refused[number] - then.refused[number])
    return ResponseTimeSample(elapsed_s, classes)


def _anchored(
    state: OverloadState, now: Reading, slacks: tuple[float, float], params: OverloadParams, *, came: bool = True
) -> OverloadState:
    """Begin the next sample here."""
    if not came and _is_calm(state, params):
        a, b, c, d = now.timed
        reading = replace(now, due_us=math.inf, due_timed=(a + 1, b + 1, c + 1, d + 1), is_resting=True)
        return replace(state, reading=reading, slack_min_ms=math.inf, slacks_seen=slacks)
    due_us, due_timed = math.inf, now.due_timed
    if params.expectations is not None:
        left_s = params.expectations.interval_s - (state.expectations.open_s if state.expectations else 0.0)
        due_us = now.read_us + left_s * 1e6
    if params.response_time is not None:
        due_us = min(due_us, now.read_us + _response_time_left_s(state.response_time, params.response_time) * 1e6)
        due_timed = _due_timed(state.response_time, now.timed, params.response_time)
    if params.utilisation is not None:
        due_us = min(due_us, now.read_us + params.utilisation.smoothing_s * 1e6)
    reading = replace(now, due_us=due_us - _ALMOST_US, due_timed=due_timed)
    return replace(state, reading=reading, slack_min_ms=math.inf, slacks_seen=slacks)


def _is_calm(state: OverloadState, params: OverloadParams) -> bool:
    """Whether every controller would stay as it is, however often it ran on nothing."""
    missing, timing, busy = state.expectations, state.response_time, state.utilisation
    if params.expectations is not None and (
        missing is None
        or missing.throttle != params.expectations.initial
        or missing.open.settled
        or any(interval.settled for interval in missing.intervals)
    ):
        return False
    if timing is not None and any(one.above or one.refusing or one.pending_count for one in timing.classes.values()):
        return False
    return busy is None or not (busy.level or busy.signals)


def _response_time_left_s(known: ResponseTimeState | None, params: ResponseTimeParams) -> float:
    waited_s = max((one.pending_s for one in known.classes.values()), default=0.0) if known is not None else 0.0
    return max(0.0, params.timeout_s - waited_s)


def _due_timed(known: ResponseTimeState | None, timed: FourFloats, params: ResponseTimeParams) -> FourFloats:
    classes = known.classes if known is not None else {}
    a, b, c, d = (
        count + params.nreq - (classes[criticality].pending_count if criticality in classes else 0.0)
        for count, criticality in zip(timed, CLASSES, strict=True)
    )
    return a, b, c, d


def _order(state: OverloadState, known: Shedding, params: OverloadParams) -> ShedOrder | None:
    """What the controllers ask for together; None if the record says so already."""
    order = ShedOrder(
        state.response_time.quality if params.response_time and state.response_time else QUALITY_FULL,
        _is_overloaded(state, params),
        _by_class(lambda criticality: _refused_share(state, params, params.ranks[criticality])),
        _by_class(lambda criticality: _rate(state, params, criticality)),
    )
    present = (known.quality, known.overloaded == 1, tuple(known.refused_shares), tuple(known.rates))
    return None if order == present else order


def _by_class(number_of: Callable[[Criticality], float]) -> FourFloats:
    a, b, c, d = (number_of(criticality) for criticality in CLASSES)
    return a, b, c, d


def _is_overloaded(state: OverloadState, params: OverloadParams) -> bool:
    """Whether any controller that the policy has now says so."""
    return bool(
        (params.expectations and state.expectations and state.expectations.overloaded)
        or (params.response_time and state.response_time and state.response_time.overloaded)
        or (params.utilisation and state.utilisation and state.utilisation.overloaded)
    )


def _refused_share(state: OverloadState, params: OverloadParams, rank: float) -> float:
    """The largest that any controller asks for: one draw against it refuses no more than the strictest would."""
    share = 0.0
    if params.expectations is not None:
        throttle = state.expectations.throttle if state.expectations else params.expectations.initial
        share = expectations.refusal_share(throttle, rank)
    if params.utilisation is not None and state.utilisation is not None:
        share = max(share, utilisation.refusal_share(state.utilisation.level, rank, params.ranks))
    return share


def _rate(state: OverloadState, params: OverloadParams, criticality: Criticality) -> float:
    if params.response_time is None or state.response_time is None:
        return 0.0
    known = state.response_time.classes.get(criticality)
    return known.rate if known is not None else 0.0
