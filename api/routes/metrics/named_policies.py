"""Buckets of policies without `per`, as the store holds them: one each, or one in every partition.

Policies with a bucket for each customer are not shown here: a series per customer would be too many for metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from redis.exceptions import ResponseError

from limiter.engine.engine import Engine
from limiter.engine.planner import Planner
from limiter.metrics import catalogue
from limiter.metrics.readings import Labels, Reading, plain
from limiter.model.bucket import lending
from limiter.model.bucket.bucket import Record, advance, fresh
from limiter.model.control.kept_state import KeptState
from limiter.model.overload.overload_state import NOTHING_SEEN, Seen, seen, unpack_state
from limiter.model.overload.shedding import CLASSES, State
from limiter.model.policy.limit import Limit
from limiter.model.policy.policy_set import PolicySet
from limiter.model.steps import AT_ONCE, Steps
from limiter.runtime.pauses import with_pauses
from limiter.store.inspect import SlotLook, look_at_slot
from limiter.store.keys import Slot
from limiter.store.store_errors import StoreError

POLICIES_MAX = 200
SLOTS_MAX = 64
"""Partitions that one scrape asks: a namespace of more is left out."""

TIMEOUT_S = 0.5


class Named(NamedTuple):
    """One policy's bucket: in one slot, or with a share in each."""

    namespace: str
    limit: Limit
    bucket: str
    slots: Sequence[Slot]
    labels: Labels


class _Plan(NamedTuple):
    """The buckets to read for the current policies."""

    policies: PolicySet
    named: list[Named]
    steered: set[Slot]
    not_shown: int
    """Policies without `per` that were left out because the display limit was reached."""


class NamedPolicies:
    """Reads the named buckets of a node's policies, and the owners of their partitions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plan: _Plan | None = None

    async def read(self) -> list[Reading]:
        """Read their states from the store; none if it does not answer in time."""
        plan = self._plan
        if plan is None or plan.policies is not self._engine.policies:
            self._plan = plan = await with_pauses(_plan(self._engine.decider.planner))
        # Use only this plan from here on: another scrape may replace it while the store is asked.
        names: dict[Slot, list[str]] = {slot: [] for slot in plan.steered}
        for named in plan.named:
            for slot in named.slots:
                names.setdefault(slot, []).append(named.bucket)
        looks = await asyncio.gather(
            *(look_at_slot(self._engine.link, slot, wanted, timeout_s=TIMEOUT_S) for slot, wanted in names.items()),
            return_exceptions=True,  # wait for each: none may be left running when another fails
        )
        found: dict[Slot, SlotLook] = {}
        for slot, look in zip(names, looks, strict=True):
            if isinstance(look, StoreError | ResponseError):
                return []
            if isinstance(look, BaseException):
                raise look
            found[slot] = look
        unsteered = sum(not found[slot].is_owned for slot in plan.steered)
        return [
            plain(catalogue.UNSTEERED, unsteered),
            plain(catalogue.POLICIES_NOT_SHOWN, plan.not_shown),
            *_readings(_states(plan.named, found, self._engine.now_us())),
        ]


def _plan(planner: Planner) -> Steps[_Plan]:
    """Return the buckets to read; made again, in steps, when the policies have changed."""
    policies, every, steered = planner.policies, list[Named](), set[str]()
    for number, (namespace, limit) in enumerate(planner.limits()):
        if number % AT_ONCE == 0:
            yield
        if not limit.per:
            slots, bucket = planner.places(namespace, limit, {})
            every.append(Named(namespace, limit, bucket, slots, (namespace, _label(planner, namespace, limit))))
    for number, policy in enumerate(policies.policies):
        if number % AT_ONCE == 0:
            yield
        if policies.is_steered(policy):
            steered.add(policy.namespace)
    fitting = [named for named in every if len(named.slots) <= SLOTS_MAX][:POLICIES_MAX]
    slots_of = (Slot(name, part) for name in sorted(steered) for part in range(policies.namespace(name).partitions))
    return _Plan(policies, fitting, set(islice(slots_of, SLOTS_MAX)), len(every) - len(fitting))


def _states(
    every: Iterable[Named], looks: Mapping[Slot, SlotLook], now_us: int
) -> Iterator[tuple[Labels, Limit, Record, KeptState | None]]:
    """Yield every bucket in its state at the next request."""
    for named in every:
        params = named.limit.params(now_us)
        for slot in named.slots:
            record = looks[slot].records.get(named.bucket)
            if record is None:
                record = fresh(params, now_us)
            else:
                advance(record, params, now_us)
            yield named.labels, named.limit, record, looks[slot].memories.get(named.bucket)


def _label(planner: Planner, namespace: str, limit: Limit) -> str:
    """Return a policy's name; the quota of a policy with a rate as well is marked, as its buckets are."""
    rule = planner.rule(namespace, limit.name)
    return limit.bucket if rule is not None and len(rule.limits) > 1 else limit.name


