"""The commands of the workbench: judge, workloads, run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from limiter.model.policy.choices import Mechanism
from loadtest.simulation.flow import Point
from loadtest.simulation.judge import verdicts
from loadtest.simulation.picture import picture
from loadtest.simulation.scores import work_rates
from loadtest.simulation.workloads import COMMITTED, WORKLOADS, Workload, play, scored


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verdicts.add_arguments(commands.add_parser("judge", help="every law against every scenario"))
    table = commands.add_parser("workloads", help="every workload under every mechanism")
    table.add_argument("--seed", type=int, default=1)
    one = commands.add_parser("run", help="one workload, second by second")
    one.add_argument("workload", choices=WORKLOADS)
    one.add_argument("--mechanism", choices=[str(mechanism) for mechanism in Mechanism], default="auto")
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--svg", type=Path, help="also draw the workload under every mechanism into this file")
    options = parser.parse_args()
    if options.command == "judge":
        sys.exit(verdicts.run(options))
    elif options.command == "workloads":
        print_all(options.seed)
    else:
        workload = WORKLOADS[options.workload]
        mechanism = Mechanism(options.mechanism)
        print_run(options.workload, workload, mechanism, play(workload, mechanism, seed=options.seed))
        if options.svg is not None:
            points = {mechanism: play(workload, mechanism, seed=options.seed) for mechanism in Mechanism}
            options.svg.write_text(picture(options.workload, workload, points))


def print_all(seed: int) -> None:
    """Each workload under each mechanism: how well the limit was used and kept."""
    print(f"{'workload':14}" + "".join(f"{mechanism:>22}" for mechanism in Mechanism))
    print(f"{'':14}" + f"{'within':>12}{'above':>10}" * len(Mechanism) + "   of the possible work")
    for name, workload in WORKLOADS.items():
        found = [scored(workload, mechanism, seed=seed) for mechanism in Mechanism]
        cells = "".join(f"{figures.used:12.1%}{figures.excess:10.1%}" for figures in found)
        print(f"{name:14}{cells}   {workload.asks}")


def print_run(name: str, workload: Workload, mechanism: Mechanism, points: Sequence[Point]) -> None:
    """One run, a line per second."""
    print(f"{name}, mechanism {mechanism}: {workload.asks}; limit {COMMITTED:g} units/s\n")
    print("   time  counts      offered    admitted    refused        cap     charge")
    print("      s              units/s     units/s          %        rps      units")
    rates = work_rates(points)
    for last in range(9, len(points), 10):
        second, point = points[last - 9 : last + 1], points[last]
        asked, offered = sum(one.asked for one in second), sum(one.first * one.cost for one in second)
        refused = 100 * sum(one.refused for one in second) / asked if asked else 0.0
        cap = f"{point.cap:11.4g}" if point.counts_requests else f"{'-':>11}"
        print(
            f"{point.at_s:7.0f}  {'requests' if point.counts_requests else 'work':8}"
            f"{offered:11.4g} {rates[last]:11.4g}{refused:11.1f}{cap}{point.charge:11.4g}"
        )


if __name__ == "__main__":
    main()
