"""Acquire: descriptor → limits → buckets → decision, within a deadline, whatever the store does.

Decisions without the store are in `limiter.engine.fallback`, answers under a repeated idempotency key in
`limiter.engine.replays`, and what a grant is charged and signed with in `limiter.engine.granting`.
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

from limiter.engine.fallback.fallback import Fallback
from limiter.engine.fallback.remainders import Remainders
from limiter.engine.granting import Granter
from limiter.engine.lender import Lender
from limiter.engine.operation import ASKS_MORE, IN_REQUESTS, Desk, Operation, Values
from limiter.engine.planner import Planner
from limiter.engine.repeating import Repeater
from limiter.engine.replays import replay
from limiter.engine.request_errors import (
    IdempotencyConflict,
    NotDecided,
    TooManyLimits,
    TooMuchAtOnce,
    Uncovered,
)
from limiter.engine.settler import Settler
from limiter.engine.shape import Shape, at_rate
from limiter.engine.store_health import StoreHealth
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, Refused, Settled, SettleRequest
from limiter.model.bucket.decision import REASON_OF, PlainRefusal, plain_refusal
from limiter.model.bucket.expiry import Expiries
from limiter.model.bucket.operations import LATE_US, AcquireAnswer, AcquireStatus, Verdict
from limiter.model.bucket.reservation import Keyring, Signer
from limiter.model.overload.retries import RetryMeters
from limiter.model.policy.criticality import NO_CLASSES, Criticality, class_of
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.uncovered import TEXT_KEPT_MAX, UncoveredTally
from limiter.model.tally import DecisionTally, SettleTally
from limiter.runtime.pauses import with_pauses
from limiter.runtime.told import WAITING_ROOM, Told
from limiter.store.buckets import BUCKETS_PER_OPERATION_MAX, Buckets
from limiter.store.call_layout import REPLY_SIZE, unpack_acquire
from limiter.store.clock import StoreClock
from limiter.store.flush import Asking
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
"""No bound for single requests: only batches are bounded in the buckets that they ask."""

Arrived = tuple[AcquireRequest, Any, str | None, Criticality | None]
"""A request, its place at the desk, its idempotency key, and the highest class it may have; None: any."""


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
        self.default_criticality = default_criticality
        self._refuse_uncovered = refuse_uncovered
        self._planner = Planner(PolicySet())
        self._changes = 0
        self.remainders = Remainders(buckets.clock, nodes)
        self._store_health = StoreHealth(on_recovery=self.remainders.hold)
        self.decisions = DecisionTally()
        self.settles = SettleTally()
        self.uncovered = UncoveredTally()
        self.expiries = Expiries()
        buckets.acquires.tell = self.tell
        self.repeater = Repeater(buckets.acquires, keep_s=repeat_s, deadline_s=deadline_s)
        self.retries: RetryMeters[Slot] = RetryMeters()
        self._granter = Granter(self._keyring, self.expiries, self.retries, late_us=late_us)
        self._fallback = Fallback(self._granter, self.remainders, nodes)
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
        """Ask the store for all requests of one turn; each is handed to the desk with its decision or its error.

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
                    operation.idempotency_key, operation.id = idempotency_key, self._granter.ids.next()
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
            decision = (
                self._granter.let_pass(operation, self._now_us()) if is_covered else self._uncovered_decision(operation)
            )
        except Uncovered as error:
            operation.finish(error)
        else:
            self.decisions.count(decision, dry_run=operation.request.dry_run)
            operation.finish(decision)

    def _goes_on(self, shape: Shape, now_s: float) -> bool:
        """True if the request has a quota whose balance in the store is not up to date, so that this node decides.

        After a single call without an answer the store is still asked, and grants are posted at once.
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
            self.decisions.work_admitted += self._granter.grant_plainly(granted, now_us)
            self.decisions.granted += len(granted)
            _hand_over(told)

    def _refuse_plainly(self, operation: Operation, values: Values, now_us: int) -> None:
        """Refuse by the only limit, a rate; the renderer writes the sentence."""
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
                return self._granter.let_pass(operation, self._now_us())
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
        return self._fallback.decide(operation, self._now_us())

    def _decide(self, operation: Operation, answer: AcquireAnswer) -> Decision:
        if answer.status is AcquireStatus.CONFLICT:
            raise IdempotencyConflict("this Idempotency-Key was used before with other parameters")
        if answer.status not in (_GRANTED, AcquireStatus.REFUSED):
            raise NotDecided("record_damaged", _DAMAGED if operation.idempotency is None else _DAMAGED_EITHER)
        if answer.memo:
            return replay(self._granter, operation, answer)
        wants = operation.wants(answer.now_us)
        self._fallback.hear(operation, wants, answer)
        if answer.granted:
            return self._granter.grant(operation, wants, answer.buckets, answer.now_us, is_new=True)
        refused = self._granter.refuse(operation, wants, answer.buckets, answer.now_us)
        self.repeater.hear(operation, answer.buckets, answer.now_us, refused, asyncio.get_running_loop().time())
        return refused

    def _uncovered_decision(self, operation: Operation) -> Granted:
        """Grant or refuse a request that no policy covers (P7)."""
        request = operation.request
        declared = self._planner.declares(request.namespace)
        self.decisions.uncovered[declared] += 1
        self.uncovered.count(request.namespace, request.descriptor, self._now_us(), declared=declared)
        if self._refuse_uncovered:
            raise Uncovered(_refused_uncovered(request.namespace, declared=declared))
        return self._granter.let_pass(operation, self._now_us(), covered=False)

    async def post(self) -> None:
        """Debit in the store what quotas granted without it (F-S14)."""
        if self.remainders.is_going:
            await self.remainders.post(self._buckets, self._planner)

    def _now_us(self) -> int:
        """The store's time, or this node's before the first reply."""
        return self._buckets.clock.guess_us()


_TOO_MUCH = "the operations before this one ask as many buckets as a batch may; send this one in another batch"
_DAMAGED = "the record of a bucket cannot be read; nothing was charged"
_DAMAGED_EITHER = (
    "the record of a bucket, or what was kept under this Idempotency-Key, cannot be read; nothing was charged"
)


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
