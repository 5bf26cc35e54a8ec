"""What waits for the store, one object an operation from its beginning to its answer, and how many become one call.

    waiting operations ── take: numbers, rows, bytes, in one loop ──► KEYS and ARGV of one script call

In order, without those that gave up; each bucket has one number in a call and goes by one row of parameters, so an
operation that brings another row for it ends the batch and begins the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Any, Generic, TypeVar

from limiter.model.bucket.operations import Acquire, Idempotency, Lot, Settle, Want
from limiter.model.bucket.reservation import Taken, taken_by
from limiter.store import keys
from limiter.store.errors import StoreBusy, StoreUnavailable
from limiter.store.layout import pack_params

OPERATIONS_MAX = 128
"""Operations in one call: bounds how long the store is busy with it."""

BUCKETS_MAX = 1024
"""Buckets in one call, for operations that touch many."""

TOLD, DRY_RUN, DRAWN, IDEMPOTENT, WEIGHED = 1, 2, 4, 8, 16
"""Flags of an acquire, as lua/acquire.lua knows them."""

_ACQUIRE = Struct("<BBdHBdd")
_WANT = Struct("<HBdd")
_LOT = Struct("<Bd")
_IDEMPOTENCY = Struct("<H16sI")
_SETTLE = Struct("<HBBddddddd")
_CHARGE = Struct("<HBdd")
_MORE_OF_A_CHARGE = Struct("<d")
IN_CLASS = 2
_EXPECTS, _UNPAID = 2, 4
_NUMBERS = [Struct(f"<{count}H") for count in range(OPERATIONS_MAX + 1)]

Ask = tuple[int, float, float]
"""What an acquire asks of one bucket: how (`limiter.model.bucket.operations.Want.how`), the minimum, and the charge."""


class Waiting:
    """One operation on its way through a lane. It is told what came of it, once, unless nobody waits any more."""

    __slots__ = ("deadline_s", "is_over", "is_sent")

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.is_over = self.is_sent = False

    def tell(self, answer: Any) -> None:
        """Hear the answer, or why there is none; it is over then. What comes after that is not heard."""
        self.is_over = True  # nobody waits for one that was only made to be packed

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.is_over

    def give_up(self) -> None:
        """The deadline has come."""
        if self.is_over:
            return
        if self.is_sent:
            self.tell(StoreUnavailable("no answer from the store in time"))
        else:
            self.tell(StoreBusy("too many operations were waiting for the store"))


class Asking(Waiting):
    """An acquire: which buckets it asks, the rows of parameters they go by, and what it asks of each."""

    __slots__ = ("asks", "buckets", "flags", "idempotency", "lot", "requests", "rows", "weights")

    buckets: Sequence[str]
    rows: Sequence[bytes]
    asks: Sequence[Ask]
    flags: int
    requests: float
    lot: Lot | None
    idempotency: Idempotency | None
    weights: Sequence[float]
    """As how many requests it counts in each bucket that counts requests; only where it is WEIGHED."""

    def ask_for(self, wants: Sequence[Want]) -> None:
        """Take over what is wanted of each bucket, given as values."""
        self.buckets = [want.bucket for want in wants]
        self.rows = [pack_params(want.params) for want in wants]
        self.asks = [(want.how, want.minimum, want.charge) for want in wants]
        self.weights = [want.weight for want in wants]

    def take_over(self, operation: Acquire) -> None:
        """Take over what an acquire of the model says."""
        self.ask_for(operation.wants)
        self.lot, self.idempotency, self.requests = operation.lot, operation.idempotency, operation.requests
        self.flags = (
            (TOLD if operation.told else 0)
            | (DRY_RUN if operation.dry_run else 0)
            | (DRAWN if operation.lot is not None else 0)
            | (IDEMPOTENT if operation.idempotency is not None else 0)
            | (WEIGHED if any(weight != 1.0 for weight in self.weights) else 0)
        )


Corrected = tuple[int, float, float, bytes]
"""What a settle corrects at one bucket: bits, the charge, the weight, and what else the bits say there is."""


class Settling(Waiting):
    """A settle: whose, what it tells, and what was charged to which buckets."""

    __slots__ = ("buckets", "charges", "fields", "kind", "reservation", "rows")

    reservation: str
    kind: int
    """1 if it is final, and IN_CLASS times the number of its class."""
    fields: tuple[float, float, float, float, float, float, float]
    """Work, requests, latency, expected latency, acquired, deadline, how long after that it may come."""
    buckets: Sequence[str]
    rows: Sequence[bytes]
    """Of parameters; empty where the policy is gone, and the bucket's record says what it goes by."""
    charges: Sequence[Corrected]

    def take_over(self, operation: Settle) -> None:
        """Take over what a settle of the model says."""
        self.reservation = operation.reservation
        self.kind = operation.final + IN_CLASS * operation.class_number
        self.fields = (
            operation.work, operation.requests, operation.latency_ms, operation.expected_ms, operation.acquired_us,
            operation.deadline_us, operation.late_us,
        )  # fmt: skip
        self.buckets = [charge.bucket for charge in operation.charges]
        self.rows = [b"" if charge.params is None else pack_params(charge.params) for charge in operation.charges]
        self.charges = [corrected(taken_by(charge)) for charge in operation.charges]


