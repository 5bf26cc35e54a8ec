"""Settle: a reservation's token → its charges under the current policies → buckets → the correction.

A reservation itself says what was charged where, so it can be settled even after its policy was deleted (F-P3).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from math import inf
from struct import Struct
from typing import Any, Protocol

from limiter.engine.fallback.remainders import Remainders
from limiter.engine.operation import NO_LATENCY
from limiter.engine.planner import Planner
from limiter.engine.request_errors import NotDecided, SettledOtherwise, UnknownReservation
from limiter.engine.store_health import StoreHealth
from limiter.model.bucket.contract import LimitState, Settled, SettleRequest
from limiter.model.bucket.decision import limit_state
from limiter.model.bucket.expiry import Expiries
from limiter.model.bucket.operations import BucketAnswer, BucketSettled, SettleAnswer, SettleStatus, Verdict
from limiter.model.bucket.refusals import Refusals
from limiter.model.bucket.reservation import Keyring, Reservation, Taken
from limiter.model.policy.limit import Limit, policy_of
from limiter.model.policy.policy_set import PolicySet
from limiter.model.tally import SettleTally
from limiter.runtime.told import WAITING_ROOM, Told
from limiter.store.buckets import Buckets
from limiter.store.call_layout import PRESENT, REPLY_SIZE, SETTLED_IN_REQUESTS, unpack_settle
from limiter.store.flush import IN_CLASS, UNCOUNTED, Settling, corrected
from limiter.store.keys import Slot
from limiter.store.layout import pack_params
from limiter.store.store_errors import StoreUnavailable

_DAMAGED = "the record of this reservation or of one of its buckets cannot be read; nothing was settled"


SettleArrived = tuple[SettleRequest, Any, str | None]
"""A request, its place at the desk, and the only namespace whose reservations the caller may settle; None: any."""


PlainSettle = tuple[float, float, float, bool, bool, int, bool, bool, float, float, float, int]
"""Work, adjusted, uncollected, stop, late, when it expires (ms); of the bucket: whether it exists, whether it counts
requests, balance, rate, capacity; the store's time."""

_SETTLED_CODE = int(SettleStatus.SETTLED)
_SETTLED = Struct("<BBBdddBddddd")  # of one bucket


class SettleDesk(Protocol):
    """Receives concluded settles, all of one turn together."""

    def answer_settles(self, operations: Sequence[Correction]) -> None:
        """Give each operation its answer. An exception here would cost the others theirs."""


