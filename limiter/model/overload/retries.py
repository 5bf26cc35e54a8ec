"""How large a share of recent attempts are retries (G6).

    share = Σ retries · 2^(−age / half-life)  ÷  Σ attempts · 2^(−age / half-life)

Above SHARE_MAX a retry only adds to the trouble: callers are told not to.
"""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_S = 5.0
SHARE_MAX = 0.3
ATTEMPTS_MIN = 20.0
"""With fewer recent attempts a share says nothing."""

_FOLD_S = 0.1


@dataclass(slots=True)
class RetryMeter:
    """Counts attempts, forgetting by half every HALF_LIFE_S. Time is an argument."""

    attempts: float = 0.0
    retries: float = 0.0
    folded_s: float = 0.0

    def count(self, attempt: int, now_s: float) -> None:
        """One request, which says how often it was tried."""
        # Folding on every request would cost more than it tells.
        if now_s - self.folded_s > _FOLD_S:
            keep = 0.5 ** ((now_s - self.folded_s) / HALF_LIFE_S)
            self.attempts, self.retries, self.folded_s = self.attempts * keep, self.retries * keep, now_s
        self.attempts += 1.0
        if attempt > 1:
            self.retries += 1.0

    @property
    def too_many(self) -> bool:
        """Whether to tell callers not to retry."""
        return self.attempts >= ATTEMPTS_MIN and self.retries > SHARE_MAX * self.attempts
