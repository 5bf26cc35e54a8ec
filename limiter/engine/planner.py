"""The limits that cover a descriptor, and the slot of their buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from limiter.engine.shape import NOTHING, Rule, Shape
from limiter.model.policy.criticality import Classes
from limiter.model.policy.limit import Limit, limit_of
from limiter.model.policy.matching import Matcher
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Namespace, PolicySet
from limiter.model.steps import AT_ONCE, Steps, finish
from limiter.store.keys import Slot, bucket_name, encode, limit_at

SHAPES_KEPT_MAX = 8192
"""Combinations of values whose shape is kept, for one namespace."""

VALUES_KEPT_MAX = 256
"""Characters of a combination that is kept; longer ones are not."""


class Planner:
    """All policies in force, resolved once; a change of policies makes another planner.

    Unchanged parts are taken over from the previous planner: the limits of unchanged policies, with their counters, and
    the namespaces whose limits are all unchanged, with the shapes that they keep.
    """

    def __init__(self, policies: PolicySet) -> None:
        finish(self._build(policies, None))

    @classmethod
    def steps(cls, policies: PolicySet, before: Planner) -> Steps[Planner]:
        """Build a planner in steps: with thousands of policies it takes longer than a request should wait."""
        planner = cls.__new__(cls)
        yield from planner._build(policies, before)  # noqa: SLF001  one of us
        return planner

    def _build(self, policies: PolicySet, before: Planner | None) -> Steps[None]:
        self.policies = policies
        self._limits: dict[str, dict[str, Limit]] = {}
        self._resolved: dict[int, _Resolved] = {}
        rules: dict[str, dict[str, Rule]] = {}
        known = before._resolved if before else {}  # noqa: SLF001  one of us
        for number, policy in enumerate(policies.policies):
            if number % AT_ONCE == 0:
                yield
            partitions = policies.partitions_of(policy)
            resolved = known.get(id(policy))
            if resolved is None or resolved.policy is not policy or resolved.partitions != partitions:
                resolved = _Resolved(policy, partitions, _rule(policy, partitions))
            self._resolved[id(policy)] = resolved
            rules.setdefault(policy.namespace, {})[policy.name] = resolved.rule
            of_space = self._limits.setdefault(policy.namespace, {})
            for limit in resolved.rule.limits:
                of_space[limit.bucket] = limit
        self._spaces: dict[str, _Space] = {}
        for name, found in rules.items():
            yield
            space = before._spaces.get(name) if before else None  # noqa: SLF001  one of us
            if space is None or not space.fits(policies.namespace(name), found):
                spread = policies.namespace(name)
                conclude = partial(Shape, namespace=name, default=spread.default_criticality)
                matcher = yield from Matcher.steps(list(found.values()), conclude)
                space = _Space(name, spread, found, matcher)
            self._spaces[name] = space

    def cover(self, namespace: str, descriptor: Mapping[str, str]) -> tuple[Slot, Shape]:
        """Return the slot and the limits that apply to a descriptor, by name (R9)."""
        space = self._spaces.get(namespace)
        if space is None:
            return Slot(namespace), NOTHING
        get = descriptor.get
        values = tuple([get(name) for name in space.names])
        shape = space.shapes.get(values)
        if shape is None:
            shape = space.find(values, descriptor)
        slots = space.slots
        return slots[0] if len(slots) == 1 else space.slot(descriptor), shape

    def declares(self, namespace: str) -> bool:
        """True if the namespace was declared, or has a policy."""
        return namespace in self._spaces or namespace in self.policies.namespaces

    def dimensions(self, namespace: str) -> set[str]:
        """Return the dimensions that the policies of a namespace use."""
        space = self._spaces.get(namespace)
        rules = () if space is None else space.rules.values()
        return {
            name for rule in rules for name in (*rule.match, *(name for limit in rule.limits for name in limit.per))
        }

    def places(self, namespace: str, limit: Limit, key: Mapping[str, str] | None) -> tuple[Sequence[Slot], str]:
        """Return the slots of a limit's bucket, and its name; without a key of all its buckets, and the limit's name.

        A limit that is divided has a bucket of the same name in every partition.
        """
        space = self._spaces[namespace]
        if key is None:
            return space.slots, bucket_name(limit.bucket, ())
        slots = space.slots if limit.terms.is_divided else [space.slot(key)]
        return slots, bucket_name(limit.bucket, [key.get(dimension) for dimension in limit.per])

    def slots(self, namespace: str) -> Sequence[Slot]:
        """Return all slots of a namespace that has policies."""
        return self._spaces[namespace].slots

    def limits(self) -> Iterator[tuple[str, Limit]]:
        """Yield every limit, with its namespace."""
        return ((namespace, limit) for namespace, limits in self._limits.items() for limit in limits.values())

    def rule(self, namespace: str, policy: str) -> Rule | None:
        """Return a policy's rule by its name."""
        space = self._spaces.get(namespace)
        return None if space is None else space.rules.get(policy)

    def find(self, namespace: str, bucket: str) -> Limit | None:
        """Return the limit of a bucket, if its policy still exists."""
        limit = self._limits.get(namespace, {}).get(limit_of(bucket))
        return None if limit is None else limit_at(limit, bucket)


class _Resolved(NamedTuple):
    """A policy and its rule. Keeping the policy keeps its identity from being reused."""

    policy: Policy
    partitions: int
    rule: Rule


def _rule(policy: Policy, partitions: int) -> Rule:
    limits = tuple(Limit(part, partitions=partitions) for part in policy.parts())
    classes = Classes(tuple(policy.criticality_by.items()), policy.default_criticality)
    return Rule(policy.name, policy.match, policy.group, limits, policy.deny, policy.shadow, classes)


class _Space:
    """A namespace that has policies."""

    __slots__ = ("_matcher", "_spread", "names", "rules", "shapes", "slots")

    def __init__(self, name: str, spread: Namespace, rules: Mapping[str, Rule], matcher: Matcher[Rule, Shape]) -> None:
        self._matcher = matcher
        self.names = matcher.dimensions
        """The dimensions that policies match on."""
        self.shapes: dict[tuple[str | None, ...], Shape] = {}
        """Shapes by the values of those dimensions."""
        self.rules = rules
        self._spread = spread
        self.slots = [Slot(name, partition) for partition in range(spread.partitions)]

    def find(self, values: tuple[str | None, ...], descriptor: Mapping[str, str]) -> Shape:
        """Return the shape of these values. The number kept is bounded: clients invent values."""
        shape = self._matcher.match(descriptor)
        if sum([len(value) for value in values if value is not None]) <= VALUES_KEPT_MAX:
            if len(self.shapes) >= SHAPES_KEPT_MAX:
                self.shapes.clear()
            self.shapes[values] = shape
        return shape

    def fits(self, spread: Namespace, rules: Mapping[str, Rule]) -> bool:
        """True if it has this partitioning and exactly these limits."""
        return spread == self._spread and rules == self.rules

    def slot(self, descriptor: Mapping[str, str]) -> Slot:
        """Return the partition that a descriptor belongs to."""
        slots = self.slots
        return slots[0] if len(slots) == 1 else slots[_partition(self._spread, descriptor)]


def _partition(spread: Namespace, descriptor: Mapping[str, str]) -> int:
    values = ",".join(encode(descriptor.get(name)) for name in spread.partition_by)
    return int.from_bytes(blake2b(values.encode(), digest_size=8).digest()) % spread.partitions
