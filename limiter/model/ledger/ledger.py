"""The buckets of a slot in memory: the reference for the scripts that acquire, settle, sample and steer.

Time is an argument. Each call takes a batch, as the scripts do: buckets are brought to *now* once, then the
operations follow one another.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from limiter.model.bucket import block, in_flight, leases, lending
from limiter.model.bucket.bucket import (
    Params,
    Record,
    advance,
    fresh,
    keep,
    refill,
)
from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk, LeaseKind
from limiter.model.bucket.lending import LendStatus, Row
from limiter.model.bucket.operations import (
    REFUSING,
    Acquire,
    AcquireAnswer,
    AcquireStatus,
    BucketAnswer,
    Charge,
    Idempotency,
    Settle,
    SettleAnswer,
    SettleStatus,
    Verdict,
)
from limiter.model.control.stewardship import Lease, Steer, SteerStatus, gives_share, steer_bucket
from limiter.model.ledger.correction import Tombstone, renew, settle_bucket, settled_of, standing
from limiter.model.ledger.judgement import (
    blocked_us,
    charge_of,
    commit,
    commit_class,
    commit_place,
    counted,
    judge,
    minimum_of,
    pressure,
    shed,
    told_charge,
)
from limiter.model.overload import shedding
from limiter.model.overload.shedding import Turn


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
        terms = [leases.terms_of(record, want.params, now_us) for want, record in zip(ask.wants, records, strict=True)]
        books = [lending.begin(record, term.need) for record, term in zip(records, terms, strict=True)]
        found = self.rows.get(ask.lease)
        row = None if found is None else found.copy()
        status = leases.standing(row if leases.is_known(row, books) else None, ask)
        if status is LendStatus.REPEATED:
            assert row is not None
            return LeaseAnswer(LendStatus.LENT, now_us, leases.answered(row, ask.wants, records, terms, now_us))
        if status not in (LendStatus.LENT, LendStatus.RETURNED):
            return LeaseAnswer(status, now_us)
        if status is LendStatus.LENT:
            row = leases.renew(row if leases.is_known(row, books) else None, ask, records, books, terms)
        else:
            assert row is not None
            leases.give_back(row, ask, records, books, terms)
        self.rows[ask.lease] = row
        for want, record in zip(ask.wants, records, strict=True):
            self._touch(want.bucket, record)
            keep(record, now_us)
        return LeaseAnswer(status, now_us, leases.answered(row, ask.wants, records, terms, now_us))

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
        charges = [charge_of(want, record) for want, record in zip(operation.wants, records, strict=True)]
        minimums = [minimum_of(want, record) for want, record in zip(operation.wants, records, strict=True)]
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
                    told_charge(verdict, charge, record, want.params, now_us),
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
            buckets=tuple(settled_of(rows[i], mark, i, operation.charges[i]) for i in range(len(rows))),
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


def _copy(record: Record) -> Record:
    values = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    known = None if record.shedding is None else record.shedding.copy()
    blocked = None if record.block is None else replace(record.block)
    slots = None if record.slots is None else replace(record.slots)
    entries, lent, book = (
        [replace(entry) for entry in record.learned],
        copy.copy(record.lent),
        None if record.book is None else record.book.copy(),
    )
    apart = {
        "histogram": list(record.histogram), "shedding": known, "block": blocked, "slots": slots, "learned": entries,
        "lent": lent, "book": book,
    }  # fmt: skip
    return Record(**{**values, **apart})
