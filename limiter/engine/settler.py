"""Settle: a reservation's token → its charges under the policies of now → buckets → what was corrected.

A reservation says for itself what was charged where, so a deleted policy still honours what is out (F-P3).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from limiter.engine.errors import NotDecided, SettledOtherwise, UnknownReservation
from limiter.engine.planner import Planner, with_terms
from limiter.engine.remainders import Remainders
from limiter.engine.standing import Standing
from limiter.model.bucket.contract import LimitState, Settled, SettleRequest
from limiter.model.bucket.decision import limit_state
from limiter.model.bucket.expiry import Expiries
from limiter.model.bucket.operations import (
    BucketAnswer,
    BucketSettled,
    Charge,
    Settle,
    SettleAnswer,
    SettleStatus,
    Verdict,
)
from limiter.model.bucket.reservation import Keyring, Reservation
from limiter.model.policy.limit import policy_of
from limiter.model.policy.policy_set import PolicySet
from limiter.model.tally import SettleTally
from limiter.runtime.told import Done
from limiter.store.buckets import Buckets
from limiter.store.errors import StoreUnavailable
from limiter.store.keys import Slot

NO_LATENCY = float("nan")
_DAMAGED = "the record of this reservation or of one of its buckets cannot be read; nothing was settled"


class Settler:
    """Settles for one node. `planner` is the one in force."""

    def __init__(
        self,
        buckets: Buckets,
        keyring: Keyring,
        standing: Standing,
        tally: SettleTally,
        expiries: Expiries,
        remainders: Remainders,
        *,
        deadline_s: float,
    ) -> None:
        self.planner = Planner(PolicySet())
        self._buckets = buckets
        self._keyring = keyring
        self._standing = standing
        self._tally = tally
        self._expiries = expiries
        self._remainders = remainders
        self._deadline_s = deadline_s

    def start(self, request: SettleRequest, done: Done[Settled], *, namespace: str | None) -> None:
        """Correct what was charged; `done` is told what came of it, or why nothing did."""
        reservation = self._keyring.open(request.reservation)
        if reservation is None or namespace not in (None, reservation.namespace):
            done(UnknownReservation("no such reservation"))
        elif not reservation.charges:
            done(_nothing_charged(reservation, request))
        elif not self._standing.allows(time.monotonic()):
            self._tally.unanswered["breaker"] += 1
            done(NotDecided("store_unavailable", "the store cannot be asked; settle again later"))
        else:
            self._ask(reservation, request, done)

    def _ask(self, reservation: Reservation, request: SettleRequest, done: Done[Settled]) -> None:
        slot, operation = self._operation(reservation, request)

        def answered(answer: SettleAnswer | Exception) -> None:
            try:
                settled = self._settled(slot, operation, answer)
            except Exception as error:
                done(error)
            else:
                done(settled)

        deadline_s = asyncio.get_running_loop().time() + self._deadline_s
        try:
            self._buckets.start_settle(slot, operation, answered, deadline_s=deadline_s)
        except ValueError as error:
            done(error)

    def _operation(self, reservation: Reservation, request: SettleRequest) -> tuple[Slot, Settle]:
        now_us, planner = self._buckets.clock.guess_us(), self.planner
        charges = [
            with_terms(charge, planner.find(reservation.namespace, charge.bucket), now_us)
            for charge in reservation.charges
        ]
        return Slot(reservation.namespace, reservation.partition), Settle(
            reservation=reservation.name,
            charges=tuple(charges),
            work=request.work,
            acquired_us=reservation.acquired_us,
            deadline_us=reservation.deadline_us,
            final=request.final,
            latency_ms=NO_LATENCY if request.latency_ms is None else request.latency_ms,
            expected_ms=reservation.expected_ms,
            class_number=reservation.class_number,
            late_us=reservation.late_us,
        )

    def _settled(self, slot: Slot, operation: Settle, answer: SettleAnswer | Exception) -> Settled:
        if isinstance(answer, StoreUnavailable):
            self._tally.unanswered[self._standing.unanswered(answer)] += 1
            raise NotDecided("store_unavailable", "the store did not answer in time; settle again") from answer
        if isinstance(answer, Exception):
            raise answer
        self._standing.answered()
        if answer.status is SettleStatus.GONE:
            raise UnknownReservation("no such reservation")
        if answer.status is SettleStatus.CORRUPT:
            raise NotDecided("record_damaged", _DAMAGED)
        corrected = _corrected(self._binding(slot, operation, answer))
        settled = Settled(
            work=answer.work,
            adjusted=corrected.adjusted,
            stop=answer.stop,
            duplicate=answer.status is SettleStatus.DUPLICATE,
            late=answer.late,
            limits=self._limits(slot, operation, answer),
            uncollected=corrected.uncollected,
            expires_in_ms=0 if operation.final else max(0, int(answer.deadline_us - answer.now_us) // 1000),
        )
        if answer.status is SettleStatus.CONFLICT:
            raise SettledOtherwise(settled)
        self._tally.count(settled, final=operation.final)
        self._count_end(slot.namespace, operation, answer)
        return settled

    def _count_end(self, namespace: str, operation: Settle, answer: SettleAnswer) -> None:
        """A settle ends a reservation; progress moves its end (W14)."""
        if operation.final and answer.status is SettleStatus.DUPLICATE:
            return
        late_us = operation.late_us
        life_us = operation.deadline_us - operation.acquired_us + late_us
        for charge in operation.charges:
            key = namespace, policy_of(charge.bucket)
            if operation.final:
                self._expiries.settled(key, answer.deadline_us + late_us, life_us)
            elif answer.deadline_us > answer.deadline_before_us:
                before_us, until_us = answer.deadline_before_us + late_us, answer.deadline_us + late_us
                self._expiries.renewed(key, before_us, until_us, life_us)

    def _binding(self, slot: Slot, operation: Settle, answer: SettleAnswer) -> list[tuple[Charge, BucketSettled]]:
        """The buckets of an answer without those of shadows, which have no say (P11)."""
        rows = zip(operation.charges, answer.buckets, strict=True)
        if len(operation.charges) == 1:  # by far the most
            return list(rows)
        found = [(charge, bucket, self.planner.find(slot.namespace, charge.bucket)) for charge, bucket in rows]
        return [(charge, bucket) for charge, bucket, limit in found if limit is None or not limit.shadow]

    def _limits(self, slot: Slot, operation: Settle, answer: SettleAnswer) -> tuple[LimitState, ...]:
        """The states of those buckets that are still there, and whose policies are."""
        states = []
        for charge, bucket in zip(operation.charges, answer.buckets, strict=True):
            limit = self.planner.find(slot.namespace, charge.bucket)
            if limit is None or charge.params is None or not bucket.present:
                continue
            if limit.is_known and bucket.rate == charge.params.window_end_us:
                own = bucket.adjusted if answer.status is SettleStatus.SETTLED else inf
                self._remainders.hear(slot, charge.bucket, charge.params, bucket.balance, answer.now_us, own)
            row = BucketAnswer(
                Verdict.PASSED, bucket.balance, charge.charge, bucket.rate, bucket.capacity, bucket.in_requests
            )
            states.append(limit_state(limit, charge.params, row, answer.now_us, None))
        return tuple(states)


def _nothing_charged(reservation: Reservation, request: SettleRequest) -> Settled:
    """No policy covered the request: there is nothing to correct, and its deadline matters to nobody."""
    expires_in_ms = 0 if request.final else (reservation.deadline_us - reservation.acquired_us) // 1000
    return Settled(request.work, 0.0, stop=False, duplicate=False, late=False, limits=(), expires_in_ms=expires_in_ms)


class _Corrected(NamedTuple):
    """What a settle tells of one limit, in the caller's units: charged + adjusted + uncollected = work."""

    adjusted: float
    uncollected: float


def _corrected(rows: Sequence[tuple[Charge, BucketSettled]]) -> _Corrected:
    """Of several limits, the one that could collect least; where all of them could, the one that was charged most."""
    counting = [(charge, bucket) for charge, bucket in rows if charge.weight and not charge.in_requests]
    if not counting:
        return _Corrected(0.0, 0.0)
    charge, bucket = max(counting, key=lambda row: (row[1].uncollected / row[0].weight, row[0].charge / row[0].weight))
    adjusted, weight = bucket.adjusted - bucket.uncollected, charge.weight
    # What the acquire said was charged, by the same rule, may have been another limit's.
    _, charged = max((other.uncollected / other.weight, other.charge / other.weight) for other, _ in counting)
    if charged != charge.charge / weight:
        return _Corrected((charge.charge + adjusted) / weight - charged, bucket.uncollected / weight)
    return _Corrected(adjusted / weight, bucket.uncollected / weight)
