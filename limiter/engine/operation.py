"""One acquire on its way, from its decoding to its answer: one object, and no other on the way of a plain grant.

begin   request, shape, class, names of buckets, what is asked of each
tell    either a plain grant (`values`, `charged`, `token`), or any other outcome: a decision, or an exception
answer  its desk is handed it, together with all others that were told in the same turn
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from limiter.engine.shape import Shape, want
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted
from limiter.model.bucket.decision import PlainRefusal, limit_states
from limiter.model.bucket.operations import TOO_LARGE, BucketAnswer, Idempotency, Lot, Verdict, Want
from limiter.model.bucket.refusals import Remembered
from limiter.model.overload.shedding import CLASS_NUMBERS
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.limit import Limit
from limiter.store.flush import DRAWN, DRY_RUN, IDEMPOTENT, WEIGHED, Asking
from limiter.store.keys import Slot

if TYPE_CHECKING:
    from limiter.engine.decider import Decider

NO_LATENCY = float("nan")
IN_REQUESTS = 4
"""Added to a verdict in the store's answer: the bucket counts requests now."""

Values = tuple[int, float, float, float, float]
"""What one bucket said: verdict and unit, balance, charge, rate, capacity."""

Row = tuple[str, float, float]
"""A bucket, how it weighs work, and how soon (ms) its policy expects an answer."""


class Desk(Protocol):
    """Where operations go once they are told: all of one turn together."""

    def answer(self, operations: Sequence[Operation]) -> None:
        """Hand each its answer. An exception here would cost the others theirs."""


class Memo(msgspec.Struct, array_like=True):
    """What rebuilds an answer under its idempotency key: kept in the store beside the decision (F-R7)."""

    id: bytes
    ttl_ms: int
    expected_ms: float
    rows: list[Row]
    draw: float | None = None
    counting: tuple[int, ...] = ()
    """The rows whose limit counts requests in a bucket that does not know of it (W16)."""


class Operation(Asking):
    """One acquire: the request, what covers it, what is asked of the store, and what came of it."""

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
        """Whose answer it is, as its desk knows it."""
        self.slot = slot
        self.shape = shape
        self.limits: Sequence[Limit] = shape
        """Those that are asked: of a damaged record all but the shadows."""
        self.criticality = criticality
        self.deadline_s = deadline_s
        self.is_over = self.is_sent = self.is_dated = False
        self.requests = 1.0
        self.flags = DRY_RUN if request.dry_run else 0
        self.lot: Lot | None = None
        self.idempotency: Idempotency | None = None
        self.idempotency_key: str | None = None
        self.remembered: Remembered[Slot] | None = None
        """The refusal that it repeats word for word, if it was not asked of the store."""
        self.outcome: Decision | PlainRefusal | Exception | None = None
        """None of a plain grant, whose answer is in `values`, `charged`, `token` and `now_us`."""

    @property
    def refuses_plainly(self) -> bool:
        """Whether a refusal says no more than what is left and when there will be enough."""
        return not self.flags and self.shape.grants_alike and not self.asks[0][0] & TOO_LARGE

    def ask_again(self, now_us: int) -> None:
        """Find anew what to ask of the store: for another time of the store's, or of fewer buckets."""
        self.ask_for(self.wants(now_us))
        if self.idempotency_key is not None:
            self.ask_once()

    def draw(self, draw: float) -> None:
        """Give the request its chance with overload control (Q4)."""
        self.lot = Lot(CLASS_NUMBERS[self.criticality], draw)
        self.flags |= DRAWN

    def weigh(self) -> None:
        """Let it count as several requests, or less than one, where a cap of requests says so (W16)."""
        descriptor = self.request.descriptor
        self.weights = [limit.weight(descriptor) if limit.weighs_requests else 1.0 for limit in self.limits]
        self.flags |= WEIGHED

    def ask_once(self) -> None:
        """Under an idempotency key: with what rebuilds the answer. A dry run decides nothing that could be repeated."""
        assert self.idempotency_key is not None
        if self.request.dry_run:
            return
        drawn = None if self.lot is None else self.lot.draw
        counting = tuple(number for number, limit in enumerate(self.limits) if limit.counts)
        memo = Memo(self.id, self.request.ttl_ms, self.expected_ms, self.weighed(), drawn, counting)
        self.idempotency = Idempotency(self.idempotency_key, _fingerprint(self.request), msgspec.msgpack.encode(memo))
        self.flags |= IDEMPOTENT

    @property
    def expected_ms(self) -> float:
        """How soon the request itself expects its answer; NaN where it does not say."""
        expected_ms = self.request.expected_latency_ms
        return NO_LATENCY if expected_ms is None else expected_ms

    def wants(self, now_us: int) -> tuple[Want, ...]:
        """What it asks of each bucket, as values: for the way without the store, and to say why not."""
        request = self.request
        return tuple([want(limit, request.descriptor, request.work, self.criticality, now_us) for limit in self.limits])

    def weighed(self) -> list[Row]:
        """What a settle will have to know of each bucket."""
        descriptor = self.request.descriptor
        return [
            (bucket, limit.weight(descriptor) if limit.weights else 1.0, self.expected_of(limit))
            for bucket, limit in zip(self.buckets, self.limits, strict=True)
        ]

    def expected_of(self, limit: Limit) -> float:
        """How soon (ms) a policy expects the answer; NaN where the request said so itself, or nobody does (Q1)."""
        if limit.expectations is None or self.request.expected_latency_ms is not None:
            return NO_LATENCY
        return limit.default_expected_ms(self.request.descriptor)

    def tell(self, answer: Any) -> None:
        """The store has spoken, or has not in time."""
        if not self.is_over:
            self.decider.conclude(self, answer)
            if self.is_over:
                self.desk.answer((self,))

    def finish(self, outcome: Decision | Exception) -> None:
        """It is decided, or will not be."""
        self.is_over = True
        self.outcome = outcome
        self.desk.answer((self,))

    def decision(self) -> Decision:
        """What came of it, as a value; raises what it is an exception of."""
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
        """What the buckets said to a plain grant, as values."""
        return [
            BucketAnswer(Verdict.DEBITED, balance, charge, rate, capacity, code >= IN_REQUESTS)
            for code, balance, charge, rate, capacity in self.values
        ]


def _fingerprint(request: AcquireRequest) -> bytes:
    """What tells this request from others under the same idempotency key; not how often it was tried."""
    parts = (
        request.namespace, sorted(request.descriptor.items()), request.work, request.criticality,
        request.expected_latency_ms, request.ttl_ms,
        False,  # where an older node put a field that is gone: a retry may reach a node of either kind
    )  # fmt: skip
    return blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
