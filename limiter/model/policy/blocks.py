"""The blocks within a policy: quota, steering, block, learning (`overload`: `limiter.model.overload`)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from limiter.model.bucket.block import FOR_MAX_S, IN_MAX_S
from limiter.model.policy.fields.kinds import BillingDay, Initial, QuotaPeriod, Refusals, Threshold, Zone, seconds_up_to
from limiter.model.policy.fields.refusals import STRICT, Positive, refuse
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
        """The period, as the calendar takes it."""
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


class Steering(BaseModel):
    """How the controller moves the cap of a request bucket (R2–R6)."""

    model_config = STRICT

    initial: Initial = "30%"
    lower_cycles: Positive = 3.0
    raise_cycles: Positive = 4.0
    safety: Positive = 1.2
    floor: Positive = 0.1


class Block(BaseModel):
    """A key that was refused too often is denied for a time (W17)."""

    model_config = STRICT

    after: Refusals
    within: Annotated[float | str, seconds_up_to(IN_MAX_S, "1d"), Field(alias="in")]
    lasts: Annotated[float | str, seconds_up_to(FOR_MAX_S, "30d"), Field(alias="for")]


class Learning(BaseModel):
    """How a learned charge follows the work that requests do (W8)."""

    model_config = STRICT

    target: Literal["mean", "p50", "p90", "p95", "p99"] = "mean"
    margin: Threshold = "10%"
    initial: Positive = 1.0
