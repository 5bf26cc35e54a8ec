"""The documents as tests see them: their pages, the blocks in them, and their commands as one shell script."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
HERE = "127.0.0.1:8080"
"""Where the documents suppose that Headgate runs."""

ID = r"(?:F-)?[WRQSGPBLTVNH][1-9]\d?"
"""An id of a requirement or a fault."""
CITED = re.compile(rf"(?<![\w%#-])({ID})(?:(?: to |–)({ID}))?(?![\w-])(?!\.\d)")
"""A citation: an id, or a first and a last one."""

_FENCED = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_EXPECTED = re.compile(r"(.*?)  # (\d{3})(?: (.*))?", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. One without a language is the output of a program."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its lines, those that go on joined."""
        return [line for line in re.split(r"(?<!\\)\n", self.text) if line.strip()]


def name_of(page: Path) -> str:
    """The page's path as the documents spell it."""
    return str(page.relative_to(ROOT))


def blocks(page: Path | str, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page."""
    path = ROOT / page
    text = path.read_text()
    return [
        Block(name_of(path), text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in _FENCED.finditer(text)
        if language in (None, found[1])
    ]


def script(of: Iterable[Block], base: str = HERE) -> str:
    """The commands as one bash script that ends at the first that fails.

    Behind a curl command, after two spaces and `#`, may stand the status that is answered, and something of the answer.
    """
    lines = ["set -euo pipefail", "kept=$(mktemp -d); trap 'rm -rf \"$kept\"' EXIT"]
    for block in of:
        for command in block.commands:
            lines.append(f"echo {shlex.quote(f'{block}: {command}')} >&2")
            lines += _checked(command.replace(HERE, base))
    return "\n".join(lines) + "\n"


def _checked(command: str) -> list[str]:
    expected = _EXPECTED.fullmatch(command)
    if expected is None:
        return [command]
    curl, status, text = expected[1], expected[2], expected[3] or ""
    assert curl.startswith("curl "), command
    asked = "curl -w '%{stderr}%{http_code}' " + curl.removeprefix("curl ")
    lines = [
        f'{{ {asked}; }} >"$kept/out" 2>"$kept/status" || true',
        'cat "$kept/out"',
        f'test "$(cat "$kept/status")" = {status} || {{ echo "the status is $(cat "$kept/status")" >&2; exit 1; }}',
    ]
    if text:
        lines.append(f'grep -qF -- {shlex.quote(text)} "$kept/out" || {{ echo "it does not say so" >&2; exit 1; }}')
    return lines


def rows(text: str) -> list[list[str]]:
    """The rows of a table whose first cell is code, with the marks of code off."""
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in cells]


def policy_fields(heading: str) -> str:
    """The section of the page on policies that lists the fields under a heading."""
    page = (ROOT / "docs" / "policies.md").read_text()
    return re.split(r"^#{2,3} ", page.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
