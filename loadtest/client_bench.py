"""Cost of the client library: `python -m loadtest.client_bench`.

One client process, one API process, one store; interleaved rounds. A pair is an acquire and its settle. Processor times
matter: client, node and store share the machine here, and a busy machine makes everything slower, but all of it alike.

    coalesced    acquires that wait for a call go together, settles ride along: `Headgate`
    single       one HTTP request for each acquire and each settle, on the same connections
    local        `lease.try_acquire` and settle, on a lease that the library holds
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import msgspec
import redis
from rich.console import Console
from rich.table import Table

from headgate import Headgate
from limiter.client.node_pool import NodePool
from limiter.store.link.embedded import EmbeddedStore
from loadtest.http_bench import Variant, serving
from loadtest.road_bench import node_s, store_s

WORKERS = 256
CUSTOMERS = 1000
TIMES_MIN = 5.0
LOCAL_MIN_PER_S = 400_000
LOCAL_PAIRS = 100_000
PATIENT_MS = 60_000
POLICIES = """
policies:
  - {name: reads, match: {service: orders}, per: [customer], rate: 100000000, capacity: 100000000}
  - {name: lent, match: {service: lent}, rate: 1000000000, capacity: 1000000000, local: {allowed: true}}
"""

Run = Callable[[str, float], Awaitable[int]]
"""Make pairs at an address for some seconds; how many."""

encode = msgspec.json.Encoder().encode


@dataclass
class Way:
    """One line of the table: a way to make pairs, and its cost."""

    name: str
    run: Run
    pairs_per_s: list[float] = field(default_factory=list)
    client_us: list[float] = field(default_factory=list)
    node_us: list[float] = field(default_factory=list)
    store_us: list[float] = field(default_factory=list)


async def _work(pair: Callable[[int], Awaitable[None]], seconds: float, workers: int) -> int:
    """Let workers make pairs, one after the other each."""
    until_s = time.monotonic() + seconds
    made = 0

    async def work(number: int) -> None:
        nonlocal made
        while time.monotonic() < until_s:
            number = (number * 7919 + 1) % CUSTOMERS
            await pair(number)
            made += 1

    await asyncio.gather(*(work(number) for number in range(workers)))
    return made


def by_gate(*, repeat: bool = True, workers: int = WORKERS) -> Run:
    """Return the way of the library."""

    async def run(url: str, seconds: float) -> int:
        async with Headgate(url, deadline_ms=PATIENT_MS, repeat=repeat, unavailable="closed") as gate:

            async def pair(number: int) -> None:
                async with gate.acquire({"service": "orders", "customer": f"c{number}"}, work=2) as grant:
                    grant.settle(3)

            return await _work(pair, seconds, workers)

    return run


async def by_single_calls(url: str, seconds: float) -> int:
    """Make pairs by two requests each, on the library's own connections."""
    pool = NodePool([url], connections_max=64)

    async def post(path: str, body: dict[str, object]) -> dict[str, str]:
        by_s = time.monotonic() + PATIENT_MS / 1000
        status, answer = await pool.post(path, encode(body), by_s=by_s, is_repeatable=False)
        assert status == 200, answer
        return dict(answer)

    try:
        return await _work(lambda number: _single(post, number), seconds, WORKERS)
    finally:
        await pool.close()


