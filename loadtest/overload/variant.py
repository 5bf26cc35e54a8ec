"""One way to control the load of an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.overload.backend_terms import BackendTerms
from loadtest.overload.users import Crowd

LIMIT = {"name": "backend", "match": {"service": "backend"}, "rate": 1_000_000_000}
"""A limit that never binds: what is refused, overload control refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy, and where it differs the load or the backend."""

    label: str
    overload: Mapping[str, Any] | None = None
    per: tuple[str, ...] = ()
    """Dimensions with a bucket, and so with controllers, for each of their values."""
    in_flight: int = 0
    """A fixed limit on what is in flight; 0: none."""
    crowds: Sequence[Crowd] = ()
    """In place of those of the study."""
    backend: BackendTerms | None = None
    """In place of that of the study."""

    @property
    def policy(self) -> dict[str, Any]:
        """As it stands in a policy file."""
        policy: dict[str, Any] = {**LIMIT, "per": list(self.per)}
        if self.in_flight:
            policy["in_flight"] = self.in_flight
        return policy if self.overload is None else {**policy, "overload": dict(self.overload)}
