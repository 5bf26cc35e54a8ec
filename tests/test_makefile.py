"""`make` by itself says what can be made."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.needs("make")
def test_bare_make_lists_its_targets() -> None:
    listed = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = [line.split()[1] for line in listed.stdout.splitlines()]
    assert {"run", "test", "lint", "bench"} <= set(targets)
    assert all(len(line.split()) > 3 for line in listed.stdout.splitlines()), "each target says what it does"
