"""Operations that wait for the store, and how many of them become one call.

    waiting operations ── take: numbers, rows, bytes, in one loop ──► KEYS and ARGV of one script call

One object stands for an operation from its beginning to its answer. Operations are taken in order, without those that
gave up. Each bucket has one number in a call and one row of parameters: an operation that brings another row for it
ends the batch and begins the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Any, Generic, TypeVar

from limiter.model.bucket.operations import KEYED, Acquire, Ask, Idempotency, Lot, Settle, Want
from limiter.model.bucket.reservation import Taken, optional_fields, taken_by
from limiter.store import keys
from limiter.store.layout import pack_params
from limiter.store.store_errors import StoreBusy, StoreUnavailable

OPERATIONS_MAX = 128
"""Operations in one call: bounds how long the store is busy with it."""

BUCKETS_MAX = 1024
"""Buckets in one call: the bound for operations that touch many."""

TOLD, DRY_RUN, DRAWN, IDEMPOTENT, WEIGHED, LIVES, SECOND, FURTHER = 1, 2, 4, 8, 16, 32, 64, 128
"""Flags of an acquire, as lua/acquire.lua knows them."""

_ACQUIRE = Struct("<BBdHBdd")
_WANT = Struct("<HBdd")
_LOT = Struct("<Bdd")
_UNIT = Struct("<d")
_MEASURED = 16
_TTL = Struct("<d")
_IDEMPOTENCY = Struct("<H16sI")
_SETTLE = Struct("<HBBddddddd")
_CHARGE = Struct("<HBdd")
_MORE_OF_A_CHARGE = Struct("<d")
IN_CLASS, UNCOUNTED = 2, 8
_NUMBERS = [Struct(f"<{count}H") for count in range(OPERATIONS_MAX + 1)]


class Waiting:
    """One operation on its way through a lane. It receives its outcome once, unless its caller has gone."""

    __slots__ = ("deadline_s", "is_over", "is_sent")

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.is_over = self.is_sent = False

    def tell(self, answer: Any) -> None:
        """Receive the answer, or the exception that explains why there is none. Later ones are ignored."""
        self.is_over = True  # an operation that was only made to be packed has no caller

    @property
    def is_gone(self) -> bool:
        """True if no caller waits for it any more."""
        return self.is_over

    def give_up(self) -> None:
        """End the wait: the deadline has passed."""
        if self.is_over:
            return
        if self.is_sent:
            self.tell(StoreUnavailable("no answer from the store in time"))
        else:
            self.tell(StoreBusy("too many operations were waiting for the store"))


class Asking(Waiting):
    """An acquire: its buckets, the row of parameters of each, and what it asks of each."""

    __slots__ = (
        "asks", "buckets", "flags", "idempotency", "learn_ids", "lot", "requests", "rows", "ttl_us",
        "weights",
    )  # fmt: skip

    buckets: Sequence[str]
    rows: Sequence[bytes]
    asks: Sequence[Ask]
    flags: int
    requests: float
    lot: Lot | None
    idempotency: Idempotency | None
    weights: Sequence[float]
    """As how many requests it counts in each bucket that counts requests; only where it is WEIGHED."""
    learn_ids: Sequence[int]
    """Of the values of `learn_by`, for each bucket that is asked KEYED (W15); only where it is WEIGHED."""
    ttl_us: float
    """How long its reservation lives; only where it LIVES."""

    def ask_for(self, wants: Sequence[Want]) -> None:
        """Copy what is wanted of each bucket."""
        self.buckets = [want.bucket for want in wants]
        self.rows = [pack_params(want.params) for want in wants]
        self.asks = [(want.how, want.minimum, want.charge) for want in wants]
        self.weights = [want.weight for want in wants]
        self.learn_ids = [want.learn_id for want in wants if want.how & KEYED]

    def take_over(self, operation: Acquire) -> None:
        """Copy everything from an acquire of the model."""
        self.ask_for(operation.wants)
        self.lot, self.idempotency, self.requests = operation.lot, operation.idempotency, operation.requests
        self.ttl_us = operation.ttl_us
        self.flags = (
            (TOLD if operation.told else 0)
            | (DRY_RUN if operation.dry_run else 0)
            | (DRAWN if operation.lot is not None else 0)
            | (IDEMPOTENT if operation.idempotency is not None else 0)
            | (WEIGHED if self.learn_ids or any(weight != 1.0 for weight in self.weights) else 0)
            | (LIVES if operation.ttl_us else 0)
            | attempt_flag(operation.attempt)
        )


def attempt_flag(attempt: int) -> int:
    """How a request says that it was tried before (G6)."""
    return 0 if attempt <= 1 else SECOND if attempt == 2 else FURTHER


Corrected = tuple[int, float, float, bytes]
"""The correction at one bucket: bits, the charge, the weight, and the packed fields that the bits announce."""


class Settling(Waiting):
    """A settle: its reservation, what it reports, and the charge of each bucket."""

    __slots__ = ("buckets", "charges", "fields", "kind", "reservation", "rows")

    reservation: str
    kind: int
    """1 if it is final, IN_CLASS times the number of its class, and UNCOUNTED if it was granted without the store."""
    fields: tuple[float, float, float, float, float, float, float]
    """Work, requests, latency, expected latency, acquired, deadline, and how long after the deadline it is accepted."""
    buckets: Sequence[str]
    rows: Sequence[bytes]
    """Rows of parameters; empty where the policy is gone, then the bucket's record says which terms apply."""
    charges: Sequence[Corrected]

    def take_over(self, operation: Settle) -> None:
        """Copy everything from a settle of the model."""
        self.reservation = operation.reservation
        self.kind = operation.final + IN_CLASS * operation.class_number + UNCOUNTED * operation.is_uncounted
        self.fields = (
            operation.work, operation.requests, operation.latency_ms, operation.expected_ms, operation.acquired_us,
            operation.deadline_us, operation.late_us,
        )  # fmt: skip
        self.buckets = [charge.bucket for charge in operation.charges]
        self.rows = [b"" if charge.params is None else pack_params(charge.params) for charge in operation.charges]
        self.charges = [corrected(taken_by(charge), charge.unit) for charge in operation.charges]


