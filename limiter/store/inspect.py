"""Looking at live buckets: page by page, bounded in what one page may cost the store."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from limiter.model.bucket.bucket import Record
from limiter.model.control.kept_state import KeptState, unpack
from limiter.model.control.stewardship import Lease
from limiter.model.policy.limit import policy_of
from limiter.store import keys
from limiter.store.clock import time_us
from limiter.store.keys import Slot
from limiter.store.layout import read_record, unpack_token
from limiter.store.link.connect import Link

SCAN_COUNT = 512
"""Keys that the store looks at in one step."""

SCANS_MAX = 64
"""Steps for one page; with few matches among many keys a page may come back short, but with a cursor."""

TIMEOUT_S = 2.0


class CursorError(ValueError):
    """A cursor that we did not give out."""


class BucketPage(NamedTuple):
    """Some of a slot's buckets by name, where to go on (empty: there are no more), and what could not be read."""

    buckets: list[tuple[str, Record]]
    cursor: str
    unreadable: list[str]


class _Place(NamedTuple):
    """A step of the scan, and the last name of it that was shown."""

    scan: int = 0
    after: str = ""


class PageQuery(NamedTuple):
    """Which buckets of one slot: at most `limit` of one policy, with a text in their name, or all."""

    namespace: str = "default"
    partition: int = 0
    policy: str | None = None
    contains: str = ""
    cursor: str = ""
    """Where the page before ended."""
    limit: int = 100

    @property
    def prefix(self) -> bytes:
        """What the keys of the slot begin with."""
        return Slot(self.namespace, self.partition).prefix


async def list_buckets(link: Link, query: PageQuery, *, timeout_s: float = TIMEOUT_S) -> BucketPage:
    """A page of the buckets in one slot.

    A bucket that lives all the while is shown, one that comes or goes meanwhile may be; now and then one is shown
    twice. Names are as in the store: client text is percent-encoded in them.
    """
    assert query.limit > 0
    prefix, limit = keys.bucket(query.prefix, ""), query.limit
    place = _open_cursor(query.cursor)
    shown: list[tuple[str, Record]] = []
    unreadable: list[str] = []
    for _ in range(SCANS_MAX):
        following, names = await _scan(link, prefix, place.scan, query.policy, timeout_s)
        wanted = [name for name in sorted(names) if name > place.after and query.contains in name]
        page = wanted[: limit - len(shown) - len(unreadable)]
        for name, record in await _read(link, prefix, {name: names[name] for name in page}, timeout_s):
            if isinstance(record, Record):
                shown.append((name, record))
            elif record:
                unreadable.append(name)
        if len(page) < len(wanted):
            return BucketPage(shown, _close_cursor(_Place(place.scan, page[-1] if page else place.after)), unreadable)
        place = _Place(following)
        if following == 0 or len(shown) + len(unreadable) >= limit:
            break
    return BucketPage(shown, _close_cursor(place) if place.scan else "", unreadable)


async def _scan(
    link: Link, prefix: bytes, at: int, policy: str | None, timeout_s: float
) -> tuple[int, dict[str, bytes]]:
    """One step: where the next one begins, and the names found, with their keys."""
    # Nothing of a prefix or an encoded name means anything in a pattern.
    stem = "" if policy is None else keys.encode(policy)
    pattern = prefix + stem.encode() + b"*"
    following, found = await link.call(prefix, "SCAN", at, "MATCH", pattern, "COUNT", SCAN_COUNT, timeout_s=timeout_s)
    names = {key[len(prefix) :].decode("utf-8", "backslashreplace"): key for key in found}
    return int(following), {name: key for name, key in names.items() if policy is None or policy_of(name) == stem}