def corrected(taken: Taken) -> Corrected:
    """What was taken from a bucket, as a settle tells it."""
    _, charge, weight, in_requests, expected_ms, uncollected = taken
    if expected_ms != expected_ms and not uncollected:  # by far the most
        return in_requests, charge, weight, b""
    bits, more = int(in_requests), b""
    if expected_ms == expected_ms:
        bits, more = bits + _EXPECTS, _MORE_OF_A_CHARGE.pack(expected_ms)
    if uncollected:
        bits, more = bits + _UNPAID, more + _MORE_OF_A_CHARGE.pack(uncollected)
    return bits, charge, weight, more


WaitT = TypeVar("WaitT", bound=Waiting)


class Batch(Generic[WaitT]):
    """A batch, and what of its call does not depend on when it is sent."""

    __slots__ = ("buckets", "operations", "others", "packed", "params", "terms")

    def __init__(self, operations: list[WaitT], numbers: _Numbers, others: Sequence[bytes], parts: list[bytes]) -> None:
        self.operations = operations
        self.buckets = numbers.of
        self.params = b"".join(numbers.rows)
        count = len(numbers.terms)
        self.terms = (_NUMBERS[count] if count <= OPERATIONS_MAX else Struct(f"<{count}H")).pack(*numbers.terms)
        self.others = others
        """Keys beside those of the buckets, without the prefix of the slot."""
        self.packed = b"".join(parts)


class _Numbers:
    """The buckets of one call, numbered as they come, with the row of parameters that each goes by."""

    __slots__ = ("given", "of", "rows", "terms")

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.rows: dict[bytes, int] = {}
        self.given: list[bytes] = []
        self.terms: list[int] = []

    def add(self, bucket: str, row: bytes) -> int:
        """The number of a bucket that is new to the call."""
        self.of[bucket] = number = len(self.of) + 1
        self.given.append(row)
        # No row: what the bucket goes by is known to the store already.
        self.terms.append((self.rows.get(row) or self.rows.setdefault(row, len(self.rows) + 1)) if row else 0)
        return number

    def agree(self, buckets: Sequence[str], rows: Sequence[bytes]) -> bool:
        """Whether buckets go by the same rows as before, as far as they are known."""
        for bucket, row in zip(buckets, rows, strict=True):
            number = self.of.get(bucket)
            if number is not None and self.given[number - 1] != row:
                return False
        return True

    def all(self, buckets: Sequence[str], rows: Sequence[bytes]) -> list[int]:
        """The numbers of buckets."""
        return [self.of.get(bucket) or self.add(bucket, row) for bucket, row in zip(buckets, rows, strict=True)]


def take_acquires(queue: deque[Asking]) -> Batch[Asking]:
    """The next batch of acquires."""
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
        if len(buckets) == 1:  # by far the most
            row, number = rows[0], of.get(buckets[0])
            if number is None:
                number = numbers.add(buckets[0], row)
            elif given[number - 1] != row:
                break
            append(pack(asking.flags, 1, asking.requests, number, how, minimum, charge))
        elif numbers.agree(buckets, rows):
            first, *others = numbers.all(buckets, rows)
            append(pack(asking.flags, len(buckets), asking.requests, first, how, minimum, charge))
            parts += [_WANT.pack(number, *asks[at]) for at, number in enumerate(others, 1)]
        else:
            break
        if asking.flags >= DRAWN:
            _append_more(parts, asking, named)
        asking.is_sent = True
        batch.append(asking)
        queue.popleft()
    return Batch(batch, numbers, [keys.idempotency(b"", name) for name in named], parts)


def _append_more(parts: list[bytes], asking: Asking, named: dict[str, int]) -> None:
    """The chance of a request under overload control, the idempotency key, and weights."""
    if asking.lot is not None:
        parts.append(_LOT.pack(asking.lot.class_number, asking.lot.draw))
    once = asking.idempotency
    if once is not None:
        number = named.setdefault(once.key, len(named) + 1)
        parts += (_IDEMPOTENCY.pack(number, once.fingerprint, len(once.memo)), once.memo)
    if asking.flags >= WEIGHED:
        parts.append(Struct(f"<{len(asking.buckets)}d").pack(*asking.weights))


def take_settles(queue: deque[Settling]) -> Batch[Settling]:
    """The next batch of settles."""
    numbers, named = _Numbers(), dict[str, int]()
    batch: list[Settling] = []
    parts: list[bytes] = []
    append, pack, pack_charge = parts.append, _SETTLE.pack, _CHARGE.pack
    while queue and len(batch) < OPERATIONS_MAX and len(numbers.of) < BUCKETS_MAX:
        settling = queue[0]
        if settling.is_gone:
            queue.popleft()
            continue
        if not numbers.agree(settling.buckets, settling.rows):
            break
        charges = settling.charges
        number = named.setdefault(settling.reservation, len(named) + 1)
        append(pack(number, settling.kind, len(charges), *settling.fields))
        for at, number in enumerate(numbers.all(settling.buckets, settling.rows)):
            bits, charge, weight, more = charges[at]
            append(pack_charge(number, bits, charge, weight))
            if more:
                append(more)
        settling.is_sent = True
        batch.append(settling)
        queue.popleft()
    return Batch(batch, numbers, [keys.tombstone(b"", name) for name in named], parts)
