"""The blocks within a policy: quota, steering, block, learning, local (`overload`: `limiter.model.overload`)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from limiter.model.bucket.block import FOR_MAX_S, IN_MAX_S
from limiter.model.policy.fields.field_refusals import STRICT, Positive, refuse
from limiter.model.policy.fields.kinds import (
    Alpha,
    BillingDay,
    CycleTime,
    Debt,
    Initial,
    LeaseSeconds,
    Need,
    QuotaPeriod,
    Refusals,
    Threshold,
    Zone,
    seconds_up_to,
)
from limiter.model.policy.period import Period, Span
from limiter.model.policy.period import parse as parse_period


class Quota(BaseModel):
    """An absolute limit over a calendar period (P4): of work, or of requests."""

    model_config = STRICT

    work: Positive | None = None
    requests: Positive | None = None
    period: QuotaPeriod
    billing_day: BillingDay | None = None
    timezone: Zone = "UTC"

    @property
    def span(self) -> Span:
        """The period in the calendar's form."""
        parsed = parse_period(self.period)
        assert parsed is not None
        return Span(*parsed, self.billing_day or 1)

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.work is None) == (self.requests is None):
            found = "neither of them" if self.work is None else "both of them"
            raise refuse("either work or requests", found=found)
        if self.billing_day is not None and self.period != Period.MONTH:
            raise refuse("only beside period: month", field="billing_day", found=str(self.billing_day))
        return self


class Smoothing(BaseModel):
    """The weight of the newest sample in each average (R1, R14)."""

    model_config = STRICT

    work_per_request: Alpha = 0.7
    work_rate: Alpha = 0.3
    rejection: Alpha = 0.7


class Auto(BaseModel):
    """When a bucket of mechanism `auto` counts requests (R10, R14)."""

    model_config = STRICT

    rate_high: Positive = 50.0
    rate_low: Positive = 20.0
    even: Positive = 0.5
    uneven: Positive = 1.0
    patience_s: Positive = 3.0

    @model_validator(mode="after")
    def _thresholds_lie_apart(self) -> Self:
        if self.rate_low > self.rate_high:
            raise refuse("at most rate_high", field="rate_low", found=f"{self.rate_low:g} above {self.rate_high:g}")
        if self.even > self.uneven:
            raise refuse("at most uneven", field="even", found=f"{self.even:g} above {self.uneven:g}")
        return self


class Steering(BaseModel):
    """How the controller moves the cap of a request bucket (R2–R6)."""

    model_config = STRICT

    rules: Literal["steady", "published"] = "steady"
    initial: Initial = "30%"
    lower_cycles: Positive = 3.0
    raise_cycles: Positive = 4.0
    safety: Positive = 1.2
    floor: Positive = 0.1
    cycle: CycleTime | None = None
    smoothing: Smoothing = Smoothing()
    auto: Auto = Auto()


class Block(BaseModel):
    """Deny a key for a time after too many refusals (W17)."""

    model_config = STRICT

    after: Refusals
    within: Annotated[float | str, seconds_up_to(IN_MAX_S, "1d"), Field(alias="in")]
    lasts: Annotated[float | str, seconds_up_to(FOR_MAX_S, "30d"), Field(alias="for")]


class Local(BaseModel):
    """Lending of parts of the limit to holders that decide by themselves (B8, P9)."""

    model_config = STRICT

    allowed: bool = False
    bound: Debt = 0.0
    lease_s: LeaseSeconds = 3.0
    need: Need = 4.0


class Learning(BaseModel):
    """How a learned charge follows the work of requests (W8)."""

    model_config = STRICT

    target: Literal["mean", "p50", "p90", "p95", "p99"] = "mean"
    margin: Threshold = "10%"
    initial: Positive = 1.0
