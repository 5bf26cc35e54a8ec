"""The controller's access to a slot: own it, read what changed, write what was decided.

Every call presents the lease; one from a former owner does nothing and raises `LeaseLost` (F-P7). Nothing is sent again
after a lost connection: values are absolute and counters only grow, so the next cycle does as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from os import urandom
from typing import Any, TypeVar

from limiter.model.bucket.bucket import Record
from limiter.model.control.stewardship import Lease, Steer, SteerStatus
from limiter.model.overload.signals import Report
from limiter.store import keys
from limiter.store.call_layout import STEERED_MAX, LeaseLost, unpack_reports
from limiter.store.keys import Slot
from limiter.store.layout import read_record
from limiter.store.link.connect import Link
from limiter.store.link.script_calls import Loaded, run_script
from limiter.store.scripts import LeaseScript, Sampled, SampleScript, SteerScript

__all__ = ["Lease", "LeaseLost", "Sampled", "Steer", "SteerStatus", "Steering"]

LEASE_MS = 2_000
TIMEOUT_S = 1.0
READ_MAX = 512
"""Values in one MGET: bounds how long the store is busy with it."""

T = TypeVar("T")


class Steering:
    """One controller's slots. All methods raise `StoreError` if the store does not answer in time."""

    def __init__(
        self, link: Link, *, owner: bytes | None = None, lease_ms: int = LEASE_MS, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.owner = owner or urandom(8).hex().encode()
        """A name that no other process has: two that share one would share their leases."""
        self._link = link
        self._lease_ms = lease_ms
        self._timeout_s = timeout_s
        self._lease = LeaseScript()
        self._sample = SampleScript()
        self._steer = SteerScript()

    async def take(self, slot: Slot) -> Lease | None:
        """Take or renew ownership of the slot; None while another controller owns it."""
        call = self._lease.call(slot.prefix, self.owner, ttl_ms=self._lease_ms)
        return self._lease.answer(await self._run(slot.prefix, self._lease, call), self.owner)

    async def release(self, slot: Slot) -> None:
        """Give the slot back, so that another controller need not wait for the lease to end."""
        await self._run(slot.prefix, self._lease, self._lease.call(slot.prefix, self.owner, ttl_ms=0))

    async def sample(self, slot: Slot, lease: Lease, count: int) -> Sampled:
        """Renew the lease, and take at most `count` names of buckets that changed since they were last taken."""
        call = self._sample.call(slot.prefix, lease, ttl_ms=self._lease_ms, count=count)
        return self._sample.answer(await self._run(slot.prefix, self._sample, call), slot.prefix)

    async def records(self, slot: Slot, names: Sequence[str]) -> dict[str, Record]:
        """Return the records of buckets, without those that are gone or cannot be read (F-S11)."""
        raws = await self.raw_records(slot, names)
        found = {name: read_record(raw) for name, raw in raws.items()}
        return {name: record for name, record in found.items() if record is not None}

    async def raw_records(self, slot: Slot, names: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of buckets' records, for `read_record`; without those that are gone.

        Reading thousands of records is faster with only one of them unpacked at a time.
        """
        return await self._read(slot.prefix, names, keys.bucket)

    async def states(self, slot: Slot, names: Sequence[str]) -> dict[str, bytes]:
        """Return the controller's state of buckets, where there is one."""
        return await self._read(slot.prefix, names, keys.state)

    async def memories(self, slot: Slot, limits: Sequence[str]) -> dict[str, bytes]:
        """Return the state that was last kept of limits, by the prefix of their buckets' names."""
        return await self._read(slot.prefix, limits, keys.memory)

    async def keep_memory(self, slot: Slot, limit: str, memory: bytes, *, life_s: int) -> None:
        """Keep what was learned from the buckets of a limit. A former owner may write it, too: it knows no less."""
        key = keys.memory(slot.prefix, limit)
        await self._link.call(slot.prefix, "SET", key, memory, "EX", life_s, timeout_s=self._timeout_s)

    async def signals(self, slot: Slot, names: Sequence[str]) -> dict[str, tuple[Report, ...]]:
        """Return the reports of load for each bucket, for all of its policy or all of its namespace (G5).

        Buckets without a report are left out.
        """
        policies = {name: name.partition(":")[0] for name in names}
        wanted = list(dict.fromkeys((*names, *policies.values(), keys.EVERY_BUCKET)))
        raws = await self._read(slot.prefix, wanted, keys.signals)
        reports = {name: unpack_reports(raw) for name, raw in raws.items()}
        everywhere = reports.get(keys.EVERY_BUCKET, ())
        found = {}
        for name, policy in policies.items():
            own, of_all = reports.get(name, ()), reports.get(policy, ()) if policy != name else ()
            if own or of_all or everywhere:
                found[name] = own + of_all + everywhere
        return found

    async def steer(self, slot: Slot, lease: Lease, rows: Sequence[Steer]) -> list[SteerStatus]:
        """Write what was decided, each bucket once at most. LeaseLost may come after some of many rows are written."""
        assert len({row.bucket for row in rows}) == len(rows), "each bucket once"
        statuses: list[SteerStatus] = []
        for some in _slices(rows, STEERED_MAX):
            reply = await self._run(slot.prefix, self._steer, self._steer.call(slot.prefix, lease, some))
            statuses += self._steer.answers(reply, some)
        return statuses

    async def _run(self, prefix: bytes, script: Loaded, call: list[bytes | int]) -> Any:
        return await run_script(self._link, prefix, script, call, timeout_s=self._timeout_s)

    async def _read(self, prefix: bytes, names: Sequence[str], key: Callable[[bytes, str], bytes]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        begin = key(prefix, "")
        for some in _slices(names, READ_MAX):
            wanted = [begin + name.encode() for name in some]
            raws: list[bytes | None] = await self._link.call(prefix, "MGET", *wanted, timeout_s=self._timeout_s)
            found |= {name: raw for name, raw in zip(some, raws, strict=True) if raw is not None}
        return found


def _slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[at : at + size] for at in range(0, len(items), size))
