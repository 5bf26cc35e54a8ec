"""A slot's worth of buckets in memory: the reference for the scripts that acquire, settle, sample and steer.

Time is an argument. Each call takes a batch, as the scripts do: buckets are brought to *now* once, then the
operations follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from limiter.model.bucket import block
from limiter.model.bucket.admission import needed, part_of_minimum
from limiter.model.bucket.bucket import (
    HISTOGRAM_STEPS,
    KIND,
    Flags,
    Params,
    Record,
    advance,
    collectable,
    fresh,
    histogram_step,
    keep,
    refill,
)
from limiter.model.bucket.operations import (
    COVERED,
    LEARNED,
    REFUSING,
    TOO_LARGE,
    Acquire,
    AcquireAnswer,
    AcquireStatus,
    BucketAnswer,
    BucketSettled,
    Charge,
    Idempotency,
    Lot,
    Pressure,
    Settle,
    SettleAnswer,
    SettleStatus,
    Verdict,
    Want,
)
from limiter.model.control.stewardship import Lease, Steer, SteerStatus, gives_share, steer_bucket
from limiter.model.overload import shedding


@dataclass(slots=True)
class Tombstone:
    """What is known of a reservation once it was settled, or has reported progress."""

    accounted: list[float]
    """What each bucket was to be debited, with what it could not pay."""
    uncollected: list[float]
    """What of that it could not pay."""
    deadline_us: float
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
    epoch: int = 0
    touched: list[str] = field(default_factory=list)
    states: dict[str, bytes] = field(default_factory=dict)
    lease: Lease | None = None
    fence: int = 0

    def acquire(self, operations: Sequence[Acquire], now_us: int) -> list[AcquireAnswer]:
        """Decide a batch in order."""
        drafts: dict[str, Record] = {}
        for want in (want for operation in operations for want in operation.wants):
            if want.bucket not in drafts and want.params.holds(now_us):
                drafts[want.bucket] = self._draft(want.bucket, want.params, now_us)
        answers = [self._decide_once(operation, drafts, now_us) for operation in operations]
        self._keep(drafts, now_us)
        return answers

    def settle(self, operations: Sequence[Settle], now_us: int) -> list[SettleAnswer]:
        """Settle a batch in order."""
        drafts: dict[str, Record] = {}
        for charge in (charge for operation in operations for charge in operation.charges):
            if charge.bucket not in drafts:
                drafts.update(self._found(charge, now_us))
        answers = [self._settle(operation, drafts, now_us) for operation in operations]
        self._keep(drafts, now_us)
        return answers

    def take(self, owner: bytes, ttl_ms: int) -> Lease | None:
        """Take the slot if it is free, or keep it; None if it is another's. Who lets it end clears `lease`."""
        if self.lease is None:
            self.fence += 1
            self.lease = Lease(owner, self.fence)
        if self.lease.owner != owner:
            return None
        return self.lease._replace(left_ms=ttl_ms)

    def release(self, owner: bytes) -> None:
        """Give the slot back, if it is ours."""
        if self.lease is not None and self.lease.owner == owner:
            self.lease = None

    def sample(self, lease: Lease, count: int) -> list[str] | None:
        """Take names of buckets that changed; None if the lease is lost."""
        if not self._holds(lease):
            return None
        names, self.touched = self.touched[:count], self.touched[count:]
        if names:
            self.epoch += 1
        return names

    def steer(self, lease: Lease, rows: Sequence[Steer], now_us: int) -> list[SteerStatus] | None:
        """Set what the controller decided; None, and nothing done, if the lease is lost (F-P7)."""
        return [self._steer(row, now_us) for row in rows] if self._holds(lease) else None

    def _holds(self, lease: Lease) -> bool:
        return self.lease is not None and (lease.owner, lease.fence) == (self.lease.owner, self.lease.fence)

    def _steer(self, row: Steer, now_us: int) -> SteerStatus:
        record = self.records.get(row.bucket)
        if record is None and gives_share(row):
            record = self.records[row.bucket] = fresh(row.params, now_us)
        if record is None:
            return SteerStatus.ABSENT
        if not row.only_keeps:
            steer_bucket(record, row, now_us)
            keep(record, now_us)
        if row.state is not None:
            self.states[row.bucket] = row.state
        return SteerStatus.DONE

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

    def _keep(self, drafts: dict[str, Record], now_us: int) -> None:
        for bucket, record in drafts.items():
            if self.records.get(bucket) is record:  # one that was only looked at stays as it was
                keep(record, now_us)

    def _touch(self, bucket: str, record: Record) -> None:
        self.records[bucket] = record
        if record.epoch != self.epoch:
            record.epoch = self.epoch
            self.touched.append(bucket)
            if record.shedding is not None:
                shedding.begin_epoch(record.shedding)

    def _decide_once(self, operation: Acquire, drafts: dict[str, Record], now_us: int) -> AcquireAnswer:
        if not all(want.params.holds(now_us) for want in operation.wants):
            return AcquireAnswer(AcquireStatus.WINDOW, now_us)
        if operation.told:
            return self._count_told(operation, drafts, now_us)
        if operation.idempotency is None:
            return self._decide(operation, drafts, now_us)
        return self._recall(operation, operation.idempotency, drafts, now_us)

    def _recall(
        self, operation: Acquire, idempotency: Idempotency, drafts: dict[str, Record], now_us: int
    ) -> AcquireAnswer:
        kept = self.decided.get(idempotency.key)
        if kept is None:
            answer = self._decide(operation, drafts, now_us)
            self.decided[idempotency.key] = Decided(idempotency.fingerprint, answer.but(memo=idempotency.memo))
            return answer
        if kept.fingerprint != idempotency.fingerprint:
            return AcquireAnswer(AcquireStatus.CONFLICT, now_us)
        return kept.answer

    def _count_told(self, operation: Acquire, drafts: dict[str, Record], now_us: int) -> AcquireAnswer:
        """Count what a node has refused by itself as if it had been asked here."""
        for want in operation.wants:
            record = drafts[want.bucket]
            record.requests += operation.requests
            if want.how == REFUSING:
                record.refused += operation.requests
                # What was refused while the key is blocked brings no new block.
                if record.block and want.params.block and blocked_us(record, want.params, now_us) == 0:
                    block.count_refusal(record.block, want.params.block, operation.requests, now_us)
            self._touch(want.bucket, record)
        return AcquireAnswer(AcquireStatus.COUNTED, now_us)

    def _decide(self, operation: Acquire, drafts: dict[str, Record], now_us: int) -> AcquireAnswer:
        records = [drafts[want.bucket] for want in operation.wants]
        charges = [_charge(want, record) for want, record in zip(operation.wants, records, strict=True)]
        minimums = [_minimum(want, record) for want, record in zip(operation.wants, records, strict=True)]
        verdicts = judge(operation, records, minimums, charges, now_us)
        if operation.lot is not None:
            shed(operation.lot, records, verdicts)
        granted = not any(
            verdict >= Verdict.BLOCKED and not want.params.is_shadow
            for verdict, want in zip(verdicts, operation.wants, strict=True)
        )
        if not operation.dry_run:
            for i, (want, record) in enumerate(zip(operation.wants, records, strict=True)):
                verdicts[i], charges[i] = commit(
                    record,
                    want.params,
                    verdicts[i],
                    charges[i],
                    granted=granted,
                    requests=operation.requests,
                    counted=counted(record, operation.requests, want.weight),
                    now_us=now_us,
                )
                self._touch(want.bucket, record)
                if operation.lot is not None:
                    commit_class(record, verdicts[i], operation.lot, requests=operation.requests)
        return AcquireAnswer(
            AcquireStatus.GRANTED if granted else AcquireStatus.REFUSED,
            now_us,
            tuple(
                BucketAnswer(
                    verdict,
                    record.balance,
                    charge if verdict is not Verdict.DENIED else blocked_us(record, want.params, now_us),
                    record.rate,
                    record.capacity,
                    record.counts_requests,
                    pressure(record, operation.lot),
                )
                for want, verdict, record, charge in zip(operation.wants, verdicts, records, charges, strict=True)
            ),
        )

    def _settle(self, operation: Settle, drafts: dict[str, Record], now_us: int) -> SettleAnswer:
        mark = self.tombstones.get(operation.reservation) or Tombstone(
            accounted=[charge.charge + charge.uncollected for charge in operation.charges],
            uncollected=[charge.uncollected for charge in operation.charges],
            deadline_us=float(operation.deadline_us),
        )
        deadline_us = mark.deadline_us
        if now_us > deadline_us + operation.late_us:
            return SettleAnswer(SettleStatus.GONE, now_us)
        status = standing(mark, operation)
        if status is SettleStatus.SETTLED:
            mark.late = now_us > mark.deadline_us
            for i, charge in enumerate(operation.charges):
                if charge.bucket in drafts:
                    self._touch(charge.bucket, drafts[charge.bucket])
                    settle_bucket(drafts[charge.bucket], mark, i, operation)
            mark.work, mark.final, mark.begun = operation.work, operation.final, True
            self.tombstones[operation.reservation] = mark
        if not mark.final:
            renew(mark, operation, now_us)
        rows = [drafts.get(charge.bucket) for charge in operation.charges]
        return SettleAnswer(
            status,
            now_us,
            late=mark.late,
            stop=any(record is not None and record.balance < -record.stop_debt for record in rows),
            work=mark.work,
            deadline_us=mark.deadline_us,
            deadline_before_us=deadline_us,
            buckets=tuple(_settled(rows[i], mark, i, operation.charges[i]) for i in range(len(rows))),
        )