async def by_httpx(url: str, seconds: float) -> int:
    """Make pairs by two requests each with httpx, for comparison."""
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=64)) as client:

        async def post(path: str, body: dict[str, object]) -> dict[str, str]:
            answer = await client.post(path, content=encode(body), headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        return await _work(lambda number: _single(post, number), seconds, 64)


async def _single(post: Callable[[str, dict[str, object]], Awaitable[dict[str, str]]], number: int) -> None:
    answer = await post("/v1/acquire", {"descriptor": {"service": "orders", "customer": f"c{number}"}, "work": 2})
    await post("/v1/settle", {"reservation": answer["reservation"], "work": 3})


def ways() -> dict[str, Way]:
    """Return the ways to compare, by short names."""
    found = {
        "coalesced": Way(f"the library, {WORKERS} tasks", by_gate()),
        "single": Way("one request for each acquire and settle", by_single_calls),
        "keyless": Way("the library without idempotency keys", by_gate(repeat=False)),
        "lone": Way("the library, one task", by_gate(workers=1)),
    }
    if find_spec("httpx") is not None:
        found["httpx"] = Way("one request each, by httpx", by_httpx)
    # A middleware's overhead for a request belongs here: the same application with and without it.
    return found


async def local_per_s(url: str) -> list[float]:
    """Return how many local decisions with their settles a second of processor time has, round by round."""
    found = []
    async with Headgate(url) as gate, gate.lease({"service": "lent"}) as lease:
        for _ in range(5):
            began_s = time.process_time()
            for _ in range(LOCAL_PAIRS):
                grant = lease.try_acquire(1.0)
                grant.settle(2.0)  # type: ignore[union-attr]
            found.append(LOCAL_PAIRS / (time.process_time() - began_s))
            await asyncio.sleep(0)
    return found


async def measure(rounds: int, seconds: float, console: Console) -> tuple[dict[str, Way], float]:
    """Measure every way, interleaved; and the local decisions per second."""
    found, local = ways(), [0.0]
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        policies = Path(directory) / "policies.yaml"
        policies.write_text(POLICIES)
        async with EmbeddedStore(Path(directory)) as store:
            client = redis.Redis(unix_socket_path=store.url.removeprefix("unix://"))
            environment = {"HEADGATE_DEADLINE_MS": "5000"}
            with serving(Variant("client", environment=environment), store.url, policies) as (url, pid):
                for number in range(rounds):
                    console.print(f"client: round {number + 1} of {rounds}", style="dim")
                    for way in found.values():
                        await _round(way, url, pid, client, seconds)
                local = await local_per_s(url)
            client.close()
    return found, median(local)


async def _round(way: Way, url: str, pid: int, client: redis.Redis, seconds: float) -> None:
    await way.run(url, seconds / 5)  # to warm up
    gc.collect()
    node_before_s, store_before_s = node_s(pid), store_s(client)
    began_s, cpu_s = time.monotonic(), time.process_time()
    pairs = await way.run(url, seconds)
    way.pairs_per_s.append(pairs / (time.monotonic() - began_s))
    way.client_us.append((time.process_time() - cpu_s) / pairs * 1e6)
    way.node_us.append((node_s(pid) - node_before_s) / pairs * 1e6)
    way.store_us.append((store_s(client) - store_before_s) / pairs * 1e6)


HEAD = ("a pair by", "pairs/s", "client µs", "node µs", "store µs", "against")
Line = tuple[str, ...]


def judge(found: dict[str, Way], local: float) -> tuple[list[Line], bool]:
    """Return the lines of the table, each with its comparison, and whether the aims are reached."""
    together, single = found["coalesced"], found["single"]
    times = median(single.client_us) / median(together.client_us)
    by_clock = median(more / less for more, less in zip(together.pairs_per_s, single.pairs_per_s, strict=True))
    keys_us = [
        median(getattr(together, name)) - median(getattr(found["keyless"], name)) for name in ("node_us", "store_us")
    ]
    against = {
        "coalesced": f"{times:.1f}× one request each in a second of the client's processor (at least {TIMES_MIN:g}×)"
        f"{_missed(times >= TIMES_MIN)}, {by_clock:.1f}× by the clock",
        "keyless": f"keys cost {keys_us[0]:.1f} + {keys_us[1]:.1f} µs in node and store",
    }
    lines: list[Line] = [
        (
            way.name, f"{median(way.pairs_per_s):,.0f}", f"{median(way.client_us):.0f}", f"{median(way.node_us):.0f}",
            f"{median(way.store_us):.0f}", against.get(name, ""),
        )
        for name, way in found.items()
    ]  # fmt: skip
    is_fast = local >= LOCAL_MIN_PER_S
    lines.append(
        ("a lease, locally", f"{local:,.0f}", f"{1e6 / local:.1f}", "", "",
         f"at least {LOCAL_MIN_PER_S:,} in a second of one processor{_missed(is_fast)}")
    )  # fmt: skip
    return lines, times >= TIMES_MIN and is_fast


def _missed(holds: bool) -> str:
    return "" if holds else " **missed**"


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
    lines, held = judge(*asyncio.run(measure(given.rounds, given.seconds, Console(stderr=True))))
    if given.markdown:
        sys.stdout.write(render_markdown(lines) + "\n")
        return 0 if held else 1
    table = Table(title="What the client library costs")
    for column in HEAD:
        table.add_column(column, justify="left" if column in ("a pair by", "against") else "right")
    for line in lines:
        table.add_row(*line)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
