"""Policies, namespaces and sets of them from plain data, and back. Each is checked once, here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from limiter.model.policy.defaults import NOT_DEFAULTS, Filled, fill, unknown
from limiter.model.policy.fields.field_refusals import STORED
from limiter.model.policy.fields.shown import show, step, written
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Namespace, PolicySet
from limiter.model.policy.problems import (
    PROBLEMS_MAX,
    PolicyError,
    PolicyProblem,
    details_of,
    fields_at,
    problem,
    problem_in_namespace,
    problem_in_set,
    title_of,
)
from limiter.model.steps import Steps, finish

CHECKED_AT_ONCE = 4
"""Policies of a set in one step of checking: about a millisecond."""

FILLED_MAX = 20_000
FILLED_PER_VALUE = 2
"""Bounds the values that `defaults` may fill in: this many, and this many for each value of the set's own."""


def read_policy(document: object, *, stored: bool = False) -> Policy:
    """Read a policy from plain data; raise PolicyError if it is invalid. A stored one may have idle fields."""
    try:
        return Policy.model_validate(document, context=STORED if stored else None)
    except ValidationError as error:
        title = title_of(document, otherwise="the policy")
        raise PolicyError(problem(details, title, Policy) for details in details_of(error)) from None


def read_namespace(name: str, document: object) -> Namespace:
    """Read one namespace from plain data; raise PolicyError if it is invalid."""
    try:
        return PolicySet.model_validate({"namespaces": {name: document}}).namespaces[name]
    except ValidationError as error:
        raise PolicyError(problem_in_namespace(details, name) for details in details_of(error)) from None


def read_policy_set(document: object) -> PolicySet:
    """Read a whole set from plain data and fill in its defaults; raise PolicyError if any part is invalid."""
    return finish(policy_set_steps(document))


def policy_set_steps(document: object) -> Steps[PolicySet]:
    """Read a set in steps: thousands of policies take a while. Ends after the first problems."""
    filled = _without_defaults(document)
    rest, documents = _apart(filled.document)
    problems: dict[PolicyProblem, None] = {}  # a fault of a default is reported once, not for each policy
    found, policies = PolicySet(), list[Policy]()
    try:
        found = PolicySet.model_validate(rest)
    except ValidationError as error:
        problems |= dict.fromkeys(problem_in_set(details, filled) for details in details_of(error))
    for number, one in enumerate(documents):
        if number % CHECKED_AT_ONCE == 0:
            yield
        try:
            policies.append(Policy.model_validate(one))
        except ValidationError as error:
            for details in details_of(error):
                placed: ErrorDetails = {**details, "loc": ("policies", number, *details["loc"])}
                problems[problem_in_set(placed, filled)] = None
        if len(problems) >= PROBLEMS_MAX:
            break
    if not problems and (twice := _named_twice(policies)) is not None:
        problems[twice] = None
    if problems:
        raise PolicyError(problems)
    return PolicySet.model_construct(namespaces=found.namespaces, policies=policies)


def _apart(document: object) -> tuple[object, list[object]]:
    """Return the policies of a set, to be checked one by one, and the rest of it."""
    if not isinstance(document, Mapping) or not isinstance(document.get("policies"), list):
        return document, []
    return {name: part for name, part in document.items() if name != "policies"}, document["policies"]


def _named_twice(policies: Iterable[Policy]) -> PolicyProblem | None:
    seen: set[tuple[str, str]] = set()
    for policy in policies:
        if (policy.namespace, policy.name) in seen:
            found = f"the name {policy.name!r} twice in namespace {policy.namespace!r}"
            allowed = "each name once in a namespace"
            return PolicyProblem(f"policies: found {found}; allowed: {allowed}", "policies", found, allowed)
        seen.add((policy.namespace, policy.name))
    return None


def _without_defaults(document: object) -> Filled:
    if not isinstance(document, Mapping) or "defaults" not in document:
        return Filled(document, [])
    defaults = document["defaults"]
    if not isinstance(defaults, Mapping):
        found, allowed = show(defaults), "a mapping of a policy's fields to values"
        raise PolicyError([PolicyProblem(f"defaults: found {found}; allowed: {allowed}", "defaults", found, allowed)])
    known = set(fields_at(Policy, ()))
    if wrong := unknown(defaults, known):
        allowed = ", ".join(sorted(known - NOT_DEFAULTS))
        places = [f"defaults.{step(field)}" for field in wrong]
        raise PolicyError(
            PolicyProblem(f"{place}: no such default; allowed: {allowed}", place, "a field that is not known", allowed)
            for place in places
        )
    _check_amount(document, defaults)
    return fill(document, defaults)


def _check_amount(document: Mapping[Any, Any], defaults: Mapping[Any, Any]) -> None:
    """Bound the cost of defaults, which are checked again in every policy, by the size of the set itself."""
    policies = document.get("policies")
    filled = values_in(defaults) * (len(policies) if isinstance(policies, list) else 0)
    most = FILLED_MAX + FILLED_PER_VALUE * values_in(document)
    if filled > most:
        found, allowed = f"{filled} values to fill in", f"at most {most} for a set of this size"
        raise PolicyError([PolicyProblem(f"defaults: found {found}; allowed: {allowed}", "defaults", found, allowed)])


def values_in(document: object) -> int:
    """Return the number of values in a document, at any depth."""
    count, left = 0, [document]
    while left:
        value = left.pop()
        count += 1
        if isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return count


def dump(part: Policy | Namespace) -> dict[str, Any]:
    """Return a policy or a namespace as plain data: the fields that were set, as they were written."""
    document = part.model_dump(mode="json", exclude_unset=True, by_alias=True)
    return {name: written(value) for name, value in document.items()}
