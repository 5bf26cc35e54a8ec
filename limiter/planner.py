"""From a descriptor to the limits that cover it and the slot they live in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from limiter.model.limit import Limit
from limiter.model.matching import Matcher
from limiter.model.operations import Charge, Want
from limiter.model.policy import Criticality, Namespace, PolicySet
from limiter.store.keys import Slot, bucket_name, encode

SLOTS_KEPT_MAX = 4096


class Planner:
    """All policies in force, resolved once. Made anew, and so forgotten, whenever a policy changes."""

    def __init__(self, policies: PolicySet) -> None:
        self.policies = policies
        self._limits: dict[str, dict[str, Limit]] = {}
        for policy in policies.policies:
            share = _share(policies.namespace(policy.namespace), policy.per)
            self._limits.setdefault(policy.namespace, {})[policy.name] = Limit(policy, share=share)
        self._matchers = {name: Matcher(list(limits.values())) for name, limits in self._limits.items()}
        self._slots: dict[tuple[str, int], Slot] = {}

    def cover(self, namespace: str, descriptor: Mapping[str, str]) -> tuple[Slot, Sequence[Limit]]:
        """The limits that apply, by name, and the slot of their buckets."""
        matcher = self._matchers.get(namespace)
        limits = matcher.match(descriptor) if matcher else ()
        return self.slot(namespace, descriptor), limits

    def slot(self, namespace: str, descriptor: Mapping[str, str]) -> Slot:
        """The partition that a descriptor belongs to (R9)."""
        spread = self.policies.namespace(namespace)
        partition = 0 if spread.partitions == 1 else _partition(spread, descriptor)
        slot = self._slots.get((namespace, partition))
        if slot is None:
            if len(self._slots) >= SLOTS_KEPT_MAX:
                self._slots.clear()
            self._slots[namespace, partition] = slot = Slot(namespace, partition)
        return slot

    def find(self, namespace: str, bucket: str) -> Limit | None:
        """The limit that a bucket belongs to, if its policy still exists."""
        return self._limits.get(namespace, {}).get(policy_of(bucket))


def want(
    limit: Limit, descriptor: Mapping[str, str], *, work: float | None, criticality: Criticality, now_us: int
) -> Want:
    """What a request wants of a limit's bucket."""
    weight = limit.weight(descriptor) if limit.weights else 1.0
    name = bucket_name(limit.name, [descriptor.get(dimension) for dimension in limit.per])
    charge = (limit.charge if work is None else work) * weight
    return Want(name, limit.params(now_us), limit.minimums[criticality], charge, limit.learned and work is None)


def with_terms(charge: Charge, limit: Limit | None, now_us: int) -> Charge:
    """A charge with the terms of its policy now."""
    return charge if limit is None else charge._replace(params=limit.params(now_us))


def policy_of(bucket: str) -> str:
    """The policy that a bucket's name begins with."""
    return bucket.partition(":")[0]


def _share(spread: Namespace, per: Sequence[str]) -> float:
    """A policy split by what the namespace is split by lives whole in one partition; a wider one is divided."""
    whole = spread.partitions == 1 or (spread.partition_by and set(spread.partition_by) <= set(per))
    return 1.0 if whole else 1.0 / spread.partitions


def _partition(spread: Namespace, descriptor: Mapping[str, str]) -> int:
    values = ",".join(encode(descriptor.get(name)) for name in spread.partition_by)
    return int.from_bytes(blake2b(values.encode(), digest_size=8).digest()) % spread.partitions