def corrected(taken: Taken, unit: float = 0.0) -> Corrected:
    """Return the charge of a bucket in the form that a settle sends."""
    _, charge, weight, in_requests, expected_ms, uncollected, learn_id = taken
    if expected_ms != expected_ms and not uncollected and not learn_id and not unit:  # nearly all
        return in_requests, charge, weight, b""
    bits, more = optional_fields(expected_ms, uncollected, learn_id)
    if unit:
        bits, more = bits + _MEASURED, more + _UNIT.pack(unit)
    return in_requests + bits, charge, weight, more


WaitT = TypeVar("WaitT", bound=Waiting)


class Batch(Generic[WaitT]):
    """A batch, and the parts of its call that do not depend on when it is sent."""

    __slots__ = ("buckets", "operations", "others", "packed", "params", "terms")

    def __init__(self, operations: list[WaitT], numbers: _Numbers, others: Sequence[bytes], parts: list[bytes]) -> None:
        self.operations = operations
        self.buckets = numbers.of
        self.params = b"".join(numbers.rows)
        count = len(numbers.terms)
        self.terms = (_NUMBERS[count] if count <= OPERATIONS_MAX else Struct(f"<{count}H")).pack(*numbers.terms)
        self.others = others
        """Keys besides those of the buckets, without the slot's prefix."""
        self.packed = b"".join(parts)


class _Numbers:
    """The buckets of one call, numbered in order of appearance, each with its row of parameters."""

    __slots__ = ("given", "of", "rows", "terms")

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.rows: dict[bytes, int] = {}
        self.given: list[bytes] = []
        self.terms: list[int] = []

    def add(self, bucket: str, row: bytes) -> int:
        """Number a bucket that is new to the call."""
        self.of[bucket] = number = len(self.of) + 1
        self.given.append(row)
        # An empty row: the store knows the bucket's terms from its record.
        self.terms.append((self.rows.get(row) or self.rows.setdefault(row, len(self.rows) + 1)) if row else 0)
        return number

    def all(self, buckets: Sequence[str], rows: Sequence[bytes]) -> list[int] | None:
        """The numbers of buckets; None if one of them went by another row before, and nothing is numbered then."""
        known = [self.of.get(bucket) for bucket in buckets]
        for number, row in zip(known, rows, strict=True):
            if number is not None and self.given[number - 1] != row:
                return None
        return [number or self.add(buckets[at], rows[at]) for at, number in enumerate(known)]


