"""From the buckets' answers to the caller's answer (B1, G6, S4, Q6).

binding limit = of those that refused, the one that takes longest to pass; one that blocks the key comes first
retry after   = its wait: (need − balance) / rate, or the end of a quota's window; never, if it never will
by overload   = about a second, or a token's time where the class is limited, spread by the draw so that callers do not
                come back together; never, where half of the class or more is refused
no place      = about a second: nobody knows when a reservation will be settled
quality       = the least of all limits;    state = the worst of them;    a shadow has no say
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

from msgspec import Struct

from limiter.model.bucket.admission import needed, part_of_minimum, wait_us
from limiter.model.bucket.bucket import Params
from limiter.model.bucket.contract import LimitState, Reason, Refused
from limiter.model.bucket.operations import COVERED, LEARNED, TOO_LARGE, BucketAnswer, Lot, Pressure, Verdict, Want
from limiter.model.overload.shedding import State
from limiter.model.policy.limit import Limit

YEAR_S = 31_536_000.0
"""Stands for never: JSON has no infinity."""

YEAR_MS = YEAR_S * 1000

SHED_NEVER_SHARE = 0.5
"""If this share of a class is refused, another attempt is more likely to add to the overload than to pass (G6)."""

FULL_WAIT_S = 1.0
"""When to ask again for a place among the open reservations (W18)."""

SHED_WAIT_S = 1.0
"""The controller steps about once per second: nothing changes sooner."""

_BLOCKED, _TURNED_AWAY, _DENIED, _FULL = Verdict.BLOCKED, Verdict.TURNED_AWAY, Verdict.DENIED, Verdict.FULL

REASON_OF: dict[str, Reason] = {"work": "work", "requests": "request_rate", "quota": "quota"}
"""The reason of a refusal, by what the bucket counts."""


def mechanism(limit: Limit, answer: BucketAnswer) -> Literal["work", "requests", "quota"]:
    """Return what a limit's bucket counts now; for an auto bucket its answer says it (R10)."""
    if limit.mechanism == "auto":
        return "requests" if answer.in_requests else "work"
    return limit.mechanism


def limit_state(limit: Limit, params: Params, answer: BucketAnswer, now_us: int, wait_us: float | None) -> LimitState:
    """Return one limit's part in a decision; `wait_us` is the time until it would pass, None if it does."""
    balance, rate, capacity = answer.balance, answer.rate, answer.capacity
    if limit.mechanism == "quota":
        rate, window_s = 0.0, (params.window_end_us - params.window_start_us) / 1e6
        reset_ms = (params.window_end_us - now_us) / 1e3
    else:
        window_s = capacity / rate
        reset_ms = (capacity - balance) / rate * 1e3 if wait_us is None else wait_us / 1e3
    if window_s > YEAR_S:
        window_s = YEAR_S
    if reset_ms > YEAR_MS:
        reset_ms = YEAR_MS
    how = limit.mechanism
    return LimitState(
        limit.name, mechanism(limit, answer) if how == "auto" else how, balance, capacity, rate,
        limit.shadow, wait_us is None, window_s, reset_ms,
    )  # fmt: skip


def limit_states(
    limits: Sequence[Limit],
    wants: Sequence[Want],
    answers: Sequence[BucketAnswer],
    requests: float,
    now_us: int,
    lot: Lot | None = None,
) -> tuple[LimitState, ...]:
    """Return every limit's part."""
    states = []
    for limit, want, answer in zip(limits, wants, answers, strict=True):
        verdict, wait_us = answer.verdict, None
        if verdict is _BLOCKED:
            wait_us = _wait_us(limit, want, answer, requests=requests, now_us=now_us)
        elif verdict is _TURNED_AWAY:
            # With retry "never" the wait is until the controller's next step: other requests need not wait a year.
            wait_us = _shed_wait_us(answer, lot)
            wait_us = SHED_WAIT_S * 1e6 if math.isinf(wait_us) else wait_us
        elif verdict is _DENIED:
            wait_us = answer.charge
        elif verdict is _FULL:
            wait_us = FULL_WAIT_S * 1e6
        states.append(limit_state(limit, want.params, answer, now_us, wait_us))
    return tuple(states)


