"""Plans of namespaces: the policies with a cap, a charge, a mechanism or shares to move, or with overload control."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from limiter.model.control.cycle_step import ControlParams, control_params
from limiter.model.overload.overload_state import OverloadParams, overload_params
from limiter.model.policy.limit import Limit, bucket_prefix, limit_of
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import PolicySet
from limiter.model.steps import AT_ONCE, Steps, finish
from limiter.store.keys import Slot, limit_at


class Terms(NamedTuple):
    """One policy, as the controller sees it."""

    policy: Policy
    limit: Limit
    control: ControlParams
    overload: OverloadParams | None
    partitions: int
    """Number of partitions that divide its limit by shares; 1 = no shares to move."""
    divided: int
    """Number of partitions that divide it, with or without shares."""

    @property
    def sheds(self) -> bool:
        """True if it has overload control."""
        return self.overload is not None


class Plan:
    """One namespace: its slots, and the policies to steer in them."""

    __slots__ = ("namespace", "slots", "terms")

    def __init__(self, namespace: str, partitions: int, terms: dict[str, Terms]) -> None:
        self.namespace = namespace
        self.slots = [Slot(namespace, partition) for partition in range(partitions)]
        self.terms = terms

    @property
    def is_divided(self) -> bool:
        """True if any limit is divided by shares that follow demand (B5)."""
        return any(terms.partitions > 1 for terms in self.terms.values())

    def find(self, bucket: str) -> Terms | None:
        """Return the terms of a bucket; None if it is not steered."""
        terms = self.terms.get(limit_of(bucket))
        if terms is None or terms.limit.rated_by is None:
            return terms
        return terms._replace(limit=limit_at(terms.limit, bucket))


def make_plans(policies: PolicySet) -> dict[str, Plan]:
    """Return the plans of all namespaces with steered policies."""
    return finish(plan_steps(policies, {}))


def plan_steps(policies: PolicySet, before: Mapping[str, Plan]) -> Steps[dict[str, Plan]]:
    """Make the plans in steps; unchanged policies keep the terms of the plans before."""
    found: dict[str, dict[str, Terms]] = {}
    for number, policy in enumerate(policies.policies):
        if number % AT_ONCE == 0:
            yield
        if policies.is_steered(policy):
            known = before[policy.namespace].terms if policy.namespace in before else {}
            found.setdefault(policy.namespace, {}).update(_terms(policy, policies, known))
    return {name: Plan(name, policies.namespace(name).partitions, terms) for name, terms in found.items()}


def _terms(policy: Policy, policies: PolicySet, known: Mapping[str, Terms]) -> dict[str, Terms]:
    """Return the terms of a policy's rate and quota, of each that is steered."""
    divided = policies.partitions_of(policy)
    found = {}
    for part in policy.parts():
        if policies.is_steered(part):
            name = bucket_prefix(part)
            terms = known.get(name)
            if terms is None or terms.policy is not policy or terms.divided != divided:
                terms = _terms_of(policy, part, divided)
            found[name] = terms
    return found


def _terms_of(policy: Policy, part: Policy, divided: int) -> Terms:
    # A quota's division is fixed: work that one partition has used cannot be taken back.
    shared = 1 if part.quota is not None else divided
    overload = overload_params(part.overload, partitions=divided) if part.overload else None
    return Terms(policy, Limit(part, partitions=divided), control_params(part), overload, shared, divided)


def describe(plans: dict[str, Plan]) -> str:
    """Return one line about the steered policies: `3 policies in 2 namespaces (11 partitions)`."""
    policies = sum(len({terms.limit.name for terms in plan.terms.values()}) for plan in plans.values())
    slots = sum(len(plan.slots) for plan in plans.values())
    if not policies:
        return "nothing yet: no policy counts requests, learns its charge, is divided or has overload control"
    spread = f"{_count(len(plans), 'namespace')} ({_count(slots, 'partition')})"
    return f"{_count(policies, 'policy', 'policies')} in {spread}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
