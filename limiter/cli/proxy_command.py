"""`headgate proxy`: one process in front of many short-lived clients (G7)."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from typing import Annotated

import typer
import uvicorn
import uvloop

from api.data.rate_limit_headers import HeaderSet
from api.server import BACKLOG, GRACE_S, KEEP_ALIVE_S, bind_to, serve_config, tame_collector, url_of
from api.transport import logs
from api.transport.fastlane import FastLane
from limiter.api_keys import is_loopback
from limiter.cli.proxy_app import ProxyApp, Upstream
from limiter.cli.proxy_plane import ProxyPlane, entry_of
from limiter.client.node_pool import FAILURES, NodePool
from limiter.client.proxy.desk import Desk, Rules
from limiter.model.policy.criticality import Criticality
from limiter.runtime.stopping import until_stopped
from limiter.settings import SettingsError

EXIT_SETTINGS = 2
LOOK_S = 0.5
PORT = 8090


class Local(StrEnum):
    """Leasing of descriptors that are asked for often."""

    AUTO = "auto"
    OFF = "off"


class Headers(StrEnum):
    """The sets of rate limit headers."""

    DRAFT = "draft"
    LEGACY = "legacy"
    X = "x"
    NONE = "none"


@dataclass(frozen=True)
class ProxyOptions:
    """The command's options."""

    upstream: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = PORT
    api_key: str | None = None
    client_key: str | None = None
    rules: Rules = field(default_factory=Rules)
    weight: float = 1.0
    connections_max: int = 16
    header_set: HeaderSet = "draft"


def register(root: typer.Typer) -> None:
    """Add the command to `headgate`."""
    root.command()(proxy)


def proxy(
    upstream: Annotated[str, typer.Option(help="The nodes, as http://a:8080,http://b:8080.", show_default=False)],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: a free one.")] = PORT,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The API key that the proxy sends to the nodes.", envvar="HEADGATE_PROXY_API_KEY", show_default=False
        ),
    ] = None,
    client_key: Annotated[
        str | None,
        typer.Option(
            help="The key that clients must send. Needed to listen on an address that others can reach.",
            envvar="HEADGATE_PROXY_CLIENT_KEY",
            show_default=False,
        ),
    ] = None,
    default_criticality: Annotated[
        Criticality, typer.Option(help="The class of requests that claim none.")
    ] = Criticality.SHEDDABLE_PLUS,
    local: Annotated[
        Local, typer.Option(help="auto: lease descriptors that are asked for often, and decide on them here.")
    ] = Local.OFF,
    weight: Annotated[
        float, typer.Option(min=0.001, max=1000, help="The proxy's weight among the holders of leases.")
    ] = 1.0,
    queue_max: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Operations that may wait for the nodes; others get a 503.")
    ] = 10_000,
    deadline_ms: Annotated[
        int, typer.Option(min=10, max=60_000, help="Milliseconds after which a waiting operation gets a 503.")
    ] = 1000,
    connections_max: Annotated[int, typer.Option(min=2, max=256, help="Connections to all nodes together.")] = 16,
    rate_limit_headers: Annotated[Headers, typer.Option(help="The headers of answers to acquires.")] = Headers.DRAFT,
) -> None:
    """Serve the data plane's API in front of the nodes: for many short-lived clients on a host, or of a job."""
    rules = Rules(
        default_criticality=default_criticality,
        queue_max=queue_max,
        deadline_s=deadline_ms / 1000,
        is_auto=local is Local.AUTO,
    )
    options = ProxyOptions(
        upstream=tuple(url.strip() for url in upstream.split(",") if url.strip()),
        host=host,
        port=port,
        api_key=api_key or None,
        client_key=client_key or None,
        rules=rules,
        weight=weight,
        connections_max=connections_max,
        header_set=rate_limit_headers.value,
    )
    try:
        check(options)
        sockets = bind_to(options.host, options.port, "choose another --host or --port")
    except SettingsError as error:
        typer.echo(f"headgate: {error}", err=True)
        raise typer.Exit(EXIT_SETTINGS) from None
    logs.keep_lines_whole()
    allow_connections()
    uvloop.run(until_stopped(serve_proxy(options, sockets, lambda: _say_ready(options, url_of(sockets, "http")))))


def check(options: ProxyOptions) -> None:
    """Raise `SettingsError` for options that cannot be meant."""
    try:
        NodePool(options.upstream)
    except ValueError as error:
        raise SettingsError(f"--upstream: {error}") from None
    if options.client_key is None and not is_loopback(options.host):
        raise SettingsError(
            f"--host is {options.host!r}, which others can reach, and there is no --client-key: everybody could spend "
            "what the proxy's API key may. Set HEADGATE_PROXY_CLIENT_KEY, or listen on 127.0.0.1"
        )


async def serve_proxy(options: ProxyOptions, sockets: Sequence[socket.socket], on_started: Callable[[], None]) -> None:
    """Serve until cancelled; then answer what waits, and give leases back."""
    pool = NodePool(options.upstream, api_key=options.api_key, connections_max=options.connections_max)
    desk = Desk(pool, options.rules, weight=options.weight)
    keys = [] if options.client_key is None else [entry_of(options.client_key)]
    plane, upstream = ProxyPlane(desk, keys, options.header_set), Upstream()
    config = uvicorn.Config(
        ProxyApp(plane, pool, upstream),
        http=FastLane,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    looking = asyncio.get_running_loop().create_task(_look_for(pool, upstream))
    try:
        await serve_config(config, sockets, on_started)
    finally:
        looking.cancel()
        await desk.close()


async def _look_for(pool: NodePool, upstream: Upstream) -> None:
    """Ask until a node answers."""
    while not upstream.was_reached:
        with suppress(*FAILURES, ValueError):
            status, _ = await pool.get("/healthz", by_s=time.monotonic() + LOOK_S)
            upstream.was_reached = status == 200
        if not upstream.was_reached:
            await asyncio.sleep(LOOK_S)


def allow_connections() -> None:
    """Raise the limit of open files as far as it may be: each client is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _say_ready(options: ProxyOptions, where: str) -> None:
    tame_collector()
    typer.echo(f"headgate {version('headgate')}: proxy at {where}, for {', '.join(options.upstream)}")
