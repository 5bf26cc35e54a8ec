"""Serving: one process, or several that share a socket.

    cancelled ──► the last call ──► requests in flight are answered ──► the engine drains ──► done (F-H8)

Several workers are children of one supervisor, which binds the socket and gives it to each: a connection goes to the
worker that accepts it first, and none waits at a worker that has died. Workers end with the supervisor, however it
ends. In an orderly end it closes the socket before it stops them: the last worker to close it has accepted all
connections.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.transport import logs
from api.transport.fastlane import FastLane
from api.transport.guard import GuardedProtocol
from api.transport.last_call import last_call, turn_away
from api.transport.tracing import Tracing, open_tracing
from limiter.engine.engine import Engine, open_engine
from limiter.engine.policy_file import load_policy_file
from limiter.metrics.processes import bury, shared
from limiter.runtime import children
from limiter.settings import Settings, SettingsError

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75
GRACE_S = 30
GARBAGE_MIN = 100_000  # new objects before the collector runs

Started = Callable[[], None]


class _Server(uvicorn.Server):
    """uvicorn's server, ended by cancelling and not by signals, which belong to the process that runs it."""

    def __init__(self, config: uvicorn.Config, on_started: Started) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and call `on_started`."""
        await self.on_tick(0)  # so that the first answers have a date, too
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections that have arrived, close the socket, and answer all requests."""
        await last_call(sockets or [])
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def tame_collector() -> None:
    """Make the garbage collector run seldom, and skip the objects of start-up.

    Nothing on the hot path forms cycles, so its objects are freed at once; with thousands of requests in flight the
    collector's usual frequency would cost more than serving them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, 20, 20)


async def serve(settings: Settings, url: str, *, on_started: Callable[[str], None] = lambda _: None) -> None:
    """Serve the API on the store of a URL until cancelled; then answer the requests in flight, and return.

    `on_started` receives the API's address. Raises `SettingsError` or `PolicyError` before anything listens (F-P1).
    """
    settings.check_exposure()
    if settings.policies is not None:
        load_policy_file(settings.policies)
    sockets = bind(settings)
    where = address(sockets, settings)
    if settings.workers == 1:
        await serve_here(settings, url, sockets, lambda: on_started(where))
    else:
        with shared(settings) as settings:
            await supervise(settings, url, sockets, lambda: on_started(where))


async def serve_here(
    settings: Settings, url: str, sockets: Sequence[socket.socket], on_started: Started = lambda: None
) -> None:
    """Serve from this process."""
    logs.configure(settings.log_format, settings.log_level)
    async with _running_engine(settings, url) as engine, _open_tracing(settings) as tracing:
        await serve_config(_config(create_app(engine, settings, tracing), settings), sockets, on_started)


async def serve_config(config: uvicorn.Config, sockets: Sequence[socket.socket], on_started: Started) -> None:
    """Serve an application until cancelled, then answer the requests in flight."""
    server = _Server(config, on_started)
    serving = asyncio.create_task(server.serve(list(sockets)))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


@asynccontextmanager
async def _running_engine(settings: Settings, url: str) -> AsyncIterator[Engine]:
    engine = await open_engine(settings, url)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def _open_tracing(settings: Settings) -> AsyncIterator[Tracing | None]:
    tracing = open_tracing(settings)
    try:
        yield tracing
    finally:
        if tracing is not None:
            # Its end waits for the collector of traces, within its own bounds.
            await asyncio.to_thread(tracing.close)


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=FastLane if settings.fast_lane else GuardedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # `api.transport.access` writes a better one
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )


def bind(settings: Settings) -> list[socket.socket]:
    """Return sockets on the configured address; raise `SettingsError` if it is not available."""
    return bind_to(settings.host, settings.port, "set HEADGATE_HOST or HEADGATE_PORT")


def bind_to(host: str, port: int, remedy: str) -> list[socket.socket]:
    """Return sockets on an address; raise `SettingsError` with the remedy if it is not available."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, number, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, number)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
            if port == 0:
                break  # another family would get another port
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise SettingsError(f"cannot listen on {host} port {port} ({error.strerror or error}): {remedy}") from None
    return sockets


def address(sockets: Sequence[socket.socket], settings: Settings) -> str:
    """Return the API's URL."""
    return url_of(sockets, "https" if settings.tls_certificate else "http")


def url_of(sockets: Sequence[socket.socket], scheme: str) -> str:
    """Return the URL of the first socket."""
    host, port = sockets[0].getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def supervise(
    settings: Settings, url: str, sockets: Sequence[socket.socket], on_started: Started = lambda: None
) -> None:
    """Keep the configured number of workers running, until cancelled."""
    for bound in sockets:
        bound.listen(BACKLOG)
        bound.set_inheritable(True)
    started = [asyncio.Event() for _ in range(settings.workers)]
    async with asyncio.TaskGroup() as group:
        try:
            for event in started:
                live = partial(_run_worker, _worker_environment(settings, url), sockets, event)
                group.create_task(children.keep_running("a worker", live))
            for event in started:
                await event.wait()
            on_started()
            await asyncio.Event().wait()  # until cancelled
        finally:  # before the task group stops the workers
            turn_away(sockets)
            for bound in sockets:
                bound.close()


def _worker_environment(settings: Settings, url: str) -> dict[str, str]:
    assert settings.metrics_dir is not None, "several processes are scraped as one"
    return os.environ | {"HEADGATE_REDIS_URL": url, "HEADGATE_METRICS_DIR": str(settings.metrics_dir)}


async def _run_worker(environment: Mapping[str, str], sockets: Sequence[socket.socket], started: asyncio.Event) -> str:
    """Run one worker and return how it ended; when cancelled, ask it to end and wait."""
    says, told = os.pipe()
    fds = [bound.fileno() for bound in sockets]
    worker = [sys.executable, "-m", "api.worker_process", str(told), *map(str, fds)]
    loop = asyncio.get_running_loop()
    loop.add_reader(says, _hear, says, started)
    try:
        process = await asyncio.create_subprocess_exec(*children.bound(*worker), env=environment, pass_fds=[told, *fds])
        os.close(told)
        try:
            return f"ended with {await process.wait()}"
        finally:
            await children.end(process, grace_s=GRACE_S + 5)
            bury(Path(environment["HEADGATE_METRICS_DIR"]), process.pid)
    finally:
        loop.remove_reader(says)
        os.close(says)


def _hear(says: int, started: asyncio.Event) -> None:
    asyncio.get_running_loop().remove_reader(says)
    if os.read(says, 1):
        started.set()
