"""One bucket's overload control: its controllers on one record (Q, S, G5).

    step(state, record, reports) → state, order for the record, reasons

idle     nothing is due: only the least slack is noted
due      every cycle with a limit on what is in flight; else when an interval of expectations ends, a class has nreq
         samples or timeout_s has passed, or somebody reported load: each controller takes what came since it last ran
rest     nothing came, nothing is in flight, nobody is refused and nothing is remembered: nothing is due until
         something comes. A backend that hangs is never at rest: silence is not calm (Q8, F-P11)
anchor   the first reading: begin from here. Counters that went back: the bucket began again, count from zero
hold     the record is absent, or a counter is NaN or infinite (F-P8)

Counters are cumulative, so what came since the last run is a difference whenever it is wanted, and a cycle in which
nothing is due needs none. A bucket is looked at in every cycle until its reading `is_resting`, and from then on when it
was touched: throttles are released while nobody asks, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from limiter.model.bucket.bucket import HISTOGRAM_STEPS, Record
from limiter.model.overload import (
    expectations,
    histogram,
    in_flight_limit,
    published_expectations,
    quality,
    response_time,
    signals,
    utilisation,
)
from limiter.model.overload.expectations import ExpectationParams, ExpectationSample, Rules
from limiter.model.overload.in_flight_limit import LimitSample, LimitState
from limiter.model.overload.orders import RENEW_US, order_of
from limiter.model.overload.overload_state import (
    ALL,
    ASKED_S,
    NEVER_TIMED,
    PERCENTILE_S,
    Anchor,
    Between,
    Histograms,
    OverloadParams,
    OverloadState,
    Reading,
    Terms,
    anchored,
    asking_ranks,
    asks,
    between,
    has_news,
    read,
    since,
)
from limiter.model.overload.quality import FULL, Quality
from limiter.model.overload.response_time import ClassSample, ResponseTimeParams, ResponseTimeSample, ResponseTimeState
from limiter.model.overload.shedding import CLASSES, NO_CLASS, FourFloats, ShedOrder
from limiter.model.overload.signals import Report
from limiter.model.overload.utilisation import UtilisationSample, UtilisationState
from limiter.model.policy.criticality import Criticality

REST_LIMIT = 0.8
"""Part of the initial limit below which a bucket does not rest, so that the limit recovers without requests."""
NOTED = 0.1
"""Relative: a smaller move of a limit under the same rule leaves no note."""
AT_ONCE_US = 0.0
IDLE_US = 1_000_000.0
"""Time between two steps of a bucket that is idle but not at rest."""


class LimitReason(NamedTuple):
    """Reason for the limit on requests in flight; `str` gives it in words (R11)."""

    rule: Literal["cut", "refuse", "calm", "futile", "hung"]
    before: float
    after: float
    late_share: float
    """Per cent, like the next field."""
    allowed: float
    target_ms: float
    response_ms: float

    def __str__(self) -> str:
        """Return it in words: "23 % later than 1000 ms (allowed 10 %), mean 840 ms: limit 40 → 31 in flight"."""
        told = f"{self.late_share:.3g} % later than {self.target_ms:g} ms (allowed {self.allowed:.3g} %)"
        told += f", mean {self.response_ms:.4g} ms"
        if self.rule == "futile":
            told += ", and as slow with fewer in flight: load is not the cause"
        elif self.rule == "hung":
            told = f"nobody is answered for twice the target of {self.target_ms:g} ms"
        moved = f"{self.before:.4g} → {self.after:.4g}" if self.after != self.before else f"stays {self.after:.4g}"
        return f"{told}: limit {moved} in flight"


Reason = (
    expectations.Reason
    | published_expectations.Reason
    | LimitReason
    | quality.Reason
    | response_time.Reason
    | utilisation.Reason
)


class Note(NamedTuple):
    """A reason with its time, as it is stored and shown (R11)."""

    at_us: float
    controller: str
    """Name of the controller's part of the `overload` block."""
    rule: str
    before: float
    after: float
    """Throttle, limit, rate, quality or level, like `before`."""
    sentence: str