class Correction(Settling):
    """One settle from its decoding to its answer."""

    __slots__ = ("desk", "limits", "outcome", "place", "plain", "request", "settler", "slot", "taken")

    slot: Slot
    taken: Sequence[Taken]
    limits: Sequence[Limit | None]
    """The limit of each bucket under the current policies; None if the policy is gone."""
    plain: PlainSettle
    """The answer of a plain settle, whose outcome is None."""

    def __init__(
        self, settler: Settler, request: SettleRequest, desk: SettleDesk, place: Any, deadline_s: float
    ) -> None:
        self.settler = settler
        self.request = request
        self.desk = desk
        self.place = place
        self.deadline_s = deadline_s
        self.is_over = self.is_sent = False
        self.outcome: Settled | Exception | None = None

    def tell(self, answer: Any) -> None:
        """Receive the store's answer, or the exception without one."""
        if not self.is_over:
            self.settler.conclude(self, answer)
            self.desk.answer_settles((self,))

    def finish(self, outcome: Settled | Exception) -> None:
        """End it without the store, and hand it to its desk."""
        self.is_over = True
        self.outcome = outcome
        self.desk.answer_settles((self,))

    def settled(self) -> Settled:
        """Return the outcome as a value, or raise it."""
        if self.outcome is None:
            return _settled_plainly(self)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Settler:
    """Settles for one node. `planner` is the current one."""

    def __init__(
        self,
        buckets: Buckets,
        keyring: Keyring,
        store_health: StoreHealth,
        tally: SettleTally,
        expiries: Expiries,
        remainders: Remainders,
        refusals: Refusals[Slot],
        *,
        deadline_s: float,
    ) -> None:
        self.planner = Planner(PolicySet())
        self._buckets = buckets
        buckets.settles.tell = self.tell
        self._keyring = keyring
        self._store_health = store_health
        self._tally = tally
        self._expiries = expiries
        self._remainders = remainders
        self._refusals = refusals
        self._deadline_s = deadline_s

    async def settle(self, request: SettleRequest, *, namespace: str | None = None) -> Settled:
        """Correct a charge. `namespace` is the only one whose reservations the caller may settle."""
        told: Told[Correction] = Told()
        self.begin([(request, told, namespace)], WAITING_ROOM)
        return (await told.future).settled()

    def begin(self, arrived: Iterable[SettleArrived], desk: SettleDesk) -> None:
        """Send all settles of one turn to the store; each is handed to the desk once it is done or has failed."""
        now_s, now_us = time.monotonic(), self._buckets.clock.guess_us()
        deadline_s = asyncio.get_running_loop().time() + self._deadline_s
        going: dict[Slot, list[Correction]] = {}
        slot, operations = None, list[Correction]()
        for request, place, namespace in arrived:
            operation = Correction(self, request, desk, place, deadline_s)
            try:
                reservation = self._keyring.open(request.reservation)
                if reservation is None or namespace not in (None, reservation.namespace):
                    operation.finish(UnknownReservation("no such reservation"))
                elif not reservation.taken:
                    operation.finish(_nothing_charged(reservation, request))
                elif not self._store_health.allows(now_s):
                    self._tally.unanswered["breaker"] += 1
                    operation.finish(NotDecided("store_unavailable", "the store cannot be asked; settle again later"))
                else:
                    if slot is None or slot != (reservation.namespace, reservation.partition):
                        slot = Slot(reservation.namespace, reservation.partition)
                        operations = going.setdefault(slot, [])
                    self._ask(operation, reservation, slot, now_us)
                    operations.append(operation)
            except Exception as error:  # an error of one must not cost the others their answers
                operation.finish(error)
        for slot, operations in going.items():
            self._buckets.settles.start_many(slot, operations, deadline_s=deadline_s)

    def _ask(self, operation: Correction, reservation: Reservation, slot: Slot, now_us: int) -> None:
        """Find what to ask of the store: the charges of the reservation, under the policies of now."""
        request, find, namespace = operation.request, self.planner.find, reservation.namespace
        operation.slot = slot
        operation.reservation = reservation.name
        operation.kind = (
            request.final + IN_CLASS * reservation.class_number + (UNCOUNTED if reservation.is_uncounted else 0)
        )
        operation.fields = (
            request.work,
            1.0,
            NO_LATENCY if request.latency_ms is None else request.latency_ms,
            reservation.expected_ms,
            reservation.acquired_us,
            reservation.deadline_us,
            reservation.late_us,
        )
        operation.taken = taken = reservation.taken
        if len(taken) == 1 and request.outcome == "ok":  # nearly all
            bucket = taken[0][0]
            limit = find(namespace, bucket)
            operation.buckets, operation.limits = (bucket,), (limit,)
            operation.rows = (b"" if limit is None else pack_params(limit.params(now_us)),)
            operation.charges = (corrected(taken[0], 0.0 if limit is None else limit.unit),)
            return
        operation.buckets = [charge[0] for charge in taken]
        operation.limits = limits = [find(namespace, bucket) for bucket in operation.buckets]
        operation.rows = [b"" if limit is None else pack_params(limit.params(now_us)) for limit in limits]
        if request.outcome != "ok":
            taken = tuple([_failed(one, limit, request.outcome) for one, limit in zip(taken, limits, strict=True)])
        operation.charges = [
            corrected(one, 0.0 if limit is None else limit.unit) for one, limit in zip(taken, limits, strict=True)
        ]

    def tell(self, batch: Sequence[Settling], reply: bytes, now_us: int) -> None:
        """Conclude a batch from the store's reply, then hand all operations to their desks."""
        self._store_health.answered()
        at = REPLY_SIZE
        told: dict[SettleDesk, list[Correction]] = {}
        try:
            for operation in batch:
                if type(operation) is not Correction:
                    answer, at = unpack_settle(reply, at, len(operation.buckets), now_us)
                    operation.tell(answer)
                    continue
                limit = operation.limits[0]
                if reply[at] == _SETTLED_CODE and limit is not None and limit.is_plain and len(operation.buckets) == 1:
                    settled, at = _SETTLED.unpack_from(reply, at), at + _SETTLED.size
                    if operation.is_over:
                        continue
                    operation.is_over = True
                    self._settle_plainly(operation, limit, settled, now_us)
                else:
                    answer, at = unpack_settle(reply, at, len(operation.buckets), now_us)
                    if operation.is_over:
                        continue
                    self.conclude(operation, answer)
                told.setdefault(operation.desk, []).append(operation)
        finally:  # also for a reply that cannot be read to its end
            for desk, operations in told.items():
                desk.answer_settles(operations)

    def _settle_plainly(self, operation: Correction, limit: Limit, settled: tuple[Any, ...], now_us: int) -> None:
        """Conclude a settle of one bucket whose limit exists, as nearly all are, without a value of the answer."""
        _, late, stop, work, deadline_us, before_us, code, balance, adjusted, uncollected, rate, capacity = settled
        ((_, _, weight, in_requests, *_),) = operation.taken
        if in_requests or not weight:
            adjusted = uncollected = 0.0
        else:
            adjusted, uncollected = (adjusted - uncollected) / weight, uncollected / weight
        final = operation.request.final
        expires_ms = 0 if final else max(0, int(deadline_us - now_us) // 1000)
        operation.plain = (
            work, adjusted, uncollected, stop == 1, late == 1, expires_ms, code >= PRESENT,
            code >= SETTLED_IN_REQUESTS, balance, rate, capacity, now_us,
        )  # fmt: skip
        self._tally.add(work, adjusted, uncollected, late=late == 1, final=final)
        *_, acquired_us, its_deadline_us, late_us = operation.fields
        life_us = its_deadline_us - acquired_us + late_us
        if final:
            self._expiries.settled(limit.key, deadline_us + late_us, life_us)
        elif deadline_us > before_us:
            self._expiries.renewed(limit.key, before_us + late_us, deadline_us + late_us, life_us)
        if self._refusals.known:
            self._refusals.forget(operation.slot, operation.buckets)

    def conclude(self, operation: Correction, answer: SettleAnswer | Exception) -> None:
        """Conclude by the store's answer or failure."""
        operation.is_over = True
        try:
            operation.outcome = self._settled(operation, answer)
        except Exception as error:
            operation.outcome = error

    def _settled(self, operation: Correction, answer: SettleAnswer | Exception) -> Settled:
        if isinstance(answer, StoreUnavailable):
            self._tally.unanswered[self._store_health.unanswered(answer)] += 1
            raise NotDecided("store_unavailable", "the store did not answer in time; settle again") from answer
        if isinstance(answer, Exception):
            raise answer
        if answer.status is SettleStatus.GONE:
            raise UnknownReservation("no such reservation")
        if answer.status is SettleStatus.CORRUPT:
            raise NotDecided("record_damaged", _DAMAGED)
        final = operation.request.final
        adjusted, uncollected = _corrected(_binding(operation, answer))
        settled = Settled(
            work=answer.work,
            adjusted=adjusted,
            stop=answer.stop,
            duplicate=answer.status is SettleStatus.DUPLICATE,
            late=answer.late,
            limits=self._limits(operation, answer),
            uncollected=uncollected,
            expires_in_ms=0 if final else max(0, int(answer.deadline_us - answer.now_us) // 1000),
        )
        if answer.status is SettleStatus.CONFLICT:
            raise SettledOtherwise(settled)
        if self._refusals.known:
            self._refusals.forget(operation.slot, operation.buckets)
        self._tally.count(settled, final=final)
        self._count_end(operation, answer)
        return settled

    def _count_end(self, operation: Correction, answer: SettleAnswer) -> None:
        """Count the end of a reservation by a settle, or its new deadline by progress (W14)."""
        final, namespace = operation.request.final, operation.slot.namespace
        if final and answer.status is SettleStatus.DUPLICATE:
            return
        *_, acquired_us, deadline_us, late_us = operation.fields
        life_us = deadline_us - acquired_us + late_us
        for bucket in operation.buckets:
            key = namespace, policy_of(bucket)
            if final:
                self._expiries.settled(key, answer.deadline_us + late_us, life_us)
            elif answer.deadline_us > answer.deadline_before_us:
                before_us, until_us = answer.deadline_before_us + late_us, answer.deadline_us + late_us
                self._expiries.renewed(key, before_us, until_us, life_us)

    def _limits(self, operation: Correction, answer: SettleAnswer) -> tuple[LimitState, ...]:
        """Return the states of those buckets that still exist and have a policy."""
        states = []
        for (name, charge, *_), limit, bucket in zip(operation.taken, operation.limits, answer.buckets, strict=True):
            if limit is None or not bucket.present:
                continue
            params = limit.params(answer.now_us)
            if limit.is_known and bucket.rate == params.window_end_us:
                own = bucket.adjusted if answer.status is SettleStatus.SETTLED else inf
                self._remainders.hear(operation.slot, name, params, bucket.balance, answer.now_us, own)
            row = BucketAnswer(Verdict.PASSED, bucket.balance, charge, bucket.rate, bucket.capacity, bucket.in_requests)
            states.append(limit_state(limit, params, row, answer.now_us, None))
        return tuple(states)


def _failed(taken: Taken, limit: Limit | None, outcome: str) -> Taken:
    """Mark a request whose outcome the policy counts as late: it expected its answer before it asked (Q8)."""
    if limit is None or outcome not in limit.outcomes:
        return taken
    bucket, charge, weight, in_requests, _, uncollected, learn_id = taken
    return bucket, charge, weight, in_requests, -inf, uncollected, learn_id


def _settled_plainly(operation: Correction) -> Settled:
    """A plain settle as a value."""
    work, adjusted, uncollected, stop, late, expires_ms, present, in_requests, balance, rate, capacity, now_us = (
        operation.plain
    )
    limit = operation.limits[0]
    assert limit is not None
    limits: tuple[LimitState, ...] = ()
    if present:
        row = BucketAnswer(Verdict.PASSED, balance, 0.0, rate, capacity, in_requests)
        limits = (limit_state(limit, limit.terms, row, now_us, None),)
    return Settled(
        work, adjusted, stop=stop, duplicate=False, late=late, limits=limits, uncollected=uncollected,
        expires_in_ms=expires_ms,
    )  # fmt: skip


def _binding(operation: Correction, answer: SettleAnswer) -> list[tuple[Taken, BucketSettled]]:
    """Return the buckets of an answer without those in shadow, which have no say (P11)."""
    rows = zip(operation.taken, answer.buckets, operation.limits, strict=True)
    if len(operation.taken) == 1:  # nearly all
        return [(taken, bucket) for taken, bucket, _ in rows]
    return [(taken, bucket) for taken, bucket, limit in rows if limit is None or not limit.shadow]


def _nothing_charged(reservation: Reservation, request: SettleRequest) -> Settled:
    """Settle a request that no policy covered: there is nothing to correct, and its deadline does not matter."""
    expires_in_ms = 0 if request.final else (reservation.deadline_us - reservation.acquired_us) // 1000
    return Settled(request.work, 0.0, stop=False, duplicate=False, late=False, limits=(), expires_in_ms=expires_in_ms)


def _corrected(rows: Sequence[tuple[Taken, BucketSettled]]) -> tuple[float, float]:
    """Return what was adjusted and is uncollected, in the caller's units: charged + adjusted + uncollected = work.

    Of several limits, that of the one that could collect least; if all could, of the one with the largest charge.
    """
    counting = [
        (uncollected / weight, charge / weight, charge, weight, bucket)
        for (_, charge, weight, in_requests, _, uncollected, _), bucket in rows
        if weight and not in_requests
    ]
    if not counting:
        return 0.0, 0.0
    _, part, charge, weight, bucket = max(counting, key=lambda row: (row[4].uncollected / row[3], row[1]))
    adjusted = bucket.adjusted - bucket.uncollected
    # By the same rule the acquire may have returned the charge of another limit.
    _, charged = max(row[:2] for row in counting)
    if charged != part:
        return (charge + adjusted) / weight - charged, bucket.uncollected / weight
    return adjusted / weight, bucket.uncollected / weight
