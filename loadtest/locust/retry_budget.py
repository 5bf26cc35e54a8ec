"""Retries: Retry-After is honoured, `never` is final, and a budget bounds the rest (G6).

attempts       at most 3 for one request, the first included
budget         retries are at most 10 % of a client's requests over its life, and a few to start with
"""

from __future__ import annotations

from dataclasses import dataclass

ATTEMPTS_MAX = 3
RETRY_SHARE = 0.1
RETRIES_AT_FIRST = 3.0


@dataclass(slots=True)
class RetryBudget:
    """The budget of one client. Requests earn a tenth of a retry each; a retry spends a whole one."""

    retries_left: float = RETRIES_AT_FIRST

    def count_request(self) -> None:
        """Earn the share of a new request."""
        self.retries_left = min(self.retries_left + RETRY_SHARE, 10 * RETRIES_AT_FIRST)

    def spend(self, attempt: int) -> bool:
        """Spend a retry after this attempt (from 1) if allowed; return whether it was."""
        if attempt >= ATTEMPTS_MAX or self.retries_left < 1.0:
            return False
        self.retries_left -= 1.0
        return True


def retry_pause_s(retry: str, *, retry_after_ms: float | None, retry_after_header: str | None) -> float | None:
    """Return how long a refused caller waits before it may ask again; None: it must not.

    The body's `retry_after_ms` is the finer one of the two; the header counts whole seconds and is never earlier.
    """
    if retry != "after":
        return None
    if retry_after_ms is not None:
        return retry_after_ms / 1000
    return float(retry_after_header) if retry_after_header else None
