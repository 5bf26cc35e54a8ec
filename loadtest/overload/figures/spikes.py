"""A spike, without control, with a connection limit, and with control (Fig. 10; S6)."""

from __future__ import annotations

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
    served,
    timed,
    users_bands,
)
from loadtest.overload.study import (
    SHAPE,
    Beside,
    Claim,
    Results,
    Study,
    Table,
    during,
    p90_s,
    peak_s,
    shown_s,
    shown_share,
)
from loadtest.overload.user_calls import Ask
from loadtest.overload.users import Crowd, Moment, Phase
from loadtest.overload.variant import Variant
from loadtest.plot import Chart, Panel

TARGET_S = 1.0
CONNECTIONS = 256
LIMIT_CHOSEN = f"""\
The connection limit is `in_flight: {CONNECTIONS}`: as many as a server might accept, whatever its response time.
  Requests beyond it are refused"""
FREE, LIMITED, RULES, DEFAULT = "without control", "connection limit", "published rules", "default rules"
COLOURS = (WITHOUT, FIXED, PUBLISHED, OURS)
DOING = Crowd(phases=(Phase(5, users=3), Phase(40, users=1000), Phase(5, users=3)), choose=lambda _: Ask(), think_s=2.0)


def _stretch(study: Study) -> tuple[float, float]:
    """The last half of the spike."""
    crowd = study.crowds[0]
    start_s, phase_s = crowd.starts_s()[1], crowd.phases[1].seconds
    return start_s + phase_s / 2, start_s + phase_s


def _late(study: Study, results: Results, label: str) -> Moment:
    return during(results[label].calls, *_stretch(study))


def _picture(study: Study, results: Results) -> Chart:
    return Chart(
        title="A spike from 3 to 1000 users",
        subtitle="One backend that can do 50 requests per second; response times of the answers given in each second",
        x_unit="time (s)",
        bands=users_bands(study),
        panels=(
            p90_panel(study, results, COLOURS),
            Panel(title="Refused", unit="% of the requests", y_least=100,
                  lines=lines_of(results, COLOURS, refused_percent)),
            Panel(title="Requests that were served", unit="requests/s", lines=lines_of(results, COLOURS, served)),
        ),
    )  # fmt: skip


def _table(study: Study, results: Results) -> Table:
    from_s, to_s = _stretch(study)
    rows = []
    for label, run in results.items():
        late = _late(study, results, label)
        rows.append([label, shown_s(late), f"{peak_s(run.calls, 0, study.seconds):.1f} s",
                     per_second(late, to_s - from_s), shown_share(late)])  # fmt: skip
    return Table(head=("", "p90", "highest p90 of a second", "served/s", "refused"), rows=rows)


def _beside(study: Study, results: Results) -> list[Beside]:
    rules, ours = (_late(study, results, label) for label in (RULES, DEFAULT))
    rows = [
        Beside(measure="p90 in the spike, target 1 s", published=f"{SHAPE}: near the target",
               by_published_rules=shown_s(rules), by_ours=shown_s(ours)),
        Beside(measure="refused in the spike", published=SHAPE, by_published_rules=shown_share(rules),
               by_ours=shown_share(ours)),
    ]  # fmt: skip
    for label, shape in ((FREE, "grows without bound"), (LIMITED, "bounded, far above the target")):
        one = shown_s(_late(study, results, label))
        rows.append(
            Beside(measure=f"p90 {label}" + ", without any rules", published=f"{SHAPE}: {shape}",
                   by_published_rules=one, by_ours=one)
        )  # fmt: skip
    return rows


def _claims(study: Study, results: Results) -> list[Claim]:
    free, limited, ours = (_late(study, results, label) for label in (FREE, LIMITED, DEFAULT))
    part = (p90_s(ours) or 0.0) / TARGET_S
    return [
        Claim(text=f"with the default rules p90 in the spike is {part:.2f} of the target", holds=0.85 <= part <= 1.2),
        Claim(text=f"without control it grows far beyond ({shown_s(free)})",
              holds=(p90_s(free) or 0.0) > 5 * TARGET_S),
        Claim(text=f"a connection limit bounds it, at a height that nobody chose ({shown_s(limited)})",
              holds=2 * TARGET_S < (p90_s(limited) or 0.0) < (p90_s(free) or 0.0)),
        Claim(text=f"the default rules serve {ours.served / max(1, free.served):.0%} of what is served without control",
              holds=ours.served >= 0.9 * free.served),
    ]  # fmt: skip


SPIKE = Study(
    name="spike",
    figure="Fig. 10",
    title="A spike",
    asks="3 users, then 1000, then 3 again; each asks, waits, thinks for 2 s on average and asks again. The backend\n"
    "has one worker, which a request takes for 20 ms. Figures are of the last half of the spike.",
    settings=(LIMIT_CHOSEN,),
    is_virtual=False,
    crowds=(DOING,),
    backend=BackendTerms(costs_ms={"cheap": 20.0}),
    variants=(
        Variant(label=FREE),
        Variant(label=LIMITED, in_flight=CONNECTIONS),
        Variant(label=RULES, overload=published(TARGET_S)),
        Variant(label=DEFAULT, overload=timed(TARGET_S)),
    ),
    target_s=TARGET_S,
    picture=_picture,
    table=_table,
    beside=_beside,
    claims=_claims,
)
