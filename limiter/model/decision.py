"""From what the buckets said to what the caller is told (B1, G6).

binding limit = of those that refused, the one that takes longest to pass
retry after   = its wait: (need − balance) / rate, or the end of a quota's window; never, if it never will
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from limiter.model.admission import needed, wait_us
from limiter.model.bucket import Params
from limiter.model.contract import LimitState, Reason, Refused
from limiter.model.limit import Limit
from limiter.model.operations import BucketAnswer, Verdict, Want

YEAR_S = 31_536_000.0
"""JSON knows no infinity: a year stands for never."""

_REASONS: dict[str, Reason] = {"work": "work", "requests": "request_rate", "quota": "quota"}


def limit_state(
    limit: Limit, params: Params, answer: BucketAnswer, *, now_us: int, wait_us: float | None = None
) -> LimitState:
    """One limit's part in a decision; `wait_us` is how long until it would pass, if it does not."""
    _, balance, _, rate, capacity = answer
    if limit.mechanism == "quota":
        rate, window_s = 0.0, (params.window_end_us - params.window_start_us) / 1e6
        reset_ms = (params.window_end_us - now_us) / 1e3
    else:
        window_s = capacity / rate
        reset_ms = (capacity - balance) / rate * 1e3 if wait_us is None else wait_us / 1e3
    return LimitState(
        limit.name, limit.mechanism, balance, capacity, rate, limit.shadow, wait_us is None,
        min(YEAR_S, window_s), min(YEAR_S * 1000.0, reset_ms),
    )  # fmt: skip


def limit_states(
    limits: Sequence[Limit],
    wants: Sequence[Want],
    answers: Sequence[BucketAnswer],
    *,
    requests: float,
    now_us: int,
) -> tuple[LimitState, ...]:
    """Every limit's part."""
    return tuple(
        [
            limit_state(
                limit,
                want.params,
                answer,
                now_us=now_us,
                wait_us=_wait_us(limit, want, answer, requests=requests, now_us=now_us)
                if answer.verdict is Verdict.BLOCKED
                else None,
            )
            for limit, want, answer in zip(limits, wants, answers, strict=True)
        ]
    )


def refusal(
    limits: Sequence[Limit],
    wants: Sequence[Want],
    answers: Sequence[BucketAnswer],
    *,
    requests: float,
    now_us: int,
    hopeless: bool,
    degraded: bool = False,
) -> Refused:
    """Why not, and whether and when to come back. `hopeless`: too many are retrying already."""
    waits = [
        _wait_us(limit, want, answer, requests=requests, now_us=now_us)
        if answer.verdict is Verdict.BLOCKED and not limit.shadow
        else -1.0
        for limit, want, answer in zip(limits, wants, answers, strict=True)
    ]
    at = waits.index(max(waits))
    never = hopeless or math.isinf(waits[at])
    return Refused(
        policy=limits[at].name,
        reason=_REASONS[limits[at].mechanism],
        retry="never" if never else "after",
        retry_after_ms=0 if never else max(1, math.ceil(waits[at] / 1e3)),
        limits=limit_states(limits, wants, answers, requests=requests, now_us=now_us),
        detail=_detail(limits[at], wants[at], answers[at], requests),
        degraded=degraded,
    )


def _wait_us(limit: Limit, want: Want, answer: BucketAnswer, *, requests: float, now_us: int) -> float:
    need = _need(want, answer, requests)
    if limit.mechanism != "quota":
        return wait_us(balance=answer.balance, need=need, rate=answer.rate, capacity=answer.capacity)
    if need > answer.capacity:
        return math.inf
    return float(want.params.window_end_us - now_us)


def _need(want: Want, answer: BucketAnswer, requests: float) -> float:
    params = want.params
    taken = requests if params.counts_requests else answer.charge
    return needed(want.minimum, taken, debt_max=params.debt_max, capacity=answer.capacity, is_quota=params.is_quota)


def _detail(limit: Limit, want: Want, answer: BucketAnswer, requests: float) -> str:
    if limit.mechanism == "quota":
        taken = requests if want.params.counts_requests else answer.charge
        left = f"{answer.balance:g} of {answer.capacity:g} are left for this period"
        return f"{limit.name}: {left}, and {taken:g} are wanted"
    unit = "requests" if limit.mechanism == "requests" else "units"
    return (
        f"{limit.name}: the balance is {answer.balance:.6g} of {answer.capacity:g} {unit}, this request needs "
        f"{_need(want, answer, requests):g}, and {answer.rate:g} come each second"
    )
