"""Acquires per second over HTTP on this machine: `python -m loadtest.http_bench`.

One run, interleaved rounds, everything on the same machine: the load generator, one API process at a time, the
store. Only the ratios matter.

    (a) the yardstick: FastAPI, one redis-py script call each     (c) the fast lane
    (b) our FastAPI routes, the fast lane off                     (d) the fast lane, batches of 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from shutil import which
from statistics import median

from rich.console import Console
from rich.table import Table

from limiter.cli.bench import BATCH, CUSTOMERS, ScriptBench
from limiter.store.link.embedded import EmbeddedStore
from loadtest.generator import Load, run

CONNECTIONS = 64
BATCH_OF = 100
PROBE = '{"descriptor": {"service": "orders", "operation": "read", "customer": "probe"}, "work": 1}'
MEMORY_CUSTOMERS = 1_000_000
MEMORY_MAX_MB = 250
PROBE_PAUSE_S = 0.05
TO_YARDSTICK_MIN = 8 if which("wrk") is None else 11
"""Lower without wrk: another load generator takes as much of the machine as the node, which leaves less to show."""
PATIENT = {"HEADGATE_DEADLINE_MS": "1000"}
"""64 batches at once are 6400 operations in a queue: a client that sends so many has to wait for them."""

POLICY = """
policies:
  - {name: reads, match: {service: orders, operation: "read*"}, per: [customer], rate: 1000000, capacity: 1000000}
"""


@dataclass
class Variant:
    """One line of the table."""

    name: str
    batch: int = 1
    path: str = "/v1/acquire"
    environment: dict[str, str] = field(default_factory=dict)
    yardstick: bool = False
    loads: list[Load] = field(default_factory=list)
    probes: list[bool] = field(default_factory=list)
    """For each acquire that was sent singly during the load: whether the store decided it."""

    @property
    def acquires_per_s(self) -> float:
        """The median of the rounds."""
        return median(load.requests_per_s for load in self.loads) * self.batch

    @property
    def p99_ms(self) -> float:
        """The median of the rounds."""
        return median(load.p99_ms for load in self.loads)

    @property
    def decided_share(self) -> float:
        """Share of the probes that the store decided, and not the node alone."""
        return sum(self.probes) / len(self.probes) if self.probes else 0.0

    @property
    def errors(self) -> int:
        """The errors of all rounds."""
        return sum(load.errors for load in self.loads)


def variants() -> list[Variant]:
    """Return the variants to compare."""
    return [
        Variant("(a) yardstick: FastAPI, a script call each", yardstick=True),
        Variant("(b) FastAPI routes", environment={"HEADGATE_FAST_LANE": "off"}),
        Variant("(c) fast lane"),
        Variant(f"(d) fast lane, batches of {BATCH_OF}", batch=BATCH_OF, path="/v1/batch", environment=PATIENT),
    ]


@contextmanager
def serving(variant: Variant, url: str, policies: Path) -> Iterator[tuple[str, int]]:
    """Start the variant's server; yield its address and its process id once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    if variant.yardstick:
        command = [sys.executable, "-m", "uvicorn", "loadtest.yardstick:app", "--port", str(port), "--no-access-log",
                   "--log-level", "warning"]  # fmt: skip
        environment = inherited | {"YARDSTICK_REDIS_URL": url}
    else:
        command = [sys.executable, "-c", "from limiter.cli.main import main; main()", "api"]
        environment = inherited | variant.environment | {
            "HEADGATE_PORT": str(port), "HEADGATE_REDIS_URL": url, "HEADGATE_POLICIES": str(policies),
        }  # fmt: skip
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    try:
        _await(f"{base}/openapi.json")
        yield base, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _await(url: str) -> None:
    give_up_s = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()  # noqa: S310
            return
        except OSError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.05)


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def ceiling(socket_path: str) -> float:
    """Return the acquires per second of the store's script alone, in batches."""
    draw = Random(1)  # noqa: S311  the same in every run
    return ScriptBench(socket_path).batched(1000, lambda: draw.sample(range(CUSTOMERS), BATCH))


async def measure(rounds: int, seconds: float, only: str, console: Console) -> tuple[list[Variant], float, float]:
    """Run everything: the variants, the store's ceiling, a node's memory after a million customers (MB)."""
    rows = [variant for variant in variants() if not only or variant.name[1] in only]
    ceilings: list[float] = []
    memory_mb = 0.0
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        policies = Path(directory) / "policies.yaml"
        policies.write_text(POLICY)
        async with EmbeddedStore(Path(directory)) as store:
            console.print(f"store: {store.facts}; {CONNECTIONS} connections, {rounds} rounds", style="dim")
            for number in range(rounds):
                console.print(f"round {number + 1} of {rounds}", style="dim")
                ceilings.append(await asyncio.to_thread(ceiling, store.url.removeprefix("unix://")))
                for variant in rows:
                    await asyncio.to_thread(_round, variant, store.url, policies, seconds)
            if not only:
                memory_mb = await asyncio.to_thread(_memory, store.url, policies, console)
    return rows, median(ceilings), memory_mb


