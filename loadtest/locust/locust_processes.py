"""Locust as processes: one, or a master and its workers on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loadtest.headgate_processes import end, start

FILE = Path(__file__).with_name("locustfile.py")
STOP_TIMEOUT_S = 5
"""How long users may take to end their requests when the run is over."""
GRACE_S = 60.0
"""Time beyond the run itself: to start, to stop, to write the report."""


class LocustFailure(Exception):
    """Locust did not run to its end."""


def run_locust(arguments: Sequence[str], *, seconds: float, workers: int = 0) -> None:
    """Run to the end. Failed requests are judged by the thresholds, hence `--exit-code-on-error`."""
    with locust(arguments, workers=workers) as process:
        wait(process, seconds + GRACE_S)


def wait(process: subprocess.Popen[str], within_s: float) -> None:
    """Wait for its end; raise LocustFailure unless it succeeds."""
    try:
        status = process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        raise LocustFailure(f"Locust did not end within {within_s:.0f} s") from None
    if status != 0:
        raise LocustFailure(f"Locust ended with {status}; what it wrote above says why")


@contextmanager
def locust(arguments: Sequence[str], *, workers: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run Locust headless; with workers, yield their master."""
    common = [sys.executable, "-m", "locust", "-f", str(FILE), "--loglevel", "WARNING", *arguments]
    headless = ["--headless", "--only-summary", "--exit-code-on-error", "0", "--stop-timeout", str(STOP_TIMEOUT_S)]
    with ExitStack() as ending:
        if not workers:
            process = start(*common, *headless, env=_environment(), is_heard=True)
        else:
            port = str(_free_port())
            bind = ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
            expected = ["--expect-workers", str(workers), "--expect-workers-max-wait", "30"]
            process = start(*common, *headless, *bind, *expected, env=_environment(), is_heard=True)
            joined = ["--worker", "--master-host", "127.0.0.1", "--master-port", port]
            for _ in range(workers):
                ending.callback(end, start(*common, *joined, env=_environment(), is_heard=True))
        ending.callback(end, process)
        yield process


def _environment() -> dict[str, str]:
    """Return the environment without Locust's settings: a run gets everything as arguments."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
