"""Retry budget of a client: at most 3 attempts per request, and retries for 10 % of its requests (G6). Pure.

    each request    tokens += ratio
    each retry      tokens -= 1; refused below 1
    as time passes  tokens above `burst` fall by half every 7 seconds (keep_s · ln 2)

A budget begins with `burst` tokens, so n requests never cause more than ratio · n + burst retries: if all are refused,
1.1 calls per request and 10 more in the life of the process. A busy client keeps the tokens of about the last `keep_s`
seconds, so that a failure of half a second can be retried by all whom it hit; an idle client keeps at most `burst`.
"""

from __future__ import annotations

from math import exp


class RetryBudget:
    """Retries that a client may still make. For one thread or event loop."""

    def __init__(self, *, attempts_max: int = 3, ratio: float = 0.1, burst: float = 10.0, keep_s: float = 10.0) -> None:
        if not (attempts_max >= 1 and ratio >= 0 and burst >= 0 and keep_s > 0):
            raise ValueError("attempts_max must be at least 1, ratio and burst at least 0, keep_s above 0")
        self.attempts_max = attempts_max
        self.ratio = ratio
        self._burst = burst
        self._keep_s = keep_s
        self._tokens = burst
        self._updated_s: float | None = None
        self.requests = self.retries = self.refused = 0
        """Counts of requests, of retries, and of retries that were not made because the budget was spent."""

    def asked(self, now_s: float) -> None:
        """Count a request of the application: its first attempt, not its retries."""
        self.requests += 1
        self._tokens = self.tokens(now_s) + self.ratio

    def may_retry(self, attempt: int, now_s: float) -> bool:
        """Return True if another attempt may follow attempt number `attempt` (1 is the first), and spend it."""
        if attempt >= self.attempts_max:
            return False
        self._tokens = tokens = self.tokens(now_s)
        # Ten deposits of 0.1 add up to a little less than 1.
        if tokens < 1 - 1e-9:
            self.refused += 1
            return False
        self._tokens = tokens - 1
        self.retries += 1
        return True

    def tokens(self, now_s: float) -> float:
        """Return how many retries are left."""
        before_s, self._updated_s = self._updated_s, now_s
        excess = self._tokens - self._burst
        if excess > 0 and before_s is not None and now_s > before_s:
            self._tokens = self._burst + excess * exp((before_s - now_s) / self._keep_s)
        return self._tokens
