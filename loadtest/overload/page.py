"""A study's results in the documents: a page and a picture of its own, and a row or more in the overview."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from loadtest.overload.study import Beside, Results, Study, Table
from loadtest.plot import render

FOLDER = "overload"
OVERVIEW = "published.md"
INTRODUCTION = """\
# The published experiments, repeated

Each row is a measure of one experiment: as published, with the published rules here (`rules: published`), and with the
default rules here. Where the original's number is not known, the table says *shape*, and the page of the experiment
compares the shapes of the curves. *Real* runs are real processes and HTTP on one machine; in *virtual* ones the code of
production decides and steers in virtual time. `python -m loadtest.overload NAME` runs one experiment, and
`python -m loadtest.overload all --virtual` all virtual ones.
"""
_BESIDE = re.compile(r"<!-- beside -->\n(.*?)\n<!-- /beside -->", re.DOTALL)


def write(study: Study, results: Results, docs: Path) -> None:
    """The page and the picture of a study."""
    folder = docs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{study.name}.svg").write_text(render(study.picture(study, results)))
    (folder / f"{study.name}.md").write_text(page(study, results))


def page(study: Study, results: Results) -> str:
    """The page of a study."""
    where = "virtual time" if study.is_virtual else "a real backend: real processes and HTTP on one machine"
    return "\n".join(
        [
            f"# {study.title}",
            "",
            f"{study.figure}, in {where}. Written by `python -m loadtest.overload {study.name}`.",
            "",
            study.asks,
            "",
            f"![{study.title}]({study.name}.svg)",
            "",
            "## Beside the published figures",
            "",
            "<!-- beside -->",
            _beside(study.beside(study, results)).markdown(),
            "<!-- /beside -->",
            "",
            "## Every variant",
            "",
            study.table(study, results).markdown(),
            "",
            *claimed(study, results),
            *_part("Choices of this experiment, and what to know of it:", study.settings),
            *_machines(results),
            "",
        ]
    )


def _beside(rows: Iterable[Beside]) -> Table:
    return Table(
        head=("", "published", "published rules, here", "default rules, here"),
        rows=[(row.measure, row.published, row.by_published_rules, row.by_ours) for row in rows],
    )


def claimed(study: Study, results: Results) -> list[str]:
    """Each claim with its judgement. One that does not hold is only excused by the machine of the runs it is about."""
    found = []
    for claim in study.claims(study, results):
        machines = [results[label].machine for label in claim.runs or results]
        is_excused = any(machine is not None and not machine.is_fit(study.target_s) for machine in machines)
        judged = "holds" if claim.holds else "not judged, see the machine" if is_excused else "**fails**"
        found.append(f"- {claim.text[0].upper()}{claim.text[1:]}: {judged}.")
    return found


def _part(head: str, lines: Sequence[str]) -> list[str]:
    return ["", head, "", *(f"- {line}." for line in lines)] if lines else []


def _machines(results: Results) -> list[str]:
    """The machine in each run."""
    return _part("The machine meanwhile:", [f"{label}: {run.machine}" for label, run in results.items() if run.machine])


def overview(studies: Sequence[Study], docs: Path) -> str:
    """One table of all pages' comparisons, beside the published figures."""
    rows = []
    for study in studies:
        path = docs / FOLDER / f"{study.name}.md"
        found = _BESIDE.search(path.read_text()) if path.exists() else None
        where = "virtual" if study.is_virtual else "real"
        lines = found[1].split("\n")[2:] if found else []
        rows += [f"| [{study.figure}]({study.name}.md) | {where} {line}" for line in lines]
    return "\n".join(
        [
            INTRODUCTION,
            "| experiment | where | measure | published | published rules, here | default rules, here |",
            "| --- | --- | --- | ---: | ---: | ---: |",
            *rows,
            "",
        ]
    )


def with_table(text: str, name: str, table: str) -> str:
    """A page whose part between this name's marks is the table."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)
