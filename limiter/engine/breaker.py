"""A circuit breaker: a store that fails repeatedly is asked less.

closed      calls are allowed
open        no calls until the pause is over; pauses double from PAUSE_MIN_S to PAUSE_MAX_S, each ± half by a draw
probing     one call is allowed; its success closes the breaker, its failure opens it again. A probe that was never
            sent, or has no outcome within PROBE_MAX_S, is given up, and the next caller probes
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

FAILURES_MAX = 5
TOGETHER_S = 0.005
"""Operations that fail within this time of each other were in one call, and count as one failure."""
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 2.0
PROBE_MAX_S = 5.0
"""The longest deadline of an operation: a probe without an outcome by then was lost."""


@dataclass(slots=True)
class Breaker:
    """The breaker. Time and draws are arguments."""

    failures: int = 0
    failed_s: float = -inf
    pause_s: float = PAUSE_MIN_S
    open_until_s: float = 0.0
    is_open: bool = False
    is_probing: bool = False
    probed_s: float = -inf

    def allows(self, now_s: float) -> bool:
        """True if the store may be asked now. A caller that is allowed while the breaker is open probes for all."""
        if not self.is_open:
            return True
        if now_s < self.open_until_s or (self.is_probing and now_s - self.probed_s < PROBE_MAX_S):
            return False
        self.is_probing, self.probed_s = True, now_s
        return True

    def forgo(self) -> None:
        """End the probe without an outcome: it was never sent, so the next caller probes."""
        self.is_probing = False

    def succeed(self) -> None:
        """Record that the store answered."""
        if self.failures or self.is_open:
            self.failures, self.is_open, self.is_probing, self.pause_s = 0, False, False, PAUSE_MIN_S

    def fail(self, now_s: float, draw: float) -> None:
        """Record that the store failed; `draw` in [0, 1) spreads the probes of many nodes."""
        if self.is_open and not self.is_probing:
            return  # a call that was under way when the breaker opened
        if self.is_probing:
            self.pause_s = min(2 * self.pause_s, PAUSE_MAX_S)
        elif now_s - self.failed_s < TOGETHER_S:
            return
        else:
            self.failures, self.failed_s = self.failures + 1, now_s
            if self.failures < FAILURES_MAX:
                return
        self.is_open, self.is_probing = True, False
        self.open_until_s = now_s + self.pause_s * (0.5 + draw)
