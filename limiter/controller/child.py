"""The controller as a child of `headgate up`: started anew when it dies, ended with its parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from pathlib import Path

from limiter.metrics.processes import bury
from limiter.store.link import launch

log = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
STEADY_S = 10.0
GRACE_S = 10.0

COMMAND = [sys.executable, "-c", "from limiter.cli.main import main; main()", "controller"]


async def keep_running(url: str, metrics_dir: Path) -> None:
    """Have a controller on the store at a URL, until cancelled. It leaves its metrics in a directory."""
    loop = asyncio.get_running_loop()
    backoff_s = BACKOFF_MIN_S
    while True:
        since_s = loop.time()
        code = await _run(url, metrics_dir)
        backoff_s = BACKOFF_MIN_S if loop.time() - since_s > STEADY_S else min(2 * backoff_s, BACKOFF_MAX_S)
        log.error("the controller ended with %d; another one starts in %.1f s", code, backoff_s)
        await asyncio.sleep(backoff_s)


async def _run(url: str, metrics_dir: Path) -> int:
    """One life; cancelled, it is asked to end and waited for."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, launch.__file__, str(os.getpid()), *COMMAND,
        env=os.environ | {"HEADGATE_REDIS_URL": url, "HEADGATE_METRICS_DIR": str(metrics_dir)},
        stdin=DEVNULL, stdout=DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        return await process.wait()
    finally:
        await _end(process)
        bury(metrics_dir, process.pid)


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
