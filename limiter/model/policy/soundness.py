"""Whether the fields of a policy fit each other: what contradicts itself, or could have no effect, is refused by name.

Which field has an effect beside which others: `limiter.model.policy.fitness`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

from limiter.model.bucket.admission import class_minimum
from limiter.model.policy.choices import Admit, Count, Mechanism, OnStoreFailure
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.kinds import rate_per_s
from limiter.model.policy.fields.refusals import TIMELESS, is_stored, refuse
from limiter.model.policy.fields.shown import show, step, written
from limiter.model.policy.fitness import Kind, misplaced

if TYPE_CHECKING:
    from limiter.model.policy.policy import Policy


def check(policy: Policy, info: ValidationInfo) -> None:
    """Refuse a policy whose fields do not fit each other; one that is read from the store may have idle fields."""
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
    for part in policy.parts():
        _can_take_effect(part)
        _rates_can_take_effect(part)


def _rates_can_take_effect(policy: Policy) -> None:
    """A rate of its own has to fit the other fields as the rate of all others does."""
    for dimension, table in policy.rates.items():
        if dimension not in policy.per:
            found = f"{show(dimension)}, which is not in per"
            raise refuse("a dimension of per: each key has its own bucket", field="rates", found=found)
        for rate, value in {rate: value for value, rate in reversed(table.items())}.items():
            try:
                _can_take_effect(policy.at(rate))
            except PydanticCustomError as error:
                context = error.context or {}
                allowed = f"a rate that fits the rest: {context['field']} {context['allowed']}"
                place = f"rates.{step(dimension)}.{step(value)}"
                raise refuse(allowed, field=place, found=show(written(rate))) from None


def _reserves_matter(policy: Policy) -> None:
    """A reserve that the minimum covers changes nothing. Under a steered cap, what matters moves with it."""
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
    """A cap stays between the floor and what requests of the least work could ask for."""
    if policy.mechanism is Mechanism.WORK or policy.rate is None:
        return
    rate, steering = rate_per_s(policy.rate), policy.steering
    most, first = rate / policy.smallest_work, steering.initial
    if "floor" in steering.model_fields_set and steering.floor > most:
        allowed = f"at most {most:g} requests per second, the rate by the least work of a request: no cap is higher"
        raise refuse(allowed, field="steering.floor", found=show(written(steering.floor)))
    if "initial" in steering.model_fields_set:
        if first in ("C", "C/F"):
            cap = rate if first == "C" else rate / (policy.max_work or 1.0)
        else:
            cap = quantity.units(first, rate=rate)
        if cap < min(policy.floor, most):  # where these cross, the rate counts for more than the floor
            found = f"{show(written(first))}, which is {cap:g} requests per second"
            allowed = f"at least the floor, {policy.floor:g}: no cap is lower"
            raise refuse(allowed, field="steering.initial", found=found)


def _has_effect(policy: Policy) -> None:
    """A field that has no effect is a mistake: its author expects an effect."""
    kind = Kind(
        denies=policy.deny,
        has_rate=policy.rate is not None,
        has_quota=policy.quota is not None,
        quota_of_requests=policy.quota is not None and policy.quota.requests is not None,
        mechanism=policy.mechanism,
        counts=policy.count,
        learns=policy.charge == "learned",
    )
    for field, allowed in misplaced(policy.model_fields_set, kind):
        raise refuse(allowed, field=field, found=show(written(getattr(policy, field))))
    for field in ("weights", "criticality_by"):
        if "criticality" in getattr(policy, field):
            allowed = "dimensions of descriptors; the class of a request is none"
            raise refuse(allowed, field=field, found="'criticality'")
    _tables_are_reached(policy)
    _learns_within_bounds(policy)
    for part in policy.parts():
        _borrows_where_it_can(part)
        _reserves_matter(part)
        _steers_within_bounds(part)


def _tables_are_reached(policy: Policy) -> None:
    """A policy that covers one value of a dimension, or none, never looks up another."""
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
    """The first charge is bounded as an estimate is (W8, W13); weights may take it below the bound."""
    first = policy.learning.initial
    if policy.charge == "learned" and not policy.weights and first > policy.request_max:
        bound = "max_request" if policy.max_request == policy.request_max else "max_work"
        allowed = f"at most {bound}, {policy.request_max:g}"
        raise refuse(allowed, field="learning.initial", found=show(written(first)))


def _borrows_where_it_can(policy: Policy) -> None:
    """A balance that covers every charge never goes below zero; nor does one of which each request takes one token
    that has to be there. (A quota of requests does: nodes without the store may have admitted more.)"""
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
    """What would never let anybody pass, or could never happen, is a mistake."""
    if policy.quota is None:
        _admits_at_times(policy)
    else:
        _fits_its_quota(policy)
    rate = policy.held if policy.rate is None else rate_per_s(policy.rate)
    for criticality, reserve in policy.reserve.items():
        number, unit = quantity.parse(reserve)
        above = number > 100 if unit == "%" else quantity.units(reserve, rate=rate) > policy.held
        # Buckets that count requests hold a burst, which the controller moves.
        if above and (unit == "%" or policy.mechanism is Mechanism.WORK):
            raise refuse("at most the capacity", field=f"reserve.{criticality}", found=show(written(reserve)))
    stop_debt = 0.0 if policy.stop_debt is None else policy.stop_debt
    if quantity.units(stop_debt, rate=rate) > policy.debt_max:
        found = f"{show(written(stop_debt))} beyond max_debt {show(written(_max_debt_written(policy)))}"
        raise refuse("at most max_debt, where debt ends", field="stop_debt", found=found)
    if policy.borrowed > policy.debt_max:
        found = f"{show(written(_max_debt_written(policy)))}, which is {policy.debt_max:g} units"
        allowed = f"at least {policy.borrowed:g}, which minimum and reserve let requests borrow"
        raise refuse(allowed, field="max_debt", found=found)
    _bounds_one_request(policy)


def _bounds_one_request(policy: Policy) -> None:
    """Bounds on one request that contradict each other, or could never matter (W13)."""
    fixed = policy.charge if policy.charge != "learned" and not policy.weights else 0.0
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
    if policy.quota.work is not None and policy.charge != "learned" and not policy.weights:
        amounts["charge"] = policy.charge
    for field, amount in amounts.items():
        if amount > policy.held:
            allowed = f"at most the quota, {policy.held:g}; more admits nobody"
            raise refuse(allowed, field=field, found=show(written(amount)))


def _fits_a_quota(policy: Policy) -> None:
    """A quota has no rate: nothing of it refills, and no time can be worth units."""
    amounts = {"max_debt": policy.max_debt, "stop_debt": policy.stop_debt}
    amounts |= {f"reserve.{criticality}": amount for criticality, amount in policy.reserve.items()}
    for name, amount in amounts.items():
        if amount is not None and quantity.parse(amount)[1] not in TIMELESS:
            allowed = "with a quota a number of units (50) or a share of the quota (5%)"
            raise refuse(allowed, field=name, found=show(amount))


def _max_debt_written(policy: Policy) -> float | str:
    return policy.debt_max if policy.max_debt is None else policy.max_debt
