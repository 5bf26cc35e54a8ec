"""Scripts on a real server, with the face of the model: what one does, the other must do."""

from collections.abc import Sequence
from typing import Any, Protocol

from limiter.model.ledger import Ledger
from limiter.model.operations import Acquire, AcquireAnswer, Settle, SettleAnswer
from limiter.store import keys
from limiter.store.keys import Slot
from limiter.store.scripts import AcquireScript, SettleScript
from tests.support.servers import Cluster, Server

ACQUIRE = AcquireScript()
SETTLE = SettleScript()


class Decides(Protocol):
    """The model's `Ledger`, or the scripts through `ScriptStore`."""

    def acquire(self, operations: Sequence[Acquire], now_us: int) -> list[AcquireAnswer]: ...

    def settle(self, operations: Sequence[Settle], now_us: int) -> list[SettleAnswer]: ...


class ScriptStore:
    """Calls the scripts one by one, at a time that the test chooses (0 = the server's own clock)."""

    def __init__(self, server: Server | Cluster, slot: Slot | None = None) -> None:
        self.server = server
        self.prefix = (slot or Slot()).prefix
        self._calls = 0

    @property
    def client(self) -> Any:
        """A client of the node that holds the slot."""
        return self.server.client_for(self.prefix) if isinstance(self.server, Cluster) else self.server.client()

    def acquire(
        self, operations: Sequence[Acquire], now_us: int, *, flush_id: bytes | None = None
    ) -> list[AcquireAnswer]:
        call = ACQUIRE.call(self.prefix, flush_id or self._next_id(), operations, now_us=now_us)
        return ACQUIRE.answers(self._eval(ACQUIRE.sha, ACQUIRE.source, call), operations)

    def settle(self, operations: Sequence[Settle], now_us: int, *, flush_id: bytes | None = None) -> list[SettleAnswer]:
        call = SETTLE.call(self.prefix, flush_id or self._next_id(), operations, now_us=now_us)
        return SETTLE.answers(self._eval(SETTLE.sha, SETTLE.source, call), operations)

    def _eval(self, sha: bytes, source: bytes, call: list[bytes | int]) -> bytes:
        from redis.exceptions import NoScriptError

        try:
            reply = self.client.execute_command("EVALSHA", sha, *call)
        except NoScriptError:
            reply = self.client.execute_command("EVAL", source, *call)
        assert isinstance(reply, bytes)
        return reply

    def record(self, bucket: str) -> bytes | None:
        """The bytes of a bucket's record."""
        found: bytes | None = self.client.get(keys.bucket(self.prefix, bucket))
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

    def _next_id(self) -> bytes:
        self._calls += 1
        return b"%d" % self._calls


__all__ = ["ACQUIRE", "SETTLE", "Decides", "Ledger", "ScriptStore"]