_ALMOST_US = 1.0
"""Tolerance with which ten cycles of 100 ms make a second in spite of rounding."""


def step(
    state: OverloadState,
    record: Record | None,
    reports: Sequence[Report],
    params: OverloadParams,
    *,
    now_us: float,
    since_us: float = 0.0,
) -> tuple[OverloadState, ShedOrder | None, tuple[Reason, ...]]:
    """Run one bucket's cycle; return the new state, the order if the record differs, and the reasons of all moves.

    `since_us` is the previous cycle: a bucket at rest has rested until then.
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
        and not _is_due(record, reading, reports, state, params, now_us)
    ):
        return state, None, ()
    now = read(record, now_us, with_histograms=params.percentile > 0)
    if now is None:
        return state, None, ()
    if reading is None or now.read_us <= reading.read_us:  # first reading, or the store's clock went back
        state = _begun(state, now, params)
        state = _anchored(state, now, slacks, params)
        return state, order_of(state, known, params, now_us) if reading is None else None, ()
    is_rested = reading.is_resting and reading.read_us < since_us < now_us
    then = since(reading, now, read_us=since_us if is_rested else reading.read_us)
    came = between(then, now)
    state = _asking(state, came, now_us)
    state, reasons = _run(state, then, now, came, reports, params)
    is_quiet = not came.timed and not now.in_flight and came.asked is NO_CLASS
    return (
        _anchored(state, now, slacks, params, is_quiet=is_quiet),
        order_of(state, known, params, now_us),
        reasons,
    )


def note(reason: Reason, at_us: float) -> Note:
    """Return the note of a reason, for the store."""
    return Note(at_us, _CONTROLLERS[type(reason)], reason.rule, reason.before, reason.after, str(reason))


_CONTROLLERS: dict[type, str] = {
    expectations.Reason: "expectations",
    published_expectations.Reason: "expectations",
    LimitReason: "response_time",
    quality.Reason: "response_time",
    response_time.Reason: "response_time",
    utilisation.Reason: "utilisation",
}


def due_us(state: OverloadState) -> float:
    """Return the time of the next step of a bucket that is not used; infinity while it rests."""
    return math.inf if state.reading is None else state.reading.due_us


def reconsidered(state: OverloadState) -> OverloadState:
    """Return the state for a changed `overload` block: the next step begins a new sample, due or not (Q6)."""
    return replace(state, reading=None)


# Reading


def _is_due(
    record: Record,
    reading: Anchor,
    reports: Sequence[Report],
    state: OverloadState,
    params: OverloadParams,
    now_us: float,
) -> bool:
    """Return True if new counts make a controller run before its time."""
    known = record.shedding
    assert known is not None
    if (params.is_followed or reading.is_resting) and has_news(record, reading, now_us):
        return True
    for timed, due_timed in zip(known.timed, reading.due_timed, strict=True):
        if timed >= due_timed:
            return True
    return bool(reports) and signals.latest_us(reports) > state.reported_us


def _with_slack(state: OverloadState, slacks: tuple[float, float]) -> OverloadState:
    """Update the least slack from the record; the slack of the epoch before counts only once."""
    slack_min_ms, slack_before_ms = slacks
    least = min(state.slack_min_ms, slack_min_ms)
    if slack_before_ms not in state.slacks_seen:
        least = min(least, slack_before_ms)
    return replace(state, slack_min_ms=least, slacks_seen=slacks)


# Stepping


def _begun(state: OverloadState, now: Reading, params: OverloadParams) -> OverloadState:
    """Return the first state of every controller, for a bucket that is new or has a new owner."""
    if params.expectations is not None:
        if params.is_published:
            state = replace(state, published=state.published or published_expectations.start(params.expectations))
        else:
            state = replace(state, expectations=state.expectations or expectations.start(params.expectations))
    if params.limit is not None and state.limit is None:
        target_s = _target_s(state, params.limit, now.read_us)
        unit = state.charge or 1.0
        limit = in_flight_limit.start(params.limit.limit, target_s, now.in_flight / unit)
        state = replace(state, limit=limit, noted_limit=limit.limit)
    return state


def _asking(state: OverloadState, came: Between, now_us: float) -> OverloadState:
    """Note the classes that ask."""
    if came.asked is NO_CLASS:
        return state
    a, b, c, d = came.asked
    i, j, k, m = state.asked_us
    return replace(state, asked_us=(now_us if a else i, now_us if b else j, now_us if c else k, now_us if d else m))


def _run(
    state: OverloadState,
    then: Reading,
    now: Reading,
    came: Between,
    reports: Sequence[Report],
    params: OverloadParams,
) -> tuple[OverloadState, tuple[Reason, ...]]:
    """Run every controller of the policy on the counts since the last run."""
    reasons: list[Reason] = []
    state = _begun(state, now, params)
    if params.expectations is not None:
        state = _run_expectations(state, came, params, reasons)
    if params.limit is not None:
        state = _run_limit(state, came, params.limit, now.read_us, reasons)
    if params.percentile:
        state = _with_percentile(state, now, params.percentile)
    if params.response_time is not None:
        state = _run_rates(state, then, now, came, params, reasons)
    if params.utilisation is not None:
        state = _run_utilisation(state, now.read_us, came, reports, params, reasons)
    return state, tuple(reasons)


def _run_expectations(
    state: OverloadState, came: Between, params: OverloadParams, reasons: list[Reason]
) -> OverloadState:
    terms = params.expectations
    assert terms is not None
    sample = ExpectationSample(
        came.elapsed_s,
        came.in_flight,
        came.timed,
        came.missed,
        came.seconds,
        came.admitted,
        came.asked,
        sum(came.refused),
        failed=came.failed,
    )
    if params.is_published:
        assert state.published is not None
        stepped = published_expectations.step(state.published, _with_least_slack(state, sample), terms)
        if stepped.reason is not None:
            reasons.append(stepped.reason)
        return replace(state, published=stepped)
    assert state.expectations is not None
    missing = expectations.step(state.expectations, sample, terms)
    if missing.reason is not None:
        reasons.append(missing.reason)
    return replace(state, expectations=missing)


def _with_least_slack(state: OverloadState, sample: ExpectationSample) -> ExpectationSample:
    if not sample.settled > 0:
        return sample
    # No new slack: the known least is still the least.
    least_ms = state.slacks_seen[0] if state.slack_min_ms == math.inf else state.slack_min_ms
    return sample._replace(slack_min_ms=least_ms)


def _target_s(state: OverloadState, terms: Terms, now_us: float) -> float:
    """Return the shortest target of the asking classes; of all classes if none asks."""
    a, b, c, d = targets_s = terms.targets_s
    if a == b == c == d:  # as most policies say
        return a
    asked = [target_s for target_s, is_asking in zip(targets_s, asks(state, now_us), strict=True) if is_asking]
    return min(asked or targets_s)


def _run_limit(
    state: OverloadState, came: Between, terms: Terms, now_us: float, reasons: list[Reason]
) -> OverloadState:
    before = state.limit
    assert before is not None
    charge = _charge(state.charge, came) if terms.in_work else 0.0
    in_flight = came.in_flight / (charge or 1.0)
    target_s = _target_s(state, terms, now_us)
    sample = LimitSample(
        came.elapsed_s, in_flight, came.timed, came.late, sum(came.refused), came.seconds, target_s, came.failed
    )
    limit = in_flight_limit.step(before, sample, terms.limit)
    is_hung = in_flight_limit.is_hung(limit, in_flight, target_s)
    noted = state.noted_limit
    is_moved = limit.rule != "calm" and abs(limit.limit - noted) > NOTED * noted
    if limit.rule != before.rule or is_moved or is_hung != state.is_hung:
        reasons.append(
            LimitReason(
                "hung" if is_hung else limit.rule,
                noted,
                limit.limit,
                limit.late_share * 100,
                terms.limit.allowed * 100,
                target_s * 1000,
                limit.response_s * 1000,
            )
        )
        noted = limit.limit
    graded = _graded(state.quality, limit, came.elapsed_s, target_s, terms, reasons)
    return replace(
        state,
        limit=limit,
        noted_limit=noted,
        is_hung=is_hung,
        charge=charge,
        quality=graded,
        target_ms=state.target_ms if state.target_ms == target_s * 1000 else target_s * 1000,
    )


def _with_percentile(state: OverloadState, now: Reading, percentile: float) -> OverloadState:
    """Update the percentile of the last seconds, if the policy keeps a histogram (S7)."""
    began = state.shown
    if began is None or len(began.counts) != len(now.histograms):
        return replace(state, shown=Histograms(now.read_us, now.histograms))
    if now.read_us - began.read_us < PERCENTILE_S * 1e6 and now.read_us >= began.read_us:
        return state
    counts = histogram.between(began.counts, now.histograms)
    steps = [sum(counts[step::HISTOGRAM_STEPS]) for step in range(HISTOGRAM_STEPS)]
    found_ms = histogram.percentile(steps, percentile)
    return replace(state, percentile_ms=found_ms or 0.0, shown=Histograms(now.read_us, now.histograms))


def _charge(known: float, came: Between) -> float:
    """Return the mean charge of a request, averaged over about ten cycles."""
    if not (came.admitted > 0 and 0 < came.work_charged < math.inf):
        return known
    charge = came.work_charged / came.admitted
    return known + 0.1 * (charge - known) if known else charge


def _graded(
    known: Quality, limit: LimitState, elapsed_s: float, target_s: float, terms: Terms, reasons: list[Reason]
) -> Quality:
    """Step the quality: it falls while answers are late or requests are refused, and recovers slowly (S8)."""
    if terms.quality is None:
        return FULL
    allowed = terms.limit.allowed if terms.is_limiting else terms.limit.allowed / 2
    moved = quality.step(
        known,
        terms.quality,
        elapsed_s=elapsed_s,
        target_s=target_s,
        is_late=limit.rule == "cut" or (terms.is_limiting and limit.is_refusing),
        is_calm=limit.rule == "calm" and limit.late_share <= allowed,
    )
    if moved.value != known.value:
        rule: quality.Rule = "degrade" if moved.value < known.value else "restore"
        reasons.append(quality.Reason(rule, known.value, moved.value, limit.late_share * 100))
    return moved


def _run_rates(
    state: OverloadState, then: Reading, now: Reading, came: Between, params: OverloadParams, reasons: list[Reason]
) -> OverloadState:
    """Run the published rules."""
    assert params.response_time is not None
    sample = _response_times(state, then, now, came, with_classes=params.with_classes)
    timing = response_time.step(state.response_time or ResponseTimeState(), sample, params.response_time)
    reasons += timing.reasons
    parts = state.asked_parts if params.with_classes else _parts(state.asked_parts, came)
    target_ms = min(params.response_time.target_of(name) for name in CLASSES)
    return replace(state, response_time=timing, asked_parts=parts, target_ms=target_ms)


def _parts(known: FourFloats, came: Between) -> FourFloats:
    """Return each class's part of all requests."""
    total = sum(came.asked)
    if not total > 0:
        return known
    weight = min(1.0, came.elapsed_s / ASKED_S) if any(known) else 1.0
    a, b, c, d = (part + weight * (asked / total - part) for part, asked in zip(known, came.asked, strict=True))
    return a, b, c, d


