"""Policies: what is limited, for whom, and by how much.

    policy ── match ──► which descriptors      ── per ──► which buckets      ── the rest ──► the terms of each

A policy is validated once, where it is read (`limiter.model.policy.reading`); every error names policy, field, what was
found and what is allowed. Amounts stay as people wrote them (`limiter.model.policy.fields.quantity`), so that a policy
reads back as it was put; `limiter.model.policy.limit` resolves them to numbers.
"""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import BaseModel, Field, ValidationInfo, model_validator

from limiter.model.numbers import DIMENSIONS_MAX
from limiter.model.overload.overload_block import Overload
from limiter.model.policy import soundness
from limiter.model.policy.blocks import Block, Learning, Local, Quota, Steering
from limiter.model.policy.choices import Admit, Count, Mechanism, OnStoreFailure, Rounding
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.field_refusals import STRICT, Positive
from limiter.model.policy.fields.kinds import (
    Burst,
    Capacity,
    Charge,
    ClassTable,
    Debt,
    Description,
    Dimension,
    Dimensions,
    Minimum,
    Name,
    Places,
    Rate,
    RateTable,
    Reserve,
    SettleThreshold,
    WeightTable,
    rate_per_s,
)
from limiter.model.policy.fields.patterns import Pattern
from limiter.model.policy.fitness import OF_THE_RATE

CAPACITY_DEFAULT = "1s"
DEBT_DEFAULT = "60s"


