"""Cost of a request in processor time of the node and of the store: `python -m loadtest.road_bench`.

One run, interleaved rounds, one API process with a store of its own at a time: the same load on one policy, on
three, on empty buckets with and without the node's memory of refusals, and from a lone caller. Only the ratios
matter: a busy machine makes everything more expensive, but all of it alike.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from statistics import median

import redis
from rich.console import Console
from rich.table import Table

from limiter.store.link.embedded import EmbeddedStore
from loadtest.generator import Load, run
from loadtest.http_bench import CONNECTIONS, POLICY, Variant, serving

MORE = """
  - {name: second, match: {service: orders}, per: [customer], rate: 1000000, capacity: 1000000}
  - {name: third, match: {operation: read}, per: [customer], rate: 1000000, capacity: 1000000}
"""
EMPTY = """
policies:
  - {name: reads, match: {service: orders}, per: [customer], rate: 0.001, capacity: 1}
"""
ALWAYS_ASK = {"HEADGATE_REPEAT_REFUSALS_MS": "0"}
REFUSAL_MAX, REPEATED_MAX = 0.8, 0.4


@dataclass
class Scenario:
    """One line of the table: a load, and its cost."""

    name: str
    policies: str = POLICY
    connections: int = CONNECTIONS
    customers: int = 100_000
    environment: dict[str, str] = field(default_factory=dict)
    node_us: list[float] = field(default_factory=list)
    store_us: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    @property
    def node(self) -> float:
        """Processor time of the node for a request (us): the median of the rounds."""
        return median(self.node_us)

    @property
    def store(self) -> float:
        """Processor time of the store for a request (us)."""
        return median(self.store_us)

    @property
    def both(self) -> float:
        """Processor time of both."""
        return self.node + self.store


def scenarios() -> dict[str, Scenario]:
    """Return the scenarios by their short names."""
    return {
        "grant": Scenario("a grant"),
        "three": Scenario("a grant, three policies", policies=POLICY + MORE.lstrip("\n")),
        "refusal": Scenario("a refusal by the store", policies=EMPTY, customers=2000, environment=ALWAYS_ASK),
        "repeated": Scenario("a refusal on one hot, empty bucket", policies=EMPTY, customers=1),
        "lone": Scenario("a grant, one caller", connections=1),
    }


def node_s(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    ran_ns = (int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(ran_ns) / 1e9


def store_s(client: redis.Redis) -> float:
    """Return the processor time of the store."""
    used = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


async def measure(rounds: int, seconds: float, console: Console) -> dict[str, Scenario]:
    found = scenarios()
    console.print(f"load by {'wrk' if which('wrk') else 'asyncio'}; {rounds} rounds", style="dim")
    for number in range(rounds):
        console.print(f"round {number + 1} of {rounds}", style="dim")
        for scenario in found.values():
            with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
                async with EmbeddedStore(Path(directory)) as store:
                    await asyncio.to_thread(_round, scenario, store.url, Path(directory), seconds)
    return found


def _round(scenario: Scenario, url: str, directory: Path, seconds: float) -> None:
    policies = directory / "policies.yaml"
    policies.write_text(scenario.policies)
    client = redis.Redis(unix_socket_path=url.removeprefix("unix://"))
    with serving(Variant(scenario.name, environment=scenario.environment), url, policies) as (base, pid):
        target = f"{base}/v1/acquire"
        run(target, connections=scenario.connections, seconds=1, customers=scenario.customers)  # to warm up
        node_before_s, store_before_s = node_s(pid), store_s(client)
        load = run(target, connections=scenario.connections, seconds=seconds, customers=scenario.customers)
        requests = load.requests_per_s * seconds
        scenario.node_us.append((node_s(pid) - node_before_s) / requests * 1e6)
        scenario.store_us.append((store_s(client) - store_before_s) / requests * 1e6)
        scenario.loads.append(load)


HEAD = ("what", "node µs", "store µs", "both µs", "p50 ms", "against")
Line = tuple[str, ...]


def judge(found: dict[str, Scenario]) -> tuple[list[Line], bool]:
    """Return the lines of the table, each with its comparison, and whether the aims are reached."""
    grant, three = found["grant"], found["three"]
    refusal, repeated = found["refusal"].both / grant.both, found["repeated"].both / grant.both
    against = {
        "three": f"each further policy: {(three.node - grant.node) / 2:.1f} + {(three.store - grant.store) / 2:.1f} µs",
        "refusal": _against_a_grant(refusal, REFUSAL_MAX),
        "repeated": _against_a_grant(repeated, REPEATED_MAX),
    }
    lines: list[Line] = [
        (
            scenario.name, f"{scenario.node:.1f}", f"{scenario.store:.1f}", f"{scenario.both:.1f}",
            f"{median(load.p50_ms for load in scenario.loads):.2f}", against.get(name, ""),
        )
        for name, scenario in found.items()
    ]  # fmt: skip
    return lines, refusal <= REFUSAL_MAX and repeated <= REPEATED_MAX


def _against_a_grant(share: float, most: float) -> str:
    told = f"{share:.2f} of a grant (at most {most})"
    return told if share <= most else f"{told} **missed**"


def render_markdown(lines: list[Line]) -> str:
    """Return the lines as Markdown for the documents."""
    rows = [HEAD, ("---", *["---:"] * 4, "---"), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Measure and print the table; the exit status says whether every aim was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    given = parser.parse_args()
    lines, held = judge(asyncio.run(measure(given.rounds, given.seconds, Console(stderr=True))))
    if given.markdown:
        sys.stdout.write(render_markdown(lines) + "\n")
        return 0 if held else 1
    table = Table(title="What a request costs")
    for column in HEAD:
        table.add_column(column, justify="left" if column in ("what", "against") else "right")
    for line in lines:
        table.add_row(*line)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
