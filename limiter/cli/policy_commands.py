"""`headgate policies …` and `headgate inspect`: the limits, and the state of their buckets.

The commands talk to the store itself, so they work beside running nodes and without any. Exit status: 0 success, 1 the
store or the policies have a problem (or `diff` found a difference), 2 wrong usage.
"""

import asyncio
import getpass
import json
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from redis.exceptions import ResponseError
from rich.console import Console
from rich.table import Table

from limiter.engine.policy_file import load_policy_file
from limiter.model.bucket.bucket import Record, refill
from limiter.model.control.reasoning import Overload, Reasoning, reasoning
from limiter.model.control.stewardship import Lease
from limiter.model.policy.choices import Count
from limiter.model.policy.fields.kinds import is_name
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_log import AUDIT_MAX
from limiter.model.policy.policy_set import Namespace, PolicySet, warnings
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import dump
from limiter.settings import Settings, SettingsError
from limiter.store.inspect import PageQuery, list_buckets, list_steered
from limiter.store.inspect import now_us as store_now_us
from limiter.store.link.connect import Link, open_link
from limiter.store.link.embedded import SOCKET_PATH_MAX_BYTES
from limiter.store.link.urls import UrlError
from limiter.store.policies.policy_entries import API, DEFAULT, AuditEntry, Kept, Place
from limiter.store.policies.policy_sets import OnForeign, OwnedByOthers, parts_of
from limiter.store.policies.policy_store import PolicyMissing, PolicyStore, RevisionConflict
from limiter.store.store_errors import StoreError, StoreUnavailable

EXIT_TROUBLE = 1
EXIT_USAGE = 2
WIDTH_OF_A_FILE = 240

app = typer.Typer(help="Check, apply and show policies.", no_args_is_help=True)

PolicyFile = Annotated[Path, typer.Argument(metavar="FILE", help="A policy file, in YAML or JSON.", show_default=False)]
PolicyName = Annotated[str, typer.Argument(metavar="NAME", help="The policy's name.", show_default=False)]
OfNamespace = Annotated[str, typer.Option("--namespace", help="The policy's namespace.")]
Owner = Annotated[
    str | None,
    typer.Option(help="The owner of what the file applies. By default HEADGATE_POLICIES_OWNER.", show_default=False),
]


def register(root: typer.Typer) -> None:
    """Add the commands to `headgate`."""
    root.add_typer(app, name="policies")
    root.command()(inspect)


@app.command()
def check(file: PolicyFile) -> None:
    """Check whether a policy file is valid, and warn where it commits more than a backend can do. Needs no store."""
    with _clear_errors():
        policies = load_policy_file(file)
        typer.echo(f"{file}: {_count(policies)}, all valid")
        _warn(policies)


@app.command()
def apply(
    file: PolicyFile,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove policies of this owner that the file no longer contains.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace differing policies of other owners, and own them.")
    ] = False,
    owner: Owner = None,
) -> None:
    """Apply a policy file: all of it in one step, or nothing.

    Where the file differs from what another owns, nothing is applied.
    """
    with _clear_errors():
        asyncio.run(_apply(load_policy_file(file), owner=_owner_of(owner), prune=prune, take_over=take_over))


@app.command(name="list")
def list_(
    namespace: Annotated[str | None, typer.Option(help="Only this namespace.", show_default=False)] = None,
) -> None:
    """List the policies and namespaces in force, with their owners."""
    with _clear_errors():
        asyncio.run(_list(namespace))


@app.command()
def diff(file: PolicyFile, owner: Owner = None) -> None:
    """Show how a file differs from the policies in force. Exit status 1 if it does."""
    with _clear_errors():
        if asyncio.run(_diff(load_policy_file(file), _owner_of(owner))):
            raise typer.Exit(EXIT_TROUBLE)