def judge(
    operation: Acquire, records: Sequence[Record], minimums: Sequence[float], charges: Sequence[float], now_us: int
) -> list[Verdict]:
    """Ask each bucket (W3, W13, W17)."""
    verdicts = []
    for want, record, need, charge in zip(operation.wants, records, minimums, charges, strict=True):
        amount = counted(record, operation.requests, want.weight) if record.counts_requests else charge
        covered = want.params.is_quota
        if want.how & COVERED and not (covered or record.counts_requests):
            # What was learned may be more than the bucket holds: a full one has to do.
            covered, amount = True, min(amount, record.capacity) if want.how & LEARNED else amount
        need = needed(need, amount, debt_max=record.debt_max, capacity=record.capacity, covered=covered)
        passed = record.balance >= need and not want.how & TOO_LARGE
        if blocked_us(record, want.params, now_us) > 0:
            verdicts.append(Verdict.DENIED)
        else:
            verdicts.append(Verdict.PASSED if passed else Verdict.BLOCKED)
    return verdicts


def blocked_us(record: Record, params: Params, now_us: int) -> float:
    """How long the bucket's key is still blocked; 0 if it is not (W17)."""
    if record.block is None or params.block is None:
        return 0.0
    return block.left_us(record.block, params.block, now_us)


def shed(lot: Lot, records: Sequence[Record], verdicts: list[Verdict]) -> None:
    """Give overload control the last word, so that the share it refuses is that of all requests (Q4, S3)."""
    for i, record in enumerate(records):
        if record.shedding is None or verdicts[i] is Verdict.DENIED:
            continue
        if shedding.turns_away(record.shedding, lot.class_number, lot.draw):
            verdicts[i] = Verdict.TURNED_AWAY