def refusal(
    limits: Sequence[Limit],
    wants: Sequence[Want],
    answers: Sequence[BucketAnswer],
    *,
    requests: float,
    now_us: int,
    degraded: bool = False,
    lot: Lot | None = None,
    retried: Collection[str] = (),
) -> Refused:
    """Return why, and whether and when to retry: not on one of the `retried` buckets, where too many retry (G6)."""
    waits = []
    for limit, want, answer in zip(limits, wants, answers, strict=True):
        denies = answer.verdict is _DENIED
        if limit.shadow or answer.verdict < _BLOCKED:
            waits.append((False, -1.0))
        elif denies:
            waits.append((True, answer.charge))
        elif answer.verdict is _BLOCKED:
            waits.append((False, _wait_us(limit, want, answer, requests=requests, now_us=now_us)))
        elif answer.verdict is _FULL:
            waits.append((False, FULL_WAIT_S * 1e6))
        else:
            waits.append((False, _shed_wait_us(answer, lot)))
    at = waits.index(max(waits))
    denied, wait_us = waits[at]
    if degraded and math.isinf(wait_us) and not wants[at].how & TOO_LARGE:
        wait_us = SHED_WAIT_S * 1e6  # more than this node's share; the store may be back any moment
    never = math.isinf(wait_us) or (wants[at].bucket in retried and not denied)
    told = pressure(limits, answers)
    return Refused(
        policy=limits[at].name,
        reason=_reason(limits[at], wants[at], answers[at]),
        retry="never" if never else "after",
        retry_after_ms=0 if never else max(1, math.ceil(wait_us / 1e3)),
        limits=limit_states(limits, wants, answers, requests, now_us, lot),
        detail=_detail(limits[at], wants[at], answers[at], requests),
        degraded=degraded,
        overloaded=told.state is State.OVERLOADED,
        state=None if lot is None else told.state.word,
        refused_share=None if lot is None else told.refused_share,
        drawn_share=drawn_share(limits, answers) or None,
    )


def _reason(limit: Limit, want: Want, answer: BucketAnswer) -> Reason:
    if answer.verdict is _TURNED_AWAY:
        return "overload"
    if answer.verdict is _DENIED:
        return "blocked"
    if answer.verdict is _FULL:
        return "in_flight"
    return "request_too_large" if want.how & TOO_LARGE else REASON_OF[mechanism(limit, answer)]


def pressure(limits: Sequence[Limit], answers: Sequence[BucketAnswer]) -> Pressure:
    """Overload of all limits of a request together, as the caller is told (Q6, S4, S8)."""
    state, quality, refused_share = State.CALM, 1.0, 0.0
    for limit, answer in zip(limits, answers, strict=True):
        known = answer.pressure
        if known is not None and not limit.shadow:
            state = max(state, known.state)
            quality = min(quality, known.quality)
            refused_share = max(refused_share, known.refused_share)
    return Pressure(state, quality, refused_share)


def drawn_share(limits: Sequence[Limit], answers: Sequence[BucketAnswer]) -> float:
    """Return the share of a request's class that is refused by draw, so that a client does not take it for a limit
    (G3)."""
    return max(
        (
            answer.pressure.drawn_share
            for limit, answer in zip(limits, answers, strict=True)
            if answer.pressure is not None and not limit.shadow
        ),
        default=0.0,
    )


def _shed_wait_us(answer: BucketAnswer, lot: Lot | None) -> float:
    """Return the wait after a refusal by overload control."""
    known, draw = answer.pressure or Pressure(), 0.5 if lot is None else lot.draw
    if known.refused_share >= SHED_NEVER_SHARE:
        return math.inf
    # Evenly spread among those that were refused.
    part = draw / known.refused_share if draw < known.refused_share else draw
    token_s = 1 / known.rate if known.rate > 0 else 0.0
    return max(SHED_WAIT_S, token_s) * (0.5 + part) * 1e6


def _wait_us(limit: Limit, want: Want, answer: BucketAnswer, *, requests: float, now_us: int) -> float:
    if want.how & TOO_LARGE:
        return math.inf
    need = _need(want, answer, requests)
    if limit.mechanism != "quota":
        return wait_us(balance=answer.balance, need=need, rate=answer.rate, capacity=answer.capacity)
    if need > answer.capacity:
        return math.inf
    return float(want.params.window_end_us - now_us)


def _need(want: Want, answer: BucketAnswer, requests: float) -> float:
    """Return the balance that the bucket required, as far as its answer says."""
    tokens = requests * (1.0 if want.params.is_quota else want.weight)
    taken = tokens if answer.in_requests else answer.charge
    return _needed(want.params, want.how, want.minimum, taken, answer.rate, answer.capacity, answer.in_requests)


def _needed(
    params: Params, how: int, minimum: float, taken: float, rate: float, capacity: float, in_requests: bool
) -> float:
    part = capacity / params.whole_capacity
    if part != 1.0:
        minimum = part_of_minimum(minimum, part=part, capacity=capacity)
    if in_requests and not params.is_quota:
        debt_max = params.debt_max * rate / params.committed
    else:
        debt_max = params.debt_max * part
    covered = params.is_quota
    if how & COVERED and not (covered or in_requests):
        covered, taken = True, min(taken, capacity) if how & LEARNED else taken
    return needed(minimum, taken, debt_max=debt_max, capacity=capacity, covered=covered)