@app.command()
def history(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The policy's name; without it, all changes.", show_default=False),
    ] = None,
    namespace: OfNamespace = DEFAULT,
    limit: Annotated[int, typer.Option(min=1, max=AUDIT_MAX, help="The most changes to show.")] = 50,
) -> None:
    """Show the changes of a policy, or of all policies and namespaces: when, by whom, newest first."""
    with _clear_errors():
        asyncio.run(_audit(limit) if name is None else _history(namespace, name, limit))


@app.command()
def rollback(
    name: PolicyName,
    revision: Annotated[int, typer.Argument(min=1, help="A revision from its history.", show_default=False)],
    namespace: OfNamespace = DEFAULT,
) -> None:
    """Roll a policy back to an earlier revision. No file undoes that without --take-over."""
    with _clear_errors():
        asyncio.run(_rollback(namespace, name, revision))


def inspect(
    policy: Annotated[str | None, typer.Option(help="Only the buckets of this policy.", show_default=False)] = None,
    namespace: Annotated[str, typer.Option(help="The namespace of the buckets.")] = "default",
    contains: Annotated[str, typer.Option(help="Only buckets whose name contains this text.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="The most buckets to show.")] = 50,
    why: Annotated[bool, typer.Option("--why", help="Show who steers them, and why, for the last cycles.")] = False,
) -> None:
    """Show live buckets with their balances and counts, or (--why) why the controller steers them as it does."""
    with _clear_errors():
        asyncio.run((_explain if why else _inspect)(namespace, policy, contains, limit))


async def _apply(policies: PolicySet, *, owner: str, prune: bool, take_over: bool) -> None:
    async with _store() as store:
        foreign: OnForeign = "take_over" if take_over else "refuse"
        applied = await store.apply(policies, who=_who(), owner=owner, prune=prune, foreign=foreign)
        in_force = (await store.load()).policies
    for sign, places in (("+", applied.made), ("~", applied.changed), ("-", applied.removed)):
        for place in places:
            typer.echo(f"{sign} {_escaped(place.title)}")
    done = "nothing to change" if applied.is_nothing else "in force"
    typer.echo(f"{_count(policies)}, {done} (revision {applied.revision})")
    _warn(in_force)


def _warn(policies: PolicySet) -> None:
    for warning in warnings(policies):
        _complain(f"warning: {_escaped(warning)}")


def _owner_of(given: str | None) -> str:
    owner = Settings.load().policies_owner if given is None else given
    if not is_name(owner):
        raise typer.BadParameter("1 to 64 letters, digits, '.', '_' or '-'", param_hint="--owner")
    return owner


async def _list(namespace: str | None) -> None:
    async with _store() as store:
        stored = await store.load()
    table = _table("policy", "namespace", "match", "per", "limit", "owner", "revision")
    spreads = _table("namespace", "partitions", "by", "owner", "revision")
    for place, kept in stored.kept.items():
        whose = (kept.owner or API, str(kept.revision))
        if namespace not in (None, place.namespace):
            continue
        if isinstance(kept.part, Policy):
            policy = kept.part
            match = ", ".join(f"{name}={_plain(pattern)}" for name, pattern in dump(policy).get("match", {}).items())
            table.add_row(policy.name, policy.namespace, match, ", ".join(policy.per), _limit(policy), *whose)
        elif isinstance(kept.part, Namespace):
            spreads.add_row(place.name, str(kept.part.partitions), ", ".join(kept.part.partition_by), *whose)
    _print(table)
    _print(spreads)
    for place, kept in stored.damaged.items():
        if namespace in (None, place.namespace):
            _complain(f"the store's {_escaped(str(place))} is damaged and not in force: {kept.part}")


def _limit(policy: Policy) -> str:
    shadow = ", shadow" if policy.shadow else ""
    if policy.deny:
        return f"denied{shadow}"
    told = []
    if policy.rate is not None:
        rate = policy.rate if isinstance(policy.rate, str) else f"{policy.rate:.15g}/s"
        rate += f" (others by {', '.join(policy.rates)})" if policy.rates else ""
        told.append(f"{rate} {'requests' if policy.count is Count.REQUESTS else policy.mechanism}")
    if policy.quota is not None:
        amount, unit = (policy.quota.work, "work") if policy.quota.work else (policy.quota.requests, "requests")
        told.append(f"{amount:.15g} {unit} per {policy.quota.period}")
    return f"{', '.join(told)}{shadow}"


async def _diff(policies: PolicySet, owner: str) -> bool:
    async with _store() as store:
        kept = (await store.load()).kept
    here = parts_of(policies)
    own = {place for place, one in kept.items() if (one.owner or API) == owner}
    lines = [
        line
        for place in sorted(here.keys() | own, key=lambda place: place.title)
        for line in _difference(place, kept.get(place), here.get(place), owner)
    ]
    for line in lines:
        typer.echo(line)
    return bool(lines)


def _difference(place: Place, there: Kept | None, here: Policy | Namespace | None, owner: str) -> Iterator[str]:
    if there is None or isinstance(there.part, str):
        yield f"+ {place.title}"
    elif here is None:
        yield f"- {place.title} (no longer in the file; apply --prune would remove it)"
    elif (before := dump(there.part)) != (after := dump(here)):
        is_foreign = there.owner != owner and not (not there.owner and owner == API)
        whose = f" ({there.owner or API} owns it; only apply --take-over would replace it)" if is_foreign else ""
        yield f"~ {place.title}{whose}"
        yield from (f"    {line}" for line in _changes(before, after))


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield the fields that changed, one line each."""
    for field in [*before, *(field for field in after if field not in before)]:
        if field not in after:
            yield f"{field}: {_plain(before[field])} -> (unset)"
        elif field not in before:
            yield f"{field}: (unset) -> {_plain(after[field])}"
        elif before[field] != after[field]:
            yield f"{field}: {_plain(before[field])} -> {_plain(after[field])}"


async def _history(namespace: str, name: str, limit: int) -> None:
    async with _store() as store:
        entries = await store.history(namespace, name)
    table = _table("revision", "when", "who", "owner", "action", "change")
    for entry in entries[:limit]:
        table.add_row(*_cells_of(entry), _told(entry))
    _print(table)


async def _audit(limit: int) -> None:
    async with _store() as store:
        entries = await store.audit(limit)
    table = _table("revision", "when", "who", "owner", "action", "entry", "change")
    for entry in entries:
        title = Place(entry.kind, entry.namespace, entry.name).title
        table.add_row(*_cells_of(entry), _escaped(title), _told(entry))
    _print(table)


def _cells_of(entry: AuditEntry) -> tuple[str, ...]:
    who, owner = _escaped(entry.who), _escaped(entry.owner or "")
    return str(entry.revision), _when(entry.when_us), who, owner, entry.action


def _told(entry: AuditEntry) -> str:
    if not isinstance(entry.before, dict):
        return "made"
    if not isinstance(entry.after, dict):
        return "removed"
    return "; ".join(_changes(entry.before, entry.after))


async def _rollback(namespace: str, name: str, revision: int) -> None:
    async with _store() as store:
        _, now = await store.rollback(namespace, name, revision, who=_who())
    typer.echo(f"Rolled back {namespace}/{name} to revision {revision}; its new revision is {now}")


async def _inspect(namespace: str, policy: str | None, contains: str, limit: int) -> None:
    async with _link() as link:
        spread = (await PolicyStore(link).load()).policies.namespace(namespace)
        now_us = await store_now_us(link)
        table = _table("bucket", "mechanism", "balance", "capacity", "rate", "requests", "admitted", "refused")
        async for name, record in _buckets(link, namespace, spread.partitions, policy, contains, limit):
            table.add_row(_escaped(name), *_cells(record, now_us))
    _print(table)
    if not table.row_count:
        typer.echo("no live buckets here")


async def _explain(namespace: str, policy: str | None, contains: str, limit: int) -> None:
    """Print the controller's reasoning for buckets, partition by partition."""
    left = limit
    async with _link() as link:
        spread = (await PolicyStore(link).load()).policies.namespace(namespace)
        now_us = await store_now_us(link)
        for partition in range(spread.partitions):
            cursor, more, is_told = "", True, False
            while more and left > 0:
                query = PageQuery(namespace, partition, policy, contains, cursor, min(left, 1000))
                page = await list_steered(link, query)
                if page.buckets and not is_told:
                    typer.echo(f"{namespace}/{partition}: {_owner(page.owner)}")
                    is_told = True
                for name, record, memory in page.buckets:
                    for line in _reasons(reasoning(name, record, memory, now_us)):
                        typer.echo(f"  {line}")
                left -= len(page.buckets)
                cursor, more = page.cursor, bool(page.cursor)
    if left == limit:
        typer.echo("nothing is steered here")


def _owner(owner: Lease | None) -> str:
    if owner is None:
        return "owned by no controller; what it set last stays in force"
    name = _escaped(owner.owner.decode("utf-8", "replace"))
    return f"owned by {name} (fence {owner.fence}, for {owner.left_ms} ms)"


def _reasons(seen: Reasoning) -> Iterator[str]:
    yield _escaped(seen.bucket)
    yield f"  counts {seen.mechanism}: {seen.mechanism_reason}"
    if seen.cap is not None:
        yield f"  cap {seen.cap:.6g} requests/s for {seen.committed:.6g} units/s"
    if seen.charge is not None:
        yield f"  learned charge {seen.charge:.4g} units; real work differs by {(seen.charge_error or 0.0):+.1%}"
    if seen.share is not None:
        yield f"  share {seen.share:.1%} of the limit, for another {(seen.share_ends_in_ms or 0.0) / 1000:.1f} s"
    for cycle in seen.cycles:
        rejected = f"{cycle.rejection_rate:.1%} rejected"
        yield f"  {_when(cycle.at_ms * 1000)}  {cycle.rule:<5}  {rejected:>15}  {cycle.sentence}"
    if seen.overload is not None:
        yield from _overload(seen.overload)


def _overload(seen: Overload) -> Iterator[str]:
    yield f"  {seen.state}, quality {seen.quality:.3g}{_measured(seen)}"
    for name, share in seen.refused_shares.items():
        rate = seen.rates[name]
        told = [f"{share:.1%} refused"] if share else []
        told += [f"at most {rate:.4g}/s"] if rate is not None else []
        limit = seen.limits[name]
        told += [f"at most {limit:.4g} in flight"] if limit is not None else []
        if told:
            yield f"  {name}: {', '.join(told)}"
    for step in seen.steps:
        yield f"  {_when(step.at_ms * 1000)}  {step.rule:<7}  {step.controller:>13}  {step.sentence}"


def _measured(seen: Overload) -> str:
    told = "" if seen.in_flight is None else f", {seen.in_flight:.6g} in flight"
    if seen.late_share is not None:
        told += f", {seen.late_share:.1%} late"
    if seen.percentile_ms is not None:
        told += f", percentile {seen.percentile_ms:.4g} ms"
    return told + (f" (target {seen.target_ms:g} ms)" if seen.target_ms is not None else "")


async def _buckets(
    link: Link, namespace: str, partitions: int, policy: str | None, contains: str, limit: int
) -> AsyncIterator[tuple[str, Record]]:
    left = limit
    for partition in range(partitions):
        cursor, more = "", True
        while more and left > 0:
            page = await list_buckets(link, PageQuery(namespace, partition, policy, contains, cursor, min(left, 1000)))
            for name in page.unreadable:
                _complain(f"bucket {_escaped(name)} cannot be read: its record is damaged, or another program wrote it")
            for found in page.buckets:
                yield found
            left -= len(page.buckets)
            cursor, more = page.cursor, bool(page.cursor)


def _cells(record: Record, now_us: int) -> Iterable[str]:
    """Return the cells of a bucket, with its balance as of now."""
    refill(record, now_us)
    if record.is_quota:
        over = now_us >= record.rate
        return _numbers("quota", record.capacity if over else record.balance, record, f"until {_when(record.rate)}")
    mechanism = "requests" if record.counts_requests else "work"
    return _numbers(mechanism, record.balance, record, f"{record.rate:.6g}/s")


def _numbers(mechanism: str, balance: float, record: Record, rate: str) -> Iterable[str]:
    counts = (record.requests, record.admitted, record.refused)
    amounts = (round(balance, 3), round(record.capacity, 3))
    return [mechanism, *(f"{amount:.15g}" for amount in amounts), rate, *(f"{count:.15g}" for count in counts)]


@asynccontextmanager
async def _store() -> AsyncIterator[PolicyStore]:
    async with _link() as link:
        yield PolicyStore(link)


@asynccontextmanager
async def _link() -> AsyncIterator[Link]:
    """Open the configured store, or the embedded one that runs in the data directory."""
    settings = Settings.load()
    url = embedded_url(settings.data_dir) if settings.redis_url is None else settings.redis_url.get_secret_value()
    link = await open_link(url)
    try:
        yield link
    except StoreUnavailable as error:
        where = f"in {settings.data_dir}" if settings.redis_url is None else "where HEADGATE_REDIS_URL says"
        raise StoreError(f"cannot reach the store ({error}); is it running {where}?") from error
    finally:
        await link.aclose()


def embedded_url(data_dir: Path) -> str:
    """Return the URL of the embedded store of a data directory, if one runs there."""
    path = data_dir.absolute() / "valkey.sock"
    if path.exists():
        return f"unix://{quote(str(path))}"
    if len(bytes(path)) > SOCKET_PATH_MAX_BYTES:
        raise StoreError(
            f"the path of {data_dir} is too long for a socket: set HEADGATE_REDIS_URL to the unix:// URL that "
            "`headgate up` showed, or HEADGATE_DATA_DIR to a shorter path before starting it"
        )
    raise StoreError(
        f"no store runs in {data_dir}: start one with `headgate up`, or set HEADGATE_DATA_DIR to where it runs, "
        "or HEADGATE_REDIS_URL to a store"
    )


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        raise _failure(str(error), EXIT_USAGE) from None
    except UrlError as error:
        raise _failure(f"HEADGATE_REDIS_URL: {error}", EXIT_USAGE) from None
    except OwnedByOthers as error:
        lines = [f"{foreign}" for foreign in error.foreign]
        advice = "nothing was applied; --take-over replaces what others own"
        raise _failure("\n".join([*lines, advice]), EXIT_TROUBLE) from None
    except (PolicyError, PolicyMissing, RevisionConflict, StoreError) as error:
        raise _failure(str(error), EXIT_TROUBLE) from None
    except ResponseError as error:
        raise _failure(f"the store refused: {error}", EXIT_TROUBLE) from None


def _failure(message: str, code: int) -> typer.Exit:
    for line in message.splitlines():
        _complain(line)
    return typer.Exit(code)


def _complain(line: str) -> None:
    typer.echo(f"headgate: {line}", err=True)


def _count(policies: PolicySet) -> str:
    count = len(policies.policies)
    return f"{count} {'policy' if count == 1 else 'policies'}"


def _who() -> str:
    """Return the user of the terminal, for the audit log."""
    try:
        return f"cli: {getpass.getuser()}"
    except (OSError, KeyError):  # a container's user may have no name
        return "cli"


def _when(us: float) -> str:
    return f"{datetime.fromtimestamp(us // 1_000_000, UTC):%Y-%m-%d %H:%M:%S}Z"


def _plain(value: object) -> str:
    """Return a value on one line, without terminal control characters."""
    return json.dumps(value)


def _escaped(text: str) -> str:
    return ascii(text)[1:-1]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    return table


_NUMBERS = frozenset({"revision", "balance", "capacity", "requests", "admitted", "refused", "partitions"})


def _print(table: Table) -> None:
    if table.row_count:
        # Output that is no terminal has no width to fit.
        width = None if sys.stdout.isatty() else WIDTH_OF_A_FILE
        Console(markup=False, highlight=False, emoji=False, width=width).print(table)
