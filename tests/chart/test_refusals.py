"""Wrong values are refused before anything reaches a cluster: a file for each fault, and what is said about it."""

import re
from pathlib import Path

import pytest

from tests.support.rendering import CHART, MINIMAL, RELEASE, needs_helm, run_helm

BAD = sorted((Path(__file__).parent / "bad").glob("*.yaml"))

pytestmark = needs_helm


def refusal(*options: str | Path) -> list[str]:
    """The lines that helm refuses with, without the place in the template that they come from."""
    done = run_helm("template", RELEASE, CHART, *options)
    assert done.returncode != 0, "nothing was refused"
    assert done.stdout == ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    framing = r"Error: execution error at .*: *|Error: values don't meet .*|headgate:|Use --debug flag .*|coalesce.go.*"
    return [line.removeprefix("Error: ") for line in lines if not re.fullmatch(framing, line)]


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_each_fault_has_its_message(path: Path) -> None:
    """The fault alone is wrong: everything else is as in the minimal values."""
    assert refusal("--values", MINIMAL, "--values", path) == path.with_suffix(".txt").read_text().splitlines()


def test_every_message_belongs_to_a_file() -> None:
    assert {path.stem for path in BAD} == {path.stem for path in BAD[0].parent.glob("*.txt")}


def test_no_message_repeats_a_secret() -> None:
    assert not [path.stem for path in BAD if "hunter2" in path.with_suffix(".txt").read_text()]


def test_the_defaults_say_what_is_missing() -> None:
    messages = [BAD[0].with_stem(fault).with_suffix(".txt").read_text() for fault in ("store-missing", "keys-missing")]
    assert refusal() == "".join(messages).splitlines()


def test_a_cluster_that_is_too_old_is_refused() -> None:
    (line,) = refusal("--values", MINIMAL, "--kube-version", "1.29.9")
    assert "requires kubeVersion: >=1.30.0-0" in line
