"""HTTP answers, counted by route and status."""

from __future__ import annotations

NO_ROUTE = b"none"

Requests = dict[tuple[bytes, int], int]
"""HTTP answers by route and status."""


def count(requests: Requests, route: bytes, status: int) -> None:
    key = (route, status)
    requests[key] = requests.get(key, 0) + 1
