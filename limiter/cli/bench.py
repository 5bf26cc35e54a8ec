"""Measure this machine's store and this code: `headgate bench`.

All figures come from one run on one machine, in interleaved rounds, and are compared by their ratios: a shared
machine's speed changes from minute to minute, but it changes for all rows alike. The store is a private Valkey in a
temporary directory, started as `headgate up` starts it, append-only file included.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, ClassVar

import redis
import uvloop
from redis.backoff import NoBackoff
from redis.retry import Retry
from rich.console import Console
from rich.table import Table

from api.server import tame_collector
from limiter.cli.controller_bench import GUARDED, ControllerBench
from limiter.cli.lease_bench import LeaseBench, local_decisions
from limiter.engine.decider import Decider
from limiter.model.bucket.bucket import Params
from limiter.model.bucket.contract import AcquireRequest
from limiter.model.bucket.operations import Acquire, AcquireAnswer, Charge, Settle, Want
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.reading import read_policy_set
from limiter.store import keys
from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import Link, open_link
from limiter.store.link.embedded import EmbeddedStore
from limiter.store.link.server_connection import pack
from limiter.store.scripts import AcquireScript, SettleScript

TERMS = Params(committed=1e6, capacity=1e6, debt_max=1e9)
CHANCE = Random(1)  # noqa: S311  the same customers in every run
CUSTOMERS = 100_000
BATCH = 64
CALLERS = 256
CALLS_IN_FLIGHT = 8
BUCKETS_MEASURED = 1_000_000
SETTLES_MEASURED = 100_000
FEW_HOLDERS, MANY_HOLDERS = 10, 1_000
RENEWAL_MOST = 1.2


@dataclass
class Row:
    """One line of the table: a figure, its value in every round, and its aim."""

    what: str
    unit: str
    figures: list[float] = field(default_factory=list)
    aim: str = ""
    holds: bool = True

    @property
    def figure(self) -> float:
        """The median of the rounds."""
        return median(self.figures)


def _client(socket: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=socket, retry=Retry(NoBackoff(), 0), protocol=2)


class ScriptBench:
    """Calls of the acquire script, as fast as one server takes them."""

    def __init__(self, socket: str) -> None:
        self.client = _client(socket)
        self.script = AcquireScript()
        self.client.script_load(self.script.source)
        self.prefix = Slot("bench").prefix
        self._calls = 0

    def call(self, customers: list[int]) -> list[bytes | int]:
        """Return one call of the script, with an acquire for each customer."""
        self._calls += 1
        operations = [acquire(customer) for customer in customers]
        return self.script.call(self.prefix, b"%d" % self._calls, operations)

    def unbatched(self, operations: int) -> float:
        """Return operations per second with one script call each, from a redis-py pipeline."""
        calls = [self.call([CHANCE.randrange(CUSTOMERS)]) for _ in range(operations)]
        began_s = time.perf_counter()
        for at in range(0, operations, BATCH):
            pipeline = self.client.pipeline(transaction=False)
            for call in calls[at : at + BATCH]:
                pipeline.execute_command("EVALSHA", self.script.sha, *call)  # type: ignore[no-untyped-call]
            pipeline.execute()
        return operations / (time.perf_counter() - began_s)

    def batched(self, calls: int, customers: Callable[[], list[int]]) -> float:
        """Return operations per second with many in a call. Calls are packed before the clock starts: this measures
        the server."""
        packed = [pack("EVALSHA", self.script.sha, *self.call(customers())) for _ in range(calls)]
        return calls * BATCH / self.send(packed)

    def send(self, packed: list[bytes]) -> float:
        """Return the seconds that calls take, with a few of them always in flight."""
        connection = self.client.connection_pool.get_connection()
        began_s = time.perf_counter()
        for at, call in enumerate(packed):
            connection.send_packed_command([call])  # type: ignore[no-untyped-call]
            if at >= CALLS_IN_FLIGHT:
                connection.read_response()
        for _ in range(min(CALLS_IN_FLIGHT, len(packed))):
            connection.read_response()
        took_s = time.perf_counter() - began_s
        self.client.connection_pool.release(connection)
        return took_s

    def bytes_per_bucket(self, buckets: int) -> float:
        """Return the server's memory per bucket, its key and its place in the controller's list included."""
        before = self._emptied()
        for at in range(0, buckets, 64 * BATCH):
            calls = [self.call(list(range(first, first + BATCH))) for first in range(at, at + 64 * BATCH, BATCH)]
            self.send([pack("EVALSHA", self.script.sha, *call) for call in calls])
            # Replies are kept for a few seconds; they are no part of a bucket.
            self.client.delete(*(bytes(call[1]) for call in calls))
        made = self.client.dbsize() - 1
        assert made >= buckets
        return (self._used_memory() - before) / made

    def bytes_per_settle(self, settles: int) -> float:
        """Return the server's memory per settled reservation, until its tombstone expires."""
        script = SettleScript()
        self.client.script_load(script.source)
        seconds, _ = self.client.time()
        before = self._emptied()
        for at in range(0, settles, BATCH):
            self._calls += 1
            ended = [settle("reads", f"{number:016}", 2.0, seconds * 1_000_000) for number in range(at, at + BATCH)]
            call = script.call(self.prefix, b"%d" % self._calls, ended)
            self.send([pack("EVALSHA", script.sha, *call)])
            self.client.delete(bytes(call[1]))
        return (self._used_memory() - before) / (self.client.dbsize() - 1)

    def _emptied(self) -> int:
        self.client.execute_command("FLUSHALL", "SYNC")  # type: ignore[no-untyped-call]
        return self._used_memory()

    def _used_memory(self) -> int:
        return int(self.client.info("memory")["used_memory"])


