"""Acquire and settle as values: operations and their answers.

The same values go to the scripts (packed by `limiter.store.layout`) and to the model
(`limiter.model.ledger.ledger`). A request makes dozens of them: a struct costs a quarter of a named tuple, and as
nothing in them can refer back to them, the garbage collector need not track them (`gc=False`).
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from limiter.model.bucket.bucket import Params
from limiter.model.overload.shedding import State

LATE_US = 60_000_000
"""How long after its deadline a reservation may still be settled, unless a node is set otherwise (W14); its tombstone
lives as long."""


class Verdict(IntEnum):
    """One bucket's answer to one acquire."""

    PASSED = 0
    DEBITED = 1
    BLOCKED = 2
    """The limit is reached."""
    TURNED_AWAY = 3
    """Refused by overload control, whatever the limit."""
    DENIED = 8
    """The key is blocked for a time (W17). Not 4: that bit of an answer is the unit."""
    FULL = 9
    """The most reservations that may be open are open (W18)."""


class AcquireStatus(IntEnum):
    """How an acquire ended. Only the first two are decisions."""

    REFUSED = 0
    GRANTED = 1
    CORRUPT = 2
    """The record of one of its buckets is damaged (F-S11)."""
    WINDOW = 3
    """A quota's window does not contain the server's time: ask again with the right one."""
    CONFLICT = 4
    """The idempotency key was used with other parameters (F-R8)."""
    REPLAYED = 5
    """The idempotency key was used before; the memo and the answer are the first ones (F-R7)."""
    COUNTED = 6
    """The reported refusals are counted; nothing was asked."""


class SettleStatus(IntEnum):
    """How a settle ended."""

    SETTLED = 1
    DUPLICATE = 2
    CONFLICT = 3
    """Settled before with another amount (F-R3)."""
    GONE = 4
    """Past its deadline, and too late for a settle."""
    CORRUPT = 5


class _Value(Struct, frozen=True, gc=False):
    """An immutable value."""

    def but(self, **changes: object) -> Self:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


LEARNED, TOO_LARGE, COVERED, REFUSING, KEYED = 1, 2, 4, 8, 16
"""How a bucket is asked, as bits of `Want.how`: prefer the charge that the controller learned for it (W4, W8); refuse,
as the estimate is above what one request may take; the balance has to cover the charge (W13). REFUSING is used alone,
in an operation that only reports refusals: this bucket was a reason. KEYED: the id of the values of `learn_by` follows
(W15)."""


Ask = tuple[int, float, float]
"""A request to one bucket in the hot path, where a `Want` would cost too much: how, the minimum, and the charge."""


class Want(_Value, frozen=True, gc=False):
    """The request of an acquire to one bucket. `bucket` is its name in the slot."""

    bucket: str
    params: Params
    minimum: float
    """For the whole capacity of the limit (`Params.whole_capacity`), whatever part of it the bucket holds."""
    charge: float
    how: int = 0
    weight: float = 1.0
    """The number of requests that it counts as, in a bucket that counts requests and is no quota (W16), or that learns
    its charge before weights (W15)."""
    learn_id: int = 0
    """Of the values of `learn_by` (`limiter.model.bucket.learned`); 0 without any."""


class Idempotency(_Value, frozen=True, gc=False):
    """A caller's promise that this acquire is the same one as before."""

    key: str
    fingerprint: bytes
    """16 bytes that identify this request's parameters."""
    memo: bytes
    """The data from which a node rebuilds the first answer."""


class Lot(_Value, frozen=True, gc=False):
    """The input of overload control: the request's class, and the number that the node drew for it."""

    class_number: int
    draw: float
    """In [0, 1)."""
    expected_ms: float = math.nan
    """How soon the request expects its answer; NaN where nobody says, −inf where a session has drawn (Q13, S13)."""


class Acquire(_Value, frozen=True, gc=False):
    """One request for admission over all its buckets, or none."""

    wants: tuple[Want, ...]
    requests: float = 1.0
    """More than one only if the operation reports refusals."""
    dry_run: bool = False
    idempotency: Idempotency | None = None
    lot: Lot | None = None
    """None where no bucket has overload control."""
    ttl_us: int = 0
    """How long the reservation lives; only matters to buckets that count what is in flight."""
    attempt: int = 1
    """How often the request was tried, this time included; 3 stands for more (G6)."""
    told: bool = False
    """Asks nothing: the node itself has refused `requests` while it knew that the answer would be no. They count in
    every bucket, as refused in those whose `how` is REFUSING; nothing else of the wants is read."""


