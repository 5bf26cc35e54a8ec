"""The judge: a short part of it holds what is owed, and what it prints can be read and repeated."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from loadtest.simulation.judge.cases import Case, Line
from loadtest.simulation.judge.scenes import SCENES
from loadtest.simulation.judge.verdicts import TABLES, judged, play, text

ROOT = Path(__file__).resolve().parents[2]
SEED = 7


@cache
def lines(table: str) -> list[Line]:
    return judged([table], [SEED], brief=True, processes=1)[table]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_the_short_part_holds_what_is_owed(table: str) -> None:
    """R12, S9, S12, Q9, Q10: by the controller's own cycle on the reference of the scripts."""
    owed = [line for line in lines(table) if line.holds is not None]
    assert owed
    assert [line for line in owed if not line.holds] == []


def test_a_case_is_the_same_whenever_it_is_played() -> None:
    case = Case("held-out", "half of the callers crash, 1 s", "work", SEED)
    assert play(case) == play(case)
    assert play(case) != play(case._replace(seed=SEED + 1))


def test_every_case_of_the_whole_judge_has_a_scenario_and_a_law() -> None:
    cases = [case for table in TABLES.values() for case in table.cases([1, 2, 3], brief=False)]
    assert len(set(cases)) == len(cases)
    assert {case.table for case in cases} == set(TABLES)
    assert {case.scenario for case in cases if case.table == "s9"} == set(SCENES)
    assert {"requests", "auto", "work", "published", "static"} <= {case.law for case in cases}
    assert {"in_flight", "on-off", "gradient", "vegas", "ideal", "damped"} <= {case.law for case in cases}
    assert {case.seed for case in cases} == {1, 2, 3}


def test_a_table_names_what_is_owed_and_who_was_better() -> None:
    told = text(
        "Title",
        ("share",),
        [
            Line("calm", "ours", ("100%",), "95% to 102%", True),
            Line("storm", "ours", ("80%",), "95% to 102%", False, "better: other"),
            Line("storm", "other", ("99%",)),
        ],
    )
    assert told.splitlines() == [
        "Title",
        "-----",
        "       law    share  owed         verdict",
        "calm   ours   100%   95% to 102%  holds",
        "storm  ours   80%    95% to 102%  MISSES   better: other",
        "       other  99%",
    ]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadtest.simulation", "judge", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_the_command_prints_its_seeds_and_ends_with_what_holds() -> None:
    ran = command("--rows", "held-out", "--seed", "3", "--seed", "4", "--only", "half of the callers crash")
    assert ran.stderr == ""
    assert ran.stdout.startswith("seeds 3, 4; virtual time\n")
    assert "half of the callers crash, 1 s" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("2 of 2 rows hold;")
    assert ran.returncode == 0


def test_a_table_that_does_not_exist_is_named() -> None:
    ran = command("--rows", "r13")
    assert ran.stdout == "no table is called r13; there are r12, jumps, held-out, s9, q9\n"
    assert ran.returncode == 2
