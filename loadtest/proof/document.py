"""A proof as a page and a picture."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.locust.run_report import TIMES_HEAD, checked, table, times
from loadtest.locust.thresholds import Check
from loadtest.plot import COLOURS, INK, Band, Chart, Line, Panel, render
from loadtest.proof.analysis import CALM_S, JITTER_S, Death, Findings
from loadtest.proof.proof_plan import API_NODES, CONTROLLERS, PARTITIONS, PRIMARIES, SHARED, TENANT

INTRODUCTION = f"""# The fleet under fire

Written by `make proof` from one run, all of it on one machine: a cluster of {PRIMARIES} primaries with a replica each, {API_NODES} API
nodes, {CONTROLLERS} controllers, {PARTITIONS} partitions, and Locust's users in one process, who fail over from node to node. During the run
the owner of the busiest partition among the controllers, an API node and the primary of the busiest partition are killed
(`SIGKILL`). Two policies cover each of their requests: `{TENANT.name}`, {TENANT.rate:g} units per second for each tenant
(C = {TENANT.capacity:g}, D = {TENANT.debt_max:g}), and `{SHARED.name}`, {SHARED.rate:g} for all together
(C = {SHARED.capacity:g}, D = {SHARED.debt_max:g}), divided over the partitions. Without the store, each node enforces its share (`local`)."""  # noqa: E501

HOW = f"""## How to read it

- The *level* of a bucket is the work admitted beyond what its rate gave, `max(0, level − r·dt) + work`. In a sound
  bucket it never exceeds C + D. After a failover C + D more are allowed ([promise 3](faults.md#promises): the replica
  may lack the last debits), and C for the nodes' own buckets while the store was away. r·{JITTER_S:g} s are always
  allowed, because answers are read later than the store decided.
- A call is *late* if it took longer than the node's deadline plus the allowance. A probe measures that: a separate
  process that calls every node, also the dead one, a few times per second over one connection each, for one tenant
  and partition after another. The allowance covers the wait for a core, which probe, nodes and store share. *Slowest*
  is the probe's slowest call in that second. The users share one busy process, so their times say less about the
  node.
- A failed attempt is repeated at another node with the same `Idempotency-Key`, so it is charged once. A request
  counts as failed only if no node answered it. Settles wait for the store: each `503` was retried until answered.
- Recovery of a controller means that other controllers own all partitions; of an API node, that its successor is
  ready; of a primary, the last answer without the store, or failure, before {CALM_S:g} s without any.
- All nodes have the same `HEADGATE_SECRET`. Without it the secret would be in the store, and a node that starts while
  the store is away would sign with its own secret at first: other nodes would not know those reservations."""


def document(found: Findings, checks: Sequence[Check], *, picture: str) -> str:
    """Return the whole page."""
    plan = found.plan
    held = "All of it held." if all(check.holds for check in checks) else "**Not all of it held.**"
    summary = (
        f"{plan.seconds:g} s, {plan.users} users, deadline {plan.deadline_ms} ms, allowance {plan.allowance_ms:g} ms, "
        f"{found.attempts} calls, {found.decisions} decisions, of which "
        f"{found.degraded} without the store; {found.machine}. {held}"
    )
    return "\n\n".join(
        [
            INTRODUCTION,
            summary,
            f"![work admitted each second, with the kills]({picture})",
            table(("check", "found", "allowed", ""), [checked(check) for check in checks]),
            "## Killed",
            table(("what", "at", "recovered when", "after"), [_death(death, found.began_s) for death in found.deaths]),
            "## Attempts that failed and were retried",
            table(("kind", "attempts"), sorted(found.failures.items()) or [("none", 0)]),
            "## Time to an answer",
            table(
                TIMES_HEAD,
                [times("the probe, which does nothing else", found.probed), times("the users' process", found.read)],
            ),
            "## Work against the limits",
            table(("bucket", "level before the failover", "allowed", "level overall", "allowed"), _levels(found)),
            _seconds(found),
            HOW,
        ]
    ) + "\n"  # fmt: skip


def _death(death: Death, began_s: float) -> tuple[str, str, str, str]:
    after = "not before the end" if death.recovered_after_s is None else f"{death.recovered_after_s:.1f} s"
    return death.victim, f"{death.at_s - began_s:.1f} s", death.recovery, after


def _levels(found: Findings) -> list[tuple[str, str, str, str, str]]:
    """Return the levels of all buckets together, and of the three busiest tenants."""
    return [
        (
            one.bucket,
            f"{one.before_failover:.0f}",
            f"{one.before_max:.0f}",
            f"{one.overall:.0f}",
            f"{one.overall_max:.0f}",
        )
        for one in sorted(found.levels, key=lambda one: (one.limit is not SHARED, -one.overall))[:4]
    ]


def _seconds(found: Findings) -> str:
    head = (
        "second",
        "demanded",
        "admitted",
        "of the limit",
        "refused",
        "without the store",
        "retried",
        "slowest",
    )
    rows = [
        (s.at, f"{s.demanded:.0f}", f"{s.admitted:.0f}", f"{s.admitted / SHARED.rate:.0%}", s.refused, s.degraded,
         s.failed, f"{s.slowest_ms:.0f} ms")
        for s in found.seconds
    ]  # fmt: skip
    return f"<details><summary>Every second</summary>\n\n{table(head, rows)}\n\n</details>"


def picture(found: Findings) -> str:
    """Return work and answers over time, with the kills, as SVG."""
    rows = found.seconds[: int(found.plan.seconds)]
    admitted, demanded = [(s.at + 0.5, s.admitted) for s in rows], [(s.at + 0.5, s.demanded) for s in rows]
    end = rows[-1].at + 1.0
    limit = [(0.0, SHARED.rate), (end, SHARED.rate)]
    work = Panel(
        title="Work",
        unit="units/s",
        lines=(
            Line(label="demanded", points=demanded, colour="#bbbbbb"),
            Line(label="admitted", points=admitted, width=2.4),
            Line(label="limit of all tenants", points=limit, colour=INK, is_dashed=True),
        ),
    )
    retried = "failed attempts" if found.requests_failed else "retried, none lost"
    answers = Panel(
        title="Answers",
        unit="per second",
        lines=(
            Line(label="refused", points=[(s.at + 0.5, float(s.refused)) for s in rows], colour=COLOURS[2]),
            Line(label="without the store", points=[(s.at + 0.5, float(s.degraded)) for s in rows], colour=COLOURS[3]),
            Line(label=retried, points=[(s.at + 0.5, float(s.failed)) for s in rows], colour=COLOURS[1]),
        ),
    )
    deadline_ms = float(found.plan.deadline_ms)
    times = Panel(
        title="The probe's slowest call",
        unit="ms",
        lines=(
            Line(label="slowest", points=[(s.at + 0.5, s.slowest_ms) for s in rows], colour=COLOURS[0]),
            Line(label="deadline", points=[(0.0, deadline_ms), (end, deadline_ms)], colour=INK, is_dashed=True),
        ),
    )
    chart = Chart(
        title="A controller, an API node and a primary are killed under load",
        subtitle="Marked: from each kill to its recovery",
        x_unit="time (s)",
        bands=[_band(death, found.began_s, end) for death in found.deaths],
        panels=(work, answers, times),
    )
    return render(chart)


def _band(death: Death, began_s: float, end: float) -> Band:
    from_x = death.at_s - began_s
    to_x = end if death.recovered_after_s is None else from_x + death.recovered_after_s
    return Band(from_x=from_x, to_x=min(end, to_x), label=death.victim)
