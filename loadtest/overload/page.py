"""A study's results in the documents: a page and a picture of its own, and its table in the page on overload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from loadtest.overload.study import Claim, Results, Study
from loadtest.plot import render

OVERVIEW = "overload.md"


def write(study: Study, results: Results, claims: Sequence[Claim], docs: Path) -> None:
    """Put everything where it belongs."""
    folder = docs / "overload"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{study.name}.svg").write_text(render(study.picture(study, results)))
    (folder / f"{study.name}.md").write_text(page(study, results, claims))
    overview = docs / OVERVIEW
    if overview.exists():
        overview.write_text(with_table(overview.read_text(), study.name, study.table(study, results).markdown()))


def page(study: Study, results: Results, claims: Sequence[Claim]) -> str:
    """The page of a study."""
    return "\n".join(
        [
            f"# {study.title}",
            "",
            f"Written by `python -m loadtest.overload {study.name}`.",
            "",
            study.asks,
            "",
            f"![{study.title}]({study.name}.svg)",
            "",
            study.table(study, results).markdown(),
            "",
            *(_judged(claim) for claim in claims),
            "",
            "Parameters that are not the published ones:",
            "",
            *(f"- {setting}." for setting in study.settings),
            "",
        ]
    )


def _judged(claim: Claim) -> str:
    text = claim.text[0].upper() + claim.text[1:]
    return f"- {text}: {'holds' if claim.holds else '**fails**'}."


def with_table(text: str, name: str, table: str) -> str:
    """A page whose part between this study's marks is its table."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)
