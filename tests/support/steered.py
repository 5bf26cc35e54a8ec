"""Policies of the controller's tests, and a look at what the controller has written."""

from typing import Any

from limiter.model.bucket.bucket import Record
from limiter.model.control.kept_state import KeptState, unpack
from limiter.model.overload.shedding import Shedding
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.reading import read_policy_set
from limiter.store import keys
from limiter.store.keys import Slot
from limiter.store.layout import unpack_record
from tests.support.servers import Cluster, Server


def policies(*documents: dict[str, Any], **namespaces: dict[str, Any]) -> PolicySet:
    return read_policy_set({"policies": list(documents), "namespaces": namespaces})


def capped(**more: Any) -> dict[str, Any]:
    """A limit by requests, steered by their work."""
    return {"name": "capped", "match": {}, "rate": 100, "mechanism": "requests", "burst": "500ms", **more}


class Look:
    """Reads records, states and leases of a slot from a store."""

    def __init__(self, server: Server | Cluster, slot: Slot | None = None) -> None:
        self.server = server
        self.prefix = (slot or Slot()).prefix

    def _get(self, key: bytes) -> bytes | None:
        client = self.server.client_for(self.prefix) if isinstance(self.server, Cluster) else self.server.client()
        raw = client.get(key)
        assert raw is None or isinstance(raw, bytes)
        return raw

    def record(self, bucket: str) -> Record | None:
        raw = self._get(keys.bucket(self.prefix, bucket))
        return None if raw is None else unpack_record(raw)

    def cap(self, bucket: str) -> float:
        record = self.record(bucket)
        return 0.0 if record is None else record.rate

    def shedding(self, bucket: str) -> Shedding:
        record = self.record(bucket)
        return Shedding() if record is None or record.shedding is None else record.shedding

    def memory(self, bucket: str) -> KeptState | None:
        return unpack(self._get(keys.state(self.prefix, bucket)))

    def owner(self) -> str:
        return (self._get(keys.lease(self.prefix)) or b"        ")[8:].decode()

    def fence(self) -> int:
        return int(self._get(keys.fence(self.prefix)) or 0)
