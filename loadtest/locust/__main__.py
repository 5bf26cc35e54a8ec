"""A complete load test: `python -m loadtest.locust`, or `make loadtest SHAPE=spike`.

Starts `headgate up` with several API workers on a free port, runs Locust's users against it, checks thresholds (the
exit status says whether all held) and writes <shape>.html and <shape>.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from loadtest import probe
from loadtest.headgate_processes import ROOT, StartFailure, await_ready, headgate
from loadtest.locust.caller import SERVICE
from loadtest.locust.limits import WorkLimit, policy_file
from loadtest.locust.locust_processes import LocustFailure, run_locust
from loadtest.locust.run_report import report
from loadtest.locust.run_tally import Tally
from loadtest.locust.shapes import SHAPES
from loadtest.locust.thresholds import Check, judge
from loadtest.probe import Times

DEADLINE_MS = 100
ALLOWANCE_MS = 100.0
"""Users, nodes and store share this machine: a node that has to wait for a core answers late."""
RESERVE = "{sheddable: 50%, sheddable_plus: 25%, critical: 0, critical_plus: -20%}"

SHARED = WorkLimit(name="shared", rate=200.0, capacity=200.0, debt_max=400.0, reserve=RESERVE)
TENANT = WorkLimit(name="tenant", rate=75.0, capacity=150.0, debt_max=300.0, per=("tenant",))
THINK_MS = 200.0
"""With 40 users: twice the limit, and less than half of two cores, so that there is room for others."""
PROBE_CONNECTIONS = 4
"""A connection goes to one worker and stays there."""


def main(arguments: list[str] | None = None) -> int:
    """Run; return 0 if every threshold held."""
    given = _parse(arguments)
    given.results.mkdir(parents=True, exist_ok=True)
    try:
        tally, probed = _run(given)
    except (LocustFailure, StartFailure) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    checks = judge(tally, SHARED, probed, late_ms=given.deadline_ms + given.allowance_ms)
    title = f"Load test: {given.shape}, {given.seconds:g} s, {given.users} users, {given.api_workers} API workers"
    written = given.results / f"{given.shape}.md"
    written.write_text(report(title, tally, checks, SHARED, probed))
    _show(checks)
    print(f"written: {written} and, by Locust, {written.with_suffix('.html').name}")
    return 0 if all(check.holds for check in checks) else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.locust", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="steady")
    parser.add_argument("--seconds", type=float, default=0.0, help="0: the shape's own duration")
    parser.add_argument("--users", type=int, default=40, help="what the shape's multiples multiply")
    parser.add_argument("--think-ms", type=float, default=THINK_MS, help="mean pause between a user's requests")
    parser.add_argument("--api-workers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="Locust workers; 0: one process does all")
    parser.add_argument("--deadline-ms", type=int, default=DEADLINE_MS, help="of every decision")
    parser.add_argument("--allowance-ms", type=float, default=ALLOWANCE_MS, help="beyond the deadline")
    parser.add_argument("--results", type=Path, default=ROOT / "loadtest" / "results")
    given = parser.parse_args(arguments)
    given.seconds = given.seconds or SHAPES[given.shape].default_s
    return given


def _run(given: argparse.Namespace) -> tuple[Tally, Times]:
    with tempfile.TemporaryDirectory(prefix="headgate-loadtest-") as directory:
        policies, figures, probed = (Path(directory) / name for name in ("policies.yaml", "tally.json", "probed.jsonl"))
        policies.write_text(policy_file((SHARED, TENANT), service=SERVICE) + probe.policy())
        settings = {"policies": policies, "data_dir": Path(directory) / "data", "deadline_ms": given.deadline_ms}
        print(f"starting headgate with {given.api_workers} API workers", flush=True)
        with headgate("up", port=0, workers=given.api_workers, **settings) as process:
            await_ready(process.address)
            print(f"{process.address}: {given.shape}, {given.seconds:g} s, {given.users} users", flush=True)
            with probe.probing(probed, [process.address], connections=PROBE_CONNECTIONS):
                run_locust(_arguments(given, process.address, figures), seconds=given.seconds, workers=given.workers)
        latencies_ms = [one.latency_ms for one in probe.read(probed)]
        return (
            msgspec.json.decode(figures.read_bytes(), type=Tally),
            Times.of(latencies_ms, late_ms=given.deadline_ms + given.allowance_ms),
        )


def _arguments(given: argparse.Namespace, address: str, figures: Path) -> list[str]:
    return [
        "--host", address, "--shape", given.shape, "--seconds", str(given.seconds),
        "--nominal-users", str(given.users), "--think-ms", str(given.think_ms), "--limit", str(SHARED.rate),
        "--late-ms", str(given.deadline_ms + given.allowance_ms), "--tally", str(figures),
        "--html", str(given.results / f"{given.shape}.html"),
    ]  # fmt: skip


def _show(checks: list[Check]) -> None:
    for check in checks:
        mark = "holds " if check.holds else "BROKEN"
        print(f"{mark}  {check.name}: {check.found} ({check.allowed})")


if __name__ == "__main__":
    sys.exit(main())
