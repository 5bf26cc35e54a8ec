"""From a descriptor to the limits that cover it and the slot they live in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, Self

from limiter.model.bucket.operations import LEARNED, TOO_LARGE, Charge, Want
from limiter.model.numbers import NUMBER_MAX
from limiter.model.policy.criticality import Classes, Criticality, lowest
from limiter.model.policy.fields.patterns import Pattern
from limiter.model.policy.limit import Limit, limit_of
from limiter.model.policy.matching import Matcher
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Namespace, PolicySet
from limiter.model.steps import AT_ONCE, Steps, finish
from limiter.store.keys import Slot, bucket_name, encode, limit_at


class Rule(NamedTuple):
    """One policy: what it covers, and its limits. One that denies has none."""

    name: str
    match: Mapping[str, Pattern]
    group: str | None
    limits: tuple[Limit, ...]
    denies: bool
    shadow: bool
    classes: Classes


class Covered(tuple[Limit, ...]):
    """The limits that cover a descriptor, by name. Made once for all descriptors that no pattern tells apart."""

    denied_by: str | None
    """The policy that refuses whatever it covers (W17); None where there is none."""
    denied_in_shadow: bool
    """Whether a policy would have, if it did not only watch."""
    classes: Classes | None
    """How the class of a request is found; None where it is what the request claims, or the node's default."""

    def __new__(cls, rules: Iterable[Rule], default: Criticality | None = None) -> Self:
        """Put together what the policies that apply have to say; `default` is the class of their namespace."""
        found = list(rules)
        made = super().__new__(cls, [limit for rule in found for limit in rule.limits])
        made.denied_by = next((rule.name for rule in found if rule.denies and not rule.shadow), None)
        made.denied_in_shadow = any(rule.denies and rule.shadow for rule in found)
        tables = tuple(table for rule in found for table in rule.classes.tables)
        defaults = [rule.classes.default for rule in found if rule.classes.default is not None]
        classes = Classes(tables, lowest(defaults) if defaults else default)
        made.classes = None if classes == Classes() else classes
        return made


NOTHING = Covered(())


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
                conclude = partial(Covered, default=spread.default_criticality)
                matcher = yield from Matcher.steps(list(found.values()), conclude)
                space = _Space(name, spread, found, matcher)
            self._spaces[name] = space

    def cover(self, namespace: str, descriptor: Mapping[str, str]) -> tuple[Slot, Covered]:
        """The limits that apply, by name, and the slot of their buckets (R9)."""
        space = self._spaces.get(namespace)
        if space is None:
            return Slot(namespace), NOTHING
        return space.slot(descriptor), space.matcher.match(descriptor)

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

    __slots__ = ("_spread", "matcher", "rules", "slots")

    def __init__(
        self, name: str, spread: Namespace, rules: Mapping[str, Rule], matcher: Matcher[Rule, Covered]
    ) -> None:
        self.matcher = matcher
        self.rules = rules
        self._spread = spread
        self.slots = [Slot(name, partition) for partition in range(spread.partitions)]

    def fits(self, spread: Namespace, rules: Mapping[str, Rule]) -> bool:
        """Whether it is spread like this and has these very limits."""
        return spread == self._spread and rules == self.rules

    def slot(self, descriptor: Mapping[str, str]) -> Slot:
        """The partition that a descriptor belongs to."""
        slots = self.slots
        return slots[0] if len(slots) == 1 else slots[_partition(self._spread, descriptor)]


def want(
    limit: Limit, descriptor: Mapping[str, str], work: float | None, criticality: Criticality, now_us: int
) -> Want:
    """What a request wants of a limit's bucket, at a time of the store's; `work` is the caller's estimate."""
    if limit.rated_by is not None:
        limit = limit.rated.get(descriptor.get(limit.rated_by), limit)
    charge, how = (limit.charge, limit.how_unsaid) if work is None or limit.counts else (work, limit.how_estimated)
    if limit.weights:
        charge = min(charge * limit.weight(descriptor), NUMBER_MAX)
    if charge > limit.request_max and not how & LEARNED:
        how |= TOO_LARGE
    per = limit.per
    values = (descriptor.get(per[0]),) if len(per) == 1 else [descriptor.get(dimension) for dimension in per]
    return Want(
        bucket_name(limit.bucket, values),
        limit.terms if limit.period is None else limit.params(now_us),
        limit.minimums[criticality],
        charge,
        how,
    )


def with_terms(charge: Charge, limit: Limit | None, now_us: int) -> Charge:
    """A charge with the terms of its policy now."""
    return charge if limit is None else charge.but(params=limit.params(now_us))


def _partition(spread: Namespace, descriptor: Mapping[str, str]) -> int:
    values = ",".join(encode(descriptor.get(name)) for name in spread.partition_by)
    return int.from_bytes(blake2b(values.encode(), digest_size=8).digest()) % spread.partitions
