"""Amounts as people write them, turned into units (W2).

50        units                      at 100/s: 50 units = 500 ms of lateness forgiven
500ms     time at a rate             at 100/s: 50 units
5%        a share of one second      at 100/s: 5 units = 50 ms
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_FORM = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)(?P<unit>%|us|ms|s|m|h|d)?", re.IGNORECASE
)

TEXTS_KEPT, TEXT_KEPT_MAX = 1024, 32
"""Amounts that are remembered, of so many letters: those of a policy and the defaults are looked at several times."""

ALLOWED = "a number of units (50), a time at the rate (500ms, 60s, 5m) or a share of a second (5%)"


def units(value: float | str, *, rate: float) -> float:
    """Return the amount in units, at a rate of units per second."""
    number, unit = parse(value)
    if unit == "":
        return number
    # A share of a second's work is divided last: 5 % of 100 is 5, not 5.000000000000001.
    return number * rate / 100 if unit == "%" else number * _SECONDS[unit] * rate


def parse(value: float | str) -> tuple[float, str]:
    """Number and unit; ValueError that shows what was found and what is allowed."""
    if isinstance(value, str):
        return _known(value) if len(value) <= TEXT_KEPT_MAX else _parse_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"found {value!r}; allowed: {ALLOWED}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"found {value!r}; the number must be finite")
    return number, ""


def _parse_text(text: str) -> tuple[float, str]:
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"found {text!r}; allowed: {ALLOWED}")
    number = float(match["number"])
    if not math.isfinite(number):
        raise ValueError(f"found {text!r}; the number must be finite")
    return number, (match["unit"] or "").lower()


_known = lru_cache(maxsize=TEXTS_KEPT)(_parse_text)
