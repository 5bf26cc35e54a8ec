"""Authentication and authorisation of a request by its API key.

The keys themselves: `limiter.api_keys`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable
from typing import NoReturn

from limiter.api_keys import ACTS, RIGHTS, KeyEntry, Principal, Right

audit = logging.getLogger("headgate.audit")


class Unauthenticated(Exception):
    """No API key, or an unknown one (F-H3): 401."""


class Forbidden(Exception):
    """A known API key without the right (F-H4): 403."""


ANYBODY = Principal("anybody", "admin")


class Doorkeeper:
    """Identifies callers, and refuses those without the right."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = tuple(entries)

    @property
    def is_open(self) -> bool:
        """True if no keys are configured, and anybody may do anything."""
        return not self._entries

    def identify(self, authorization: bytes | None) -> Principal:
        """Return the caller of this `Authorization` header; raise Unauthenticated if it is unknown."""
        if not self._entries:
            return ANYBODY
        scheme, _, key = (authorization or b"").partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
        digest = hashlib.sha256(key).digest()
        found = None
        for entry in self._entries:  # all of them, even after a match, so that the time reveals nothing
            if hmac.compare_digest(entry.digest, digest):
                found = entry.principal
        if found is None or not key:  # an empty key is invalid, whatever the entries say
            raise Unauthenticated("a known API key is required, sent as Authorization: Bearer <key>")
        return found

    def admit(self, authorization: bytes | None, right: Right) -> Principal:
        """Return the caller if it has this right; otherwise raise Unauthenticated or Forbidden."""
        principal = self.identify(authorization)
        if right not in RIGHTS[principal.role]:
            refuse(principal, ACTS[right])
        return principal


def check_namespace(principal: Principal, namespace: str) -> None:
    """Raise Forbidden if the key is bound to another namespace."""
    if principal.namespace is not None and principal.namespace != namespace:
        refuse(principal, "touch another namespace than its own")


def refuse(principal: Principal, act: str) -> NoReturn:
    """Log the attempt, and refuse it."""
    audit.warning("refused: key %s (%s) may not %s", principal.name, principal.role, act)
    raise Forbidden(f"the key {principal.name} ({principal.role}) may not {act}")
