"""Pages of live buckets; the cost of one page to the store is bounded."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from limiter.model.bucket.bucket import Record
from limiter.model.control.kept_state import KeptState, unpack
from limiter.model.control.stewardship import Lease
from limiter.model.policy.limit import policy_of
from limiter.store import keys
from limiter.store.call_layout import unpack_token
from limiter.store.clock import time_us
from limiter.store.keys import Slot
from limiter.store.layout import read_record
from limiter.store.link.connect import Link

SCAN_COUNT = 512
"""Keys that the store examines in one step of a scan."""

SCANS_MAX = 64
"""Steps for one page. With few matches among many keys a page may be short, but it has a cursor."""

TIMEOUT_S = 2.0


class CursorError(ValueError):
    """A cursor that this API did not issue."""


class BucketPage(NamedTuple):
    """Some buckets of a slot by name, the cursor of the next page (empty: this is the last), and unreadable names."""

    buckets: list[tuple[str, Record]]
    cursor: str
    unreadable: list[str]


class _Place(NamedTuple):
    """A step of the scan, and the last name of that step that was shown."""

    scan: int = 0
    after: str = ""


class PageQuery(NamedTuple):
    """The buckets to list: at most `limit` of one slot, of one policy or all, with a text in their name."""

    namespace: str = "default"
    partition: int = 0
    policy: str | None = None
    contains: str = ""
    cursor: str = ""
    """Where the previous page ended."""
    limit: int = 100

    @property
    def prefix(self) -> bytes:
        """The prefix of the slot's keys."""
        return Slot(self.namespace, self.partition).prefix


async def list_buckets(link: Link, query: PageQuery, *, timeout_s: float = TIMEOUT_S) -> BucketPage:
    """Return a page of the buckets in one slot.

    A bucket that exists all the while is listed, one that appears or expires meanwhile may be; now and then one is
    listed twice. Names are as in the store: client text in them is percent-encoded.
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
    """Do one step of the scan: return where the next one begins, and the names found with their keys."""
    # Neither the prefix nor an encoded name contains characters that are special in a pattern.
    stem = "" if policy is None else keys.encode(policy)
    pattern = prefix + stem.encode() + b"*"
    following, found = await link.call(prefix, "SCAN", at, "MATCH", pattern, "COUNT", SCAN_COUNT, timeout_s=timeout_s)
    names = {key[len(prefix) :].decode("utf-8", "backslashreplace"): key for key in found}
    return int(following), {name: key for name, key in names.items() if policy is None or policy_of(name) == stem}


async def _read(
    link: Link, prefix: bytes, names: Mapping[str, bytes], timeout_s: float
) -> list[tuple[str, Record | bool]]:
    """Read each bucket's record; True for one that is damaged (F-S11), False for one that has expired meanwhile."""
    if not names:
        return []
    raws: list[bytes | None] = await link.call(prefix, "MGET", *names.values(), timeout_s=timeout_s)
    records: list[tuple[str, Record | bool]] = []
    for (name, key), raw in zip(names.items(), raws, strict=True):
        if raw is None:  # expired, or a key of another type
            records.append((name, await link.call(prefix, "EXISTS", key, timeout_s=timeout_s) == 1))
        else:
            records.append((name, read_record(raw) or True))
    return records


class SteeredPage(NamedTuple):
    """The owner of a slot, and some of its buckets with the controller's state of each."""

    owner: Lease | None
    buckets: list[tuple[str, Record, KeptState | None]]
    cursor: str
    unreadable: list[str]


async def now_us(link: Link, *, timeout_s: float = TIMEOUT_S) -> int:
    """The store's time; balances are shown as of then."""
    return time_us(await link.call(keys.PROBE, "TIME", timeout_s=timeout_s))


async def list_steered(link: Link, query: PageQuery, *, timeout_s: float = TIMEOUT_S) -> SteeredPage:
    """Return the same pages as `list_buckets`, but only of buckets that the controller keeps state of (R11)."""
    prefix = query.prefix
    page = await list_buckets(link, query, timeout_s=timeout_s)
    states: list[bytes | None] = []
    if page.buckets:
        wanted = [keys.state(prefix, name) for name, _ in page.buckets]
        states = await link.call(prefix, "MGET", *wanted, timeout_s=timeout_s)
    found = [(name, record, unpack(state)) for (name, record), state in zip(page.buckets, states, strict=True) if state]
    return SteeredPage(await owner_of(link, prefix, timeout_s=timeout_s), found, page.cursor, page.unreadable)


class SlotLook(NamedTuple):
    """The controller's ownership of a slot, and those of the given buckets that exist and can be read."""

    is_owned: bool
    records: dict[str, Record]
    memories: dict[str, KeptState]


async def look_at_slot(link: Link, slot: Slot, names: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> SlotLook:
    """Read the owner and the buckets in one command."""
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
    """Return the owner of a slot with the time left; None if there is none."""
    key = keys.lease(prefix)
    # MGET returns nil for a key that holds no string, where GET would fail (F-S11).
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
    except ValueError:  # the errors of binascii and of decoding are ValueErrors
        raise CursorError(f"found {cursor[:80]!a}; allowed: the cursor of the previous page") from None
    return _Place(int(scan), after)
