"""Pauses before retries: Retry-After is honoured, `never` is final (G6)."""

from __future__ import annotations


def retry_pause_s(retry: str, *, retry_after_ms: float | None, retry_after_header: str | None) -> float | None:
    """Return how long a refused caller waits before it may ask again; None: it must not.

    The body's `retry_after_ms` is the finer one of the two; the header counts whole seconds and is never earlier.
    """
    if retry != "after":
        return None
    if retry_after_ms is not None:
        return retry_after_ms / 1000
    return float(retry_after_header) if retry_after_header else None
