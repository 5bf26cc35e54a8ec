"""Overbooking: policies that commit more than their backend can do (R17).

    committed of a policy = its rate where it has one bucket
                            otherwise the rate of each key that it names, and of one more key if there may be others
    overbooked            = Σ committed of the backend's policies > the backend's rate

A rate is what a policy promises to each key, so the sum says whether all promises can be kept at once. How many keys
will come nobody knows beforehand: the sum is the least. Shadows, quotas and limits in requests promise no work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nlargest
from typing import NamedTuple

from limiter.model.policy.choices import Count
from limiter.model.policy.fields.kinds import rate_per_s
from limiter.model.policy.matching import AnyOf
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Backend, PolicySet

NAMED_MAX = 3
"""Largest commitments that a warning names."""

_ROUNDING = 1 + 1e-9


class Overbooking(NamedTuple):
    """A backend whose policies commit more than it can do; `str` gives the warning."""

    namespace: str
    backend: str
    can_do: float
    committed: float
    largest: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """Return the warning: what is wrong, by which policies, what to do."""
        largest = ", ".join(f"{name} {committed:.6g}" for name, committed in self.largest)
        return (
            f"namespace {self.namespace}: backend {self.backend} can do {self.can_do:.6g} units/s, and its policies "
            f"commit {self.committed:.6g} or more ({largest}): "
            f"lower their rates, or raise backends.{self.backend}.rate"
        )


class UnknownPolicy(NamedTuple):
    """A backend that lists a policy which does not exist."""

    namespace: str
    backend: str
    name: str

    def __str__(self) -> str:
        """Return the warning."""
        return (
            f"namespace {self.namespace}: backend {self.backend} lists the policy {self.name}, which does not exist: "
            f"remove it from backends.{self.backend}.policies, or add the policy"
        )


def warnings(policies: PolicySet, within: str | None = None) -> list[str]:
    """Return a warning for every backend that is overbooked or lists an unknown policy, of one namespace or of all."""
    return [str(found) for found in overbooked(policies, within)]


def overbooked(policies: PolicySet, within: str | None = None) -> Iterator[Overbooking | UnknownPolicy]:
    """Yield what is wrong with the backends that namespaces declare."""
    each: dict[str, dict[str, float]] = {
        name: {} for name, namespace in policies.namespaces.items() if namespace.backends and within in (None, name)
    }
    for policy in policies.policies:
        if policy.namespace in each:
            each[policy.namespace][policy.name] = committed(policy)
    for name, commitments in each.items():
        for backend, terms in (policies.namespaces[name].backends or {}).items():
            yield from _judged(name, backend, terms, commitments)


def _judged(
    namespace: str, backend: str, terms: Backend, commitments: Mapping[str, float]
) -> Iterator[Overbooking | UnknownPolicy]:
    names = list(commitments) if terms.policies is None else terms.policies
    yield from (UnknownPolicy(namespace, backend, name) for name in names if name not in commitments)
    total, can_do = sum(commitments.get(name, 0.0) for name in names), rate_per_s(terms.rate)
    if total > can_do * _ROUNDING:
        largest = nlargest(NAMED_MAX, names, key=lambda name: commitments.get(name, 0.0))
        told = tuple((name, commitments[name]) for name in largest if commitments.get(name))
        yield Overbooking(namespace, backend, can_do, total, told)


def committed(policy: Policy) -> float:
    """Return the least units per second that a policy commits to all of its keys together."""
    if policy.rate is None or policy.shadow or policy.deny or policy.count is Count.REQUESTS:
        return 0.0
    rate = rate_per_s(policy.rate)
    if not policy.per:
        return rate
    for dimension, table in policy.rates.items():
        only = _only(policy, dimension)
        if only is not None:
            return sum(rate_per_s(table.get(value, policy.rate)) for value in only)
        return rate + sum(rate_per_s(own) for own in table.values())
    keys = 1
    for dimension in policy.per:
        keys *= len(_only(policy, dimension) or ("any",))
    return keys * rate


def _only(policy: Policy, dimension: str) -> list[str] | None:
    """Return the only values of a dimension that a policy covers; None if there may be others."""
    pattern = policy.match.get(dimension)
    if isinstance(pattern, AnyOf):
        values = pattern.texts
    elif isinstance(pattern, str):
        values = (pattern,)
    else:
        return None
    return None if any("*" in value for value in values) else list(dict.fromkeys(values))
