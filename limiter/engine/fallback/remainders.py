"""Balances of quotas as far as this node knows them, and what it grants of them while the store is away (F-S14).

    heard     the last balance that the store returned for each quota bucket, with its window
    going     a bucket that continues in this node: its share of the balance, and what was granted of it
    owed      what was granted and is not debited in the store yet: one settle posts it, repeated until answered

    share     = (balance heard − what others take meanwhile) / nodes      the rest of the window
              = capacity / nodes                                          a window that begins while the store is away
    others    = what the balance lost beyond this node's own charges, per second, for as long as it was not heard of

An unknown balance is closed: one never heard, or heard too long before the store was lost, or of a window that began
unheard. Within a window a share only falls. After an outage (the breaker was open), and with other nodes, buckets
continue here for HOLD_S, until all nodes have posted what they owe: the store's balance before that is too high.
"""

from __future__ import annotations

import asyncio
import logging
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from os import urandom

from limiter.engine.planner import Planner
from limiter.model.bucket.bucket import STEP_BACK_MAX_US, Params, Record, fresh
from limiter.model.bucket.operations import (
    Acquire,
    AcquireStatus,
    BucketAnswer,
    Charge,
    Settle,
    SettleAnswer,
    SettleStatus,
    Verdict,
    Want,
)
from limiter.model.bucket.reservation import ID_SIZE
from limiter.model.policy.limit import scaled
from limiter.store.buckets import AMOUNT_MAX, Buckets
from limiter.store.clock import StoreClock
from limiter.store.keys import Slot
from limiter.store.store_errors import StoreError

log = logging.getLogger(__name__)

BUCKETS_MAX = 20_000
"""Buckets that are remembered; those heard of longest ago are dropped first."""

HEARD_MAX_S = 60.0
"""With other nodes, a balance heard longer than this before the store was lost counts as unknown."""

HOLD_S = 3.0
"""After an outage: long enough for every node to notice (it asks every second) and to post what it owes."""

POST_TIMEOUT_S = 2.0
POSTS_AT_ONCE = 64

Key = tuple[Slot, str]


class _Heard:
    """The last balance that the store returned for one bucket."""

    __slots__ = ("balance", "heard_s", "now_us", "others", "rate", "since_s", "start_us")

    def __init__(self, balance: float, start_us: int, now_us: int, heard_s: float) -> None:
        self.balance = balance
        self.start_us = start_us
        self.now_us = now_us
        self.heard_s = self.since_s = heard_s
        self.others = 0.0
        """Work that other nodes took since `since_s`."""
        self.rate = 0.0
        """Work that they take per second: a maximum that fades."""

    def hear(self, balance: float, own: float, now_us: int, now_s: float) -> None:
        """Take a newer balance; `own` is what this node itself took in that answer."""
        others = self.balance - balance - own
        if others > 0:
            self.others += others
        if now_s - self.since_s >= 1.0:
            self.rate = max(self.others / (now_s - self.since_s), self.rate / 2)
            self.others, self.since_s = 0.0, now_s
        self.balance, self.now_us, self.heard_s = balance, now_us, now_s

    def left(self, nodes: int, last_s: float) -> float:
        """Return this node's share of the balance at the time of the store's last answer of any kind."""
        if nodes == 1:
            return self.balance
        unheard_s = 1.0 + max(0.0, last_s - self.heard_s)
        return max(0.0, self.balance - max(self.rate, self.others) * unheard_s) / nodes


@dataclass(slots=True, kw_only=True)
class _Going:
    """A bucket that continues in this node."""

    record: Record
    nodes: int
    start_us: int
    end_us: int
    began_us: int
    in_requests: bool
    owed: float = 0.0
    requests: float = 0.0
    """Number of requests that took what is owed."""
    rolled: bool = False
    """True if its window began without the store, which still has the previous one."""
    sent: Settle | None = None
    """The settle being posted: the same operation until it is answered."""

    @property
    def owes(self) -> bool:
        """True if some grant is not debited in the store yet."""
        return self.owed > 0 or self.sent is not None

    def roll(self, params: Params, now_us: int) -> None:
        """Enter another window: grants of the previous one end with it."""
        self.start_us, self.end_us, self.began_us = params.window_start_us, params.window_end_us, now_us
        self.owed = self.requests = 0.0
        self.sent, self.rolled = None, True