def _response_times(
    state: OverloadState, then: Reading, now: Reading, came: Between, *, with_classes: bool
) -> ResponseTimeSample:
    """Return the sample of every asking class; without classes, one sample of all (S8)."""
    is_asking = asks(state, now.read_us)
    classes: dict[Criticality, ClassSample] = {}
    for number, criticality in enumerate(CLASSES):
        if not is_asking[number] and now.timed[number] == then.timed[number]:
            continue
        counts: tuple[float, ...] = ()
        if now.timed[number] > then.timed[number]:
            first, last = number * HISTOGRAM_STEPS, (number + 1) * HISTOGRAM_STEPS
            counts = histogram.between(then.histograms[first:last], now.histograms[first:last])
        classes[criticality] = ClassSample(counts, came.refused[number])
    if with_classes or not classes:
        return ResponseTimeSample(came.elapsed_s, classes)
    together: Sequence[float] = ()
    for one in classes.values():
        together = histogram.added(together, one.histogram) if together and one.histogram else together or one.histogram
    return ResponseTimeSample(came.elapsed_s, {ALL: ClassSample(together, sum(came.refused))})


def _run_utilisation(
    state: OverloadState,
    now_us: float,
    came: Between,
    reports: Sequence[Report],
    params: OverloadParams,
    reasons: list[Reason],
) -> OverloadState:
    terms = params.utilisation
    assert terms is not None
    newest_us = signals.latest_us(reports)
    is_heard = newest_us > state.reported_us
    loads = signals.loads(reports, since_us=now_us - terms.stale_s * 1e6) if is_heard else {}
    sample = UtilisationSample(came.elapsed_s, loads, asking_ranks(state, params, now_us))
    busy = utilisation.step(state.utilisation or UtilisationState(), sample, terms)
    if busy.reason is not None and (is_heard or busy.reason.before != busy.reason.after):
        reasons.append(busy.reason)
    return replace(state, utilisation=busy, reported_us=max(state.reported_us, newest_us))


