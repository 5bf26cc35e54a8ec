"""Which controller ought to steer which namespace: the same answer everywhere, without talking.

    owner(namespace) = the live controller for which digest(controller, namespace) is largest

comes    the newcomer takes over about its part of the namespaces, and no others move
goes     only what it owned is spread over the rest

All partitions of a namespace go together, because shares move between them (B5). This only says who ought to own a
slot; who does is up to the lease, of which there is one (F-P7).
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

BEATS_A_LEASE = 4
"""How often a controller says that it lives, in the time of a lease."""

GONE_AFTER_LEASE = 0.75
"""Silent for this part of a lease means gone, so that others stand ready when the lease itself ends."""


def preferred(namespace: str, controllers: Collection[str]) -> str:
    """Who ought to own a namespace (rendezvous hashing)."""
    return max(controllers, key=lambda name: (_digest(name, namespace), name))


def _digest(controller: str, namespace: str) -> bytes:
    # The length keeps two pairs of names apart that would otherwise read the same.
    return blake2b(f"{len(controller)}:{controller}{namespace}".encode("utf-8", "replace"), digest_size=8).digest()
