"""One acquire from its decoding to its answer, as one object; a plain grant needs no other.

begin   request, shape, class, names of buckets, what is asked of each
tell    either a plain grant (`values`, `charged`, `token`), or any other outcome: a decision, or an exception
answer  its desk receives it, together with all others that were concluded in the same turn
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from limiter.engine.shape import Shape, want
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted
from limiter.model.bucket.decision import PlainRefusal, limit_states
from limiter.model.bucket.learned import learn_id
from limiter.model.bucket.operations import TOO_LARGE, BucketAnswer, Idempotency, Lot, Verdict, Want
from limiter.model.bucket.refusals import Remembered
from limiter.model.overload.shedding import CLASS_NUMBERS
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.limit import Limit
from limiter.store.flush import DRAWN, DRY_RUN, FURTHER, IDEMPOTENT, LIVES, SECOND, WEIGHED, Asking, attempt_flag
from limiter.store.keys import Slot

if TYPE_CHECKING:
    from limiter.engine.decider import Decider

NO_LATENCY = float("nan")
ASKS_MORE = 255 & ~(SECOND | FURTHER)
"""Flags of an operation that asks for more than a plain decision; how often it was tried changes none."""

IN_REQUESTS = 4
"""Added to the verdict in the store's answer if the bucket counts requests now."""

Values = tuple[int, float, float, float, float]
"""The answer of one bucket: verdict and unit, balance, charge, rate, capacity."""

Row = tuple[str, float, float]
"""A bucket, its weight of work, and the latency (ms) that its policy expects."""


class Desk(Protocol):
    """Receives concluded operations, all of one turn together."""

    def answer(self, operations: Sequence[Operation]) -> None:
        """Give each operation its answer. An exception here would cost the others theirs."""


class Memo(msgspec.Struct, array_like=True):
    """The data that rebuilds an answer under its idempotency key; the store keeps it with the decision (F-R7)."""

    id: bytes
    ttl_ms: int
    expected_ms: float
    rows: list[Row]
    draw: float | None = None
    counting: tuple[int, ...] = ()
    """Numbers of the rows whose limit counts requests while their bucket does not (W16)."""
    learn_ids: tuple[int, ...] = ()
    """Of the values of `learn_by`, a number per row, if any row has one (W15)."""


