"""Processes of Headgate for a run on this machine: each on a port of its own, none outlives its starter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from limiter.runtime import children

ROOT = Path(__file__).parent.parent
ENDS_WITHIN_S = 20.0


class StartFailure(Exception):
    """A process did not start."""


class Process:
    """One `headgate …` with settings, started."""

    def __init__(self, *command: str, **settings: object) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        environment = inherited | {f"HEADGATE_{name.upper()}": str(value) for name, value in settings.items()}
        self.command = command
        self.running = start(
            sys.executable, "-c", "from limiter.cli.main import main; main()", *command, env=environment
        )

    @cached_property
    def greeting(self) -> str:
        """All lines up to the one that says that it is ready. Waits for it."""
        assert self.running.stdout is not None
        lines = []
        for line in self.running.stdout:
            lines.append(line)
            if line.startswith("  try ") or ": controller " in line:
                return "".join(lines)
        raise StartFailure(f"`headgate {' '.join(self.command)}` ended with {self.running.wait()}; it said above why")

    @property
    def address(self) -> str:
        """The URL of an API: http://host:port."""
        found = re.search(r"^  api +(\S+)", self.greeting, re.MULTILINE)
        assert found is not None, self.greeting
        return found[1]

    @property
    def controller(self) -> str:
        """The name of a controller."""
        return self.greeting.split("controller ")[1].split()[0]

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        end(self.running, number)


def start(*command: str, env: dict[str, str], is_heard: bool = False) -> subprocess.Popen[str]:
    """Start a program that ends when this process does. Its output can be read, or joins that of this process."""
    bound = children.bound(*command)
    output = None if is_heard else subprocess.PIPE
    return subprocess.Popen(bound, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, text=True)


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal and wait; kill a process that ignores it."""
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.communicate(timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


@contextmanager
def headgate(*command: str, **settings: object) -> Iterator[Process]:
    """Run a process for as long as the block lasts."""
    process = Process(*command, **settings)
    try:
        yield process
    finally:
        process.stop()


def await_ready(address: str, *, within_s: float = 30.0) -> None:
    """Wait until a node is ready for traffic."""
    give_up_s = time.monotonic() + within_s
    while not is_ready(address):
        if time.monotonic() > give_up_s:
            raise StartFailure(f"{address} was not ready within {within_s:g} s; ask {address}/readyz why")
        time.sleep(0.05)


def is_ready(address: str) -> bool:
    """True if a node is ready for traffic."""
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=1) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except OSError:
        return False
