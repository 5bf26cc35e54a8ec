"""The limit on a bucket's requests in flight, so that at most an allowed share of its answers is late (S9).

    limit    = capacity · T · (1 − spread)        Little's law at the percentile; at least 1
    T        = max(target, ROOM · base)           no target below the backend's time without a queue
    capacity   measured answers per second, see the regimes
    spread     how much faster the mean answer is than the slow ones; steered until just `allowed` are late:
               spread += GAIN · (late / allowed − answered) / served per second / max(1 s, target)
    base       mean response time without a queue, once known
    served, late, response time: averages over τ = max(1 s, target / 2)

One regime per step:
    cut      surely more than `allowed` are late:       capacity = min(capacity, served)
    refuse   somebody was refused within τ:             capacity = max(served, fading to served in FADE_S)
    calm     nobody was:                                capacity = max(HEAD · served, fading to it or to `initial`)
    futile   a trial ended, load is not the cause:      base = the mean of the trial, the limit as before the cuts

Load is not the cause (S12) where the mean response time is no longer than `base`: late answers do not count then, but
failures do, which may be fast (Q8). An
unknown base is found by a trial, which begins when answers are late and is judged once the limit has come down to DEPTH
of what was in flight, a response time has passed and FEW were answered since:
    cured    no more than `allowed` of them were late:  it was the load; the trial ends
    futile   so many fewer in flight, so many fewer answered, just as slowly
    deeper   anything else:                             the next trial begins here

    learn    nobody refused for CALM · τ and the mean below the target: base follows the mean, quicker down than up
    idle     nothing in flight and nothing answered: the averages begin again, the limit stays
    long     a sample of more than a second moves the spread as far as a second does, and ends a trial
    hold     a sample with NaN or infinity changes nothing (F-P8)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import replace as replace_params
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from limiter.model.overload.shedding import FourFloats

GAIN = 0.02
"""Move of spread per second of answers in time; a second of late ones moves it (1 − allowed) / allowed as far."""
LATE_MOST = 9.0
"""Largest weight of a second of late answers, or of one late answer, in seconds of answers in time."""
SPREAD_MIN, SPREAD_MAX = -1.0, 0.75
SPREAD_FIRST = 0.25
SURE = 3.0
"""Standard deviations above the allowed number of late answers that count as certain."""
FADE_S = 60.0
"""Time in which capacity that is no longer measured fades, and in which base rises."""
LEARN_S = 10.0
"""Time in which base falls."""
HEAD = 1.5
"""Ratio of capacity to served requests while nobody is refused."""
CALM = 5.0
"""Averaging times without a refusal before base is learned from the mean response time."""
KNEE = 1.1
"""A mean response time up to KNEE · base is not caused by a queue."""
ROOM = 1.5
EASY, HURRY = 1.05, 5.0
"""While requests are refused and the mean is below EASY · base, the spread falls HURRY times as fast."""
DEPTH, FEW, FELL, SAME = 0.3, 20.0, 0.45, 0.6
"""Terms of a trial: its depth, its answers; futile if at most FELL as many are answered, SAME as slowly."""
BACK = 1.3
"""Limit after a futile trial, as a factor of the requests in flight when it began."""
STEP = 0.1
"""Part of the limit that each asking class reserves from the classes below it."""
COUNT_MAX = 2.0**53
MOMENT_S = 1e-6
NOTHING = 1e-9
"""Answers per second below which the rate counts as zero."""
HUNG_TARGETS = 2.0
"""Targets without any answer, while FEW are in flight, after which the backend counts as hung (Q8, F-P11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitParams:
    """A policy's target, resolved."""

    allowed: float = 0.1
    """Share of answers that may be late: 1 − percentile / 100."""
    initial: float = 20.0
    """Requests in flight until answers are measured."""
    min_samples: float = 0.0
    """Answers within the averages below which none counts as late."""
    is_limited_at_first: bool = True
    """True if `initial` applies from the first request on, False if only once answers are known."""

    def divided(self, partitions: int) -> LimitParams:
        """Return the parameters for one of the partitions that divide the bucket: limits are for the whole (S8)."""
        return self if partitions == 1 else replace_params(self, initial=max(1.0, self.initial / partitions))


class LimitSample(NamedTuple):
    """A record's counters since the last sample, and its requests in flight now."""

    elapsed_s: float
    in_flight: float
    answered: float
    late: float
    """Answers later than the target of their class."""
    refused: float
    """Requests refused by overload control."""
    seconds: float
    """Sum of the response times."""
    target_s: float
    """The shortest target of the classes that ask."""
    failed: float = 0.0
    """Those of the late answers that were failures, however fast (Q8)."""


class Trial(Struct, frozen=True, array_like=True, gc=False):
    """A test of load as the cause of late answers."""

    in_flight: float
    served_rate: float
    response_s: float
    """This and the two above were measured before the cuts."""
    age_s: float = 0.0
    """Time since the limit came down to DEPTH."""
    answered: float = 0.0
    late: float = 0.0
    seconds: float = 0.0
    """This and the two above are of requests that came after the cuts."""


Rule = Literal["cut", "refuse", "calm", "futile"]


class LimitState(Struct, array_like=True, gc=False):
    """The limit, and the averages that it follows. Never changed after `step` has returned it."""

    limit: float
    """Requests in flight, all classes together; infinite without a limit."""
    capacity: float
    """Answers per second."""
    spread: float = SPREAD_FIRST
    base_s: float = 0.0
    """Mean response time without a queue; 0: unknown."""
    served_rate: float = 0.0
    """Answers per second."""
    late_rate: float = 0.0
    """Late answers that count, per second."""
    taken_rate: float = 0.0
    """Sum of response times in seconds, per second."""
    known_s: float = 0.0
    """Time that the averages cover."""
    age_s: float = 0.0
    unrefused: float = math.inf
    """Averaging times since the last refusal."""
    silent_s: float = 0.0
    """Time since the last answer, with requests in flight."""
    trial: Trial | None = None
    rule: Rule = "calm"

    @property
    def response_s(self) -> float:
        """Mean response time; 0 while unknown."""
        return self.taken_rate / self.served_rate if self.served_rate > NOTHING else 0.0

    @property
    def late_share(self) -> float:
        """Share of answers that were late and count."""
        return min(1.0, self.late_rate / self.served_rate) if self.served_rate > NOTHING else 0.0

    @property
    def is_refusing(self) -> bool:
        """True if a request was refused within the averaging time."""
        return self.unrefused < 1


def start(params: LimitParams, target_s: float, in_flight: float = 0.0, base_s: float = 0.0) -> LimitState:
    """Return the state of a new bucket, with its requests in flight and its response time without a queue, if known."""
    limit = max(params.initial, in_flight)
    full_s = max(target_s, ROOM * base_s)
    state = LimitState(limit=limit, capacity=limit / full_s / (1 - SPREAD_FIRST), base_s=base_s)
    return state if params.is_limited_at_first else replace(state, limit=math.inf)


def step(state: LimitState, sample: LimitSample, params: LimitParams) -> LimitState:
    """Run one cycle: update the averages, choose a regime, and compute the limit from it."""
    if not _is_sound(sample):
        return state
    now, late = _averaged(state, sample, params)
    now = _steered(now, sample, params, late)
    now = _with_trial(state, now, sample, params)
    return _limited(now, sample.target_s, params)


def _is_sound(sample: LimitSample) -> bool:
    elapsed_s, in_flight, answered, late, refused, seconds, target_s, failed = sample
    return (
        MOMENT_S <= elapsed_s < math.inf
        and 0 < target_s < math.inf
        and 0 <= in_flight <= COUNT_MAX
        and 0 <= answered <= COUNT_MAX
        and 0 <= late <= COUNT_MAX
        and 0 <= refused <= COUNT_MAX
        and 0 <= seconds <= COUNT_MAX
        and 0 <= failed <= COUNT_MAX
    )


def _averaged(state: LimitState, sample: LimitSample, params: LimitParams) -> tuple[LimitState, float]:
    """Return the averages after the sample, with base if it can be learned, and the late answers that count."""
    elapsed_s, target_s = sample.elapsed_s, sample.target_s
    tau_s, long_s = _averaging_times_s(target_s)
    is_idle = sample.in_flight == 0 and sample.answered == 0
    known_s = min(elapsed_s, long_s) if is_idle else min(state.known_s + elapsed_s, long_s)
    age_s = min(state.age_s + elapsed_s, long_s)
    weight = min(1.0, max(elapsed_s / known_s, 1 - math.exp(-elapsed_s / tau_s)))
    served = state.served_rate + weight * (sample.answered / elapsed_s - state.served_rate)
    taken = state.taken_rate + weight * (sample.seconds / elapsed_s - state.taken_rate)
    unrefused = 0.0 if sample.refused else min(math.inf, state.unrefused + elapsed_s / tau_s)
    answers, base_s = served * known_s, state.base_s
    response_s = taken / served if served > NOTHING else 0.0
    is_calm = known_s >= long_s and answers >= 10 and unrefused > CALM and response_s < max(target_s, base_s)
    if is_calm and sample.failed <= params.allowed * sample.answered:  # errors may be faster than answers
        base_s = _learned(base_s, response_s, elapsed_s)
    is_known = age_s >= long_s and answers >= params.min_samples
    is_slow = response_s > base_s * (KNEE + 2 / math.sqrt(answers + 1))
    late = 0.0 if not is_known else sample.late if is_slow else sample.failed
    late_rate = state.late_rate + weight * (late / elapsed_s - state.late_rate)
    silent_s = 0.0 if sample.answered or not sample.in_flight else state.silent_s + elapsed_s
    now = LimitState(
        state.limit,
        state.capacity,
        state.spread,
        base_s,
        served or 0.0,  # one zero for all buckets: their states are most of a controller's memory
        late_rate or 0.0,
        taken or 0.0,
        known_s,
        age_s,
        unrefused,
        silent_s,
        state.trial,
    )
    return now, late


@lru_cache(maxsize=1024)
def _averaging_times_s(target_s: float) -> tuple[float, float]:
    """Return τ, and the time after which averages are fully known: the same objects for all states."""
    tau_s = max(1.0, target_s / 2)
    return tau_s, 2 * tau_s


def _learned(base_s: float, response_s: float, elapsed_s: float) -> float:
    """Return base after a calm cycle: down in LEARN_S, up in FADE_S, the first mean as it is."""
    if not base_s:
        return response_s
    return base_s + (response_s - base_s) * min(1.0, elapsed_s / (LEARN_S if response_s < base_s else FADE_S))


def _steered(now: LimitState, sample: LimitSample, params: LimitParams, late: float) -> LimitState:
    """Set spread and capacity by the regime."""
    elapsed_s, served, allowed = sample.elapsed_s, now.served_rate, params.allowed
    spread, capacity, share = now.spread, now.capacity, now.late_share
    if sample.answered and served > NOTHING and (now.is_refusing or share > allowed):
        error = min((late / allowed - sample.answered) / served, LATE_MOST * max(elapsed_s, 1 / served))
        if now.response_s <= EASY * now.base_s:
            error = -HURRY * sample.answered / served
        moved = spread + GAIN * error / max(1.0, elapsed_s) / max(1.0, sample.target_s)
        spread = min(SPREAD_MAX, max(SPREAD_MIN, moved))
    answers = served * now.known_s
    # One is added so that a single late answer is never certain.
    if (share - allowed) * answers > SURE * math.sqrt(allowed * answers) + 1:
        rule: Rule = "cut"
        capacity = min(capacity, served)
    elif now.is_refusing:
        rule = "refuse"
        capacity = max(served, _faded(capacity, served, elapsed_s))
    else:
        rule, seen = "calm", HEAD * served
        least = max(seen, params.initial / sample.target_s / (1 - spread))
        capacity = max(seen, _faded(capacity, least, elapsed_s))
    now.spread, now.capacity, now.rule = spread, capacity, rule
    return now


def _faded(capacity: float, towards: float, elapsed_s: float) -> float:
    return capacity + (towards - capacity) * min(1.0, elapsed_s / FADE_S)


def _with_trial(before: LimitState, now: LimitState, sample: LimitSample, params: LimitParams) -> LimitState:
    """Begin, follow, judge or end a trial."""
    trial, share = now.trial, now.late_share
    if trial is None:
        if share <= params.allowed:
            return now
        trial = Trial(sample.in_flight, now.served_rate, now.response_s)
    trial = _followed(trial, now, sample, before.limit)
    if trial.answered < FEW:
        is_over = not now.is_refusing or sample.elapsed_s > 1 or (not trial.age_s and share <= params.allowed)
        return replace(now, trial=None if is_over else trial)
    fewer = trial.answered / (trial.age_s - _delay_s(trial, sample.target_s))
    mean_s = trial.seconds / trial.answered
    if trial.late <= params.allowed * trial.answered:
        return replace(now, trial=None)
    if before.limit <= 1 or (fewer <= FELL * trial.served_rate and mean_s >= SAME * trial.response_s):
        full_s = max(sample.target_s, ROOM * mean_s)
        capacity = BACK * trial.in_flight / full_s / (1 - SPREAD_FIRST)
        return replace(
            now, base_s=mean_s, capacity=capacity, spread=SPREAD_FIRST, late_rate=0.0, trial=None, rule="futile"
        )
    return replace(now, trial=Trial(before.limit, fewer, mean_s))


def _delay_s(trial: Trial, target_s: float) -> float:
    """Return the time until answers belong to requests that came after the cuts."""
    return min(trial.in_flight / trial.served_rate, 4 * target_s)


def _followed(trial: Trial, now: LimitState, sample: LimitSample, limit: float) -> Trial:
    """Add a sample to a trial: its peak on the way down, its time and answers once it is down."""
    in_flight = sample.in_flight
    is_on_its_way = limit > max(1.0, 1.13 * DEPTH * trial.in_flight) or in_flight >= limit + 1
    if not trial.age_s and is_on_its_way:
        if in_flight <= 0.7 * trial.in_flight:
            return trial
        return Trial(
            max(trial.in_flight, in_flight),
            max(trial.served_rate, now.served_rate),
            max(trial.response_s, now.response_s),
        )
    if in_flight < 0.7 * limit:  # few are in flight for another reason than the limit
        return trial
    age_s = trial.age_s + sample.elapsed_s
    if age_s <= _delay_s(trial, sample.target_s):
        return replace(trial, age_s=age_s)
    return replace(
        trial,
        age_s=age_s,
        answered=trial.answered + sample.answered,
        late=trial.late + sample.late,
        seconds=trial.seconds + sample.seconds,
    )


def _limited(now: LimitState, target_s: float, params: LimitParams) -> LimitState:
    """Compute the limit of the state."""
    if not params.is_limited_at_first and now.age_s < 2 * max(1.0, target_s / 2):
        now.limit = math.inf
        return now
    limit = now.capacity * max(target_s, ROOM * now.base_s) * (1 - now.spread)
    now.limit = max(1.0, limit, DEPTH * now.trial.in_flight if now.trial else 0.0)
    return now


def limits(limit: float, asking: tuple[bool, ...], ranks: FourFloats) -> FourFloats:
    """Return the limit of each class: every asking rank reserves a STEP of it from those below (S8)."""
    above = _asking_above(asking, ranks)
    if above is None:
        return limit, limit, limit, limit
    kept = max(1.0, STEP * limit)
    a, b, c, d = [max(1.0, limit - kept * number) for number in above]
    return a, b, c, d


@lru_cache(maxsize=1024)
def _asking_above(asking: tuple[bool, ...], ranks: FourFloats) -> tuple[int, ...] | None:
    """Return for each class how many asking ranks are above it; None if no class is below the asking ones."""
    asked = {rank for rank, asks in zip(ranks, asking, strict=True) if asks}
    if not asked or min(asked) >= max(ranks):
        return None
    return tuple([len([1 for other in asked if other < rank]) for rank in ranks])


def is_hung(state: LimitState, in_flight: float, target_s: float) -> bool:
    """Return True if requests are in flight and none was answered for twice the target (Q8)."""
    return in_flight >= FEW and state.silent_s > HUNG_TARGETS * target_s
