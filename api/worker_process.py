"""A worker: one of several processes that serve the API. The supervisor starts it.

    python -m api.worker_process <pipe> <socket>…

The arguments are file descriptors. The worker writes one byte into the pipe once it serves; the sockets already listen.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

import uvloop

from api.server import serve_here, tame_collector
from api.transport import logs
from limiter.runtime.stopping import until_stopped
from limiter.settings import Settings


async def _main(told: int, sockets: list[socket.socket]) -> None:
    settings = Settings.load()
    logs.keep_lines_whole()
    assert settings.redis_url is not None, "the supervisor names the store"
    url = settings.redis_url.get_secret_value()
    await until_stopped(serve_here(settings, url, sockets, lambda: _say_started(told)))


def _say_started(told: int) -> None:
    tame_collector()
    with suppress(OSError):
        os.write(told, b"1")


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1]), [socket.socket(fileno=int(number)) for number in sys.argv[2:]]))
