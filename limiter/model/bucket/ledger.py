"""The buckets of a slot in memory: the reference for the scripts that acquire, settle, sample and steer.

Time is an argument. Each call takes a batch, as the scripts do: buckets are brought to *now* once, then the
operations follow one another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from limiter.model.bucket import block, in_flight, learned, leases, lending
from limiter.model.bucket.admission import needed, part_of_minimum
from limiter.model.bucket.bucket import (
    ATTEMPTS_MAX,
    COUNT_MAX,
    HISTOGRAM_STEPS,
    KIND,
    WEIGHS,
    Flags,
    Params,
    Record,
    advance,
    collectable,
    fresh,
    histogram_step,
    keep,
    refill,
    share_of,
)
from limiter.model.bucket.in_flight import InFlightTerms
from limiter.model.bucket.learned import Entry
from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk, LeaseKind
from limiter.model.bucket.lending import LendStatus, Row, free_capacity, free_part
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
from limiter.model.overload.shedding import Turn


@dataclass(slots=True)
class Tombstone:
    """The state of a reservation once it was settled or has reported progress."""

    accounted: list[float]
    """The debit of each bucket so far, with the part that it could not pay."""
    uncollected: list[float]
    """The part of that which it could not pay."""
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
    rows: dict[str, Row] = field(default_factory=dict)
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

    def lend(self, ask: LeaseAsk, now_us: int) -> LeaseAnswer:
        """Serve a request for a lease, over all its buckets or none (B8)."""
        if ask.kind is LeaseKind.REVOKE:
            return LeaseAnswer(leases.revoke(self.rows.get(ask.lease)), now_us)
        if not all(want.params.holds(now_us) for want in ask.wants):
            return LeaseAnswer(LendStatus.WINDOW, now_us)
        records = [self._draft(want.bucket, want.params, now_us) for want in ask.wants]
        books = [
            lending.begin(record, leases.terms_of(want.params).need)
            for want, record in zip(ask.wants, records, strict=True)
        ]
        row = copy.deepcopy(self.rows.get(ask.lease))
        status = leases.standing(row if leases.is_known(row, books) else None, ask)
        if status is LendStatus.REPEATED:
            assert row is not None
            return LeaseAnswer(LendStatus.LENT, now_us, leases.answered(row, ask.wants, records, now_us))
        if status not in (LendStatus.LENT, LendStatus.RETURNED):
            return LeaseAnswer(status, now_us)
        if status is LendStatus.LENT:
            row = leases.renew(row if leases.is_known(row, books) else None, ask, records, books)
        else:
            assert row is not None
            leases.give_back(row, ask, records, books)
        self.rows[ask.lease] = row
        for want, record in zip(ask.wants, records, strict=True):
            self._touch(want.bucket, record)
            keep(record, now_us)
        return LeaseAnswer(status, now_us, leases.answered(row, ask.wants, records, now_us))

    def take(self, owner: bytes, ttl_ms: int) -> Lease | None:
        """Take the slot if it is free, or renew it; None if another owns it. To let it end, a test clears `lease`."""
        if self.lease is None:
            self.fence += 1
            self.lease = Lease(owner, self.fence)
        if self.lease.owner != owner:
            return None
        return self.lease._replace(left_ms=ttl_ms)

    def release(self, owner: bytes) -> None:
        """Give the slot back, if this owner holds it."""
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
        """Write the controller's decisions; None, with nothing done, if the lease is lost (F-P7)."""
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
        # A bucket that only a dry run has looked at must not change.
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
            if self.records.get(bucket) is record:  # a bucket that was only looked at does not change
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
        """Count refusals by a node itself as if the requests had been asked here."""
        for want in operation.wants:
            record = drafts[want.bucket]
            record.requests += operation.requests
            if want.how == REFUSING:
                record.refused += operation.requests
                # Refusals while the key is blocked begin no new block.
                if record.block and want.params.block and blocked_us(record, want.params, now_us) == 0:
                    block.count_refusal(record.block, want.params.block, operation.requests, now_us)
            self._touch(want.bucket, record)
        return AcquireAnswer(AcquireStatus.COUNTED, now_us)

    def _decide(self, operation: Acquire, drafts: dict[str, Record], now_us: int) -> AcquireAnswer:
        records = [drafts[want.bucket] for want in operation.wants]
        charges = [_charge(want, record) for want, record in zip(operation.wants, records, strict=True)]
        minimums = [_minimum(want, record) for want, record in zip(operation.wants, records, strict=True)]
        verdicts = judge(operation, records, minimums, charges, now_us)
        turns: list[Turn | None] = []
        if operation.lot is not None:
            turns = shed(operation, operation.lot, records, verdicts)
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
                commit_place(record, want.params, verdicts[i], charges[i], operation)
                if operation.lot is not None:
                    places = want.params.in_flight
                    commit_class(
                        record,
                        verdicts[i],
                        operation.lot,
                        requests=operation.requests,
                        work=charges[i] if places is not None and places.in_work else None,
                        turn=turns[i],
                    )
        return AcquireAnswer(
            AcquireStatus.GRANTED if granted else AcquireStatus.REFUSED,
            now_us,
            tuple(
                BucketAnswer(
                    verdict,
                    record.balance,
                    _told_charge(verdict, charge, record, want.params, now_us),
                    record.rate,
                    record.capacity,
                    record.counts_requests,
                    pressure(record, verdict, operation.lot),
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
                    settle_bucket(drafts[charge.bucket], mark, i, operation, now_us)
            mark.work, mark.final, mark.begun = operation.work, operation.final, True
            self.tombstones[operation.reservation] = mark
        if not mark.final:
            renew(mark, operation, now_us)
        if mark.deadline_us > deadline_us or (mark.final and status is SettleStatus.SETTLED):
            self._move_places(operation, drafts, deadline_us, renewed=not mark.final)
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

    def _move_places(self, operation: Settle, drafts: dict[str, Record], deadline_us: float, *, renewed: bool) -> None:
        """A settle frees its place; progress takes one in the present slot instead (W18)."""
        ttl_us = operation.deadline_us - operation.acquired_us
        for charge in operation.charges:
            record = drafts.get(charge.bucket)
            if record is None or record.slots is None or operation.is_uncounted:
                continue
            terms = None if charge.params is None else charge.params.in_flight
            amount = charge.charge if terms is not None and terms.in_work else operation.requests
            if renewed and terms is None:
                continue
            in_flight.free(record.slots, amount, deadline_us - ttl_us)
            if renewed and terms is not None:
                in_flight.add(record.slots, terms, amount, ttl_us)
                self._touch(charge.bucket, record)


def judge(
    operation: Acquire, records: Sequence[Record], minimums: Sequence[float], charges: Sequence[float], now_us: int
) -> list[Verdict]:
    """Return each bucket's verdict (W3, W13, W17)."""
    verdicts = []
    for want, record, need, charge in zip(operation.wants, records, minimums, charges, strict=True):
        amount = counted(record, operation.requests, want.weight) if record.counts_requests else charge
        covered = want.params.is_quota
        if want.how & COVERED and not (covered or record.counts_requests):
            # A learned charge may be more than the bucket holds: a full bucket is then enough.
            covered, amount = True, min(amount, record.capacity) if want.how & LEARNED else amount
        need = needed(need, amount, debt_max=record.debt_max, capacity=record.capacity, covered=covered)
        passed = record.balance >= need and not want.how & TOO_LARGE
        if blocked_us(record, want.params, now_us) > 0:
            verdicts.append(Verdict.DENIED)
        elif passed and is_full(record, want.params, now_us):
            verdicts.append(Verdict.FULL)
        else:
            verdicts.append(Verdict.PASSED if passed else Verdict.BLOCKED)
    return verdicts


def is_full(record: Record, params: Params, now_us: int) -> bool:
    """Check for as many open reservations as there may be (W18)."""
    terms, slots = params.in_flight, record.slots
    if terms is None or slots is None or terms.limit == 0:
        return False
    return slots.count >= _places(record, params, terms, now_us)


def _places(record: Record, params: Params, terms: InFlightTerms, now_us: int) -> float:
    """How many may be open here: places of parts that are lent are their holders' (B8)."""
    return in_flight.limit_here(terms, share_of(record, params, now_us) * free_part(record))


def _told_charge(verdict: Verdict, charge: float, record: Record, params: Params, now_us: int) -> float:
    """Value of the answer's field `charge`, by the verdict (`BucketAnswer.charge`)."""
    if verdict is Verdict.DENIED:
        return blocked_us(record, params, now_us)
    if verdict is Verdict.FULL and params.in_flight is not None:
        return _places(record, params, params.in_flight, now_us)
    return charge


def blocked_us(record: Record, params: Params, now_us: int) -> float:
    """Return the time for which the bucket's key is still blocked; 0 if it is not (W17)."""
    if record.block is None or params.block is None:
        return 0.0
    return block.left_us(record.block, params.block, now_us)


def shed(operation: Acquire, lot: Lot, records: Sequence[Record], verdicts: list[Verdict]) -> list[Turn | None]:
    """Give overload control the last word, so that the share it refuses is that of all requests (Q4, S3, S9)."""
    turns: list[Turn | None] = [None] * len(records)
    over = [_is_over_committed(want, record) for want, record in zip(operation.wants, records, strict=True)]
    for i, record in enumerate(records):
        if record.shedding is None or verdicts[i] is Verdict.DENIED:
            continue
        turn = turns[i] = shedding.turns_away(
            record.shedding,
            lot.class_number,
            lot.draw,
            in_flight=0.0 if record.slots is None else record.slots.count,
            free=free_part(record),
            expected_ms=lot.expected_ms,
            over_committed=sum(over) > over[i],
            requests=operation.requests,
        )
        if turn.is_refused:
            verdicts[i] = Verdict.TURNED_AWAY
    return turns


def _is_over_committed(want: Want, record: Record) -> bool:
    """Check for a key that takes more than its rate: less than half of its capacity is left (S11)."""
    return not record.is_quota and not want.params.is_shadow and record.balance < record.capacity / 2


def commit_place(record: Record, params: Params, verdict: Verdict, taken: float, operation: Acquire) -> None:
    """Count the attempt, and what is in flight or found no place (G6, W18)."""
    if operation.attempt == 2:
        record.second_attempts = min(record.second_attempts + 1, ATTEMPTS_MAX)
    elif operation.attempt > 2:
        record.further_attempts = min(record.further_attempts + 1, ATTEMPTS_MAX)
    terms, slots = params.in_flight, record.slots
    if terms is None or slots is None:
        return
    if verdict is Verdict.DEBITED:
        in_flight.add(slots, terms, taken if terms.in_work else operation.requests, operation.ttl_us)
    elif verdict is Verdict.FULL:
        slots.refused += operation.requests


def commit_class(
    record: Record,
    verdict: Verdict,
    lot: Lot,
    *,
    requests: float,
    work: float | None = None,
    turn: Turn | None = None,
) -> None:
    """Count who asked and who was turned away, and debit the class of who was let in, by its work if that is given.

    Nobody was spared if another bucket has refused the request.
    """
    if record.shedding is None or verdict is Verdict.DENIED:
        return
    if turn is not None and verdict in (Verdict.TURNED_AWAY, Verdict.DEBITED):
        record.shedding.ahead[lot.class_number] = turn.ahead
    shedding.ask(record.shedding, lot.class_number, requests, refused=verdict is Verdict.TURNED_AWAY)
    if verdict is Verdict.DEBITED:
        shedding.take(record.shedding, lot.class_number, requests, work)


def pressure(record: Record, verdict: Verdict, lot: Lot | None) -> Pressure | None:
    """State of a bucket's overload control, as its answer tells it; None where nobody asked."""
    if lot is None or record.shedding is None:
        return None if lot is None else Pressure()
    known, number = record.shedding, lot.class_number
    return Pressure(
        shedding.state_told(known, number, turned_away=verdict is Verdict.TURNED_AWAY),
        known.quality if known.lent_until_us > 0 else 1.0,
        shedding.share_told(known, number),
        known.rates[number] if known.lent_until_us > 0 else 0.0,
        known.limits[number],
    )


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
    """Return the number that requests of this weight count as: only a cap of requests weighs them (W16), and a bucket
    that may come to have one or that learns its charge before weights."""
    return requests * weight if record.flags & KIND == Flags.COUNTS_REQUESTS or record.flags & WEIGHS else requests


def standing(mark: Tombstone, operation: Settle) -> SettleStatus:
    """Distinguish a first settle from a repeat: settled stays settled, progress counts at its highest (F-R2, F-R3,
    F-R12)."""
    if mark.final:
        return SettleStatus.CONFLICT if operation.final and operation.work != mark.work else SettleStatus.DUPLICATE
    if mark.begun and not operation.final and operation.work <= mark.work:
        return SettleStatus.DUPLICATE
    return SettleStatus.SETTLED


def renew(mark: Tombstone, operation: Settle, now_us: int) -> None:
    """Move the deadline to a whole time to live from now, after progress (W14)."""
    mark.deadline_us = max(mark.deadline_us, float(now_us + (operation.deadline_us - operation.acquired_us)))


def settle_bucket(record: Record, mark: Tombstone, i: int, operation: Settle, now_us: int) -> None:
    """Count and correct one bucket: all of the work if final, else only what is beyond the mark (W5–W7)."""
    charge = operation.charges[i]
    work = measured(operation.work, charge.unit)
    target = work * charge.weight
    worth_each = worth(record, charge)
    more = (work - measured(mark.work, charge.unit)) * charge.weight
    record.work_settled += more
    entry = learned.make(record.learned, charge.learn_id) if charge.learn_id and Flags.LEARNS in record.flags else None
    if entry is not None:
        entry.work += more
    if not operation.final:
        if worth_each is not None and not charge.in_requests and target > mark.accounted[i]:
            correct(record, mark, i, target, worth_each, refundable=False)
        return
    _count(record, operation, charge, target, now_us)
    if entry is not None:
        _count_learned(record, entry, operation, charge, target)
    if worth_each is None:
        return
    if charge.in_requests:
        target = counted(record, operation.requests, charge.weight)
    if within_threshold(record, target - mark.accounted[i], charge):
        return
    same_window = not record.is_quota or operation.acquired_us >= record.committed
    correct(record, mark, i, target, worth_each, refundable=not mark.late and same_window)


def measured(work: float, unit: float) -> float:
    """Return units of work, given in the caller's own measure (W19); `unit` is as in `Charge.unit`."""
    if unit == 0:
        return work
    return float(math.ceil(work / unit)) if unit > 0 else work / -unit


def worth(record: Record, charge: Charge) -> float | None:
    """Return the value of one unit of the charge in the bucket's current unit (R10); None: nothing.

    Work charged before the bucket began to count requests is worth the same time as then. A request token was the
    price, whatever the work.
    """
    if record.counts_requests == charge.in_requests:
        return 1.0
    if not record.counts_requests or record.is_quota:
        return None
    tokens = record.rate / record.committed
    return tokens if 0 < tokens < math.inf else None


def _count(record: Record, operation: Settle, charge: Charge, work: float, now_us: int) -> None:
    latency_ms, number = operation.latency_ms, operation.class_number
    expected_ms = operation.expected_ms if math.isnan(charge.expected_ms) else charge.expected_ms
    settles = counted(record, operation.requests, charge.weight)
    record.settles += settles
    if operation.requests >= 1 and settles > 0:  # fewer could make the square arbitrarily large
        record.work_squared += work * work / settles
    if record.shedding is not None and not latency_ms >= 0:
        latency_ms = max(0.0, (now_us - operation.acquired_us) / 1000)  # it took so long, whoever says (Q8)
    if latency_ms > expected_ms:
        record.missed += 1
    if record.histogram and latency_ms >= 0:
        step = histogram_step(latency_ms) + (0 if record.shedding is None else number * HISTOGRAM_STEPS)
        record.histogram[step] = min(record.histogram[step] + 1, COUNT_MAX)
    if record.shedding is not None:
        terms = None if charge.params is None else charge.params.overload
        target_ms = 0.0 if terms is None else terms.targets_ms[number]
        shedding.count(record.shedding, number, latency_ms=latency_ms, expected_ms=expected_ms, target_ms=target_ms)


def _count_learned(record: Record, entry: Entry, operation: Settle, charge: Charge, work: float) -> None:
    settles = counted(record, operation.requests, charge.weight)
    entry.settles += settles
    if operation.requests >= 1 and settles > 0:
        entry.work_squared += work * work / settles


def within_threshold(record: Record, delta: float, charge: Charge) -> bool:
    """True if the difference is too small to correct (W6); refunds may have a threshold of their own (W19)."""
    threshold = record.settle_threshold
    if delta < 0 and charge.params is not None and Flags.REFUNDS in charge.params.flags:
        threshold = charge.params.refund_threshold
    if threshold < 0:
        threshold = -threshold * charge.charge
    return math.fabs(delta) <= threshold


def correct(record: Record, mark: Tombstone, i: int, target: float, worth_each: float, *, refundable: bool) -> None:
    """Bring one bucket's debit to the target; count what the debt bound cuts off (W5, F-R9)."""
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
        # Work that was not done was not left unpaid either, however late the settle.
        forgiven = min(-delta, mark.uncollected[i])
        mark.uncollected[i] -= forgiven
        record.uncollected -= forgiven
        if refundable:
            record.balance = min(record.balance + (-delta - forgiven) * worth_each, free_capacity(record))
            mark.accounted[i] = target
        else:
            mark.accounted[i] -= forgiven


def _charge(want: Want, record: Record) -> float:
    estimate = record.charge
    if Flags.LEARNS in record.flags:
        entry = learned.find(record.learned, want.learn_id) if want.learn_id else None
        estimate = entry.charge if entry is not None else 0.0 if want.learn_id else estimate
        estimate *= want.weight
    if want.how & LEARNED and estimate > 0 and not record.counts_requests:
        # An estimate that no balance could pay would lock the bucket, or be forgiven in part.
        return estimate if want.params.is_quota else min(estimate, record.capacity + record.debt_max)
    return want.charge


def _minimum(want: Want, record: Record) -> float:
    capacity = free_capacity(record)
    part = capacity / want.params.whole_capacity
    return part_of_minimum(want.minimum, part=part, capacity=capacity)


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
    slots = None if record.slots is None else replace(record.slots)
    entries, lent, book = (
        [replace(entry) for entry in record.learned],
        copy.copy(record.lent),
        copy.deepcopy(record.book),
    )
    apart = {
        "histogram": list(record.histogram), "shedding": known, "block": blocked, "slots": slots, "learned": entries,
        "lent": lent, "book": book,
    }  # fmt: skip
    return Record(**{**values, **apart})
