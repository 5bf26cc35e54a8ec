"""Findings from the attempts of a run and the deaths during it. Pure.

Promise 3: a failover credits at most C + D per bucket. A bucket's level, which is the work admitted beyond its rate
(`loadtest.locust.limits`), is therefore at most

    C + D                     as long as no store fails over
    C + D + (C + D) + C       after a failover: the promise, and with `on_store_failure: local` the one capacity that
                              the nodes' own buckets, together, hold while the store is away

and r·J more, as an answer is read up to J seconds after the store has decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from loadtest.locust.attempts import Attempt
from loadtest.locust.limits import WorkLimit, level_max
from loadtest.locust.thresholds import Check
from loadtest.probe import Probed, Times
from loadtest.proof.proof_plan import RECOVERED_WITHIN_S, SHARED, TENANT, Plan, Victim

JITTER_S = 0.25
CALM_S = 2.0
"""Longer than nodes wait before they probe a store that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A killed process, and its recovery."""

    victim: Victim
    name: str
    at_s: float
    recovery: str
    """The condition that counts as recovered."""
    recovered_after_s: float | None = None
    """None: not before the end."""


@dataclass(frozen=True, slots=True)
class BucketLevel:
    """The highest level of one bucket, and its bound."""

    bucket: str
    limit: WorkLimit
    before_failover: float
    overall: float

    @property
    def before_max(self) -> float:
        """The bound while no store fails over."""
        return self.limit.slack + self.limit.rate * JITTER_S

    @property
    def overall_max(self) -> float:
        """The bound with one failover."""
        return self.before_max + self.limit.slack + self.limit.capacity

    @property
    def holds(self) -> bool:
        """True if both bounds were kept."""
        return self.before_failover <= self.before_max and self.overall <= self.overall_max


@dataclass(frozen=True, slots=True)
class Second:
    """The figures of one second of the run."""

    at: int
    demanded: float
    admitted: float
    refused: int
    degraded: int
    failed: int
    slowest_ms: float
    """The slowest call of the probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All findings of a run."""

    plan: Plan
    began_s: float
    machine: str
    """The machine that everything shared."""
    attempts: int
    decisions: int
    failures: dict[str, int]
    requests_failed: int
    probed: Times
    """The times of the probe, which has nothing else to do: they decide whether answers came within the deadline."""
    read: Times
    """The times at which users had their answers; their process is busy, and reads late."""
    degraded: int
    levels: Sequence[BucketLevel]
    seconds: Sequence[Second]
    deaths: Sequence[Death]


def analyse(
    attempts: Iterable[Attempt],
    probed: Iterable[Probed],
    deaths: Sequence[Death],
    plan: Plan,
    *,
    began_s: float,
    machine: str = "",
) -> Findings:
    """Return everything that the report needs."""
    ordered, asked = sorted(attempts, key=lambda one: one.at_s), list(probed)
    return Findings(
        plan=plan,
        began_s=began_s,
        machine=machine,
        attempts=len(ordered),
        decisions=sum(one.call == "acquire" and not one.is_failed for one in ordered),
        failures=dict(Counter(f"{one.call}: {one.reason}" for one in ordered if one.is_failed)),
        requests_failed=sum(one.is_failed and one.is_final for one in ordered),
        probed=Times.of([one.latency_ms for one in asked], late_ms=plan.late_ms),
        read=Times.of([one.latency_ms for one in ordered if one.status != 0], late_ms=plan.late_ms),
        degraded=sum(one.is_degraded for one in ordered),
        levels=bucket_levels(ordered, failover_s=_failover_s(deaths)),
        seconds=by_second(ordered, asked, began_s),
        deaths=[_with_recovery(death, ordered) for death in deaths],
    )


def bucket_levels(ordered: Sequence[Attempt], *, failover_s: float) -> list[BucketLevel]:
    """Return the levels of the shared bucket, and of each tenant's."""
    buckets: dict[str, tuple[WorkLimit, list[tuple[float, float]]]] = {"shared": (SHARED, [])}
    for one in ordered:
        if one.work:
            buckets["shared"][1].append((one.at_s, one.work))
            buckets.setdefault(one.tenant, (TENANT, []))[1].append((one.at_s, one.work))
    return [
        BucketLevel(
            bucket,
            limit,
            level_max([one for one in admissions if one[0] < failover_s], limit.rate),
            level_max(admissions, limit.rate),
        )
        for bucket, (limit, admissions) in buckets.items()
    ]


