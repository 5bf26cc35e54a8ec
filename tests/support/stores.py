"""Scripts on a real server, with the face of the model: both must do the same."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk
from limiter.model.bucket.operations import Acquire, AcquireAnswer, Settle, SettleAnswer
from limiter.model.control.stewardship import Lease, Steer, SteerStatus
from limiter.model.ledger.ledger import Ledger
from limiter.store import keys
from limiter.store.call_layout import LeaseLost
from limiter.store.keys import Slot
from limiter.store.scripts import (
    AcquireScript,
    LeaseScript,
    LendScript,
    SampleScript,
    SettleScript,
    SignalScript,
    SteerScript,
)
from tests.support.servers import Cluster, Server

ACQUIRE = AcquireScript()
SETTLE = SettleScript()
LEASE = LeaseScript()
SAMPLE = SampleScript()
STEER = SteerScript()
SIGNAL = SignalScript()
LEND = LendScript()

LEASE_MS = 600_000
"""Longer than any test: who wants a lease to end says so."""


class Decides(Protocol):
    """The model's `Ledger`, or the scripts through `ScriptStore`."""

    def acquire(self, operations: Sequence[Acquire], now_us: int) -> list[AcquireAnswer]: ...

    def settle(self, operations: Sequence[Settle], now_us: int) -> list[SettleAnswer]: ...

    def take(self, owner: bytes, ttl_ms: int) -> Lease | None: ...

    def release(self, owner: bytes) -> None: ...

    def sample(self, lease: Lease, count: int) -> list[str] | None: ...

    def steer(self, lease: Lease, rows: Sequence[Steer], now_us: int) -> list[SteerStatus] | None: ...


class ScriptStore:
    """Calls the scripts one by one, at a time that the test chooses (0 = the server's own clock)."""

    def __init__(self, server: Server | Cluster, slot: Slot | None = None, *, general: bool = False) -> None:
        self.server = server
        self.general = general
        """Whether the scripts are to take no short way where the plain case would do."""
        self.prefix = (slot or Slot()).prefix
        self._calls = 0

    @property
    def client(self) -> Any:
        """A client of the node that holds the slot."""
        return self.server.client_for(self.prefix) if isinstance(self.server, Cluster) else self.server.client()

    def acquire(
        self, operations: Sequence[Acquire], now_us: int, *, flush_id: bytes | None = None
    ) -> list[AcquireAnswer]:
        call = ACQUIRE.call(self.prefix, flush_id or self._next_id(), operations, now_us=self._sent(now_us))
        return ACQUIRE.answers(self._eval(ACQUIRE.sha, ACQUIRE.source, call), operations)

    def settle(self, operations: Sequence[Settle], now_us: int, *, flush_id: bytes | None = None) -> list[SettleAnswer]:
        call = SETTLE.call(self.prefix, flush_id or self._next_id(), operations, now_us=self._sent(now_us))
        return SETTLE.answers(self._eval(SETTLE.sha, SETTLE.source, call), operations)

    def _sent(self, now_us: int) -> int:
        return -now_us if self.general else now_us

    def take(self, owner: bytes, ttl_ms: int) -> Lease | None:
        return LEASE.answer(self._eval(LEASE.sha, LEASE.source, LEASE.call(self.prefix, owner, ttl_ms=ttl_ms)), owner)

    def release(self, owner: bytes) -> None:
        self._eval(LEASE.sha, LEASE.source, LEASE.call(self.prefix, owner, ttl_ms=0))

    def sample(self, lease: Lease, count: int) -> list[str] | None:
        call = SAMPLE.call(self.prefix, lease, ttl_ms=LEASE_MS, count=count)
        try:
            return SAMPLE.answer(self._eval(SAMPLE.sha, SAMPLE.source, call), self.prefix).names
        except LeaseLost:
            return None

    def steer(self, lease: Lease, rows: Sequence[Steer], now_us: int) -> list[SteerStatus] | None:
        call = STEER.call(self.prefix, lease, rows, now_us=now_us)
        try:
            return STEER.answers(self._eval(STEER.sha, STEER.source, call), rows)
        except LeaseLost:
            return None

    def lend(self, ask: LeaseAsk, now_us: int) -> LeaseAnswer:
        """A holder asks for slices, or gives them back."""
        return LEND.answer(
            self._eval(LEND.sha, LEND.source, LEND.call(self.prefix, ask, now_us=self._sent(now_us))), ask
        )

    def lease_row(self, lease: str) -> bytes | None:
        """The bytes that are kept of a lease."""
        found: bytes | None = self.client.get(keys.lease_row(self.prefix, lease))
        return found

    def report(self, bucket: str, source: str, loads: Mapping[str, float], now_us: int) -> int:
        """A source says how busy it is; how many sources are known then."""
        call = SIGNAL.call(self.prefix, bucket, source, loads, now_us=now_us)
        return int(self._eval(SIGNAL.sha, SIGNAL.source, call))

    def signals(self, bucket: str) -> bytes | None:
        """The bytes of what was reported to a bucket."""
        found: bytes | None = self.client.get(keys.signals(self.prefix, bucket))
        return found

    def end_lease(self) -> None:
        """End the lease, as its time would."""
        self.client.delete(keys.lease(self.prefix))

    def _eval(self, sha: bytes, source: bytes, call: list[bytes | int]) -> Any:
        from redis.exceptions import NoScriptError

        try:
            return self.client.execute_command("EVALSHA", sha, *call)
        except NoScriptError:
            return self.client.execute_command("EVAL", source, *call)

    def values(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The bytes at some keys, in one call."""
        found: list[bytes | None] = self.client.mget(names) if names else []
        return found

    def record(self, bucket: str) -> bytes | None:
        """The bytes of a bucket's record."""
        found: bytes | None = self.client.get(keys.bucket(self.prefix, bucket))
        return found

    def state(self, bucket: str) -> bytes | None:
        """The bytes that the controller keeps beside a bucket."""
        found: bytes | None = self.client.get(keys.state(self.prefix, bucket))
        return found

    def tombstone(self, reservation: str) -> bytes | None:
        """The bytes of a reservation's tombstone."""
        found: bytes | None = self.client.get(keys.tombstone(self.prefix, reservation))
        return found

    def touched(self) -> list[str]:
        """Buckets changed since the last sampling."""
        bucket_prefix = keys.bucket(self.prefix, "")
        return [
            key.removeprefix(bucket_prefix).decode() for key in self.client.lrange(keys.touched(self.prefix), 0, -1)
        ]

    def order_touched(self, names: Sequence[str]) -> None:
        """List the same buckets in this order."""
        assert sorted(names) == sorted(self.touched())
        if names:
            self.client.delete(keys.touched(self.prefix))
            self.client.rpush(keys.touched(self.prefix), *(keys.bucket(self.prefix, name) for name in names))

    def _next_id(self) -> bytes:
        self._calls += 1
        return b"%d" % self._calls


__all__ = ["ACQUIRE", "SETTLE", "Decides", "Ledger", "ScriptStore"]
