"""Policies and namespaces that are in force together."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from limiter.model.policy.choices import Mechanism
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields.kinds import Dimensions, Name, Partitions
from limiter.model.policy.fields.refusals import STRICT, refuse
from limiter.model.policy.policy import Policy


class Namespace(BaseModel):
    """How a namespace is spread over slots (R9), and the class of its requests that claim none (G4)."""

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
    """Everything that is in force together: a policy file, or what the store holds."""

    model_config = STRICT

    namespaces: dict[Name, Namespace] = {}
    policies: list[Policy] = []

    def namespace(self, name: str) -> Namespace:
        """How a namespace is spread; one that nobody spoke of has a single partition."""
        return self.namespaces.get(name, _SINGLE)

    def partitions_of(self, policy: Policy) -> int:
        """How many partitions share a limit: one that is split as its namespace is lives whole in one of them (R9)."""
        spread = self.namespace(policy.namespace)
        is_whole = spread.partition_by and set(spread.partition_by) <= set(policy.per)
        return 1 if is_whole else spread.partitions

    def is_steered(self, policy: Policy) -> bool:
        """Whether the controller moves anything of a policy: a cap, a charge, its shares, or overload control."""
        if policy.overload is not None or policy.charge == "learned":
            return True
        return policy.rate is not None and (policy.mechanism is not Mechanism.WORK or self.partitions_of(policy) > 1)


_SINGLE = Namespace()
