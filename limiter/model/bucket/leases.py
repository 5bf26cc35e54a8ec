"""A request for a lease, over all buckets of its descriptor or none: the frame of `lua/lend.lua` (B8, P9).

    renew    the first request too: what each bucket lends from now on
    return   the holder gives back what it has
    revoke   nothing more is lent; what is lent ends with its lease, and may be given back before

repeated number   the same answer, nothing changes
smaller number    OUTDATED, nothing changes
no row            a first request (number 1) makes one; any other is UNKNOWN: its lease ended long ago
no slice of one   no slice of any: a holder that must ask for one policy asks for all

What the holder did comes as sums since the lease began; the row knows what was counted, so each is counted once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from limiter.model.bucket import lending
from limiter.model.bucket.bucket import KIND, WEIGHS, Flags, Params, Record, share_of
from limiter.model.bucket.lending import Book, Draft, LendStatus, LendTerms, Part, Row, Said, Used
from limiter.model.overload.shedding import NO_CLASS, FourFloats

DEFAULT_CLASS = 1
"""The class that answers to a holder's requests count in: its sums do not tell classes apart."""


class LeaseKind(IntEnum):
    """The kind of a request."""

    RENEW = 1
    RETURN = 2
    REVOKE = 3


class LeaseWant(NamedTuple):
    """One bucket's part in a request. `ask.debt` of a return is what is given back, below zero what is owed."""

    bucket: str
    params: Params
    ask: Said = Said()
    weight: float = 1.0
    """How many units of this limit one unit of work is (W12)."""
    refused: float = 0.0
    """Requests that this policy's slice refused, since the lease began."""
    by_request: bool = False
    """True if a bucket of work charges each request alike, whatever its work (W16)."""


class LeaseAsk(NamedTuple):
    """A numbered request of one holder."""

    lease: str
    number: float
    wants: tuple[LeaseWant, ...]
    taken: float = 0.0
    """The last answer that it took over."""
    weight: float = 1.0
    """How many it stands for."""
    used: Used = Used()
    kind: LeaseKind = LeaseKind.RENEW


class LentPressure(NamedTuple):
    """Overload control of the whole bucket by class, for a holder to go by."""

    quality: float
    state: float
    refused_shares: FourFloats
    rates: FourFloats
    limits: FourFloats


class SliceAnswer(NamedTuple):
    """The part of one bucket."""

    rate: float = 0.0
    """Units a second."""
    capacity: float = 0.0
    tokens: float = 0.0
    """Units that this answer adds to the holder's."""
    share: float = 0.0
    moved: float = 0.0
    balance: float = 0.0
    """Units left in the bucket itself."""
    end_us: float = 0.0
    charge: float = 0.0
    """Learned by the bucket; 0: nothing."""
    part: float = 0.0
    """Part of the capacity."""
    here: float = 1.0
    """Share of the whole limit that this bucket has, where partitions divide it."""
    pressure: LentPressure | None = None
    """Where the bucket has overload control."""


class LeaseAnswer(NamedTuple):
    """The outcome of a request."""

    status: LendStatus
    now_us: int
    slices: tuple[SliceAnswer, ...] = ()


def is_known(row: Row | None, books: list[Book]) -> bool:
    """Return whether a lease is still known: it has not ended long ago."""
    if row is None:
        return False
    return any(book.tau_us <= part.end_us + lending.ROW_KEPT_US for book, part in zip(books, row.parts, strict=True))


def terms_of(record: Record, params: Params, now_us: int) -> LendTerms:
    """Return the terms of a policy that lends; a partition of a divided limit has its share of the bound."""
    assert params.lending is not None
    return params.lending._replace(bound=params.lending.bound * share_of(record, params, now_us))


def answered(
    row: Row, wants: tuple[LeaseWant, ...], records: list[Record], terms: list[LendTerms], now_us: int
) -> tuple[SliceAnswer, ...]:
    """Return the answer that a row holds."""
    answers = []
    for want, record, part, term in zip(wants, records, row.parts, terms, strict=True):
        if record.is_quota:
            answers.append(
                SliceAnswer(
                    tokens=part.tokens,
                    moved=record.rate,
                    balance=record.balance,
                    end_us=part.end_us,
                    charge=record.charge,
                    pressure=_pressure(record),
                )
            )
            continue
        whole = record.capacity + term.bound
        answers.append(
            SliceAnswer(
                part.rate * record.rate,
                part.capacity * whole,
                part.tokens,
                part.rate,
                part.moved,
                record.balance,
                part.end_us,
                record.charge,
                part.capacity,
                share_of(record, want.params, now_us),
                _pressure(record),
            )
        )
    return tuple(answers)


def _pressure(record: Record) -> LentPressure | None:
    known = record.shedding
    if known is None:
        return None
    a, b, c, d = known.limits
    if known.lent_until_us == 0:  # no throttle is in force
        return LentPressure(1.0, 0.0, NO_CLASS, NO_CLASS, (a, b, c, d))
    shares, rates = tuple(known.refused_shares), tuple(known.rates)
    return LentPressure(known.quality, known.state, shares, rates, (a, b, c, d))  # type: ignore[arg-type]


