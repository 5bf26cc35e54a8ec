"""API keys as they are configured, and the permissions of each.

A key is a random text that only its holder has; the configuration holds its hash. Each key has a role: a `caller` uses
the data plane, a `viewer` reads what is managed, an `admin` does everything. A key may be bound to one namespace.

Without keys everybody may do everything; that is allowed on loopback only (see `limiter.settings`).
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from secrets import token_urlsafe
from typing import Literal

from limiter.model.policy.criticality import Criticality

KEY_PREFIX = "hg_"
KEY_RANDOM_BYTES = 32
FORM = "name:role:sha256[:namespace[:max_criticality]], as `headgate keys new` prints it"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_BLANKS = frozenset(
    hashlib.sha256("".join(blank).encode()).digest() for size in range(5) for blank in product(" \t\r\n", repeat=size)
)
"""Hashes of keys that are empty or white space only: the result of `echo | sha256sum` on an unset variable."""


Right = Literal["use", "view", "manage"]
ACTS: dict[Right, str] = {
    "use": "use the data plane",
    "view": "read what is managed",
    "manage": "change what is managed",
}
Role = Literal["caller", "viewer", "admin"]
RIGHTS: dict[Role, frozenset[Right]] = {
    "caller": frozenset({"use"}),
    "viewer": frozenset({"view"}),
    "admin": frozenset({"use", "view", "manage"}),
}


class KeyEntryError(ValueError):
    """An entry of the list of keys cannot be used. The message does not show the hash."""


@dataclass(frozen=True)
class Principal:
    """The identity and permissions of a caller."""

    name: str
    role: Role
    namespace: str | None = None
    """The only namespace that it may use; None: any."""
    max_criticality: Criticality | None = None
    """The highest class that its requests may have; None: any (Q12)."""


@dataclass(frozen=True)
class KeyEntry:
    """One key as it is configured."""

    principal: Principal
    digest: bytes


def read_keys(text: str) -> list[KeyEntry]:
    """Parse a list of keys; raise KeyEntryError for the first invalid entry. Only an empty text has no entries."""
    entries = [_read_entry(number, entry.strip()) for number, entry in enumerate(text.split(","), 1)] if text else []
    names = Counter(entry.principal.name for entry in entries)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise KeyEntryError(f"the name {twice!r} occurs twice; each key needs its own")
    by_digest: dict[bytes, str] = {}
    for entry in entries:
        name = entry.principal.name
        other = by_digest.setdefault(entry.digest, name)
        if other != name:
            raise KeyEntryError(f"{other!r} and {name!r} have the same hash; each needs a key of its own")
    return entries


def _read_entry(number: int, entry: str) -> KeyEntry:
    if not entry:  # perhaps an unset variable: without any key, everybody may do everything
        raise KeyEntryError(f"entry {number} is blank; entries are separated by one comma each, with none at the end")
    parts = entry.split(":")
    if len(parts) not in (3, 4, 5):
        raise KeyEntryError(f"entry {number} does not have the form {FORM}")
    name, role, digest = parts[:3]
    if not _NAME.fullmatch(name):
        raise KeyEntryError(f"entry {number}: the name must be 1 to 64 letters, digits, '.', '_' or '-'")
    if role not in RIGHTS:
        raise KeyEntryError(f"entry {number} ({name}): the role must be one of {', '.join(RIGHTS)}")
    if not _HASH.fullmatch(digest):
        raise KeyEntryError(f"entry {number} ({name}): the hash must be 64 hexadecimal digits, the SHA-256 of the key")
    if bytes.fromhex(digest) in _BLANKS:
        raise KeyEntryError(f"entry {number} ({name}): the hash is of an empty key, which would admit everybody")
    namespace = parts[3] if len(parts) > 3 else None
    if namespace == "" and len(parts) == 5:
        namespace = None
    if namespace is not None and not _NAME.fullmatch(namespace):
        raise KeyEntryError(f"entry {number} ({name}): the namespace must be a name")
    highest = _read_class(parts[4], f"entry {number} ({name})", role) if len(parts) == 5 else None
    return KeyEntry(Principal(name, role, namespace, highest), bytes.fromhex(digest))


def _read_class(text: str, place: str, role: Role) -> Criticality:
    if role == "viewer":
        raise KeyEntryError(f"{place}: a viewer makes no requests, so max_criticality has no effect")
    try:
        return Criticality(text)
    except ValueError:
        raise KeyEntryError(f"{place}: max_criticality must be one of {', '.join(Criticality)}") from None


def new_key(name: str, role: str, namespace: str | None = None, max_criticality: str | None = None) -> tuple[str, str]:
    """Return a new key, and the entry to configure for it."""
    key = KEY_PREFIX + token_urlsafe(KEY_RANDOM_BYTES)
    digest = hashlib.sha256(key.encode()).hexdigest()
    more = [namespace or "", max_criticality] if max_criticality else [namespace] if namespace else []
    entry = ":".join([name, role, digest, *more])
    read_keys(entry)
    return key, entry


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
