"""What the parts of a policy share: how a value is refused, and the plain kinds of number.

A refusal says what is allowed; `limiter.model.policy.problems` adds the policy, the field and what was found.
"""

from __future__ import annotations

from typing import Annotated, TypeGuard

from pydantic import BeforeValidator, ConfigDict, ValidationInfo
from pydantic_core import PydanticCustomError

from limiter.model.numbers import LEAST, NUMBER_MAX
from limiter.model.policy.fields import quantity

TIMELESS = ("", "%")


STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
"""What is not known is refused; what is kept cannot change."""


STORED = {"stored": True}
"""The context in which a policy is read that was put before, perhaps by an older version. Fields without effect are
let be there: to refuse them would take a limit out of force that was good when it was put."""


def is_stored(info: ValidationInfo) -> bool:
    """Whether a policy is read from the store."""
    return info.context is not None and bool(info.context.get("stored"))


def refuse(allowed: str, *, field: str = "", found: str = "") -> PydanticCustomError:
    """What is allowed; where and what was found only if it is not the value at hand."""
    return PydanticCustomError("refused", "{allowed}", {"allowed": allowed, "field": field, "found": found})


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that float64 holds to the unit: no NaN, no truth value."""
    # Written so that NaN fails as well.
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= NUMBER_MAX


def amount(value: object, allowed: str, *, least: float, timeless: bool = False) -> float | str:
    """An amount as people write it, kept as it was written."""
    try:
        number, unit = quantity.parse(value)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        raise refuse(allowed) from None
    if not least <= number <= NUMBER_MAX or (timeless and unit not in TIMELESS):
        raise refuse(allowed)
    return value  # type: ignore[return-value]


def _positive(value: object) -> float:
    if not (is_number(value) and value >= LEAST):
        raise refuse("a positive number")
    return float(value)


Positive = Annotated[float, BeforeValidator(_positive)]
