"""Parts of a bucket's limit, lent to holders that decide by themselves: the reference for `lua/lend.lua` (B8, P9).

    bucket   refills at r · (1 − Σ rates lent), holds c · (1 − Σ capacities lent)        while anything is lent
    holder   refills at r · its rate, holds (c + bound) · its capacity                   until its lease ends
    so that  over any w seconds all of them together admit at most c + bound + r · w

Rates and capacities are lent as fractions: a changed policy, a steered cap or a moved share needs no conversion (F-L5).

A holder sends one request at a time, numbered, takes over only the answer to its latest one, and says in the next which
answer it took last. So the bucket knows what the holder may be using: the answer it took, else what it had before. It
counts the larger of these two as lent, until the holder has said which, or its end has passed. A holder lowers itself
before it asks; it is raised only out of what is free. A lost answer costs time and nothing else (F-L3).

    tau      own time of a bucket = updated_us + shift_us: follows the store's clock, never goes back, and while parts
             are lent goes forward by no more a call than holders let pass: a leap of the clock ends no leases (F-L4)
    book     sums over all parts with the same end (half seconds), so that no holder is ever looked up for another
    row      what one lease was answered last, a part for each of its buckets

    level    (1 − demand of the content − plain) / (weight of the short + own weight)     max-min fair, of the rate
    goal     demand, where the level covers it, and an equal part of what is spare; else the level
    rate     min(goal, max(what it holds, what is free))
    capacity half in equal parts, half with the rate; below `need` there is no slice and the holder asks the bucket
    tokens   go along with growing capacity, in proportion
    moved    debt that the holder could not repay within its lease becomes the bucket's, once: a number that only grows

A quota lends tokens for good: portions that shrink with what is left, the last units one by one (F-L8).
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

GRAIN_US = 500_000.0
"""Ends are rounded up to a multiple of this, so that a few sums stand for any number of holders."""
MARGIN_US = 500_000.0
"""The bucket waits so much longer than the holder: clocks run at different speeds, and one may leap. With the grain, a
lease and a second at most."""
ROW_KEPT_US = 5_000_000.0
"""A row is known so long after its end: later it is as if there had been no lease."""
LEAP_MAX_US = 1_200_000.0
"""A bucket that lends believes in no more time than this between two calls, or in a third of what is left of its
leases, if that is more: longer leases are renewed less often. So a leap of the clock ends a lease at most
`LEAP_MAX_US - MARGIN_US` = 0.7 s early, and credits at most what the bucket itself gets in 1.2 s: in all at most
0.7 · (capacity + a second's rate), as min(capacity, 1.2 s of rate) is less than that."""
LEAP_PARTS = 3.0
SMOOTH_US = 1_000_000.0
PLAIN_MIN_US = 100_000.0
HEAD = 1.05
"""Plain callers are left this much of their demand, which is noisy."""
PLAIN_MANY_MAX = 1e6
LEAST_SLACK = 1.0 - 1e-9
PORTION_S = 1.5
"""A quota's portion lasts so long at the holder's demand."""
HOLDERS_MIN = 0.5
"""A sum with less weight than this is empty: what is left of it was rounding."""


class LendTerms(NamedTuple):
    """The terms of lending, from a policy's `local`."""

    bound: float = 0.0
    """Units that all parts together may hold beyond the capacity."""
    need: float = 4.0
    """Units of capacity below which a slice is of no use."""
    lease_us: float = 3_000_000.0


@dataclass(slots=True)
class Lent:
    """The lending part of a record: all that an acquire or a settle has to know."""

    rate: float = 0.0
    """Part of the rate that is lent."""
    capacity: float = 0.0
    """Part of the capacity that is lent."""
    until_us: float = 0.0
    """When the last part ends, in the bucket's own time."""
    shift_us: float = 0.0
    """Own time − the store's time."""


@dataclass(slots=True)
class Sums:
    """The sums of all parts with one end."""

    end_us: float
    rate: float = 0.0
    capacity: float = 0.0
    holders: float = 0.0
    """Their weight."""
    content: float = 0.0
    """Demand of those that get what they want, in parts of the rate."""
    short: float = 0.0
    """Weight of those that do not."""
    demand: float = 0.0


@dataclass(slots=True)
class Book:
    """The sums of what a bucket lends; part of its record, so that both live and end together."""

    tau_us: float = 0.0
    """Own time when it was last opened; 0: never."""
    plain_rate: float = 0.0
    """Demand of callers without a lease, in units per second."""
    plain_at_us: float = 0.0
    seen_work: float = 0.0
    seen_requests: float = 0.0
    seen_admitted: float = 0.0
    ends: list[Sums] = field(default_factory=list)

    def copy(self) -> Book:
        """Return a book of its own, for a request that may come to nothing."""
        return replace(self, ends=[copy(sums) for sums in self.ends])


@dataclass(slots=True)
class Part:
    """One bucket's part in a lease, as it was answered last."""

    end_us: float = 0.0
    rate: float = 0.0
    capacity: float = 0.0
    held_rate: float = 0.0
    """The holder's part before that answer."""
    held_capacity: float = 0.0
    tokens: float = 0.0
    """Tokens that came with that answer."""
    moved: float = 0.0
    """Debt of the holder's that is the bucket's by now, in all. Of a quota: what it could not pay of what was spent."""
    period_us: float = 0.0
    """Of a quota: when the period ends that `given` is of; 0 of a rate."""
    given: float = 0.0
    """Of a quota: all that was given in this period and not taken back."""
    refused: float = 0.0
    """Refusals by this slice that are counted already."""
    content: float = 0.0
    short: float = 0.0
    demand: float = 0.0
    level: float = 0.0
    """The most that the holder can have had left, with that answer's tokens: no more can ever be given back."""
    at_us: float = 0.0
    """When that was, in the bucket's own time."""


class Used(NamedTuple):
    """Sums of a holder's doings since its lease began; they only grow."""

    requests: float = 0.0
    refused: float = 0.0
    charged: float = 0.0
    work: float = 0.0
    work_squared: float = 0.0
    settles: float = 0.0
    answered: float = 0.0
    late: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class Row:
    """One lease, as the store knows it."""

    number: float
    weight: float
    used: Used
    parts: list[Part]
    is_closed: bool = False
    """Given back: it is over."""
    is_revoked: bool = False
    """Nothing more is lent; what is lent ends with its lease, and can be given back until then."""

    def copy(self) -> Row:
        """Return a row of its own, for a request that may come to nothing."""
        return replace(self, parts=[copy(part) for part in self.parts])


class LendStatus(IntEnum):
    """The outcome of a request for a lease."""

    LENT = 1
    OUTDATED = 2
    """A request with a larger number was answered before: nothing was done."""
    UNKNOWN = 3
    """There is no such lease any more, and this is not its first request: nothing was done."""
    CLOSED = 4
    """The lease was revoked or given back before: nothing more is lent."""
    RETURNED = 5
    WINDOW = 6
    """A quota's window does not hold the server's time: ask again with the right one."""
    CORRUPT = 7
    REPEATED = 8
    """The same request as before: the same answer. Callers see it as LENT."""


class Lending(Protocol):
    """A record, as far as lending goes."""

    updated_us: float
    balance: float
    rate: float
    capacity: float
    requests: float
    admitted: float
    work_charged: float
    uncollected: float
    debt_max: float
    lent: Lent | None
    book: Book | None

    @property
    def counts_requests(self) -> bool:
        """True if the balance is in requests."""


class Said(NamedTuple):
    """A holder's word on one bucket when it asks."""

    held: float = 0.0
    """Part of the rate that it has limited itself to. Of a quota: unused tokens that it keeps."""
    wanted: float = -1.0
    """Units a second that it is asked for; below zero: it cannot tell."""
    debt: float = 0.0
    """Debt. Of a quota: all that was spent."""
    moved: float = 0.0
    """How much of what it owed it knows to be the bucket's by now, in all."""


class Draft(NamedTuple):
    """The part that a bucket would lend, before the other buckets of the lease have agreed."""

    held_rate: float
    held_capacity: float
    demand: float
    is_content: bool
    rate: float
    capacity: float
    crowded: bool
    """Too many holders for the capacity: they must not weigh on the fair part of those that have a slice."""
    left: float = 0.0
    """The most that the holder can have left."""


def refill(record: Lending, lent: Lent, elapsed_us: float) -> None:
    """Credit a bucket that may have lent parts of itself; `updated_us` is still the old one."""
    tau_us = record.updated_us + lent.shift_us
    if lent.until_us > tau_us:
        believed_us = max(LEAP_MAX_US, (lent.until_us - tau_us) / LEAP_PARTS)
        if elapsed_us > believed_us:
            lent.shift_us -= elapsed_us - believed_us
            elapsed_us = believed_us
        lent_us = min(elapsed_us, lent.until_us - tau_us)
        balance = record.balance + lent_us * record.rate * (1.0 - lent.rate) / 1e6
        record.balance = min(balance, free_capacity(record))
        elapsed_us -= lent_us
        if elapsed_us <= 0:
            return
    lent.rate = lent.capacity = 0.0
    record.balance = min(record.balance + elapsed_us * record.rate / 1e6, record.capacity)


def free_capacity(record: Lending) -> float:
    """Return the capacity that is not lent."""
    lent = record.lent
    return record.capacity if lent is None else record.capacity * (1.0 - lent.capacity)


def keep_lent(record: Lending, bounds: tuple[float, float], capacity: float) -> None:
    """Before the capacity is raised: a bound does not grow with it, so neither does the bucket's own part of that.

    `bounds` are the bucket's part of the bound before and from now on. A bucket that lends no more than the bound keeps
    all of its capacity, but not all of a larger one.
    """
    lent, (before, bound) = record.lent, bounds
    if lent is not None and bound > 0 and lent.until_us > record.updated_us + lent.shift_us:
        own = free_capacity(record) * (capacity + bound) / (record.capacity + before)
        lent.capacity = 1.0 - min(1.0, own / capacity)


def free_part(record: Lending) -> float:
    """The part of its capacity, and of the places in flight, that the bucket itself keeps."""
    return 1.0 if record.lent is None else 1.0 - record.lent.capacity


def is_lent_sound(lent: Lent, *, most: float) -> bool:
    """Return whether the numbers make sense. Written so that NaN fails as well."""
    return (
        0 <= lent.rate < math.inf
        and 0 <= lent.capacity <= 1
        and 0 <= lent.until_us <= most
        and -most < lent.shift_us < most
    )


def begin(record: Lending, need: float) -> Book:
    """Open the book of a bucket that was brought to now: drop what has ended, follow the plain callers."""
    lent, book = record.lent, record.book
    assert lent is not None
    assert book is not None
    tau_us = record.updated_us + lent.shift_us
    if book.tau_us == 0:
        book.tau_us = book.plain_at_us = tau_us
        saw(record, book)
        return book
    if tau_us < book.tau_us:
        # The clock went back while nothing was lent: rows of before must not come to life again.
        lent.shift_us += book.tau_us - tau_us
        tau_us = book.tau_us
    book.tau_us = tau_us
    book.ends = [sums for sums in book.ends if sums.end_us > tau_us]
    _follow_plain(record, book, need)
    return book


def _follow_plain(record: Lending, book: Book, need: float) -> None:
    elapsed_us = book.tau_us - book.plain_at_us
    if elapsed_us < PLAIN_MIN_US:
        return
    requests, admitted = record.requests - book.seen_requests, record.admitted - book.seen_admitted
    each = 1.0 if record.counts_requests else need
    if admitted > 0 and not record.counts_requests:  # what was refused is taken to cost as much as the rest
        each = (record.work_charged - book.seen_work) / admitted
    asked = requests * each / elapsed_us * 1e6
    book.plain_rate += elapsed_us / (elapsed_us + SMOOTH_US) * (asked - book.plain_rate)
    book.plain_at_us = book.tau_us
    saw(record, book)


def saw(record: Lending, book: Book) -> None:
    """Note the record's counts: only later ones are new."""
    book.seen_work, book.seen_requests, book.seen_admitted = record.work_charged, record.requests, record.admitted


def take_out(book: Book, row: Row, part: Part) -> bool:
    """Take a lease's part out of the sums; whether it was still in them. A bucket that was forgotten has none."""
    if part.end_us <= book.tau_us:
        return False
    rate, capacity = max(part.rate, part.held_rate), max(part.capacity, part.held_capacity)
    for sums in book.ends:
        if sums.end_us == part.end_us:
            sums.rate = max(0.0, sums.rate - rate)
            sums.capacity = max(0.0, sums.capacity - capacity)
            sums.holders = max(0.0, sums.holders - row.weight)
            sums.content = max(0.0, sums.content - part.content)
            sums.short = max(0.0, sums.short - part.short)
            sums.demand = max(0.0, sums.demand - part.demand)
            return True
    return False


def in_use(record: Lending, row: Row, part: Part, taken: float, held: float) -> tuple[float, float]:
    """Parts of rate and capacity that the holder of a live part may be using."""
    if taken == row.number:
        return min(part.rate, held), part.capacity
    record.balance += part.tokens  # that answer is never taken over now
    return min(part.held_rate, held), part.held_capacity


def left_at_most(record: Lending, book: Book, part: Part, terms: LendTerms, *, is_taken: bool) -> float:
    """Return the most that the holder of a live part can have left, whatever it says."""
    elapsed_us, whole = book.tau_us - part.at_us, record.capacity + terms.bound
    if is_taken:
        return min(part.level + elapsed_us * part.rate * record.rate / 1e6, part.capacity * whole)
    before = part.level - part.tokens  # that answer was never taken over
    return min(before + elapsed_us * part.held_rate * record.rate / 1e6, part.held_capacity * whole)


def _count(book: Book, part: Part, weight: float) -> None:
    rate, capacity = max(part.rate, part.held_rate), max(part.capacity, part.held_capacity)
    for sums in book.ends:
        if sums.end_us == part.end_us:
            sums.rate += rate
            sums.capacity += capacity
            sums.holders += weight
            sums.content += part.content
            sums.short += part.short
            sums.demand += part.demand
            return
    book.ends.append(Sums(part.end_us, rate, capacity, weight, part.content, part.short, part.demand))


def total(book: Book) -> Sums:
    """The sums over all ends."""
    every = Sums(0.0)
    for sums in book.ends:
        every.rate += sums.rate
        every.capacity += sums.capacity
        every.holders += sums.holders
        every.content += sums.content
        every.short += sums.short
        every.demand += sums.demand
    return every


def holders(book: Book, tau_us: float) -> float:
    """The weight of all holders whose parts have not ended."""
    return sum(sums.holders for sums in book.ends if sums.end_us > tau_us)


def draft(record: Lending, book: Book, using: tuple[float, float], ask: Said, terms: LendTerms, weight: float) -> Draft:
    """Return the part for a holder that may be using such parts of rate and capacity."""
    held_rate, held_capacity = using
    others, whole = total(book), record.capacity + terms.bound
    n = others.holders + weight + 1.0  # with this holder and the bucket's own callers
    demand = weight / n if ask.wanted < 0 else min(1.0, ask.wanted / record.rate)
    plain = (book.plain_rate * HEAD + max(0.0, -record.balance) / terms.lease_us * 1e6) / record.rate
    goal, own, is_content = _fair(others, demand, plain, weight)
    rate = min(goal, max(held_rate, 1.0 - own - others.rate))
    least = terms.need / whole
    equal = max(least, 0.5 * weight / n)
    capacity = min(equal + rate * max(0.0, 1.0 - n * equal / weight), max(held_capacity, 1.0 - least - others.capacity))
    if capacity < least * LEAST_SLACK:
        rate = capacity = 0.0
    return Draft(held_rate, held_capacity, demand, is_content, rate, capacity, n * least > weight)


def _fair(others: Sums, demand: float, plain: float, weight: float) -> tuple[float, float, bool]:
    """Max-min: the holder's part of the rate, the plain callers' part, and whether the holder gets what it wants."""
    mean = (others.demand + demand) / (others.holders + weight)
    many = max(1.0, min(PLAIN_MANY_MAX, plain / mean)) if mean > 0 else 1.0
    everybody = others.holders + weight + many
    level = (1.0 - others.content - plain) / (others.short + weight)
    if plain > many * level:
        level = (1.0 - others.content) / (others.short + weight + many)
    level = max(level, 1.0 / everybody)
    if demand > level * weight:
        return level * weight, min(plain, many * level), False
    spare = 1.0 - others.content - demand - plain
    if others.short == 0 and spare > 0:
        return demand + weight * spare / everybody, plain + many * spare / everybody, True
    return demand, min(plain, many * level), True


def lend(record: Lending, book: Book, plan: Draft, part: Part, ask: Said, terms: LendTerms, weight: float) -> None:
    """Lend what was drafted: tokens go with the capacity, and debt that cannot be repaid in time comes here."""
    others = total(book)
    tokens = 0.0
    if plan.capacity > plan.held_capacity and record.balance > 0:
        free = 1.0 - others.capacity - plan.held_capacity
        tokens = record.balance * min(1.0, (plan.capacity - plan.held_capacity) / free)
    record.balance -= tokens
    part.rate, part.capacity, part.tokens = plan.rate, plan.capacity, tokens
    part.level, part.at_us = plan.left + tokens, book.tau_us
    part.given = part.period_us = 0.0
    part.held_rate, part.held_capacity = plan.held_rate, plan.held_capacity
    part.end_us = lease_end_us(book, terms)
    part.content = plan.demand if plan.is_content else 0.0
    part.short = 0.0 if plan.is_content else weight
    part.demand = plan.demand
    lent_rate, lent_capacity = max(plan.rate, plan.held_rate), max(plan.capacity, plan.held_capacity)
    if lent_capacity == 0 and plan.crowded:
        part.content = part.short = part.demand = 0.0
    payable = lent_rate * record.rate * terms.lease_us / 1e6
    owed = max(0.0, ask.debt - (part.moved - ask.moved) - payable)
    owe(record, owed)
    part.moved += owed
    _count(book, part, weight)


def owe(record: Lending, amount: float) -> None:
    """Debit what a holder owes; what the debt bound cuts off is counted (W5)."""
    taken = min(amount, max(0.0, record.balance + record.debt_max))
    record.balance -= taken
    record.uncollected += amount - taken


def finish(record: Lending, book: Book, terms: LendTerms) -> None:
    """Write into the record what the book comes to."""
    lent = record.lent
    assert lent is not None
    book.ends = [sums for sums in book.ends if sums.holders > HOLDERS_MIN]
    every = total(book)
    until_us = 0.0
    for sums in book.ends:
        until_us = max(until_us, sums.end_us)
    own = (record.capacity + terms.bound) * (1.0 - every.capacity) / record.capacity
    lent.rate, lent.capacity = max(0.0, every.rate), 1.0 - min(1.0, max(0.0, own))
    lent.until_us = until_us
    record.balance = min(record.balance, free_capacity(record))


def give_back(
    record: Lending, book: Book, row: Row, part: Part, taken: float, ask: Said, terms: LendTerms, *, is_live: bool
) -> None:
    """End a part: tokens come back if the lease is not over, debt always (F-L6). `ask.held` is what is given back."""
    if is_live and not part.period_us:
        most = left_at_most(record, book, part, terms, is_taken=True)
        record.balance += min(ask.held, most) if taken == row.number else part.tokens
    owe(record, max(0.0, ask.debt - (part.moved - ask.moved)))
    part.rate = part.capacity = part.held_rate = part.held_capacity = part.tokens = part.level = 0.0


def portion(record: Lending, book: Book, part: Part, ask: Said, terms: LendTerms, weight: float) -> None:
    """Debit a quota by the portion that a holder is given now (F-L8).

    `ask.debt` is all that the holder has spent in this period, `ask.held` what it still keeps; tokens of answers that
    it never took over are in neither, and come back. Numbers of another period (`ask.moved`, its end) do not count.
    """
    spent, held = (ask.debt, ask.held) if ask.moved == record.rate else (0.0, 0.0)
    given = part.given if part.period_us == record.rate else 0.0
    part.moved = part.moved if part.period_us == record.rate else 0.0
    held = min(held, max(0.0, given - spent))  # a holder never had more than it was given
    _set_right(record, part, given, spent + held)
    wanted = max(0.0, ask.wanted)
    goal = min(wanted * PORTION_S, (record.balance + held) / (2.0 * (total(book).holders + weight + 1.0)))
    if wanted > 0 and goal < 1:
        goal = 1.0  # the last units go one by one
    more = max(0.0, min(float(math.ceil(goal - held)), float(math.floor(record.balance))))
    record.balance -= more
    part.rate = part.capacity = part.held_rate = part.held_capacity = 0.0
    part.content = part.short = part.demand = 0.0
    part.tokens, part.given, part.period_us = more, spent + held + more, record.rate
    part.end_us = lease_end_us(book, terms)
    _count(book, part, weight)


def give_back_portion(record: Lending, part: Part, ask: Said) -> None:
    """Take back what a holder has not spent of its portions, and debit what it has spent beyond them."""
    if part.period_us == record.rate and ask.moved == record.rate:
        _set_right(record, part, part.given, ask.debt)
    part.tokens = part.given = 0.0


def _set_right(record: Lending, part: Part, given: float, kept: float) -> None:
    """Give a quota back what a holder does not keep, or debit what it has spent beyond what it was given.

    What the quota could not pay comes back to nobody.
    """
    if kept > given:
        unpaid = record.uncollected
        owe(record, kept - given)
        part.moved += record.uncollected - unpaid
    else:
        forgiven = min(given - kept, part.moved)
        part.moved -= forgiven
        record.uncollected -= forgiven
        record.balance += given - kept - forgiven


def lease_end_us(book: Book, terms: LendTerms) -> float:
    """When a part that is lent now ends, in the bucket's own time."""
    return math.ceil((book.tau_us + terms.lease_us + MARGIN_US) / GRAIN_US) * GRAIN_US
