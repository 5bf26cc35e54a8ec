"""The judge: plays every case, in two processes, and prints a table for each part with figures owed and verdicts.

python -m loadtest.simulation judge                      every table
python -m loadtest.simulation judge --rows r12,s9        some of the tables
python -m loadtest.simulation judge --seed 7 --seed 8    other seeds: nobody can tune to them
python -m loadtest.simulation judge --only retries       rows whose name contains a word
python -m loadtest.simulation judge --laws auto,work     some of the laws
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context

from loadtest.simulation.judge.cases import Case, Figures, Line, Table
from loadtest.simulation.judge.expected_times import Expectations
from loadtest.simulation.judge.grid import Grid
from loadtest.simulation.judge.held_out import HeldOut
from loadtest.simulation.judge.jumps import Jumps
from loadtest.simulation.judge.response_times import ResponseTimes

TABLES: Mapping[str, Table] = {
    "r12": Grid(),
    "jumps": Jumps(),
    "held-out": HeldOut(),
    "s9": ResponseTimes(),
    "q9": Expectations(),
}
SEEDS = (11, 12)
PROCESSES = 2


def play(case: Case) -> tuple[Case, Figures]:
    """One case, in whatever process."""
    return case, TABLES[case.table].play(case)


def play_all(cases: Sequence[Case], *, processes: int = PROCESSES) -> dict[Case, Figures]:
    """All of them, in order."""
    if processes == 1:
        return dict(map(play, cases))
    with get_context("fork").Pool(processes) as pool:
        found = dict(pool.imap_unordered(play, cases, chunksize=4))
    return {case: found[case] for case in cases}


def judged(
    tables: Sequence[str],
    seeds: Sequence[int],
    *,
    brief: bool = False,
    only: str = "",
    laws: Sequence[str] = (),
    processes: int = PROCESSES,
) -> dict[str, list[Line]]:
    """The lines of some tables; `only` and `laws` leave out scenarios and laws."""
    cases = [
        case
        for name in tables
        for case in TABLES[name].cases(seeds, brief=brief)
        if only in case.scenario and (not laws or case.law in laws)
    ]
    played = play_all(cases, processes=processes)
    return {
        name: TABLES[name].lines({case: figures for case, figures in played.items() if case.table == name})
        for name in tables
    }


def text(title: str, heads: Sequence[str], lines: Sequence[Line]) -> str:
    """A table for a terminal."""
    rows = [("", "law", *heads, "owed", "verdict", "")]
    last = None
    for line in lines:
        verdict = {True: "holds", False: "MISSES", None: ""}[line.holds]
        rows.append((line.row if line.row != last else "", line.law, *line.cells, line.owed, verdict, line.note))
        last = line.row
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join((title, "-" * len(title), *shown))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command `judge`."""
    parser.add_argument("--rows", default=",".join(TABLES), help=f"tables, of {', '.join(TABLES)}")
    parser.add_argument("--seed", type=int, action="append", help=f"may be given several times; {SEEDS} otherwise")
    parser.add_argument("--only", default="", help="only scenarios whose name contains this")
    parser.add_argument("--laws", default="", help="only these laws, such as requests,auto")
    parser.add_argument("--brief", action="store_true", help="the part that the test suite runs")
    parser.add_argument("--processes", type=int, default=PROCESSES)


def run(options: argparse.Namespace) -> int:
    """Print the tables that the options name; 1 where a figure that is owed does not hold, otherwise 0."""
    names, seeds = options.rows.split(","), options.seed or list(SEEDS)
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        print(f"no table is called {', '.join(unknown)}; there are {', '.join(TABLES)}")
        return 2
    began_s = time.monotonic()
    print(f"seeds {', '.join(map(str, seeds))}; virtual time\n")
    missed = owed = 0
    for name in names:
        lines = judged(
            [name],
            seeds,
            brief=options.brief,
            only=options.only,
            laws=options.laws.split(",") if options.laws else (),
            processes=options.processes,
        )[name]
        if lines:
            print(text(TABLES[name].title, TABLES[name].heads, lines), end="\n\n", flush=True)
        owed += sum(line.holds is not None for line in lines)
        missed += sum(line.holds is False for line in lines)
    print(f"{owed - missed} of {owed} rows hold; {time.monotonic() - began_s:.0f} s")
    return 1 if missed else 0
