"""Policies and namespaces that are in force together."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from limiter.model.policy.choices import Mechanism
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields.field_refusals import STRICT, refuse
from limiter.model.policy.fields.kinds import Dimensions, Name, Partitions, Rate
from limiter.model.policy.policy import Policy

BACKENDS_MAX = 32
LISTED_MAX = 256


class Backend(BaseModel):
    """What a backend can do, and the policies that commit it (R17)."""

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
