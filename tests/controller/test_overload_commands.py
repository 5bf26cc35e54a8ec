"""The overload experiments' commands work: real processes, small numbers. And the page's example does what it says."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from limiter.controller.plan import make_plans
from limiter.engine.policy_file import load_policy_file
from limiter.model.overload.overload_state import OverloadParams
from loadtest.overload import measurements
from loadtest.overload.page import overview, page
from loadtest.overload.run import run
from loadtest.overload.studies import STUDIES
from loadtest.overload.study import Study, Table
from loadtest.plot import render

ROOT = Path(__file__).resolve().parents[2]
FAILING: dict[str, int] = {}
"""Claims that fail, by page; docs/overload.md says so, too."""
LARGE = {"expectations", "users"}
"""Minutes of CPU: their pages are compared where somebody runs the command."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STUDIES if name != "expectations-real"])
def test_each_experiment_runs_and_writes_its_page_and_picture(name: str, tmp_path: Path) -> None:
    """With a part of the load; the experiment that is left out differs from another only in its size."""
    (tmp_path / "overload").mkdir()
    command = [sys.executable, "-m", "loadtest.overload", name, "--share", "0.04", "--docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "overload" / f"{name}.md").read_text().count("| --- |") == 2
    assert f"]({name}.md)" in (tmp_path / "overload" / "published.md").read_text()
    picture = ET.parse(tmp_path / "overload" / f"{name}.svg")
    words = {found.text for found in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert words & {"time (s)", "users"}


def kept(name: str, file: str) -> str:
    return (ROOT / "docs" / "overload" / f"{name}{file}").read_text()


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if not study.is_virtual])
def test_pages_of_real_experiments_are_made_from_the_measurements_that_are_kept(name: str) -> None:
    results = measurements.read(measurements.file_of(name).read_text())
    assert page(STUDIES[name], results) == kept(name, ".md")
    assert render(STUDIES[name].picture(STUDIES[name], results)) == kept(name, ".svg")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.is_virtual and name not in LARGE])
def test_a_virtual_experiment_writes_the_same_page_every_time(name: str) -> None:
    results = run(STUDIES[name], lambda _: None)
    assert page(STUDIES[name], results) == kept(name, ".md")
    assert render(STUDIES[name].picture(STUDIES[name], results)) == kept(name, ".svg")


def test_one_seed_one_result() -> None:
    study = replace(STUDIES["over-time"].shortened(0.1), variants=STUDIES["over-time"].variants[1:])
    first, again, other = (run(study, lambda _: None, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", STUDIES)
def test_the_claims_of_a_page_hold_but_for_those_that_are_known_not_to(name: str) -> None:
    text = kept(name, ".md")
    assert f"`python -m loadtest.overload {name}`" in text
    assert text.count(": holds.") >= 2
    assert text.count("**fails**") == FAILING.get(name, 0)


def test_one_table_has_every_experiment_beside_the_published_figures() -> None:
    assert overview(list(STUDIES.values()), ROOT / "docs") == kept("published", ".md")
    assert all(f"]({name}.md)" in kept("published", ".md") for name in STUDIES)


@pytest.mark.parametrize("study", [study for study in STUDIES.values() if not study.is_virtual], ids=lambda it: it.name)
def test_a_variant_on_a_real_backend_takes_a_minute_at_most(study: Study) -> None:
    for variant in study.variants:
        assert max(crowd.seconds for crowd in variant.crowds or study.crowds) <= 60


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
    assert searches.limit is not None
    assert (searches.limit.targets_s[1], searches.limit.is_limiting) == (1.0, True)
    assert searches.limit.quality is not None
    assert reports is not None
    assert reports.utilisation is not None
    assert reports.utilisation.targets == {"queue_age_s": 2}
