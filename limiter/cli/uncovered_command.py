"""`headgate uncovered`: the requests that no policy covers, as a running node has counted them (P7).

Unlike the other commands it asks a node and not the store: uncovered requests are never sent to the store.
"""

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

import typer

from limiter.cli.policy_commands import EXIT_TROUBLE, EXIT_USAGE, _escaped, _failure, _print, _table, _when

TIMEOUT_S = 10.0


def register(root: typer.Typer) -> None:
    """Add the command to `headgate`."""
    root.command()(uncovered)


def uncovered(
    url: Annotated[str, typer.Option(help="The node to ask.")] = "http://127.0.0.1:8080",
    namespace: Annotated[str | None, typer.Option(help="Only this namespace.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="The most rows to show.")] = 20,
    key_file: Annotated[
        Path | None, typer.Option(help="A file with the API key of a viewer or an admin.", show_default=False)
    ] = None,
) -> None:
    """Show the most frequent requests that no policy covers, with the names that were probably meant."""
    query = {"limit": limit} | ({} if namespace is None else {"namespace": namespace})
    rows = _ask(f"{url.rstrip('/')}/v1/uncovered?{urlencode(query)}", key_file)["uncovered"]
    table = _table("requests", "namespace", "dimensions", "probably meant", "last seen", "example")
    for row in rows:
        table.add_row(*_cells(row))
    _print(table)
    if not rows:
        typer.echo("a policy covered every request that this process has seen")


def _cells(row: dict[str, Any]) -> list[str]:
    meant = "; ".join(f"{_escaped(name)}: did you mean {_escaped(known)}?" for name, known in row["nearest"].items())
    namespace = _escaped(row["namespace"])
    return [
        str(row["count"]),
        namespace if row["namespace_known"] else f"{namespace} (not declared)",
        ", ".join(_escaped(name) for name in row["dimensions"]),
        meant,
        _when(row["last_seen_ms"] * 1000),
        "; ".join(json.dumps(example) for example in row["examples"][:1]),
    ]


def _ask(url: str, key_file: Path | None) -> dict[str, Any]:
    if urlsplit(url).scheme not in ("http", "https"):
        raise _failure("--url: it must begin with http:// or https://", EXIT_USAGE)
    try:
        headers = {} if key_file is None else {"Authorization": f"Bearer {key_file.read_text().strip()}"}
    except OSError as error:
        raise _failure(f"--key-file: {error}", EXIT_USAGE) from None
    try:
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_S) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as error:
        raise _failure(f"the node refused: {_escaped(_detail(error))}", EXIT_TROUBLE) from None
    except (OSError, ValueError) as error:
        told = f"cannot ask {_escaped(url)} ({error}); does a node run there? --url names one"
        raise _failure(told, EXIT_TROUBLE) from None


def _detail(error: HTTPError) -> str:
    """Return the detail of a problem, or its status."""
    try:
        return str(json.loads(error.read(65_536))["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"