def commit_class(record: Record, verdict: Verdict, lot: Lot, *, requests: float) -> None:
    """Count who was turned away, and debit the class of who was let in."""
    if record.shedding is None:
        return
    if verdict is Verdict.TURNED_AWAY:
        record.shedding.refused[lot.class_number] += requests
    elif verdict is Verdict.DEBITED:
        shedding.take(record.shedding, lot.class_number, requests)


def pressure(record: Record, lot: Lot | None) -> Pressure | None:
    """What a bucket tells of its overload control; None where nobody asked."""
    if lot is None or record.shedding is None:
        return None if lot is None else Pressure()
    known, number = record.shedding, lot.class_number
    return Pressure(known.overloaded == 1, known.quality, known.refused_shares[number], known.rates[number])


def commit(
    record: Record,
    params: Params,
    verdict: Verdict,
    charge: float,
    *,
    granted: bool,
    requests: float,
    counted: float,
    now_us: int,
) -> tuple[Verdict, float]:
    """Count the request, and debit it if every bucket agreed. A shadow takes part as long as it would admit (P11)."""
    record.requests += counted
    if verdict in (Verdict.BLOCKED, Verdict.DENIED):
        record.refused += counted
    if verdict is Verdict.BLOCKED and record.block is not None and params.block is not None:
        block.count_refusal(record.block, params.block, requests, now_us)
    if verdict >= Verdict.BLOCKED or not granted:
        return verdict, charge
    wanted = counted if record.counts_requests else charge
    taken = collectable(record, wanted)
    record.balance -= taken
    record.uncollected += wanted - taken
    record.admitted += counted
    record.work_charged += charge if record.counts_requests else taken
    return Verdict.DEBITED, taken


def counted(record: Record, requests: float, weight: float) -> float:
    """As how many requests some count, each of which weighs so much: only a cap of requests weighs them (W16)."""
    return requests * weight if record.flags & KIND == Flags.COUNTS_REQUESTS else requests


def standing(mark: Tombstone, operation: Settle) -> SettleStatus:
    """Tell a first settle from a repeat: settled stays settled, progress counts at its highest (F-R2, F-R3, F-R12)."""
    if mark.final:
        return SettleStatus.CONFLICT if operation.final and operation.work != mark.work else SettleStatus.DUPLICATE
    if mark.begun and not operation.final and operation.work <= mark.work:
        return SettleStatus.DUPLICATE
    return SettleStatus.SETTLED


def renew(mark: Tombstone, operation: Settle, now_us: int) -> None:
    """Progress moves the deadline to a whole time to live from now (W14)."""
    mark.deadline_us = max(mark.deadline_us, float(now_us + (operation.deadline_us - operation.acquired_us)))


