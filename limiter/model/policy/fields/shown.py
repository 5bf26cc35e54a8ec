"""Values and places in a message: on one line, not too long, as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

SHOWN_MAX = 80

DIMENSION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_INTEGER_SHOWN_MAX = 10**SHOWN_MAX


def show(value: object) -> str:
    """Return a value as it appears in a policy file, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping | BaseModel | list):
        return "a list" if isinstance(value, list) else "a mapping"
    if isinstance(value, int) and abs(value) > _INTEGER_SHOWN_MAX:
        return "a number beyond all bounds"
    text = ascii(str(value) if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."


def written(value: Any) -> Any:
    """Return 100 instead of 100.0, as people write it."""
    if isinstance(value, dict):
        return {name: written(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [written(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def step(part: str | int) -> str:
    """Return one part of a field's place; text of the author stays on the line."""
    text = str(part)
    return text if DIMENSION_NAME.fullmatch(text) or text.isdecimal() else show(text)
