"""Acquire and settle: descriptor → limits → buckets → decision, within a deadline, whatever the store does.

Where the store cannot answer, each policy says what holds (B3): `closed` refuses to decide, `open` lets pass, and
`local` asks a bucket in this node that holds its share of the limit. What was let pass without the store is not
charged there; its settle debits the whole of its work, once the store is back. A quota goes on from what this node
knows to be left of it (`known`, `limiter.engine.remainders`); what it grants of that is debited once the store is
back.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

from limiter.engine.errors import (
    IdempotencyConflict,
    NotDecided,
    TooManyLimits,
    Uncovered,
)
from limiter.engine.local import LocalBuckets
from limiter.engine.planner import Planner, want
from limiter.engine.remainders import Remainders
from limiter.engine.settler import NO_LATENCY, Settler
from limiter.engine.standing import Standing
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, Refused, Settled, SettleRequest
from limiter.model.bucket.decision import limit_states, pressure, refusal
from limiter.model.bucket.expiry import Expiries
from limiter.model.bucket.operations import (
    LATE_US,
    Acquire,
    AcquireAnswer,
    AcquireStatus,
    BucketAnswer,
    Charge,
    Idempotency,
    Lot,
    Verdict,
    Want,
)
from limiter.model.bucket.reservation import ID_SIZE, Keyring, Reservation, Signer
from limiter.model.overload.shedding import CLASS_NUMBERS
from limiter.model.policy.choices import OnStoreFailure
from limiter.model.policy.criticality import NO_CLASSES, Criticality, class_of
from limiter.model.policy.limit import Limit
from limiter.model.policy.policy_set import PolicySet
from limiter.model.policy.uncovered import TEXT_KEPT_MAX, UncoveredTally
from limiter.model.tally import DecisionTally, SettleTally
from limiter.runtime.pauses import with_pauses
from limiter.runtime.told import Done, Told
from limiter.store.batcher import Waiting
from limiter.store.buckets import BUCKETS_PER_OPERATION_MAX, Buckets
from limiter.store.errors import StoreShunned, StoreUnavailable
from limiter.store.ids import RandomIds
from limiter.store.keys import Slot

_DEBITED = Verdict.DEBITED
_GRANTED = AcquireStatus.GRANTED

Asked = tuple[AcquireRequest, Done[Decision], str | None, Criticality | None]
"""A request, whom to tell, its idempotency key, and the highest class it may have; None: any."""
_Row = tuple[str, float, float]
"""A bucket, how it weighs work, and how soon (ms) its policy expects an answer."""


class _Memo(msgspec.Struct, array_like=True):
    """What rebuilds an answer under its idempotency key: kept in the store beside the decision (F-R7)."""

    id: bytes
    ttl_ms: int
    expected_ms: float
    rows: list[_Row]
    draw: float | None = None
    counting: tuple[int, ...] = ()
    """The rows whose limit counts requests in a bucket that does not know of it (W16)."""


class _Case(Waiting[Acquire, AcquireAnswer]):
    """One acquire on its way: the request, what covers it, what was asked of the store, and whom to tell."""

    __slots__ = (
        "criticality", "decider", "done", "id", "idempotency_key", "is_dated", "limits", "lot", "request", "slot",
    )  # fmt: skip

    requests = 1.0

    def __init__(
        self,
        decider: Decider,
        request: AcquireRequest,
        slot: Slot,
        limits: Sequence[Limit],
        id_: bytes,
        done: Done[Decision],
        idempotency_key: str | None,
        deadline_s: float,
    ) -> None:
        self.decider = decider
        self.done = done
        self.idempotency_key = idempotency_key
        self.deadline_s = deadline_s
        self.is_dated = self.is_over = self.is_sent = False
        self.request = request
        self.slot = slot
        self.limits = limits
        self.criticality = request.criticality or decider.default_criticality
        self.id = id_
        self.lot: Lot | None = None

    @property
    def expected_ms(self) -> float:
        """How soon the request itself expects its answer; NaN where it does not say."""
        expected_ms = self.request.expected_latency_ms
        return NO_LATENCY if expected_ms is None else expected_ms

    def draw(self, draw: float) -> None:
        """Give the request its chance with overload control (Q4)."""
        self.lot = Lot(CLASS_NUMBERS[self.criticality], draw)

    def plan(self, now_us: int) -> Acquire:
        """What to ask of the store, at a time of the store's."""
        asked, request = self.wants(now_us), self.request
        if self.idempotency_key is None or request.dry_run:
            self.operation = Acquire(asked, self.requests, request.dry_run, None, self.lot)
        else:
            drawn = None if self.lot is None else self.lot.draw
            counting = tuple(number for number, limit in enumerate(self.limits) if limit.counts)
            memo = _Memo(self.id, request.ttl_ms, self.expected_ms, self.rows(asked), drawn, counting)
            once = Idempotency(self.idempotency_key, _fingerprint(request), msgspec.msgpack.encode(memo))
            self.operation = Acquire(asked, self.requests, False, once, self.lot)
        return self.operation

    def tell_uncovered(self, *, is_covered: bool) -> None:
        """No policy has a limit for it, or none speaks of it at all: the store has no part in it."""
        try:
            decision = self.decider.let_pass(self) if is_covered else self.decider.uncovered_decision(self)
        except Uncovered as error:
            self.done(error)
        else:
            self.decider.decisions.count(decision, dry_run=self.request.dry_run)
            self.done(decision)

    def tell(self, answer: AcquireAnswer | Exception) -> None:
        """The store has spoken, or has not in time."""
        if self.is_over:
            return
        self.is_over = True
        try:
            decision = self.decider.conclude(self, answer)
        except NotDecided as undecided:
            self.decider.decisions.undecided[undecided.reason] += 1
            self.done(undecided)
        except Exception as error:
            self.is_over = True  # even where it was to be asked again
            self.done(error)
        else:
            if decision is not None:
                self.decider.decisions.count(decision, dry_run=self.request.dry_run)
                self.done(decision)

    def wants(self, now_us: int) -> tuple[Want, ...]:
        """What it asks of each bucket, at a time of the store's."""
        request, criticality = self.request, self.criticality
        descriptor, work, limits = request.descriptor, request.work, self.limits
        if len(limits) == 1:  # by far the most, and for one a list is dear
            return (want(limits[0], descriptor, work, criticality, now_us),)
        return tuple([want(limit, descriptor, work, criticality, now_us) for limit in limits])

    def rows(self, wants: Sequence[Want]) -> list[_Row]:
        """What a settle will have to know of each bucket."""
        descriptor = self.request.descriptor
        return [
            (want.bucket, limit.weight(descriptor) if limit.weights else 1.0, self.expected_of(limit))
            for want, limit in zip(wants, self.limits, strict=True)
        ]

    def expected_of(self, limit: Limit) -> float:
        """How soon (ms) a policy expects the answer; NaN where the request said so itself, or nobody does (Q1)."""
        if limit.expectations is None or self.request.expected_latency_ms is not None:
            return NO_LATENCY
        return limit.default_expected_ms(self.request.descriptor)


