"""Faults of a document, field by field: where, what was found, what is allowed.

Compares plain data (`api.data.json_text`) with the struct that it should have become. It agrees with msgspec, which a
test verifies, and says more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from heapq import nsmallest
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

from api.data.json_text import Fields, Odd, shown

PROBLEMS_MAX = 20
VISIBLE = "visible ASCII characters"

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class FieldProblem(msgspec.Struct, frozen=True):
    """One fault."""

    field: str
    found: str
    allowed: str

    def __str__(self) -> str:
        found = f"found {self.found}; " if self.found else ""
        return f"{self.field or 'the body'}: {found}allowed: {self.allowed}"


def problems(document: Any, kind: type[msgspec.Struct], most: int = PROBLEMS_MAX) -> list[FieldProblem]:
    """Return the first faults that keep a document from being one of this kind."""
    return list(islice(_any("", document, _described(kind)), most))


_described = cache(inspect.type_info)


def _any(at: str, value: Any, kind: inspect.Type) -> Iterator[FieldProblem]:
    if isinstance(kind, inspect.UnionType):
        if value is not None or not kind.includes_none:
            yield from _any(at, value, kind.types[0])
    elif isinstance(kind, inspect.StructType):
        yield from _struct(at, value, kind)
    elif isinstance(kind, inspect.DictType):
        yield from _mapping(at, value, kind)
    elif isinstance(kind, inspect.ListType):
        yield from _list(at, value, kind)
    elif not _fits(value, kind):
        yield FieldProblem(at, shown(value), _allowed(kind))


def _struct(at: str, value: Any, kind: inspect.StructType) -> Iterator[FieldProblem]:
    if not isinstance(value, Fields):
        yield FieldProblem(at, shown(value), "an object")
        return
    yield from _twice(at, value)
    fields = {field.encode_name: field for field in kind.fields}
    tags = {kind.tag_field} if kind.tag_field else set()
    gone: dict[str, str] = getattr(kind.cls, "gone", {})
    for name in nsmallest(PROBLEMS_MAX, value.keys() - fields.keys() - tags):
        found = "a field that is gone" if name in gone else "a field that is not known"
        yield FieldProblem(_inside(at, name), found, gone.get(name) or ", ".join(fields))
    for name, field in fields.items():
        if name in value:
            yield from _any(_inside(at, name), value[name], field.type)
        elif field.required:
            yield FieldProblem(_inside(at, name), "", f"{_allowed(field.type)}; it is required")


def _mapping(at: str, value: Any, kind: inspect.DictType) -> Iterator[FieldProblem]:
    if not isinstance(value, Fields):
        yield FieldProblem(at, shown(value), _allowed(kind))
        return
    yield from _twice(at, value)
    if not _within(len(value), kind.min_length, kind.max_length):
        yield FieldProblem(at, f"{len(value)} names", _allowed(kind))
    for name, inner in islice(value.items(), kind.max_length):  # of too many, the first
        if not _fits(name, kind.key_type):
            yield FieldProblem(at, f"the name {shown(name)}", f"names that are {_allowed(kind.key_type)}")
        if not _fits(inner, kind.value_type):  # no mapping contains another, nor an object
            yield FieldProblem(_inside(at, name), shown(inner), _allowed(kind.value_type))


def _list(at: str, value: Any, kind: inspect.ListType) -> Iterator[FieldProblem]:
    if not isinstance(value, list):
        yield FieldProblem(at, shown(value), _allowed(kind))
        return
    if not _within(len(value), kind.min_length, kind.max_length):
        yield FieldProblem(at, f"{len(value)} entries", _allowed(kind))
    for number, inner in enumerate(islice(value, kind.max_length)):  # of too many, the first
        yield from _any(f"{at}[{number}]", inner, kind.item_type)


def _twice(at: str, value: Fields) -> Iterator[FieldProblem]:
    for name in value.twice:
        yield FieldProblem(_inside(at, name), "it more than once", "each name once")


def _inside(at: str, name: str) -> str:
    if not _PLAIN_NAME.fullmatch(name):
        return f"{at}[{shown(name)}]"
    return f"{at}.{name}" if at else name


def _fits(value: Any, kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.StrType):
        if not isinstance(value, str) or not _within(len(value), kind.min_length, kind.max_length):
            return False
        return is_text(value) and (kind.pattern is None or re.search(kind.pattern, value) is not None)
    if isinstance(kind, inspect.BoolType):
        return isinstance(value, bool)
    if isinstance(kind, inspect.IntType):
        return isinstance(value, int) and not isinstance(value, bool) and _within(value, kind.ge, kind.le)
    if isinstance(kind, inspect.FloatType):
        return isinstance(value, int | float) and not isinstance(value, bool) and _within(value, kind.ge, kind.le)
    if isinstance(kind, inspect.EnumType):
        return isinstance(value, str) and value in [member.value for member in kind.cls]
    raise AssertionError(f"no request has a field of {kind}")


def is_text(value: str) -> bool:
    """True for Unicode text; half of a surrogate pair is none, nor is a number in the place of text."""
    if isinstance(value, Odd):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _within(number: float, least: float | None, most: float | None) -> bool:
    return (least is None or number >= least) and (most is None or number <= most)


def _allowed(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.StrType):
        if kind.pattern is not None:  # there is only one pattern
            return f"{_range(kind.min_length, kind.max_length)} {VISIBLE}"
        return f"Unicode text of {_range(kind.min_length, kind.max_length)} characters"
    if isinstance(kind, inspect.IntType):
        return f"a whole number from {kind.ge} to {kind.le}"
    if isinstance(kind, inspect.FloatType):
        return f"a number from {kind.ge:.0f} to {kind.le:.0f}"
    if isinstance(kind, inspect.EnumType):
        return ", ".join(member.value for member in kind.cls)
    if isinstance(kind, inspect.DictType):
        return f"an object of {_range(kind.min_length, kind.max_length)} names with their values"
    if isinstance(kind, inspect.ListType):
        return f"a list of {_range(kind.min_length, kind.max_length)} objects"
    return {inspect.BoolType: "true or false", inspect.StructType: "an object"}[type(kind)]


def _range(least: int | None, most: int | None) -> str:
    return f"{least} to {most}" if least else f"at most {most}"