class Remainders:
    """The quotas of one node."""

    def __init__(self, clock: StoreClock, nodes: Callable[[], int]) -> None:
        self._clock = clock
        self._nodes = nodes
        self._heard: dict[Key, _Heard] = {}
        self._going: dict[Key, _Going] = {}
        self._hold_until_s = 0.0
        self._nodes_seen = 0
        self.is_going = False
        """True if any bucket continues here, or must. A plain attribute, since every acquire reads it."""
        self.wakes = asyncio.Event()
        """Set when there is something to post."""

    def hear(self, slot: Slot, bucket: str, params: Params, balance: float, now_us: int, own: float) -> None:
        """Take the balance of a bucket from the store's answer; `own` is what this node took in it."""
        key, now_s = (slot, bucket), time.monotonic()
        heard = self._heard.pop(key, None)
        if heard is None or heard.start_us != params.window_start_us:
            heard = _Heard(balance, params.window_start_us, now_us, now_s)
            if len(self._heard) >= BUCKETS_MAX:
                del self._heard[next(iter(self._heard))]
        elif not 0 < heard.now_us - now_us < STEP_BACK_MAX_US:  # otherwise an older answer that another one overtook
            heard.hear(balance, own, now_us, now_s)
        self._heard[key] = heard

    @property
    def owing(self) -> int:
        """Number of buckets with grants that are not debited in the store yet."""
        return sum(going.owes for going in self._going.values())

    def hold(self, *, has_just_started: bool = False) -> None:
        """Continue quotas here after an outage, until every node had time to post what it owes.

        A node that has just started does not know of the others yet.
        """
        several = self._count() > 1 or has_just_started
        self._hold_until_s = time.monotonic() + (HOLD_S if several else 0.0)
        self.is_going = True
        self.wakes.set()

    def lose(self) -> None:
        """Note that the store is away: no quota asks it until `hold` has come and ended, even if it is back."""
        self._hold_until_s, self.is_going = inf, True
        self._count()

    def _count(self) -> int:
        """Return the number of nodes: at least as many as there were when the store went away.

        When it is back, each node knows only of itself until the others have registered again.
        """
        self._nodes_seen = count = max(1, self._nodes(), self._nodes_seen)
        return count

    def is_held(self, now_s: float) -> bool:
        """True if quotas must continue here, whichever bucket it is."""
        return now_s < self._hold_until_s

    def begin(self, slot: Slot, want: Want, now_us: int) -> bool:
        """Continue a bucket here, if enough is known of it; return whether it is."""
        key, params = (slot, want.bucket), want.params
        if key in self._going:
            return True
        heard, nodes = self._heard.get(key), self._count()
        if heard is None or len(self._going) >= BUCKETS_MAX:
            return False
        now_s = time.monotonic()
        last_s = min(now_s, self._clock.observed_s)
        if nodes > 1 and last_s - heard.heard_s > HEARD_MAX_S:
            return False
        record = fresh(scaled(params, 1.0 / nodes), now_us)
        rolled = params.window_start_us > heard.start_us
        if not rolled:
            if params.window_start_us < heard.start_us:  # the clock went back; that window is unknown
                return False
            record.balance = min(record.balance, heard.left(nodes, last_s))
        elif nodes > 1 and params.window_start_us <= now_us - (now_s - last_s) * 1e6:
            return False  # the window began while the store was there, and others may have used it
        self._going[key] = _Going(
            record=record, nodes=nodes, start_us=params.window_start_us, end_us=params.window_end_us,
            began_us=now_us, in_requests=params.counts_requests, rolled=rolled,
        )  # fmt: skip
        self.is_going = True
        return True

    def lend(self, slot: Slot, want: Want, now_us: int) -> tuple[int, Record] | None:
        """Return the number of nodes that share a bucket, and its record; None if it does not continue here."""
        going = self._going.get((slot, want.bucket))
        if going is None:
            return None
        if want.params.window_start_us > going.start_us:
            going.roll(want.params, now_us)
        return going.nodes, going.record

    def keep(self, slot: Slot, bucket: str, record: Record, answer: BucketAnswer, requests: float) -> None:
        """Take a record back after a decision, and remember what was granted."""
        going = self._going[slot, bucket]
        going.record = record
        if answer.verdict is Verdict.DEBITED and answer.charge > 0:
            going.owed += answer.charge
            going.requests += requests
            self.wakes.set()

    async def post(self, buckets: Buckets, planner: Planner) -> None:
        """Debit in the store what was granted without it. Buckets that owe nothing go back to the store."""
        now_us = self._clock.guess_us()
        keys = list(self._going)
        for first in range(0, len(keys), POSTS_AT_ONCE):
            some = keys[first : first + POSTS_AT_ONCE]
            posts = [self._post(key, self._going[key], buckets, planner, now_us) for key in some]
            if not all(await asyncio.gather(*posts)):
                return  # the store is away again, or busy; try again the next time
        now_s = time.monotonic()
        if not self.is_held(now_s):
            for key in [key for key, going in self._going.items() if not going.owes]:
                del self._going[key]
            self.is_going = bool(self._going)
            if not self._going:
                self._nodes_seen = 0
                self.wakes.clear()

    async def _post(self, key: Key, going: _Going, buckets: Buckets, planner: Planner, now_us: int) -> bool:
        """Post what one bucket owes; return whether the store answered."""
        if now_us >= going.end_us:
            going.owed, going.sent = 0.0, None  # its window is over, and its balance with it
        if not going.owes:
            return True
        try:
            if going.rolled and not await _roll(key, buckets, planner, now_us):
                return True
            going.rolled = False
            if going.sent is None:
                going.sent = _operation(key, going, planner, now_us)
                going.owed = going.requests = 0.0
            answer = await buckets.settle(key[0], going.sent, timeout_s=POST_TIMEOUT_S)
        except StoreError as error:
            log.debug("grants of %s cannot be debited yet: %s", key[1], error)
            return False
        self._posted(key, going, answer)
        return True

    def _posted(self, key: Key, going: _Going, answer: SettleAnswer) -> None:
        sent, going.sent = going.sent, None
        assert sent is not None
        if answer.status is SettleStatus.CORRUPT:
            log.error(
                "the record of %s cannot be read: %g units granted without the store are not debited", key[1], sent.work
            )
            return
        (charge,) = sent.charges
        if answer.buckets and charge.params is not None and answer.buckets[0].rate == charge.params.window_end_us:
            own = sent.requests if charge.in_requests else sent.work
            self.hear(*key, charge.params, answer.buckets[0].balance, answer.now_us, own)


