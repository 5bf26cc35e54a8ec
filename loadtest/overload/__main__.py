"""Run an overload experiment, in virtual time or on a real backend, and write its page and its picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loadtest.overload import measurements
from loadtest.overload.page import FOLDER, OVERVIEW, claimed, overview, write
from loadtest.overload.run import run
from loadtest.overload.studies import STUDIES
from loadtest.overload.study import Results, Study

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> int:
    """Run what the command line names; 1 if a claim does not hold on a machine that was fit."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.overload", description=__doc__)
    parser.add_argument("study", choices=[*STUDIES, "all"])
    parser.add_argument("--virtual", action="store_true", help="with all: only those in virtual time")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the documents")
    parser.add_argument("--share", type=float, default=1.0, help="share of time and load, to see that it runs")
    parser.add_argument("--redraw", action="store_true", help="real ones: from the measurements that are kept")
    options = parser.parse_args()
    names = list(STUDIES) if options.study == "all" else [options.study]
    chosen = [STUDIES[name] for name in names if STUDIES[name].is_virtual or not options.virtual]
    fails = [not _write(study, options) for study in chosen]
    (options.docs / FOLDER / OVERVIEW).write_text(overview(list(STUDIES.values()), options.docs))
    return int(any(fails))


def _write(study: Study, options: argparse.Namespace) -> bool:
    """Write one page; whether every claim held or could not be judged."""
    if options.share != 1:
        study = study.shortened(options.share)
    results = _results(study, options)
    write(study, results, options.docs)
    lines = claimed(study, results)
    print(study.table(study, results).markdown(), *lines, sep="\n", flush=True)
    return options.share != 1 or not any("**fails**" in line for line in lines)


def _results(study: Study, options: argparse.Namespace) -> Results:
    file = measurements.file_of(study.name)
    if options.redraw and not study.is_virtual:
        return measurements.read(file.read_text())
    results = run(study, lambda text: print(text, file=sys.stderr, flush=True))
    if not study.is_virtual and options.share == 1:
        file.parent.mkdir(exist_ok=True)
        file.write_text(measurements.written(results))
    return results


if __name__ == "__main__":
    sys.exit(main())
