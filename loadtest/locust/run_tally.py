"""The figures of a run that Locust does not count: work against the limit for each second, settle lag, refusals.

Tallies add up, so that each worker of a distributed run keeps its own and sends it to the master. Seconds are the
machines' clocks: workers on several machines need clocks that agree to well below a second.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from limiter.model.bucket.bucket import histogram_step
from limiter.model.overload.histogram import EMPTY, percentile
from loadtest.locust.attempts import Attempt


class Second(msgspec.Struct):
    """The figures of one second."""

    demanded: float = 0.0
    """Work of the requests that were first asked in it."""
    admitted: float = 0.0
    """Charges granted, and corrections by settles."""
    granted: int = 0
    refused: int = 0
    failed: int = 0


def _no_latencies() -> list[float]:
    return list(EMPTY)


class Tally(msgspec.Struct):
    """The figures since the run began."""

    seconds: dict[int, Second] = {}
    refusals: dict[str, int] = {}
    """By reason."""
    refused_by_class: dict[str, int] = {}
    asked_by_class: dict[str, int] = {}
    failures: dict[str, int] = {}
    """Attempts that failed, by kind."""
    requests_failed: int = 0
    """Requests that no node could answer."""
    retries: int = 0
    degraded: int = 0
    read_late: int = 0
    """Answers that a user had later than allowed; its own process may have been late."""
    acquire_ms: list[float] = msgspec.field(default_factory=_no_latencies)
    settle_lag_ms: list[float] = msgspec.field(default_factory=_no_latencies)

    def count(self, attempt: Attempt, *, late_ms: float) -> None:
        """Add one attempt; an answer that took longer than `late_ms` was read late."""
        second = self.seconds.setdefault(int(attempt.at_s), Second())
        second.demanded += attempt.demanded
        second.admitted += attempt.work
        self.degraded += attempt.is_degraded
        self.retries += attempt.is_retry
        self.read_late += attempt.is_late(late_ms)
        if attempt.is_failed:
            self._count_failure(second, attempt)
        elif attempt.call == "acquire":
            self._count_decision(second, attempt)
        if attempt.settle_lag_ms is not None:
            self.settle_lag_ms[histogram_step(attempt.settle_lag_ms)] += 1

    def _count_failure(self, second: Second, attempt: Attempt) -> None:
        second.failed += 1
        _add(self.failures, {attempt.reason: 1})
        self.requests_failed += attempt.is_final

    def _count_decision(self, second: Second, attempt: Attempt) -> None:
        self.acquire_ms[histogram_step(attempt.latency_ms)] += 1
        _add(self.asked_by_class, {attempt.criticality: 1})
        if attempt.status == 200:
            second.granted += 1
            return
        second.refused += 1
        _add(self.refusals, {attempt.reason: 1})
        _add(self.refused_by_class, {attempt.criticality: 1})

    def add(self, other: Tally) -> None:
        """Add the figures of another tally."""
        for at, second in other.seconds.items():
            mine = self.seconds.setdefault(at, Second())
            for field in mine.__struct_fields__:
                setattr(mine, field, getattr(mine, field) + getattr(second, field))
        for name in ("refusals", "refused_by_class", "asked_by_class", "failures"):
            _add(getattr(self, name), getattr(other, name))
        for name in ("requests_failed", "retries", "degraded", "read_late"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("acquire_ms", "settle_lag_ms"):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True)])

    @property
    def decisions(self) -> int:
        """Acquires that were granted or refused."""
        return sum(second.granted + second.refused for second in self.seconds.values())

    @property
    def attempts(self) -> int:
        """Calls of all kinds, whatever their outcome."""
        return self.decisions + round(sum(self.settle_lag_ms)) + sum(self.failures.values())

    @property
    def admitted(self) -> float:
        """All work admitted."""
        return sum(second.admitted for second in self.seconds.values())

    def refused_share(self, criticality: str) -> float:
        """Return the share of refused asks of a class."""
        asked = self.asked_by_class.get(criticality, 0)
        return self.refused_by_class.get(criticality, 0) / asked if asked else 0.0

    def acquire_p_ms(self, p: float) -> float:
        """Return a percentile of the time to a decision; 0 if there was none."""
        return percentile(self.acquire_ms, p) or 0.0

    def settle_lag_p_ms(self, p: float) -> float:
        """Return a percentile of the time from the end of work to its settle; 0 if there was none."""
        return percentile(self.settle_lag_ms, p) or 0.0


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