async def _roll(key: Key, buckets: Buckets, planner: Planner, now_us: int) -> bool:
    """Make the store enter the window: an acquire does that, even one that asks for more than there can be."""
    slot, bucket = key
    limit = planner.find(slot.namespace, bucket)
    if limit is None or not limit.is_known:
        return True
    asks = Acquire((Want(bucket, limit.params(now_us), AMOUNT_MAX, 0.0),))
    answer = await buckets.acquire(slot, asks, timeout_s=POST_TIMEOUT_S)
    return answer.status is not AcquireStatus.WINDOW


def _operation(key: Key, going: _Going, planner: Planner, now_us: int) -> Settle:
    """Return a settle of an invented reservation: charged nothing, its work is all that is owed."""
    slot, bucket = key
    limit = planner.find(slot.namespace, bucket)
    params = limit.params(now_us) if limit is not None and limit.is_known else None
    # A progress call has no settle threshold; it debits work only.
    final = going.in_requests or going.record.settle_threshold <= 0
    return Settle(
        reservation=urlsafe_b64encode(urandom(ID_SIZE)).decode(),
        charges=(Charge(bucket, 0.0, 1.0, params, going.in_requests),),
        work=0.0 if going.in_requests else going.owed,
        acquired_us=min(going.began_us, going.end_us),
        deadline_us=going.end_us,
        final=final,
        requests=going.owed if going.in_requests else going.requests,
        is_uncounted=True,
    )
