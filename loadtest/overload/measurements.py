"""The measurements of real runs, kept in files beside this module: pages and pictures can be made from them again.

A file is CSV: first a line for each variant with what the machine did, then the calls of each second, those alike
counted together.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from limiter.model.policy.criticality import Criticality
from loadtest.overload.machine import Machine
from loadtest.overload.study import Results, Run
from loadtest.overload.user_calls import Ask, Call, Outcome

FOLDER = Path(__file__).parent / "measured"
_OUTCOMES: dict[str, Outcome] = {"served": "served", "refused": "refused", "failed": "failed"}
_CALLS = ("variant", "second", "kind", "class", "outcome", "latency_ms", "quality", "count")


def file_of(name: str, folder: Path = FOLDER) -> Path:
    """The file of a study."""
    return folder / f"{name}.csv"


def written(results: Results) -> str:
    """The results of a study as text."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    labels = {label: number for number, label in enumerate(results)}
    rows.writerow(("machine", "number", "variant", *Machine._fields))
    for label, run in results.items():
        assert run.machine is not None
        rows.writerow(("machine", labels[label], label, *run.machine))
    rows.writerow(_CALLS)
    for label, run in results.items():
        for one in run.calls:
            ask = one.ask
            rows.writerow((labels[label], one.second, ask.kind, ask.criticality, one.outcome, f"{one.latency_ms:g}",
                           f"{one.quality:g}", one.count))  # fmt: skip
    return out.getvalue()


def read(text: str) -> Results:
    """The results that a text says."""
    rows = list(csv.reader(io.StringIO(text)))
    heads = [number for number, row in enumerate(rows) if row == list(_CALLS)]
    machines = [row[1:] for row in rows[1 : heads[0]]]
    calls: dict[str, list[Call]] = {number: [] for number, *_ in machines}
    for number, second, kind, criticality, outcome, latency, quality, count in rows[heads[0] + 1 :]:
        latency_ms, ask = float(latency), Ask(kind, Criticality(criticality))
        began_s = int(second) + 0.5 - latency_ms / 1000
        calls[number].append(Call(began_s, ask, _OUTCOMES[outcome], latency_ms, float(quality), int(count)))
    return {label: Run(calls[number], (), _machine(figures)) for number, label, *figures in machines}


def _machine(figures: list[str]) -> Machine:
    cores, *others = figures
    load, waiting, stood_still_s, lag_s = map(float, others)
    return Machine(int(cores), load, waiting, stood_still_s, lag_s)
