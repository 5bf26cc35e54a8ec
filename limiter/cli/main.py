"""The `headgate` command. Errors are one line that says what to do next, never a traceback."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from api.server import serve, tame_collector
from api.transport import logs
from limiter.api_keys import KeyEntryError, new_key
from limiter.cli import liveness, policy_commands, proxy_command, uncovered_command
from limiter.cli import store as cli_store
from limiter.cli.controller_child import keep_running
from limiter.cli.controller_metrics import shown
from limiter.cli.policy_commands import embedded_url
from limiter.controller.worker import Controller
from limiter.metrics.processes import shared
from limiter.model.policy.problems import PolicyError
from limiter.runtime.stopping import until_stopped
from limiter.settings import PREFIX, Settings, SettingsError
from limiter.store.link.connect import open_link, probe
from limiter.store.link.embedded import EmbeddedStore
from limiter.store.link.urls import UrlError, mask
from limiter.store.store_errors import StoreError, StoreUnavailable

start = logging.getLogger("headgate.start")

EXIT_STORE = 1
EXIT_SETTINGS = 2
EXAMPLE = '{"descriptor": {"service": "orders", "operation": "read", "customer": "c1"}, "work": 3}'

app = typer.Typer(
    name="headgate",
    help="Rate limiting and overload control for work of very different cost, on Redis or Valkey.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
policy_commands.register(app)
uncovered_command.register(app)
proxy_command.register(app)
cli_store.register(app)


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


Host = Annotated[str | None, typer.Option(help="The address to listen on.", envvar="HEADGATE_HOST")]
# Numbers stay text: the settings check them, with clear messages.
Port = Annotated[str | None, typer.Option(help="The port to listen on.", envvar="HEADGATE_PORT", metavar="NUMBER")]
Workers = Annotated[
    str | None, typer.Option(help="The number of API processes.", envvar="HEADGATE_WORKERS", metavar="NUMBER")
]
Policies = Annotated[Path | None, typer.Option(help="A policy file, applied at start.", envvar="HEADGATE_POLICIES")]


@app.command()
def up(host: Host = None, port: Port = None, workers: Workers = None, policies: Policies = None) -> None:
    """Start API and controller on this machine, with an embedded store unless HEADGATE_REDIS_URL is set."""
    _serve(_up, host=host, port=port, workers=workers, policies=policies)


@app.command()
def api(host: Host = None, port: Port = None, workers: Workers = None, policies: Policies = None) -> None:
    """Serve the HTTP API."""
    _serve(_api, host=host, port=port, workers=workers, policies=policies)


@app.command()
def controller() -> None:
    """Run a controller, which steers caps, charges and shares. Any number may run."""
    with _clear_errors():
        uvloop.run(until_stopped(_controller(_settings())))


@app.command()
def health(host: Host = None, port: Port = None) -> None:
    """Check whether the API on this machine is alive, using its settings. Exit status 0 if it is."""
    options = {"HEADGATE_HOST": host, "HEADGATE_PORT": port}
    os.environ.update({name: given for name, given in options.items() if given is not None})
    raise typer.Exit(liveness.main())


keys_app = typer.Typer(help="Create API keys.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


@keys_app.command("new")
def new_api_key(
    name: Annotated[str, typer.Argument(help="A name for the key, shown in logs and in the audit log.")],
    role: Annotated[str, typer.Option(help="What the key may do: caller, viewer or admin.")] = "caller",
    namespace: Annotated[str | None, typer.Option(help="The only namespace that the key may use.")] = None,
    max_criticality: Annotated[str | None, typer.Option(help="The highest class that its requests may have.")] = None,
) -> None:
    """Create an API key. It is shown once and stored nowhere."""
    try:
        key, entry = new_key(name, role, namespace, max_criticality)
    except KeyEntryError as error:
        _fail(str(error), EXIT_SETTINGS)
    else:
        print(f"key    {key}")
        print(f"entry  {entry}")
        typer.echo(
            "Give the key to its holder, and add the entry to HEADGATE_API_KEYS (separated by commas).", err=True
        )


@app.command()
def bench(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    controller: Annotated[bool, typer.Option("--controller", help="Measure only the controller's cycle.")] = False,
) -> None:
    """Measure this machine: scripts, batcher, memory per bucket, the controller's cycle."""
    from limiter.cli.bench import main as measure  # the other commands do not need it

    if not measure(markdown=markdown, controller=controller):
        raise typer.Exit(1)


