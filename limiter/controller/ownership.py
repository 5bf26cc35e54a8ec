"""The controller that should steer a namespace: every controller computes the same one without communication.

    owner(namespace) = the live controller for which digest(controller, namespace) is largest

joins    the new controller takes over about its part of the namespaces, and no others move
leaves   only its own namespaces are spread over the rest

All partitions of a namespace go together, because shares move between them (B5). This module
only names the preferred owner of a slot; the lease, of which there is one, decides the actual owner (F-P7).
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

BEATS_A_LEASE = 4
"""Heartbeats of a controller per lease time."""

GONE_AFTER_LEASE = 0.75
"""A controller silent for this part of a lease counts as gone, so that others are ready when the lease ends."""


def preferred(namespace: str, controllers: Collection[str]) -> str:
    """Return the controller that should own a namespace (rendezvous hashing)."""
    return max(controllers, key=lambda name: (_digest(name, namespace), name))


def _digest(controller: str, namespace: str) -> bytes:
    # The length separates two pairs of names that would otherwise be the same bytes.
    return blake2b(f"{len(controller)}:{controller}{namespace}".encode("utf-8", "replace"), digest_size=8).digest()
