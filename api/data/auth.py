"""The door: who is asking, by the API key that is presented, and whether it may.

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
    """No key, or none that is known (F-H3): 401."""


class Forbidden(Exception):
    """A known key, but not for this (F-H4): 403."""


ANYBODY = Principal("anybody", "admin")


class Doorkeeper:
    """Tells who is asking, and stops who may not."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = tuple(entries)

    @property
    def is_open(self) -> bool:
        """Whether anybody may do anything."""
        return not self._entries

    def identify(self, authorization: bytes | None) -> Principal:
        """Who presents this `Authorization` header; Unauthenticated if nobody known does."""
        if not self._entries:
            return ANYBODY
        scheme, _, key = (authorization or b"").partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
        digest = hashlib.sha256(key).digest()
        found = None
        for entry in self._entries:  # every one, however early it is found: the time tells nothing
            if hmac.compare_digest(entry.digest, digest):
                found = entry.principal
        if found is None or not key:  # an empty key is nobody's, whatever the entries say
            raise Unauthenticated("a known API key is required, sent as Authorization: Bearer <key>")
        return found

    def admit(self, authorization: bytes | None, right: Right) -> Principal:
        """Who is asking, if it has this right; Unauthenticated or Forbidden if not."""
        principal = self.identify(authorization)
        if right not in RIGHTS[principal.role]:
            refuse(principal, ACTS[right])
        return principal


def check_namespace(principal: Principal, namespace: str) -> None:
    """Forbidden if the key is bound to another namespace."""
    if principal.namespace is not None and principal.namespace != namespace:
        refuse(principal, "touch another namespace than its own")


def refuse(principal: Principal, act: str) -> NoReturn:
    """Leave a trace of what was tried, and refuse it."""
    audit.warning("refused: key %s (%s) may not %s", principal.name, principal.role, act)
    raise Forbidden(f"the key {principal.name} ({principal.role}) may not {act}")
