"""The `headgate` command: called in the test's process, run in a process of its own, or started and left running."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from typer.testing import CliRunner, Result

from limiter.cli.main import app
from tests.support.servers import free_port

HEADGATE = [sys.executable, "-c", "from limiter.cli.main import main; main()"]
Started = tuple[subprocess.Popen[str], list[str]]
"""A process, and the lines that it printed first."""


def environment(**settings: object) -> dict[str, str]:
    """Variables for a process: these settings of Headgate and no others."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    return inherited | {f"HEADGATE_{name.upper()}": str(value) for name, value in settings.items()}


def headgate(*arguments: str | Path, url: str = "", data_dir: Path | None = None) -> Result:
    """Call the command in this process."""
    settings: dict[str, str | None] = {name: None for name in os.environ if name.startswith("HEADGATE_")}
    settings |= {"HEADGATE_REDIS_URL": url, "HEADGATE_DATA_DIR": str(data_dir) if data_dir else None}
    return CliRunner().invoke(app, [*map(str, arguments)], env=settings)


def lines_of(result: Result, code: int = 0) -> list[str]:
    """The lines that a call printed; it fails if there are complaints, or another exit code."""
    assert (result.exit_code, result.stderr) == (code, ""), result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


def run_headgate(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own until it ends."""
    return subprocess.run(
        [*HEADGATE, *arguments], env=environment(**settings), capture_output=True, text=True, timeout=60, check=False
    )


@contextmanager
def started_headgate(command: str, lines: int = 4, /, **settings: object) -> Iterator[Started]:
    """Start `headgate api` or `headgate up`, and give it once it has printed some lines; kill it at the end."""
    with subprocess.Popen(
        [*HEADGATE, command],
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, [process.stdout.readline() for _ in range(lines)]
        finally:
            process.kill()


def headgate_up(settings: Mapping[str, object]) -> AbstractContextManager[Started]:
    """Start `headgate up` on a free port."""
    return started_headgate("up", 2, **{"port": free_port(), **settings})


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
