"""One try of one call, as its user saw it: all figures of a run are counted from these."""

from __future__ import annotations

from typing import Literal

import msgspec

Call = Literal["acquire", "settle"]


class Attempt(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What one HTTP request came to."""

    at_s: float
    """When its answer was there, or it was known that none would come: the machine's clock."""
    call: Call
    node: str
    tenant: str
    criticality: str
    latency_ms: float
    """Until its user had the answer; all users share one process, which may read it later than it came."""
    status: int
    """Of HTTP; 0 if no answer came."""
    reason: str = ""
    """Of a refusal or a failure; empty if it was granted or settled."""
    work: float = 0.0
    """Work admitted by this answer: the charge of an acquire, the correction by a settle (below 0: a refund)."""
    demanded: float = 0.0
    """Of a first attempt to acquire: what its request is going to cost."""
    is_degraded: bool = False
    """Whether the node decided without the store."""
    is_retry: bool = False
    """Whether the same request was refused before."""
    is_final: bool = True
    """Whether its user goes on from here: a failed attempt that is not final is tried again at another node."""
    settle_lag_ms: float | None = None
    """From the end of the work to its settle's answer, tries that failed included."""

    def is_late(self, late_ms: float) -> bool:
        """Whether an answer came, and took longer than it may."""
        return self.status != 0 and self.latency_ms > late_ms

    @property
    def is_failed(self) -> bool:
        """Neither a yes nor a refusal."""
        return self.status not in (200, 429)
