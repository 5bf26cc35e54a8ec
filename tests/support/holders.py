"""Holders of leases in processes of their own, over HTTP: each asks, decides and writes down when it granted what.

A process writes eight bytes for each grant as soon as it is made, so that one that is killed leaves everything behind.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limiter.client.lease.holder import REPEAT_AFTER_S, Grant, Lease

ROOT = Path(__file__).parents[2]


class HolderProcess:
    """One holder that wants to grant so many requests a second, on schedule; it begins when it is made."""

    def __init__(
        self, port: int, descriptor: Mapping[str, str], demand: float, path: Path, *, work: float = 1.0
    ) -> None:
        self.path = path
        arguments = json.dumps([port, dict(descriptor), demand, str(path), work])
        self._process = subprocess.Popen([sys.executable, "-m", "tests.support.holders", arguments], cwd=ROOT)
        self.is_over = False

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._reap()

    def give_back(self) -> None:
        """End it in order: it gives its lease back."""
        self._process.terminate()
        self._reap()

    def stop(self) -> None:
        """Let it sleep, whatever it holds."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Wake it."""
        self._process.send_signal(signal.SIGCONT)

    def _reap(self) -> None:
        self._process.wait(20)
        self.is_over = True

    def grants_ns(self) -> list[int]:
        """When it granted, by the monotonic clock that all processes share."""
        raw = self.path.read_bytes() if self.path.exists() else b""
        return list(array("q", raw[: len(raw) // 8 * 8]))


def _hold(port: int, descriptor: dict[str, str], demand: float, path: Path, work: float) -> None:
    is_ending = False

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True

    signal.signal(signal.SIGTERM, end)
    wire = _Wire(port)
    lease = Lease(descriptor)
    due_s, ask_s, gap_s = time.monotonic(), 0.0, 1.0 / demand
    with path.open("ab", buffering=0) as kept:
        while not is_ending:
            now_s = time.monotonic()
            if now_s >= ask_s:
                ask_s = now_s + (lease.renew_in_ms / 1000 if _renew(lease, wire) else REPEAT_AFTER_S)
            if due_s < now_s - 1.0:
                due_s = now_s  # what a sleeper missed is not made up for
            while due_s <= now_s:
                due_s += gap_s
                if isinstance(lease.try_acquire(work), Grant):
                    kept.write(time.monotonic_ns().to_bytes(8, "little"))
            time.sleep(max(0.0, min(due_s, ask_s) - time.monotonic()))
    path_, body = lease.give_back()
    wire.post(path_, body)


def _renew(lease: Lease, wire: _Wire) -> bool:
    path, body = lease.ask()
    status, answer = wire.post(path, body)
    if status == 404 or (status == 409 and lease.number == 1):
        lease.begin_again()
        return False
    return status == 200 and lease.take(answer)


class _Wire:
    """A connection that is made again when it breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Send a request; 0 if it cannot be answered."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = self._connection.getresponse()
            return answer.status, json.loads(answer.read())
        except OSError:
            self._connection.close()
            self._connection = None
            return 0, None


@dataclass
class Watched:
    """All grants of a fleet, in order of time."""

    rate: float
    capacity: float
    times_ns: list[int] = field(default_factory=list)

    def add(self, grants_ns: Sequence[int]) -> None:
        """Count the grants of one holder, or of the plain callers."""
        self.times_ns = sorted([*self.times_ns, *grants_ns])

    def beyond(self) -> float:
        """The most that any window of w seconds has seen beyond capacity + rate · w; below zero: nothing."""
        left, at_ns, worst = self.capacity, 0, 0.0
        for now_ns in self.times_ns:
            left = min(self.capacity, left + (now_ns - at_ns) / 1e9 * self.rate) - 1.0
            at_ns, worst = now_ns, min(worst, left)
        return -worst

    def within(self, begin_ns: int, end_ns: int) -> int:
        """How many were granted between two times."""
        return sum(begin_ns <= now_ns < end_ns for now_ns in self.times_ns)


if __name__ == "__main__":
    given_port, given_descriptor, given_demand, given_path, given_work = json.loads(sys.argv[1])
    _hold(given_port, given_descriptor, given_demand, Path(given_path), given_work)
