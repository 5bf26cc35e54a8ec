"""The plain published rules for a cap (R1–R6), for policies with `rules: published` (S10).

    L work per second, as it is settled    f work per request    C committed work per second

lower    L > C, rejecting        cap − (L − C) / f / lower_cycles    at most halved in a step
raise    L < C, rejecting        cap + (C − L) / f / raise_cycles    at most doubled in a step
set      L > C, not rejecting    safety · L / f                      where the cap is above that; else `lower`
hold     neither, or not known   cap                                 never raised without rejections (R5, F-P8)

L is known once requests are settled, so it lags by as long as they last: requests of a second and more make the cap
swing. `limiter.model.control.caps` handles those as well.
"""

from __future__ import annotations

from math import isfinite

from limiter.model.control.caps import STEP_MAX, CapParams, Rule, bounded
from limiter.model.control.smoothing import Load


def step(cap: float, load: Load, params: CapParams, *, committed: float) -> tuple[Rule, float]:
    """Move the cap by the difference of settled work and committed rate, spread over a few cycles."""
    work_rate, work = load.work_rate, load.work_per_request
    if work_rate is None or work is None or not isfinite(work_rate + work):
        return "hold", cap
    rule, after = _moved(cap, work_rate, max(work, params.smallest_work), load.is_rejecting, params, committed)
    return rule, bounded(after, params, smallest=params.smallest_work, largest=work, committed=committed)


def _moved(
    cap: float, work_rate: float, work: float, is_rejecting: bool, params: CapParams, committed: float
) -> tuple[Rule, float]:
    above = work_rate - committed
    if above == 0 or (above < 0 and not is_rejecting):
        return "hold", cap
    if not work > 0:
        return ("raise", cap * STEP_MAX) if above < 0 else ("hold", cap)
    if above < 0:
        return "raise", min(cap - above / work / params.raise_cycles, cap * STEP_MAX)
    if not is_rejecting and cap > params.safety * work_rate / work:
        return "set", params.safety * work_rate / work
    return "lower", max(cap - above / work / params.lower_cycles, cap / STEP_MAX)
