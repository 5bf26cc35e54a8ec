"""Shared parts of a policy's fields: refusing a value, and the plain kinds of number.

A refusal says what is allowed; `limiter.model.policy.problems` adds the policy, the field and the value found.
"""

from __future__ import annotations

from typing import Annotated, TypeGuard

from pydantic import BeforeValidator, ConfigDict, ValidationInfo
from pydantic_core import PydanticCustomError

from limiter.model.numbers import LEAST, NUMBER_MAX
from limiter.model.policy.fields import quantity

TIMELESS = ("", "%")


STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
"""Unknown fields are refused; models are immutable."""


STORED = {"stored": True}
"""The context for reading a stored policy, perhaps put by an older version. Fields without effect are accepted then:
refusing them would disable a limit that was valid when it was put."""


def is_stored(info: ValidationInfo) -> bool:
    """True if a policy is read from the store."""
    return info.context is not None and bool(info.context.get("stored"))


def refuse(allowed: str, *, field: str = "", found: str = "") -> PydanticCustomError:
    """Return an error that says what is allowed; field and found value only if they are not those at hand."""
    return PydanticCustomError("refused", "{allowed}", {"allowed": allowed, "field": field, "found": found})


def is_number(value: object) -> TypeGuard[float]:
    """True for a number whose units float64 represents exactly: no NaN, no boolean."""
    # Written so that NaN fails, too.
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= NUMBER_MAX


def amount(value: object, allowed: str, *, least: float, timeless: bool = False) -> float | str:
    """Check an amount as people write it; return it as it was written."""
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