# The next step


def _anchored(
    state: OverloadState,
    now: Reading,
    slacks: tuple[float, float],
    params: OverloadParams,
    *,
    is_quiet: bool = False,
) -> OverloadState:
    """Begin the next sample at this reading."""
    if is_quiet and _is_calm(state, params):
        return _with(state, anchored(now, due_us=math.inf, is_resting=True), slacks)
    at_us, due_timed = now.read_us + RENEW_US, NEVER_TIMED
    if params.expectations is not None:
        at_us = min(at_us, now.read_us + _interval_left_s(state, params.expectations) * 1e6)
    if params.is_followed:
        at_us = min(at_us, now.read_us + IDLE_US) if is_quiet else AT_ONCE_US
    if params.response_time is not None:
        at_us = min(at_us, now.read_us + _response_time_left_s(state.response_time, params.response_time) * 1e6)
        due_timed = _due_timed(state.response_time, now.timed, params.response_time)
    if params.utilisation is not None:
        at_us = min(at_us, now.read_us + params.utilisation.smoothing_s * 1e6)
    due_us = at_us - _ALMOST_US if at_us > AT_ONCE_US else AT_ONCE_US
    return _with(state, anchored(now, due_us=due_us, due_timed=due_timed), slacks)


def _with(state: OverloadState, reading: Anchor, slacks: tuple[float, float]) -> OverloadState:
    if state.slack_min_ms == math.inf and slacks == state.slacks_seen:  # the same values are kept only once
        return replace(state, reading=reading)
    return replace(state, reading=reading, slack_min_ms=math.inf, slacks_seen=slacks)