async def _read(
    link: Link, prefix: bytes, names: Mapping[str, bytes], timeout_s: float
) -> list[tuple[str, Record | bool]]:
    """Each bucket's record; True for what is there and cannot be read (F-S11), False for what has gone meanwhile."""
    if not names:
        return []
    raws: list[bytes | None] = await link.call(prefix, "MGET", *names.values(), timeout_s=timeout_s)
    records: list[tuple[str, Record | bool]] = []
    for (name, key), raw in zip(names.items(), raws, strict=True):
        if raw is None:  # gone, or of another type
            records.append((name, await link.call(prefix, "EXISTS", key, timeout_s=timeout_s) == 1))
        else:
            records.append((name, read_record(raw) or True))
    return records


class SteeredPage(NamedTuple):
    """Who owns a slot, and some of its buckets with what the controller keeps of them."""

    owner: Lease | None
    buckets: list[tuple[str, Record, KeptState | None]]
    cursor: str
    unreadable: list[str]


async def now_us(link: Link, *, timeout_s: float = TIMEOUT_S) -> int:
    """The store's time, by which balances are shown."""
    return time_us(await link.call(keys.PROBE, "TIME", timeout_s=timeout_s))


async def list_steered(link: Link, query: PageQuery, *, timeout_s: float = TIMEOUT_S) -> SteeredPage:
    """The same pages as `list_buckets`, of the buckets that the controller has something to say of (R11)."""
    prefix = query.prefix
    page = await list_buckets(link, query, timeout_s=timeout_s)
    states: list[bytes | None] = []
    if page.buckets:
        wanted = [keys.state(prefix, name) for name, _ in page.buckets]
        states = await link.call(prefix, "MGET", *wanted, timeout_s=timeout_s)
    found = [(name, record, unpack(state)) for (name, record), state in zip(page.buckets, states, strict=True) if state]
    return SteeredPage(await owner_of(link, prefix, timeout_s=timeout_s), found, page.cursor, page.unreadable)


class SlotLook(NamedTuple):
    """Whether a controller owns a slot, and some of its buckets: those that are there and can be read."""

    is_owned: bool
    records: dict[str, Record]
    memories: dict[str, KeptState]


async def look_at_slot(link: Link, slot: Slot, names: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> SlotLook:
    """All of it in one command."""
    prefix, count = slot.prefix, len(names)
    wanted = [keys.bucket(prefix, name) for name in names] + [keys.state(prefix, name) for name in names]
    raws: list[bytes | None] = await link.call(prefix, "MGET", keys.lease(prefix), *wanted, timeout_s=timeout_s)
    records = {name: read_record(raw) for name, raw in zip(names, raws[1 : 1 + count], strict=True) if raw}
    memories = {name: unpack(raw) for name, raw in zip(names, raws[1 + count :], strict=True)}
    return SlotLook(
        raws[0] is not None,
        {name: record for name, record in records.items() if record is not None},
        {name: memory for name, memory in memories.items() if memory is not None},
    )


async def owner_of(link: Link, prefix: bytes, *, timeout_s: float = TIMEOUT_S) -> Lease | None:
    """Who steers a slot, and for how long by now; None if nobody does."""
    key = keys.lease(prefix)
    # MGET says nothing of what is no string, where GET would fail (F-S11).
    (raw,) = await link.call(prefix, "MGET", key, timeout_s=timeout_s)
    left_ms = int(await link.call(prefix, "PTTL", key, timeout_s=timeout_s))
    return None if raw is None or left_ms < 0 else unpack_token(raw, left_ms)


def _close_cursor(place: _Place) -> str:
    return urlsafe_b64encode(f"{place.scan}:{place.after}".encode()).decode().rstrip("=")


def _open_cursor(cursor: str) -> _Place:
    if not cursor:
        return _Place()
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        scan, colon, after = text.partition(":")
        if not colon or not scan.isdecimal() or not scan.isascii() or int(scan) >= 2**64:
            raise ValueError
    except ValueError:  # binascii's and Unicode's errors are such
        raise CursorError(f"found {cursor[:80]!a}; allowed: a cursor that the page before came with") from None
    return _Place(int(scan), after)
