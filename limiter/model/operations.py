"""Acquire and settle as values: what a caller asks, and what it is answered.

The same values go to the scripts (packed by `limiter.store.layout`) and to the model (`limiter.model.ledger`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from limiter.model.bucket import Params

SETTLE_GRACE_US = 60_000_000
"""How long after its deadline a reservation may still be settled; its tombstone lives as long."""


class Verdict(IntEnum):
    """What one bucket said to one acquire."""

    PASSED = 0
    DEBITED = 1
    BLOCKED = 2


class AcquireStatus(IntEnum):
    """How an acquire ended. Only the first two are decisions."""

    REFUSED = 0
    GRANTED = 1
    CORRUPT = 2
    """A record of one of its buckets is not ours (S11)."""
    WINDOW = 3
    """A quota's window does not hold the server's time: ask again with the right one."""
    CONFLICT = 4
    """The idempotency key was used with other parameters (R8)."""
    REPLAYED = 5
    """The idempotency key was used before; the memo and the answer are the first ones (R7)."""


class SettleStatus(IntEnum):
    """How a settle ended."""

    SETTLED = 1
    DUPLICATE = 2
    CONFLICT = 3
    """Settled before with another amount (R3)."""
    GONE = 4
    """Past its deadline and the grace after it."""
    CORRUPT = 5


class Want(NamedTuple):
    """What an acquire wants of one bucket. `bucket` is its name in the slot."""

    bucket: str
    params: Params
    minimum: float
    charge: float
    learned: bool = False
    """Prefer the charge that the controller learned for this bucket, if there is one (W4, W8)."""


class Idempotency(NamedTuple):
    """A caller's promise that this acquire is the same one as before."""

    key: str
    fingerprint: bytes
    """16 bytes that tell this request's parameters from others'."""
    memo: bytes
    """Whatever a node needs to give the first answer again."""


class Acquire(NamedTuple):
    """One request for admission over all its buckets, or none."""

    wants: tuple[Want, ...]
    requests: float = 1.0
    lease: bool = False
    dry_run: bool = False
    idempotency: Idempotency | None = None


class BucketAnswer(NamedTuple):
    """One bucket's part in an acquire, with the state it is left in."""

    verdict: Verdict
    balance: float
    charge: float
    """What was debited, if the verdict is DEBITED; else what would have been."""
    rate: float
    capacity: float


class AcquireAnswer(NamedTuple):
    """The decision, with every bucket's part in it."""

    status: AcquireStatus
    now_us: int
    buckets: tuple[BucketAnswer, ...] = ()
    memo: bytes = b""

    @property
    def granted(self) -> bool:
        """Whether the caller may go ahead."""
        return self.status is AcquireStatus.GRANTED


class Charge(NamedTuple):
    """What a reservation took from one bucket, and how that bucket weighs work."""

    bucket: str
    charge: float
    weight: float = 1.0
    params: Params | None = None
    """The policy's terms now, to restore a bucket that was forgotten while idle; None if the policy is gone."""
    in_requests: bool = False
    """Whether the charge is a number of requests, not of units of work."""


@dataclass(slots=True, kw_only=True)  # not frozen: that triples the time it takes to make one
class Settle:
    """The work a reservation really did: in all (final), or so far."""

    reservation: str
    charges: tuple[Charge, ...]
    work: float
    acquired_us: int
    deadline_us: int
    final: bool = True
    requests: float = 1.0
    latency_ms: float = math.nan
    expected_ms: float = math.nan


class BucketSettled(NamedTuple):
    """One bucket after a settle. `present` is false for a bucket that no longer exists."""

    present: bool
    balance: float
    adjusted: float
    uncollected: float
    rate: float
    capacity: float


class SettleAnswer(NamedTuple):
    """What the settle did, or what the first one did."""

    status: SettleStatus
    now_us: int
    late: bool = False
    stop: bool = False
    work: float = 0.0
    buckets: tuple[BucketSettled, ...] = ()
