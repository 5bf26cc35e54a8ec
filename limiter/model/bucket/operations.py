"""Acquire and settle as values: what a caller asks, and what it is answered.

The same values go to the scripts (packed by `limiter.store.layout`) and to the model (`limiter.model.bucket.ledger`).
They are made by the dozen for each request: a struct costs a quarter of a tuple with names, and as nothing in them can
lead back to them, the garbage collector need not look at them (`gc=False`).
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from limiter.model.bucket.bucket import Params

LATE_US = 60_000_000
"""How long after its deadline a reservation may still be settled, unless a node is set otherwise (W14); its tombstone
lives as long."""


class Verdict(IntEnum):
    """What one bucket said to one acquire."""

    PASSED = 0
    DEBITED = 1
    BLOCKED = 2
    """The limit is reached."""
    TURNED_AWAY = 3
    """By overload control, whatever the limit."""
    DENIED = 8
    """The key is blocked for a time (W17). Not 4: that bit of an answer tells the unit."""


class AcquireStatus(IntEnum):
    """How an acquire ended. Only the first two are decisions."""

    REFUSED = 0
    GRANTED = 1
    CORRUPT = 2
    """A record of one of its buckets is not ours (F-S11)."""
    WINDOW = 3
    """A quota's window does not hold the server's time: ask again with the right one."""
    CONFLICT = 4
    """The idempotency key was used with other parameters (F-R8)."""
    REPLAYED = 5
    """The idempotency key was used before; the memo and the answer are the first ones (F-R7)."""
    COUNTED = 6
    """What was told is counted: nothing was asked."""


class SettleStatus(IntEnum):
    """How a settle ended."""

    SETTLED = 1
    DUPLICATE = 2
    CONFLICT = 3
    """Settled before with another amount (F-R3)."""
    GONE = 4
    """Past its deadline, and later than a settle may come."""
    CORRUPT = 5


class _Value(Struct, frozen=True, gc=False):
    """What stays as it is made."""

    def but(self, **changes: object) -> Self:
        """The same with some of it changed."""
        return replace(self, **changes)


LEARNED, TOO_LARGE, COVERED, REFUSING = 1, 2, 4, 8
"""How a bucket is asked, as bits of `Want.how`: prefer the charge that the controller learned for it (W4, W8); refuse,
as the estimate is above what one request may take; the balance has to cover the charge (W13). The last stands alone,
where an operation only tells of refusals: this bucket was a reason."""


class Want(_Value, frozen=True, gc=False):
    """What an acquire wants of one bucket. `bucket` is its name in the slot."""

    bucket: str
    params: Params
    minimum: float
    """For the whole capacity of the limit (`Params.whole_capacity`), whatever part of it the bucket holds."""
    charge: float
    how: int = 0
    weight: float = 1.0
    """As how many requests it counts, in a bucket that counts requests and is no quota (W16)."""


class Idempotency(_Value, frozen=True, gc=False):
    """A caller's promise that this acquire is the same one as before."""

    key: str
    fingerprint: bytes
    """16 bytes that tell this request's parameters from others'."""
    memo: bytes
    """Whatever a node needs to give the first answer again."""


class Lot(_Value, frozen=True, gc=False):
    """What overload control decides by: the request's class, and the chance that the node gave it."""

    class_number: int
    draw: float
    """In [0, 1)."""


class Acquire(_Value, frozen=True, gc=False):
    """One request for admission over all its buckets, or none."""

    wants: tuple[Want, ...]
    requests: float = 1.0
    """More than one only where refusals are told."""
    dry_run: bool = False
    idempotency: Idempotency | None = None
    lot: Lot | None = None
    """None where no bucket has overload control."""
    told: bool = False
    """Asks nothing: the node has refused `requests` by itself, while it knew that the answer would be no. They count in
    every bucket, as refused in those whose `how` is REFUSING; nothing else is read of the wants."""


class Pressure(_Value, frozen=True, gc=False):
    """What overload control has to say of one bucket, to the class of one request."""

    overloaded: bool = False
    quality: float = 1.0
    refused_share: float = 0.0
    rate: float = 0.0
    """Requests a second; 0: not limited."""


class BucketAnswer(_Value, frozen=True, gc=False):
    """One bucket's part in an acquire, with the state it is left in."""

    verdict: Verdict
    balance: float
    charge: float
    """What was debited, if the verdict is DEBITED; for how long the key is blocked (us), if DENIED; else what would
    have been debited."""
    rate: float
    capacity: float
    in_requests: bool = False
    """Whether this bucket counts requests now, and so charged a number of them."""
    pressure: Pressure | None = None
    """Of every bucket of an operation that had a lot."""


class AcquireAnswer(_Value, frozen=True, gc=False):
    """The decision, with every bucket's part in it."""

    status: AcquireStatus
    now_us: int
    buckets: tuple[BucketAnswer, ...] = ()
    memo: bytes = b""

    @property
    def granted(self) -> bool:
        """Whether the caller may go ahead."""
        return self.status is AcquireStatus.GRANTED


class Charge(_Value, frozen=True, gc=False):
    """What a reservation took from one bucket, and how that bucket weighs work."""

    bucket: str
    charge: float
    weight: float = 1.0
    params: Params | None = None
    """The policy's terms now, to restore a bucket that was forgotten while idle; None if the policy is gone."""
    in_requests: bool = False
    """Whether the charge is a number of requests, not of units of work."""
    expected_ms: float = math.nan
    """How soon the policy expects an answer, where the request did not say (Q1)."""
    uncollected: float = 0.0
    """What the acquire wanted beyond the charge and the bucket could not pay (W5)."""


class Settle(_Value, frozen=True, gc=False, kw_only=True):
    """The work a reservation really did: in all (final), or so far."""

    reservation: str
    charges: tuple[Charge, ...]
    work: float
    acquired_us: int
    deadline_us: int
    final: bool = True
    requests: float = 1.0
    """More than one where a node debits what it granted without the store."""
    latency_ms: float = math.nan
    expected_ms: float = math.nan
    """How soon the request expected its answer."""
    class_number: int = 0
    late_us: int = LATE_US
    """How long after the deadline this settle may come (W14)."""


class BucketSettled(_Value, frozen=True, gc=False):
    """One bucket after a settle. `present` is false for a bucket that no longer exists."""

    present: bool
    balance: float
    adjusted: float
    uncollected: float
    rate: float
    capacity: float
    in_requests: bool = False
    """Whether this bucket counts requests now. What was adjusted is in the unit of the charge all the same."""


class SettleAnswer(_Value, frozen=True, gc=False):
    """What the settle did, or what the first one did."""

    status: SettleStatus
    now_us: int
    late: bool = False
    stop: bool = False
    work: float = 0.0
    deadline_us: float = 0.0
    """When the reservation expires: progress renews it (W14)."""
    deadline_before_us: float = 0.0
    """When it would have, before this call."""
    buckets: tuple[BucketSettled, ...] = ()
