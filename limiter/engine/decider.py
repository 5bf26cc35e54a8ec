"""Acquire: descriptor → limits → buckets → decision, within a deadline, whatever the store does.

If the store cannot answer, each policy says what applies (B3): `closed` refuses to decide, `open` grants, and `local`
asks a bucket in this node that holds its share of the limit. A grant without the store is not charged there; its settle
debits all of its work once the store is back. A quota continues from the balance that this node knows (`known`,
`limiter.engine.remainders`); what it grants is debited once the store is back.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from struct import Struct
from typing import Any

import msgspec

from limiter.engine.lender import Lender
from limiter.engine.local import LocalBuckets
from limiter.engine.operation import ASKS_MORE, IN_REQUESTS, NO_LATENCY, Desk, Memo, Operation, Values
from limiter.engine.planner import Planner
from limiter.engine.remainders import Remainders
from limiter.engine.repeating import Repeater
from limiter.engine.request_errors import (
    IdempotencyConflict,
    NotDecided,
    TooManyLimits,
    TooMuchAtOnce,
    Uncovered,
)
from limiter.engine.settler import Settler
from limiter.engine.shape import NOTHING, Shape, at_rate
from limiter.engine.store_health import StoreHealth
from limiter.engine.throttles import Throttles
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, Refused, Settled, SettleRequest
from limiter.model.bucket.decision import REASON_OF, PlainRefusal, limit_states, plain_refusal, pressure, refusal
from limiter.model.bucket.expiry import Expiries
from limiter.model.bucket.operations import LATE_US, AcquireAnswer, AcquireStatus, BucketAnswer, Lot, Verdict, Want
from limiter.model.bucket.reservation import ID_SIZE, UNCOUNTED, VERSION, Keyring, Signer, Taken, pack, pack_late
from limiter.model.overload.retries import RetryMeters
from limiter.model.overload.shedding import State
from limiter.model.policy.choices import OnStoreFailure
from limiter.model.policy.criticality import NO_CLASSES, Criticality, class_of
from limiter.model.policy.limit import Limit
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.uncovered import TEXT_KEPT_MAX, UncoveredTally
from limiter.model.tally import DecisionTally, SettleTally
from limiter.runtime.pauses import with_pauses
from limiter.runtime.told import Told
from limiter.store.buckets import BUCKETS_PER_OPERATION_MAX, Buckets
from limiter.store.call_layout import REPLY_SIZE, unpack_acquire
from limiter.store.clock import StoreClock
from limiter.store.flush import Asking
from limiter.store.ids import RandomIds
from limiter.store.keys import Slot
from limiter.store.leases.lease_store import LeaseStore
from limiter.store.store_errors import StoreShunned, StoreUnavailable

log = logging.getLogger(__name__)

_DEBITED = Verdict.DEBITED
_GRANTED = AcquireStatus.GRANTED
_GRANTED_CODE, _DEBITED_CODE = int(_GRANTED), int(_DEBITED)
_REFUSED_CODE = int(AcquireStatus.REFUSED)
_VALUES = Struct("<Bdddd")

BUCKETS_MAX = 1 << 62
"""Asked in one turn of the loop: as many as there are requests for."""

Arrived = tuple[AcquireRequest, Any, str | None, Criticality | None]
"""A request, its place at the desk, its idempotency key, and the highest class it may have; None: any."""


class _WaitingRoom:
    """The desk of callers that wait in a coroutine."""

    def answer(self, operations: Sequence[Operation]) -> None:
        """Wake each caller."""
        for operation in operations:
            operation.place(operation)


WAITING_ROOM = _WaitingRoom()


class Decider:
    """Decides for one node. Stateless: it may be killed at any time."""

    def __init__(
        self,
        buckets: Buckets,
        signer: Signer,
        *,
        deadline_s: float = 0.1,
        repeat_s: float = 0.0,
        late_us: int = LATE_US,
        default_criticality: Criticality = Criticality.CRITICAL,
        refuse_uncovered: bool = False,
        nodes: Callable[[], int] = lambda: 1,
    ) -> None:
        self._buckets = buckets
        self._keyring = Keyring(signer)
        self._deadline_s = deadline_s
        self._late_us = late_us
        self._late = pack_late(late_us)
        self.default_criticality = default_criticality
        self._refuse_uncovered = refuse_uncovered
        self._planner = Planner(PolicySet())
        self._changes = 0
        self.remainders = Remainders(buckets.clock, nodes)
        self._store_health = StoreHealth(on_recovery=self.remainders.hold)
        self._local = LocalBuckets(nodes, self.remainders)
        self._throttles = Throttles()
        self._ids = RandomIds(ID_SIZE)
        self.decisions = DecisionTally()
        self.settles = SettleTally()
        self.uncovered = UncoveredTally()
        self.expiries = Expiries()
        buckets.acquires.tell = self.tell
        self.repeater = Repeater(buckets.acquires, keep_s=repeat_s, deadline_s=deadline_s)
        self.retries: RetryMeters[Slot] = RetryMeters()
        self.settler = Settler(
            buckets,
            self._keyring,
            self._store_health,
            self.settles,
            self.expiries,
            self.remainders,
            self.repeater.refusals,
            deadline_s=deadline_s,
        )
        self.lender: Lender | None = None
        """Lends parts of limits, where the node has a store of leases."""

    @property
    def policies(self) -> PolicySet:
        """The policies in force."""
        return self._planner.policies

    def enforce(self, policies: PolicySet) -> None:
        """Put other policies in force from the next request on (W9)."""
        self._changes += 1
        self._put_in_force(Planner(policies))

    async def enforce_with_pauses(self, policies: PolicySet) -> None:
        """Put other policies in force while requests go on: they see the old ones until the new ones are ready."""
        self._changes = change = self._changes + 1
        planner = await with_pauses(Planner.steps(policies, self._planner))
        if change == self._changes:  # otherwise a newer change came meanwhile
            self._put_in_force(planner)

    def _put_in_force(self, planner: Planner) -> None:
        self._planner = self.settler.planner = planner
        if self.lender is not None:
            self.lender.planner = planner
        self.repeater.begin_anew()

    @property
    def planner(self) -> Planner:
        """The limits in force, and the places of their buckets."""
        return self._planner

    def lend_from(self, store: LeaseStore, clock: StoreClock) -> Lender:
        """Lend parts of limits from now on."""
        self.lender = Lender(store, self._keyring, self._store_health, clock, deadline_s=self._deadline_s)
        self.lender.planner = self._planner
        return self.lender

    def sign_with(self, signer: Signer) -> None:
        """Sign with another secret from now on; earlier signatures stay valid."""
        self._keyring.sign_with(signer)

    @property
    def store_is_shunned(self) -> bool:
        """True while the breaker is open: the store is only probed now and then."""
        return self._store_health.breaker.is_open

    def store_answered(self) -> None:
        """Record an answer of the store to another part of the node."""
        self._store_health.answered()

    async def acquire(self, request: AcquireRequest, *, idempotency_key: str | None = None) -> Decision:
        """Grant or refuse a request. Raises IdempotencyConflict, or NotDecided if no decision is possible."""
        told: Told[Operation] = Told()
        self.begin([(request, told, idempotency_key, None)], WAITING_ROOM)
        return (await told.future).decision()

    async def settle(self, request: SettleRequest, *, namespace: str | None = None) -> Settled:
        """Correct a charge. `namespace` is the only one whose reservations the caller may settle."""
        return await self.settler.settle(request, namespace=namespace)

    def begin(self, arrived: Iterable[Arrived], desk: Desk, room: int = BUCKETS_MAX) -> int:
        """Ask the store for all requests of one turn; each is handed to the desk once it is decided, or will not be.

        `room` is how many buckets they may ask together. What is left of it is returned; below zero, some were refused.
        """
        now_s, now_us = time.monotonic(), self._now_us()
        loop_s = asyncio.get_running_loop().time()
        deadline_s = loop_s + self._deadline_s
        repeater, repeated = self.repeater, list[Operation]()
        known, retries = repeater.refusals.known, self.retries
        going: dict[Slot, list[Operation]] = {}
        slot, operations = None, []
        cover, default = self._planner.cover, self.default_criticality
        is_calm = not (self._store_health.breaker.is_open or self.remainders.is_going)
        for request, place, idempotency_key, highest in arrived:
            its_slot, shape = cover(request.namespace, request.descriptor)
            criticality = request.criticality or default
            operation = Operation(self, request, desk, place, its_slot, shape, criticality, deadline_s)
            room -= len(shape)
            try:
                if room < 0:
                    raise TooMuchAtOnce(_TOO_MUCH)
                if shape.classes is not None or highest is not None:
                    operation.criticality = criticality = class_of(
                        request.criticality, request.descriptor, shape.classes or NO_CLASSES,
                        default=default, highest=highest,
                    )  # fmt: skip
                if idempotency_key is not None:
                    operation.idempotency_key, operation.id = idempotency_key, self._ids.next()
                if not (is_calm and shape.is_plain) and self._needs_no_store(operation, now_s):
                    continue
                operation.buckets = shape.buckets(request.descriptor)
                if request.attempt > 1 or retries.known:
                    self.decisions.attempt(request.attempt)
                    retries.count(its_slot, operation.buckets, request.attempt, now_s)
                operation.rows, operation.asks = shape.asks(request.descriptor, request.work, criticality, now_us)
                if idempotency_key is not None:
                    operation.ask_once()
                elif known and repeater.find(operation, loop_s):
                    repeated.append(operation)
                    continue
                if its_slot is not slot:
                    slot = its_slot
                    operations = going.setdefault(slot, [])
                operations.append(operation)
            except Exception as error:  # the fault of one must not cost the others their answers
                if operation.is_over:  # it was answered already; a second answer would go to another request
                    log.exception("an answer could not be handed over")
                else:
                    operation.finish(error)
        for slot, operations in going.items():
            if repeater.refusals.untold:
                repeater.tell_along(slot, operations, loop_s)
            self._buckets.acquires.start_many(slot, operations, deadline_s=deadline_s)
        if repeated:
            self._repeat(repeated)
        return room

    def _repeat(self, repeated: Sequence[Operation]) -> None:
        """Count and answer refusals that were repeated without asking the store."""
        for operation in repeated:
            outcome = operation.outcome
            if type(outcome) is PlainRefusal:
                self.decisions.refused[REASON_OF[outcome.how_it_counts]] += 1
            else:
                assert isinstance(outcome, Refused)
                self.decisions.count(outcome, dry_run=False)
        self.decisions.repeated += len(repeated)
        _hand_over(repeated)

    def _needs_no_store(self, operation: Operation, now_s: float) -> bool:
        """Answer the operation without the store if that is possible; return whether it was."""
        request, shape = operation.request, operation.shape
        if shape.denied_by is not None:
            self._deny(operation, shape.denied_by)
            return True
        if shape.sheds:
            drawn = _session_draw(operation)
            operation.draw(random.random() if drawn is None else drawn, of_session=drawn is not None)  # noqa: S311
        if shape.lives:
            operation.live()
        if shape.weighs:
            operation.weigh()
        if shape.denied_in_shadow and not request.dry_run:
            self.decisions.denied_in_shadow += 1
        if shape.too_many:
            operation.finish(TooManyLimits(_too_many(shape.too_many)))
        elif not shape:
            self._let_pass_or_refuse(operation, is_covered=shape.denied_in_shadow)
        elif self.remainders.is_going and self._goes_on(shape, now_s):
            operation.tell(StoreShunned("this node decides on the quota until its grants are debited in the store"))
        elif self._store_health.breaker.is_open and not self._store_health.allows(now_s):
            operation.tell(StoreShunned("the store has failed repeatedly and is not asked for a moment"))
        else:
            return False
        return True

    def _deny(self, operation: Operation, policy: str) -> None:
        """Refuse by a policy that denies; nothing is consumed (W17)."""
        detail = f"{policy} denies all requests that it covers"
        refused = Refused(policy, "denied", retry="never", retry_after_ms=0, limits=(), detail=detail)
        self.decisions.count(refused, dry_run=operation.request.dry_run)
        operation.finish(refused)

    def _let_pass_or_refuse(self, operation: Operation, *, is_covered: bool) -> None:
        """Decide a request without any limit: grant it, or refuse it as uncovered."""
        try:
            decision = self._let_pass(operation) if is_covered else self._uncovered_decision(operation)
        except Uncovered as error:
            operation.finish(error)
        else:
            self.decisions.count(decision, dry_run=operation.request.dry_run)
            operation.finish(decision)

    def _goes_on(self, shape: Shape, now_s: float) -> bool:
        """True if a quota of the request must not be asked of the store, because its balance there is not up to date.

        A single call without an answer is not enough for that: the store is still asked, and grants are posted at once.
        """
        if not (self._store_health.breaker.is_open or self.remainders.is_held(now_s)):
            return False
        return any(limit.is_known for limit in shape)

    def tell(self, batch: Sequence[Asking], reply: bytes, now_us: int) -> None:
        """Conclude a batch from the store's reply: unpack and sign, then hand all operations to their desks."""
        self._store_health.answered()
        at, unpack, size = REPLY_SIZE, _VALUES.unpack_from, _VALUES.size
        told: list[Operation] = []
        granted: list[Operation] = []
        try:
            for operation in batch:
                count = len(operation.buckets)
                if type(operation) is not Operation:
                    answer, at = unpack_acquire(reply, at, count, now_us)
                    operation.tell(answer)
                    continue
                if reply[at] == _GRANTED_CODE and not operation.flags & ASKS_MORE and operation.shape.grants_alike:
                    if count == 1:  # by far the most
                        operation.values = (unpack(reply, at + 1),)
                        at += 1 + size
                    else:
                        operation.values = [unpack(reply, at + 1 + number * size) for number in range(count)]
                        at += 1 + count * size
                    if not operation.is_over:
                        granted.append(operation)
                        told.append(operation)
                elif reply[at] == _REFUSED_CODE and count == 1 and operation.refuses_plainly:
                    values, at = unpack(reply, at + 1), at + 1 + size
                    if not operation.is_over:
                        self._refuse_plainly(operation, values, now_us)
                        told.append(operation)
                else:
                    answer, at = unpack_acquire(reply, at, count, now_us)
                    if not operation.is_over:
                        self.conclude(operation, answer)
                        if operation.is_over:  # otherwise it asks again
                            told.append(operation)
        finally:  # also for a reply that cannot be read to its end
            self._grant_plainly(granted, now_us)
            _hand_over(told)

    def _refuse_plainly(self, operation: Operation, values: Values, now_us: int) -> None:
        """Refuse by the only limit, a rate; the renderer puts it into words."""
        operation.is_over = True
        operation.now_us = now_us
        code, balance, charge, rate, capacity = values
        limit = operation.shape[0]
        params = at_rate(limit, operation.request.descriptor).terms
        operation.outcome = refused = plain_refusal(
            limit, params, operation.asks[0], charge, balance, rate, capacity, in_requests=code >= IN_REQUESTS,
            retried=bool(self.retries.known) and self.retries.too_many(operation.slot, operation.buckets[0]),
        )  # fmt: skip
        self.decisions.refused[REASON_OF[refused.how_it_counts]] += 1
        if self.repeater.refusals.keep_s:
            self.repeater.hear_plain(operation, refused, asyncio.get_running_loop().time())

    def _grant_plainly(self, granted: Sequence[Operation], now_us: int) -> None:
        """Sign nearly all grants, without making a value of each bucket's answer."""
        next_id, seal, late, work = self._ids.next, self._keyring.seal, self._late, 0.0
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
        self.decisions.granted += len(granted)
        self.decisions.work_admitted += work
        self._expect_settles_of(granted, now_us)

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
            self.expiries.granted(limit.key, now_us + life_us, life_us, count)

    def conclude(self, operation: Operation, answer: AcquireAnswer | Exception) -> None:
        """Decide by the store's answer or failure. The operation is over then, unless it has to be asked once more."""
        operation.is_over = True
        try:
            decision = self._concluded(operation, answer)
        except NotDecided as undecided:
            self.decisions.undecided[undecided.reason] += 1
            operation.outcome = undecided
        except Exception as error:
            operation.is_over = True  # even if it was to be asked again
            operation.outcome = error
        else:
            if decision is not None:
                self.decisions.count(decision, dry_run=operation.request.dry_run)
                operation.outcome = decision

    def _concluded(self, operation: Operation, answer: AcquireAnswer | Exception) -> Decision | None:
        if type(answer) is not AcquireAnswer:
            assert isinstance(answer, Exception)
            return self._unanswered(operation, answer)
        status = answer.status
        if status is AcquireStatus.WINDOW and not operation.is_dated:
            operation.is_dated = True
            self._ask_again(operation, answer.now_us)
            return None
        if status is AcquireStatus.CORRUPT and any(limit.shadow for limit in operation.limits):
            # A shadow refuses nothing, not even by a damaged record (P11, F-S11).
            operation.limits = [limit for limit in operation.limits if not limit.shadow]
            if not operation.limits:
                return self._let_pass(operation)
            self._ask_again(operation, answer.now_us)
            return None
        return self._decide(operation, answer)

    def _ask_again(self, operation: Operation, now_us: int) -> None:
        """Retry after a window mismatch, or after dropping limits in shadow with damaged records (P4, F-T4)."""
        operation.ask_again(now_us)
        operation.is_over = operation.is_sent = False
        self._buckets.acquires.start(operation.slot, operation)

    def _unanswered(self, operation: Operation, error: Exception) -> Decision:
        if not isinstance(error, StoreUnavailable):
            raise error
        self.decisions.unanswered[self._store_health.unanswered(error)] += 1
        return self._without_store(operation)

    def _decide(self, operation: Operation, answer: AcquireAnswer) -> Decision:
        if answer.status is AcquireStatus.CONFLICT:
            raise IdempotencyConflict("this Idempotency-Key was used before with other parameters")
        if answer.status not in (_GRANTED, AcquireStatus.REFUSED):
            raise NotDecided("record_damaged", _DAMAGED if operation.idempotency is None else _DAMAGED_EITHER)
        if answer.memo:
            return self._replay(operation, answer)
        wants = operation.wants(answer.now_us)
        self._hear(operation, wants, answer)
        if answer.granted:
            return self._grant(operation, wants, answer.buckets, answer.now_us, is_new=True)
        refused = self._refuse(operation, wants, answer.buckets, answer.now_us)
        self.repeater.hear(operation, answer.buckets, answer.now_us, refused, asyncio.get_running_loop().time())
        return refused

    def _hear(self, operation: Operation, wants: Sequence[Want], answer: AcquireAnswer) -> None:
        """Remember what is left of quotas, and how much is refused, to go on without the store (F-S14, Q11)."""
        lot, now_s = operation.lot, 0.0 if operation.lot is None else time.monotonic()
        for limit, wanted, told in zip(operation.limits, wants, answer.buckets, strict=True):
            if lot is not None and told.pressure is not None and limit.sheds:
                self._throttles.hear(operation.slot, wanted.bucket, lot, told.pressure, now_s)
            if limit.is_known:
                own = told.charge if told.verdict is _DEBITED else 0.0
                self.remainders.hear(operation.slot, wanted.bucket, wanted.params, told.balance, answer.now_us, own)

    def _grant(
        self,
        operation: Operation,
        wants: Sequence[Want],
        answers: Sequence[BucketAnswer],
        now_us: int,
        *,
        degraded: bool = False,
        is_new: bool = False,
    ) -> Granted:
        request = operation.request
        taken = _taken(operation, wants, answers, degraded=degraded)
        if is_new and not request.dry_run:
            debited = [limit for limit, told in zip(operation.limits, answers, strict=True) if told.verdict is _DEBITED]
            self._expect_settles(debited, request.ttl_ms, 1, now_us)
        return Granted(
            "" if request.dry_run else self._sign(operation, taken, now_us, degraded=degraded),
            _charged(operation, wants, answers),
            request.ttl_ms,
            limit_states(operation.limits, wants, answers, operation.requests, now_us, operation.lot),
            degraded=degraded,
            **_NO_PRESSURE if operation.lot is None else _pressure(operation.limits, answers),
        )

    def _sign(self, operation: Operation, taken: Sequence[Taken], now_us: int, *, degraded: bool = False) -> str:
        request, (namespace, partition) = operation.request, operation.slot
        id_ = self._ids.next() if operation.idempotency_key is None else operation.id
        class_number = 0 if operation.lot is None else operation.lot.class_number
        if degraded:
            class_number += UNCOUNTED
        packed = pack(
            id_, namespace.encode("utf-8", "surrogatepass"), partition, now_us, now_us + request.ttl_ms * 1000,
            operation.expected_ms, class_number, self._late_us, taken,
        )  # fmt: skip
        return self._keyring.seal(packed).decode()

    def _replay(self, operation: Operation, answer: AcquireAnswer) -> Decision:
        """Return the first answer under an idempotency key, whatever has changed since."""
        try:
            memo = msgspec.msgpack.decode(answer.memo, type=Memo)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise NotDecided("record_damaged", _DAMAGED_MEMO) from None
        if len(memo.rows) != len(answer.buckets) or len(memo.id) != ID_SIZE:
            raise NotDecided("record_damaged", _DAMAGED_MEMO)
        operation.id, operation.lot = memo.id, None
        if memo.draw is not None:
            operation.draw(memo.draw)
        if [bucket for bucket, *_ in memo.rows] != list(operation.buckets):
            # The policies have changed: the charge still stands, but the limits cannot be shown.
            return self._replay_without_limits(operation, memo, answer)
        wants = operation.wants(answer.now_us)
        if answer.granted:
            granted = self._grant(operation, wants, answer.buckets, answer.now_us)
            return msgspec.structs.replace(granted, replayed=True)
        refused = self._refuse(operation, wants, answer.buckets, answer.now_us)
        return msgspec.structs.replace(refused, replayed=True)

    def _replay_without_limits(self, operation: Operation, memo: Memo, answer: AcquireAnswer) -> Decision:
        if not answer.granted:
            return Refused(
                policy="", reason="work", retry="after", retry_after_ms=1, limits=(), replayed=True,
                detail="refused before under this Idempotency-Key, by policies that have changed since",
            )  # fmt: skip
        rows = zip(memo.rows, answer.buckets, strict=True)
        taken: list[Taken] = [
            (
                bucket,
                told.charge,
                weight,
                told.in_requests or number in memo.counting,
                expected_ms,
                0.0,
                memo.learn_ids[number] if number < len(memo.learn_ids) else 0,
            )
            for number, ((bucket, weight, expected_ms), told) in enumerate(rows)
            if told.verdict is _DEBITED
        ]
        return Granted(
            reservation=self._sign(operation, taken, answer.now_us),
            charged=max((charge for _, charge, _, in_requests, *_ in taken if not in_requests), default=0.0),
            expires_in_ms=memo.ttl_ms,
            limits=(),
            replayed=True,
        )

    def _uncovered_decision(self, operation: Operation) -> Granted:
        """Grant or refuse a request that no policy covers (P7)."""
        request = operation.request
        declared = self._planner.declares(request.namespace)
        self.decisions.uncovered[declared] += 1
        self.uncovered.count(request.namespace, request.descriptor, self._now_us(), declared=declared)
        if self._refuse_uncovered:
            raise Uncovered(_refused_uncovered(request.namespace, declared=declared))
        return self._let_pass(operation, covered=False)

    def _let_pass(self, operation: Operation, *, covered: bool = True) -> Granted:
        """Grant without charging anything."""
        return Granted(
            reservation="" if operation.request.dry_run else self._sign(operation, (), self._now_us()),
            charged=0.0,
            expires_in_ms=operation.request.ttl_ms,
            limits=(),
            covered=covered,
        )

    def _without_store(self, operation: Operation) -> Decision:
        """Decide by `on_store_failure` of the policies."""
        now_us, slot = self._now_us(), operation.slot
        wants = operation.wants(now_us)
        for limit, wanted in zip(operation.limits, wants, strict=True):
            if limit.on_store_failure is OnStoreFailure.CLOSED and not limit.shadow:
                detail = f"the store cannot be asked, and {limit.name} admits nothing without it"
                raise NotDecided("store_unavailable", detail, policy=limit.name)
            if limit.is_known and not self.remainders.begin(slot, wanted, now_us) and not limit.shadow:
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
            return self._refuse(operation, wants, answers, now_us, degraded=True)
        return self._grant(operation, wants, answers, now_us, degraded=True, is_new=True)

    def _refuse(
        self,
        operation: Operation,
        wants: Sequence[Want],
        answers: Sequence[BucketAnswer],
        now_us: int,
        *,
        degraded: bool = False,
    ) -> Refused:
        retried = self.retries.among(operation.slot, (want.bucket for want in wants))
        return refusal(
            operation.limits, wants, answers, requests=operation.requests, now_us=now_us, degraded=degraded,
            lot=operation.lot, retried=retried,
        )  # fmt: skip

    def _throttled(
        self, operation: Operation, lot: Lot, wants: Sequence[Want], answers: Sequence[BucketAnswer]
    ) -> list[BucketAnswer]:
        """Hold the answers of this node's buckets against the throttles last heard from the store (Q11)."""
        now_s, hold = time.monotonic(), self._throttles.answer
        return [
            hold(operation.slot, wanted.bucket, lot, answer, now_s) if limit.sheds else answer
            for limit, wanted, answer in zip(operation.limits, wants, answers, strict=True)
        ]

    async def post(self) -> None:
        """Debit in the store what quotas granted without it (F-S14)."""
        if self.remainders.is_going:
            await self.remainders.post(self._buckets, self._planner)

    def _now_us(self) -> int:
        """The store's time, or this node's before the first reply."""
        return self._buckets.clock.guess_us()


