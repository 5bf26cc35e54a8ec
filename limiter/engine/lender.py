"""Leases: descriptor → limits → buckets → slices, for holders that decide by themselves (B8, P9).

    token     signed, as a reservation is: namespace, partition, id, holder, descriptor, weight, names of the buckets
    cover     every policy of the descriptor must lend, except shadows, which are left out
    changed   other policies cover the descriptor than when the lease began: the lease is unknown, a new one begins

A request without an answer is safe to repeat: its number makes it the same request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec

from limiter.engine.planner import Planner
from limiter.engine.request_errors import (
    ClosedLease,
    LocalNotAllowed,
    NotDecided,
    OutdatedLease,
    TooManyLimits,
    Uncovered,
    UnknownLease,
)
from limiter.engine.shape import at_rate
from limiter.engine.store_health import StoreHealth
from limiter.model.bucket.admission import part_of_minimum
from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.lease_contract import (
    HeldSlice,
    LeaseRequest,
    Lent,
    LentOverload,
    LentSlice,
    RenewRequest,
    Returned,
    ReturnRequest,
    UsedSoFar,
)
from limiter.model.bucket.leases import LeaseAnswer, LeaseAsk, LeaseKind, LeaseWant, SliceAnswer
from limiter.model.bucket.lending import LendStatus, LendTerms, Said, Used
from limiter.model.bucket.reservation import Keyring
from limiter.model.overload.shedding import CLASSES, State
from limiter.model.policy.choices import OnStoreFailure
from limiter.model.policy.limit import Limit
from limiter.model.tally import LeaseTally
from limiter.store.buckets import BUCKETS_PER_OPERATION_MAX
from limiter.store.clock import StoreClock
from limiter.store.keys import Slot, bucket_name
from limiter.store.leases.lease_store import LeaseStore, lease_id
from limiter.store.store_errors import StoreShunned, StoreUnavailable

TOKEN_VERSION = b"L"
"""First byte of a lease's token; a reservation's is another."""

RENEWALS_A_LEASE = 3
NEVER = 2.0**53
"""A minimum that no slice reaches."""


class _Token(msgspec.Struct, array_like=True, frozen=True):
    """The content of a lease's token."""

    namespace: str
    partition: int
    id: str
    holder: str
    descriptor: dict[str, str]
    weight: float
    buckets: list[str]


class _Covered(NamedTuple):
    """The limits of a descriptor that lend, with the names of their buckets."""

    slot: Slot
    limits: list[Limit]
    buckets: list[str]
    weights: list[float]
    """Units of each limit for a unit of work, or for a request where it counts those."""


