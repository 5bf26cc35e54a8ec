"""One attempt of one call, as its user saw it: all figures of a run are counted from these."""

from __future__ import annotations

from typing import Literal

import msgspec

Call = Literal["acquire", "settle"]


class Attempt(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The outcome of one HTTP request."""

    at_s: float
    """When its answer arrived, or it was known that none would come, by the machine's clock."""
    call: Call
    node: str
    tenant: str
    criticality: str
    latency_ms: float
    """Time until its user had the answer; all users share one process, which may read it later than it came."""
    status: int
    """Status of HTTP; 0 if no answer came."""
    reason: str = ""
    """Reason of a refusal or a failure; empty if it was granted or settled."""
    work: float = 0.0
    """Work admitted by this answer: the charge of an acquire, the correction by a settle (below 0: a refund)."""
    demanded: float = 0.0
    """For a first attempt to acquire: the real cost of its request."""
    is_degraded: bool = False
    """True if the node decided without the store."""
    is_retry: bool = False
    """True if the same request was refused before."""
    is_final: bool = True
    """True if its user goes on from here: a failed attempt that is not final is repeated at another node."""
    settle_lag_ms: float | None = None
    """Time from the end of the work to its settle's answer, failed attempts included."""

    def is_late(self, late_ms: float) -> bool:
        """True if an answer came, but later than allowed."""
        return self.status != 0 and self.latency_ms > late_ms

    @property
    def is_failed(self) -> bool:
        """True if it was neither granted nor refused."""
        return self.status not in (200, 429)
