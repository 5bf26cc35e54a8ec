"""The thresholds of a run. Every check says what was found and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.locust.limits import WorkLimit, level_max
from loadtest.locust.run_tally import Second, Tally
from loadtest.probe import Times

FAILED_SHARE_MAX = 0.01
"""Each is repeated: a store that waits for a core beyond the deadline has settles answered with 503."""
LATE_SHARE_MAX = 0.01
"""Users, nodes, store and probe share the cores here."""
USED_SHARE_MIN = 0.8
SATURATED = 1.1
"""Demand from this multiple of the limit on counts as saturating it."""
SATURATED_SECONDS_MIN = 3
CLASSES_ASKED_MIN = 200
"""With fewer asks of a class, its share of refusals is chance."""


@dataclass(frozen=True, slots=True)
class Check:
    """One threshold, and whether it held."""

    name: str
    found: str
    allowed: str
    holds: bool


def judge(tally: Tally, limit: WorkLimit, probed: Times, *, late_ms: float) -> list[Check]:
    """Return all checks of a run against the limit that all its work shares, and of the probe beside it."""
    return [
        _is_asked(tally),
        _lost(tally),
        _failures(tally),
        _late_answers(probed, late_ms),
        _excess(tally, limit),
        *_use(tally, limit),
        _settle_lag(tally, late_ms),
        *_fairness(tally),
    ]


def _is_asked(tally: Tally) -> Check:
    return Check("decisions", str(tally.decisions), "> 0", tally.decisions > 0)


def _lost(tally: Tally) -> Check:
    return Check("requests failed for good", str(tally.requests_failed), "0", tally.requests_failed == 0)


def _failures(tally: Tally) -> Check:
    share = sum(tally.failures.values()) / max(1, tally.attempts)
    return Check("attempts failed", f"{share:.2%}", f"≤ {FAILED_SHARE_MAX:.2%}", share <= FAILED_SHARE_MAX)


def _late_answers(probed: Times, late_ms: float) -> Check:
    """Check the probe's answers; without any it proves nothing."""
    share = probed.late / probed.count if probed.count else 1.0
    return Check(
        f"the probe's calls beyond {late_ms:g} ms",
        f"{probed.late} of {probed.count}",
        f"≤ {LATE_SHARE_MAX:.0%}",
        share <= LATE_SHARE_MAX,
    )


def _excess(tally: Tally, limit: WorkLimit) -> Check:
    """Check admissions over whole seconds. Their place within a second is unknown, hence one more second of rate."""
    found = level_max(((at, second.admitted) for at, second in sorted(tally.seconds.items())), limit.rate)
    allowed = limit.slack + limit.rate
    return Check(
        f"work beyond the rate of {limit.name}", f"{found:.0f}", f"≤ C + D + 1 s = {allowed:g}", found <= allowed
    )


def saturated(tally: Tally, limit: WorkLimit) -> list[Second]:
    """Return the seconds in which more was asked for than the limit, without the first and the last."""
    inner = [second for _, second in sorted(tally.seconds.items())][1:-1]
    return [second for second in inner if second.demanded >= SATURATED * limit.rate]


def _use(tally: Tally, limit: WorkLimit) -> list[Check]:
    seconds = saturated(tally, limit)
    if len(seconds) < SATURATED_SECONDS_MIN:
        return []
    used = sum(second.admitted for second in seconds) / len(seconds) / limit.rate
    return [Check("limit used while saturated", f"{used:.0%}", f"≥ {USED_SHARE_MIN:.0%}", used >= USED_SHARE_MIN)]


def _settle_lag(tally: Tally, late_ms: float) -> Check:
    """Check the lag of settles: one has the deadline of a decision, and is repeated once if it fails."""
    lag_ms, most_ms = tally.settle_lag_p_ms(99), 2 * late_ms
    return Check("settle lag p99", f"{lag_ms:.0f} ms", f"≤ {most_ms:g} ms", lag_ms <= most_ms)


def _fairness(tally: Tally) -> list[Check]:
    """Check that the least critical are refused at least as often (W11), if enough of both asked and any were
    refused."""
    low, high = "sheddable", "critical"
    if min(tally.asked_by_class.get(name, 0) for name in (low, high)) < CLASSES_ASKED_MIN or not tally.refusals:
        return []
    refused_low, refused_high = tally.refused_share(low), tally.refused_share(high)
    return [Check(f"{low} refused", f"{refused_low:.0%}", f"≥ {high}: {refused_high:.0%}", refused_low >= refused_high)]
