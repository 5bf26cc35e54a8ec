"""A probe of answer times: a process that only asks, a few times per second over each of its connections.

    python -m loadtest.probe <file> <connections to each> <node>…

The users of a load test share one busy process and read answers long after they came. The probe sleeps nearly all the
time: it measures the node's time and the delays of this machine, and nothing is subtracted. It has a service and a
policy of its own, so that the limits under test are not affected.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import cycle
from pathlib import Path

import msgspec

from loadtest.headgate_processes import end, start
from loadtest.locust.limits import WorkLimit

EVERY_S = 0.2
"""Time from one acquire over a connection to the next."""
ANSWER_TIMEOUT_S = 5.0
SERVICE = "probe"
TENANTS = [f"t{number}" for number in range(20)]
"""Used in turn, so that every partition is asked."""
LIMIT = WorkLimit(name="probe", rate=1_000.0, capacity=1_000.0, debt_max=0.0, per=("tenant",))
HEADERS = {"Content-Type": "application/json"}


class Probed(msgspec.Struct):
    """One call."""

    at_s: float
    node: str
    latency_ms: float
    """Time until its answer was read, or it was known that none would come."""
    status: int
    """Status of HTTP; 0 if no answer came."""


@dataclass(frozen=True, slots=True)
class Times:
    """Durations of calls."""

    count: int
    late: int
    slowest_ms: float
    percentiles_ms: dict[float, float]

    @classmethod
    def of(cls, latencies_ms: Sequence[float], *, late_ms: float) -> Times:
        """Summarise the latencies."""
        ordered = sorted(latencies_ms)
        return cls(
            count=len(ordered),
            late=sum(one > late_ms for one in ordered),
            slowest_ms=ordered[-1] if ordered else 0.0,
            percentiles_ms={p: _percentile(ordered, p) for p in (50, 99, 99.9)},
        )


def _percentile(ordered: Sequence[float], p: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] if ordered else 0.0


def policy() -> str:
    """Return the probe's own limit, as in a policy file."""
    return LIMIT.policy(SERVICE)


@contextmanager
def probing(file: Path, addresses: Sequence[str], *, connections: int = 1) -> Iterator[None]:
    """Run a probe for as long as the block lasts; `read` returns its calls."""
    command = [sys.executable, "-m", "loadtest.probe", str(file), str(connections), *addresses]
    process = start(*command, env=dict(os.environ), is_heard=True)
    try:
        yield
    finally:
        end(process)


def read(file: Path) -> list[Probed]:
    """Read the calls that a probe wrote."""
    return [msgspec.json.decode(line, type=Probed) for line in file.read_bytes().splitlines()]


class Asker:
    """One connection to one node: acquire, settle, wait."""

    def __init__(self, address: str, tell: Callable[[Probed], object]) -> None:
        self._address = address
        self._tell = tell
        self._connection = HTTPConnection(address.removeprefix("http://"), timeout=ANSWER_TIMEOUT_S)

    def ask(self, tenant: str) -> None:
        """Acquire, and settle if granted."""
        descriptor = {"service": SERVICE, "tenant": tenant}
        status, answer = self._post("/v1/acquire", {"descriptor": descriptor, "work": 1})
        if status == 200:
            self._post("/v1/settle", {"reservation": json.loads(answer)["reservation"], "work": 1})

    def close(self) -> None:
        self._connection.close()

    def ask_for_ever(self, first_after_s: float) -> None:
        """Ask at its pace; a call that took longer is followed by the next at once."""
        due_s = time.perf_counter() + first_after_s
        for tenant in cycle(TENANTS):
            time.sleep(max(0.0, due_s - time.perf_counter()))
            self.ask(tenant)
            due_s = max(due_s + EVERY_S, time.perf_counter())

    def _post(self, path: str, body: object) -> tuple[int, bytes]:
        text = json.dumps(body).encode()
        began_s = time.perf_counter()
        try:
            self._connection.request("POST", path, text, HEADERS)
            answer = self._connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, HTTPException):
            self._connection.close()  # the next call opens it again
            status, content = 0, b""
        latency_ms = 1000 * (time.perf_counter() - began_s)
        self._tell(Probed(time.time(), self._address, latency_ms, status))
        return status, content


def main(file: str, connections: str, *addresses: str) -> None:
    """Ask until the process is ended."""
    everywhere = [address for address in addresses for _ in range(int(connections))]
    with Path(file).open("wb", buffering=0) as out:
        askers = [Asker(address, lambda one: out.write(msgspec.json.encode(one) + b"\n")) for address in everywhere]
        threads = [
            threading.Thread(target=asker.ask_for_ever, args=(EVERY_S * number / len(askers),))
            for number, asker in enumerate(askers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
