"""Patterns of `match`: text with `*`, a list of such texts, networks, or null for an absent dimension."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_network
from typing import Annotated, Any, TypeGuard

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from limiter.model.policy.fields.field_refusals import refuse
from limiter.model.policy.fields.shown import show
from limiter.model.policy.matching import AnyOf, Network, Networks, read_network
from limiter.model.policy.matching import Pattern as Matching

PATTERN_MAX = 256
LISTED_MAX = 1000
"""Texts or networks in one pattern."""
_NETWORK = re.compile(r"[0-9A-Fa-f.:]{2,45}/[0-9]{1,3}")
_NETWORK_OR_ADDRESS = re.compile(r"[0-9A-Fa-f.:]{2,45}(?:/[0-9]{1,3})?")
_PATTERN_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "maxLength": PATTERN_MAX},
        {"type": "null"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": LISTED_MAX},
        {
            "type": "object",
            "properties": {
                "cidr": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": LISTED_MAX}
            },
            "required": ["cidr"],
            "additionalProperties": False,
        },
    ]
}


def is_text(value: object, *, longest: int) -> TypeGuard[str]:
    """True for text that can be encoded: half of a surrogate pair cannot."""
    if not isinstance(value, str) or len(value) > longest:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _pattern(value: object) -> Matching:
    if value is None or isinstance(value, AnyOf | Networks):
        return value
    if isinstance(value, list):
        return AnyOf(_each(value, _text_pattern))
    if isinstance(value, Mapping):
        return _networks(value)
    return _text_pattern(value)


def _text_pattern(value: object, field: str = "") -> str:
    found = show(value) if field else ""
    if not is_text(value, longest=PATTERN_MAX):
        allowed = f"text of at most {PATTERN_MAX} characters (a number in quotes), in which '*' stands for anything"
        others = ", a list of such texts, networks as {cidr: [10.0.0.0/8]}, or null for a dimension that is absent"
        raise refuse(allowed if field else allowed + others, field=field, found=found)
    if _NETWORK.fullmatch(value) and _network_of(value) is not None:
        raise refuse(
            f"a network as {{cidr: [{show(value)}]}}; as text no address is ever like it", field=field, found=found
        )
    return value


def _networks(value: Mapping[object, object]) -> Networks:
    if list(value) != ["cidr"]:
        names = ", ".join(show(name) for name in list(value)[:5]) or "nothing"
        raise refuse("cidr, with a list of networks", found=names)
    listed = value["cidr"]
    if not isinstance(listed, list):
        raise refuse("a list of networks: [10.0.0.0/8, '2001:db8::/32']", field="cidr", found=show(listed))
    return Networks(_each(listed, _network, "cidr."))


def _network(value: object, field: str) -> str:
    network = _network_of(value) if isinstance(value, str) else None
    if network is None:
        raise refuse("a network, such as 10.0.0.0/8 or 2001:db8::/32", field=field, found=show(value))
    if not network.is_whole:
        meant = str(ip_network(str(value), strict=False))
        raise refuse(f"{show(meant)}: no bits of the address behind its prefix", field=field, found=show(value))
    return str(value)


def _network_of(text: str) -> Network | None:
    """The network that an address belongs to; None if it is none. One without a prefix is a network of its own."""
    if not _NETWORK_OR_ADDRESS.fullmatch(text):
        return None
    try:
        return read_network(text)
    except ValueError:
        return None


def _each(listed: list[object], check: Callable[[object, str], str], field: str = "") -> list[str]:
    """Check each item of a list, and its length."""
    if not 1 <= len(listed) <= LISTED_MAX:
        where = field.rstrip(".")
        raise refuse(f"a list of 1 to {LISTED_MAX}", field=where, found=f"a list of {len(listed)}")
    return [check(value, f"{field}{number}") for number, value in enumerate(listed)]


def _pattern_as_written(pattern: Matching) -> object:
    if isinstance(pattern, AnyOf):
        return list(pattern.texts)
    return {"cidr": list(pattern.texts)} if isinstance(pattern, Networks) else pattern


Pattern = Annotated[
    Matching, PlainValidator(_pattern), PlainSerializer(_pattern_as_written), WithJsonSchema(_PATTERN_SCHEMA)
]