class Policy(BaseModel):
    """One limit: which requests it covers, what splits it into buckets, and how much."""

    model_config = STRICT

    name: Name
    description: Description = ""
    namespace: Name = "default"
    match: Annotated[dict[Dimension, Pattern], Field(max_length=DIMENSIONS_MAX)] = Field(default_factory=dict)
    per: Dimensions = Field(default_factory=list)
    group: Name | None = None
    deny: bool = False
    mechanism: Annotated[Mechanism, Field(strict=False)] = Mechanism.WORK
    count: Annotated[Count, Field(strict=False)] = Count.WORK
    rate: Rate | None = None
    rates: Annotated[dict[Dimension, RateTable], Field(max_length=1)] = Field(default_factory=dict)
    capacity: Capacity = CAPACITY_DEFAULT
    burst: Burst = "10%"
    steering: Steering = Steering()
    minimum: Minimum | None = None
    charge: Charge = 1.0
    learning: Learning = Learning()
    learn_by: Dimensions = []
    work_unit: Positive | None = None
    round: Annotated[Rounding, Field(strict=False)] = Rounding.UP
    min_work: Positive | None = None
    max_work: Positive | None = None
    max_request: Positive | None = None
    admit: Annotated[Admit, Field(strict=False)] = Admit.MINIMUM
    in_flight: Places | None = None
    block: Block | None = None
    local: Local = Local()
    max_debt: Debt | None = None
    stop_debt: Debt | None = None
    settle_threshold: SettleThreshold = 0.0
    reserve: dict[Annotated[Criticality, Field(strict=False)], Reserve] = Field(default_factory=dict)
    weights: Annotated[dict[Dimension, WeightTable], Field(max_length=DIMENSIONS_MAX)] = Field(default_factory=dict)
    quota: Quota | None = None
    overload: Overload | None = None
    criticality_by: Annotated[dict[Dimension, ClassTable], Field(max_length=DIMENSIONS_MAX)] = Field(
        default_factory=dict
    )
    default_criticality: Annotated[Criticality, Field(strict=False)] | None = None
    on_store_failure: Annotated[OnStoreFailure, Field(strict=False)] | None = None
    shadow: bool = False

    @model_validator(mode="after")
    def _is_sound(self, info: ValidationInfo) -> Self:
        soundness.check(self, info)
        return self

    @property
    def floor(self) -> float:
        """The lowest cap. If a policy sets neither floor nor initial, no first cap of its rates is below it."""
        steering = self.steering
        if self.rate is None or {"floor", "initial"} & steering.model_fields_set:
            return steering.floor
        rates = [self.rate, *(rate for table in self.rates.values() for rate in table.values())]
        return min(steering.floor, quantity.units(steering.initial, rate=min(map(rate_per_s, rates))))

    @property
    def unit(self) -> float:
        """The caller's measure per unit of work (W19), as `limiter.model.bucket.operations.Charge.unit`."""
        if self.work_unit is None:
            return 0.0
        return self.work_unit if self.round is Rounding.UP else -self.work_unit

    @property
    def learns(self) -> bool:
        """True if the charge is learned (W8): by default where the mechanism is chosen by what requests cost."""
        if self.mechanism is Mechanism.AUTO and self.rate is not None and "charge" not in self.model_fields_set:
            return True
        return self.charge == "learned"

    @property
    def fixed_charge(self) -> float:
        """The charge of a policy that does not learn; 0 of one that does."""
        return 0.0 if self.learns or self.charge == "learned" else self.charge

    @property
    def lightest(self) -> float:
        """The least weight of a request that takes any tokens; a value that is not listed weighs 1."""
        lightest = 1.0
        for dimension, table in self.weights.items():
            only = self.match.get(dimension)
            weights = [weight for weight in table.values() if weight > 0]
            if isinstance(only, str) and only in table:
                weights = [table[only] or 1.0]
            else:
                weights.append(1.0)
            lightest *= min(weights)
        return lightest

    @property
    def largest_work(self) -> float | None:
        """F: the most work behind one token of a cap. `max_work` has the weight in it, and so has the number of tokens
        that a request takes: a light request may do it all for a part of a token (W16)."""
        return None if self.max_work is None else self.max_work / self.lightest

    @property
    def held_s(self) -> float:
        """Return the capacity of a bucket of work, as time at the rate."""
        return 0.0 if self.rate is None else self.held / rate_per_s(self.rate)

    def at(self, rate: float | str) -> Policy:
        """Return the same policy with one rate for all."""
        return self.model_copy(update={"rate": rate, "rates": {}})

    def parts(self) -> tuple[Policy, ...]:
        """Return the limits of a policy, each as a policy with a rate or a quota alone (P12): none, one or two."""
        if self.deny:
            return ()
        if self.rate is not None and self.quota is not None:
            quota = self.model_copy(update=_WITHOUT_A_RATE)
            quota.model_fields_set.difference_update(_WITHOUT_A_RATE)
            return self.model_copy(update={"quota": None}), quota
        return (self,)

    @property
    def request_max(self) -> float:
        """The largest estimate that is admitted: `max_request`, or `max_work`, which no request exceeds (W13)."""
        return min(self.max_request or math.inf, self.max_work or math.inf)

    @property
    def borrowed(self) -> float:
        """How far below zero some class of request is admitted (W3, W11)."""
        if not self.reserve:
            return max(0.0, -self.least)
        held = self.held
        rate = held if self.rate is None else rate_per_s(self.rate)
        reserves = [
            number * held / 100 if unit == "%" else quantity.units(reserve, rate=rate)
            for reserve in self.reserve.values()
            for number, unit in [quantity.parse(reserve)]
        ]
        return max(0.0, -self.least, -min(reserves, default=0.0))

    @property
    def debt_max(self) -> float:
        """The debt bound in units. The default is the largest of a minute at the rate, the capacity and `max_work`,
        so that one request of a slow limit is collected as well; plus what may be borrowed (W5)."""
        rate = self.held if self.rate is None else rate_per_s(self.rate)
        if self.max_debt is not None:
            return quantity.units(self.max_debt, rate=rate)
        minute = 0.0 if self.rate is None else quantity.units(DEBT_DEFAULT, rate=rate)
        return max(minute, self.held, self.max_work or 0.0, self.borrowed)

    @property
    def without_store(self) -> OnStoreFailure:
        """How to decide while the store is away: a quota is never handed out again unless its policy says so.

        For a policy with a rate and a quota, `known` applies to the quota.
        """
        if self.on_store_failure not in (None, OnStoreFailure.KNOWN):
            return self.on_store_failure
        return OnStoreFailure.LOCAL if self.quota is None else OnStoreFailure.KNOWN

    @property
    def least(self) -> float:
        """The balance that a request needs, whatever its class."""
        if self.minimum is not None:
            return self.minimum
        return 1.0 if self.quota is None else 0.0

    @property
    def lent_least(self) -> float:
        """Units of capacity below which a part of the limit is of no use to a holder: a few requests' worth (P9)."""
        if self.count is Count.REQUESTS or self.mechanism is Mechanism.REQUESTS:
            return self.local.need
        charge = self.learning.initial if self.charge == "learned" else self.charge
        return self.local.need * (charge or 1.0)

    @property
    def held(self) -> float:
        """The capacity in units. The default is at least what a request needs: a slow rate has less in a second."""
        if self.quota is not None:
            return self.quota.work or self.quota.requests or 0.0
        assert self.rate is not None
        held = quantity.units(self.capacity, rate=rate_per_s(self.rate))
        return max(held, self.least) if self.capacity == CAPACITY_DEFAULT else held


_WITHOUT_A_RATE = {
    field: Policy.model_fields[field].get_default(call_default_factory=True, validated_data={}) for field in OF_THE_RATE
}
"""The values of a rate's fields in the quota part of a policy with both."""