def _round(variant: Variant, url: str, policies: Path, seconds: float) -> None:
    with serving(variant, url, policies) as (base, _):
        run(base + variant.path, connections=CONNECTIONS, seconds=1, batch=variant.batch)  # to warm up
        with _probing(variant, base):
            load = run(base + variant.path, connections=CONNECTIONS, seconds=seconds, batch=variant.batch)
        variant.loads.append(load)


@contextmanager
def _probing(variant: Variant, base: str) -> Iterator[None]:
    """Send single acquires during the load, and look at the answers: the load generator only counts them."""
    over = threading.Event()
    request = urllib.request.Request(  # noqa: S310
        f"{base}/v1/acquire", PROBE.encode(), {"content-type": "application/json"}
    )

    def ask() -> None:
        while not over.wait(PROBE_PAUSE_S):
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
                variant.probes.append(not json.load(answer).get("degraded", False))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()


def _memory(url: str, policies: Path, console: Console) -> float:
    """Return a node's memory once it has seen about a million different customers."""
    console.print(f"memory after {MEMORY_CUSTOMERS:,} customers", style="dim")
    variant = Variant("memory", batch=BATCH_OF, path="/v1/batch", environment=PATIENT)
    with serving(variant, url, policies) as (base, pid):
        seen = 0.0
        while seen < MEMORY_CUSTOMERS:
            load = run(base + variant.path, connections=CONNECTIONS, seconds=5, batch=BATCH_OF, customers=2**31 - 1)
            seen += load.requests_per_s * BATCH_OF * 5
        return resident_mb(pid)


HEAD = ("what", "acquires/s", "p99 ms", "errors", "decided", "against")
Line = tuple[str, ...]
"""A cell for each column of the head, and one that says whether the aim was reached."""


def judge(rows: list[Variant], ceiling_per_s: float, memory_mb: float) -> tuple[list[Line], bool]:
    """Return the lines of the table, and whether the aims are reached."""
    found = {variant.name[1]: variant for variant in rows}
    lines: list[Line] = []
    held = []
    for letter, variant in found.items():
        against, holds = _judge(letter, found, ceiling_per_s)
        held.append(holds and variant.errors == 0 and variant.decided_share == 1)
        lines.append((
            variant.name, f"{variant.acquires_per_s:,.0f}", f"{variant.p99_ms:.1f}", str(variant.errors),
            f"{variant.decided_share:.0%}", against, "" if not against else _mark(held[-1]),
        ))  # fmt: skip
    lines.append((f"the store alone, {BATCH} to a call", f"{ceiling_per_s:,.0f}", "", "", "", "", ""))
    if memory_mb:
        held.append(memory_mb <= MEMORY_MAX_MB)
        told = f"{memory_mb:.0f} MB (at most {MEMORY_MAX_MB})"
        lines.append(("a node's memory after a million customers", "", "", "", "", told, _mark(held[-1])))
    return lines, all(held)


def _mark(holds: bool) -> str:
    return "ok" if holds else "MISSED"


def render(lines: list[Line]) -> Table:
    """The lines as a table."""
    table = Table(title="Acquires over HTTP, one API process")
    for column in (*HEAD, ""):
        table.add_column(column, justify="left" if column in ("what", "against", "") else "right")
    for line in lines:
        table.add_row(*line)
    return table


def render_markdown(lines: list[Line]) -> str:
    """Return the lines as Markdown for the documents; a missed aim is marked."""
    rows = [HEAD, ("---", *["---:"] * 4, "---")]
    rows += [(*cells, f"{against} **missed**" if mark == "MISSED" else against) for *cells, against, mark in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _judge(letter: str, found: dict[str, Variant], ceiling_per_s: float) -> tuple[str, bool]:
    variant = found[letter]
    if letter == "c" and {"a", "b"} <= found.keys():
        to_a = variant.acquires_per_s / found["a"].acquires_per_s
        to_b = variant.acquires_per_s / found["b"].acquires_per_s
        told = f"{to_a:.1f}× (a) (at least {TO_YARDSTICK_MIN}×), {to_b:.1f}× (b) (at least 1.5×), p99 at most 10 ms"
        return told, to_a >= TO_YARDSTICK_MIN and to_b >= 1.5 and variant.p99_ms <= 10
    if letter == "d":
        share = variant.acquires_per_s / ceiling_per_s
        return f"{share:.2f} of the store alone (at least 0.5)", share >= 0.5
    return "", True


def main() -> int:
    """Measure and print the table; the exit status says whether every aim was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", default="", help="letters of the variants to run, such as cd")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    given = parser.parse_args()
    lines, held = judge(*asyncio.run(measure(given.rounds, given.seconds, given.only, Console(stderr=True))))
    if given.markdown:
        sys.stdout.write(render_markdown(lines) + "\n")
    else:
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(render(lines))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
