"""Faults of a policy in words: the policy, the field, what was found and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from limiter.model.numbers import NUMBER_MAX
from limiter.model.overload.overload_block import OVERLOAD_PARTS
from limiter.model.policy.blocks import Auto, Block, Learning, Local, Quota, Smoothing, Steering
from limiter.model.policy.defaults import Filled
from limiter.model.policy.fields.kinds import is_name
from limiter.model.policy.fields.shown import show, step
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Backend, Namespace, PolicySet

PROBLEMS_MAX = 100
"""Problems that a refusal lists; a document may be made to have thousands."""


class PolicyProblem(NamedTuple):
    """The fault of one field, in words and in parts."""

    text: str
    field: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return self.text


class PolicyError(ValueError):
    """A policy that cannot be used: a line per problem, with policy, field, what was found and what is allowed."""

    def __init__(self, problems: Iterable[str | PolicyProblem]) -> None:
        told = list(problems)
        self.problems = [str(problem) for problem in told]
        self.fields = [problem for problem in told if isinstance(problem, PolicyProblem)]
        super().__init__("\n".join(self.problems))


def details_of(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's first problems."""
    return error.errors(include_url=False)[:PROBLEMS_MAX]


def problem_in_namespace(details: ErrorDetails, name: str) -> PolicyProblem:
    """Return the fault of a namespace of a set."""
    if not is_name(name):
        return problem(details, "", PolicySet)
    return problem(details, f"namespace {name!r}", Namespace, skip=2)


def problem_in_set(details: ErrorDetails, filled: Filled) -> PolicyProblem:
    """Return the fault of a set: of one of its policies, of its defaults, or of the whole."""
    match details["loc"]:
        case ("policies", int() as number, str() as field, *_) if filled.fields and field in filled.fields[number]:
            return problem(details, "defaults", Policy, skip=2)
        case ("policies", int() as number, *_):
            assert isinstance(filled.document, Mapping)
            title = title_of(filled.document["policies"][number], otherwise=f"policy number {number + 1}")
            found = problem(details, title, Policy, skip=2)
            if filled.fields and found.field.partition(".")[0] in filled.fields[number]:
                return found._replace(text=f"{found.text} (it is from defaults)")
            return found
        case _:
            return problem(details, "", PolicySet)


def problem(details: ErrorDetails, title: str, model: type[BaseModel], *, skip: int = 0) -> PolicyProblem:
    """`policy 'orders-reads', capacity: found '5 parsecs'; allowed: …`."""
    where = details["loc"][skip:]
    if where and where[-1] == "[key]":  # the fault is a name in the mapping before it
        where = where[:-2]
    field = ".".join([*map(step, where), *filter(None, [details.get("ctx", {}).get("field")])])
    place = ", ".join(part for part in (title, field) if part) or "the document"
    if details["type"] == "missing":
        return PolicyProblem(f"{place}: found nothing; it is required", field, "nothing", "a value; it is required")
    if details["type"] == "extra_forbidden":
        allowed = ", ".join(sorted(fields_at(model, where[:-1])))
        return PolicyProblem(f"{place}: no such field; allowed: {allowed}", field, "a field that is not known", allowed)
    found, allowed = _found(details), _allowed(details)
    return PolicyProblem(f"{place}: found {found}; allowed: {allowed}", field, found, allowed)


def title_of(document: object, *, otherwise: str) -> str:
    """Return a policy's title in a message: its name, if it has one."""
    name = document.get("name") if isinstance(document, Mapping) else None
    return f"policy {name!r}" if isinstance(name, str) and is_name(name) else otherwise


def fields_at(model: type[BaseModel], where: tuple[str | int, ...]) -> Iterable[str]:
    """Return the fields that are allowed at a place."""
    inner: dict[str | int, type[BaseModel]] = {"namespaces": Namespace, "quota": Quota, "steering": Steering}
    inner |= {"learning": Learning, "block": Block, "local": Local}
    inner |= {"smoothing": Smoothing, "auto": Auto}
    if where and (where[0] == "backends" or (where[0] == "namespaces" and where[2:3] == ("backends",))):
        fields = Backend.model_fields
    elif where and where[0] == "steering":
        fields = inner[where[-1]].model_fields
    elif where and where[0] == "overload":
        fields = OVERLOAD_PARTS[str(where[-1])].model_fields
    else:
        fields = (inner[where[0]] if where else model).model_fields
    names = [field.alias or name for name, field in fields.items()]
    return ["defaults", *names] if model is PolicySet and not where else names


def _found(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    if details["type"] == "too_long":
        return str(len(details["input"]))
    return context.get("found") or show(details["input"])


# Pydantic's own checks, in words for people who do not know it.
_WORDS = {
    "model_type": "a mapping of fields to values",
    "dict_type": "a mapping",
    "list_type": "a list",
    "bool_type": "true or false",
}


def _allowed(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    if details["type"] == "refused":
        found = details["input"]
        beyond = isinstance(found, int | float) and NUMBER_MAX < abs(found) < math.inf
        return f"{context['allowed']}; at most 2^53" if beyond else str(context["allowed"])
    if details["type"] == "too_long":
        return f"at most {context['max_length']} of them"
    return _WORDS.get(details["type"], str(context.get("expected", details["msg"])))