class Decider:
    """Decides for one node. Holds nothing that matters: kill it at any time."""

    def __init__(
        self,
        buckets: Buckets,
        signer: Signer,
        *,
        deadline_s: float = 0.1,
        late_us: int = LATE_US,
        default_criticality: Criticality = Criticality.CRITICAL,
        refuse_uncovered: bool = False,
        nodes: Callable[[], int] = lambda: 1,
    ) -> None:
        self._buckets = buckets
        self._keyring = Keyring(signer)
        self._deadline_s = deadline_s
        self._late_us = late_us
        self.default_criticality = default_criticality
        self._refuse_uncovered = refuse_uncovered
        self._planner = Planner(PolicySet())
        self._changes = 0
        self.remainders = Remainders(buckets.clock, nodes)
        self._standing = Standing(on_recovery=self.remainders.hold)
        self._local = LocalBuckets(nodes, self.remainders)
        self._ids = RandomIds(ID_SIZE)
        self.decisions = DecisionTally()
        self.settles = SettleTally()
        self.uncovered = UncoveredTally()
        self.expiries = Expiries()
        self._settler = Settler(
            buckets,
            self._keyring,
            self._standing,
            self.settles,
            self.expiries,
            self.remainders,
            deadline_s=deadline_s,
        )

    @property
    def policies(self) -> PolicySet:
        """What is in force."""
        return self._planner.policies

    def enforce(self, policies: PolicySet) -> None:
        """Let other policies be in force from the next request on (W9)."""
        self._changes += 1
        self._planner = self._settler.planner = Planner(policies)

    async def enforce_with_pauses(self, policies: PolicySet) -> None:
        """The same while requests go on: they see the old policies until the new ones are ready, then only those."""
        self._changes = change = self._changes + 1
        planner = await with_pauses(Planner.steps(policies, self._planner))
        if change == self._changes:  # what came meanwhile is newer
            self._planner = self._settler.planner = planner

    @property
    def planner(self) -> Planner:
        """Which limits there are, and where their buckets live."""
        return self._planner

    def sign_with(self, signer: Signer) -> None:
        """Sign with another secret from now on; what was signed before is still known."""
        self._keyring.sign_with(signer)

    @property
    def store_is_shunned(self) -> bool:
        """Whether the store failed so often that it is only probed now and then."""
        return self._standing.breaker.is_open

    def store_answered(self) -> None:
        """Somebody else has heard from the store."""
        self._standing.answered()

    async def acquire(self, request: AcquireRequest, *, idempotency_key: str | None = None) -> Decision:
        """May this request go ahead? IdempotencyConflict or NotDecided if that cannot be said."""
        told: Told[Decision] = Told()
        self.start_acquire(request, told, idempotency_key=idempotency_key)
        return await told.future

    def start_acquire(
        self, request: AcquireRequest, done: Done[Decision], *, idempotency_key: str | None = None
    ) -> None:
        """The same without a coroutine: `done` is told the decision, or why there is none."""
        self.start_acquires([(request, done, idempotency_key, None)])

    def start_acquires(self, asked: Iterable[Asked]) -> None:
        """The same for many at once."""
        now_s, now_us = time.monotonic(), self._now_us()
        deadline_s = asyncio.get_running_loop().time() + self._deadline_s
        going: dict[Slot, list[_Case]] = {}
        slot, cases = None, []
        for request, done, idempotency_key, highest in asked:
            try:
                case = self._case(request, done, idempotency_key, highest, now_s, deadline_s)
                if case is not None:
                    case.plan(now_us)
                    if case.slot is not slot:
                        slot = case.slot
                        cases = going.setdefault(slot, [])
                    cases.append(case)
            except Exception as error:  # what is wrong with one must not cost the others their answers
                done(error)
        for slot, cases in going.items():
            self._buckets.start_acquires(slot, cases, deadline_s=deadline_s)

    def _case(
        self,
        request: AcquireRequest,
        done: Done[Decision],
        idempotency_key: str | None,
        highest: Criticality | None,
        now_s: float,
        deadline_s: float,
    ) -> _Case | None:
        """What is to be asked of the store; None if it has no part in it, and the answer is given."""
        slot, limits = self._planner.cover(request.namespace, request.descriptor)
        if limits.denied_by is not None:
            self._deny(request, limits.denied_by, done)
            return None
        case = _Case(self, request, slot, limits, self._ids.next(), done, idempotency_key, deadline_s)
        if limits.classes is not None or highest is not None:
            case.criticality = class_of(
                request.criticality, request.descriptor, limits.classes or NO_CLASSES,
                default=self.default_criticality, highest=highest,
            )  # fmt: skip
        for limit in limits:
            limit.retries.count(request.attempt, now_s)
            if limit.sheds and case.lot is None:
                case.draw(random.random())  # noqa: S311
        if limits.denied_in_shadow and not request.dry_run:
            self.decisions.denied_in_shadow += 1
        if not limits:
            case.tell_uncovered(is_covered=limits.denied_in_shadow)
        elif len(limits) > BUCKETS_PER_OPERATION_MAX:
            done(TooManyLimits(_too_many(len(limits))))
        elif self.remainders.is_going and self._goes_on(case, now_s):
            case.tell(StoreShunned("the quota goes on in this node until the store knows what was granted of it"))
        elif not self._standing.breaker.is_open or self._standing.allows(now_s):
            return case
        else:
            case.tell(StoreShunned("the store is given a rest"))
        return None

    def _deny(self, request: AcquireRequest, policy: str, done: Done[Decision]) -> None:
        """W17: refused for good, and nothing is consumed anywhere."""
        detail = f"{policy} denies whatever it covers"
        refused = Refused(policy, "denied", retry="never", retry_after_ms=0, limits=(), detail=detail)
        self.decisions.count(refused, dry_run=request.dry_run)
        done(refused)

    def _goes_on(self, case: _Case, now_s: float) -> bool:
        """Whether a quota of the request must not be asked of the store: its balance there is not the truth yet.

        After a single call without an answer it is: others go on with the store, and what is owed is posted at once.
        """
        if not (self._standing.breaker.is_open or self.remainders.is_held(now_s)):
            return False
        return any(limit.is_known for limit in case.limits)

    def _ask_again(self, case: _Case) -> None:
        """For what was asked of the wrong buckets, or for the wrong time."""
        case.is_over = False
        self._buckets.start_acquire(case.slot, case.plan, case.tell, deadline_s=case.deadline_s)

    def conclude(self, case: _Case, answer: AcquireAnswer | Exception) -> Decision | None:
        """What the store's answer means; None if it has to be asked once more."""
        if type(answer) is not AcquireAnswer:
            assert isinstance(answer, Exception)
            return self._unanswered(case, answer)
        self._standing.answered()
        status = answer.status
        if status is _GRANTED and not answer.memo:
            return self._grant(case, case.operation.wants, answer.buckets, answer.now_us, is_new=True)
        if status is AcquireStatus.WINDOW and not case.is_dated:
            case.is_dated = True  # the clock has heard the right time by now
            self._ask_again(case)
            return None
        if status is AcquireStatus.CORRUPT and any(limit.shadow for limit in case.limits):
            # A shadow refuses nothing, not even by a damaged record (P11, F-S11).
            case.limits = [limit for limit in case.limits if not limit.shadow]
            if not case.limits:
                return self.let_pass(case)
            self._ask_again(case)
            return None
        return self._decide(case, case.operation.wants, answer)

    def _unanswered(self, case: _Case, error: Exception) -> Decision:
        if not isinstance(error, StoreUnavailable):
            raise error
        self.decisions.unanswered[self._standing.unanswered(error)] += 1
        return self._without_store(case)

    def _decide(self, case: _Case, wants: tuple[Want, ...], answer: AcquireAnswer) -> Decision:
        if answer.status is AcquireStatus.CONFLICT:
            raise IdempotencyConflict("this Idempotency-Key was used before with other parameters")
        if answer.status not in (_GRANTED, AcquireStatus.REFUSED):
            raise NotDecided("record_damaged", _DAMAGED if case.operation.idempotency is None else _DAMAGED_EITHER)
        if answer.memo:
            return self._replay(case, wants, answer)
        for limit, wanted, told in zip(case.limits, wants, answer.buckets, strict=True):
            if limit.is_known:
                self.remainders.hear(case.slot, wanted.bucket, wanted.params, told.balance, answer.now_us, 0.0)
        return self._refuse(case, wants, answer.buckets, answer.now_us)

    def _refuse(
        self,
        case: _Case,
        wants: Sequence[Want],
        answers: Sequence[BucketAnswer],
        now_us: int,
        *,
        degraded: bool = False,
    ) -> Refused:
        return refusal(
            case.limits, wants, answers, requests=case.requests, now_us=now_us, degraded=degraded, lot=case.lot
        )

    def _grant(
        self,
        case: _Case,
        wants: Sequence[Want],
        answers: Sequence[BucketAnswer],
        now_us: int,
        *,
        degraded: bool = False,
        is_new: bool = False,
    ) -> Granted:
        request = case.request
        heard_us = now_us if is_new and not degraded else 0
        charges = _charges(case, wants, answers, degraded=degraded, heard_us=heard_us)
        if is_new and not request.dry_run:
            self._expect_settle(case, answers, now_us)
        return Granted(
            "" if request.dry_run else self._sign(case, charges, now_us),
            _charged(case, wants, answers),
            request.ttl_ms,
            limit_states(case.limits, wants, answers, case.requests, now_us, case.lot),
            *(_NO_PRESSURE if case.lot is None else _told(case.limits, answers)),
            degraded,
        )

    def _expect_settle(self, case: _Case, answers: Sequence[BucketAnswer], now_us: int) -> None:
        """Count the reservation, to know one day whether it was settled (W14)."""
        life_us = case.request.ttl_ms * 1000 + self._late_us
        over_us = now_us + life_us
        for number, answer in enumerate(answers):
            if answer.verdict is _DEBITED:
                self.expiries.granted(case.limits[number].key, over_us, life_us)

    def _replay(self, case: _Case, wants: Sequence[Want], answer: AcquireAnswer) -> Decision:
        """The first answer under an idempotency key, whatever has changed since."""
        try:
            memo = msgspec.msgpack.decode(answer.memo, type=_Memo)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise NotDecided("record_damaged", _DAMAGED_MEMO) from None
        if len(memo.rows) != len(answer.buckets) or len(memo.id) != ID_SIZE:
            raise NotDecided("record_damaged", _DAMAGED_MEMO)
        first = _Case(self, case.request, case.slot, case.limits, memo.id, case.done, None, case.deadline_s)
        first.criticality = case.criticality
        if memo.draw is not None:
            first.draw(memo.draw)
        if [bucket for bucket, *_ in memo.rows] != [want.bucket for want in wants]:
            # The policies are other ones now: what was charged still stands, their states cannot be told.
            return self._replay_without_limits(first, memo, answer)
        if answer.granted:
            granted = self._grant(first, wants, answer.buckets, answer.now_us)
            return msgspec.structs.replace(granted, replayed=True)
        refused = self._refuse(first, wants, answer.buckets, answer.now_us)
        return msgspec.structs.replace(refused, replayed=True)

    def _replay_without_limits(self, case: _Case, memo: _Memo, answer: AcquireAnswer) -> Decision:
        if not answer.granted:
            return Refused(
                policy="", reason="work", retry="after", retry_after_ms=1, limits=(), replayed=True,
                detail="refused before under this Idempotency-Key, by policies that have changed since",
            )  # fmt: skip
        rows = zip(memo.rows, answer.buckets, strict=True)
        charges = tuple(
            Charge(bucket, answered.charge, weight, None, answered.in_requests or number in memo.counting, expected_ms)
            for number, ((bucket, weight, expected_ms), answered) in enumerate(rows)
            if answered.verdict is _DEBITED
        )
        return Granted(
            reservation=self._sign(case, charges, answer.now_us),
            charged=max((charge.charge for charge in charges if not charge.in_requests), default=0.0),
            expires_in_ms=memo.ttl_ms,
            limits=(),
            replayed=True,
        )

    def _sign(self, case: _Case, charges: tuple[Charge, ...], now_us: int) -> str:
        namespace, partition = case.slot
        deadline_us = now_us + case.request.ttl_ms * 1000
        return self._keyring.sign(
            Reservation(
                case.id,
                namespace,
                partition,
                now_us,
                deadline_us,
                case.expected_ms,
                charges,
                0 if case.lot is None else case.lot.class_number,
                self._late_us,
            )
        )

    def uncovered_decision(self, case: _Case) -> Granted:
        """P7: no policy speaks of it."""
        namespace = case.request.namespace
        declared = self._planner.declares(namespace)
        self.decisions.uncovered[declared] += 1
        self.uncovered.count(namespace, case.request.descriptor, self._now_us(), declared=declared)
        if self._refuse_uncovered:
            raise Uncovered(_refused_uncovered(namespace, declared=declared))
        return self.let_pass(case, covered=False)

    def let_pass(self, case: _Case, *, covered: bool = True) -> Granted:
        """Grant without charging anything."""
        return Granted(
            reservation="" if case.request.dry_run else self._sign(case, (), self._now_us()),
            charged=0.0,
            expires_in_ms=case.request.ttl_ms,
            limits=(),
            covered=covered,
        )

    def _without_store(self, case: _Case) -> Decision:
        """What the policies say for when the store cannot be asked."""
        now_us = self._now_us()
        wants = case.wants(now_us)
        for limit, wanted in zip(case.limits, wants, strict=True):
            if limit.on_store_failure is OnStoreFailure.CLOSED and not limit.shadow:
                detail = f"the store cannot be asked, and {limit.name} admits nothing without it"
                raise NotDecided("store_unavailable", detail, policy=limit.name)
            if limit.is_known and not self.remainders.begin(case.slot, wanted, now_us) and not limit.shadow:
                detail = f"the store cannot be asked, and this node does not know what is left of {limit.name}"
                raise NotDecided("store_unavailable", detail, policy=limit.name)
        answers = self._local.acquire(case.slot, case.limits, wants, now_us=now_us, dry_run=case.request.dry_run)
        if any(
            answer.verdict >= Verdict.BLOCKED and not limit.shadow
            for answer, limit in zip(answers, case.limits, strict=True)
        ):
            return self._refuse(case, wants, answers, now_us, degraded=True)
        return self._grant(case, wants, answers, now_us, degraded=True, is_new=True)

    async def post(self) -> None:
        """Have the store debit what quotas granted without it (F-S14)."""
        if self.remainders.is_going:
            await self.remainders.post(self._buckets, self._planner)

    async def settle(self, request: SettleRequest, *, namespace: str | None = None) -> Settled:
        """Correct what was charged. `namespace`: the only one whose reservations the caller may settle."""
        told: Told[Settled] = Told()
        self.start_settle(request, told, namespace=namespace)
        return await told.future

    def start_settle(self, request: SettleRequest, done: Done[Settled], *, namespace: str | None = None) -> None:
        """The same without a coroutine: `done` is told what came of it, or why nothing did."""
        self._settler.start(request, done, namespace=namespace)

    def _now_us(self) -> int:
        """The store's time as far as it is known."""
        return self._buckets.clock.guess_us()