class Lender:
    """Lends parts of limits to holders, for one node."""

    def __init__(
        self,
        store: LeaseStore,
        keyring: Keyring,
        health: StoreHealth,
        clock: StoreClock,
        *,
        deadline_s: float,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._health = health
        self._clock = clock
        self._deadline_s = deadline_s
        self.planner: Planner
        """The limits in force; set whenever they change."""
        self.tally = LeaseTally()

    async def lend(self, request: LeaseRequest) -> Lent:
        """Begin a lease. The same holder's first request again is answered the same."""
        covered = self._cover(request.namespace, request.descriptor)
        slot, buckets = covered.slot, covered.buckets
        token = _Token(
            slot.namespace,
            slot.partition,
            lease_id(slot, request.holder, buckets),
            request.holder,
            dict(request.descriptor),
            request.weight,
            buckets,
        )
        asked = RenewRequest("", 1, 0, request.work_rate, request.request_rate, slices=request.slices)
        return await self._renew(token, covered, asked)

    async def renew(self, request: RenewRequest, *, namespace: str | None = None) -> Lent:
        """Lend the next part. `namespace` is the only one whose leases the caller may renew."""
        token = self._open(request.lease, namespace)
        return await self._renew(token, self._cover_again(token), request)

    async def give_back(self, request: ReturnRequest, *, namespace: str | None = None) -> Returned:
        """Take back what a holder has left; what it owes always counts."""
        token = self._open(request.lease, namespace)
        covered = self._cover_again(token, is_over=True)
        answer = await self._ask(token, covered, request, LeaseKind.RETURN)
        if answer.status is LendStatus.UNKNOWN:
            raise UnknownLease("this lease ended long ago; nothing was given back")
        if answer.status is LendStatus.OUTDATED:
            raise OutdatedLease(_OUTDATED)
        self.tally.count("returned")
        return Returned(token.id, returned=answer.status is LendStatus.RETURNED)

    async def _renew(self, token: _Token, covered: _Covered, request: RenewRequest) -> Lent:
        answer = await self._ask(token, covered, request, LeaseKind.RENEW)
        if answer.status is LendStatus.UNKNOWN:
            self.tally.count("unknown")
            raise UnknownLease("this lease ended long ago; begin another")
        if answer.status is LendStatus.OUTDATED:
            self.tally.count("outdated")
            raise OutdatedLease(_OUTDATED)
        if answer.status is LendStatus.CLOSED:
            self.tally.count("closed")
            raise ClosedLease("this lease was given back or revoked; what was lent ends with it")
        lends = all(one.capacity > 0 for one in answer.slices if one.share) and any(
            one.capacity > 0 or one.tokens > 0 for one in answer.slices
        )
        self.tally.count("lent" if lends else "empty")
        return self._rendered(token, covered, request, answer)

    def _cover(self, namespace: str, descriptor: Mapping[str, str], *, is_over: bool = False) -> _Covered:
        """Find the limits that lend. Where a lease is over, those that lend no more take back what they lent."""
        slot, shape = self.planner.cover(namespace, descriptor)
        if shape.denied_by is not None and not is_over:
            self.tally.count("not_allowed")
            raise LocalNotAllowed(shape.denied_by, f"{shape.denied_by} denies all requests that it covers")
        limits = [at_rate(limit, descriptor) for limit in shape if not limit.shadow]
        if not limits:
            raise Uncovered("no policy covers this descriptor, so there is nothing to lend")
        if len(limits) > BUCKETS_PER_OPERATION_MAX:
            raise TooManyLimits(f"{len(limits)} policies cover this descriptor; at most {BUCKETS_PER_OPERATION_MAX}")
        for limit in limits:
            if not limit.lends and not is_over:
                self.tally.count("not_allowed")
                detail = f"{limit.name} lends no part of its limit; set local.allowed in the policy, or ask each time"
                raise LocalNotAllowed(limit.name, detail)
        buckets = [bucket_name(limit.bucket, [descriptor.get(name) for name in limit.per]) for limit in limits]
        return _Covered(slot, limits, buckets, [_weight(limit, descriptor) for limit in limits])

    def _cover_again(self, token: _Token, *, is_over: bool = False) -> _Covered:
        covered = self._cover(token.namespace, token.descriptor, is_over=is_over)
        if covered.buckets != token.buckets or covered.slot != Slot(token.namespace, token.partition):
            self.tally.count("unknown")
            raise UnknownLease("other policies cover its descriptor than when this lease began; begin another")
        return covered

    def _open(self, token: str, namespace: str | None) -> _Token:
        payload = self._keyring.unseal(token)
        if payload is not None and payload[:1] == TOKEN_VERSION:
            try:
                found = _decode_token(payload[1:])
            except msgspec.MsgspecError:
                pass
            else:
                if namespace is None or namespace == found.namespace:
                    return found
        self.tally.count("unknown")
        raise UnknownLease("this is no lease of this service")

    async def _ask(
        self, token: _Token, covered: _Covered, request: RenewRequest | ReturnRequest, kind: LeaseKind
    ) -> LeaseAnswer:
        """Ask the store; once more with its own time where a quota's window had changed."""
        answer = None
        for _ in range(2):
            now_us = self._clock.guess_us()
            ask = LeaseAsk(
                token.id,
                float(request.number),
                tuple(self._want(covered, at, request, kind, now_us) for at in range(len(covered.limits))),
                float(request.taken),
                token.weight,
                _used(request.used),
                kind,
            )
            answer = await self._call(covered.slot, ask, token.holder)
            if answer.status is not LendStatus.WINDOW:
                break
        assert answer is not None
        if answer.status in (LendStatus.CORRUPT, LendStatus.WINDOW):
            detail = "the record of this lease or of one of its buckets cannot be read; nothing was lent"
            raise NotDecided("record_damaged", detail)
        return answer

    async def _call(self, slot: Slot, ask: LeaseAsk, holder: str) -> LeaseAnswer:
        if self._health.breaker.is_open and not self._health.allows(time.monotonic()):
            self.tally.count("unanswered")
            raise StoreShunned("the store has failed repeatedly and is not asked for a moment")
        try:
            answer = await self._store.lend(slot, ask, holder=holder, timeout_s=self._deadline_s)
        except StoreUnavailable as error:
            self._health.unanswered(error)
            self.tally.count("unanswered")
            raise
        self._health.answered()
        return answer

    def _want(
        self, covered: _Covered, at: int, request: RenewRequest | ReturnRequest, kind: LeaseKind, now_us: int
    ) -> LeaseWant:
        limit, weight = covered.limits[at], covered.weights[at]
        params = _lending(limit.params(now_us))
        held = _held(request.slices, limit)
        by_request = counts_by_request(limit)
        rate = None
        if isinstance(request, RenewRequest):
            rate = request.request_rate if by_request else request.work_rate
        wanted = -1.0 if rate is None else rate * weight
        if params.is_quota:
            ask = Said(held.held, wanted, held.spent, held.period)
        else:
            ask = Said(held.tokens if kind is LeaseKind.RETURN else held.held, wanted, held.debt, held.moved)
        return LeaseWant(covered.buckets[at], params, ask, weight, held.refused, by_request=limit.counts)

    def _rendered(self, token: _Token, covered: _Covered, request: RenewRequest, answer: LeaseAnswer) -> Lent:
        limits = covered.limits
        lease_us = min(limit.terms.lending.lease_us for limit in limits if limit.terms.lending is not None)
        rows = tuple(
            _slice(limit, weight, one, answer.now_us)
            for limit, weight, one in zip(limits, covered.weights, answer.slices, strict=True)
        )
        pressures = [one.pressure for one in answer.slices if one.pressure is not None]
        overload = _overload(limits, answer.slices, token.descriptor)
        return Lent(
            self._keyring.seal(TOKEN_VERSION + _encode_token(token)).decode(),
            token.id,
            request.number,
            round(lease_us / 1000),
            round(lease_us / 1000 / RENEWALS_A_LEASE),
            max([row.charge for row in rows if not row.counts_requests], default=1.0),
            rows,
            quality=min([one.quality for one in pressures], default=1.0),
            state=State(int(max([one.state for one in pressures], default=0.0))).word,
            on_service_failure=_strictest(limits),
            overload=msgspec.UNSET if overload is None else overload,
        )


def _lending(params: Params) -> Params:
    """Terms under which a lease can be given back, whatever the policy says by now."""
    if params.lending is not None:
        return params
    if params.is_auto:
        raise UnknownLease("this limit lends nothing any more, and what it lent has another unit")
    return replace(params, flags=params.flags | Flags.LENDS, lending=LendTerms())


_OUTDATED = "a request with a larger number was answered before; nothing was done"
_encode_token = msgspec.msgpack.Encoder().encode
_decode_token = msgspec.msgpack.Decoder(_Token).decode


def counts_by_request(limit: Limit) -> bool:
    """True if each request takes the same from this limit, whatever its work."""
    return limit.counts or limit.terms.counts_requests


def _weight(limit: Limit, descriptor: Mapping[str, str]) -> float:
    """Units for a unit of work, or for a request: a quota of requests has no weights (W12, W16)."""
    return 1.0 if limit.terms.is_quota and limit.terms.counts_requests else limit.weight(descriptor)


def _held(slices: Sequence[HeldSlice], limit: Limit) -> HeldSlice:
    for one in slices:
        if one.policy == limit.name and one.mechanism in (None, limit.mechanism):
            return one
    return HeldSlice(limit.name)


def _used(used: UsedSoFar) -> Used:
    return Used(
        used.requests, used.refused, used.charged, used.work, used.work_squared, used.settles, used.answered, used.late,
        used.seconds,
    )  # fmt: skip


def _slice(limit: Limit, weight: float, one: SliceAnswer, now_us: int) -> LentSlice:
    terms = limit.terms
    charge = limit.charge
    if limit.learned and one.charge > 0 and weight > 0:
        # A charge by values of learn_by is learned before weights, any other after them.
        charge = one.charge if Flags.LEARNS in terms.flags else one.charge / weight
    is_quota, part = limit.mechanism == "quota", one.capacity / terms.whole_capacity
    minimums: dict[str, float] = {}
    for name, least in limit.minimums.items():
        if is_quota:
            minimums[name] = NEVER if one.balance < least else 0.0
        else:
            minimums[name] = part_of_minimum(least, part=part, capacity=one.capacity)
    assert limit.mechanism != "auto", "an auto limit lends nothing"
    return LentSlice(
        limit.name,
        limit.mechanism,
        counts_by_request(limit),
        one.share,
        one.rate,
        one.capacity,
        one.tokens,
        0.0 if is_quota else one.moved,
        charge,
        weight,
        minimums,
        terms.debt_max,
        period=one.moved if is_quota else msgspec.UNSET,
        ends_in_ms=max(0.0, (one.moved - now_us) / 1000) if is_quota else msgspec.UNSET,
    )


def _overload(
    limits: Sequence[Limit], slices: Sequence[SliceAnswer], descriptor: Mapping[str, str]
) -> LentOverload | None:
    """Combine what overload control says of all buckets: of two bounds the lower, of two shares the larger."""
    places = [math.inf] * len(CLASSES)
    shares, rates = [0.0] * len(CLASSES), [math.inf] * len(CLASSES)
    is_any = False
    for limit, one in zip(limits, slices, strict=True):
        terms = limit.terms.in_flight
        if terms is not None and terms.limit > 0:
            is_any, most = True, float(math.floor(terms.limit * one.here * one.part))
            places = [min(place, most) for place in places]
        if one.pressure is None:
            continue
        is_any = True
        for number in range(len(CLASSES)):
            if one.pressure.limits[number] > 0:
                places[number] = min(places[number], float(math.floor(one.pressure.limits[number] * one.part)))
            if one.pressure.rates[number] > 0:
                rates[number] = min(rates[number], one.pressure.rates[number] * one.share)
            shares[number] = max(shares[number], one.pressure.refused_shares[number])
    if not is_any:
        return None
    return LentOverload(
        {name: place for name, place in zip(CLASSES, places, strict=True) if place < math.inf},
        {name: share for name, share in zip(CLASSES, shares, strict=True) if share > 0},
        {name: rate for name, rate in zip(CLASSES, rates, strict=True) if rate < math.inf},
        _late_after_ms(limits, descriptor),
    )


def _late_after_ms(limits: Sequence[Limit], descriptor: Mapping[str, str]) -> dict[str, float]:
    """How soon answers are expected, by class: the soonest that any of the policies says."""
    soonest: dict[str, float] = {}
    for number, criticality in enumerate(CLASSES):
        found = [limit.terms.overload.targets_ms[number] for limit in limits if limit.terms.overload is not None]
        found += [limit.expected_ms(None, descriptor, criticality) for limit in limits]
        if known := [ms for ms in found if ms > 0]:
            soonest[criticality] = min(known)
    return soonest


def _strictest(limits: Sequence[Limit]) -> Literal["local", "open", "closed"]:
    wants = {limit.on_store_failure for limit in limits}
    if wants & {OnStoreFailure.CLOSED, OnStoreFailure.KNOWN}:
        return "closed"
    return "local" if OnStoreFailure.LOCAL in wants else "open"
