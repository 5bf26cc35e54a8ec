"""Counters of a node: plain numbers, incremented where things happen and read on request.

One addition per decision, and none for a label: the code that shows these numbers adds names and labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, get_args

from limiter.model.bucket.contract import Decision, Granted, Reason, Refused, Settled

Undecided = Literal["store_unavailable", "record_damaged"]
Unanswered = Literal["deadline", "busy", "breaker", "out_of_memory"]
"""Why the store did not answer an operation: no reply in time; too many were waiting; the breaker was open; the store
had no memory left."""

REASONS: tuple[Reason, ...] = get_args(Reason)
UNDECIDED: tuple[Undecided, ...] = get_args(Undecided)
UNANSWERED: tuple[Unanswered, ...] = get_args(Unanswered)

CALL_OPERATIONS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Bounds of the sizes of calls; the last is the batcher's limit."""

CALL_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
CYCLE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of values between bounds, and their sum. A value on a bound is within it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> Iterator[int]:
        """Yield the number of values up to each bound; the last: of all values."""
        return accumulate(self.counts)


class CallTally:
    """Calls of one script."""

    __slots__ = ("operations", "seconds")

    def __init__(self) -> None:
        self.operations = Histogram(CALL_OPERATIONS)
        self.seconds = Histogram(CALL_SECONDS)


LeaseOutcome = Literal["lent", "empty", "returned", "not_allowed", "unknown", "outdated", "closed", "unanswered"]
"""The outcome of a request for a lease. `empty`: nothing could be lent, the holder asks for each request."""
LEASE_OUTCOMES: tuple[LeaseOutcome, ...] = get_args(LeaseOutcome)


class LeaseTally:
    """Requests for leases, by what came of them."""

    __slots__ = ("outcomes",)

    def __init__(self) -> None:
        self.outcomes: dict[LeaseOutcome, int] = dict.fromkeys(LEASE_OUTCOMES, 0)

    def count(self, outcome: LeaseOutcome) -> None:
        self.outcomes[outcome] += 1


class DecisionTally:
    """Decisions of one node. A dry run is not counted, and a repeated answer only when it was first given."""

    __slots__ = (
        "degraded_granted", "degraded_refused", "denied_in_shadow", "dry_runs", "further_attempts", "granted",
        "refused", "repeated", "replayed", "second_attempts", "unanswered", "uncovered", "undecided", "work_admitted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.granted = 0
        self.second_attempts = 0
        self.further_attempts = 0
        self.refused: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.undecided: dict[str, int] = dict.fromkeys(UNDECIDED, 0)
        self.unanswered: dict[Unanswered, int] = dict.fromkeys(UNANSWERED, 0)
        self.degraded_granted = 0
        self.degraded_refused = 0
        self.uncovered: dict[bool, int] = {True: 0, False: 0}
        """By whether their namespace was declared."""
        self.denied_in_shadow = 0
        self.dry_runs = 0
        self.replayed = 0
        self.repeated = 0
        """Refusals without asking the store, which had just refused the same."""
        self.work_admitted = 0.0
        """The sum of charges."""

    def attempt(self, number: int) -> None:
        """Count a request that says it was tried before (G6)."""
        if number == 2:
            self.second_attempts += 1
        elif number > 2:
            self.further_attempts += 1

    def count(self, decision: Decision, *, dry_run: bool) -> None:
        """Count one decision. The hot path: a grant costs two additions."""
        if dry_run:
            self.dry_runs += 1
        elif decision.replayed:
            self.replayed += 1
        elif type(decision) is Granted:
            self.granted += 1
            self.work_admitted += decision.charged
            if decision.degraded:
                self.degraded_granted += 1
        else:
            self._count_refused(decision)

    def _count_refused(self, decision: Decision) -> None:
        assert isinstance(decision, Refused)
        self.refused[decision.reason] += 1
        if decision.degraded:
            self.degraded_refused += 1


class SettleTally:
    """Settles of one node, and the work that they reported: once for each reservation, when it ends."""

    __slots__ = (
        "debited", "duplicate", "late", "progress", "refunded", "settled", "unanswered", "uncollected", "work",
    )  # fmt: skip

    def __init__(self) -> None:
        self.settled = 0
        self.late = 0
        self.progress = 0
        self.duplicate = 0
        self.unanswered: dict[Unanswered, int] = dict.fromkeys(UNANSWERED, 0)
        self.work = 0.0
        self.debited = 0.0
        """Work that was charged too low, and debited by settles."""
        self.refunded = 0.0
        """Work that was charged too high, and given back by settles."""
        self.uncollected = 0.0
        """Work beyond the debt bound, which no bucket was charged for (W5)."""

    def count(self, settled: Settled, *, final: bool) -> None:
        if settled.duplicate:
            self.duplicate += 1
        else:
            self.add(settled.work, settled.adjusted, settled.uncollected, late=settled.late, final=final)

    def add(self, work: float, adjusted: float, uncollected: float, *, late: bool, final: bool) -> None:
        """Count one settle that is no repetition."""
        if not final:
            self.progress += 1
            return
        if late:
            self.late += 1
        else:
            self.settled += 1
        self.work += work
        self.uncollected += uncollected
        if adjusted > 0:
            self.debited += adjusted
        else:
            self.refunded -= adjusted
