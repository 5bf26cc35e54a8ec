"""One of several processes that serve the API: `python -m api.worker <pipe> <socket>…`, started by the supervisor.

The numbers are file descriptors: one byte goes into the pipe once it serves; the sockets listen already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress

import uvloop

from api.server import serve_here, set_startup_aside
from limiter.settings import Settings


async def _main(told: int, sockets: list[socket.socket]) -> None:
    settings = Settings.load()
    assert settings.redis_url is not None, "the supervisor names the store"
    serving = asyncio.ensure_future(
        serve_here(settings, settings.redis_url.get_secret_value(), sockets, lambda: _say_started(told))
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


def _say_started(told: int) -> None:
    set_startup_aside()
    with suppress(OSError):
        os.write(told, b"1")


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1]), [socket.socket(fileno=int(number)) for number in sys.argv[2:]]))
