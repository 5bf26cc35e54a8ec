"""Policies and namespaces that are in force together."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from limiter.model.policy.choices import Mechanism
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields.field_refusals import STRICT, refuse
from limiter.model.policy.fields.kinds import Dimensions, Name, Partitions
from limiter.model.policy.policy import Policy


class Namespace(BaseModel):
    """How a namespace is partitioned (R9), and the class of its requests that claim none (G4)."""

    model_config = STRICT

    partitions: Partitions = 1
    partition_by: Dimensions = []
    default_criticality: Annotated[Criticality, Field(strict=False)] | None = None

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
