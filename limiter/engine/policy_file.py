"""Policy files: YAML, read strictly.

Plain words mean what they look like: only `true` and `false` are booleans, `1e6` is a number, `12:30` and `2026-01-01`
are text (YAML 1.2; PyYAML by default follows 1.1, where `NO`, a country, is false). A repeated key is refused:
otherwise one of its two values would be lost in silence.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from limiter.model.policy.fields.shown import SHOWN_MAX
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import read_policy_set

FILE_BYTES_MAX = 16 * 1024 * 1024


def load_policy_file(path: Path | str) -> PolicySet:
    """Load the policies of a file; raise PolicyError, each line beginning with the file's name, if invalid (F-P1)."""
    try:
        return read_policy_set(_parse(_read(Path(path))))
    except PolicyError as error:
        raise PolicyError(f"{path}: {problem}" for problem in error.problems) from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise PolicyError([f"is larger than {FILE_BYTES_MAX // 1024 // 1024} MiB; allowed: a smaller file"])
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise PolicyError([f"cannot be read: {error.strerror or error}; allowed: a YAML or JSON file"]) from None
    except UnicodeDecodeError as error:
        raise PolicyError([f"is not UTF-8 text, from byte {error.start} on"]) from None


def _parse(text: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  a SafeLoader, but stricter
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise PolicyError([place + _one_line(told or "is not YAML")]) from None
    except yaml.reader.ReaderError as error:
        raise PolicyError([f"position {error.position}: {_one_line(str(error.reason))}"]) from None
    except RecursionError:
        raise PolicyError(["is nested too deeply"]) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())


class _Loader(yaml.SafeLoader):
    """The plain words of YAML 1.2, and no repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  as in the base

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping; refuse a repeated key."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = _twice(key) if isinstance(key, Hashable) and key in seen else ""
            if not isinstance(key, Hashable):
                problem = "found a list or a mapping as a key; allowed: text"
            if problem:
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Build a number; refuse one of thousands of digits."""
        text = str(self.construct_scalar(node)).lower()
        try:
            if text[:2] in ("0o", "0x"):
                return int(text, 0)
            return int(text) if _DECIMAL.fullmatch(text) else float(text.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            problem = "found a number beyond all bounds"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark) from None


def _twice(key: Hashable) -> str:
    text = ascii(key)
    shown = text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."
    return f"found the key {shown} twice; allowed: each key once"


_DECIMAL = re.compile(r"[-+]?[0-9]+")
_PLAIN_WORDS = {
    "null": (r"null|Null|NULL|~|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
for _kind, (_form, _first_letters) in _PLAIN_WORDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_form})\Z"), _first_letters)
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)