class PlainRefusal(Struct, frozen=True):
    """A refusal by a rate, the only limit: the content of `refusal`, before it is put into words."""

    limit: Limit
    balance: float
    rate: float
    capacity: float
    in_requests: bool
    need: float
    wait_us: float
    never: bool

    @property
    def how_it_counts(self) -> Literal["work", "requests"]:
        """The unit of the bucket now."""
        if self.limit.mechanism == "auto":
            return "requests" if self.in_requests else "work"
        return "requests" if self.limit.mechanism == "requests" else "work"

    @property
    def retry_after_ms(self) -> int:
        """The wait before a retry; 0: never."""
        return 0 if self.never else max(1, math.ceil(self.wait_us / 1e3))

    @property
    def reset_ms(self) -> float:
        """The time until the limit would admit this request; a year stands for never."""
        return min(self.wait_us / 1e3, YEAR_MS)

    @property
    def detail(self) -> str:
        """The refusal in words."""
        return _rate_detail(self.limit, self.balance, self.capacity, self.rate, self.need, self.in_requests)

    def refused(self) -> Refused:
        """Return the same as a decision."""
        window_s = min(self.capacity / self.rate, YEAR_S)
        name, how = self.limit.name, self.how_it_counts
        state = LimitState(
            name, how, self.balance, self.capacity, self.rate,
            passed=False, window_s=window_s, reset_ms=self.reset_ms,
        )  # fmt: skip
        retry: Literal["after", "never"] = "never" if self.never else "after"
        return Refused(name, REASON_OF[how], retry, self.retry_after_ms, (state,), self.detail)


def plain_refusal(
    limit: Limit, params: Params, ask: tuple[int, float, float], charge: float, balance: float, rate: float,
    capacity: float, *, in_requests: bool, retried: bool = False,
) -> PlainRefusal:  # fmt: skip
    """Return the refusal of a rate, from its parameters, the request and the bucket's answer."""
    how, minimum, _ = ask
    if in_requests or how or capacity != params.whole_capacity:
        need = _needed(params, how, minimum, 1.0 if in_requests else charge, rate, capacity, in_requests)
    else:  # nearly all: as `_needed` computes it for a whole bucket of work
        need = charge - params.debt_max
        if need > capacity:
            need = capacity
        if need < minimum:
            need = minimum
    if balance < need <= capacity:
        waits_us = (need - balance) / rate * 1e6
        never = retried
    else:
        waits_us = wait_us(balance=balance, need=need, rate=rate, capacity=capacity)
        never = waits_us == math.inf or retried
    return PlainRefusal(limit, balance, rate, capacity, in_requests, need, waits_us, never)


def _detail(limit: Limit, want: Want, answer: BucketAnswer, requests: float) -> str:
    if answer.verdict is _TURNED_AWAY:
        return f"{limit.name}: {_shed_detail(answer.pressure or Pressure())}"
    if answer.verdict is _DENIED:
        return f"{limit.name}: blocked for another {answer.charge / 1e6:.3g} s after too many refusals"
    if answer.verdict is _FULL:
        return f"{limit.name}: all {answer.charge:g} places for open reservations are taken; each settle frees one"
    if want.how & TOO_LARGE:
        return f"{limit.name}: the estimate of {want.charge:g} exceeds {limit.request_max:g}, the most for one request"
    if limit.mechanism == "quota":
        taken = requests if answer.in_requests else answer.charge
        left = f"overdrawn by {-answer.balance:g}" if answer.balance < 0 else f"has {answer.balance:g} left"
        return f"{limit.name}: quota of {answer.capacity:g} {left} this period; this request needs {taken:g}"
    need = _need(want, answer, requests)
    return _rate_detail(limit, answer.balance, answer.capacity, answer.rate, need, answer.in_requests)


def _rate_detail(limit: Limit, balance: float, capacity: float, rate: float, need: float, in_requests: bool) -> str:
    unit = "requests" if in_requests or limit.counts else "units"
    return (
        f"{limit.name}: the balance is {balance:.6g} of {capacity:g} {unit} and refills by {rate:g} per second; "
        f"this request needs {need:g}"
    )


def _shed_detail(known: Pressure) -> str:
    told = []
    if known.refused_share > 0:
        told.append(f"{known.refused_share * 100:.3g} % of the requests of this class are refused")
    if known.rate > 0:
        told.append(f"this class may send {known.rate:.4g} requests per second")
    if known.limit > 0:
        told.append(f"this class is refused while {known.limit:.4g} or more are in flight")
    return f"overloaded; {' and '.join(told)}"
