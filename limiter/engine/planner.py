"""From a descriptor to the limits that cover it and the slot they live in."""

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
"""Combinations of values of one namespace whose shape is remembered."""

VALUES_KEPT_MAX = 256
"""Characters of a combination that is remembered."""


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
        """The limits that apply, by name, and the slot of their buckets (R9)."""
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
        """Whether somebody declared the namespace, or put a policy there."""
        return namespace in self._spaces or namespace in self.policies.namespaces

    def dimensions(self, namespace: str) -> set[str]:
        """The dimensions that the policies of a namespace speak of."""
        space = self._spaces.get(namespace)
        rules = () if space is None else space.rules.values()
        return {
            name for rule in rules for name in (*rule.match, *(name for limit in rule.limits for name in limit.per))
        }

    def places(self, namespace: str, limit: Limit, key: Mapping[str, str] | None) -> tuple[Sequence[Slot], str]:
        """The slots of a limit's bucket and its name there; without a key those of all its buckets, by its own name.

        A limit that is divided has a bucket of the same name in every partition.
        """
        space = self._spaces[namespace]
        if key is None:
            return space.slots, bucket_name(limit.bucket, ())
        slots = space.slots if limit.terms.is_divided else [space.slot(key)]
        return slots, bucket_name(limit.bucket, [key.get(dimension) for dimension in limit.per])

    def limits(self) -> Iterator[tuple[str, Limit]]:
        """Every limit, with its namespace."""
        return ((namespace, limit) for namespace, limits in self._limits.items() for limit in limits.values())

    def rule(self, namespace: str, policy: str) -> Rule | None:
        """A policy, by its name."""
        space = self._spaces.get(namespace)
        return None if space is None else space.rules.get(policy)

    def find(self, namespace: str, bucket: str) -> Limit | None:
        """The limit that a bucket belongs to, if its policy still exists."""
        limit = self._limits.get(namespace, {}).get(limit_of(bucket))
        return limit if limit is None or limit.rated_by is None else limit_at(limit, bucket)


class _Resolved(NamedTuple):
    """A policy and what it comes to. The policy is kept, so that no other can have its identity meanwhile."""

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
        """By the values of those dimensions."""
        self.rules = rules
        self._spread = spread
        self.slots = [Slot(name, partition) for partition in range(spread.partitions)]

    def find(self, values: tuple[str | None, ...], descriptor: Mapping[str, str]) -> Shape:
        """The shape of a descriptor with these values, kept within bounds: clients make up values."""
        shape = self._matcher.match(descriptor)
        if sum([len(value) for value in values if value is not None]) <= VALUES_KEPT_MAX:
            if len(self.shapes) >= SHAPES_KEPT_MAX:
                self.shapes.clear()
            self.shapes[values] = shape
        return shape

    def fits(self, spread: Namespace, rules: Mapping[str, Rule]) -> bool:
        """Whether it is spread like this and has these very limits."""
        return spread == self._spread and rules == self.rules

    def slot(self, descriptor: Mapping[str, str]) -> Slot:
        """The partition that a descriptor belongs to."""
        slots = self.slots
        return slots[0] if len(slots) == 1 else slots[_partition(self._spread, descriptor)]


def _partition(spread: Namespace, descriptor: Mapping[str, str]) -> int:
    values = ",".join(encode(descriptor.get(name)) for name in spread.partition_by)
    return int.from_bytes(blake2b(values.encode(), digest_size=8).digest()) % spread.partitions
