"""Print a simulation's run, or all of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from limiter.model.policy.choices import Mechanism
from loadtest.simulation.picture import picture
from loadtest.simulation.score import score, work_rates
from loadtest.simulation.workloads import COMMITTED, WORKLOADS
from loadtest.simulation.world import Run, simulate


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulation", description=__doc__)
    parser.add_argument("workload", nargs="?", choices=WORKLOADS, help="one workload, second by second")
    parser.add_argument("--mechanism", choices=[str(one) for one in Mechanism], default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="also draw the workload under every mechanism into this file")
    options = parser.parse_args()
    if options.workload is None:
        print_all(options.seed)
    else:
        workload = WORKLOADS[options.workload]
        print_run(simulate(workload, Mechanism(options.mechanism), seed=options.seed))
        if options.svg is not None:
            runs = {mechanism: simulate(workload, mechanism, seed=options.seed) for mechanism in Mechanism}
            options.svg.write_text(picture(runs, workload.streams[-1].tenant))


def print_all(seed: int) -> None:
    """Each workload under each mechanism: how well the limit was used and kept."""
    print(f"{'workload':14}" + "".join(f"{one:>22}" for one in Mechanism))
    print(f"{'':14}" + f"{'within':>12}{'above':>10}" * len(Mechanism) + "   of the possible work")
    for workload in WORKLOADS.values():
        cells = ""
        for mechanism in Mechanism:
            found = score(simulate(workload, mechanism, seed=seed), committed=COMMITTED, capacity=COMMITTED)
            cells += f"{found.used:12.1%}{found.excess:10.1%}"
        print(f"{workload.name:14}{cells}   {workload.asks}")


def print_run(run: Run) -> None:
    """One run, a line a second."""
    print(f"{run.workload.name}, mechanism {run.mechanism}: {run.workload.asks}; limit {COMMITTED:g} units/s a tenant")
    for tenant, points in run.points.items():
        rates = work_rates(points)
        print(f"\ntenant {tenant}\n   time  counts      offered    admitted    refused        cap     charge")
        print("      s              units/s     units/s          %        rps      units")
        for last in range(9, len(points), 10):
            second = points[last - 9 : last + 1]
            asked, point = sum(one.requests for one in second), points[last]
            refused = 100 * sum(one.refused for one in second) / asked if asked else 0.0
            cap = f"{point.cap:11.4g}" if point.counts_requests else f"{'-':>11}"
            offered = sum(one.offered for one in second)
            print(
                f"{point.at_s:7.0f}  {'requests' if point.counts_requests else 'work':8}"
                f"{offered:11.4g} {rates[last]:11.4g}{refused:11.1f}{cap}{point.charge:11.4g}"
            )


if __name__ == "__main__":
    main()