class Operation(Asking):
    """One acquire: the request, its limits, what is asked of the store, and the outcome."""

    __slots__ = (
        "charged", "criticality", "decider", "desk", "id", "idempotency_key", "is_dated", "limits", "now_us",
        "outcome", "place", "remembered", "request", "shape", "slot", "token", "values",
    )  # fmt: skip

    id: bytes
    values: Sequence[Values]
    charged: float
    token: bytes
    now_us: int

    def __init__(
        self,
        decider: Decider,
        request: AcquireRequest,
        desk: Desk,
        place: Any,
        slot: Slot,
        shape: Shape,
        criticality: Criticality,
        deadline_s: float,
    ) -> None:
        self.decider = decider
        self.request = request
        self.desk = desk
        self.place = place
        """The desk's name for the caller."""
        self.slot = slot
        self.shape = shape
        self.limits: Sequence[Limit] = shape
        """The limits that are asked; after a damaged record all but those in shadow."""
        self.criticality = criticality
        self.deadline_s = deadline_s
        self.is_over = self.is_sent = self.is_dated = False
        self.requests = 1.0
        self.flags = DRY_RUN if request.dry_run else 0
        if request.attempt > 1:
            self.flags |= attempt_flag(request.attempt)
        self.lot: Lot | None = None
        self.idempotency: Idempotency | None = None
        self.idempotency_key: str | None = None
        self.remembered: Remembered[Slot] | None = None
        """The refusal that it repeats word for word, if the store was not asked."""
        self.outcome: Decision | PlainRefusal | Exception | None = None
        """None for a plain grant, whose answer is in `values`, `charged`, `token` and `now_us`."""

    @property
    def refuses_plainly(self) -> bool:
        """True if a refusal says no more than what is left and when there will be enough."""
        return not self.flags & ASKS_MORE and self.shape.grants_alike and not self.asks[0][0] & TOO_LARGE

    def ask_again(self, now_us: int) -> None:
        """Compute again what to ask of the store: for another time of the store, or of fewer buckets."""
        self.ask_for(self.wants(now_us))
        if self.idempotency_key is not None:
            self.ask_once()

    def draw(self, draw: float, *, of_session: bool = False) -> None:
        """Give the request its chance with overload control (Q4), and say how soon it expects its answer (Q13).

        A session's chance is its own, whatever its requests expect (S13).
        """
        request, shedding = self.request, next((limit for limit in self.limits if limit.sheds), None)
        expected_ms = NO_LATENCY
        if of_session:
            expected_ms = -math.inf
        elif shedding is not None:
            expected_ms = shedding.expected_ms(request.expected_latency_ms, request.descriptor, self.criticality)
        self.lot = Lot(CLASS_NUMBERS[self.criticality], draw, expected_ms)
        self.flags |= DRAWN

    def live(self) -> None:
        """Say how long the reservation lives, where that decides for how long it may be in flight (W18)."""
        self.ttl_us = self.request.ttl_ms * 1000.0
        self.flags |= LIVES

    def weigh(self) -> None:
        """Count as several requests, or less than one, where a cap has weights (W16)."""
        descriptor = self.request.descriptor
        self.weights = [limit.weight(descriptor) if limit.weighs_requests else 1.0 for limit in self.limits]
        is_unsaid = self.request.work is None
        self.learn_ids = [self.learn_id(limit) for limit in self.limits if limit.learn_by and is_unsaid]
        self.flags |= WEIGHED

    def ask_once(self) -> None:
        """Add the idempotency key and the data that rebuilds the answer. A dry run decides nothing to repeat."""
        assert self.idempotency_key is not None
        if self.request.dry_run:
            return
        drawn = None if self.lot is None else self.lot.draw
        counting = tuple(number for number, limit in enumerate(self.limits) if limit.counts)
        learn_ids = tuple(self.learn_id(limit) for limit in self.limits)
        learn_ids = learn_ids if any(learn_ids) else ()
        memo = Memo(self.id, self.request.ttl_ms, self.expected_ms, self.weighed(), drawn, counting, learn_ids)
        self.idempotency = Idempotency(self.idempotency_key, _fingerprint(self.request), msgspec.msgpack.encode(memo))
        self.flags |= IDEMPOTENT

    @property
    def expected_ms(self) -> float:
        """The latency that the request itself expects; NaN if it does not say."""
        expected_ms = self.request.expected_latency_ms
        return NO_LATENCY if expected_ms is None else expected_ms

    def wants(self, now_us: int) -> tuple[Want, ...]:
        """Return what it asks of each bucket, as values: for decisions without the store, and for refusals."""
        request = self.request
        return tuple([want(limit, request.descriptor, request.work, self.criticality, now_us) for limit in self.limits])

    def weighed(self) -> list[Row]:
        """Return what a settle will need to know of each bucket."""
        descriptor = self.request.descriptor
        return [
            (bucket, limit.weight(descriptor) if limit.weights else 1.0, self.expected_of(limit))
            for bucket, limit in zip(self.buckets, self.limits, strict=True)
        ]

    def learn_id(self, limit: Limit) -> int:
        """Return the id of the request's values of `learn_by`; 0 without any (W15)."""
        return learn_id(limit.learn_by, self.request.descriptor) if limit.learn_by else 0

    def expected_of(self, limit: Limit) -> float:
        """Latency (ms) that a policy expects; NaN if it is the one that the request states, or there is none (Q1)."""
        if limit.expectations is None:
            return NO_LATENCY
        requested_ms = self.request.expected_latency_ms
        expected_ms = limit.expected_ms(requested_ms, self.request.descriptor, self.criticality)
        return NO_LATENCY if expected_ms == requested_ms else expected_ms

    def tell(self, answer: Any) -> None:
        """Receive the store's answer, or the exception without one."""
        if not self.is_over:
            self.decider.conclude(self, answer)
            if self.is_over:
                self.desk.answer((self,))

    def finish(self, outcome: Decision | Exception) -> None:
        """End it with a decision or an exception, and hand it to its desk."""
        self.is_over = True
        self.outcome = outcome
        self.desk.answer((self,))

    def decision(self) -> Decision:
        """Return the outcome as a value, or raise it."""
        outcome = self.outcome
        if outcome is None:
            return self._granted()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome.refused() if isinstance(outcome, PlainRefusal) else outcome

    def _granted(self) -> Granted:
        now_us = self.now_us
        wants = self.wants(now_us)
        states = limit_states(self.limits, wants, self.answers(), self.requests, now_us)
        return Granted(self.token.decode(), self.charged, self.request.ttl_ms, states)

    def answers(self) -> list[BucketAnswer]:
        """Return the buckets' answers to a plain grant, as values."""
        return [
            BucketAnswer(Verdict.DEBITED, balance, charge, rate, capacity, code >= IN_REQUESTS)
            for code, balance, charge, rate, capacity in self.values
        ]


def _fingerprint(request: AcquireRequest) -> bytes:
    """Return a digest of the request, to recognise another one under the same idempotency key; without `attempt`."""
    parts = (
        request.namespace, sorted(request.descriptor.items()), request.work, request.criticality,
        request.expected_latency_ms, request.ttl_ms,
        False,  # a field that is gone: a retry may reach an older node, which still includes it
    )  # fmt: skip
    return blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