def standing(row: Row | None, ask: LeaseAsk) -> LendStatus:
    """Return the treatment of a request: LENT, RETURNED, REPEATED, or the status of one that does nothing."""
    if row is None:
        return LendStatus.LENT if ask.number == 1 and ask.kind is LeaseKind.RENEW else LendStatus.UNKNOWN
    if ask.number < row.number:
        return LendStatus.OUTDATED
    if row.is_closed or (row.is_revoked and ask.kind is LeaseKind.RENEW):
        return LendStatus.CLOSED
    if ask.number == row.number:
        return LendStatus.REPEATED
    return LendStatus.LENT if ask.kind is LeaseKind.RENEW else LendStatus.RETURNED


def revoke(row: Row | None) -> LendStatus:
    """Lend nothing more under a lease."""
    if row is None:
        return LendStatus.UNKNOWN
    if row.is_closed or row.is_revoked:
        return LendStatus.CLOSED
    row.is_revoked = True
    return LendStatus.RETURNED


def renew(row: Row | None, ask: LeaseAsk, records: list[Record], books: list[Book], terms: list[LendTerms]) -> Row:
    """Lend again. Every bucket drafts its part; something is lent only if each bucket has a part to give."""
    if row is None:
        row = Row(0.0, ask.weight, Used(), [Part(moved=want.ask.moved) for want in ask.wants])
    used = grown(row.used, ask.used)
    drafts = [
        _drafted(row, ask, want, record, book, part, term)
        for want, record, book, part, term in zip(ask.wants, records, books, row.parts, terms, strict=True)
    ]
    if any(draft is not None and draft.capacity == 0 for draft in drafts):
        drafts = [None if draft is None else draft._replace(rate=0.0, capacity=0.0) for draft in drafts]
    for draft, want, record, book, part, term in zip(drafts, ask.wants, records, books, row.parts, terms, strict=True):
        if draft is None:
            lending.portion(record, book, part, want.ask, term, ask.weight)
        else:
            lending.lend(record, book, draft, part, want.ask, term, ask.weight)
        _count_used(record, book, part, row.used, used, want)
        lending.finish(record, book, term)
    row.number, row.weight, row.used = ask.number, ask.weight, used
    return row


def _drafted(
    row: Row, ask: LeaseAsk, want: LeaseWant, record: Record, book: Book, part: Part, terms: LendTerms
) -> Draft | None:
    """Return the part that a bucket would lend; None for a quota, which gives portions."""
    is_live = lending.take_out(book, row, part)
    if record.is_quota:
        return None
    using, left = (0.0, 0.0), 0.0
    if is_live and not part.period_us:
        left = lending.left_at_most(record, book, part, terms, is_taken=ask.taken == row.number)
        using = lending.in_use(record, row, part, ask.taken, want.ask.held)
    return lending.draft(record, book, using, want.ask, terms, ask.weight)._replace(left=left)


def give_back(row: Row, ask: LeaseAsk, records: list[Record], books: list[Book], terms: list[LendTerms]) -> None:
    """End a lease; the row stays for a while, so that an older request finds it closed."""
    used = grown(row.used, ask.used)
    for want, record, book, part, term in zip(ask.wants, records, books, row.parts, terms, strict=True):
        is_live = lending.take_out(book, row, part)
        if record.is_quota:
            lending.give_back_portion(record, part, want.ask)
        else:
            lending.give_back(record, book, row, part, ask.taken, want.ask, term, is_live=is_live)
        part.end_us = min(part.end_us, book.tau_us)
        _count_used(record, book, part, row.used, used, want)
        lending.finish(record, book, term)
    row.number, row.weight, row.used = ask.number, ask.weight, used
    row.is_closed, row.is_revoked = True, False


def _count_used(record: Record, book: Book, part: Part, then: Used, now: Used, want: LeaseWant) -> None:
    """Count what was done since the last request that was counted: no demand of plain callers."""
    requests, refused = now.requests - then.requests, now.refused - then.refused
    admitted = max(0.0, requests - refused)
    charged = (admitted if want.by_request else now.charged - then.charged) * want.weight
    settles, squared = now.settles - then.settles, (now.work_squared - then.work_squared) * want.weight
    if record.flags & KIND == Flags.COUNTS_REQUESTS or record.flags & WEIGHS:
        requests, admitted, settles = requests * want.weight, admitted * want.weight, settles * want.weight
    else:
        squared *= want.weight
    record.requests += requests
    record.admitted += admitted
    record.refused += max(0.0, want.refused - part.refused)
    record.work_charged += charged
    record.work_settled += (now.work - then.work) * want.weight
    record.work_squared += squared
    record.settles += settles
    part.refused = max(part.refused, want.refused)
    book.seen_work += charged
    book.seen_requests += requests
    book.seen_admitted += admitted
    record.missed += now.late - then.late
    if record.shedding is not None:
        record.shedding.asked[DEFAULT_CLASS] += now.requests - then.requests
        record.shedding.timed[DEFAULT_CLASS] += now.answered - then.answered
        record.shedding.late[DEFAULT_CLASS] += now.late - then.late
        record.shedding.seconds += now.seconds - then.seconds


def grown(then: Used, now: Used) -> Used:
    """Sums never shrink: one that does is taken for what it was."""
    return Used(*(max(before, after) for before, after in zip(then, now, strict=True)))
