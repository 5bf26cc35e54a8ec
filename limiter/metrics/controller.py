"""How a controller's metrics are shown.

beside an API, under `headgate up`   left in its directory: one address and one scrape for all of it
by itself                            on HEADGATE_METRICS_PORT, if one is given: it serves nothing else

No key is asked for on that port: it shows numbers and nothing of any client, and a network policy says who reaches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from limiter.controller.worker import Controller
from limiter.metrics import exposition, readings
from limiter.metrics.exposition import Scraped
from limiter.metrics.processes import Shelf
from limiter.settings import Settings, SettingsError


@asynccontextmanager
async def shown(steers: Controller, settings: Settings) -> AsyncIterator[None]:
    """Show the metrics of a controller meanwhile, as the settings say."""
    if settings.metrics_dir is not None:
        leaving = asyncio.create_task(Shelf(settings.metrics_dir, lambda: readings.controller(steers)).run())
        try:
            yield
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
    elif settings.metrics_port is not None:
        with _serving(steers, settings.host, settings.metrics_port):
            yield
    else:
        yield


@contextmanager
def _serving(steers: Controller, host: str, port: int) -> Iterator[None]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scraped(lambda: exposition.families([exposition.info(), *readings.controller(steers)])))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        problem = f"cannot listen on {host} port {port} ({error.strerror}): set HEADGATE_HOST or HEADGATE_METRICS_PORT"
        raise SettingsError(problem) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