def by_second(ordered: Sequence[Attempt], probed: Iterable[Probed], began_s: float) -> list[Second]:
    """Return the run second by second; an attempt belongs to the second in which it was answered."""
    rows: dict[int, list[Attempt]] = {}
    for one in ordered:
        rows.setdefault(int(one.at_s - began_s), []).append(one)
    slowest_ms: dict[int, float] = {}
    for call in probed:
        at = int(call.at_s - began_s)
        slowest_ms[at] = max(slowest_ms.get(at, 0.0), call.latency_ms)
    return [_second(at, rows.get(at, []), slowest_ms.get(at, 0.0)) for at in range(max(rows, default=-1) + 1)]


def _second(at: int, attempts: Sequence[Attempt], slowest_ms: float) -> Second:
    return Second(
        at,
        demanded=sum(one.demanded for one in attempts),
        admitted=sum(one.work for one in attempts),
        refused=sum(one.status == 429 for one in attempts),
        degraded=sum(one.is_degraded for one in attempts),
        failed=sum(one.is_failed for one in attempts),
        slowest_ms=slowest_ms,
    )


def _failover_s(deaths: Iterable[Death]) -> float:
    return min((death.at_s for death in deaths if death.victim == "primary"), default=float("inf"))


def _with_recovery(death: Death, ordered: Sequence[Attempt]) -> Death:
    """Set the recovery of a dead primary: when no decision does without it any more. Others are watched coming back."""
    if death.victim != "primary" or death.recovered_after_s is None:
        return death
    without_s = [one.at_s for one in ordered if one.at_s > death.at_s and (one.is_degraded or one.is_failed)]
    return replace(death, recovered_after_s=calm_from_s(without_s, death.at_s) - death.at_s)


def calm_from_s(troubles_s: Sequence[float], from_s: float) -> float:
    """Return the last trouble before the first CALM_S without any."""
    for at_s in troubles_s:
        if at_s > from_s + CALM_S:
            break
        from_s = at_s
    return from_s


def judge(found: Findings) -> list[Check]:
    """Check whether the promises held."""
    late_ms = found.plan.late_ms
    worst = max(found.levels, key=lambda one: one.overall / one.overall_max)
    idle = [second.at for second in found.seconds[1:-1] if second.demanded > SHARED.rate / 2 and second.admitted <= 0]
    return [
        Check("decisions", str(found.decisions), "> 0", found.decisions > 0),
        Check("requests failed at every node", str(found.requests_failed), "0", found.requests_failed == 0),
        Check(
            f"promise 4: the probe's calls beyond {late_ms:g} ms",
            f"{found.probed.late} of {found.probed.count}; slowest: {found.probed.slowest_ms:.0f} ms",
            "0",
            found.probed.count > 0 and found.probed.late == 0,
        ),
        Check(
            "promise 3: buckets beyond their bound",
            f"{sum(not one.holds for one in found.levels)} of {len(found.levels)}; "
            f"nearest to it: {worst.bucket}, {worst.overall:.0f}",
            f"0; {worst.overall_max:.0f}",
            all(one.holds for one in found.levels),
        ),
        Check("seconds without any work admitted", str(len(idle)), "0", not idle),
        *(_recovery(death) for death in found.deaths),
    ]


def _recovery(death: Death) -> Check:
    most_s, after_s = RECOVERED_WITHIN_S[death.victim], death.recovered_after_s
    shown = "not before the end" if after_s is None else f"{after_s:.1f} s"
    return Check(
        f"{death.victim} killed: {death.recovery}", shown, f"≤ {most_s:g} s", after_s is not None and after_s <= most_s
    )
