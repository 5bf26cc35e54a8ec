"""The `defaults` block of a policy file or set: values for fields that its policies do not set (P12).

Defaults are filled in before anything is checked, so the store holds complete policies. A mapping such as `overload` is
taken or replaced whole. A limit (`rate`, `rates`, `quota`) is only filled into policies that have none themselves, and
a field is not filled in where it would have no effect: a default capacity is not for quotas.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from limiter.model.policy.choices import Count, Mechanism
from limiter.model.policy.fitness import Kind, misplaced

NOT_DEFAULTS = frozenset({"deny", "name"})
_LIMITS = frozenset({"quota", "rate", "rates"})


class Filled(NamedTuple):
    """A document without its defaults, and the fields that each policy took from them."""

    document: object
    fields: list[frozenset[str]]


def fill(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> Filled:
    """Fill the defaults into the policies of a document."""
    policies = document.get("policies")
    rest = {name: part for name, part in document.items() if name != "defaults"}
    if not isinstance(policies, list):
        return Filled(rest, [])
    chosen = [_chosen(policy, defaults) if isinstance(policy, Mapping) else frozenset() for policy in policies]
    rest["policies"] = [
        {**{field: defaults[field] for field in defaults if field in fields}, **policy} if fields else policy
        for policy, fields in zip(policies, chosen, strict=True)
    ]
    return Filled(rest, chosen)


def _chosen(policy: Mapping[str, Any], defaults: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields of the defaults that a policy takes."""
    wanted = defaults.keys() - policy.keys()
    if policy.get("deny") is True or not policy.keys().isdisjoint(_LIMITS):
        wanted -= _LIMITS
    whole = {**{field: defaults[field] for field in wanted}, **policy}
    return frozenset(wanted - {field for field, _ in misplaced(frozenset(wanted), _kind(whole))})


def _kind(policy: Mapping[str, Any]) -> Kind:
    """Return the kind of a policy, as far as it can be known before it is checked."""
    quota = policy.get("quota")
    return Kind(
        denies=policy.get("deny") is True,
        has_rate="rate" in policy,
        has_quota="quota" in policy,
        quota_of_requests=isinstance(quota, Mapping) and "requests" in quota,
        mechanism=_known(policy.get("mechanism", "work"), Mechanism),
        counts=_known(policy.get("count", "work"), Count),
        learns=policy.get("charge") == "learned" or ("charge" not in policy and policy.get("mechanism") == "auto"),
    )


def _known(value: object, choices: type[Mechanism | Count]) -> str:
    """One of the choices; nothing in place of any other text, which is refused later and not kept here."""
    return value if isinstance(value, str) and value in list(choices) else ""


def unknown(defaults: Mapping[str, Any], known: AbstractSet[str]) -> list[str]:
    """Return the fields that no policy has, or that every policy has to set itself."""
    return [str(field) for field in defaults if field not in known or field in NOT_DEFAULTS]
