"""Types of requests on a shared bottleneck, one of them rare and expensive (Fig. 9, 11; S5)."""

from __future__ import annotations

from random import Random

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.figures.looks import OURS, PUBLISHED, WITHOUT, per_second, published, refused_percent, timed
from loadtest.overload.study import SHAPE, Beside, Claim, Results, Study, Table, during, over_time, shown_s, shown_share
from loadtest.overload.user_calls import Ask
from loadtest.overload.users import Crowd, Moment, Phase
from loadtest.overload.variant import Variant
from loadtest.plot import Chart, Line, Panel

TARGET_S = 1.0
SECONDS, SETTLED_S = 300.0, 100.0
COSTS_MS = {"read": 10.0, "search": 60.0, "export": 1500.0}
PARTS = {"read": 0.9, "search": 0.092, "export": 0.008}
READ, SEARCH, EXPORT = ((kind, Ask(kind=kind)) for kind in COSTS_MS)
RATE, WORKERS = 200.0, 4
FREE = "without control"
RULES_ONE, RULES_TYPE = "published rules, one control for all", "published rules, control per type"
OURS_ONE, OURS_TYPE = "default rules, one control for all", "default rules, control per type"


def _choose(draw: Random) -> Ask:
    drawn = draw.random()
    for kind, ask in (EXPORT, SEARCH):
        drawn -= PARTS[kind]
        if drawn < 0:
            return ask
    return READ[1]


def _late(results: Results, label: str, kind: str) -> Moment:
    return during(results[label].calls, SETTLED_S, SECONDS, kind=kind)


def _picture(study: Study, results: Results) -> Chart:
    def lines(label: str) -> list[Line]:
        return [
            Line(label=kind, colour=colour,
                 points=_smooth(over_time([one for one in results[label].calls if one.ask.kind == kind],
                                          refused_percent)))
            for kind, colour in zip(COSTS_MS, (OURS, PUBLISHED, WITHOUT), strict=True)
        ]  # fmt: skip

    return Chart(
        title="Three types of requests that share four workers",
        subtitle="200 requests per second: 90 % read (10 ms), 9.2 % search (60 ms), 0.8 % export (1.5 s)",
        x_unit="time (s)",
        panels=[
            Panel(title=f"Refused, means over 11 s, {label}", unit="% of each type", lines=lines(label), y_least=100)
            for label in (RULES_ONE, RULES_TYPE, OURS_ONE, OURS_TYPE)
        ],
    )


def _smooth(points: list[tuple[float, float]], width: int = 11) -> list[tuple[float, float]]:
    """Means over a few seconds: of the rarest type there are one or two requests per second."""
    found = []
    for index, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, index - width // 2) : index + width // 2 + 1]]
        found.append((x, sum(near) / len(near)))
    return found


def _table(study: Study, results: Results) -> Table:
    rows = []
    for label in results:
        cells = []
        for kind in COSTS_MS:
            one = _late(results, label, kind)
            cells += [shown_share(one), f"{shown_s(one)}, {per_second(one, SECONDS - SETTLED_S)}/s"]
        rows.append([label, *cells])
    head = [cell for kind in COSTS_MS for cell in (f"{kind} refused", f"{kind} p90, served")]
    return Table(head=("", *head), rows=rows)


def _beside(study: Study, results: Results) -> list[Beside]:
    shapes = {"read": "spared", "search": "spared", "export": "the expensive type is refused most"}
    rows = []
    for kind, shape in shapes.items():
        one, each = ([shown_share(_late(results, label, kind)) for label in labels]
                     for labels in ((RULES_ONE, OURS_ONE), (RULES_TYPE, OURS_TYPE)))  # fmt: skip
        rows.append(
            Beside(measure=f"{kind} refused: one control for all → per type", published=f"{SHAPE}: {shape}",
                   by_published_rules=f"{one[0]} → {each[0]}", by_ours=f"{one[1]} → {each[1]}")
        )  # fmt: skip
    return rows


def _claims(study: Study, results: Results) -> list[Claim]:
    shares = {label: [_late(results, label, kind).refused_share for kind in COSTS_MS] for label in results}
    one, each = shares[OURS_ONE], shares[OURS_TYPE]
    asked = [sum(call.count for call in results[FREE].calls if call.ask.kind == kind) for kind in COSTS_MS]
    rare = asked[2] / sum(asked)
    return [
        Claim(text=f"the expensive type is less than 1 % of the requests ({rare:.2%}), and nearly half of the work",
              holds=rare < 0.01),
        Claim(text=f"one control for all refuses everyone alike ({one[0]:.0%}, {one[1]:.0%}, {one[2]:.0%})",
              holds=max(one) - min(one) < 0.1 and min(one) > 0.1),
        Claim(text=f"control per type refuses the expensive one ({each[2]:.0%}) and mostly spares the others "
                   f"({each[0]:.0%}, {each[1]:.0%})", holds=max(each[:2]) < 0.1 < 0.3 < each[2]),
    ]  # fmt: skip


REQUEST_TYPES = Study(
    name="types",
    figure="Fig. 9 and 11",
    title="Types of requests on a shared bottleneck",
    asks="200 requests per second in an open loop, 1.3 times what four workers with one common queue can do. Service\n"
    "is exponential, with means of 10 ms (`read`), 60 ms (`search`) and 1.5 s (`export`). The target is 1 s for all:\n"
    "an export takes longer than that even alone, so its own bucket only keeps it from growing. Control per type is\n"
    "`per: [operation]`. Figures are of the last 200 s.",
    settings=(
        "The queue is shared, so late answers of one type are late for all: that is harder than a stage for each type",
    ),
    is_virtual=True,
    crowds=(Crowd(phases=(Phase(SECONDS, rate=RATE),), choose=_choose),),
    backend=BackendTerms(costs_ms=COSTS_MS, workers=WORKERS, is_even=False),
    variants=(
        Variant(label=FREE),
        Variant(label=RULES_ONE, overload=published(TARGET_S)),
        Variant(label=RULES_TYPE, overload=published(TARGET_S), per=("operation",)),
        Variant(label=OURS_ONE, overload=timed(TARGET_S)),
        Variant(label=OURS_TYPE, overload=timed(TARGET_S), per=("operation",)),
    ),
    target_s=TARGET_S,
    picture=_picture,
    table=_table,
    beside=_beside,
    claims=_claims,
)
