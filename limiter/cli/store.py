"""`headgate store`: what the store went through, and that somebody has seen it."""

import asyncio

import typer

from limiter.cli.policies import EXIT_TROUBLE, _clear_errors, _link, _when, _who
from limiter.store import inspect
from limiter.store.policies import losses

store_app = typer.Typer(help="The store.", no_args_is_help=True)


def register(root: typer.Typer) -> None:
    """Add the commands to `headgate`."""
    root.add_typer(store_app, name="store")


@store_app.command()
def loss() -> None:
    """Show whether the store lost its policies, and which are gone; exit 1 if it did and nobody acknowledged that."""
    with _clear_errors():
        found = asyncio.run(_read())
    if found is None:
        typer.echo("the store has lost nothing that was not acknowledged")
        return
    typer.echo(f"lost at {_when(found.when_us)}: revision {found.before} before, {found.after} after")
    if len(found.times) > 1:
        typer.echo(f"{len(found.times)} times in all, last at {_when(found.last_us)}")
    for namespace, name in found.policies:
        typer.echo(f"gone: {namespace}/{name}")
    if found.more:
        typer.echo(f"and {found.more} more")
    raise typer.Exit(EXIT_TROUBLE)


@store_app.command()
def acknowledge() -> None:
    """Say that a loss was seen: nodes stop warning of it."""
    with _clear_errors():
        found = asyncio.run(_acknowledge())
    typer.echo("there is nothing to acknowledge" if found is None else "acknowledged")


async def _read() -> losses.Loss | None:
    async with _link() as link:
        found, _ = await losses.read(link)
        return found


async def _acknowledge() -> losses.Loss | None:
    async with _link() as link:
        return await losses.acknowledge(link, _who(), await inspect.now_us(link))
