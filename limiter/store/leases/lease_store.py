"""Leases of slices in the store: asking for them, listing and revoking them (B8, P9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote, unquote

from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk, LeaseKind
from limiter.model.bucket.lending import LendStatus, Row
from limiter.store import keys
from limiter.store.call_layout import CallExpired
from limiter.store.clock import StoreClock, time_us
from limiter.store.keys import Slot
from limiter.store.layout import read_record
from limiter.store.leases.lease_layout import unpack_row
from limiter.store.link.connect import Link
from limiter.store.link.script_calls import run_script
from limiter.store.scripts import LendScript
from limiter.store.store_errors import StoreUnavailable

CALL_LIFETIME_US = 5_000_000
"""A request that reaches the store later than this does nothing there."""

LISTED_MAX = 1000
"""Leases of one partition that are listed, those that end first."""
LOOKED_AT_MAX = 100_000
"""Leases that are looked at for those that are wanted, in pages."""
PAGE = 1000

TIMEOUT_S = 2.0


def lease_id(slot: Slot, holder: str, buckets: Sequence[str]) -> str:
    """Name the lease of a holder on some buckets: the same holder gets the same lease."""
    text = "\n".join([slot.namespace, quote(holder, safe="", errors="surrogatepass"), *buckets])
    return f"{slot.partition}-{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def slot_of(namespace: str, lease: str) -> Slot | None:
    """Return the slot of a lease, by its id; None for text that is no id."""
    partition, dash, digest = lease.partition("-")
    if not (dash and partition.isascii() and partition.isdecimal() and len(partition) <= 4 and digest.isalnum()):
        return None
    return Slot(namespace, int(partition))


class Listing(NamedTuple):
    """The entry of a lease in the index of its slot."""

    id: str
    holder: str
    buckets: list[str]


class ListedLease(NamedTuple):
    """A lease in the list of its slot."""

    id: str
    holder: str
    buckets: list[str]
    row: Row
    left_us: float
    """Until its last part ends."""


class LeaseStore:
    """Asks for leases. Raises `StoreError` if the store does not answer in time; every request is safe to repeat."""

    def __init__(self, link: Link, clock: StoreClock) -> None:
        self._link = link
        self._clock = clock
        self._script = LendScript()

    async def lend(self, slot: Slot, ask: LeaseAsk, *, holder: str, timeout_s: float) -> LeaseAnswer:
        """Serve a request for a lease, over all its buckets or none."""
        names = " ".join(want.bucket for want in ask.wants)
        entry = f"{ask.lease} {quote(holder, safe='', errors='surrogatepass')} {names}".encode()
        now_us = self._clock.now_us()
        expires_us = now_us + CALL_LIFETIME_US if now_us else 0
        call = self._script.call(slot.prefix, ask, entry=entry, expires_us=expires_us)
        reply = await run_script(self._link, slot.prefix, self._script, call, timeout_s=timeout_s)
        try:
            answer = self._script.answer(reply, ask)
        except CallExpired as expired:
            self._clock.observe(expired.now_us)
            raise StoreUnavailable("the request came too late to the store; nothing was done") from None
        self._clock.observe(answer.now_us)
        return answer

    async def revoke(self, slot: Slot, lease: str, *, timeout_s: float = TIMEOUT_S) -> LendStatus:
        """Lend nothing more under a lease; what is lent ends with it."""
        call = self._script.call(slot.prefix, LeaseAsk(lease, 0.0, (), kind=LeaseKind.REVOKE))
        reply = await run_script(self._link, slot.prefix, self._script, call, timeout_s=timeout_s)
        return self._script.answer(reply, LeaseAsk(lease, 0.0, ())).status

    async def listed(
        self, slot: Slot, *, is_wanted: Callable[[Listing], bool] = lambda _: True, timeout_s: float = TIMEOUT_S
    ) -> list[ListedLease]:
        """Return the wanted leases of a slot that have not ended, those that end first."""
        prefix = slot.prefix
        now_us = time_us(await self._link.call(prefix, "TIME", timeout_s=timeout_s))
        leases: list[ListedLease] = []
        for begin in range(0, LOOKED_AT_MAX, PAGE):
            entries: list[bytes] = await self._link.call(
                prefix, "ZRANGE", keys.leases(prefix), now_us, "+inf", "BYSCORE", "LIMIT", begin, PAGE,
                timeout_s=timeout_s,
            )  # fmt: skip
            found = [_listing(entry) for entry in entries]
            wanted = [one for one in found if one is not None and is_wanted(one)]
            leases += await self._held(prefix, wanted, now_us, timeout_s)
            if len(entries) < PAGE or len(leases) >= LISTED_MAX:
                break
        return leases[:LISTED_MAX]

    async def _held(self, prefix: bytes, found: list[Listing], now_us: int, timeout_s: float) -> list[ListedLease]:
        """Return those of some leases that have not ended."""
        if not found:
            return []
        buckets = list(dict.fromkeys(name for one in found for name in one.buckets))
        wanted = [keys.lease_row(prefix, one.id) for one in found] + [keys.bucket(prefix, name) for name in buckets]
        raws: list[bytes | None] = await self._link.call(prefix, "MGET", *wanted, timeout_s=timeout_s)
        records = [None if raw is None else read_record(raw) for raw in raws[len(found) :]]
        shifts = {
            name: record.lent.shift_us
            for name, record in zip(buckets, records, strict=True)
            if record is not None and record.lent is not None
        }
        leases = []
        for one, raw in zip(found, raws, strict=False):
            row = None if raw is None else unpack_row(raw)
            if row is None or row.is_closed or len(row.parts) != len(one.buckets):
                continue
            left_us = max(
                part.end_us - (now_us + shifts.get(name, 0.0))
                for name, part in zip(one.buckets, row.parts, strict=True)
            )
            if left_us > 0:
                leases.append(ListedLease(one.id, one.holder, one.buckets, row, left_us))
        return leases


def _listing(entry: bytes) -> Listing | None:
    words = entry.decode("ascii", "replace").split(" ")
    return Listing(words[0], unquote(words[1]), words[2:]) if len(words) > 2 else None
