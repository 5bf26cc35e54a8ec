"""Every id that code and tests cite is defined once in docs/, and every id that is defined has a test or is open."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from limiter.metrics import catalogue
from tests.support.documents import CITED, ID, ROOT, name_of

DEFINING = (ROOT / "docs/requirements.md", ROOT / "docs/faults.md")
FOLDERS = ("api", "docs", "limiter", "loadtest", "lua", "tests")
FOR_DEVELOPERS = {"CONTRIBUTING.md", "docs/architecture.md", "docs/faults.md", "docs/requirements.md"}
READ_BY_USERS = sorted(
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.yaml"), *ROOT.glob("helm/**/*.*")]
    if name_of(page) not in FOR_DEVELOPERS and "decisions" not in page.parts
)

_PROMISES = re.compile(r"\b[Pp]romises? (\d+)(?:(?:,| and) (\d+))*")
_NAMED = re.compile(r"def test_((?:(?:to_)?(?:f_)?[wrqsgpbltvnh][1-9]\d?_)+)")
_DEFINED = re.compile(rf"^(?:- |\| |\d+\. )\*\*({ID}|Promise \d+)\.?\*\*", re.MULTILINE)


def defined() -> Counter[str]:
    """The number of definitions of each id."""
    return Counter(
        found.lower() if "romise" in found else found
        for page in DEFINING
        for found in _DEFINED.findall(page.read_text())
    )


def still_open(page: Path) -> set[str]:
    """The ids that a page lists as not built, or as built in part."""
    _, _, listed = page.read_text().partition("\n## Open\n")
    firsts = [line[2:].partition(":")[0] for line in listed.splitlines() if line.startswith("- ")]
    return {
        found.strip().lower() if "romise" in found else found.strip() for line in firsts for found in line.split(",")
    }


def between(first: str, last: str) -> Iterator[str]:
    """`F-H1 to F-H17`, one by one."""
    family, start = re.fullmatch(r"(.*?)(\d+)", first).groups()  # type: ignore[union-attr]
    there, end = re.fullmatch(r"(.*?)(\d+)", last).groups()  # type: ignore[union-attr]
    assert family == there, f"{first} to {last}"
    return (f"{family}{number}" for number in range(int(start), int(end) + 1))


def cited(text: str) -> Iterator[str]:
    """The ids in a text: in words, in the names of tests, and promises by number."""
    for first, last in CITED.findall(text):
        yield from between(first, last or first)
    for found in _NAMED.findall(text):
        yield from (id_.upper() for id_ in found.replace("f_", "f-").strip("_").split("_") if id_ != "to")
    for found in _PROMISES.finditer(text):
        yield from (f"promise {number}" for number in re.findall(r"\d+", found[0]))


def files(folder: str) -> Iterator[Path]:
    """The text files of a folder, without the scripts of older versions, which stay as they were."""
    for path in sorted((ROOT / folder).rglob("*")):
        if "version_1" in path.parts:
            continue
        if path.suffix in {".py", ".lua", ".md", ".yaml"} and path not in DEFINING and path != Path(__file__):
            yield path


def text_of(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_id_that_is_cited_is_defined_once(folder: str) -> None:
    times = defined()
    wrong = {f"{name_of(path)}: {id_}" for path in files(folder) for id_ in cited(text_of(path)) if times[id_] != 1}
    assert not wrong


def test_every_id_that_is_defined_has_a_test_or_is_open() -> None:
    tried = {id_ for path in files("tests") for id_ in cited(text_of(path))}
    listed = {id_ for page in DEFINING for id_ in still_open(page)}
    assert listed <= set(defined()), "what is open is defined"
    assert set(defined()) - tried - listed == set()


@pytest.mark.parametrize("page", READ_BY_USERS, ids=name_of)
def test_no_page_for_users_cites_an_id(page: Path) -> None:
    assert set(CITED.findall(text_of(page))) == set()


def test_no_metric_is_explained_by_an_id() -> None:
    texts = [value.help for value in vars(catalogue).values() if isinstance(value, catalogue.Definition)]
    assert len(texts) > 40
    assert not {found for text in texts for found in CITED.findall(text)}
