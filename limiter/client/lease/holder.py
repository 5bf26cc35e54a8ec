"""The holder of a lease: decides by itself on the slices it was lent (B8, P9). Standard library only.

    granted   if every slice (`limiter.client.lease.slices`) has the charge and its class's minimum, and the lease has
              not ended

Time is a monotonic clock in nanoseconds. The lease ends `expires_in_ms` after its request was *sent*; every decision
looks at that first: a process that slept, was paused or got its answer late decides nothing on an old lease (F-L2,
F-R15). The end of a lease voids tokens; debt stays.

ask()          the path and the body of the next request: numbered, with all that was done so far. Before it asks, a
               holder lowers itself to its demand, so that no other holder waits for its next request
take()         takes over the answer to the latest request, and to no other (F-L3)
begin_again()  after a 404: the service has forgotten the lease; debt and what was not reported yet go into a new one
give_back()    the path and the body of the last request

One thread, or one event loop, uses a lease: between reading the clock and the last write nothing else can run there.
Threads share one only with `lock=`. A child process must not use its parent's lease: `is_foreign` tells (F-L7).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from random import random
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Literal

from limiter.client.lease.slices import CRITICALITIES, HEAD, SMOOTH_S, Slice, Throttle, begun

FIRST_LOOK_S = 0.2
FIRST_KEPT_NS = 1_000_000_000
"""A first request that nobody answered for so long is given up, and another lease begun."""
REPEAT_AFTER_S = 0.3
"""An unanswered request is sent again, the same, after this time."""

DEFAULT_CRITICALITY = 1
_NUMBERS = {name: number for number, name in enumerate(CRITICALITIES)}
_SUMS = ("requests", "refused", "charged", "settled", "squared", "settles", "answered", "late", "seconds")
"""The sums of a lease from its beginning on; a new one goes on from those that were not reported."""


class Grant:
    """Granted: settle it with the work that was really done."""

    __slots__ = ("_amounts", "_entered_ns", "_is_settled", "_lease", "charged")

    def __init__(self, lease: Lease, charged: float, amounts: tuple[float, ...] | None, entered_ns: int) -> None:
        self._lease = lease
        self.charged = charged
        self._amounts = amounts
        self._entered_ns = entered_ns
        self._is_settled = False

    if TYPE_CHECKING:  # every object is true; said so that `if found:` tells a grant from a refusal

        def __bool__(self) -> Literal[True]: ...

    def settle(self, work: float | None = None) -> None:
        """Correct the charge to the work done; without `work` the estimate stands. A second call does nothing."""
        if not self._is_settled:
            self._is_settled = True
            self._lease.settle(self, self.charged if work is None else work)

    def progress(self, work: float) -> None:
        """Debit what was done so far beyond the charge; the settle corrects the rest."""
        if not self._is_settled:
            self._lease.progress(self, work)

    @property
    def entered_ns(self) -> int:
        """When it was granted."""
        return self._entered_ns


class PlacedGrant(Grant):
    """Granted, with a place in flight that is free again once it is settled, or forgotten."""

    __slots__ = ("number", "throttle")

    def __init__(
        self,
        lease: Lease,
        charged: float,
        amounts: tuple[float, ...] | None,
        entered_ns: int,
        number: int,
        throttle: Throttle,
    ) -> None:
        super().__init__(lease, charged, amounts, entered_ns)
        self.number = number
        self.throttle = throttle
        """Where its place is: overload control may have ended and begun again since."""

    def settle(self, work: float | None = None, _now: Callable[[], int] = monotonic_ns) -> None:
        """Correct the charge, free the place and say how long it took."""
        if not self._is_settled:
            self._is_settled = True
            work = self.charged if work is None else work
            self._lease.settle(self, work, (_now() - self._entered_ns) / 1e6)

    def __del__(self) -> None:
        # Runs wherever the last reference goes, perhaps in a thread that has the lock: it only leaves a note.
        if not self._is_settled:
            self.throttle.forgotten.append(None)


class Refusal:
    """Refused: by which policy, and when to come back. False, so that `if grant:` reads well."""

    __slots__ = ("policy", "reason", "retry_after_ms")

    def __init__(self, policy: str, reason: str, retry_after_ms: float | None) -> None:
        self.policy = policy
        self.reason = reason
        """`work`, `request_rate` or `quota`: not enough is left. `in_flight`, `overload`: overload control refuses.
        `too_large`: more than the slice ever holds, so ask the service. `no_lease`: there is no lease, or it has ended:
        ask the service, or do what `on_service_failure` says."""
        self.retry_after_ms = retry_after_ms

    def __bool__(self) -> Literal[False]:
        return False


def _check(charge: float) -> None:
    """Refuse a charge that would spoil every balance it meets, as the service does."""
    if not 0.0 <= charge < inf:
        raise ValueError(f"work is a number from 0 on, not {charge}")


class Lease:
    """Slices of every policy of one descriptor, all or nothing."""

    __slots__ = (
        "_counted_ns", "_holds", "_is_answered", "_lock", "_pid", "_reported", "_sent_ns", "answered", "charge",
        "charged", "deadline_ns", "descriptor", "first", "holder", "late", "namespace", "number", "on_service_failure",
        "quality", "refused", "renew_in_ms", "requests", "seconds", "settled", "settles", "slices", "squared", "state",
        "taken", "throttle", "token", "weight",
    )  # fmt: skip

    def __init__(
        self,
        descriptor: Mapping[str, str] | None = None,
        *,
        namespace: str = "default",
        holder: str | None = None,
        weight: float = 1.0,
        lock: AbstractContextManager[Any] | None = None,
        now_ns: int | None = None,
    ) -> None:
        now_ns = monotonic_ns() if now_ns is None else now_ns
        self.descriptor, self.namespace, self.weight = dict(descriptor or {}), namespace, weight
        self.holder = holder or secrets.token_hex(16)
        self.token: str | None = None
        self.number = self.taken = 0
        self.charge = 1.0
        self.slices: list[Slice] = []
        self.first: Slice | None = None
        """The slice, where there is only one and it refills: the short way."""
        self.deadline_ns = now_ns
        self.requests = self.refused = self.charged = self.settled = self.squared = self.settles = 0.0
        self.answered = self.late = self.seconds = 0.0
        self.throttle: Throttle | None = None
        self.quality, self.state = 1.0, "calm"
        self.on_service_failure, self.renew_in_ms = "local", 1000.0
        self._lock = lock
        self._holds: AbstractContextManager[Any] = nullcontext() if lock is None else lock
        self._reported: tuple[float, ...] = (0.0,) * len(_SUMS)
        """The sums as the latest request carried them."""
        self._pid = os.getpid()
        self._sent_ns = self._counted_ns = now_ns
        self._is_answered = True

    @property
    def is_foreign(self) -> bool:
        """True if another process took this lease: after a fork, take a new one (F-L7)."""
        return os.getpid() != self._pid

    # Deciding.

    def allow(self, work: float | None = None, _now: Callable[[], int] = monotonic_ns) -> bool:
        """Return whether a request of the default class may work now. No object is made: it is never settled."""
        first = self.first
        if first is None or self._lock is not None:
            return bool(self.try_acquire(work, None, _now))
        now_ns = _now()
        if now_ns >= self.deadline_ns:
            return bool(self._decide(work, None, now_ns))
        charge = self.charge if work is None else work
        amount = charge * first.weight
        balance = first.balance + (now_ns - first.updated_ns) * first.per_ns
        if balance > first.capacity:
            balance = first.capacity
        first.updated_ns = now_ns
        if not balance >= amount >= 0.0 or balance < first.minimums[1]:
            first.balance = balance
            _check(charge)
            first.refused += amount
            first.refusals += 1.0
            self.refused += 1.0
            return False
        first.balance = balance - amount
        first.admitted += amount
        self.requests += 1.0
        self.charged += charge
        return True

    def try_acquire(
        self, work: float | None = None, criticality: str | None = None, _now: Callable[[], int] = monotonic_ns
    ) -> Grant | Refusal:
        """A grant, or (falsy) why not and when to come back."""
        if self._lock is not None:
            with self._lock:
                return self._decide(work, criticality, _now())
        return self._decide(work, criticality, _now())

    def _decide(self, work: float | None, criticality: str | None, now_ns: int) -> Grant | Refusal:
        number = DEFAULT_CRITICALITY if criticality is None else _NUMBERS[criticality]
        charge = self.charge if work is None else work
        first = self.first
        if first is not None and now_ns < self.deadline_ns:
            amount = charge * first.weight
            balance = first.balance + (now_ns - first.updated_ns) * first.per_ns
            if balance > first.capacity:
                balance = first.capacity
            first.updated_ns = now_ns
            if balance >= amount >= 0.0 and balance >= first.minimums[number]:
                first.balance = balance - amount
                first.admitted += amount
                self.requests += 1.0
                self.charged += charge
                return Grant(self, charge, None, now_ns)
            first.balance = balance
        return self._decide_all(charge, number, now_ns)

    def _decide_all(self, charge: float, number: int, now_ns: int) -> Grant | Refusal:
        """Every slice, or none."""
        _check(charge)
        amounts = tuple(one.weight if one.counts_requests else charge * one.weight for one in self.slices)
        binding = None
        for one, amount in zip(self.slices, amounts, strict=True):
            one.refill(now_ns)
            if one.balance < amount or one.balance < one.minimums[number] or now_ns >= one.until_ns:
                binding = one if binding is None else binding
        if not self.slices or binding is not None or not self._is_live(now_ns):
            return self._refuse(binding, amounts, number, now_ns)
        throttle = self.throttle
        if throttle is not None:
            reason = throttle.refuses(number, random(), now_ns)  # noqa: S311
            if reason is not None:
                self.refused += 1.0
                return Refusal("", reason, None)
            throttle.open += 1.0
        for one, amount in zip(self.slices, amounts, strict=True):
            one.balance -= amount
            one.admitted += amount
            one.spent += amount
        self.requests += 1.0
        self.charged += charge
        if throttle is not None:
            return PlacedGrant(self, charge, amounts, now_ns, number, throttle)
        return Grant(self, charge, amounts, now_ns)

    def _is_live(self, now_ns: int) -> bool:
        """A lease of quotas alone goes on until its portions are used up."""
        return now_ns < self.deadline_ns or all(one.is_quota for one in self.slices)

    def _refuse(self, binding: Slice | None, amounts: Sequence[float], number: int, now_ns: int) -> Refusal:
        self.refused += 1.0
        for one, amount in zip(self.slices, amounts, strict=True):
            one.refused += amount
        if binding is None or not self._is_live(now_ns):
            return Refusal("", "no_lease", None)
        binding.refusals += 1.0
        need = max(amounts[self.slices.index(binding)], binding.minimums[number])
        if binding.is_quota:
            return Refusal(binding.policy, "quota", None)
        if need > binding.capacity:
            return Refusal(binding.policy, "too_large", None)
        wait_ms = (need - binding.balance) / binding.per_ns / 1e6 if binding.per_ns > 0 else None
        return Refusal(binding.policy, "request_rate" if binding.counts_requests else "work", wait_ms)

    def settle(self, grant: Grant, work: float, took_ms: float | None = None) -> None:
        """Correct every slice by what was really done: debt if it was more. `took_ms` frees a place in flight."""
        _check(work)
        if self._lock is not None:
            with self._lock:
                self._settle(grant, work, took_ms)
        else:
            self._settle(grant, work, took_ms)

    def _settle(self, grant: Grant, work: float, took_ms: float | None) -> None:
        if took_ms is not None and isinstance(grant, PlacedGrant):
            grant.throttle.free()
            self.answered += 1.0
            self.seconds += took_ms / 1000
            if took_ms > grant.throttle.late_after_ms[grant.number]:
                self.late += 1.0
        self.settles += 1.0
        self.settled += work
        self.squared += work * work
        self._debit(work - grant.charged)

    def progress(self, grant: Grant, work: float) -> None:
        """Debit the work so far of a grant that is still open, as far as it is beyond what was debited."""
        _check(work)
        with self._holds:
            if work > grant.charged:
                self._debit(work - grant.charged)
                grant.charged = work

    def _debit(self, more: float) -> None:
        if more:
            for one in self.slices:
                if not one.counts_requests:
                    amount = more * one.weight
                    one.balance -= amount  # a refund is clamped at the next refill; below zero is debt
                    one.admitted += amount
                    one.spent += amount

    # Asking.

    def ask(self, now_ns: int | None = None) -> tuple[str, dict[str, Any]]:
        """The path and the body of the next request. Send the same one again until it is answered.

        Without an answer to the first there is no lease to renew: it is asked for again, after a second as another.
        """
        body = self.request(now_ns)
        if self.token is not None:
            return "/v1/leases/renew", {"lease": self.token, **body}
        first = {"descriptor": self.descriptor, "namespace": self.namespace, "holder": self.holder}
        rates: dict[str, Any] = {name: body[name] for name in ("work_rate", "request_rate") if name in body}
        return "/v1/leases", {**first, "weight": self.weight, **rates, "slices": body["slices"]}

    def give_back(self, now_ns: int | None = None) -> tuple[str, dict[str, Any]]:
        """The path and the body of the last request. Nothing is decided under this lease any more."""
        return "/v1/leases/return", {"lease": self.token, **self.returned(now_ns)}

    def begin_again(self, now_ns: int | None = None) -> None:
        """Take a new lease: the service knows nothing of this one any more. Only what the latest request carried, which
        may have been counted, is dropped."""
        now_ns = monotonic_ns() if now_ns is None else now_ns
        with self._holds:
            for name, counted in zip(_SUMS, self._reported, strict=True):
                setattr(self, name, getattr(self, name) - counted)
            for one in self.slices:
                one.begin_again()
            self.holder, self.token, self.first = secrets.token_hex(16), None, None
            self.number = self.taken = 0
            self._reported = (0.0,) * len(_SUMS)
            self.deadline_ns, self._is_answered = now_ns, True

    def request(self, now_ns: int | None = None) -> dict[str, Any]:
        """The next request: what was done, what is held, what is wanted."""
        now_ns = monotonic_ns() if now_ns is None else now_ns
        if self.token is None and self.number > 0 and now_ns - self._sent_ns >= FIRST_KEPT_NS:
            self.begin_again(now_ns)
        with self._holds:
            return self._request(now_ns)

    def _request(self, now_ns: int) -> dict[str, Any]:
        elapsed_s = (now_ns - self._counted_ns) / 1e9
        known = any(one.wanted is not None for one in self.slices)
        if elapsed_s >= SMOOTH_S / 2 or (not known and elapsed_s >= FIRST_LOOK_S and self.requests + self.refused > 0):
            for one in self.slices:
                one.follow(elapsed_s)
            self._counted_ns = now_ns
        for one in self.slices:
            one.refill(now_ns)
            one.lower()
        if self.token is not None:
            self._reported = tuple(getattr(self, name) for name in _SUMS)
        if self.token is not None or self.number == 0:  # the first request is the same one until it is answered
            self.number += 1
            self._sent_ns, self._is_answered = now_ns, False
        return {"number": self.number, "taken": self.taken, "used": self.used(), **self._rates(),
                "slices": [one.said() for one in self.slices]}  # fmt: skip

    def used(self) -> dict[str, float]:
        """All that was done under this lease."""
        return {
            "requests": self.requests + self.refused,
            "refused": self.refused,
            "charged": self.charged,
            "work": self.settled,
            "work_squared": self.squared,
            "settles": self.settles,
            "answered": self.answered,
            "late": self.late,
            "seconds": self.seconds,
        }

    def _rates(self) -> dict[str, float]:
        """Return the demand in work and in requests, before weights; nothing while it is not known."""
        rates: dict[str, float] = {}
        for one in self.slices:
            if one.wanted is not None and one.weight > 0:
                name = "request_rate" if one.counts_requests else "work_rate"
                rates[name] = max(rates.get(name, 0.0), one.wanted * HEAD / one.weight)
        return rates

    def take(self, answer: Mapping[str, Any], now_ns: int | None = None) -> bool:
        """Take over an answer, if it is that to the latest request and came in time; whether it was."""
        now_ns = monotonic_ns() if now_ns is None else now_ns
        with self._holds:
            until_ns = self._sent_ns + int(answer["expires_in_ms"] * 1e6)
            if answer["number"] != self.number or self._is_answered or now_ns >= until_ns:
                return False
            self._take(answer, now_ns, until_ns)
        return True

    def _take(self, answer: Mapping[str, Any], now_ns: int, until_ns: int) -> None:
        held = {(one.policy, one.mechanism): one for one in self.slices}
        slices = []
        for row in answer["slices"]:
            one = held.get((row["policy"], row["mechanism"])) or begun(row, now_ns)
            one.take(row, now_ns, self._sent_ns, until_ns)
            slices.append(one)
        self.slices = slices
        self._throttle(answer.get("overload"), now_ns)
        self.quality, self.state = answer.get("quality", 1.0), answer.get("state", "calm")
        self.on_service_failure = answer.get("on_service_failure", "local")
        self.renew_in_ms = answer.get("renew_in_ms", self.renew_in_ms)
        plain = len(slices) == 1 and not slices[0].is_quota and not slices[0].counts_requests and self.throttle is None
        self.first = slices[0] if plain and slices[0].capacity > 0 else None
        self.charge = answer.get("charge", self.charge)
        self.token = answer.get("lease", self.token)
        self.deadline_ns, self.taken, self._is_answered = until_ns, self.number, True

    def _throttle(self, overload: Mapping[str, Any] | None, now_ns: int) -> None:
        if overload is None:
            self.throttle = None
            return
        if self.throttle is None:
            self.throttle = Throttle(now_ns)
        self.throttle.take(overload)

    def returned(self, now_ns: int | None = None) -> dict[str, Any]:
        """Return the last request. Nothing is decided under this lease any more."""
        with self._holds:
            return self._returned(monotonic_ns() if now_ns is None else now_ns)

    def _returned(self, now_ns: int) -> dict[str, Any]:
        ended = now_ns >= self.deadline_ns
        rows: list[dict[str, Any]] = []
        for one in self.slices:
            one.refill(now_ns)
            rows.append(one.returned(is_over=ended))
        self.deadline_ns, self.first = now_ns, None
        self.number += 1
        return {"number": self.number, "taken": self.taken, "used": self.used(), "slices": rows}
