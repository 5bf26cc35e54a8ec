"""The controller as a child of `headgate up`: started again when it dies, ended with its parent."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL
from functools import partial
from pathlib import Path

from limiter.metrics.processes import bury
from limiter.runtime import children

GRACE_S = 10.0

COMMAND = [sys.executable, "-c", "from limiter.cli.main import main; main()", "controller"]


async def keep_running(url: str, metrics_dir: Path) -> None:
    """Run a controller on the store of a URL, until cancelled. It writes its metrics into a directory."""
    await children.keep_running("the controller", partial(_run, url, metrics_dir))


async def _run(url: str, metrics_dir: Path) -> str:
    """Run it once and return how it ended; when cancelled, ask it to end and wait."""
    process = await asyncio.create_subprocess_exec(
        *children.bound(*COMMAND),
        env=os.environ | {"HEADGATE_REDIS_URL": url, "HEADGATE_METRICS_DIR": str(metrics_dir)},
        stdin=DEVNULL,
        stdout=DEVNULL,
        start_new_session=True,
    )
    try:
        return f"ended with {await process.wait()}"
    finally:
        await children.end(process, grace_s=GRACE_S)
        bury(metrics_dir, process.pid)
