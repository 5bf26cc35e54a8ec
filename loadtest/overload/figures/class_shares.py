"""Two classes: arriving by the published protocol (Fig. 14, 15), and of equal load on a real backend (S3, S6)."""

from __future__ import annotations

from random import Random

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.figures.looks import (
    HIGH,
    LOW,
    OURS,
    WITHOUT,
    per_second,
    published,
    refused_percent,
    target_line,
    timed,
)
from loadtest.overload.study import Beside, Claim, Results, Study, Table, during, over_time, p90_s, shown_s, shown_share
from loadtest.overload.user_calls import Ask, Call
from loadtest.overload.users import Crowd, Moment, Phase
from loadtest.overload.variant import Variant
from loadtest.plot import Band, Chart, Line, Panel

PUBLISHED_SHARES = {"without classes": ("57.6%", "55.5%"), "with classes": ("48.8%", "87.9%")}
"""Refused of the high class and of the low one."""
RULES_ALIKE, RULES_CLASSES = "published rules, without classes", "published rules, with classes"
OURS_ALIKE, OURS_CLASSES = "default rules, without classes", "default rules, with classes"
HIGH_ASK, LOW_ASK = Ask(criticality=HIGH), Ask(criticality=LOW)
COLOURS = {HIGH: OURS, LOW: WITHOUT}


def _of_class(calls: list[Call], criticality: str) -> list[Call]:
    return [one for one in calls if one.ask.criticality == criticality]


def _lines(calls: list[Call], *, is_time: bool) -> list[Line]:
    return [
        Line(label=f"{name} class ({criticality})", colour=COLOURS[criticality],
             points=over_time(_of_class(calls, criticality), p90_s if is_time else refused_percent))
        for name, criticality in (("high", HIGH), ("low", LOW))
    ]  # fmt: skip


def _both(results: Results, label: str, stretch: tuple[float, float]) -> tuple[Moment, Moment]:
    high, low = (during(results[label].calls, *stretch, criticality=name) for name in (HIGH, LOW))
    return high, low


def _table_of(results: Results, stretch: tuple[float, float]) -> Table:
    rows = []
    for label, run in results.items():
        high, low = _both(results, label, stretch)
        every = during(run.calls, *stretch)
        rows.append([label, shown_share(high), shown_share(low), shown_s(high), shown_s(low),
                     per_second(every, stretch[1] - stretch[0])])  # fmt: skip
    return Table(head=("", "high refused", "low refused", "high p90", "low p90", "served/s"), rows=rows)


def _beside_of(results: Results, stretch: tuple[float, float]) -> list[Beside]:
    rows = []
    pairs = {"without classes": (RULES_ALIKE, OURS_ALIKE), "with classes": (RULES_CLASSES, OURS_CLASSES)}
    for name, labels in pairs.items():
        found = [_both(results, label, stretch) if label in results else None for label in labels]
        for number, which in enumerate(("high", "low")):
            rules, ours = (shown_share(pair[number]) if pair else "–" for pair in found)
            rows.append(Beside(measure=f"{which} class refused, {name}", published=PUBLISHED_SHARES[name][number],
                               by_published_rules=rules, by_ours=ours))  # fmt: skip
    return rows


# Classes that arrive, in virtual time.

ARRIVE_S, LEAVE_S, END_S = 100.0, 200.0, 300.0
MEANWHILE = (ARRIVE_S, LEAVE_S)
CAPACITY, WORKERS, PROTOCOL_TARGET_S = 18.0, 4, 10.0
CAPACITY_CHOSEN = """\
The backend can do 18 requests per second. The original's capacity is not known; with this one about as many are
  refused without classes as published. Nothing else was fitted"""
FIRST_COME = """\
A user who was served asks again after 20 ms and often takes the place that has just become free; one who was refused
  comes back after 5 s. So without classes those who were there first are refused less"""


def _arrive_picture(study: Study, results: Results) -> Chart:
    band = Band(from_x=ARRIVE_S, to_x=LEAVE_S, label="128 high users as well")
    panels = []
    for label in (RULES_CLASSES, OURS_ALIKE, OURS_CLASSES):
        calls = list(results[label].calls)
        panels.append(
            Panel(title=f"p90, {label}", unit="s",
                  lines=[*_lines(calls, is_time=True), target_line(study)])
        )  # fmt: skip
        panels.append(
            Panel(title=f"Refused, {label}", unit="% of the class", lines=_lines(calls, is_time=False), y_least=100)
        )
    return Chart(
        title="A high class arrives and leaves",
        subtitle="128 low users all the time, 128 high ones from 100 to 200 s; one backend, 18 requests per second",
        x_unit="time (s)",
        bands=[band],
        panels=panels,
    )


