"""Short runs of the commands themselves, with real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_load_test_with_two_workers_runs_is_judged_and_reported(tmp_path: Path) -> None:
    """The deadline is far: this is about the command, not about how busy the machine is."""
    ran = run(
        "loadtest.locust", "--shape", "steady", "--seconds", "5", "--users", "20", "--workers", "2",
        "--deadline-ms", "3000", "--results", tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "holds   attempts failed: 0.00%" in ran.stdout
    table = (tmp_path / "steady.md").read_text()
    assert "| second | demanded | admitted | of the limit |" in table
    assert "**broken**" not in table
    assert "/v1/acquire" in (tmp_path / "steady.html").read_text()


@pytest.mark.long
def test_the_fleet_keeps_its_promises_while_parts_of_it_are_killed(tmp_path: Path) -> None:
    ran = run("loadtest.proof", "--short", "--docs", tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("killed: ") >= 3
    page = (tmp_path / "proof.md").read_text()
    assert "All of it held." in page
    assert (tmp_path / "proof.svg").read_text().count("<rect") > 3
