"""Acquire and settle: descriptor → limits → buckets → decision, within a deadline, whatever the store does.

Where the store cannot answer, each policy says what holds (B3): `closed` refuses to decide, `open` lets pass, and
`local` asks a bucket in this node that holds its share of the limit. What was let pass without the store is not
charged there; its settle debits the whole of its work, once the store is back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from os import urandom

import msgspec

from limiter.errors import IdempotencyConflict, NotDecided, SettledOtherwise, UnknownReservation
from limiter.local import LocalBuckets
from limiter.model.breaker import Breaker
from limiter.model.contract import AcquireRequest, Decision, Granted, LimitState, Refused, Settled, SettleRequest
from limiter.model.decision import limit_state, limit_states, refusal
from limiter.model.limit import Limit
from limiter.model.operations import (
    Acquire,
    AcquireAnswer,
    AcquireStatus,
    BucketAnswer,
    BucketSettled,
    Charge,
    Idempotency,
    Settle,
    SettleAnswer,
    SettleStatus,
    Verdict,
    Want,
)
from limiter.model.policy import Criticality, OnStoreFailure, PolicySet
from limiter.model.reservation import ID_SIZE, Reservation, Signer
from limiter.model.retries import RetryMeter
from limiter.planner import Planner, want, with_terms
from limiter.store.buckets import Buckets
from limiter.store.errors import StoreOutOfMemory, StoreUnavailable
from limiter.store.keys import Slot

NO_LATENCY = float("nan")
IDS_DRAWN = 256


class RandomIds:
    """Random ids, drawn from the system many at a time."""

    __slots__ = ("_at", "_pool")

    def __init__(self) -> None:
        self._pool, self._at = b"", 0

    def next(self) -> bytes:
        """One that nobody had before."""
        at = self._at
        if at >= len(self._pool):
            self._pool, at = urandom(ID_SIZE * IDS_DRAWN), 0
        self._at = at + ID_SIZE
        return self._pool[at : at + ID_SIZE]


_Row = tuple[str, float, bool]
"""A bucket, how it weighs work, and whether it is charged in requests."""


class _Memo(msgspec.Struct, array_like=True):
    """What rebuilds an answer under its idempotency key: kept in the store beside the decision (R7)."""

    id: bytes
    ttl_ms: int
    expected_ms: float
    rows: list[_Row]


class _Case:
    """One acquire on its way: the request, and what covers it."""

    __slots__ = ("criticality", "expected_ms", "id", "limits", "request", "requests", "slot")

    def __init__(
        self, request: AcquireRequest, slot: Slot, limits: Sequence[Limit], criticality: Criticality, id_: bytes
    ) -> None:
        self.request = request
        self.slot = slot
        self.limits = limits
        self.criticality = criticality
        self.id = id_
        self.requests = 1.0
        expected_ms = request.expected_latency_ms
        self.expected_ms = NO_LATENCY if expected_ms is None else expected_ms

    def wants(self, now_us: int) -> tuple[Want, ...]:
        """What it asks of each bucket, at a time of the store's."""
        request = self.request
        return tuple(
            [
                want(limit, request.descriptor, work=request.work, criticality=self.criticality, now_us=now_us)
                for limit in self.limits
            ]
        )

    def rows(self, wants: Sequence[Want]) -> list[_Row]:
        """What a settle will have to know of each bucket."""
        descriptor = self.request.descriptor
        return [
            (want.bucket, limit.weight(descriptor) if limit.weights else 1.0, want.params.counts_requests)
            for want, limit in zip(wants, self.limits, strict=True)
        ]


