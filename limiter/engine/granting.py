"""Grants and refusals: what a request was charged, signed as a reservation, and what its answer says.

Nearly all grants are plain and are signed together, without making a value of each bucket's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limiter.engine.operation import IN_REQUESTS, NO_LATENCY, Operation
from limiter.engine.shape import NOTHING
from limiter.model.bucket.contract import Granted, Refused
from limiter.model.bucket.decision import drawn_share, limit_states, pressure, refusal
from limiter.model.bucket.expiry import Expiries
from limiter.model.bucket.operations import LATE_US, BucketAnswer, Verdict, Want
from limiter.model.bucket.reservation import ID_SIZE, UNCOUNTED, VERSION, Keyring, Taken, pack, pack_late
from limiter.model.overload.retries import RetryMeters
from limiter.model.overload.shedding import State
from limiter.model.policy.limit import Limit
from limiter.store.ids import RandomIds
from limiter.store.keys import Slot

_DEBITED = Verdict.DEBITED
_DEBITED_CODE = int(_DEBITED)
_NO_PRESSURE: dict[str, Any] = {}


class Granter:
    """Grants and refuses for one node, by answers of buckets, wherever those came from."""

    def __init__(self, keyring: Keyring, expiries: Expiries, retries: RetryMeters[Slot], *, late_us: int) -> None:
        self.ids = RandomIds(ID_SIZE)
        self._keyring = keyring
        self._expiries = expiries
        self._retries = retries
        self._late_us = late_us
        self._late = pack_late(late_us)

    def grant(
        self,
        operation: Operation,
        wants: Sequence[Want],
        answers: Sequence[BucketAnswer],
        now_us: int,
        *,
        degraded: bool = False,
        is_new: bool = False,
    ) -> Granted:
        """Grant by the answers of the buckets; `is_new` unless the same grant was given before."""
        request = operation.request
        taken = _taken(operation, wants, answers, degraded=degraded)
        if is_new and not request.dry_run:
            debited = [limit for limit, told in zip(operation.limits, answers, strict=True) if told.verdict is _DEBITED]
            self._expect_settles(debited, request.ttl_ms, 1, now_us)
        return Granted(
            "" if request.dry_run else self.sign(operation, taken, now_us, degraded=degraded),
            _charged(operation, wants, answers),
            request.ttl_ms,
            limit_states(operation.limits, wants, answers, operation.requests, now_us, operation.lot),
            degraded=degraded,
            **_NO_PRESSURE if operation.lot is None else _pressure(operation.limits, answers),
        )

    def refuse(
        self,
        operation: Operation,
        wants: Sequence[Want],
        answers: Sequence[BucketAnswer],
        now_us: int,
        *,
        degraded: bool = False,
    ) -> Refused:
        """Refuse by the answers of the buckets."""
        retried = self._retries.among(operation.slot, (want.bucket for want in wants))
        return refusal(
            operation.limits, wants, answers, requests=operation.requests, now_us=now_us, degraded=degraded,
            lot=operation.lot, retried=retried,
        )  # fmt: skip

    def let_pass(self, operation: Operation, now_us: int, *, covered: bool = True) -> Granted:
        """Grant without charging anything."""
        return Granted(
            reservation="" if operation.request.dry_run else self.sign(operation, (), now_us),
            charged=0.0,
            expires_in_ms=operation.request.ttl_ms,
            limits=(),
            covered=covered,
        )

    def sign(self, operation: Operation, taken: Sequence[Taken], now_us: int, *, degraded: bool = False) -> str:
        """Return the reservation of a grant."""
        request, (namespace, partition) = operation.request, operation.slot
        id_ = self.ids.next() if operation.idempotency_key is None else operation.id
        class_number = 0 if operation.lot is None else operation.lot.class_number
        if degraded:
            class_number += UNCOUNTED
        packed = pack(
            id_, namespace.encode("utf-8", "surrogatepass"), partition, now_us, now_us + request.ttl_ms * 1000,
            operation.expected_ms, class_number, self._late_us, taken,
        )  # fmt: skip
        return self._keyring.seal(packed).decode()

    def grant_plainly(self, granted: Sequence[Operation], now_us: int) -> float:
        """Sign plain grants; return how much work they were charged."""
        next_id, seal, late, work = self.ids.next, self._keyring.seal, self._late, 0.0
        for operation in granted:
            operation.is_over = True
            operation.now_us = now_us
            request, shape = operation.request, operation.shape
            deadline_us, expected_ms = now_us + request.ttl_ms * 1000, request.expected_latency_ms
            if expected_ms is None:
                expected_ms = NO_LATENCY
            code, _, charge, _, _ = operation.values[0]
            how, _, wanted = operation.asks[0]
            # Nearly all: one bucket of work that could pay the whole charge.
            if code == _DEBITED_CODE and (charge >= wanted or how) and len(operation.buckets) == 1:
                bucket, namespace = operation.buckets[0].encode(), shape.namespace
                size = len(bucket)
                packer = shape.packers.get(size) or shape.packer(size)
                packed = packer(
                    VERSION, next_id(), now_us, deadline_us, expected_ms, 0, operation.slot[1], 1,
                    len(namespace), namespace, charge, 1.0, 0, size, bucket,
                )  # fmt: skip
            else:
                taken, charge = _taken_plainly(operation)
                packed = pack(
                    next_id(), shape.namespace, operation.slot[1], now_us, deadline_us, expected_ms, 0, LATE_US, taken
                )
            operation.charged = charge
            operation.token = seal(packed + late)
            work += charge
        self._expect_settles_of(granted, now_us)
        return work

    def _expect_settles_of(self, granted: Sequence[Operation], now_us: int) -> None:
        """Count reservations, in runs of the same kind."""
        shape, ttl_ms, count = NOTHING, 0, 0
        for operation in granted:
            if operation.shape is not shape or operation.request.ttl_ms != ttl_ms:
                self._expect_settles(shape, ttl_ms, count, now_us)
                shape, ttl_ms, count = operation.shape, operation.request.ttl_ms, 0
            count += 1
        self._expect_settles(shape, ttl_ms, count, now_us)

    def _expect_settles(self, limits: Sequence[Limit], ttl_ms: int, count: int, now_us: int) -> None:
        """Count reservations, so that those never settled can be found (W14)."""
        life_us = ttl_ms * 1000 + self._late_us
        for limit in limits:
            self._expiries.granted(limit.key, now_us + life_us, life_us, count)


def _pressure(limits: Sequence[Limit], answers: Sequence[BucketAnswer]) -> dict[str, Any]:
    """Answer fields of overload control: state, quality and the refused share."""
    state, quality, refused_share = (told := pressure(limits, answers)).state, told.quality, told.refused_share
    is_overloaded = state is State.OVERLOADED
    return {
        "overloaded": is_overloaded,
        "quality": quality,
        "state": state.word,
        "refused_share": refused_share,
        "drawn_share": drawn_share(limits, answers) or None,
    }


def _taken_plainly(operation: Operation) -> tuple[list[Taken], float]:
    """Return what a plain grant took of each bucket, and the charge."""
    taken: list[Taken] = []
    most = (0.0, 0.0)
    for bucket, (how, _, wanted), (code, _, charge, _, _) in zip(
        operation.buckets, operation.asks, operation.values, strict=True
    ):
        lost, in_requests = 0.0, code >= IN_REQUESTS
        if not in_requests:
            if charge < wanted and not how:
                lost = wanted - charge
            if (lost, charge) > most:
                most = (lost, charge)
        taken.append((bucket, charge, 1.0, in_requests, NO_LATENCY, lost, 0))
    return taken, most[1]


def _taken(
    operation: Operation, wants: Sequence[Want], answers: Sequence[BucketAnswer], *, degraded: bool
) -> list[Taken]:
    """Return the charges of a reservation: 0 without the store, unless they are posted there later (F-S14)."""
    descriptor = operation.request.descriptor
    taken: list[Taken] = []
    for limit, wanted, answer in zip(operation.limits, wants, answers, strict=True):
        if answer.verdict is not _DEBITED:
            continue
        weight = limit.weight(descriptor) if limit.weights else 1.0
        charge = 0.0 if degraded and not limit.is_known else answer.charge
        # Under a cap the price was a token, whatever the work, so a settle corrects nothing (W16).
        in_requests = answer.in_requests or limit.counts
        lost = 0.0 if in_requests or degraded else _lost(wanted, answer)
        expected_ms = operation.expected_of(limit)
        taken.append((wanted.bucket, charge, weight, in_requests, expected_ms, lost, wanted.learn_id))
    return taken


def _charged(operation: Operation, wants: Sequence[Want], answers: Sequence[BucketAnswer]) -> float:
    """Return the charge in the caller's units: of the limit that could collect least; if all could, the largest."""
    descriptor, most = operation.request.descriptor, (0.0, 0.0)
    for limit, wanted, answer in zip(operation.limits, wants, answers, strict=True):
        if answer.in_requests or limit.counts or limit.shadow:
            continue
        weight = (limit.weight(descriptor) if limit.weights else 1.0) or 1.0
        most = max(most, (_lost(wanted, answer) / weight, answer.charge / weight))
    return most[1]


def _lost(wanted: Want, answer: BucketAnswer) -> float:
    """Return the part of a charge that the bucket could not pay; a learned charge is never more than it can."""
    if answer.charge >= wanted.charge or answer.verdict is not _DEBITED or wanted.how:
        return 0.0
    return wanted.charge - answer.charge