_NO_PRESSURE = (False, 1.0)
_DAMAGED = "the record of a bucket cannot be read; nothing was charged"
_DAMAGED_EITHER = (
    "the record of a bucket, or what was kept under this Idempotency-Key, cannot be read; nothing was charged"
)
_DAMAGED_MEMO = "what was kept under this Idempotency-Key cannot be read; nothing was charged, use another key"


def _told(limits: Sequence[Limit], answers: Sequence[BucketAnswer]) -> tuple[bool, float]:
    """Whether callers should slow down, and how good their answers should be."""
    told = pressure(limits, answers)
    return told.overloaded, told.quality


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


def _charges(
    case: _Case, wants: Sequence[Want], answers: Sequence[BucketAnswer], *, degraded: bool, heard_us: int
) -> tuple[Charge, ...]:
    """What a reservation took: nothing from the store where the store was not asked, unless it will be told (F-S14).

    `heard_us`: when the store told these balances; 0 if it did not, or told them before.
    """
    descriptor = case.request.descriptor
    charges = []
    for limit, wanted, answer in zip(case.limits, wants, answers, strict=True):
        if limit.is_known and heard_us:
            own = answer.charge if answer.verdict is _DEBITED else 0.0
            case.decider.remainders.hear(case.slot, wanted.bucket, wanted.params, answer.balance, heard_us, own)
        if answer.verdict is _DEBITED:
            weight = limit.weight(descriptor) if limit.weights else 1.0
            charge = 0.0 if degraded and not limit.is_known else answer.charge
            expected_ms = NO_LATENCY if limit.expectations is None else case.expected_of(limit)
            # A request's token was the price, whatever its work: a settle corrects nothing (W16).
            in_requests = answer.in_requests or limit.counts
            made = Charge(wanted.bucket, charge, weight, None, in_requests, expected_ms)
            if charge < wanted.charge and not (in_requests or degraded):
                made = made.but(uncollected=_lost(case, wanted, answer))
            charges.append(made)
    return tuple(charges)


