"""`headgate store`: show losses of policies, and acknowledge them."""

import asyncio

import typer

from limiter.cli.policy_commands import EXIT_TROUBLE, _clear_errors, _link, _when, _who
from limiter.store import inspect
from limiter.store.policies import losses

store_app = typer.Typer(help="Show and acknowledge losses of the store's policies.", no_args_is_help=True)


def register(root: typer.Typer) -> None:
    """Add the commands to `headgate`."""
    root.add_typer(store_app, name="store")


@store_app.command()
def loss() -> None:
    """Show whether the store lost its policies, and which. Exit status 1 if a loss is not acknowledged."""
    with _clear_errors():
        found = asyncio.run(_read())
    if found is None:
        typer.echo("no loss, or all losses are acknowledged")
        return
    typer.echo(f"lost at {_when(found.when_us)}: revision {found.before} before, {found.after} after")
    if len(found.times) > 1:
        typer.echo(f"{len(found.times)} losses, the last at {_when(found.last_us)}")
    for namespace, name in found.policies:
        typer.echo(f"gone: {namespace}/{name}")
    if found.more:
        typer.echo(f"and {found.more} more")
    raise typer.Exit(EXIT_TROUBLE)


@store_app.command()
def acknowledge() -> None:
    """Acknowledge a loss, so that nodes stop warning of it."""
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
