"""16 to 1024 users, with and without control (Fig. 8)."""

from __future__ import annotations

from math import log2, nan

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.figures.looks import OURS, PUBLISHED, WITHOUT, per_second, published, timed
from loadtest.overload.study import SHAPE, Beside, Claim, Results, Study, Table, during, p90_s, shown_s
from loadtest.overload.user_calls import Ask
from loadtest.overload.users import Crowd, Moment, Phase
from loadtest.overload.variant import Variant
from loadtest.plot import Chart, Line, Panel

TARGET_S = 10.0
CAPACITY = 18.0
WORKERS = 4
USERS = (16, 32, 64, 128, 256, 512, 1024)
SECONDS = 300.0
FREE, RULES, DEFAULT = "without control", "published rules", "default rules"
CONTROLS = {FREE: None, RULES: published(TARGET_S), DEFAULT: timed(TARGET_S)}
COLOURS = (WITHOUT, PUBLISHED, OURS)


def crowd(users: int) -> Crowd:
    """Users who think for 20 ms, and wait for 5 s after a refusal."""
    return Crowd(phases=(Phase(SECONDS, users=users),), choose=lambda _: Ask(), think_s=0.02, refused_s=5.0,
                 is_even=True)  # fmt: skip


def _label(control: str, users: int) -> str:
    return f"{control}, {users} users"


def _late(study: Study, results: Results, control: str, users: int) -> Moment:
    """The last half."""
    return during(results[_label(control, users)].calls, SECONDS / 2, SECONDS)


def _curve(study: Study, results: Results, control: str, colour: str, *, is_rate: bool) -> Line:
    points = []
    for users in USERS:
        late = _late(study, results, control, users)
        value = late.served / (SECONDS / 2) if is_rate else p90_s(late)
        points.append((log2(users / USERS[0]), nan if value is None else value))
    return Line(label=control, points=points, colour=colour)


def _picture(study: Study, results: Results) -> Chart:
    looks = list(zip(CONTROLS, COLOURS, strict=True))
    target = Line(label="target", points=[(0, TARGET_S), (log2(USERS[-1] / USERS[0]), TARGET_S)], colour="#222222",
                  is_dashed=True, width=1.2)  # fmt: skip
    times = [_curve(study, results, control, colour, is_rate=False) for control, colour in looks]
    rates = [_curve(study, results, control, colour, is_rate=True) for control, colour in looks]
    return Chart(
        title="16 to 1024 users",
        subtitle="One backend that can do 18 requests per second; each point is a run of its own",
        x_unit="users",
        x_ticks=[(log2(users / USERS[0]), str(users)) for users in USERS],
        panels=(
            Panel(title="p90 of the response times", unit="s", lines=[*times, target]),
            Panel(title="Requests that were served", unit="requests/s", lines=rates),
        ),
    )


def _table(study: Study, results: Results) -> Table:
    rows = []
    for users in USERS:
        cells = []
        for control in CONTROLS:
            late = _late(study, results, control, users)
            cells.append(f"{shown_s(late)}, {per_second(late, SECONDS / 2)}/s, {late.refused_share:.0%}")
        rows.append([str(users), *cells])
    return Table(head=("users", *(f"{control}: p90, served, refused" for control in CONTROLS)), rows=rows)


def _beside(study: Study, results: Results) -> list[Beside]:
    rows = []
    for users, shape in ((16, "the same with and without"), (1024, "near the target with, far above it without")):
        free, rules, ours = (_late(study, results, control, users) for control in CONTROLS)
        rows.append(
            Beside(measure=f"p90 with {users} users, target 10 s (without control: {shown_s(free)})",
                   published=f"{SHAPE}: {shape}", by_published_rules=shown_s(rules), by_ours=shown_s(ours))
        )  # fmt: skip
    rules, ours = (_late(study, results, control, 1024) for control in (RULES, DEFAULT))
    rows.append(
        Beside(measure="served per second with 1024 users, of 18 that are possible", published=SHAPE,
               by_published_rules=per_second(rules, SECONDS / 2), by_ours=per_second(ours, SECONDS / 2))
    )  # fmt: skip
    return rows


def _claims(study: Study, results: Results) -> list[Claim]:
    ours = [_late(study, results, DEFAULT, users) for users in USERS]
    highest_s = max(p90_s(one) or 0.0 for one in ours)
    least = min(one.served for one in ours[1:]) / (SECONDS / 2)
    few = max(_late(study, results, DEFAULT, users).refused_share for users in USERS if users <= 64)
    free_s = p90_s(_late(study, results, FREE, 1024)) or 0.0
    return [
        Claim(text=f"by the default rules p90 is at most {highest_s / TARGET_S:.2f} of the target, however many users",
              holds=highest_s <= 1.1 * TARGET_S),
        Claim(text=f"without control it grows with the users (to {free_s:.0f} s)", holds=free_s > 4 * TARGET_S),
        Claim(text=f"up to 64 users nobody is refused ({few:.1%})", holds=few == 0),
        Claim(text=f"the default rules serve at least {least / CAPACITY:.0%} of what the backend can do",
              holds=least >= 0.97 * CAPACITY),
    ]  # fmt: skip


NUMBERS_OF_USERS = Study(
    name="users",
    figure="Fig. 8",
    title="16 to 1024 users",
    asks="So many users ask, wait, think for 20 ms and ask again; after a refusal they wait for 5 s. The target is\n"
    "10 s. Four workers and one queue, exponential service, 18 requests per second in all. Each run takes 300 s, and\n"
    "figures are of its last half.",
    settings=("The backend is that of the experiment with [arriving classes](classes-arrive.md)",),
    is_virtual=True,
    crowds=(crowd(USERS[0]),),
    backend=BackendTerms(costs_ms={"cheap": 1000 * WORKERS / CAPACITY}, workers=WORKERS, is_even=False),
    variants=tuple(
        Variant(label=_label(control, users), overload=overload, crowds=(crowd(users),))
        for control, overload in CONTROLS.items()
        for users in USERS
    ),
    target_s=TARGET_S,
    picture=_picture,
    table=_table,
    beside=_beside,
    claims=_claims,
)
