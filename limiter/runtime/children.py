"""Child processes: bound to this one, started again when they end, ended in order.

    starts ──► lives ──► ends ──► a pause that doubles, from BACKOFF_MIN_S to BACKOFF_MAX_S ──► starts again

After a child has lived for STEADY_S, the pause before a restart is short again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn

from limiter.runtime import launch

log = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
STEADY_S = 10.0


def bound(*program: str) -> list[str]:
    """Return the command that runs a program which ends when this process ends (`limiter.runtime.launch`)."""
    return [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *program]


async def keep_running(what: str, live: Callable[[], Coroutine[Any, Any, str]]) -> NoReturn:
    """Run a child again whenever it ends, until cancelled. `live` runs it and returns how it ended: "ended with 1"."""
    loop = asyncio.get_running_loop()
    backoff_s = BACKOFF_MIN_S
    while True:
        since_s = loop.time()
        ended = await live()
        if loop.time() - since_s > STEADY_S:
            backoff_s = BACKOFF_MIN_S
        log.error("%s %s; it is started again in %.1f s", what, ended, backoff_s)
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)


async def end(process: Process, *, grace_s: float) -> None:
    """Send SIGTERM, so that it can end in order; SIGKILL if that takes longer than `grace_s`."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