def _serve(work: Callable[[Settings], Coroutine[Any, Any, None]], **options: object) -> None:
    # Options set the variables of the same name, so that workers, which read the environment, have them, too.
    os.environ.update({f"{PREFIX}{name.upper()}": str(given) for name, given in options.items() if given is not None})
    with _clear_errors():
        uvloop.run(until_stopped(work(_settings())))


def _settings() -> Settings:
    """Return the settings of a serving process, and set up its logs."""
    if os.environ.get("HEADGATE_LOG_FORMAT") == "json":  # also for messages about the settings
        logs.configure("json")
    settings = Settings.load()
    logs.configure(settings.log_format, settings.log_level)
    logs.keep_lines_whole()
    return settings


async def _api(settings: Settings) -> None:
    async with _store(settings) as (url, state):
        await serve(settings, url, on_started=lambda where: _say_ready(settings, where, f"{state} at {mask(url)}"))


async def _up(settings: Settings) -> None:
    with shared(settings) as settings:
        await _serve_and_steer(settings)


async def _serve_and_steer(settings: Settings) -> None:
    assert settings.metrics_dir is not None
    metrics_dir = settings.metrics_dir
    async with _store(settings) as (url, state):
        steering: list[asyncio.Task[None]] = []

        def started(where: str) -> None:
            _say_ready(settings, where, f"{state} at {mask(url)}")
            # A separate process: its computations must not delay an answer.
            steering.append(asyncio.create_task(keep_running(url, metrics_dir)))

        try:
            await serve(settings, url, on_started=started)
        finally:
            for task in steering:
                task.cancel()
            await asyncio.gather(*steering, return_exceptions=True)


async def _controller(settings: Settings) -> None:
    url = embedded_url(settings.data_dir) if settings.redis_url is None else settings.redis_url.get_secret_value()
    link = await open_link(url)
    try:
        steers = Controller(link, cycle_ms=settings.cycle_ms, lease_ms=settings.lease_ms)
        async with shown(steers, settings):
            await steers.run(lambda what: _say_steering(steers, what, settings, mask(url)))
    finally:
        await link.aclose()


def _say_steering(steers: Controller, what: str, settings: Settings, store: str) -> None:
    tame_collector()
    if settings.log_format == "json":
        start.info("steering", extra={"fields": {"controller": steers.name, "store": store, "steers": what}})
        return
    own = f"headgate {version('headgate')}: controller {steers.name}"
    print(f"{own} steers every {settings.cycle_ms} ms, at {store}: {what}", flush=True)


NOT_REACHED = "not reached yet"


def _say_ready(settings: Settings, where: str, store: str) -> None:
    tame_collector()
    guard = "" if settings.api_keys else "; no API keys, so everybody who can reach this address may do everything"
    key = " -H 'authorization: Bearer <key>'" if settings.api_keys else ""
    state = "serving, and waiting for its store" if store.startswith(NOT_REACHED) else "ready"
    if settings.log_format == "json":
        start.info(state, extra={"fields": {"version": version("headgate"), "api": where, "store": store}})
        return
    print(f"headgate {version('headgate')}: {state}")
    print(f"  store  {store}")
    print(f"  api    {where} ({where}/docs{guard})")
    print(f"  try    curl -si {where}/v1/acquire -H 'content-type: application/json'{key} -d '{EXAMPLE}'", flush=True)


@asynccontextmanager
async def _store(settings: Settings) -> AsyncIterator[tuple[str, str]]:
    """Yield the configured store, or a running embedded one, with its state."""
    if settings.redis_url is None:
        async with EmbeddedStore(settings.data_dir) as embedded:
            yield embedded.url, str(embedded.facts)
        return
    url = settings.redis_url.get_secret_value()
    link = await open_link(url)
    try:
        state = str(await probe(link))
    except StoreUnavailable as error:
        state = f"{NOT_REACHED} ({error})"  # the node serves without the store, and connects later (F-S2)
    finally:
        await link.aclose()
    yield url, state


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        _fail(str(error), EXIT_SETTINGS)
    except UrlError as error:
        _fail(f"HEADGATE_REDIS_URL: {error}", EXIT_SETTINGS)
    except (StoreError, PolicyError) as error:
        _fail(str(error), EXIT_STORE)


def _fail(message: str, code: int) -> None:
    for line in message.splitlines():
        if any(isinstance(handler.formatter, logs.JsonFormatter) for handler in logging.root.handlers):
            start.critical(line)
        else:
            typer.echo(f"headgate: {line}", err=True)
    raise typer.Exit(code)