class Pressure(_Value, frozen=True, gc=False):
    """Overload control of one bucket, for the class of one request."""

    state: State = State.CALM
    quality: float = 1.0
    refused_share: float = 0.0
    """Of the class, as it is set or as it was measured, whichever is more (S8)."""
    rate: float = 0.0
    """Requests per second; 0: not limited."""
    limit: float = 0.0
    """In flight, from which on the class is refused; 0: not limited (S9)."""

    @property
    def drawn_share(self) -> float:
        """The refused share, if requests are drawn by it alone: not if what is in flight or a rate decides."""
        return 0.0 if self.limit > 0 or self.rate > 0 else self.refused_share


class BucketAnswer(_Value, frozen=True, gc=False):
    """One bucket's part in an acquire, with its resulting state."""

    verdict: Verdict
    balance: float
    charge: float
    """Debited amount, if the verdict is DEBITED; how long the key is blocked (us), if DENIED; how many may be open at
    once, if FULL; otherwise the amount that would have been debited."""
    rate: float
    capacity: float
    in_requests: bool = False
    """True if this bucket counts requests now, and so charged a number of them."""
    pressure: Pressure | None = None
    """Set for every bucket of an operation with a draw."""


class AcquireAnswer(_Value, frozen=True, gc=False):
    """The decision, with every bucket's part in it."""

    status: AcquireStatus
    now_us: int
    buckets: tuple[BucketAnswer, ...] = ()
    memo: bytes = b""

    @property
    def granted(self) -> bool:
        """True if the caller may go ahead."""
        return self.status is AcquireStatus.GRANTED


class Charge(_Value, frozen=True, gc=False):
    """A reservation's charge in one bucket, and the bucket's weight of work."""

    bucket: str
    charge: float
    weight: float = 1.0
    params: Params | None = None
    """The policy's current terms, to restore a bucket that expired while idle; None if the policy is gone."""
    in_requests: bool = False
    """True if the charge is a number of requests, not of units of work."""
    expected_ms: float = math.nan
    """The latency that the policy expects, if the request did not say (Q1)."""
    uncollected: float = 0.0
    """The part of the acquire's charge that the bucket could not pay (W5)."""
    learn_id: int = 0
    """Of the values of `learn_by`; 0 without any (W15)."""
    unit: float = 0.0
    """The caller's measure per unit of work (W19), rounded up; below zero: not rounded; 0: work is work."""


class Settle(_Value, frozen=True, gc=False, kw_only=True):
    """The real work of a reservation: in all (final), or so far."""

    reservation: str
    charges: tuple[Charge, ...]
    work: float
    acquired_us: int
    deadline_us: int
    final: bool = True
    requests: float = 1.0
    """More than one if a node debits what it granted without the store."""
    latency_ms: float = math.nan
    expected_ms: float = math.nan
    """The latency that the request expected."""
    class_number: int = 0
    late_us: int = LATE_US
    """How long after the deadline this settle may come (W14)."""
    is_uncounted: bool = False
    """True if it was granted without the store, and so never counted as in flight there."""


class BucketSettled(_Value, frozen=True, gc=False):
    """One bucket after a settle. `present` is false for a bucket that no longer exists."""

    present: bool
    balance: float
    adjusted: float
    uncollected: float
    rate: float
    capacity: float
    in_requests: bool = False
    """True if this bucket counts requests now. The adjustment is in the unit of the charge all the same."""


class SettleAnswer(_Value, frozen=True, gc=False):
    """The effect of the settle, or of the first one if this is a repeat."""

    status: SettleStatus
    now_us: int
    late: bool = False
    stop: bool = False
    work: float = 0.0
    deadline_us: float = 0.0
    """When the reservation expires: progress renews it (W14)."""
    deadline_before_us: float = 0.0
    """When it would have expired before this call."""
    buckets: tuple[BucketSettled, ...] = ()
