"""Run an overload experiment on a real backend, and write its table and picture into the documents."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loadtest.overload.page import write
from loadtest.overload.studies import STUDIES
from loadtest.overload.study import StoodStill, run

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> int:
    """What the command line asks for; 1 if something that ought to be so was not."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.overload", description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the documents are")
    parser.add_argument("--share", type=float, default=1.0, help="of the time and the load, to see that it runs")
    options = parser.parse_args()
    study = STUDIES[options.study]
    if options.share != 1:
        study = study.shortened(options.share)
    try:
        results = run(study, lambda text: print(text, file=sys.stderr, flush=True))
    except StoodStill as reason:
        sys.exit(f"{study.name}: {reason}")
    claims = study.claims(study, results)
    write(study, results, claims, options.docs)
    print(study.table(study, results).markdown())
    for claim in claims:
        print(f"{'holds' if claim.holds else 'FAILS'}: {claim.text}")
    return 0 if options.share != 1 or all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
