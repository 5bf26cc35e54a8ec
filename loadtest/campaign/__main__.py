"""Attack two nodes for some minutes and judge: `python -m loadtest.campaign`, or `make campaign SECONDS= SEED=`.

One node with the fast lane and one without share a store. Attackers send broken and hostile requests of every kind to
all routes, change policies and settle forged reservations; somebody well-behaved is served meanwhile. It holds if no
answer was a 5xx but for documented 503s, no log has a traceback, memory stayed flat, nobody waited longer than a second
for an answer (on a machine that had time), the attackers included, and the well-behaved one's balances are exact. The
exit status says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple
from urllib.parse import quote
from urllib.request import Request, urlopen

import msgspec

from limiter.api_keys import new_key
from limiter.runtime import children
from loadtest.campaign import attacker, customer
from loadtest.campaign.crafted_requests import NAMESPACE
from loadtest.headgate_processes import ROOT, await_ready, end, start

ATTACKERS = 2
QUOTA = 1_000_000_000
FASTEST_GROWTH = 1.10
GROWTH_SLACK_BYTES = 24 << 20
SLOW_S = 1.0
BUSY_WINDOW_S = 3.0
"""Time before and after a slow call in which the load of the machine is considered."""
GRACE_S = 90.0
SLOWEST_SHOWN = 5

POLICIES = """
namespaces:
  {fuzz}: {{partitions: 1}}
  {good}: {{partitions: 1}}
policies:
  - {{name: good-quota, namespace: {good}, match: {{customer: "*"}}, per: [customer],
     quota: {{work: {quota}, period: month, timezone: {zone}}}}}
  - {{name: good-work, namespace: {good}, match: {{customer: "*"}}, per: [customer], rate: 1/d, capacity: {quota},
     max_debt: {quota}}}
  - {{name: fuzz-start, namespace: {fuzz}, match: {{}}, per: [customer], rate: 1000}}
"""


class Check(NamedTuple):
    """One promise and whether it held."""

    name: str
    holds: bool
    found: str


class Node:
    """One process of Headgate with its log."""

    def __init__(self, name: str, directory: Path, command: str = "api", **settings: object) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HEADGATE_")}
        environment = inherited | {f"HEADGATE_{key.upper()}": str(value) for key, value in settings.items()}
        program = [sys.executable, "-c", "from limiter.cli.main import main; main()", command]
        bound = children.bound(*program)
        with self.log.open("w") as log:
            self.process = Popen(bound, env=environment, cwd=ROOT, stdin=DEVNULL, stdout=PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.port = 0
        for line in self.process.stdout:
            if line.startswith("  api "):
                self.port = int(line.split()[1].rpartition(":")[2])
            if line.startswith("  try ") or ": controller " in line:
                break
        self.memory: list[int] = []

    def look(self) -> None:
        """Note its memory now."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                self.memory.append(int(line.split()[1]) << 10)


