"""Degradation alone (Fig. 12), and before admission control (Fig. 13; S4, S11)."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.figures.looks import (
    FIXED,
    OURS,
    PUBLISHED,
    WITHOUT,
    lines_of,
    p90_panel,
    per_second,
    published,
    refused_percent,
    timed,
    users_bands,
)
from loadtest.overload.study import SHAPE, Beside, Claim, Results, Study, Table, during, p90_s, shown_s, shown_share
from loadtest.overload.user_calls import Ask
from loadtest.overload.users import Crowd, Moment, Phase
from loadtest.overload.variant import Variant
from loadtest.plot import Chart, Panel

TARGET_S = 1.0
SHORT = """\
A phase of half a minute is too short for the limit to climb to what the backend can do at its lowest quality, so p90
  may end below the target; the [virtual experiment](degrade-virtual.md) shows where it settles"""
FREE, RULES, DEFAULT, REFUSING = "without control", "published rules", "default rules", "refusals only"


def _late_phases(study: Study) -> list[tuple[int, float, float]]:
    """The last half of each phase, with its users."""
    crowd = study.crowds[0]
    return [
        (phase.users, start_s + phase.seconds / 2, start_s + phase.seconds)
        for phase, start_s in zip(crowd.phases, crowd.starts_s(), strict=True)
    ]


def _late(study: Study, results: Results, label: str, phase: int) -> Moment:
    _, from_s, to_s = _late_phases(study)[phase]
    return during(results[label].calls, from_s, to_s)


def _quality(one: Moment) -> str:
    return "–" if one.quality is None else f"{one.quality:.2f}"


def _table(study: Study, results: Results) -> Table:
    rows = []
    for label in results:
        for phase, (users, from_s, to_s) in enumerate(_late_phases(study)):
            one = _late(study, results, label, phase)
            rows.append([f"{label}, {users} users", _quality(one), shown_share(one), shown_s(one),
                         per_second(one, to_s - from_s)])  # fmt: skip
    return Table(head=("", "quality", "refused", "p90", "served/s"), rows=rows)


def _panels(study: Study, results: Results, colours: Sequence[str], *, refuses: bool) -> list[Panel]:
    qualities = lines_of(results, colours, lambda one: one.quality)
    refused = Panel(title="Refused", unit="% of the requests", y_least=100,
                    lines=lines_of(results, colours, refused_percent))  # fmt: skip
    return [
        p90_panel(study, results, colours, y_max=8.0),
        Panel(title="Quality of the answers", unit="0 to 1", lines=qualities, y_least=1.0),
        *([refused] if refuses else []),
    ]


def _in_words(one: Moment) -> str:
    return f"{shown_s(one)}, quality {_quality(one)}"


# Degradation alone.


def _alone_picture(study: Study, results: Results) -> Chart:
    return Chart(
        title="Cheaper work, and nobody is refused",
        subtitle="One backend that can do 50 requests per second at full quality and 250 at none",
        x_unit="time (s)",
        bands=users_bands(study),
        panels=_panels(study, results, (WITHOUT, PUBLISHED, OURS), refuses=False),
    )


def _alone_beside(study: Study, results: Results) -> list[Beside]:
    shapes = {1: "at the target, by lower quality", 2: "above the target: the lowest quality is not enough"}
    rows = []
    for phase, shape in shapes.items():
        users = _late_phases(study)[phase][0]
        free, rules, ours = (_late(study, results, label, phase) for label in (FREE, RULES, DEFAULT))
        rows.append(
            Beside(measure=f"p90 and quality with {users} users, target 1 s (without control: {shown_s(free)})",
                   published=f"{SHAPE}: {shape}", by_published_rules=_in_words(rules), by_ours=_in_words(ours))
        )  # fmt: skip
    return rows


def _alone_claims(study: Study, results: Results) -> list[Claim]:
    busy, flooded, after = (_late(study, results, DEFAULT, phase) for phase in (1, 2, 3))
    part = (p90_s(busy) or 0.0) / TARGET_S
    refused = during(results[DEFAULT].calls, 0, study.seconds).refused
    return [
        Claim(text=f"a load that cheaper work can serve is served at {part:.2f} of the target",
              holds=0.8 <= part <= 1.1),
        Claim(text=f"one that it cannot serve makes p90 grow ({shown_s(flooded)})",
              holds=(p90_s(flooded) or 0.0) > 1.5 * TARGET_S),
        Claim(text=f"nobody is refused ({refused})", holds=refused == 0),
        Claim(text=f"quality returns afterwards ({_quality(after)})", holds=(after.quality or 0.0) > 0.7),
    ]  # fmt: skip


DEGRADE_ALONE = Study(
    name="degrade-alone",
    figure="Fig. 12",
    title="Degradation alone",
    asks="40 users, 200, 1000 and 40 again, who think for 2 s on average. A request takes the one worker for 20 ms\n"
    "at quality 1 and for 4 ms at quality 0, exponentially distributed. `degrade: only`: the answers' quality is\n"
    "lowered, and nobody is refused. Figures are of the last half of each phase.",
    is_virtual=True,
    crowds=(
        Crowd(phases=(Phase(60, users=40), Phase(120, users=200), Phase(120, users=1000), Phase(120, users=40)),
              choose=lambda _: Ask(), think_s=2.0),
    ),
    backend=BackendTerms(costs_ms={"cheap": 20.0}, is_even=False),
    variants=(
        Variant(label=FREE),
        Variant(label=RULES, overload=published(TARGET_S, degrade="only")),
        Variant(label=DEFAULT, overload=timed(TARGET_S, degrade="only")),
    ),
    target_s=TARGET_S,
    picture=_alone_picture,
    table=_table,
    beside=_alone_beside,
    claims=_alone_claims,
)  # fmt: skip


# Degradation before refusals.


def _picture(study: Study, results: Results) -> Chart:
    where = "virtual time" if study.is_virtual else "real processes"
    return Chart(
        title="Cheaper work before refusals",
        subtitle=f"One backend that can do 50 requests per second at full quality and 250 at none; {where}",
        x_unit="time (s)",
        bands=users_bands(study),
        panels=_panels(study, results, (FIXED, PUBLISHED, OURS), refuses=True),
    )


def _beside(study: Study, results: Results) -> list[Beside]:
    shapes = {1: "at the target, few or none refused", 2: "near the target, lowest quality and refusals"}
    rows = []
    for phase, shape in shapes.items():
        users = _late_phases(study)[phase][0]
        rules, ours = (_late(study, results, label, phase) for label in (RULES, DEFAULT))
        cells = [f"{_in_words(one)}, {shown_share(one)} refused" for one in (rules, ours)]
        rows.append(
            Beside(measure=f"p90, quality and refused with {users} users, target 1 s", published=f"{SHAPE}: {shape}",
                   by_published_rules=cells[0], by_ours=cells[1])
        )  # fmt: skip
    return rows


def _claims(study: Study, results: Results) -> list[Claim]:
    refusing, busy = (_late(study, results, label, 1) for label in (REFUSING, DEFAULT))
    flooded = _late(study, results, DEFAULT, 2)
    quality = busy.quality if busy.quality is not None else 1.0
    part = (p90_s(flooded) or 0.0) / TARGET_S
    return [
        Claim(text=f"under a load that cheaper work can serve, quality is {quality:.2f} and "
                   f"{busy.refused_share:.1%} are refused, against {refusing.refused_share:.0%} without",
              holds=quality < 0.9 and busy.refused_share < 0.05 < refusing.refused_share),
        Claim(text=f"when the lowest quality is not enough, requests are refused too ({flooded.refused_share:.0%})",
              holds=flooded.refused_share > 0.1),
        Claim(text=f"then p90 is {part:.2f} of the target", holds=(0.8 if study.is_virtual else 0) <= part <= 1.3),
    ]  # fmt: skip


def _with_refusals(name: str, *, is_virtual: bool, phases: Sequence[Phase]) -> Study:
    where = "exponentially distributed" if is_virtual else "a quarter of it on the CPU"
    return Study(
        name=name,
        figure="Fig. 13",
        title="Degradation before rejection" + (", in virtual time" if is_virtual else ""),
        asks="40 users, then 200, then 1000, who think for 2 s on average. A request takes the one worker for 20 ms\n"
        f"at quality 1 and for 4 ms at quality 0, {where}; the backend works at the quality that the\n"
        "answer to its acquire carries. Figures are of the last half of each phase.",
        settings=() if is_virtual else (SHORT,),
        is_virtual=is_virtual,
        crowds=(Crowd(phases=phases, choose=lambda _: Ask(), think_s=2.0),),
        backend=BackendTerms(costs_ms={"cheap": 20.0}, is_even=not is_virtual),
        variants=(
            Variant(label=REFUSING, overload=timed(TARGET_S)),
            Variant(label=RULES, overload=published(TARGET_S, degrade=True)),
            Variant(label=DEFAULT, overload=timed(TARGET_S, degrade=True)),
        ),
        target_s=TARGET_S,
        picture=_picture,
        table=_table,
        beside=_beside,
        claims=_claims,
    )


DEGRADE_VIRTUAL = _with_refusals(
    "degrade-virtual", is_virtual=True, phases=(Phase(60, users=40), Phase(120, users=200), Phase(120, users=1000))
)
DEGRADE = _with_refusals(
    "degrade", is_virtual=False, phases=(Phase(6, users=40), Phase(26, users=200), Phase(28, users=1000))
)
