"""Reading JSON leniently, to say what is wrong with it.

The decoders are strict and fast, and say little when they refuse. What they refuse is read again here: everything
that is JSON at all, and besides it what people send in its place (NaN, 1e400, lone surrogates, keys that stand
twice), kept as it was written, so that `api.explain` can name the field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

DEPTH_MAX = 32
DIGITS_MAX = 400  # a number of more digits is beyond every float

_AFTER_QUOTE = re.compile(rb'"\s*:')
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"(\s*:)?|[\[\]{}]', re.DOTALL)


class Malformed(ValueError):
    """Not JSON: the message says where."""


class Odd(str):
    """A number as it was written, where JSON or float64 has none like it."""

    __slots__ = ()


class Fields(dict[str, Any]):
    """An object, with the names that stand in it more than once."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        pairs = list(pairs)
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.twice = sorted({name for name in names if names.count(name) > 1}) if len(names) > len(self) else []


def read(body: bytes) -> Any:
    """The document, or `Malformed`. Objects are `Fields`; impossible numbers are `Odd`."""
    _check_depth(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"the body is not UTF-8: byte {error.start} cannot be") from None
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Malformed(
            f"the body is not JSON: {_lower(error.msg).removesuffix(' at')} at character {error.pos}"
        ) from None


def has_twice(body: bytes, keys: int) -> bool:
    """Whether a body that decoded to so many different keys may hold one of them twice.

    Each key brings a colon. As many colons as keys: none stands twice. More: perhaps one within a text, so colons
    after a quote are counted, and at last the texts are told from what is between them.
    """
    if body.count(b":") == keys or (b"\\" not in body and len(_AFTER_QUOTE.findall(body)) == keys):
        return False
    return sum([1 for _, colon in _TOKEN.findall(body) if colon]) != keys


def _check_depth(body: bytes) -> None:
    """Refuse deep nesting before anything recurses into it; names the field it is in."""
    depth, field = 0, ""
    for token in _TOKEN.finditer(body):
        if token[2] and depth == 1:
            field = token[1].decode("ascii", "backslashreplace")
        if token[0] in b"[{":
            depth += 1
        elif token[0] in b"]}":
            depth -= 1
        if depth > DEPTH_MAX:
            raise Malformed(f"{shown(field)}: nested more than {DEPTH_MAX} levels deep" if field else _TOO_DEEP)


_TOO_DEEP = f"the body is nested more than {DEPTH_MAX} levels deep"


def _float(text: str) -> float | Odd:
    number = float(text)
    return number if math.isfinite(number) else Odd(text)


def _int(text: str) -> int | Odd:
    return int(text) if len(text) <= DIGITS_MAX else Odd(text)


_DECODER = json.JSONDecoder(object_pairs_hook=Fields, parse_float=_float, parse_int=_int, parse_constant=Odd)


def shown(value: object, characters_max: int = 60) -> str:
    """A value as JSON in ASCII, cut: fit for a message, whatever is in it."""
    text = str(value) if isinstance(value, Odd) else json.dumps(value, default=str)
    return text if len(text) <= characters_max else text[: characters_max - 3] + "..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
