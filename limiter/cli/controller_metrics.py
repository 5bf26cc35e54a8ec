"""Where a controller's metrics are shown.

    beside an API, under `headgate up`   in its directory: one address and one scrape for all of it
    by itself                            on HEADGATE_METRICS_PORT, if one is given: it serves nothing else

That port asks for no key: it shows numbers and nothing of any client, and a network policy controls access to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from limiter.controller.worker import Controller
from limiter.metrics import catalogue, exposition
from limiter.metrics.exposition import Scraped
from limiter.metrics.processes import Shelf
from limiter.metrics.readings import Reading, labelled, plain, plain_histogram
from limiter.settings import Settings, SettingsError


@asynccontextmanager
async def shown(steers: Controller, settings: Settings) -> AsyncIterator[None]:
    """Show a controller's metrics as the settings say, while the context is open."""
    if settings.metrics_dir is not None:
        leaving = asyncio.create_task(Shelf(settings.metrics_dir, lambda: controller(steers)).run())
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
    registry.register(Scraped(lambda: exposition.families([exposition.info(), *controller(steers)])))
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


def controller(steers: Controller) -> Iterable[Reading]:
    """Return the readings of one controller."""
    stats = steers.stats
    return (
        plain_histogram(catalogue.CYCLE_SECONDS, stats.cycle_seconds),
        plain(catalogue.CYCLE_BUCKETS, stats.buckets),
        plain(catalogue.CYCLE_SLIPS, stats.slips),
        plain(catalogue.CYCLE_FAILURES, stats.failures),
        labelled(catalogue.LEASES, {"taken": stats.leases_taken, "lost": stats.leases_lost}),
        plain(catalogue.OWNED, len(steers.owned)),
        plain(catalogue.STEERED, sum(len(plan.slots) for plan in steers.plans.values())),
    )