def _arrive_claims(study: Study, results: Results) -> list[Claim]:
    high, low = _both(results, OURS_CLASSES, MEANWHILE)
    alike = during(results[OURS_ALIKE].calls, *MEANWHILE)
    part = (p90_s(high) or 0.0) / PROTOCOL_TARGET_S
    before, after = (during(results[OURS_CLASSES].calls, *stretch).refused_share for stretch in ((50, 100), (250, 300)))
    return [
        Claim(text=f"with classes the high one is refused clearly less ({high.refused_share:.0%} against "
                   f"{low.refused_share:.0%})", holds=low.refused_share - high.refused_share > 0.35),
        Claim(text=f"without classes {alike.refused_share:.0%} of all are refused (published: 55 to 58 %)",
              holds=0.5 < alike.refused_share < 0.62),
        Claim(text=f"the p90 of the high class is {part:.2f} of the target", holds=0.85 <= part <= 1.15),
        Claim(text=f"before the high class comes and after it has left hardly anybody is refused ({before:.1%}, "
                   f"{after:.1%})", holds=max(before, after) < 0.02),
    ]  # fmt: skip


CLASSES_ARRIVE = Study(
    name="classes-arrive",
    figure="Fig. 14 and 15",
    title="A high class arrives",
    asks="The published protocol: 128 users of the low class (`sheddable`) all the time, 128 of the high one\n"
    "(`critical`) from 100 to 200 s; each thinks for 20 ms, and for 5 s after a refusal; the target is 10 s. Four\n"
    "workers and one queue, exponential service. Figures are of the time from 100 to 200 s.",
    settings=(
        CAPACITY_CHOSEN,
        FIRST_COME,
    ),
    is_virtual=True,
    crowds=(
        Crowd(phases=(Phase(END_S, users=128),), choose=lambda _: LOW_ASK, think_s=0.02, refused_s=5.0, is_even=True),
        Crowd(phases=(Phase(ARRIVE_S), Phase(LEAVE_S - ARRIVE_S, users=128), Phase(END_S - LEAVE_S)),
              choose=lambda _: HIGH_ASK, think_s=0.02, refused_s=5.0, is_even=True),
    ),
    backend=BackendTerms(costs_ms={"cheap": 1000 * WORKERS / CAPACITY}, workers=WORKERS, is_even=False),
    variants=(
        Variant(label=RULES_ALIKE, overload=published(PROTOCOL_TARGET_S, classes=False)),
        Variant(label=RULES_CLASSES, overload=published(PROTOCOL_TARGET_S)),
        Variant(label=OURS_ALIKE, overload=timed(PROTOCOL_TARGET_S, classes=False)),
        Variant(label=OURS_CLASSES, overload=timed(PROTOCOL_TARGET_S)),
    ),
    target_s=PROTOCOL_TARGET_S,
    picture=_arrive_picture,
    table=lambda _, results: _table_of(results, MEANWHILE),
    beside=lambda _, results: _beside_of(results, MEANWHILE),
    claims=_arrive_claims,
)  # fmt: skip


# Two classes of equal load, on a real backend.

TARGET_S, SECONDS = 1.0, 50.0


def _either(draw: Random) -> Ask:
    return draw.choice((HIGH_ASK, LOW_ASK))


def _settled(study: Study) -> tuple[float, float]:
    """The last three fifths."""
    return study.seconds * 0.4, study.seconds


def _equal_picture(study: Study, results: Results) -> Chart:
    return Chart(
        title="Two classes that ask for the same",
        subtitle="250 users, half of the requests of each class; one backend that can do 50 requests per second",
        x_unit="time (s)",
        panels=[
            Panel(title=f"Refused, {label}", unit="% of each class's requests", y_least=100,
                  lines=_lines(list(run.calls), is_time=False))
            for label, run in results.items()
        ],
    )  # fmt: skip


def _equal_claims(study: Study, results: Results) -> list[Claim]:
    (alike_high, alike_low), (high, low) = (
        _both(results, label, _settled(study)) for label in (OURS_ALIKE, OURS_CLASSES)
    )
    part = (p90_s(during(results[OURS_CLASSES].calls, *_settled(study))) or 0.0) / TARGET_S
    return [
        Claim(text=f"without classes both are refused alike ({alike_high.refused_share:.0%}, "
                   f"{alike_low.refused_share:.0%})",
              holds=abs(alike_high.refused_share - alike_low.refused_share) < 0.1),
        Claim(text=f"with classes the high one is refused clearly less ({high.refused_share:.0%} against "
                   f"{low.refused_share:.0%})", holds=low.refused_share - high.refused_share > 0.3),
        Claim(text=f"with classes p90 of all is {part:.2f} of the target", holds=0.85 <= part <= 1.2),
    ]  # fmt: skip


CLASSES = Study(
    name="classes",
    figure="Fig. 14 and 15, equal loads",
    title="Classes",
    asks="250 users think for 2 s on average; each request is `critical` or `sheddable` by the toss of a coin. One\n"
    "worker, 20 ms a request. Figures are of the last three fifths.",
    is_virtual=False,
    crowds=(Crowd(phases=(Phase(SECONDS, users=250),), choose=_either, think_s=2.0),),
    backend=BackendTerms(costs_ms={"cheap": 20.0}),
    variants=(
        Variant(label=RULES_CLASSES, overload=published(TARGET_S)),
        Variant(label=OURS_ALIKE, overload=timed(TARGET_S, classes=False)),
        Variant(label=OURS_CLASSES, overload=timed(TARGET_S)),
    ),
    target_s=TARGET_S,
    picture=_equal_picture,
    table=lambda study, results: _table_of(results, _settled(study)),
    beside=lambda study, results: _beside_of(results, _settled(study)),
    claims=_equal_claims,
)
