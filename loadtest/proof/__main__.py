"""Prove the promises on a whole fleet: `python -m loadtest.proof`, or `make proof`; the exit status says the result.

Needs the packages for development: servers are started as the tests start them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from loadtest import probe
from loadtest.headgate_processes import ROOT, StartFailure
from loadtest.locust.attempts import Attempt
from loadtest.locust.caller import SERVICE
from loadtest.locust.limits import policy_file
from loadtest.locust.locust_processes import GRACE_S, LocustFailure, locust, wait
from loadtest.proof.analysis import Findings, analyse, judge
from loadtest.proof.document import document, picture
from loadtest.proof.proof_fleet import Fleet, running_fleet
from loadtest.proof.proof_plan import API_NODES, CONTROLLERS, FULL, NAMESPACES, PRIMARIES, SHARED, SHORT, TENANT, Plan

FIRST_REQUEST_WITHIN_S = 30.0


def main(arguments: list[str] | None = None) -> int:
    """Run; return 0 if every promise held."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.proof", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a quarter of a minute, for tests")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where proof.md and proof.svg go")
    given = parser.parse_args(arguments)
    try:
        found = run(SHORT if given.short else FULL)
    except (LocustFailure, StartFailure) as error:
        print(f"proof: {error}", file=sys.stderr)
        return 2
    checks = judge(found)
    (given.docs / "proof.svg").write_text(picture(found))
    (given.docs / "proof.md").write_text(document(found, checks, picture="proof.svg"))
    for check in checks:
        print(f"{'holds ' if check.holds else 'BROKEN'}  {check.name}: {check.found} ({check.allowed})")
    print(f"written: {given.docs / 'proof.md'} and proof.svg")
    return 0 if all(check.holds for check in checks) else 1


def run(plan: Plan) -> Findings:
    """Run the fleet, the users and the deaths; return the findings."""
    machine = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before anything was started"
    with tempfile.TemporaryDirectory(prefix="headgate-proof-") as name:
        directory = Path(name)
        policies, records, probed = (directory / name for name in ("policies.yaml", "records.jsonl", "probed.jsonl"))
        limits = policy_file((SHARED, TENANT), service=SERVICE, namespaces=NAMESPACES)
        policies.write_text(limits + probe.policy())
        print(
            f"starting {PRIMARIES} primaries and replicas, {API_NODES} API nodes, {CONTROLLERS} controllers", flush=True
        )
        with running_fleet(directory, policies, deadline_ms=plan.deadline_ms) as fleet:
            with probe.probing(probed, fleet.addresses), locust(_arguments(plan, fleet, records)) as process:
                began_s = _first_request_s(records, process)
                _kill_by_plan(plan, fleet, began_s)
                wait(process, plan.seconds + GRACE_S)
            deaths = list(fleet.deaths)
        attempts = [msgspec.json.decode(line, type=Attempt) for line in records.read_bytes().splitlines()]
        answers = probe.read(probed)
    return analyse(attempts, answers, deaths, plan, began_s=began_s, machine=machine)


def _arguments(plan: Plan, fleet: Fleet, records: Path) -> list[str]:
    return [
        "--host", fleet.addresses[0], "--nodes", ",".join(fleet.addresses), "--shape", "steady",
        "--seconds", str(plan.seconds), "--nominal-users", str(plan.users), "--tenants", str(plan.tenants),
        "--think-ms", str(plan.think_ms), "--workload", "mild", "--limit", str(SHARED.rate),
        "--late-ms", str(plan.late_ms), "--records", str(records),
    ]  # fmt: skip


def _first_request_s(records: Path, process: subprocess.Popen[str]) -> float:
    """Return when the users began."""
    give_up_s = time.monotonic() + FIRST_REQUEST_WITHIN_S
    while not records.exists():
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise LocustFailure("Locust's users did not begin")
        time.sleep(0.02)
    return time.time()


def _kill_by_plan(plan: Plan, fleet: Fleet, began_s: float) -> None:
    for at_s, victim in plan.kills:
        time.sleep(max(0.0, began_s + at_s - time.time()))
        fleet.kill(victim)
        print(f"{at_s:5.0f} s  killed: {victim} {fleet.deaths[-1].name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