def _readings(states: Iterable[tuple[Labels, Limit, Record, KeptState | None]]) -> list[Reading]:
    """Add up the shares of each bucket; of values that do not add up, show the worst."""
    found: dict[catalogue.Definition, dict[Labels, float]] = {definition: {} for definition in (*_ADDED, *_WORST)}
    for labels, limit, record, memory in states:
        for definition, more, value in _added(record):
            values = found[definition]
            values[*labels, *more] = values.get((*labels, *more), 0.0) + value
        for definition, more, value in _worst(limit, record, memory):
            values = found[definition]
            both = (values.get((*labels, *more), value), value)
            values[*labels, *more] = min(both) if definition is catalogue.POLICY_QUALITY else max(both, key=abs)
    return [Reading(definition, values) for definition, values in found.items()]


_ADDED = (
    catalogue.POLICY_BALANCE,
    catalogue.POLICY_CAPACITY,
    catalogue.POLICY_COMMITTED,
    catalogue.POLICY_CAP,
    catalogue.POLICY_UNCOLLECTED,
    catalogue.POLICY_CLASS_RATE,
    catalogue.POLICY_CLASS_LIMIT,
    catalogue.POLICY_IN_FLIGHT,
    catalogue.POLICY_HOLDERS,
)
_WORST = (
    catalogue.POLICY_CHARGE,
    catalogue.POLICY_CHARGE_ERROR,
    catalogue.POLICY_THROTTLE,
    catalogue.POLICY_REFUSED_SHARE,
    catalogue.POLICY_LATE_SHARE,
    catalogue.POLICY_TARGET,
    catalogue.POLICY_PERCENTILE,
    catalogue.POLICY_QUALITY,
    catalogue.POLICY_OVERLOADED,
    catalogue.POLICY_STATE,
)

_Values = Iterator[tuple[catalogue.Definition, Labels, float]]
"""The values of one bucket, with labels beside those of its policy."""


def _added(record: Record) -> _Values:
    yield catalogue.POLICY_BALANCE, (), record.balance
    yield catalogue.POLICY_CAPACITY, (), record.capacity
    yield catalogue.POLICY_UNCOLLECTED, (), record.uncollected
    if not record.is_quota:
        yield catalogue.POLICY_COMMITTED, (), record.committed
        if record.counts_requests:
            yield catalogue.POLICY_CAP, (), record.rate
    if record.lent is not None and record.book is not None:
        yield catalogue.POLICY_HOLDERS, (), lending.holders(record.book, record.updated_us + record.lent.shift_us)
    if record.shedding is not None:
        for criticality, rate in zip(CLASSES, record.shedding.rates, strict=True):
            if rate > 0:
                yield catalogue.POLICY_CLASS_RATE, (criticality.value,), rate
        for criticality, most in zip(CLASSES, record.shedding.limits, strict=True):
            if most > 0:
                yield catalogue.POLICY_CLASS_LIMIT, (criticality.value,), most
    if record.slots is not None:
        yield catalogue.POLICY_IN_FLIGHT, (), record.slots.count


def _worst(limit: Limit, record: Record, memory: KeptState | None) -> _Values:
    if record.charge:
        yield catalogue.POLICY_CHARGE, (), record.charge
        if memory is not None:
            yield catalogue.POLICY_CHARGE_ERROR, (), memory.state.learning.error
    if record.shedding is not None:
        yield from _measured(limit, NOTHING_SEEN if memory is None else seen(unpack_state(memory.overload)))
        for criticality, share in zip(CLASSES, record.shedding.refused_shares, strict=True):
            yield catalogue.POLICY_REFUSED_SHARE, (criticality.value,), share
        yield catalogue.POLICY_QUALITY, (), record.shedding.quality
        yield catalogue.POLICY_OVERLOADED, (), float(record.shedding.state == State.OVERLOADED)
        yield catalogue.POLICY_STATE, (), record.shedding.state


def _measured(limit: Limit, known: Seen) -> _Values:
    """The controllers' figures (S10)."""
    if limit.expectations is not None:
        yield catalogue.POLICY_THROTTLE, (), limit.expectations.initial if known.throttle is None else known.throttle
    if known.late_share is not None:
        yield catalogue.POLICY_LATE_SHARE, (), known.late_share
    if known.target_ms is not None:
        yield catalogue.POLICY_TARGET, (), known.target_ms / 1000
    if known.percentile_ms is not None:
        yield catalogue.POLICY_PERCENTILE, (), known.percentile_ms / 1000