class Decider:
    """Decides for one node. Holds nothing that matters: kill it at any time."""

    def __init__(
        self,
        buckets: Buckets,
        signer: Signer,
        *,
        deadline_s: float = 0.1,
        default_criticality: Criticality = Criticality.CRITICAL,
        refuse_uncovered: bool = False,
        nodes: Callable[[], int] = lambda: 1,
    ) -> None:
        self._buckets = buckets
        self._signers = [signer]
        self._deadline_s = deadline_s
        self._default_criticality = default_criticality
        self._refuse_uncovered = refuse_uncovered
        self._planner = Planner(PolicySet())
        self._breaker = Breaker()
        self._retries = RetryMeter()
        self._local = LocalBuckets(nodes)
        self._ids = RandomIds()
        self.uncovered = 0

    @property
    def policies(self) -> PolicySet:
        """What is in force."""
        return self._planner.policies

    def enforce(self, policies: PolicySet) -> None:
        """Let other policies be in force from the next request on (W9)."""
        self._planner = Planner(policies)

    def sign_with(self, signer: Signer) -> None:
        """Sign with another secret from now on; what was signed before is still known."""
        self._signers.insert(0, signer)

    @property
    def store_is_shunned(self) -> bool:
        """Whether the store failed so often that it is only probed now and then."""
        return self._breaker.is_open

    def store_answered(self) -> None:
        """Somebody else has heard from the store."""
        self._breaker.succeed()

    async def acquire(self, request: AcquireRequest, *, idempotency_key: str | None = None) -> Decision:
        """May this request go ahead? IdempotencyConflict or NotDecided if that cannot be said."""
        self._retries.count(request.attempt, time.monotonic())
        slot, limits = self._planner.cover(request.namespace, request.descriptor)
        case = _Case(request, slot, limits, request.criticality or self._default_criticality, self._ids.next())
        if not limits:
            return self._uncovered(case)
        if not self._breaker.allows(time.monotonic()):
            return self._without_store(case)
        try:
            wants, answer = await self._ask(case, idempotency_key)
            if answer.status is AcquireStatus.CORRUPT and any(limit.shadow for limit in limits):
                # A shadow refuses nothing, not even by a damaged record (P11, S11).
                case.limits = [limit for limit in limits if not limit.shadow]
                if not case.limits:
                    return self._uncovered(case)
                wants, answer = await self._ask(case, idempotency_key)
        except StoreOutOfMemory:
            return self._without_store(case)  # it answers, and settles still work: no reason to shun it (S8)
        except StoreUnavailable:
            self._breaker.fail(time.monotonic(), random.random())  # noqa: S311
            return self._without_store(case)
        self._breaker.succeed()
        return self._decide(case, wants, answer)

    async def _ask(self, case: _Case, idempotency_key: str | None) -> tuple[tuple[Want, ...], AcquireAnswer]:
        """Have the store decide, and tell what it was asked."""
        asked: tuple[Want, ...] = ()

        def plan(now_us: int) -> Acquire:
            nonlocal asked
            asked = case.wants(now_us)
            request = case.request
            if idempotency_key is None or request.dry_run:
                return Acquire(asked, requests=case.requests, lease=request.lease, dry_run=request.dry_run)
            memo = _Memo(case.id, request.ttl_ms, case.expected_ms, case.rows(asked))
            once = Idempotency(idempotency_key, _fingerprint(request), msgspec.msgpack.encode(memo))
            return Acquire(asked, requests=case.requests, lease=request.lease, idempotency=once)

        answer = await self._buckets.acquire_at(case.slot, plan, timeout_s=self._deadline_s)
        return asked, answer

    def _decide(self, case: _Case, wants: tuple[Want, ...], answer: AcquireAnswer) -> Decision:
        if answer.status is AcquireStatus.GRANTED and not answer.memo:
            return self._grant(case, wants, answer.buckets, answer.now_us)
        if answer.status is AcquireStatus.CONFLICT:
            raise IdempotencyConflict("this Idempotency-Key was used before with other parameters")
        if answer.status not in (AcquireStatus.GRANTED, AcquireStatus.REFUSED):
            raise NotDecided("record_damaged", "the record of a bucket cannot be read; nothing was charged")
        if answer.memo:
            return self._replay(case, wants, answer)
        return refusal(
            case.limits,
            wants,
            answer.buckets,
            requests=case.requests,
            now_us=answer.now_us,
            hopeless=self._retries.too_many,
        )

    def _grant(
        self,
        case: _Case,
        wants: Sequence[Want],
        answers: Sequence[BucketAnswer],
        now_us: int,
        *,
        degraded: bool = False,
    ) -> Granted:
        rows = case.rows(wants)
        return Granted(
            "" if case.request.dry_run else self._sign(case, _charges(rows, answers, degraded=degraded), now_us),
            _charged(case, rows, answers),
            case.request.ttl_ms,
            limit_states(case.limits, wants, answers, requests=case.requests, now_us=now_us),
            degraded=degraded,
        )

    def _replay(self, case: _Case, wants: Sequence[Want], answer: AcquireAnswer) -> Decision:
        """The first answer under an idempotency key, whatever has changed since."""
        memo = msgspec.msgpack.decode(answer.memo, type=_Memo)
        first = _Case(case.request, case.slot, case.limits, case.criticality, memo.id)
        if [bucket for bucket, *_ in memo.rows] != [want.bucket for want in wants]:
            # The policies are other ones now: what was charged still stands, their states cannot be told.
            return self._replay_without_limits(first, memo, answer)
        if answer.granted:
            granted = self._grant(first, wants, answer.buckets, answer.now_us)
            return msgspec.structs.replace(granted, replayed=True)
        refused = refusal(
            case.limits, wants, answer.buckets, requests=case.requests, now_us=answer.now_us, hopeless=False
        )
        return msgspec.structs.replace(refused, replayed=True)

    def _replay_without_limits(self, case: _Case, memo: _Memo, answer: AcquireAnswer) -> Decision:
        if not answer.granted:
            return Refused(
                policy="", reason="work", retry="after", retry_after_ms=1, limits=(), replayed=True,
                detail="refused before under this Idempotency-Key, by policies that have changed since",
            )  # fmt: skip
        charges = _charges(memo.rows, answer.buckets)
        return Granted(
            reservation=self._sign(case, charges, answer.now_us),
            charged=max((charge.charge for charge in charges), default=0.0),
            expires_in_ms=memo.ttl_ms,
            limits=(),
            replayed=True,
        )

    def _sign(self, case: _Case, charges: tuple[Charge, ...], now_us: int) -> str:
        return self._signers[0].sign(
            Reservation(
                id=case.id,
                namespace=case.slot.namespace,
                partition=case.slot.partition,
                acquired_us=now_us,
                deadline_us=now_us + case.request.ttl_ms * 1000,
                expected_ms=case.expected_ms,
                charges=charges,
            )
        )

    def _uncovered(self, case: _Case) -> Decision:
        """P7: no policy speaks of it."""
        self.uncovered += 1
        if self._refuse_uncovered:
            return Refused(
                policy="", reason="uncovered", retry="never", retry_after_ms=0, limits=(),
                detail="no policy covers this descriptor, and this service refuses what is not covered",
            )  # fmt: skip
        return Granted(
            reservation="" if case.request.dry_run else self._sign(case, (), self._now_us()),
            charged=0.0,
            expires_in_ms=case.request.ttl_ms,
            limits=(),
        )

    def _without_store(self, case: _Case) -> Decision:
        """What the policies say for when the store cannot be asked."""
        for limit in case.limits:
            if limit.on_store_failure is OnStoreFailure.CLOSED and not limit.shadow:
                detail = f"the store cannot be asked, and {limit.name} admits nothing without it"
                raise NotDecided("store_unavailable", detail, policy=limit.name)
        now_us = self._now_us()
        wants = case.wants(now_us)
        answers = self._local.acquire(case.slot, case.limits, wants, now_us=now_us, dry_run=case.request.dry_run)
        if any(
            answer.verdict is Verdict.BLOCKED and not limit.shadow
            for answer, limit in zip(answers, case.limits, strict=True)
        ):
            return refusal(
                case.limits, wants, answers, requests=case.requests, now_us=now_us, degraded=True,
                hopeless=self._retries.too_many,
            )  # fmt: skip
        return self._grant(case, wants, answers, now_us, degraded=True)

    async def settle(self, request: SettleRequest, *, namespace: str | None = None) -> Settled:
        """Correct what was charged. `namespace`: the only one whose reservations the caller may settle."""
        reservation = self._open(request.reservation)
        if reservation is None or namespace not in (None, reservation.namespace):
            raise UnknownReservation("no such reservation")
        if not reservation.charges:
            return Settled(request.work, 0.0, stop=False, duplicate=False, late=False, limits=())
        slot, operation = self._settle_operation(reservation, request)
        if not self._breaker.allows(time.monotonic()):
            raise NotDecided("store_unavailable", "the store cannot be asked; settle again later")
        try:
            answer = await self._buckets.settle(slot, operation, timeout_s=self._deadline_s)
        except StoreUnavailable as error:
            self._breaker.fail(time.monotonic(), random.random())  # noqa: S311
            raise NotDecided("store_unavailable", "the store did not answer in time; settle again") from error
        self._breaker.succeed()
        return self._settled(slot, operation, answer)

    def _open(self, token: str) -> Reservation | None:
        for signer in self._signers:
            if (found := signer.open(token)) is not None:
                return found
        return None

    def _settle_operation(self, reservation: Reservation, request: SettleRequest) -> tuple[Slot, Settle]:
        now_us, planner = self._now_us(), self._planner
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
            requests=1.0 if request.requests is None else request.requests,
            latency_ms=NO_LATENCY if request.latency_ms is None else request.latency_ms,
            expected_ms=reservation.expected_ms,
        )

    def _settled(self, slot: Slot, operation: Settle, answer: SettleAnswer) -> Settled:
        if answer.status is SettleStatus.GONE:
            raise UnknownReservation("no such reservation")
        if answer.status is SettleStatus.CORRUPT:
            raise NotDecided("record_damaged", "the record of a bucket cannot be read; nothing was settled")
        settled = Settled(
            work=answer.work,
            adjusted=_adjusted(operation.charges, answer.buckets),
            stop=answer.stop,
            duplicate=answer.status is SettleStatus.DUPLICATE,
            late=answer.late,
            limits=self._settled_limits(slot, operation, answer),
        )
        if answer.status is SettleStatus.CONFLICT:
            raise SettledOtherwise(settled)
        return settled

    def _settled_limits(self, slot: Slot, operation: Settle, answer: SettleAnswer) -> tuple[LimitState, ...]:
        """The states of those buckets that are still there, and whose policies are."""
        states = []
        for charge, bucket in zip(operation.charges, answer.buckets, strict=True):
            limit = self._planner.find(slot.namespace, charge.bucket)
            if limit is None or charge.params is None or not bucket.present:
                continue
            row = BucketAnswer(Verdict.PASSED, bucket.balance, charge.charge, bucket.rate, bucket.capacity)
            states.append(limit_state(limit, charge.params, row, now_us=answer.now_us))
        return tuple(states)

    def _now_us(self) -> int:
        """The store's time as far as it is known."""
        return self._buckets.clock.guess_us()