def settle_bucket(record: Record, mark: Tombstone, i: int, operation: Settle) -> None:
    """Count and correct one bucket: all of the work if final, else only what is beyond the mark (W5–W7)."""
    charge = operation.charges[i]
    target = operation.work * charge.weight
    worth_each = worth(record, charge)
    record.work_settled += (operation.work - mark.work) * charge.weight
    if not operation.final:
        if worth_each is not None and not charge.in_requests and target > mark.accounted[i]:
            correct(record, mark, i, target, worth_each, refundable=False)
        return
    _count(record, operation, charge, target)
    if worth_each is None:
        return
    if charge.in_requests:
        target = counted(record, operation.requests, charge.weight)
    if within_threshold(record, target - mark.accounted[i], charge.charge):
        return
    same_window = not record.is_quota or operation.acquired_us >= record.committed
    correct(record, mark, i, target, worth_each, refundable=not mark.late and same_window)


def worth(record: Record, charge: Charge) -> float | None:
    """What one unit of the charge is worth in the bucket as it counts now (R10); None: nothing.

    Work charged before the bucket began to count requests is worth as much time as it was then. A request token was
    the price, whatever the work.
    """
    if record.counts_requests == charge.in_requests:
        return 1.0
    if not record.counts_requests or record.is_quota:
        return None
    tokens = record.rate / record.committed
    return tokens if 0 < tokens < math.inf else None


def _count(record: Record, operation: Settle, charge: Charge, work: float) -> None:
    latency_ms, number = operation.latency_ms, operation.class_number
    expected_ms = operation.expected_ms if math.isnan(charge.expected_ms) else charge.expected_ms
    settles = counted(record, operation.requests, charge.weight)
    record.settles += settles
    if operation.requests >= 1 and settles > 0:  # less would make the square as large as it likes
        record.work_squared += work * work / settles
    if latency_ms > expected_ms:
        record.missed += 1
    if record.histogram and latency_ms >= 0:
        first = 0 if record.shedding is None else number * HISTOGRAM_STEPS
        record.histogram[first + histogram_step(latency_ms)] += 1
    if record.shedding is not None and latency_ms >= 0:
        shedding.count(record.shedding, number, latency_ms=latency_ms, expected_ms=expected_ms)


def within_threshold(record: Record, delta: float, charged: float) -> bool:
    """W6: small differences change nothing."""
    threshold = record.settle_threshold
    if threshold < 0:
        threshold = -threshold * charged
    return math.fabs(delta) <= threshold


def correct(record: Record, mark: Tombstone, i: int, target: float, worth_each: float, *, refundable: bool) -> None:
    """Bring what one bucket was debited to the target; what the debt bound cuts off is counted (W5, F-R9)."""
    delta = target - mark.accounted[i]
    if delta > 0:
        owed = delta * worth_each
        taken = collectable(record, owed)
        record.balance -= taken
        lost = (owed - taken) / worth_each
        mark.uncollected[i] += lost
        record.uncollected += lost
        mark.accounted[i] = target
    elif delta < 0:
        # Work that was not done was not left unpaid either, however late we hear of it.
        forgiven = min(-delta, mark.uncollected[i])
        mark.uncollected[i] -= forgiven
        record.uncollected -= forgiven
        if refundable:
            record.balance = min(record.balance + (-delta - forgiven) * worth_each, record.capacity)
            mark.accounted[i] = target
        else:
            mark.accounted[i] -= forgiven


def _charge(want: Want, record: Record) -> float:
    if want.how & LEARNED and record.charge > 0 and not record.counts_requests:
        # An estimate that no balance could pay would lock the bucket, or be forgiven in part.
        return record.charge if want.params.is_quota else min(record.charge, record.capacity + record.debt_max)
    return want.charge


def _minimum(want: Want, record: Record) -> float:
    part = record.capacity / want.params.whole_capacity
    return part_of_minimum(want.minimum, part=part, capacity=record.capacity)


def _settled(record: Record | None, mark: Tombstone, i: int, charge: Charge) -> BucketSettled:
    adjusted = mark.accounted[i] - charge.charge
    if record is None:
        return BucketSettled(False, 0.0, adjusted, mark.uncollected[i], 0.0, 0.0)
    return BucketSettled(
        True, record.balance, adjusted, mark.uncollected[i], record.rate, record.capacity, record.counts_requests
    )


def _copy(record: Record) -> Record:
    values = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    known = None if record.shedding is None else record.shedding.copy()
    blocked = None if record.block is None else replace(record.block)
    return Record(**{**values, "histogram": list(record.histogram), "shedding": known, "block": blocked})