def _charged(case: _Case, wants: Sequence[Want], answers: Sequence[BucketAnswer]) -> float:
    """In the caller's units: what the limit took that could collect least, where all could the most expensive one."""
    limit = case.limits[0]
    if len(answers) == 1 and not (limit.weights or limit.counts or limit.shadow or answers[0].in_requests):
        return answers[0].charge  # by far the most
    taken = [
        (_lost(case, wanted, answer) / (weight or 1.0), answer.charge / (weight or 1.0))
        for limit, (_, weight, _), wanted, answer in zip(case.limits, case.rows(wants), wants, answers, strict=True)
        if not (answer.in_requests or limit.counts or limit.shadow)
    ]
    return max(taken, default=(0.0, 0.0))[1]


def _lost(case: _Case, wanted: Want, answer: BucketAnswer) -> float:
    """What of a charge the bucket could not pay; what was learned is never more than it can."""
    if answer.charge >= wanted.charge or answer.verdict is not _DEBITED or wanted.how:
        return 0.0
    return wanted.charge - answer.charge


def _fingerprint(request: AcquireRequest) -> bytes:
    """What tells this request from others under the same idempotency key; not how often it was tried."""
    parts = (
        request.namespace, sorted(request.descriptor.items()), request.work, request.criticality,
        request.expected_latency_ms, request.ttl_ms,
        False,  # where an older node put a field that is gone: a retry may reach a node of either kind
    )  # fmt: skip
    return blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