def _charges(rows: Sequence[_Row], answers: Sequence[BucketAnswer], *, degraded: bool = False) -> tuple[Charge, ...]:
    """What a reservation took; nothing from the store where the store was not asked."""
    return tuple(
        [
            Charge(bucket, 0.0 if degraded else answer.charge, weight, in_requests=in_requests)
            for (bucket, weight, in_requests), answer in zip(rows, answers, strict=True)
            if answer.verdict is Verdict.DEBITED
        ]
    )


def _charged(case: _Case, rows: Sequence[_Row], answers: Sequence[BucketAnswer]) -> float:
    """In the caller's units: its own estimate, or what the most expensive limit took."""
    if case.request.work is not None and not case.request.lease:
        return case.request.work
    taken = [
        answer.charge / weight if weight else answer.charge
        for (_, weight, in_requests), answer, limit in zip(rows, answers, case.limits, strict=True)
        if not in_requests and not limit.shadow
    ]
    if case.request.lease:
        return min(taken, default=case.request.work or 0.0)
    return max(taken, default=0.0)


def _adjusted(charges: Sequence[Charge], buckets: Sequence[BucketSettled]) -> float:
    """In the caller's units, for the limit that took most: charged + adjusted = work, unless something held it back."""
    counting_work = [
        (charge.charge / charge.weight, bucket.adjusted / charge.weight)
        for charge, bucket in zip(charges, buckets, strict=True)
        if charge.weight and not charge.in_requests
    ]
    return max(counting_work, default=(0.0, 0.0))[1]


def _fingerprint(request: AcquireRequest) -> bytes:
    """What tells this request from others under the same idempotency key; not how often it was tried."""
    parts = (
        request.namespace, sorted(request.descriptor.items()), request.work, request.criticality,
        request.expected_latency_ms, request.ttl_ms, request.lease,
    )  # fmt: skip
    return blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