class BatcherBench:
    """Callers in this process; each waits for its answer before it asks again."""

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.slot = Slot("bench")

    async def round(self, operations: int) -> tuple[float, float]:
        """Return acquires and settles per second."""
        granted: list[tuple[str, AcquireAnswer]] = []

        async def acquire_one(number: int) -> None:
            operation = acquire(CHANCE.randrange(CUSTOMERS))
            answer = await self.buckets.acquire(self.slot, operation, timeout_s=5)
            granted.append((operation.wants[0].bucket, answer))

        async def settle_one(number: int) -> None:
            bucket, answer = granted[number]
            name, charge = f"{answer.now_us}-{number}", answer.buckets[0].charge
            await self.buckets.settle(self.slot, settle(bucket, name, charge, answer.now_us), timeout_s=5)

        return await _rate(operations, acquire_one), await _rate(operations, settle_one)


class DeciderBench:
    """A request under a policy without overload control: alone, and beside another policy that has some."""

    PLAIN: ClassVar = {"name": "reads", "match": {"service": "orders"}, "per": ["customer"], "rate": 1e6}
    OTHER: ClassVar = {"name": "other", "match": {"service": "others"}, "rate": 1e6}
    GUARDED: ClassVar = {**OTHER, "overload": {"expectations": {}, "response_time": {}, "utilisation": {}}}

    def __init__(self, buckets: Buckets) -> None:
        self._alone = self._decider(buckets, self.PLAIN, self.OTHER)
        self._beside = self._decider(buckets, self.PLAIN, self.GUARDED)

    def _decider(self, buckets: Buckets, *policies: dict[str, Any]) -> Decider:
        decider = Decider(buckets, Signer(bytes(32)), deadline_s=5)
        decider.enforce(read_policy_set({"policies": list(policies)}))
        return decider

    async def round(self, operations: int) -> tuple[float, float]:
        """Return decisions per second: without overload control anywhere, and with some in another policy.

        Measured in alternating quarters, so that other load on the machine affects both.
        """
        alone_s = beside_s = 0.0
        for decider in (self._alone, self._beside, self._beside, self._alone) * 2:
            took_s = operations / 4 / await self._decisions(decider, operations // 4)
            if decider is self._alone:
                alone_s += took_s
            else:
                beside_s += took_s
        return operations / alone_s, operations / beside_s

    async def _decisions(self, decider: Decider, operations: int) -> float:
        async def decide(_: int) -> None:
            descriptor = {"service": "orders", "customer": f"c{CHANCE.randrange(CUSTOMERS)}"}
            await decider.acquire(AcquireRequest(descriptor=descriptor))

        return await _rate(operations, decide)


async def _rate(operations: int, one: Callable[[int], Awaitable[None]]) -> float:
    numbers = iter(range(operations))

    async def caller() -> None:
        for number in numbers:
            await one(number)

    began_s = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return operations / (time.perf_counter() - began_s)


def acquire(customer: int) -> Acquire:
    """Return one request of a customer."""
    return Acquire((Want(keys.bucket_name("reads", [f"c{customer}"]), TERMS, 1.0, 2.0),))


def settle(bucket: str, reservation: str, charge: float, acquired_us: int) -> Settle:
    """Return the settle of that request."""
    return Settle(
        reservation=reservation,
        charges=(Charge(bucket, charge, 1.0, TERMS),),
        work=3.0,
        acquired_us=acquired_us,
        deadline_us=acquired_us + 60_000_000,
    )


async def measure(*, rounds: int, scale: float, console: Console) -> list[Row]:
    """Run all benchmarks and compare them with their aims."""
    unbatched = Row("one script call per acquire, redis-py pipeline", "acquires/s")
    distinct = Row(f"batches of {BATCH}, distinct buckets", "acquires/s")
    hot = Row(f"batches of {BATCH}, one hot bucket", "acquires/s")
    acquires = Row(f"through the batcher, {CALLERS} callers, one process", "acquires/s")
    settles = Row(f"through the batcher, {CALLERS} callers, one process", "settles/s")
    alone = Row("decided, no policy with overload control", "acquires/s")
    beside = Row("decided, another policy has overload control", "acquires/s")
    memory = Row(f"memory per bucket, {int(BUCKETS_MEASURED * scale):,} buckets", "bytes")
    kept = Row("memory per settled reservation, until it is forgotten", "bytes")
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        async with EmbeddedStore(Path(directory)) as store:
            console.print(f"store: {store.facts}; {rounds} rounds", style="dim")
            scripts = ScriptBench(store.url.removeprefix("unix://"))
            link = await open_link(store.url)
            through, deciding = BatcherBench(Buckets(link)), DeciderBench(Buckets(link))
            for number in range(rounds):
                console.print(f"round {number + 1} of {rounds}", style="dim")
                unbatched.figures.append(scripts.unbatched(int(20_000 * scale)))
                distinct.figures.append(
                    scripts.batched(int(1_500 * scale), lambda: CHANCE.sample(range(CUSTOMERS), BATCH))
                )
                hot.figures.append(scripts.batched(int(4_000 * scale), lambda: [0] * BATCH))
                acquired, settled = await through.round(int(40_000 * scale))
                acquires.figures.append(acquired)
                settles.figures.append(settled)
                decided_alone, decided_beside = await deciding.round(int(20_000 * scale))
                alone.figures.append(decided_alone)
                beside.figures.append(decided_beside)
            console.print("controller", style="dim")
            steered = await measure_controller(scripts.client, link, scale=scale)
            console.print("leases", style="dim")
            lent = measure_leases(scripts.client, rounds=rounds, scale=scale)
            console.print("memory", style="dim")
            memory.figures.append(scripts.bytes_per_bucket(int(BUCKETS_MEASURED * scale)))
            kept.figures.append(scripts.bytes_per_settle(int(SETTLES_MEASURED * scale)))
            await link.aclose()
    _judge(distinct, distinct.figure / unbatched.figure, 3, "one call per acquire")
    _judge(hot, hot.figure / distinct.figure, 3, "distinct buckets")
    _judge(acquires, acquires.figure / distinct.figure, 0.2, "batched calls")
    _judge(settles, settles.figure / distinct.figure, 0.2, "batched calls")
    ratios = [with_it / without for without, with_it in zip(alone.figures, beside.figures, strict=True)]
    _judge(beside, median(ratios), 0.9, "no policy with it")
    for row, most in ((memory, 300), (kept, 150)):
        row.aim, row.holds = f"at most {most}", row.figure <= most
    return [unbatched, distinct, hot, acquires, settles, alone, beside, memory, kept, *lent, *steered]


def measure_leases(client: redis.Redis, *, rounds: int, scale: float) -> list[Row]:
    """Measure renewals of leases beside acquires, and decisions that a holder makes alone."""
    one = Row("acquire, one in a call: the store's time", "µs")
    general = Row("the same, without the short way", "µs")
    few = Row(f"renewal of a lease, {FEW_HOLDERS} holders: the store's time", "µs")
    many = Row(f"renewal of a lease, {MANY_HOLDERS:,} holders: the store's time", "µs")
    bare = Row("decided by a holder, yes or no", "decisions/s")
    settled = Row("decided by a holder, with a grant and its settle", "decisions/s")
    slowest = Row("the same, 99th percentile", "µs")
    leases = LeaseBench(client)
    for _ in range(rounds):
        cost = leases.round(int(2_000 * scale), few=FEW_HOLDERS, many=MANY_HOLDERS)
        for row, figure in zip((one, general, few, many), cost, strict=True):
            row.figures.append(figure)
        for row, figure in zip((bare, settled, slowest), local_decisions(int(200_000 * scale)), strict=True):
            row.figures.append(figure)
    for row in (few, many):
        ratio = min(row.figures) / min(general.figures)  # the quietest turn of each: other programs only add
        row.aim = f"{ratio:.2f}× an acquire without the short way (at most {RENEWAL_MOST}×)"
        row.holds = ratio <= RENEWAL_MOST
    for row, least in ((bare, 2_000_000), (settled, 1_000_000)):
        row.aim, row.holds = f"at least {least:,}", max(row.figures) >= least
    slowest.aim, slowest.holds = "at most 5", min(slowest.figures) <= 5
    return [one, general, few, many, bare, settled, slowest]


async def measure_controller_alone(*, scale: float, console: Console) -> list[Row]:
    """Run only the controller's part."""
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as directory:
        async with EmbeddedStore(Path(directory)) as store:
            console.print(f"store: {store.facts}", style="dim")
            link = await open_link(store.url)
            rows = await measure_controller(_client(store.url.removeprefix("unix://")), link, scale=scale)
            await link.aclose()
    return rows


async def measure_controller(client: redis.Redis, link: Link, *, scale: float) -> list[Row]:
    """Measure the cost of the controller's cycle, of the tenth of a second that it may take."""
    tame_collector()  # as the controller does when it starts
    many, most, cycles = int(1_000 * scale), int(10_000 * scale), max(3, int(30 * scale))
    active = f"controller, a cycle over {many:,} active buckets"
    wall, own, store = (Row(f"{active}: {what}", "µs") for what in ("time", "its CPU", "the store's"))
    all_own, all_store = (Row(f"{active}, all at their limits: {what}", "µs") for what in ("its CPU", "the store's"))
    grown = Row(f"controller, a cycle over {most:,} active buckets: its CPU", "µs")
    idle = Row(f"controller, a cycle over {most:,} idle buckets: its CPU", "µs")
    cost = await ControllerBench(client, link, "active").measure(many, cycles=cycles)
    for row, figure in zip((wall, own, store), cost, strict=True):
        row.figures.append(figure)
    worst = await ControllerBench(client, link, "all").measure(many, cycles=cycles, limited=1.0)
    all_own.figures.append(worst.own_us)
    all_store.figures.append(worst.store_us)
    grown.figures.append((await ControllerBench(client, link, "most").measure(most, cycles=max(3, cycles // 4))).own_us)
    idle.figures.append((await ControllerBench(client, link, "idle").measure(most, cycles=cycles, active=False)).own_us)
    for row, most_us in ((wall, 100_000), (own, 25_000), (store, 10_000)):
        row.aim, row.holds = f"at most {most_us * scale:,.0f}", row.figure <= most_us * scale
    ratio = grown.figure / most / (own.figure / many)
    grown.aim, grown.holds = f"{ratio:.2f}× as much a bucket (at most 2×)", ratio <= 2
    idle.aim, idle.holds = "at most 1,000: they cost nothing", idle.figure <= 1_000
    turns = await measure_turns(client, link, buckets=int(100_000 * scale))
    return [wall, own, store, all_own, all_store, grown, idle, *turns]


async def measure_turns(client: redis.Redis, link: Link, *, buckets: int) -> list[Row]:
    """Measure how one controller follows many active buckets with overload control (S9)."""
    found = await ControllerBench(client, link, "turns", policy=GUARDED).measure_turns(buckets)
    what = f"controller, {buckets:,} active buckets with overload control"
    rows = [
        Row(f"{what}: its CPU a bucket and cycle", "ns", [found.bucket_us * 1000], "at most 12,000"),
        Row(f"{what}: each has its turn within", "ms", [found.turn_s * 1000], "at most 2,000"),
        Row(f"{what}: its memory a bucket", "bytes", [found.bucket_bytes], "at most 1,024"),
    ]
    for row, most in zip(rows, (12_000, 2_000, 1_024), strict=True):
        row.holds = row.figure <= most
    return rows


def _judge(row: Row, ratio: float, least: float, than: str) -> None:
    row.aim = f"{ratio:.2f}× {than} (at least {least}×)"
    row.holds = ratio >= least


def render(rows: list[Row]) -> Table:
    """The rows as a table."""
    table = Table(title="Headgate on this machine")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("unit")
    table.add_column("against")
    table.add_column("")
    for row in rows:
        mark = "" if not row.aim else "ok" if row.holds else "MISSED"
        table.add_row(row.what, f"{row.figure:,.0f}", row.unit, row.aim, mark)
    return table


def render_markdown(rows: list[Row]) -> str:
    """Return the rows as Markdown for the documents; a missed aim is marked."""
    lines = [
        f"| {row.what} | {row.figure:,.0f} {row.unit} | {row.aim}{'' if row.holds else ' **missed**'} |" for row in rows
    ]
    return "\n".join(["| what | figure | against |", "|---|---:|---|", *lines])


def main(*, rounds: int = 5, scale: float = 1.0, markdown: bool = False, controller: bool = False) -> bool:
    """Measure and print the table; return whether every aim was reached."""
    console = Console(stderr=True)
    if controller:
        rows = uvloop.run(measure_controller_alone(scale=scale, console=console))
    else:
        rows = uvloop.run(measure(rounds=rounds, scale=scale, console=console))
    if markdown:
        sys.stdout.write(render_markdown(rows) + "\n")
    else:
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140).print(render(rows))
    return all(row.holds for row in rows)
