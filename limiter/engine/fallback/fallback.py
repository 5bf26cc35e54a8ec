"""Decisions without the store, by `on_store_failure` of each policy (B3).

    closed    refuses to decide
    open      grants
    local     asks a bucket in this node, which holds the node's share of the limit
    known     for quotas: continues from the balance that this node knows

A grant by `open` or `local` is not charged in the store; its settle debits all of its work once the store is back. What
`known` grants is debited once the store is back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from limiter.engine.fallback.local import LocalBuckets
from limiter.engine.fallback.remainders import Remainders
from limiter.engine.fallback.throttles import Throttles
from limiter.engine.granting import Granter
from limiter.engine.operation import Operation
from limiter.engine.request_errors import NotDecided
from limiter.model.bucket.contract import Decision
from limiter.model.bucket.operations import AcquireAnswer, BucketAnswer, Lot, Verdict, Want
from limiter.model.policy.choices import OnStoreFailure


class Fallback:
    """Decides for one node while the store cannot be asked, by what the node has heard before."""

    def __init__(self, granter: Granter, remainders: Remainders, nodes: Callable[[], int]) -> None:
        self._granter = granter
        self._remainders = remainders
        self._local = LocalBuckets(nodes, remainders)
        self._throttles = Throttles()

    def hear(self, operation: Operation, wants: Sequence[Want], answer: AcquireAnswer) -> None:
        """Remember what is left of quotas, and how much is refused, to go on without the store (F-S14, Q11)."""
        lot, now_s = operation.lot, 0.0 if operation.lot is None else time.monotonic()
        for limit, wanted, told in zip(operation.limits, wants, answer.buckets, strict=True):
            if lot is not None and told.pressure is not None and limit.sheds:
                self._throttles.hear(operation.slot, wanted.bucket, lot, told.pressure, now_s)
            if limit.is_known:
                own = told.charge if told.verdict is Verdict.DEBITED else 0.0
                self._remainders.hear(operation.slot, wanted.bucket, wanted.params, told.balance, answer.now_us, own)

    def decide(self, operation: Operation, now_us: int) -> Decision:
        """Grant or refuse. Raises NotDecided where a policy admits nothing without the store."""
        slot = operation.slot
        wants = operation.wants(now_us)
        for limit, wanted in zip(operation.limits, wants, strict=True):
            if limit.on_store_failure is OnStoreFailure.CLOSED and not limit.shadow:
                detail = f"the store cannot be asked, and {limit.name} admits nothing without it"
                raise NotDecided("store_unavailable", detail, policy=limit.name)
            if limit.is_known and not self._remainders.begin(slot, wanted, now_us) and not limit.shadow:
                detail = f"the store cannot be asked, and this node does not know what is left of {limit.name}"
                raise NotDecided("store_unavailable", detail, policy=limit.name)
        dry_run = operation.request.dry_run
        answers = self._local.acquire(slot, operation.limits, wants, now_us=now_us, dry_run=dry_run)
        if operation.lot is not None:
            answers = self._throttled(operation, operation.lot, wants, answers)
        if any(
            answer.verdict >= Verdict.BLOCKED and not limit.shadow
            for answer, limit in zip(answers, operation.limits, strict=True)
        ):
            return self._granter.refuse(operation, wants, answers, now_us, degraded=True)
        return self._granter.grant(operation, wants, answers, now_us, degraded=True, is_new=True)

    def _throttled(
        self, operation: Operation, lot: Lot, wants: Sequence[Want], answers: Sequence[BucketAnswer]
    ) -> list[BucketAnswer]:
        """Hold the answers of this node's buckets against the throttles last heard from the store (Q11)."""
        now_s, hold = time.monotonic(), self._throttles.answer
        return [
            hold(operation.slot, wanted.bucket, lot, answer, now_s) if limit.sheds else answer
            for limit, wanted, answer in zip(operation.limits, wants, answers, strict=True)
        ]
