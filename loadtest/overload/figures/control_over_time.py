"""Response time and admission rate over time (Fig. 7)."""

from __future__ import annotations

from math import nan

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.figures.looks import (
    OURS,
    PUBLISHED,
    p90_panel,
    per_second,
    published,
    timed,
    users_bands,
    wobble,
)
from loadtest.overload.study import SHAPE, Beside, Claim, Results, Study, Table, during, p90_s, peak_s, shown_s
from loadtest.overload.user_calls import Ask
from loadtest.overload.users import Crowd, Phase
from loadtest.overload.variant import Variant
from loadtest.plot import Chart, Line, Panel

TARGET_S = 1.0
CAPACITY = 50.0
BUSY_S, SETTLED_S, END_S = 20.0, 60.0, 180.0
RULES, DEFAULT = "published rules", "default rules"
CRITICAL = 1
"""The number of the class that everybody is in."""


def _steered(results: Results, label: str, *, is_rate: bool) -> list[tuple[float, float]]:
    """The rate or the limit that control has set, over time; a gap where there is none."""
    return [
        (point.at_s, (point.rates if is_rate else point.limits)[CRITICAL] or nan) for point in results[label].points
    ]


def _picture(study: Study, results: Results) -> Chart:
    rate = Line(label=RULES, points=_steered(results, RULES, is_rate=True), colour=PUBLISHED, is_stepped=True)
    limit = Line(label=DEFAULT, points=_steered(results, DEFAULT, is_rate=False), colour=OURS, is_stepped=True)
    can = Line(label="capacity", points=[(0, CAPACITY), (END_S, CAPACITY)], colour="#222222",
               is_dashed=True, width=1.2)  # fmt: skip
    return Chart(
        title="Control over time",
        subtitle="60 users, then 300; one backend that can do 50 requests per second; target 1 s",
        x_unit="time (s)",
        bands=users_bands(study),
        panels=(
            p90_panel(study, results, (PUBLISHED, OURS)),
            Panel(title="Published rules: admission rate", unit="requests/s", lines=[rate, can]),
            Panel(title="Default rules: limit on what is in flight", unit="requests", lines=[limit]),
        ),
    )


def _table(study: Study, results: Results) -> Table:
    rows = []
    for label, run in results.items():
        late = during(run.calls, SETTLED_S, END_S)
        rows.append([label, shown_s(late), f"{peak_s(run.calls, BUSY_S, END_S):.1f} s",
                     f"{wobble(run.calls, SETTLED_S, END_S):.2f}", per_second(late, END_S - SETTLED_S),
                     f"{late.refused_share:.1%}"])  # fmt: skip
    head = ("", "p90", "highest p90 of a second", "deviation of a second's p90 ÷ mean", "served/s", "refused")
    return Table(head=head, rows=rows)


def _beside(study: Study, results: Results) -> list[Beside]:
    rules, ours = (results[label].calls for label in (RULES, DEFAULT))
    moments = [during(calls, SETTLED_S, END_S) for calls in (rules, ours)]
    wobbles = [f"{wobble(calls, SETTLED_S, END_S):.2f}" for calls in (rules, ours)]
    return [
        Beside(measure="p90, target 1 s", published=f"{SHAPE}: saw-tooth about the target",
               by_published_rules=shown_s(moments[0]), by_ours=shown_s(moments[1])),
        Beside(measure="deviation of a second's p90 ÷ mean", published=SHAPE, by_published_rules=wobbles[0],
               by_ours=wobbles[1]),
    ]  # fmt: skip


def _claims(study: Study, results: Results) -> list[Claim]:
    rates = [value for at_s, value in _steered(results, RULES, is_rate=True) if at_s >= SETTLED_S] or [0.0]
    ours = results[DEFAULT].calls
    late = during(ours, SETTLED_S, END_S)
    part, served = (p90_s(late) or 0.0) / TARGET_S, late.served / (END_S - SETTLED_S)
    return [
        Claim(text=f"by the published rules the rate is a saw-tooth (from {min(rates):.0f} to {max(rates):.0f} "
                   "requests/s once settled)", holds=max(rates) > 1.5 * min(rates)),
        Claim(text=f"by the default rules p90 is {part:.2f} of the target", holds=0.9 <= part <= 1.1),
        Claim(text=f"by the default rules {served / CAPACITY:.0%} of what the backend can do is served",
              holds=served >= 0.97 * CAPACITY),
    ]  # fmt: skip


OVER_TIME = Study(
    name="over-time",
    figure="Fig. 7",
    title="Response time and rate over time",
    asks="60 users, and 300 from 20 s on, think for 2 s on average. One worker, exponential service of 20 ms. The\n"
    "published rules steer a rate: it rises in small steps and is divided when answers are late. The default rules\n"
    "steer a limit on what is in flight. Figures are of the time from 60 s on.",
    settings=("All parameters of the published rules are the published ones, and `rate_initial` is 100",),
    is_virtual=True,
    crowds=(
        Crowd(phases=(Phase(BUSY_S, users=60), Phase(END_S - BUSY_S, users=300)), choose=lambda _: Ask(), think_s=2.0),
    ),
    backend=BackendTerms(costs_ms={"cheap": 1000 / CAPACITY}, is_even=False),
    variants=(
        Variant(label=RULES, overload=published(TARGET_S)),
        Variant(label=DEFAULT, overload=timed(TARGET_S)),
    ),
    target_s=TARGET_S,
    picture=_picture,
    table=_table,
    beside=_beside,
    claims=_claims,
)
