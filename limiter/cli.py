"""The `headgate` command. Errors are one line that says what to do next, never a traceback."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from typing import Annotated, Any

import typer
import uvloop

from limiter.settings import Settings, SettingsError
from limiter.store.connect import ServerFacts, open_link, probe
from limiter.store.embedded import EmbeddedStore
from limiter.store.errors import StoreError, StoreUnavailable
from limiter.store.urls import UrlError, mask

EXIT_STORE = 1
EXIT_SETTINGS = 2

app = typer.Typer(
    name="headgate",
    help="A distributed, work-based rate limiter and overload controller on Redis.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headgate {version('headgate')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def up() -> None:
    """Start Headgate on this machine, with an embedded store unless HEADGATE_REDIS_URL names one."""
    with _clear_errors():
        uvloop.run(_until_stopped(_up(Settings.load())))


@app.command()
def bench(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Measure this machine: scripts, batcher, bytes per bucket."""
    from limiter.bench import main as measure  # the other commands do without it

    if not measure(markdown=markdown):
        raise typer.Exit(1)


async def _up(settings: Settings) -> None:
    async with _store(settings) as (url, facts):
        print(f"headgate {version('headgate')}: ready", flush=True)
        print(f"  store  {facts} at {mask(url)}", flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def _store(settings: Settings) -> AsyncIterator[tuple[str, ServerFacts]]:
    """The store that the settings name, probed, or an embedded one, running."""
    if settings.redis_url is None:
        async with EmbeddedStore(settings.data_dir) as embedded:
            yield embedded.url, embedded.facts
        return
    url = settings.redis_url.get_secret_value()
    link = await open_link(url)
    try:
        yield url, await probe(link)
    finally:
        await link.aclose()


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Do the work until it ends or SIGINT or SIGTERM comes, and let it clean up."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        _fail(str(error), EXIT_SETTINGS)
    except UrlError as error:
        _fail(f"HEADGATE_REDIS_URL: {error}", EXIT_SETTINGS)
    except StoreUnavailable as error:
        _fail(f"cannot reach the store ({error}); is it running where HEADGATE_REDIS_URL says?", EXIT_STORE)
    except StoreError as error:
        _fail(str(error), EXIT_STORE)


def _fail(message: str, code: int) -> None:
    for line in message.splitlines():
        typer.echo(f"headgate: {line}", err=True)
    raise typer.Exit(code)