def take_acquires(queue: deque[Asking]) -> Batch[Asking]:
    """Pack the next batch of acquires."""
    numbers, named = _Numbers(), dict[str, int]()
    batch: list[Asking] = []
    parts: list[bytes] = []
    of, given, append, pack = numbers.of, numbers.given, parts.append, _ACQUIRE.pack
    while queue and len(batch) < OPERATIONS_MAX and len(of) < BUCKETS_MAX:
        asking = queue[0]
        if asking.is_gone:
            queue.popleft()
            continue
        buckets, rows, asks = asking.buckets, asking.rows, asking.asks
        how, minimum, charge = asks[0]
        if len(buckets) == 1:  # nearly all
            row, number = rows[0], of.get(buckets[0])
            if number is None:
                number = numbers.add(buckets[0], row)
            elif given[number - 1] != row:
                break
            append(pack(asking.flags, 1, asking.requests, number, how, minimum, charge))
        elif (numbered := numbers.all(buckets, rows)) is None:
            break
        else:
            append(pack(asking.flags, len(buckets), asking.requests, numbered[0], how, minimum, charge))
            parts += [_WANT.pack(numbered[at], *asks[at]) for at in range(1, len(buckets))]
        if asking.flags >= DRAWN:
            _append_more(parts, asking, named)
        asking.is_sent = True
        batch.append(asking)
        queue.popleft()
    return Batch(batch, numbers, [keys.idempotency(b"", name) for name in named], parts)


def _append_more(parts: list[bytes], asking: Asking, named: dict[str, int]) -> None:
    """The chance of a request under overload control, the idempotency key, weights, and the time to live."""
    if asking.lot is not None:
        parts.append(_LOT.pack(asking.lot.class_number, asking.lot.draw, asking.lot.expected_ms))
    once = asking.idempotency
    if once is not None:
        number = named.setdefault(once.key, len(named) + 1)
        parts += (_IDEMPOTENCY.pack(number, once.fingerprint, len(once.memo)), once.memo)
    if asking.flags & WEIGHED:
        parts.append(Struct(f"<{len(asking.buckets)}d").pack(*asking.weights))
    if asking.flags & LIVES:
        parts.append(_TTL.pack(asking.ttl_us))
    if asking.flags & WEIGHED and asking.learn_ids:
        parts.append(Struct(f"<{len(asking.learn_ids)}I").pack(*asking.learn_ids))


def take_settles(queue: deque[Settling]) -> Batch[Settling]:
    """Pack the next batch of settles."""
    numbers, named = _Numbers(), dict[str, int]()
    batch: list[Settling] = []
    parts: list[bytes] = []
    of, given, append, pack, pack_charge = numbers.of, numbers.given, parts.append, _SETTLE.pack, _CHARGE.pack
    while queue and len(batch) < OPERATIONS_MAX and len(of) < BUCKETS_MAX:
        settling = queue[0]
        if settling.is_gone:
            queue.popleft()
            continue
        buckets, rows = settling.buckets, settling.rows
        if len(buckets) == 1:  # nearly all
            row, number = rows[0], of.get(buckets[0])
            if number is None:
                number = numbers.add(buckets[0], row)
            elif given[number - 1] != row:
                break
            numbered: Sequence[int] | None = (number,)
        else:
            numbered = numbers.all(buckets, rows)
        if numbered is None:
            break
        tombstone = named.setdefault(settling.reservation, len(named) + 1)
        append(pack(tombstone, settling.kind, len(numbered), *settling.fields))
        for number, (bits, charge, weight, more) in zip(numbered, settling.charges, strict=True):
            append(pack_charge(number, bits, charge, weight))
            if more:
                append(more)
        settling.is_sent = True
        batch.append(settling)
        queue.popleft()
    return Batch(batch, numbers, [keys.tombstone(b"", name) for name in named], parts)
