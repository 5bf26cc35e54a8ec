"""From a descriptor to the limits that cover it and the slot they live in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from limiter.model.limit import Limit
from limiter.model.matching import Matcher
from limiter.model.operations import TOO_LARGE, Charge, Want
from limiter.model.policy import NUMBER_MAX, Criticality, Namespace, Policy, PolicySet
from limiter.model.steps import AT_ONCE, Steps, finish
from limiter.store.keys import Slot, bucket_name, encode


class Planner:
    """All policies in force, resolved once; a change of policies makes another one.

    What has not changed is taken over from the planner before: the limits of the same policies, and with them what
    they have counted; and the namespaces all of whose limits are the same, with what they remember of descriptors.
    """

    def __init__(self, policies: PolicySet) -> None:
        finish(self._build(policies, None))

    @classmethod
    def steps(cls, policies: PolicySet, before: Planner) -> Steps[Planner]:
        """The same in steps: with thousands of policies it takes longer than a request should wait."""
        planner = cls.__new__(cls)
        yield from planner._build(policies, before)  # noqa: SLF001  one of us
        return planner

    def _build(self, policies: PolicySet, before: Planner | None) -> Steps[None]:
        self.policies = policies
        self._limits: dict[str, dict[str, Limit]] = {}
        self._resolved: dict[int, _Resolved] = {}
        known = before._resolved if before else {}  # noqa: SLF001  one of us
        for number, policy in enumerate(policies.policies):
            if number % AT_ONCE == 0:
                yield
            partitions = policies.partitions_of(policy)
            resolved = known.get(id(policy))
            if resolved is None or resolved.policy is not policy or resolved.partitions != partitions:
                resolved = _Resolved(policy, partitions, Limit(policy, partitions=partitions))
            self._resolved[id(policy)] = resolved
            self._limits.setdefault(policy.namespace, {})[policy.name] = resolved.limit
        self._spaces: dict[str, _Space] = {}
        for name, limits in self._limits.items():
            yield
            space = before._spaces.get(name) if before else None  # noqa: SLF001  one of us
            if space is None or not space.fits(policies.namespace(name), limits):
                matcher = yield from Matcher.steps(list(limits.values()))
                space = _Space(name, policies.namespace(name), limits, matcher)
            self._spaces[name] = space

    def cover(self, namespace: str, descriptor: Mapping[str, str]) -> tuple[Slot, Sequence[Limit]]:
        """The limits that apply, by name, and the slot of their buckets (R9)."""
        space = self._spaces.get(namespace)
        if space is None:
            return Slot(namespace), ()
        return space.slot(descriptor), space.matcher.match(descriptor)

    def declares(self, namespace: str) -> bool:
        """Whether somebody declared the namespace, or put a policy there."""
        return namespace in self._spaces or namespace in self.policies.namespaces

    def dimensions(self, namespace: str) -> set[str]:
        """The dimensions that the policies of a namespace speak of."""
        limits = self._limits.get(namespace, {}).values()
        return {name for limit in limits for name in (*limit.match, *limit.per)}

    def places(self, namespace: str, limit: Limit, key: Mapping[str, str] | None) -> tuple[Sequence[Slot], str]:
        """The slots of a limit's bucket and its name there; without a key those of all its buckets, by its own name.

        A limit that is divided has a bucket of the same name in every partition.
        """
        space = self._spaces[namespace]
        if key is None:
            return space.slots, bucket_name(limit.name, ())
        slots = space.slots if limit.terms.is_divided else [space.slot(key)]
        return slots, bucket_name(limit.name, [key.get(dimension) for dimension in limit.per])

    def limits(self) -> Iterator[tuple[str, Limit]]:
        """Every limit, with its namespace."""
        return ((namespace, limit) for namespace, limits in self._limits.items() for limit in limits.values())

    def find(self, namespace: str, bucket: str) -> Limit | None:
        """The limit that a bucket belongs to, if its policy still exists."""
        return self._limits.get(namespace, {}).get(policy_of(bucket))


class _Resolved(NamedTuple):
    """A policy and its limit. The policy is kept, so that no other can have its identity meanwhile."""

    policy: Policy
    partitions: int
    limit: Limit


class _Space:
    """A namespace that has policies."""

    __slots__ = ("_limits", "_spread", "matcher", "slots")

    def __init__(self, name: str, spread: Namespace, limits: Mapping[str, Limit], matcher: Matcher[Limit]) -> None:
        self.matcher = matcher
        self._limits = limits
        self._spread = spread
        self.slots = [Slot(name, partition) for partition in range(spread.partitions)]

    def fits(self, spread: Namespace, limits: Mapping[str, Limit]) -> bool:
        """Whether it is spread like this and has these very limits."""
        return spread == self._spread and limits == self._limits

    def slot(self, descriptor: Mapping[str, str]) -> Slot:
        """The partition that a descriptor belongs to."""
        slots = self.slots
        return slots[0] if len(slots) == 1 else slots[_partition(self._spread, descriptor)]


def want(
    limit: Limit, descriptor: Mapping[str, str], work: float | None, criticality: Criticality, now_us: int
) -> Want:
    """What a request wants of a limit's bucket, at a time of the store's; `work` is the caller's estimate."""
    charge, how = (limit.charge, limit.how_unsaid) if work is None else (work, limit.how_estimated)
    if limit.weights:
        charge = min(charge * limit.weight(descriptor), NUMBER_MAX)
    if charge > limit.request_max and work is not None:
        how |= TOO_LARGE
    per = limit.per
    values = (descriptor.get(per[0]),) if len(per) == 1 else [descriptor.get(dimension) for dimension in per]
    return Want(
        bucket_name(limit.name, values),
        limit.terms if limit.period is None else limit.params(now_us),
        limit.minimums[criticality],
        charge,
        how,
    )


def with_terms(charge: Charge, limit: Limit | None, now_us: int) -> Charge:
    """A charge with the terms of its policy now."""
    return charge if limit is None else charge.but(params=limit.params(now_us))


def policy_of(bucket: str) -> str:
    """The policy that a bucket's name begins with."""
    return bucket.partition(":")[0]


def _partition(spread: Namespace, descriptor: Mapping[str, str]) -> int:
    values = ",".join(encode(descriptor.get(name)) for name in spread.partition_by)
    return int.from_bytes(blake2b(values.encode(), digest_size=8).digest()) % spread.partitions
