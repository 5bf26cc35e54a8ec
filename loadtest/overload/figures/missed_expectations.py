"""Expectations: a backend that slows down with the excess over its capacity, at 2× and 10×, and one that hangs (Q7)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from limiter.model.policy.criticality import Criticality
from loadtest.overload.backend_terms import BackendTerms, Slowing
from loadtest.overload.figures.looks import FIXED, OURS, PUBLISHED, WITHOUT, per_second, served
from loadtest.overload.study import (
    Beside,
    Claim,
    Results,
    Study,
    Table,
    during,
    late_share,
    over_time,
    shown_share,
)
from loadtest.overload.user_calls import Ask
from loadtest.overload.users import Crowd, Moment, Phase
from loadtest.overload.variant import Variant
from loadtest.plot import Chart, Line, Panel

EXPECTED_S = 0.2
PARTS = dict(zip(Criticality, (0.05, 0.25, 0.3, 0.4), strict=True))
ASKS = {criticality: Ask(criticality=criticality) for criticality in Criticality}
LAWS: dict[str, tuple[dict[str, Any], str]] = {
    "damped, published rules": ({"mode": "damped", "rules": "published"}, FIXED),
    "damped, default rules": ({"mode": "damped"}, WITHOUT),
    "ideal, published rules": ({"mode": "ideal", "rules": "published"}, PUBLISHED),
    "ideal, default rules": ({"mode": "ideal"}, OURS),
}
HUNG = "hung"
SCALE_CHOSEN = """\
The backend is of 100 requests per second, because one machine runs everything. Callers tolerate an excess of 10 %,
  which is one standard deviation of a second's arrivals here and five of them at 3000 per second: more are late here"""
AFTER_HANG = """\
After a hang both modes let in far less than is asked for the rest of the run, see the last panel"""
RANK_ZERO = """\
One request in twenty is `critical_plus`, which no share refuses: at 10× half of the capacity is taken by those alone"""


def _choose(draw: Random) -> Ask:
    drawn = draw.random()
    for criticality, part in PARTS.items():
        drawn -= part
        if drawn < 0:
            return ASKS[criticality]
    return ASKS[Criticality.SHEDDABLE]


def _label(law: str, load: str) -> str:
    return f"{law}, {load}"


def _block(law: str) -> dict[str, Any]:
    return {"expectations": {"expected_latency_ms": 1000 * EXPECTED_S, **LAWS[law][0]}}


class _Scale:
    """The same experiment on a backend of any size."""

    def __init__(self, capacity: float, healthy_s: float, seconds: float, hangs: tuple[float, float]) -> None:
        self.capacity, self.healthy_s, self.seconds, self.hangs = capacity, healthy_s, seconds, hangs
        # A backend of 3000 per second is 0.1 ms slower for each request of excess: others in proportion (Q7).
        self.terms = BackendTerms(slows=Slowing(capacity=capacity, ms_per_excess=300 / capacity))
        self.hanging = BackendTerms(slows=self.terms.slows, hangs=hangs)

    def crowd(self, times: float) -> Crowd:
        """Half the capacity, then so many times it."""
        phases = (Phase(self.healthy_s, rate=0.5 * self.capacity),
                  Phase(self.seconds - self.healthy_s, rate=times * self.capacity))  # fmt: skip
        return Crowd(phases=phases, choose=_choose)

    def variants(self, loads: Sequence[float], laws: Sequence[str]) -> list[Variant]:
        """Every law under every load, and with a backend that hangs at half load."""
        found = [
            Variant(label=_label(law, f"{times:g}×"), overload=_block(law), crowds=(self.crowd(times),))
            for times in loads
            for law in laws
        ]
        hung = [
            Variant(label=_label(law, HUNG), overload=_block(law), crowds=(self.crowd(0.5),), backend=self.hanging)
            for law in laws
            if "published" not in law
        ]
        return [*found, *hung]

    @property
    def settled(self) -> tuple[float, float]:
        """The last part of a run."""
        return (self.healthy_s + self.seconds) / 2, self.seconds

    def late(self, results: Results, law: str, load: str) -> Moment:
        """What became of the last part."""
        return during(results[_label(law, load)].calls, *self.settled)


