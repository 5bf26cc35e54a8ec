"""Checks that the fields of a policy fit each other: a contradiction, or a field without effect, is refused by name.

Which field has an effect beside which others: `limiter.model.policy.fitness`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

from limiter.model.bucket.admission import class_minimum
from limiter.model.overload.overload_block import CountedIn
from limiter.model.policy.choices import Admit, Count, Mechanism, OnStoreFailure
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.field_refusals import TIMELESS, is_stored, refuse
from limiter.model.policy.fields.kinds import rate_per_s
from limiter.model.policy.fields.shown import show, step, written
from limiter.model.policy.fitness import Kind, misplaced

if TYPE_CHECKING:
    from limiter.model.policy.policy import Policy


def check(policy: Policy, info: ValidationInfo) -> None:
    """Refuse a policy whose fields do not fit each other; a stored one may have fields without effect."""
    if not policy.deny and policy.rate is None and policy.quota is None:
        raise refuse("a rate, a quota, both, or deny: true", field="rate", found="none of them")
    if policy.quota is not None and policy.rate is None:
        _fits_a_quota(policy)
    if not is_stored(info):
        _has_effect(policy)
    if policy.steering.initial == "C/F" and policy.max_work is None:
        raise refuse("'C/F' only with max_work, which is F", field="steering.initial", found="'C/F'")
    if policy.min_work is not None and policy.max_work is not None and policy.min_work > policy.max_work:
        found = f"{show(written(policy.min_work))} above max_work {show(written(policy.max_work))}"
        raise refuse("at most max_work", field="min_work", found=found)
    if policy.on_store_failure is OnStoreFailure.KNOWN and policy.quota is None:
        allowed = "only beside a quota: a rate refills by itself; 'open', 'closed' or 'local'"
        raise refuse(allowed, field="on_store_failure", found="'known'")
    _counts_in_flight(policy)
    _can_lend(policy)
    for part in policy.parts():
        _can_take_effect(part)
        _rates_can_take_effect(part)


def _can_lend(policy: Policy) -> None:
    """Refuse lending where a part of the limit would mean nothing, or could never be lent (B8)."""
    if not policy.local.allowed:
        return
    if policy.mechanism is Mechanism.AUTO:
        allowed = "only beside mechanism: work or requests; the unit of an auto bucket may change while parts are lent"
        raise refuse(allowed, field="local.allowed", found="true")
    if policy.block is not None:
        allowed = "only without block: refusals by holders do not count towards a block"
        raise refuse(allowed, field="local.allowed", found="true")
    if policy.rate is None:
        if "bound" in policy.local.model_fields_set:
            allowed = "only beside a rate: a quota lends portions that are debited"
            raise refuse(allowed, field="local.bound", found=show(written(policy.local.bound)))
        return
    amounts: dict[str, float | str] = {} if policy.minimum is None else {"minimum": policy.minimum}
    amounts |= {f"reserve.{criticality}": amount for criticality, amount in policy.reserve.items()}
    for field, amount in amounts.items():
        if quantity.parse(amount)[0] < 0:
            allowed = "at least 0 beside local: the holder of a part never borrows"
            raise refuse(allowed, field=field, found=show(written(amount)))
    for part in policy.parts():
        if part.rate is not None:
            _has_parts_of_use(part)


def _has_parts_of_use(policy: Policy) -> None:
    """Refuse a need so large that not even one holder could be lent a part beside the bucket itself."""
    assert policy.rate is not None
    if policy.mechanism is not Mechanism.WORK:
        return  # the controller moves the burst
    half = (policy.held + quantity.units(policy.local.bound, rate=rate_per_s(policy.rate))) / 2
    if policy.lent_least > half:
        found = f"{show(written(policy.local.need))}, which is {policy.lent_least:g} units"
        allowed = f"at most half of capacity and bound, {half:g} units; more lends nothing"
        raise refuse(allowed, field="local.need", found=found)


def _counts_in_flight(policy: Policy) -> None:
    """Open reservations are counted once, in requests or in work (W18, S11)."""
    timing = None if policy.overload is None else policy.overload.response_time
    if timing is None or timing.counted_in is not CountedIn.WORK:
        return
    place = "overload.response_time.in"
    if policy.in_flight is not None:
        raise refuse("requests beside in_flight, which counts reservations", field=place, found="'work'")
    if policy.mechanism is not Mechanism.WORK or policy.count is Count.REQUESTS:
        raise refuse("work only where the limit counts work, not requests", field=place, found="'work'")


def _rates_can_take_effect(policy: Policy) -> None:
    """A rate of its own has to fit the other fields as the rate of all others does.

    Both sides of every bound grow in proportion to the rate or not at all, so what fits the lowest rate of a table and
    the highest fits those between them: a thousand rates need not be looked at one by one.
    """
    for dimension, table in policy.rates.items():
        if dimension not in policy.per:
            found = f"{show(dimension)}, which is not in per"
            raise refuse("a dimension of per: each key has its own bucket", field="rates", found=found)
        in_order = sorted(table.items(), key=lambda entry: rate_per_s(entry[1]))
        for value, rate in in_order[:1] + in_order[1:][-1:]:
            try:
                _can_take_effect(policy.at(rate_per_s(rate)))
            except PydanticCustomError as error:
                context = error.context or {}
                allowed = f"a rate that fits the rest: {context['field']} {context['allowed']}"
                place = f"rates.{step(dimension)}.{step(value)}"
                raise refuse(allowed, field=place, found=show(written(rate))) from None


def _reserves_matter(policy: Policy) -> None:
    """Refuse a reserve that the minimum covers. Under a steered cap the comparison changes with the cap."""
    if policy.mechanism is not Mechanism.WORK:
        return
    least, rate = policy.least, policy.held if policy.rate is None else rate_per_s(policy.rate)
    for criticality, reserve in policy.reserve.items():
        number, unit = quantity.parse(reserve)
        units = number * policy.held / 100 if unit == "%" else quantity.units(reserve, rate=rate)
        if number and class_minimum(least, units) == least:
            found = f"{show(written(reserve))}, which is {units:g} units"
            allowed = f"{'more' if units > 0 else 'less'} than the minimum, {least:g}, which holds for every class"
            raise refuse(allowed, field=f"reserve.{criticality}", found=found)


def _steers_within_bounds(policy: Policy) -> None:
    """Refuse a floor that the limit has no room for (R13), and a first cap below the floor."""
    if policy.mechanism is Mechanism.WORK or policy.rate is None:
        return
    rate, steering = rate_per_s(policy.rate), policy.steering
    largest, first = policy.largest_work, steering.initial
    if "floor" in steering.model_fields_set:
        bounds = {"the least work of a request": policy.min_work, "the most work of a request": largest}
        for work, units in reversed(bounds.items()):
            if units is not None and steering.floor > rate / units:
                allowed = f"at most {rate / units:g} requests per second, the rate by {work}; more is above the limit"
                raise refuse(allowed, field="steering.floor", found=show(written(steering.floor)))
    if "initial" in steering.model_fields_set and first not in ("C", "C/F"):
        cap = quantity.units(first, rate=rate)
        floor = policy.floor if largest is None else min(policy.floor, rate / largest)
        if cap < floor:
            found = f"{show(written(first))}, which is {cap:g} requests per second"
            raise refuse(f"at least the floor, {floor:g}: no cap is lower", field="steering.initial", found=found)
    if "auto" in steering.model_fields_set and policy.mechanism is not Mechanism.AUTO:
        found = f"thresholds of mechanism: auto beside mechanism: {policy.mechanism}"
        raise refuse("only beside mechanism: auto", field="steering.auto", found=found)


def _has_effect(policy: Policy) -> None:
    """Refuse a field without effect: its author expects one."""
    kind = Kind(
        denies=policy.deny,
        has_rate=policy.rate is not None,
        has_quota=policy.quota is not None,
        quota_of_requests=policy.quota is not None and policy.quota.requests is not None,
        mechanism=policy.mechanism,
        counts=policy.count,
        learns=policy.learns,
    )
    for field, allowed in misplaced(frozenset(policy.model_fields_set), kind):
        raise refuse(allowed, field=field, found=show(written(getattr(policy, field))))
    for field in ("weights", "criticality_by"):
        if "criticality" in getattr(policy, field):
            allowed = "dimensions of descriptors; the class of a request is none"
            raise refuse(allowed, field=field, found="'criticality'")
    if "round" in policy.model_fields_set and policy.work_unit is None:
        raise refuse("only beside work_unit, which it rounds", field="round", found=f"'{policy.round}'")
    _tables_are_reached(policy)
    _learns_within_bounds(policy)
    for part in policy.parts():
        _borrows_where_it_can(part)
        _reserves_matter(part)
        _steers_within_bounds(part)


def _tables_are_reached(policy: Policy) -> None:
    """Refuse a table that is never used, because the policy covers only one value of its dimension, or none."""
    for number, dimension in enumerate(policy.per):
        if dimension in policy.match and policy.match[dimension] is None:
            found = f"{show(dimension)}, which match wants absent"
            raise refuse("only dimensions that can be there", field=f"per.{number}", found=found)
    for field in ("rates", "weights", "criticality_by"):
        for dimension, table in getattr(policy, field).items():
            only = policy.match.get(dimension)
            if isinstance(only, str) and "*" not in only and table and only not in table:
                allowed = f"at least {show(only)}, the only value that match lets through"
                found = "other values alone"
                raise refuse(allowed, field=f"{field}.{step(dimension)}", found=found)


def _learns_within_bounds(policy: Policy) -> None:
    """Refuse a first charge above the bound of estimates (W8, W13); weights may lower it."""
    first = policy.learning.initial
    if policy.learns and not policy.weights and first > policy.request_max:
        bound = "max_request" if policy.max_request == policy.request_max else "max_work"
        allowed = f"at most {bound}, {policy.request_max:g}"
        raise refuse(allowed, field="learning.initial", found=show(written(first)))


def _borrows_where_it_can(policy: Policy) -> None:
    """Refuse borrowing where the balance never goes below zero: where it covers every charge, or each request takes one
    token that has to be there. (A quota of requests does: nodes without the store may have admitted more.)"""
    amounts: dict[str, float | str] = {} if policy.minimum is None else {"minimum": policy.minimum}
    amounts |= {f"reserve.{criticality}": amount for criticality, amount in policy.reserve.items()}
    borrows = {field: amount for field, amount in amounts.items() if quantity.parse(amount)[0] < 0}
    if policy.quota is not None or policy.admit is Admit.COVERED:
        why = "a quota always covers the charge" if policy.quota else "admit covered never borrows"
        for field, amount in borrows.items():
            raise refuse(f"at least 0: {why}", field=field, found=show(written(amount)))
    largest = policy.max_request or 0.0
    if policy.quota is not None and policy.quota.work is not None and largest > policy.held:
        allowed = f"at most the quota, {policy.held:g}, which always covers the charge"
        raise refuse(allowed, field="max_request", found=show(written(largest)))
    if policy.count is Count.REQUESTS and (
        policy.admit is Admit.COVERED or not (policy.weights or borrows or policy.least < 1)
    ):
        for field in ("max_debt", "stop_debt"):
            if field in policy.model_fields_set:
                allowed = "only where a balance can go below zero: no request takes a token that is not there"
                raise refuse(allowed, field=field, found=show(written(getattr(policy, field))))


def _can_take_effect(policy: Policy) -> None:
    """Refuse a policy that could never admit a request, or a condition that could never occur."""
    if policy.quota is None:
        _admits_at_times(policy)
    else:
        _fits_its_quota(policy)
    held, borrowed, debt_max = policy.held, policy.borrowed, policy.debt_max
    rate = held if policy.rate is None else rate_per_s(policy.rate)
    for criticality, reserve in policy.reserve.items():
        number, unit = quantity.parse(reserve)
        above = number > 100 if unit == "%" else quantity.units(reserve, rate=rate) > held
        # Buckets that count requests hold a burst, which the controller moves.
        if above and (unit == "%" or policy.mechanism is Mechanism.WORK):
            raise refuse("at most the capacity", field=f"reserve.{criticality}", found=show(written(reserve)))
    stop_debt = 0.0 if policy.stop_debt is None else policy.stop_debt
    if quantity.units(stop_debt, rate=rate) > debt_max:
        found = f"{show(written(stop_debt))} beyond max_debt {show(written(_max_debt_written(policy)))}"
        raise refuse("at most max_debt, where debt ends", field="stop_debt", found=found)
    if borrowed > debt_max:
        found = f"{show(written(_max_debt_written(policy)))}, which is {debt_max:g} units"
        allowed = f"at least {borrowed:g}, which minimum and reserve let requests borrow"
        raise refuse(allowed, field="max_debt", found=found)
    _bounds_one_request(policy)


def _bounds_one_request(policy: Policy) -> None:
    """Refuse bounds on one request that contradict each other, or could never matter (W13)."""
    fixed = 0.0 if policy.weights else policy.fixed_charge
    if fixed > policy.request_max:
        field = "max_request" if policy.max_request == policy.request_max else "max_work"
        raise refuse(f"at least the charge, {fixed:g}", field=field, found=f"{policy.request_max:g}")
    if policy.max_request is not None and policy.max_request > (policy.max_work or math.inf):
        found = f"{show(written(policy.max_request))} above max_work {show(written(policy.max_work))}"
        raise refuse("at most max_work, which no request exceeds", field="max_request", found=found)
    if "admit" not in policy.model_fields_set:
        return
    if policy.quota is not None and policy.admit is Admit.MINIMUM:
        raise refuse("covered: a quota always covers the charge", field="admit", found="'minimum'")
    if policy.mechanism is Mechanism.REQUESTS:
        found = f"'{policy.admit}' beside mechanism requests"
        raise refuse("only where work is counted", field="admit", found=found)
    if policy.admit is Admit.COVERED:
        allowed = f"at most the capacity, {policy.held:g}: admit covered never admits more"
        for field, amount in {"charge": fixed, "max_request": policy.max_request or 0.0}.items():
            if amount > policy.held:
                raise refuse(allowed, field=field, found=show(written(amount)))


def _admits_at_times(policy: Policy) -> None:
    if policy.held < policy.least and policy.mechanism is not Mechanism.REQUESTS:
        found = f"{show(written(policy.capacity))}, which is {policy.held:g} units"
        raise refuse(f"at least the minimum, {policy.least:g}; less admits nobody", field="capacity", found=found)


def _fits_its_quota(policy: Policy) -> None:
    assert policy.quota is not None
    amounts = {"minimum": policy.least}
    if policy.quota.work is not None and not policy.learns and not policy.weights:
        amounts["charge"] = policy.fixed_charge
    for field, amount in amounts.items():
        if amount > policy.held:
            allowed = f"at most the quota, {policy.held:g}; more admits nobody"
            raise refuse(allowed, field=field, found=show(written(amount)))


def _fits_a_quota(policy: Policy) -> None:
    """Refuse fields of a rate in a quota: it does not refill, and no time is worth units."""
    amounts = {"max_debt": policy.max_debt, "stop_debt": policy.stop_debt}
    amounts |= {f"reserve.{criticality}": amount for criticality, amount in policy.reserve.items()}
    for name, amount in amounts.items():
        if amount is not None and quantity.parse(amount)[1] not in TIMELESS:
            allowed = "with a quota a number of units (50) or a share of the quota (5%)"
            raise refuse(allowed, field=name, found=show(amount))


def _max_debt_written(policy: Policy) -> float | str:
    return policy.debt_max if policy.max_debt is None else policy.max_debt
