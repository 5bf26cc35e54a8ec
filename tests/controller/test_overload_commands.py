"""The overload experiments' commands work: real processes, small numbers. And the page's example does what it says."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from limiter.controller.plan import make_plans
from limiter.engine.policy_file import load_policy_file
from limiter.model.overload.overload_control import OverloadParams
from loadtest.overload.page import with_table
from loadtest.overload.studies import STUDIES
from loadtest.overload.study import Study, Table

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_each_experiment_runs_and_writes_its_table_and_picture(name: str, tmp_path: Path) -> None:
    (tmp_path / "overload.md").write_text(f"before\n<!-- {name} -->\nold\n<!-- /{name} -->\nafter\n")
    command = [sys.executable, "-m", "loadtest.overload", name, "--share", "0.04", "--docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("\nholds:")[0].split("\nFAILS:")[0]
    assert table.count("\n") >= 3
    assert (tmp_path / "overload.md").read_text() == f"before\n<!-- {name} -->\n{table}\n<!-- /{name} -->\nafter\n"
    assert table in (tmp_path / "overload" / f"{name}.md").read_text()
    picture = ET.parse(tmp_path / "overload" / f"{name}.svg")
    words = {found.text for found in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert "time (s)" in words


@pytest.mark.parametrize("name", STUDIES)
def test_the_pages_are_those_of_the_commands_and_their_claims_held(name: str) -> None:
    page = (ROOT / "docs" / "overload" / f"{name}.md").read_text()
    assert f"`python -m loadtest.overload {name}`" in page
    assert STUDIES[name].asks in page
    assert page.count(": holds.") == 2, "what was written is what ought to be"
    table = page[page.index("| ") : page.rindex(" |") + 2]
    overview = (ROOT / "docs" / "overload.md").read_text()
    assert with_table(overview, name, table) == overview, "the overview shows the same run"


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_an_experiment_takes_two_minutes_at_most(study: Study) -> None:
    assert study.seconds * len(study.variants) <= 115, "and a few seconds to start"


def test_a_table_is_markdown() -> None:
    table = Table(head=("", "p90"), rows=[["with", "1 s"]])
    assert table.markdown() == "|  | p90 |\n| --- | ---: |\n| with | 1 s |"


def test_the_example_has_one_of_each_control() -> None:
    plans = make_plans(load_policy_file(ROOT / "docs" / "policies.overload.example.yaml"))
    blocks = {name: terms.overload for name, terms in plans["default"].terms.items()}
    assert set(blocks) == {"orders", "searches", "reports"}
    assert all(isinstance(block, OverloadParams) for block in blocks.values())
    orders, searches, reports = (blocks[name] for name in ("orders", "searches", "reports"))
    assert orders is not None
    assert orders.expectations is not None
    assert orders.expectations.expected_by == {"operation": {"report": 5000}}
    assert searches is not None
    assert searches.response_time is not None
    assert (searches.response_time.degrade, searches.response_time.rate_max) == (True, 500)
    assert reports is not None
    assert reports.utilisation is not None
    assert reports.utilisation.targets == {"queue_age_s": 2}
