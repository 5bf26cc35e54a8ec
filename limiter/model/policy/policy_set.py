"""Policies and namespaces that are in force together, and backends of which they commit more than they can do (R17).

    committed of a policy = its rate where it has one bucket
                            otherwise the rate of each key that it names, and of one more key if there may be others
    overbooked            = Σ committed of the backend's policies > the backend's rate

A rate is what a policy promises to each key, so the sum says whether all promises can be kept at once. How many keys
will come nobody knows beforehand: the sum is the least. Shadows, quotas and limits in requests promise no work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, Field, model_validator

from limiter.model.policy.choices import Count, Mechanism
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields.field_refusals import STRICT, refuse
from limiter.model.policy.fields.kinds import Dimensions, Name, Partitions, Rate, rate_per_s
from limiter.model.policy.matching import AnyOf
from limiter.model.policy.policy import Policy

NAMED_MAX = 3
"""Largest commitments that a warning names."""

_ROUNDING = 1 + 1e-9
BACKENDS_MAX = 32
LISTED_MAX = 256


class Backend(BaseModel):
    """The rate that a backend can do, and the policies that commit it (R17)."""

    model_config = STRICT

    rate: Rate
    policies: Annotated[list[Name], Field(max_length=LISTED_MAX)] | None = None

    @model_validator(mode="after")
    def _lists_each_once(self) -> Self:
        listed = self.policies
        if listed is not None and len(set(listed)) < max(1, len(listed)):
            found = "the same policy twice" if listed else "none"
            raise refuse("names of policies, each once; all of the namespace if absent", field="policies", found=found)
        return self


class Namespace(BaseModel):
    """How a namespace is partitioned (R9), the class of its requests that claim none (G4), its backends (R17)."""

    model_config = STRICT

    partitions: Partitions = 1
    partition_by: Dimensions = []
    default_criticality: Annotated[Criticality, Field(strict=False)] | None = None
    backends: Annotated[dict[Name, Backend], Field(max_length=BACKENDS_MAX)] | None = None

    @model_validator(mode="after")
    def _is_spread_by_something(self) -> Self:
        if self.partitions > 1 and not self.partition_by:
            raise refuse("with several partitions at least one dimension", field="partition_by", found="none")
        return self


class PolicySet(BaseModel):
    """All policies and namespaces in force together: a policy file, or the content of the store."""

    model_config = STRICT

    namespaces: dict[Name, Namespace] = {}
    policies: list[Policy] = []

    def namespace(self, name: str) -> Namespace:
        """Return a namespace's settings; one that was not declared has a single partition."""
        return self.namespaces.get(name, _SINGLE)

    def partitions_of(self, policy: Policy) -> int:
        """Return how many partitions share a limit. One that is split like its namespace lives whole in one (R9)."""
        spread = self.namespace(policy.namespace)
        is_whole = spread.partition_by and set(spread.partition_by) <= set(policy.per)
        return 1 if is_whole else spread.partitions

    def is_steered(self, policy: Policy) -> bool:
        """True if the controller steers anything of a policy: a cap, a charge, its shares, or overload control."""
        if policy.overload is not None or policy.learns:
            return True
        return policy.rate is not None and (policy.mechanism is not Mechanism.WORK or self.partitions_of(policy) > 1)


_SINGLE = Namespace()


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
        largest = sorted(names, key=lambda name: -commitments.get(name, 0.0))[:NAMED_MAX]
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
