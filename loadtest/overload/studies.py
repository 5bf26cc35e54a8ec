"""The four experiments: a spike (S6), classes (S3), types (S5) and degradation (S4)."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from limiter.model.policy.criticality import Criticality
from loadtest.overload.calls import Ask, Call
from loadtest.overload.stage import BackendTerms
from loadtest.overload.study import (
    Claim,
    Results,
    Study,
    Table,
    Variant,
    during,
    over_time,
    p90_s,
    shown_s,
    shown_share,
)
from loadtest.overload.users import Moment, Phase
from loadtest.plot import COLOURS, Band, Chart, Line, Panel

TARGET_S = 1.0
PACE = {"target_ms": 1000 * TARGET_S, "nreq": 20, "timeout_s": 0.2, "adj_i": 0.5, "rate_max": 100}
GENTLE = {"target_ms": 1000 * TARGET_S, "rate_max": 400, "adj_i": 6}
OFTEN_TOLD = """\
`nreq: 20`, `timeout_s: 0.2` (published: 100, and 1 s): this backend does tens of requests a second and not hundreds;
  looked at once a second, it would have hundreds waiting by then"""
SLOWLY_TOLD = """\
`adj_i: 0.5` (published: 2.0): with five runs a second, a rate still rises by about 2 requests/s each second"""
QUICKLY_TOLD = """\
`adj_i: 6` (published: 2.0): at its lowest quality this backend does 250 requests a second, and a rate that was cut
  should be back within a minute"""
BOUND_TOLD = """\
`rate_max: {rate_max}` (published: 5000): about twice what the backend is believed to do. It bounds what comes in before
  the first slow answer can be measured"""
PACE_TOLD = (OFTEN_TOLD, SLOWLY_TOLD, BOUND_TOLD.format(rate_max=100))
HIGH, LOW = Criticality.CRITICAL, Criticality.SHEDDABLE
WITH, WITHOUT = COLOURS[0], COLOURS[1]
TARGET_COLOUR = "#222222"


def _target(study: Study) -> Line:
    points = [(0.0, TARGET_S), (study.seconds, TARGET_S)]
    return Line(label="target", points=points, colour=TARGET_COLOUR, is_dashed=True, width=1.2)


def _users_bands(study: Study) -> list[Band]:
    """The busy phases, named by how many users there are."""
    ends = [*study.starts_s(), study.seconds]
    stretches = zip(study.phases, pairwise(ends), strict=True)
    return [
        Band(from_x=start, to_x=end, label=f"{phase.users} users")
        for phase, (start, end) in stretches
        if phase.users > study.phases[0].users
    ]


def _refused(one: Moment) -> float:
    return 100 * one.refused_share


def _per_second(one: Moment, seconds: float) -> str:
    return f"{one.served / seconds:.0f}"


# The spike.


def _late_spike(study: Study, calls: list[Call] | tuple[Call, ...]) -> tuple[Moment, float]:
    """The last third of the spike: what settled, settled before it."""
    start_s, phase_s = study.starts_s()[1], study.phases[1].seconds
    seconds = phase_s / 3
    return during(calls, start_s + phase_s - seconds, start_s + phase_s), seconds


def _spike_picture(study: Study, results: Results) -> Chart:
    looks = zip(results.items(), (WITHOUT, WITH), strict=True)
    lines = [(label, calls, colour) for (label, calls), colour in looks]
    return Chart(
        title="A spike from 3 to 1000 users",
        subtitle="One backend that can do 50 requests a second; response times of the answers given in each second",
        x_unit="time (s)",
        bands=_users_bands(study),
        panels=(
            Panel(
                title="p90: how long nine of ten answers took at most",
                unit="s",
                lines=(
                    *(
                        Line(label=label, points=over_time(calls, p90_s), colour=colour)
                        for label, calls, colour in lines
                    ),
                    _target(study),
                ),
            ),
            Panel(
                title="Requests that were served",
                unit="requests/s",
                lines=[
                    Line(label=label, points=over_time(calls, lambda one: one.served), colour=colour)
                    for label, calls, colour in lines
                ],
            ),
        ),
    )


def _spike_table(study: Study, results: Results) -> Table:
    rows = []
    for label, calls in results.items():
        late, seconds = _late_spike(study, list(calls))
        whole = max((value for _, value in over_time(calls, p90_s) if value == value), default=0.0)
        rows.append([label, shown_s(late), f"{whole:.1f} s", _per_second(late, seconds), shown_share(late)])
    return Table(head=("", "p90", "highest p90 of a second", "served/s", "refused"), rows=rows)


def _spike_claims(study: Study, results: Results) -> list[Claim]:
    free, held = (_late_spike(study, list(calls))[0] for calls in results.values())
    held_s, free_s = p90_s(held) or 0.0, p90_s(free) or 0.0
    return [
        Claim(text=f"with control, p90 settles within twice the target ({held_s:.2f} s)", holds=held_s <= 2 * TARGET_S),
        Claim(text=f"without, it grows far beyond ({free_s:.1f} s)", holds=free_s > 5 * TARGET_S),
    ]


SPIKE = Study(
    name="spike",
    title="A spike",
    asks="3 users, then 1000, then 3 again; each asks, waits, thinks for 2 s on average and asks again. The backend\n"
    "has one worker, which a request takes for 20 ms. Figures are of the last third of the spike.",
    settings=PACE_TOLD,
    choose=lambda _: Ask(),
    phases=(Phase(5, users=3), Phase(45, users=1000), Phase(5, users=3)),
    backend=BackendTerms(cheap_ms=20),
    variants=(
        Variant(label="without control"),
        Variant(label="with control", overload={"response_time": PACE}),
    ),
    picture=_spike_picture,
    table=_spike_table,
    claims=_spike_claims,
)


# Classes.


def _either_class(draw: Random) -> Ask:
    return Ask(criticality=draw.choice([HIGH, LOW]))


def _settled(study: Study) -> tuple[float, float]:
    """The last two thirds."""
    return study.seconds / 3, study.seconds


def _of_class(calls: list[Call] | tuple[Call, ...], criticality: Criticality) -> list[Call]:
    return [one for one in calls if one.ask.criticality is criticality]


def _classes_picture(study: Study, results: Results) -> Chart:
    def lines(calls: list[Call]) -> list[Line]:
        return [
            Line(label=f"{name} class ({criticality})", points=over_time(_of_class(calls, criticality), _refused),
                 colour=colour)
            for name, criticality, colour in (("high", HIGH, WITH), ("low", LOW, WITHOUT))
        ]  # fmt: skip

    return Chart(
        title="Two classes that ask for the same",
        subtitle="250 users, half of the requests of each class; one backend that can do 50 requests a second",
        x_unit="time (s)",
        panels=[
            Panel(title=f"Refused, {label}", unit="% of each class's requests", lines=lines(list(calls)), y_least=100)
            for label, calls in results.items()
        ],
    )


def _classes_table(study: Study, results: Results) -> Table:
    rows = []
    for label, calls in results.items():
        high, low = (during(calls, *_settled(study), criticality=name) for name in (HIGH, LOW))
        every = during(calls, *_settled(study))
        rows.append([label, shown_share(high), shown_share(low), shown_s(high), shown_s(low),
                     _per_second(every, study.seconds * 2 / 3)])  # fmt: skip
    return Table(head=("", "high refused", "low refused", "high p90", "low p90", "served/s"), rows=rows)


def _classes_claims(study: Study, results: Results) -> list[Claim]:
    shares = [
        [during(calls, *_settled(study), criticality=name).refused_share for name in (HIGH, LOW)]
        for calls in results.values()
    ]
    (alike_high, alike_low), (high, low) = shares
    return [
        Claim(text=f"without classes both are refused alike ({alike_high:.0%}, {alike_low:.0%})",
              holds=abs(alike_high - alike_low) < 0.1),
        Claim(text=f"with classes the high one is refused clearly less ({high:.0%} against {low:.0%})",
              holds=low - high > 0.2),
    ]  # fmt: skip


CLASSES = Study(
    name="classes",
    title="Classes",
    asks="250 users think for 2 s on average; each request is `critical` or `sheddable` by the toss of a coin. One\n"
    "worker, 20 ms a request. Figures are of the last two thirds.",
    settings=PACE_TOLD,
    choose=_either_class,
    phases=(Phase(55, users=250),),
    backend=BackendTerms(cheap_ms=20),
    variants=(
        Variant(label="without classes", overload={"response_time": {**PACE, "classes": False}}),
        Variant(label="with classes", overload={"response_time": PACE}),
    ),
    picture=_classes_picture,
    table=_classes_table,
    claims=_classes_claims,
)


# Types.


def _either_kind(draw: Random) -> Ask:
    return Ask(kind="expensive" if draw.random() < 0.3 else "cheap")


def _of_kind(calls: list[Call] | tuple[Call, ...], kind: str) -> list[Call]:
    return [one for one in calls if one.ask.kind == kind]


def _types_picture(study: Study, results: Results) -> Chart:
    def lines(calls: list[Call]) -> list[Line]:
        return [
            Line(label=kind, points=over_time(_of_kind(calls, kind), _refused), colour=colour)
            for kind, colour in (("cheap", WITH), ("expensive", WITHOUT))
        ]

    return Chart(
        title="Cheap and expensive types of requests",
        subtitle="70 cheap requests a second of 200 that could be done, 30 expensive ones of 20 that could be done",
        x_unit="time (s)",
        panels=[
            Panel(title=f"Refused, {label}", unit="% of each type's requests", lines=lines(list(calls)), y_least=100)
            for label, calls in results.items()
        ],
    )


def _types_table(study: Study, results: Results) -> Table:
    rows = []
    for label, calls in results.items():
        cheap, expensive = (during(calls, *_settled(study), kind=kind) for kind in ("cheap", "expensive"))
        seconds = study.seconds * 2 / 3
        rows.append([label, shown_share(cheap), shown_share(expensive), shown_s(cheap), shown_s(expensive),
                     _per_second(cheap, seconds), _per_second(expensive, seconds)])  # fmt: skip
    head = ("", "cheap refused", "expensive refused", "cheap p90", "expensive p90", "cheap served/s",
            "expensive served/s")  # fmt: skip
    return Table(head=head, rows=rows)


def _types_claims(study: Study, results: Results) -> list[Claim]:
    shares = [
        [during(calls, *_settled(study), kind=kind).refused_share for kind in ("cheap", "expensive")]
        for calls in results.values()
    ]
    (single_cheap, single_expensive), (cheap, expensive) = shares
    return [
        Claim(text=f"one control for all refuses everyone alike ({single_cheap:.0%}, {single_expensive:.0%})",
              holds=abs(single_cheap - single_expensive) < 0.1 and single_cheap > 0.1),
        Claim(text=f"control per type refuses the expensive one ({expensive:.0%}) and spares the cheap ({cheap:.0%})",
              holds=cheap < 0.05 < expensive),
    ]  # fmt: skip


TYPES = Study(
    name="types",
    title="Types of requests",
    asks="100 requests a second, 30 of them expensive. In the backend each type has a worker and a queue of its own:\n"
    "a cheap request takes its worker for 5 ms, an expensive one for 50 ms. Figures are of the last two thirds.",
    settings=PACE_TOLD,
    choose=_either_kind,
    phases=(Phase(45, rate=100),),
    backend=BackendTerms(cheap_ms=5, expensive_ms=50, is_staged=True),
    variants=(
        Variant(label="one control for all", overload={"response_time": PACE}),
        Variant(label="control per type", overload={"response_time": PACE}, per=("operation",)),
    ),
    picture=_types_picture,
    table=_types_table,
    claims=_types_claims,
)


# Degradation.


def _degrade_picture(study: Study, results: Results) -> Chart:
    looks = list(zip(results.items(), (WITHOUT, WITH), strict=True))
    degrading = list(results.values())[1]
    return Chart(
        title="Cheaper work before refusals",
        subtitle="One backend that can do 50 requests a second at full quality and 250 at none",
        x_unit="time (s)",
        bands=_users_bands(study),
        panels=(
            Panel(
                title="p90: how long nine of ten answers took at most",
                unit="s",
                lines=(
                    *(Line(label=label, points=over_time(calls, p90_s), colour=colour)
                      for (label, calls), colour in looks),
                    _target(study),
                ),
            ),
            Panel(
                title="Refused",
                unit="% of the requests",
                y_least=100,
                lines=[Line(label=label, points=over_time(calls, _refused), colour=colour)
                       for (label, calls), colour in looks],
            ),
            Panel(
                title="Quality of the answers",
                unit="0 to 1",
                lines=[Line(label="with degradation", points=over_time(degrading, lambda one: one.quality),
                            colour=WITH)],
            ),
        ),
    )  # fmt: skip


def _late_phases(study: Study) -> list[tuple[int, float, float]]:
    """The last half of each phase, with its users."""
    return [
        (phase.users, start_s + phase.seconds / 2, start_s + phase.seconds)
        for phase, start_s in zip(study.phases, study.starts_s(), strict=True)
    ]


def _degrade_table(study: Study, results: Results) -> Table:
    rows = []
    for label, calls in results.items():
        for users, from_s, to_s in _late_phases(study):
            late = during(calls, from_s, to_s)
            quality = "–" if late.quality is None else f"{late.quality:.2f}"
            rows.append([f"{label}, {users} users", quality, shown_share(late), shown_s(late),
                         _per_second(late, to_s - from_s)])  # fmt: skip
    return Table(head=("", "quality", "refused", "p90", "served/s"), rows=rows)


def _degrade_claims(study: Study, results: Results) -> list[Claim]:
    refusing, degrading = (
        [during(calls, from_s, to_s) for _, from_s, to_s in _late_phases(study)] for calls in results.values()
    )
    busy, flooded = degrading[1], degrading[2]
    busy_quality = busy.quality if busy.quality is not None else 1.0
    return [
        Claim(text=f"under a load that cheaper work can serve, quality is {busy_quality:.2f} and "
                   f"{busy.refused_share:.1%} are refused, against {refusing[1].refused_share:.0%} without",
              holds=busy_quality < 0.9 and busy.refused_share < 0.05 < refusing[1].refused_share),
        Claim(text=f"when the lowest quality is not enough, requests are refused too ({flooded.refused_share:.0%})",
              holds=flooded.refused_share > 0.1),
    ]  # fmt: skip


DEGRADE = Study(
    name="degrade",
    title="Degradation before rejection",
    asks="40 users, then 200, then 1000, who think for 2 s on average. A request takes the one worker for 20 ms at\n"
    "quality 1 and for 4 ms at quality 0; the backend works at the quality that the answer to its acquire carries.\n"
    "Figures are of the last half of each phase.",
    settings=(QUICKLY_TOLD, BOUND_TOLD.format(rate_max=400)),
    choose=lambda _: Ask(),
    phases=(Phase(6, users=40), Phase(22, users=200), Phase(27, users=1000)),
    backend=BackendTerms(cheap_ms=20),
    variants=(
        Variant(label="refusals only", overload={"response_time": GENTLE}),
        Variant(label="with degradation", overload={"response_time": {**GENTLE, "degrade": True}}),
    ),
    picture=_degrade_picture,
    table=_degrade_table,
    claims=_degrade_claims,
)

STUDIES = {study.name: study for study in (SPIKE, CLASSES, TYPES, DEGRADE)}
