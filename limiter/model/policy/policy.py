"""Policies: what is limited, for whom, and by how much.

    policy ── match ──► which descriptors      ── per ──► which buckets      ── the rest ──► the terms of each

Validated once, where it is read (`limiter.model.policy.reading`), with every error naming policy, field, what was found
and what is allowed. Amounts stay as people wrote them (`limiter.model.policy.fields.quantity`), so that a policy reads
back as it was put; `limiter.model.policy.limit` resolves them to numbers.
"""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import BaseModel, Field, ValidationInfo, model_validator

from limiter.model.overload.overload_block import Overload
from limiter.model.policy import soundness
from limiter.model.policy.blocks import Block, Learning, Quota, Steering
from limiter.model.policy.choices import Admit, Count, Mechanism, OnStoreFailure
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.kinds import (
    DIMENSIONS_MAX,
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
    Rate,
    RateTable,
    Reserve,
    Threshold,
    WeightTable,
    rate_per_s,
)
from limiter.model.policy.fields.patterns import Pattern
from limiter.model.policy.fields.refusals import STRICT, Positive
from limiter.model.policy.fitness import OF_THE_RATE

CAPACITY_DEFAULT = "1s"
DEBT_DEFAULT = "60s"


class Policy(BaseModel):
    """One limit: which requests it covers, what splits it into buckets, and how much."""

    model_config = STRICT

    name: Name
    description: Description = ""
    namespace: Name = "default"
    match: Annotated[dict[Dimension, Pattern], Field(max_length=DIMENSIONS_MAX)] = {}
    per: Dimensions = []
    group: Name | None = None
    deny: bool = False
    mechanism: Annotated[Mechanism, Field(strict=False)] = Mechanism.WORK
    count: Annotated[Count, Field(strict=False)] = Count.WORK
    rate: Rate | None = None
    rates: Annotated[dict[Dimension, RateTable], Field(max_length=1)] = {}
    capacity: Capacity = CAPACITY_DEFAULT
    burst: Burst = "10%"
    steering: Steering = Steering()
    minimum: Minimum | None = None
    charge: Charge = 1.0
    learning: Learning = Learning()
    min_work: Positive | None = None
    max_work: Positive | None = None
    max_request: Positive | None = None
    admit: Annotated[Admit, Field(strict=False)] = Admit.MINIMUM
    block: Block | None = None
    max_debt: Debt | None = None
    stop_debt: Debt | None = None
    settle_threshold: Threshold = 0.0
    reserve: dict[Annotated[Criticality, Field(strict=False)], Reserve] = {}
    weights: Annotated[dict[Dimension, WeightTable], Field(max_length=DIMENSIONS_MAX)] = {}
    quota: Quota | None = None
    overload: Overload | None = None
    criticality_by: Annotated[dict[Dimension, ClassTable], Field(max_length=DIMENSIONS_MAX)] = {}
    default_criticality: Annotated[Criticality, Field(strict=False)] | None = None
    on_store_failure: Annotated[OnStoreFailure, Field(strict=False)] | None = None
    shadow: bool = False

    @model_validator(mode="after")
    def _is_sound(self, info: ValidationInfo) -> Self:
        soundness.check(self, info)
        return self

    @property
    def floor(self) -> float:
        """The lowest cap. Where a policy says neither floor nor initial, no first cap of its rates is below it."""
        steering = self.steering
        if self.rate is None or {"floor", "initial"} & steering.model_fields_set:
            return steering.floor
        rates = [self.rate, *(rate for table in self.rates.values() for rate in table.values())]
        return min(steering.floor, quantity.units(steering.initial, rate=min(map(rate_per_s, rates))))

    @property
    def smallest_work(self) -> float:
        """The least work behind one token of a cap. Weights do not matter: they weigh the tokens as well (W16)."""
        return 1.0 if self.min_work is None else self.min_work

    def at(self, rate: float | str) -> Policy:
        """The same policy with one rate for all."""
        return self.model_copy(update={"rate": rate, "rates": {}})

    def parts(self) -> tuple[Policy, ...]:
        """The limits of a policy, each as a policy with a rate or a quota alone (P12): none, one or two."""
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
        held, rate = self.held, self.held if self.rate is None else rate_per_s(self.rate)
        reserves = [
            number * held / 100 if unit == "%" else quantity.units(reserve, rate=rate)
            for reserve in self.reserve.values()
            for number, unit in [quantity.parse(reserve)]
        ]
        return max(0.0, -self.least, *(-reserve for reserve in reserves))

    @property
    def debt_max(self) -> float:
        """Units that may be owed. The default is the largest of a minute at the rate, the capacity and `max_work`, so
        that one request of a slow limit is collected as well; and what may be borrowed (W5)."""
        rate = self.held if self.rate is None else rate_per_s(self.rate)
        if self.max_debt is not None:
            return quantity.units(self.max_debt, rate=rate)
        minute = 0.0 if self.rate is None else quantity.units(DEBT_DEFAULT, rate=rate)
        return max(minute, self.held, self.max_work or 0.0, self.borrowed)

    @property
    def without_store(self) -> OnStoreFailure:
        """What holds while the store is away: a quota is never handed out again unless its policy asks for that.

        Of a policy with a rate and a quota, `known` is for the quota.
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
    def held(self) -> float:
        """Units that may gather. The default is held at what a request needs: a slow rate has less in a second."""
        if self.quota is not None:
            return self.quota.work or self.quota.requests or 0.0
        assert self.rate is not None
        held = quantity.units(self.capacity, rate=rate_per_s(self.rate))
        return max(held, self.least) if self.capacity == CAPACITY_DEFAULT else held


_WITHOUT_A_RATE = {field: Policy.model_fields[field].default for field in OF_THE_RATE}
"""What is left of a policy with both for its quota."""