_NO_PRESSURE: dict[str, Any] = {}
_TOO_MUCH = "the operations before this one ask as many buckets as a batch may; send this one in another batch"
_DAMAGED = "the record of a bucket cannot be read; nothing was charged"
_DAMAGED_EITHER = (
    "the record of a bucket, or what was kept under this Idempotency-Key, cannot be read; nothing was charged"
)
_DAMAGED_MEMO = "what was kept under this Idempotency-Key cannot be read; nothing was charged, use another key"


def _pressure(limits: Sequence[Limit], answers: Sequence[BucketAnswer]) -> dict[str, Any]:
    """Answer fields of overload control: state, quality and the refused share."""
    state, quality, refused_share = (told := pressure(limits, answers)).state, told.quality, told.refused_share
    is_overloaded = state is State.OVERLOADED
    return {"overloaded": is_overloaded, "quality": quality, "state": state.word, "refused_share": refused_share}


def _session_draw(operation: Operation) -> float | None:
    """Return the chance that all requests of a session have in common; None where no policy draws by session (S13)."""
    descriptor = operation.request.descriptor
    for limit in operation.limits:
        values = [descriptor.get(dimension) for dimension in limit.draw_by]
        if values and None not in values:
            digest = blake2b(msgspec.msgpack.encode((limit.key, values)), digest_size=8).digest()
            return (int.from_bytes(digest) >> 11) / 2**53
    return None


def _refused_uncovered(namespace: str, *, declared: bool) -> str:
    if declared:
        return "no policy covers this descriptor, and this service refuses what is not covered"
    return (
        f"no policy covers this descriptor: nobody declared the namespace {namespace[:TEXT_KEPT_MAX]!a}, and this "
        "service refuses what is not covered"
    )


def _too_many(count: int) -> str:
    most = BUCKETS_PER_OPERATION_MAX
    return f"descriptor: {count} policies cover this descriptor; at most {most} can be decided on at once"


def _hand_over(told: Sequence[Operation]) -> None:
    """Hand operations to their desks; consecutive operations of one desk together."""
    desk: Desk | None = None
    its: list[Operation] = []
    for operation in told:
        if operation.desk is not desk:
            if desk is not None:
                desk.answer(its)
            desk, its = operation.desk, []
        its.append(operation)
    if desk is not None:
        desk.answer(its)


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