def _asks(scale: _Scale, loads: Sequence[float]) -> str:
    times = " or ".join(f"{load:g}" for load in loads)
    hangs = f"{scale.hangs[0]:g} to {scale.hangs[1]:g} s"
    return (
        f"A backend answers within 170 ms up to {scale.capacity:g} requests per second, and beyond that later in\n"
        "proportion to the excess; callers expect 200 ms. Requests of four classes (5, 25, 30 and 40 %) arrive at\n"
        f"half the capacity for {scale.healthy_s:g} s, then at {times} times it. In the runs called *hung* the load\n"
        f"stays at half, and nothing is answered from {hangs}. Figures are of the last half of the load; of *hung*\n"
        "runs, of the hang."
    )


def _study(name: str, title: str, scale: _Scale, loads: Sequence[float], *, is_virtual: bool) -> Study:
    laws = tuple(LAWS)
    span_s = scale.settled[1] - scale.settled[0]

    def table(study: Study, results: Results) -> Table:
        rows = []
        for label, run in results.items():
            stretch = scale.hangs if label.endswith(HUNG) else scale.settled
            one = during(run.calls, *stretch)
            missed = late_share(run.calls, *stretch, EXPECTED_S) if one.served else 0.0
            rows.append([label, per_second(one, stretch[1] - stretch[0]), shown_share(one), f"{missed:.1%}"])
        return Table(head=("", "served/s", "refused", "later than expected"), rows=rows)

    def beside(study: Study, results: Results) -> list[Beside]:
        rows = []
        for load in loads:
            for mode in ("damped", "ideal"):
                rules, ours = (
                    per_second(scale.late(results, f"{mode}, {which} rules", f"{load:g}×"), span_s)
                    for which in ("published", "default")
                )
                rows.append(
                    Beside(measure=f"served per second at {load:g}×, {mode}",
                           published=f"held near capacity, here {scale.capacity:g}",
                           by_published_rules=rules, by_ours=ours)
                )  # fmt: skip
        return rows

    def claims(study: Study, results: Results) -> list[Claim]:
        found = []
        for law, least in (("ideal, default rules", 0.9), ("damped, default rules", 0.75)):
            for load in (f"{times:g}×" for times in loads):
                part = scale.late(results, law, load).served / span_s / scale.capacity
                found.append(Claim(text=f"{law}: {part:.0%} of the capacity is served at {load} (at least {least:.0%})",
                                   holds=least <= part <= 1.15, runs=(_label(law, load),)))  # fmt: skip
            refused = during(results[_label(law, HUNG)].calls, *scale.hangs).refused_share
            found.append(Claim(text=f"{law}: while the backend hangs, {refused:.0%} are refused", holds=refused > 0.3,
                               runs=(_label(law, HUNG),)))  # fmt: skip
        return found

    def picture(study: Study, results: Results) -> Chart:
        can = Line(label="capacity", colour="#222222", is_dashed=True, width=1.2,
                   points=[(0, scale.capacity), (scale.seconds, scale.capacity)])  # fmt: skip
        panels = []
        for load in (*(f"{times:g}×" for times in loads), HUNG):
            chosen = [law for law in laws if _label(law, load) in results]
            lines = [
                Line(label=law.removesuffix(" rules"), colour=LAWS[law][1],
                     points=over_time(results[_label(law, load)].calls, served))
                for law in chosen
            ]  # fmt: skip
            panels.append(Panel(title=f"Served, {load}", unit="requests/s", lines=[*lines, can],
                                y_max=2 * scale.capacity))  # fmt: skip
        return Chart(
            title="A backend that slows down with the excess",
            subtitle=f"{scale.capacity:g} requests per second can be done; load as the panels say from "
            f"{scale.healthy_s:g} s on; hung from {scale.hangs[0]:g} to {scale.hangs[1]:g} s",
            x_unit="time (s)",
            panels=panels,
        )

    return Study(
        name=name,
        figure="Expectations",
        title=title,
        asks=_asks(scale, loads),
        settings=(RANK_ZERO, AFTER_HANG) if is_virtual else (SCALE_CHOSEN, RANK_ZERO, AFTER_HANG),
        is_virtual=is_virtual,
        crowds=(scale.crowd(loads[0]),),
        backend=scale.terms,
        variants=scale.variants(loads, laws),
        target_s=EXPECTED_S,
        picture=picture,
        table=table,
        beside=beside,
        claims=claims,
    )


EXPECTATIONS = _study(
    "expectations",
    "Expectations, 3000 requests per second",
    _Scale(3000.0, 10.0, 40.0, (15.0, 25.0)),
    (2.0, 10.0),
    is_virtual=True,
)
EXPECTATIONS_REAL = _study(
    "expectations-real",
    "Expectations on a real backend",
    _Scale(100.0, 6.0, 26.0, (9.0, 17.0)),
    (2.0, 10.0),
    is_virtual=False,
)
