"""The combined order of one bucket's controllers for its record, and the bucket's state (Q, S, G5).

refused share of a class = the largest that any controller asks for; one draw is compared with it
limit of a class         = requests in flight, all classes together; 0 without a limit
rate of a class          = by the published rules of response times; 0 without them
quality                  = by response times

    overloaded   answers are late or nobody answers, the limit refuses, or half of a class and more is refused (S8)
    recovering   shares or limits still refuse, or did a moment ago, but answers are in time again
    degraded     nobody is refused, quality is below 1
    calm         none of these

lend     an order holds for LENT_FOR_US, and is written again every RENEW_US while it is in force (Q11); limits stay
"""

from __future__ import annotations

import math
from collections.abc import Callable

from limiter.model.overload import expectations, in_flight_limit, quality, utilisation
from limiter.model.overload.overload_state import ALL, Anchor, OverloadParams, OverloadState, asking_ranks, asks
from limiter.model.overload.shedding import (
    CLASSES,
    LENT_FOR_US,
    NO_CLASS,
    QUALITY_FULL,
    FourFloats,
    Shedding,
    ShedOrder,
    State,
)
from limiter.model.policy.criticality import Criticality

RENEW_US = 3_000_000
REFUSED_MUCH = 0.5
"""Refused share of a class from which on its bucket is overloaded, however fast others are answered."""
LIMIT_MOVE, LIMIT_DRIFT = 0.02, 0.2
"""Relative: a smaller move of a limit is not written. The second applies while the limit is far from refusing."""
RESPONSE_MOVE = 0.1
"""Relative: a smaller move of the median response time is not written."""
FAR = 0.5
"""Requests in flight, as a part of the limit, below which the limit is far from refusing."""


def order_of(state: OverloadState, known: Shedding, params: OverloadParams, now_us: float) -> ShedOrder | None:
    """Return the combined order of the controllers; None if the record already holds it and need not be renewed yet."""
    shares = _shares(state, params, now_us)
    fares = _state(state, known, params, shares)
    order = ShedOrder(
        _quality(state, params),
        fares,
        LENT_FOR_US,
        _response_ms(known, params) if fares is State.OVERLOADED else 0.0,
        shares,
        _rates(state, params),
        _limits(state, params, now_us),
    )
    is_lent = now_us < known.lent_until_us
    if not _is_same(order, known, state.reading, is_lent=is_lent):
        return order
    is_ending = known.lent_until_us - now_us < LENT_FOR_US - RENEW_US
    return order if is_ending and _is_in_force(order) else None


def _is_in_force(order: ShedOrder) -> bool:
    """Return True if any value of an order would change when it ends."""
    quality, state, _, _, shares, rates, _ = order
    if quality < QUALITY_FULL or state is not State.CALM:
        return True
    return (shares is not NO_CLASS and any(shares)) or (rates is not NO_CLASS and any(rates))


def _is_same(order: ShedOrder, known: Shedding, reading: Anchor | None, *, is_lent: bool) -> bool:
    if is_lent:
        present = (known.quality, known.state, tuple(known.refused_shares), tuple(known.rates))
        is_same = present == (order.quality, float(order.state), order.refused_shares, order.rates)
        is_same = is_same and _is_near(known.response_ms, order.response_ms, RESPONSE_MOVE)
    else:
        is_same = not _is_in_force(order)
    if not is_same or not any(order.limits):
        return is_same and not any(known.limits)
    if tuple(known.limits) == order.limits:
        return True
    in_flight = 0.0 if reading is None else reading.in_flight
    least = min(*known.limits, *order.limits)
    is_far = not in_flight or (in_flight < FAR * least and order.state == State.CALM)
    by = LIMIT_DRIFT if is_far else LIMIT_MOVE
    return all(map(_is_near, known.limits, order.limits, (by, by, by, by)))


def _is_near(before: float, after: float, by: float) -> bool:
    return before == after or (before > 0 and after > 0 and abs(after - before) <= by * before)


def _quality(state: OverloadState, params: OverloadParams) -> float:
    if params.limit is not None:
        return state.quality.value
    return state.response_time.quality if params.response_time and state.response_time else QUALITY_FULL


def _by_class(number_of: Callable[[Criticality], float]) -> FourFloats:
    a, b, c, d = (number_of(criticality) for criticality in CLASSES)
    return a, b, c, d


def _throttle(state: OverloadState, params: OverloadParams) -> float:
    """Return M; 0 without expectations."""
    if params.expectations is None:
        return 0.0
    missing = state.published if params.is_published else state.expectations
    return missing.throttle if missing else params.expectations.initial


