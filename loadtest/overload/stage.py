"""The processes around an experiment: a backend and `headgate up`, on free ports."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.http import Http

FILES_MIN = 8192
"""A thousand users hold two connections each, and so do their servers."""
END_S = 20.0
DEADLINE_MS = "1000"
"""The machine is at its limit on purpose: a decision that waits for the processor is not yet a store that is away."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The processes of an experiment, ready."""

    backend: Http
    headgate: Http


@contextmanager
def stage(policies: Sequence[dict[str, Any]], terms: BackendTerms) -> Iterator[Stage]:
    """A fresh backend, and a fresh Headgate with these policies."""
    _allow_files()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-overload-")))
        file = directory / "policies.yaml"
        file.write_text(yaml.safe_dump({"policies": list(policies)}, sort_keys=False))
        backend = stack.enter_context(_running([sys.executable, "-m", "loadtest.overload.backend", *terms.arguments]))
        headgate = stack.enter_context(
            _running(
                [sys.executable, "-c", "from limiter.cli.main import main; main()", "up", "--policies", str(file)],
                HEADGATE_PORT="0", HEADGATE_DATA_DIR=str(directory), HEADGATE_DEADLINE_MS=DEADLINE_MS,
            )
        )  # fmt: skip
        backend_url = f"http://127.0.0.1:{_line(backend)}"
        yield Stage(Http(backend_url), Http(_address(headgate)))


@contextmanager
def _running(command: list[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    process = subprocess.Popen(command, env=inherited | variables, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:  # a backend with a minute of work in its queue
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _line(process: subprocess.Popen[str]) -> str:
    """The next line of a process's output; an error if it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with {process.wait()} before it was ready")
    return line.strip()


def _address(headgate: subprocess.Popen[str]) -> str:
    while not (line := _line(headgate)).startswith("api "):
        pass
    return line.split()[1]


def _allow_files() -> None:
    """As many open files as this user may have, here and in what is started from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MIN if hard == resource.RLIM_INFINITY else min(FILES_MIN, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