def _interval_left_s(state: OverloadState, params: ExpectationParams) -> float:
    missing = state.published if params.rules is Rules.PUBLISHED else state.expectations
    return params.interval_s - (missing.open_s if missing else 0.0)


def _is_calm(state: OverloadState, params: OverloadParams) -> bool:
    """Return True if no controller would change its state, however many empty samples it ran on."""
    if params.expectations is not None and not _is_patient(state, params):
        return False
    if params.limit is not None:
        limit = state.limit
        if limit is None or limit.rule != "calm" or limit.unrefused < in_flight_limit.CALM:
            return False
        if limit.limit < REST_LIMIT * params.limit.limit.initial or state.quality.value < 1.0:
            return False
    timing, busy = state.response_time, state.utilisation
    if timing is not None and any(one.above or one.refusing or one.pending_count for one in timing.classes.values()):
        return False
    if timing is not None and timing.quality < 1.0:
        return False
    return busy is None or not (busy.level or busy.signals)


def _is_patient(state: OverloadState, params: OverloadParams) -> bool:
    """Return True if the state of expectations holds nothing that moves the throttle."""
    assert params.expectations is not None
    missing = state.published if params.is_published else state.expectations
    if missing is None or missing.throttle != params.expectations.initial:
        return False
    if missing.open.settled or any(interval.settled for interval in missing.intervals):
        return False
    limit = None if state.expectations is None or params.is_published else state.expectations.limit
    return limit is None or (limit.rule == "calm" and limit.unrefused >= in_flight_limit.CALM)


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