def _shares(state: OverloadState, params: OverloadParams, now_us: float) -> FourFloats:
    """Return the largest share that any controller asks for: one draw refuses no more than the strictest would."""
    multiplier = _throttle(state, params)
    level = state.utilisation.level if params.utilisation is not None and state.utilisation is not None else 0.0
    if not multiplier and not level:
        return NO_CLASS
    order = utilisation.asked_order(params.ranks, asking_ranks(state, params, now_us)) if level else ()
    a, b, c, d = (
        max(expectations.refusal_share(multiplier, rank), utilisation.refusal_share(level, rank, order))
        for rank in params.ranks_by_class
    )
    return a, b, c, d


def _limits(state: OverloadState, params: OverloadParams, now_us: float) -> FourFloats:
    """Return the limits on requests in flight by class; higher while cheaper answers may still help (S4)."""
    terms, known = params.limit, state.limit
    if terms is None or known is None or not terms.is_limiting:
        return NO_CLASS
    limit = known.limit
    if terms.quality is not None and state.quality.value > terms.quality.least:
        limit = max(limit, quality.ROOM * known.capacity * min(terms.targets_s))
    a, b, c, d = in_flight_limit.limits(limit, asks(state, now_us), terms.ranks)
    unit = state.charge
    return (a, b, c, d) if not unit else (a * unit, b * unit, c * unit, d * unit)


def _rates(state: OverloadState, params: OverloadParams) -> FourFloats:
    """Return the requests per second of each class, by the published rules."""
    terms = params.response_time
    if terms is None or not terms.is_refusing:
        return NO_CLASS
    classes = state.response_time.classes if state.response_time is not None else {}
    if params.with_classes:
        return _by_class(lambda name: classes[name].rate if name in classes else terms.rate_initial)
    rate, parts = classes[ALL].rate if ALL in classes else terms.rate_initial, state.asked_parts
    if not any(parts):
        return rate, rate, rate, rate
    a, b, c, d = (max(rate * part, terms.rate_min) for part in parts)
    return a, b, c, d


def _response_ms(known: Shedding, params: OverloadParams) -> float:
    """Return the median response time; 0 where only published rules apply (Q13)."""
    is_ours = params.limit is not None or (params.expectations is not None and not params.is_published)
    return known.median_ms if is_ours else 0.0


def _state(state: OverloadState, known: Shedding, params: OverloadParams, shares: FourFloats) -> State:
    """Return the bucket's state, as answers report it (S8)."""
    if _is_overloaded(state, params):
        return State.OVERLOADED
    if any(shares) or _is_refusing(state, params):
        is_much = any(
            max(share, recent if at_us > -math.inf else 0.0) >= REFUSED_MUCH
            for share, recent, at_us in zip(shares, known.refused_recently, state.asked_us, strict=True)
        )
        if is_much:
            return State.OVERLOADED
    if any(shares) or _is_recovering(state, params):
        return State.RECOVERING
    return State.DEGRADED if _quality(state, params) < QUALITY_FULL else State.CALM


def _is_refusing(state: OverloadState, params: OverloadParams) -> bool:
    """Return True if limits or rates refused a request a moment ago."""
    if params.limit is not None and state.limit is not None and params.limit.is_limiting and state.limit.is_refusing:
        return True
    return params.response_time is not None and state.response_time is not None and state.response_time.is_refusing


def _is_overloaded(state: OverloadState, params: OverloadParams) -> bool:
    """Return True if any controller of the present policy reports an overload."""
    if params.expectations is not None:
        missing = state.published if params.is_published else state.expectations
        if missing is not None and missing.overloaded:
            return True
    if params.limit is not None and state.limit is not None and params.limit.is_limiting:
        if state.is_hung or state.limit.rule != "calm":
            return True
    elif state.is_hung and params.limit is not None:
        return True
    timing, busy = state.response_time, state.utilisation
    is_rated = params.response_time is not None and params.response_time.is_refusing
    if is_rated and timing is not None and (timing.is_above or timing.is_refusing):
        return True
    return params.utilisation is not None and busy is not None and busy.is_refusing and busy.is_above


def _is_recovering(state: OverloadState, params: OverloadParams) -> bool:
    """Return True if the limit refused a request recently."""
    if params.limit is None or state.limit is None or not params.limit.is_limiting:
        return False
    return state.limit.unrefused < in_flight_limit.CALM
