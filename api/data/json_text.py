"""Lenient reading of JSON, to say what is wrong with it.

The decoders are strict and fast, and say little when they refuse. A refused body is read again here: all JSON, and
also what people send in its place (NaN, 1e400, lone surrogates, repeated keys), kept as it was written, so that
`api.data.field_problems` can name the field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import accumulate, islice
from typing import Any

DEPTH_MAX = 32
DIGITS_MAX = 400  # a number with more digits is beyond every float
PARTS_MAX = 50_000
"""Objects, lists and commas in one document. A full batch of full descriptors has fewer; a body with more is made to be
slow to read, and is refused unread (F-H10)."""

# An unterminated string extends to the end of the body: looking for another one within it would be quadratic.
_TOKEN = re.compile(rb'"((?:[^"\\]++|\\.)*+)(?:"(\s*+:)?)?|[\[\]{}]', re.DOTALL)
_TOKENS_MAX = 10_000  # tokens read to name the deeply nested field

_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_STEPS = bytes(set(range(256)) - set(b"[{]}"))


class Malformed(ValueError):
    """The body is not JSON; the message says where."""


class TooMany(ValueError):
    """The body may be JSON, but has too many parts to be read."""


class Odd(str):
    """A number as it was written, that JSON or float64 cannot represent."""

    __slots__ = ()


class Fields(dict[str, Any]):
    """An object, with the names that occur in it more than once."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        pairs = list(pairs)
        super().__init__(pairs)
        self.twice = _twice(pairs) if len(pairs) > len(self) else []


def _twice(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    seen: set[str] = set()
    twice: set[str] = set()
    for name, _ in pairs:
        (twice if name in seen else seen).add(name)
    return sorted(twice)


def read(body: bytes) -> Any:
    """Return the document, or raise `Malformed` or `TooMany`. Objects are `Fields`; impossible numbers are `Odd`."""
    _check_size(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"the body is not UTF-8: byte {error.start} is invalid") from None
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Malformed(
            f"the body is not JSON: {_lower(error.msg).removesuffix(' at')} at character {error.pos}"
        ) from None


def has_twice(body: bytes, keys: int) -> bool:
    """True if a body that decoded to this many different keys may contain one of them twice.

    Each key has a colon. With as many colons as keys, none occurs twice. With more, one may be within a text.
    """
    return body.count(b":") != keys and _outside_texts(body).count(b":") != keys


def _outside_texts(body: bytes) -> bytes:
    """Return the parts of a document between its texts, in one pass for each step, whatever its content."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    return b"".join(unescaped.split(b'"')[::2])


def _check_size(body: bytes) -> None:
    """Refuse deep nesting before any recursion, and many parts before each becomes an object."""
    opened = body.count(b"[") + body.count(b"{")
    if opened <= DEPTH_MAX and body.count(b",") <= PARTS_MAX:
        return
    outside = _outside_texts(body)
    steps = outside.translate(_STEPS, _NO_STEPS)
    if DEPTH_MAX + 1 in accumulate(memoryview(steps).cast("b")):
        field = _deep_field(body)
        raise Malformed(f"{shown(field)}: nested more than {DEPTH_MAX} levels deep" if field else _TOO_DEEP)
    if steps.count(b"\x01") + outside.count(b",") > PARTS_MAX:
        raise TooMany(f"the body has more than {PARTS_MAX} values; send fewer at once")


def _deep_field(body: bytes) -> str:
    """Return the name of the field that is nested too deeply; '' if that is far into the body."""
    depth, field = 0, ""
    for token in islice(_TOKEN.finditer(body), _TOKENS_MAX):
        if token[2] and depth == 1:
            field = token[1].decode("ascii", "backslashreplace")
        if token[0] in b"[{":
            depth += 1
        elif token[0] in b"]}":
            depth -= 1
        if depth > DEPTH_MAX:
            return field
    return ""


_TOO_DEEP = f"the body is nested more than {DEPTH_MAX} levels deep"


def _float(text: str) -> float | Odd:
    number = float(text)
    return number if math.isfinite(number) else Odd(text)


def _int(text: str) -> int | Odd:
    return int(text) if len(text) <= DIGITS_MAX else Odd(text)


_DECODER = json.JSONDecoder(object_pairs_hook=Fields, parse_float=_float, parse_int=_int, parse_constant=Odd)


def shown(value: object, characters_max: int = 60) -> str:
    """Return a value as JSON in ASCII, cut to a length: fit for a message. The part cut off costs nothing."""
    if isinstance(value, Odd):
        text = str(value)
    elif isinstance(value, str):
        text = json.dumps(value[:characters_max])
    else:
        text = _beginning(value, characters_max)
    return text if len(text) <= characters_max else text[: characters_max - 3] + "..."


def _beginning(value: object, characters_max: int) -> str:
    text = ""
    for piece in _ENCODER.iterencode(value):
        text += piece[: characters_max + 1]
        if len(text) > characters_max:
            break
    return text


_ENCODER = json.JSONEncoder(default=str)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
