"""A slot's worth of buckets in memory: the reference for `lua/acquire.lua` and `lua/settle.lua`.

Time is an argument. Each call takes a batch, as the scripts do: buckets are brought to *now* once, then the
operations follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from limiter.model.admission import needed
from limiter.model.bucket import Params, Record, advance, collectable, fresh, histogram_step, refill
from limiter.model.operations import (
    SETTLE_GRACE_US,
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


@dataclass(slots=True)
class Tombstone:
    """What is known of a reservation once it was settled, or has reported progress."""

    accounted: list[float]
    uncollected: list[float]
    work: float = 0.0
    late: bool = False
    final: bool = False
    begun: bool = False


@dataclass(slots=True)
class Decided:
    """The first decision under an idempotency key."""

    fingerprint: bytes
    answer: AcquireAnswer


@dataclass(slots=True)
class Ledger:
    """Every bucket, tombstone and idempotent decision of one slot."""

    records: dict[str, Record] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    decided: dict[str, Decided] = field(default_factory=dict)
    epoch: float = 0.0
    touched: list[str] = field(default_factory=list)

    def acquire(self, operations: Sequence[Acquire], now_us: int) -> list[AcquireAnswer]:
        """Decide a batch in order."""
        drafts: dict[str, Record] = {}
        for want in (want for operation in operations for want in operation.wants):
            if want.bucket not in drafts and want.params.holds(now_us):
                drafts[want.bucket] = self._draft(want.bucket, want.params, now_us)
        return [self._decide_once(operation, drafts, now_us) for operation in operations]

    def settle(self, operations: Sequence[Settle], now_us: int) -> list[SettleAnswer]:
        """Settle a batch in order."""
        drafts: dict[str, Record] = {}
        for charge in (charge for operation in operations for charge in operation.charges):
            if charge.bucket not in drafts:
                drafts.update(self._found(charge, now_us))
        return [self._settle(operation, drafts, now_us) for operation in operations]

    def _draft(self, bucket: str, params: Params, now_us: int) -> Record:
        record = self.records.get(bucket)
        if record is None:
            return fresh(params, now_us)
        # A bucket that only a dry run looked at must stay as it was.
        draft = _copy(record)
        advance(draft, params, now_us)
        return draft

    def _found(self, charge: Charge, now_us: int) -> dict[str, Record]:
        record = self.records.get(charge.bucket)
        if record is not None:
            draft = _copy(record)
            refill(draft, now_us)
            return {charge.bucket: draft}
        if charge.params is not None and charge.params.holds(now_us):
            return {charge.bucket: fresh(charge.params, now_us)}
        return {}

    def _touch(self, bucket: str, record: Record) -> None:
        self.records[bucket] = record
        if record.epoch != self.epoch:
            record.epoch = self.epoch
            self.touched.append(bucket)

    def _decide_once(self, operation: Acquire, drafts: dict[str, Record], now_us: int) -> AcquireAnswer:
        if not all(want.params.holds(now_us) for want in operation.wants):
            return AcquireAnswer(AcquireStatus.WINDOW, now_us)
        if operation.idempotency is None:
            return self._decide(operation, drafts, now_us)
        return self._recall(operation, operation.idempotency, drafts, now_us)

    def _recall(
        self, operation: Acquire, idempotency: Idempotency, drafts: dict[str, Record], now_us: int
    ) -> AcquireAnswer:
        kept = self.decided.get(idempotency.key)
        if kept is None:
            answer = self._decide(operation, drafts, now_us)
            self.decided[idempotency.key] = Decided(idempotency.fingerprint, answer._replace(memo=idempotency.memo))
            return answer
        if kept.fingerprint != idempotency.fingerprint:
            return AcquireAnswer(AcquireStatus.CONFLICT, now_us)
        return kept.answer

    def _decide(self, operation: Acquire, drafts: dict[str, Record], now_us: int) -> AcquireAnswer:
        records = [drafts[want.bucket] for want in operation.wants]
        charges = [_charge(want, record) for want, record in zip(operation.wants, records, strict=True)]
        verdicts, share = judge(operation, records, charges)
        granted = not any(
            verdict is Verdict.BLOCKED and not want.params.is_shadow
            for verdict, want in zip(verdicts, operation.wants, strict=True)
        )
        if not operation.dry_run:
            for i, (want, record) in enumerate(zip(operation.wants, records, strict=True)):
                verdicts[i], charges[i] = commit(
                    want,
                    record,
                    verdicts[i],
                    charges[i],
                    granted=granted,
                    share=share,
                    requests=operation.requests,
                )
                self._touch(want.bucket, record)
        return AcquireAnswer(
            AcquireStatus.GRANTED if granted else AcquireStatus.REFUSED,
            now_us,
            tuple(
                BucketAnswer(verdict, record.balance, charge, record.rate, record.capacity)
                for verdict, record, charge in zip(verdicts, records, charges, strict=True)
            ),
        )

    def _settle(self, operation: Settle, drafts: dict[str, Record], now_us: int) -> SettleAnswer:
        if now_us > operation.deadline_us + SETTLE_GRACE_US:
            return SettleAnswer(SettleStatus.GONE, now_us)
        mark = self.tombstones.get(operation.reservation) or Tombstone(
            accounted=[charge.charge for charge in operation.charges],
            uncollected=[0.0] * len(operation.charges),
        )
        status = standing(mark, operation)
        if status is SettleStatus.SETTLED:
            mark.late = mark.late or now_us > operation.deadline_us
            for i, charge in enumerate(operation.charges):
                if charge.bucket in drafts:
                    settle_bucket(drafts[charge.bucket], mark, i, operation)
                    self._touch(charge.bucket, drafts[charge.bucket])
            mark.work, mark.final, mark.begun = operation.work, operation.final, True
            self.tombstones[operation.reservation] = mark
        rows = [drafts.get(charge.bucket) for charge in operation.charges]
        return SettleAnswer(
            status,
            now_us,
            late=mark.late,
            stop=any(record is not None and record.balance < -record.stop_debt for record in rows),
            work=mark.work,
            buckets=tuple(_settled(rows[i], mark, i, operation.charges[i]) for i in range(len(rows))),
        )


def judge(operation: Acquire, records: Sequence[Record], charges: Sequence[float]) -> tuple[list[Verdict], float]:
    """Ask each bucket (W3). A quota must also cover the charge (P4); a lease takes a share, above the minimum (P9)."""
    verdicts, share = [], 1.0
    for want, record, charge in zip(operation.wants, records, charges, strict=True):
        need, amount = want.minimum, operation.requests if want.params.counts_requests else charge
        if operation.lease:
            available = record.balance - need
            passed = available > 0
            if passed and amount * share > available and not want.params.is_shadow:
                share = available / amount
        else:
            passed = record.balance >= needed(
                need, amount, debt_max=record.debt_max, capacity=record.capacity, is_quota=want.params.is_quota
            )
        verdicts.append(Verdict.PASSED if passed else Verdict.BLOCKED)
    return verdicts, share


def commit(
    want: Want,
    record: Record,
    verdict: Verdict,
    charge: float,
    *,
    granted: bool,
    share: float,
    requests: float,
) -> tuple[Verdict, float]:
    """Count the request, and debit it if every bucket agreed. A shadow takes part as long as it would admit (P11)."""
    record.requests += requests
    if verdict is Verdict.BLOCKED:
        record.refused += requests
        return verdict, charge
    if not granted:
        return verdict, charge
    taken = (requests if want.params.counts_requests else charge) * share
    if share < 1:
        taken = min(taken, record.balance - want.minimum)
    taken = collectable(record, taken)
    record.balance -= taken
    record.admitted += requests * share
    record.work_charged += charge * share if want.params.counts_requests else taken
    return Verdict.DEBITED, taken


def standing(mark: Tombstone, operation: Settle) -> SettleStatus:
    """Tell a first settle from a repeat: what is settled stays, progress counts by its highest mark (R2, R3, R12)."""
    if mark.final:
        return SettleStatus.CONFLICT if operation.final and operation.work != mark.work else SettleStatus.DUPLICATE
    if mark.begun and not operation.final and operation.work <= mark.work:
        return SettleStatus.DUPLICATE
    return SettleStatus.SETTLED


def settle_bucket(record: Record, mark: Tombstone, i: int, operation: Settle) -> None:
    """Count and correct one bucket: all of the work if final, else only what is beyond the mark (W5–W7)."""
    charge = operation.charges[i]
    target = operation.work * charge.weight
    record.work_settled += (operation.work - mark.work) * charge.weight
    if not operation.final:
        if not record.counts_requests and not charge.in_requests and target > mark.accounted[i]:
            correct(record, mark, i, target, refundable=False)
        return
    _count(record, operation, target)
    if record.counts_requests != charge.in_requests:
        return  # the policy counts in another unit since
    if record.counts_requests:
        target = operation.requests
    if within_threshold(record, target - mark.accounted[i], charge.charge):
        return
    same_window = not record.is_quota or operation.acquired_us >= record.committed
    correct(record, mark, i, target, refundable=not mark.late and same_window)


def _count(record: Record, operation: Settle, work: float) -> None:
    record.settles += operation.requests
    if operation.requests > 0:
        record.work_squared += work * work / operation.requests
    if operation.latency_ms > operation.expected_ms:
        record.missed += 1
    if record.histogram and operation.latency_ms >= 0:
        record.histogram[histogram_step(operation.latency_ms)] += 1


def within_threshold(record: Record, delta: float, charged: float) -> bool:
    """W6: small differences change nothing."""
    threshold = record.settle_threshold
    if threshold < 0:
        threshold = -threshold * charged
    return math.fabs(delta) <= threshold


def correct(record: Record, mark: Tombstone, i: int, target: float, *, refundable: bool) -> None:
    """Bring what one bucket was debited to the target; what the debt bound cuts off is counted (W5, R9)."""
    delta = target - mark.accounted[i]
    if delta > 0:
        taken = collectable(record, delta)
        record.balance -= taken
        mark.uncollected[i] += delta - taken
        record.uncollected += delta - taken
    elif delta < 0 and refundable:
        forgiven = min(-delta, mark.uncollected[i])
        mark.uncollected[i] -= forgiven
        record.uncollected -= forgiven
        record.balance = min(record.balance + (-delta - forgiven), record.capacity)
    else:
        return
    mark.accounted[i] = target


def _charge(want: Want, record: Record) -> float:
    if want.learned and record.charge > 0 and not want.params.counts_requests:
        return record.charge
    return want.charge


def _settled(record: Record | None, mark: Tombstone, i: int, charge: Charge) -> BucketSettled:
    adjusted = mark.accounted[i] - charge.charge
    if record is None:
        return BucketSettled(False, 0.0, adjusted, mark.uncollected[i], 0.0, 0.0)
    return BucketSettled(True, record.balance, adjusted, mark.uncollected[i], record.rate, record.capacity)


def _copy(record: Record) -> Record:
    values = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    return Record(**{**values, "histogram": list(record.histogram)})
