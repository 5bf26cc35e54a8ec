"""Ending in order: the first signal asks for it, and a second one does not interrupt the clean-up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


async def until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run until the work ends, or cancel it on SIGINT or SIGTERM and let it clean up."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def stop() -> None:
        if not task.cancelling():
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    with suppress(asyncio.CancelledError):
        await task