def main(arguments: list[str] | None = None) -> int:
    """Run; return 0 if every promise held."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.campaign", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to attack")
    parser.add_argument("--seed", default="", help="of an earlier campaign, to send the same again")
    parser.add_argument("--results", type=Path, default=ROOT / "loadtest" / "results", help="where findings go")
    given = parser.parse_args(arguments)
    seed = given.seed or str(random.SystemRandom().randrange(10**9))
    print(f"campaign: seed {seed}, {given.seconds:g} s", flush=True)
    checks = run(seed, given.seconds, given.results)
    for check in checks:
        print(f"{'holds ' if check.holds else 'BROKEN'}  {check.name}: {check.found}")
    return 0 if all(check.holds for check in checks) else 1


def run(seed: str, seconds: float, results: Path) -> list[Check]:
    """Start everything, attack, judge."""
    keys = {
        "admin": new_key("fuzz-admin", "admin", NAMESPACE),
        "caller": new_key("fuzz-caller", "caller"),
        "viewer": new_key("fuzz-viewer", "viewer"),
        "good": new_key("good-caller", "caller", customer.NAMESPACE),
    }
    with tempfile.TemporaryDirectory(prefix="headgate-campaign-") as name:
        directory = Path(name)
        with nodes(directory, ",".join(entry for _, entry in keys.values())) as (running, store_pid):
            secrets = {role: key for role, (key, _) in keys.items()}
            policies = ask(running[0], "/v1/policies/good-quota?namespace=good", secrets["viewer"])
            attackers, customers = attack(seed, seconds, directory, running, store_pid, secrets)
            unchanged = policies == ask(running[0], "/v1/policies/good-quota?namespace=good", secrets["viewer"])
            checks = [
                *judge_attack(attackers, results, seed),
                *judge_nodes(running),
                judge_times(customers),
                judge_waits(attackers, customers, results, seed),
                Check("nobody changed another's policies", unchanged, "unchanged" if unchanged else "changed"),
                judge_accounts(customers, running[0], secrets["viewer"]),
            ]
            for node in running:
                if not all(check.holds for check in checks):
                    results.mkdir(parents=True, exist_ok=True)
                    (results / f"campaign-{seed}-{node.name}.log").write_bytes(node.log.read_bytes()[-1_000_000:])
    return checks


@contextmanager
def nodes(directory: Path, api_keys: str) -> Iterator[tuple[list[Node], int]]:
    """A store, whose process id comes second, two nodes on it, the second without the fast lane; and a controller."""
    from tests.support.servers import running as running_server  # servers are started as the tests start them

    file = directory / "policies.yaml"
    file.write_text(
        POLICIES.format(fuzz=NAMESPACE, good=customer.NAMESPACE, quota=QUOTA, zone=zone_without_a_change_of_month())
    )
    common: dict[str, Any] = {
        "port": 0,
        "api_keys": api_keys,
        "policies": file,
        "deadline_ms": 5000,
        "body_timeout_s": 3,
    }
    with running_server("valkey", directory / "store") as store:
        started: list[Node] = []
        try:
            for name, lane in (("fast", "true"), ("plain", "false")):
                started.append(Node(name, directory, redis_url=store.url, fast_lane=lane, **common))
                await_ready(f"http://127.0.0.1:{started[-1].port}")
            started.append(Node("controller", directory, "controller", redis_url=store.url))
            yield started, store.pid
        finally:
            for node in started:
                end(node.process)


def zone_without_a_change_of_month() -> str:
    """Return a time zone in which no month begins within the next hours, so that no quota starts again."""
    now = datetime.now(UTC)
    return "UTC" if (now + timedelta(hours=6)).month == now.month else "Asia/Tokyo"


def attack(
    seed: str, seconds: float, directory: Path, running: Sequence[Node], store_pid: int, keys: dict[str, str]
) -> tuple[list[attacker.Report], customer.Report]:
    """Let everybody loose; their reports."""
    pids = {node.port: node.process.pid for node in running if node.port}
    files = [directory / f"attacker-{number}.json" for number in range(ATTACKERS)]
    told = directory / "customer.json"
    hostile = {role: keys[role] for role in ("admin", "caller", "viewer")}
    orders: list[tuple[str, object]] = [
        ("attacker", attacker.Orders(pids, store_pid, hostile, seed, number, seconds, str(file)))
        for number, file in enumerate(files)
    ]
    orders.append(("customer", customer.Orders(list(pids), keys["good"], seed, seconds + 2, str(told))))
    processes = [
        start(sys.executable, "-m", f"loadtest.campaign.{kind}", text(order), env=dict(os.environ), is_heard=True)
        for kind, order in orders
    ]
    give_up_s = time.monotonic() + seconds + GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < give_up_s:
        for node in running:
            if node.process.poll() is None:
                node.look()
        time.sleep(1.0)
    for process in processes:
        end(process)
    reports = [msgspec.json.decode(file.read_bytes(), type=attacker.Report) for file in files]
    return reports, msgspec.json.decode(told.read_bytes(), type=customer.Report)


def text(order: object) -> str:
    """Return orders as an argument."""
    return msgspec.json.encode(order).decode()


def judge_attack(reports: Sequence[attacker.Report], results: Path, seed: str) -> list[Check]:
    """Check that no answer is an unexpected failure and none is missing; write the others down, to be sent again."""
    findings = [finding for report in reports for finding in report.findings]
    statuses: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for report in reports:
        statuses.update(report.statuses)
        reasons.update(report.reasons_503)
    cases = sum(report.cases for report in reports)
    shown = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    print(f"campaign: {cases} cases; by status {shown}; 503s by reason {dict(reasons)}")
    if findings:
        results.mkdir(parents=True, exist_ok=True)
        file = results / f"campaign-{seed}.json"
        file.write_bytes(msgspec.json.format(msgspec.json.encode(findings)))
        print(f"campaign: what was sent and answered is in {file}")
    for finding in findings[:10]:
        print(f"campaign: case {finding.case} ({finding.kind}, port {finding.port}): {finding.problem}")
    return [
        Check(
            "every request was answered or its connection closed, without a 5xx",
            not findings,
            f"{len(findings)} were not",
        ),
        Check("attackers were heard", {200, 201, 204, 400, 401, 403, 404, 422, 429} <= statuses.keys(), shown),
    ]


def judge_nodes(running: Sequence[Node]) -> Iterator[Check]:
    """Check that nodes are alive, logged no traceback, and have the memory that they had after a quarter of the
    time."""
    for node in running:
        log = node.log.read_text(errors="replace")
        troubles = log.count("Traceback") + log.count("CRITICAL") + log.count("ERROR")
        alive = node.process.poll() is None
        yield Check(
            f"{node.name} is alive and its log has no error",
            alive and not troubles,
            f"{troubles} errors, alive: {alive}",
        )
        count = len(node.memory)
        before = median(node.memory[count // 4 : count // 2] or [0])
        after = median(node.memory[-max(1, count // 5) :] or [0])
        most = before * FASTEST_GROWTH + GROWTH_SLACK_BYTES
        found = f"{before / 2**20:.0f} MB, then {after / 2**20:.0f} MB (most {max(node.memory) / 2**20:.0f} MB)"
        yield Check(f"{node.name} does not grow", after <= most, found)


def judge_times(seen: customer.Report) -> Check:
    """No answer took longer than a second, by as much more as the machine made others wait at the same time."""
    slow = [call for call in seen.calls if call.port and call.took_s > allowed_s(seen, call.at_s, call.took_s)]
    took = sorted(call.took_s for call in seen.calls if call.port) or [0.0]
    nothing_ms = 1000 * max((call.took_s for call in seen.calls if not call.port), default=0.0)
    stretch = max((share.stretch for share in seen.shares), default=1.0)
    found = (
        f"{len(slow)} of {len(took)} calls did; p50 {1000 * took[len(took) // 2]:.1f} ms, slowest "
        f"{1000 * took[-1]:.0f} ms; a server that does nothing took up to {nothing_ms:.0f} ms, and computing up to "
        f"{stretch:.1f} times as long as it needs"
    )
    return Check("nobody well-behaved waited longer than a second", not slow and len(took) > 10, found)


def judge_waits(reports: Sequence[attacker.Report], seen: customer.Report, results: Path, seed: str) -> Check:
    """No attacker that sent all and read all waited longer either, whatever it asked for (F-H10)."""
    waits = sorted((slow for report in reports for slow in report.slowest), key=lambda slow: slow.wait, reverse=True)
    for slow in waits[:SLOWEST_SHOWN]:
        print(f"campaign: an attacker waited for {slow}")
    late = [slow for slow in waits if slow.wait.took_s > allowed_s(seen, slow.wait.began_s, slow.wait.took_s)]
    if late:
        results.mkdir(parents=True, exist_ok=True)
        (results / f"campaign-{seed}-slow.json").write_bytes(msgspec.json.format(msgspec.json.encode(late)))
    found = f"{len(late)} did; the slowest took {waits[0]}" if waits else "nobody waited at all"
    return Check("no attacker waited longer than a second for an answer", bool(waits) and not late, found)


def allowed_s(seen: customer.Report, at_s: float, took_s: float) -> float:
    """How long somebody may wait who began then and waited so long: a second on a machine that has time."""
    if took_s <= SLOW_S:
        return SLOW_S
    began_s, ended_s = at_s - BUSY_WINDOW_S, at_s + took_s + BUSY_WINDOW_S
    nothing = [other.took_s for other in seen.calls if not other.port and began_s < other.at_s < ended_s]
    stretches = [share.stretch for share in seen.shares if began_s < share.at_s < ended_s]
    return SLOW_S * max(stretches, default=1.0) + max(nothing, default=0.0)


def judge_accounts(seen: customer.Report, node: Node, key: str) -> Check:
    """Check that the balances in the store are what the customer knows that it spent, to the last unit."""
    listed = buckets(node, customer.NAMESPACE, key)
    balances = {(row["policy"], row["bucket"].rpartition(":")[2]): row["balance"] for row in listed}
    wrong = list(seen.complaints)
    for name, spent in seen.spent.items():
        if not spent:
            continue
        left = balances.get(("good-quota", name))
        if left != QUOTA - spent:
            wrong.append(f"quota of {name}: {left} instead of {QUOTA - spent}")
        left = balances.get(("good-work", name), 0.0)
        if not QUOTA - spent <= left <= QUOTA - spent + 1:  # a unit is refilled each day
            wrong.append(f"bucket of {name}: {left} instead of {QUOTA - spent}")
    found = "; ".join(wrong[:5]) or f"{seen.grants} acquires, {sum(seen.spent.values()):.0f} units of work"
    return Check("the well-behaved one's balances are exact", not wrong and seen.grants > 10, found)


def buckets(node: Node, namespace: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield every bucket of a namespace, page by page: a page of a large store may hold few of them, or none."""
    cursor = ""
    while True:
        page = ask(node, f"/v1/buckets?namespace={namespace}&limit=100&cursor={quote(cursor)}", key)
        yield from page["buckets"]
        cursor = page["cursor"]
        if not cursor:
            return


def ask(node: Node, path: str, key: str) -> Any:
    """Return a node's answer."""
    url = f"http://127.0.0.1:{node.port}{path}"
    with urlopen(Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
