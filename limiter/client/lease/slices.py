"""Slices of limits and orders of overload control, as the holder of a lease keeps them. Standard library only; time is
an argument.

    balance = min(capacity, balance + elapsed · rate)      each slice, as a bucket of its own
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

SMOOTH_S = 1.0
"""Time over which demand is averaged."""
HEAD = 1.05
"""A holder asks for this much of its demand, which is noisy."""
PORTION_S = 1.5
"""A quota's portion lasts so long at the holder's demand; more than that is let go."""
CRITICALITIES = ("critical_plus", "critical", "sheddable_plus", "sheddable")


class Slice:
    """A part of one limit, as a bucket of the holder's own."""

    __slots__ = (
        "admitted", "balance", "capacity", "counted", "counts_requests", "is_quota", "mechanism", "minimums", "moved",
        "per_ns", "period", "policy", "refusals", "refused", "share", "spent", "until_ns", "updated_ns", "wanted",
        "weight",
    )  # fmt: skip

    def __init__(self, policy: str, now_ns: int) -> None:
        self.policy = policy
        self.mechanism = "work"
        self.is_quota = self.counts_requests = False
        self.balance = self.capacity = self.per_ns = self.share = 0.0
        self.updated_ns = self.until_ns = now_ns
        self.minimums: tuple[float, ...] = (0.0,) * len(CRITICALITIES)
        self.weight = 1.0
        self.moved = 0.0
        self.period = 0.0
        self.spent = 0.0
        self.admitted = self.refused = self.counted = 0.0
        self.refusals = 0.0
        """Requests that this slice refused."""
        self.wanted: float | None = None

    def refill(self, now_ns: int) -> None:
        """Credit the time since the last update, as far as the slice reaches."""
        now_ns = min(now_ns, self.until_ns)
        if now_ns > self.updated_ns:
            self.balance = min(self.balance + (now_ns - self.updated_ns) * self.per_ns, self.capacity)
            self.updated_ns = now_ns

    def follow(self, elapsed_s: float) -> None:
        """Average what the holder was asked for, granted or not."""
        asked = self.admitted + self.refused
        sample = (asked - self.counted) / elapsed_s
        known = self.wanted
        self.wanted = sample if known is None else known + elapsed_s / (elapsed_s + SMOOTH_S) * (sample - known)
        self.counted = asked

    def lower(self) -> None:
        """Let go of what is not wanted, before asking."""
        if self.wanted is None:
            return
        wants = self.wanted * HEAD
        if self.is_quota:
            self.balance = min(self.balance, float(-(-wants * PORTION_S // 1)))
        elif wants < self.per_ns * 1e9:
            self.share *= wants / (self.per_ns * 1e9)
            self.per_ns = wants / 1e9

    def said(self) -> dict[str, float | str]:
        """Return the row of this slice in a renewal."""
        row: dict[str, float | str] = {
            "policy": self.policy,
            "mechanism": self.mechanism,
            "refused": self.refusals,
        }
        if self.is_quota:
            return row | {"held": max(0.0, self.balance), "spent": self.spent, "period": self.period}
        return row | {"held": self.share, "debt": max(0.0, -self.balance), "moved": self.moved}

    def returned(self, *, is_over: bool) -> dict[str, float | str]:
        """Return the row of this slice in a return."""
        said = self.said()
        if self.is_quota:
            return said | {"held": 0.0}
        return said | {"held": 0.0, "tokens": 0.0 if is_over else max(0.0, self.balance)}

    def begin_again(self) -> None:
        """Keep what is owed, and nothing else: a portion of a quota was debited for good under the old lease."""
        if self.is_quota:
            self.spent = max(0.0, -self.balance)
        self.balance = 0.0 if self.is_quota else min(self.balance, 0.0)
        self.share = self.moved = self.per_ns = self.refusals = 0.0

    def take(self, answer: Mapping[str, Any], now_ns: int, sent_ns: int, until_ns: int) -> None:
        """Go by an answer."""
        self.refill(now_ns)
        self.mechanism = answer["mechanism"]
        self.is_quota, self.counts_requests = self.mechanism == "quota", answer.get("counts_requests", False)
        self.weight = answer.get("weight", 1.0)
        minimums = answer.get("minimums", {})
        self.minimums = tuple(float(minimums.get(name, 0.0)) for name in CRITICALITIES)
        if self.is_quota:
            self._take_portion(answer, sent_ns)
            return
        if now_ns >= self.until_ns:
            self.balance = min(self.balance, 0.0)  # tokens end with their lease, debt does not
        self.per_ns, self.capacity, self.share = answer["rate"] / 1e9, answer["capacity"], answer["share"]
        balance = self.balance + answer["tokens"] + answer["moved"] - self.moved
        self.balance, self.moved = min(balance, self.capacity), answer["moved"]
        self.updated_ns, self.until_ns = now_ns, until_ns

    def _take_portion(self, answer: Mapping[str, Any], sent_ns: int) -> None:
        """A portion is the holder's for good, until its period ends: it needs no lease to be used up (F-L8)."""
        if answer["period"] != self.period:
            self.period, self.balance, self.spent = answer["period"], 0.0, 0.0
        self.per_ns, self.capacity, self.share = 0.0, inf, 0.0
        self.balance += answer["tokens"]
        self.until_ns = sent_ns + int(answer["ends_in_ms"] * 1e6)


def begun(row: Mapping[str, Any], now_ns: int) -> Slice:
    """Make a slice that was not held before: debt that moved earlier was of another unit, and is not repaid here."""
    one = Slice(row["policy"], now_ns)
    one.moved = row["moved"]
    return one


class Throttle:
    """Overload control by class, as the service says: places in flight, shares refused, rates (Q4, S3, S9, W18)."""

    __slots__ = ("forgotten", "late_after_ms", "open", "places", "rates", "shares", "tokens", "updated_ns")

    def __init__(self, now_ns: int) -> None:
        self.open = 0.0
        """Grants that are not settled."""
        self.forgotten: deque[None] = deque()
        """A note for each of them that was forgotten since; appending is atomic, with and without the GIL."""
        self.places = self.rates = self.late_after_ms = (inf,) * len(CRITICALITIES)
        self.shares: tuple[float, ...] = (0.0,) * len(CRITICALITIES)
        self.tokens = [1.0] * len(CRITICALITIES)
        self.updated_ns = now_ns

    def take(self, answer: Mapping[str, Any]) -> None:
        """Go by an answer; what it leaves out is not limited."""
        in_flight, rates, shares = answer["in_flight"], answer["rate"], answer["refused_share"]
        late = answer.get("late_after_ms", {})
        self.places = tuple(float(in_flight.get(name, inf)) for name in CRITICALITIES)
        self.rates = tuple(float(rates.get(name, inf)) for name in CRITICALITIES)
        self.shares = tuple(float(shares.get(name, 0.0)) for name in CRITICALITIES)
        self.late_after_ms = tuple(float(late.get(name, inf)) for name in CRITICALITIES)

    def refuses(self, number: int, draw: float, now_ns: int) -> str | None:
        """Why a request of a class is refused; None if it is let in, and then its class pays for it."""
        elapsed_s, self.updated_ns = max(0, now_ns - self.updated_ns) / 1e9, now_ns
        for one, rate in enumerate(self.rates):
            if rate < inf:
                self.tokens[one] = min(max(1.0, rate), self.tokens[one] + elapsed_s * rate)
        while self.forgotten:
            self.forgotten.pop()
            self.free()
        if self.open >= self.places[number]:
            return "in_flight"
        if draw < self.shares[number]:
            return "overload"
        if self.rates[number] < inf:
            if self.tokens[number] < 1.0:
                return "overload"
            self.tokens[number] -= 1.0
        return None

    def free(self) -> None:
        """Free a place."""
        self.open = max(0.0, self.open - 1.0)
