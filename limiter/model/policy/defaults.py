"""The `defaults` block of a policy file or set: what its policies say unless they say otherwise (P12).

Filled in before anything is checked, so what is kept in the store is the whole policy. A mapping such as `overload` is
taken or replaced whole. A limit (`rate`, `rates`, `quota`) is only for policies that name none themselves, and what
would have no effect on a policy is not filled in: a default capacity is not for quotas.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from limiter.model.policy.fitness import Kind, misplaced

NOT_DEFAULTS = frozenset({"deny", "name"})
_LIMITS = frozenset({"quota", "rate", "rates"})


class Filled(NamedTuple):
    """A document without its defaults, and the fields that each policy has from them."""

    document: object
    fields: list[frozenset[str]]


def fill(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> Filled:
    """Let the policies of a document have what the defaults say."""
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
    """The fields of the defaults that a policy takes."""
    wanted = defaults.keys() - policy.keys()
    if policy.get("deny") is True or not policy.keys().isdisjoint(_LIMITS):
        wanted -= _LIMITS
    whole = {**{field: defaults[field] for field in wanted}, **policy}
    return frozenset(wanted - {field for field, _ in misplaced(wanted, _kind(whole))})


def _kind(policy: Mapping[str, Any]) -> Kind:
    """What kind of policy it is going to be, as far as that can be told before it is checked."""
    quota = policy.get("quota")
    return Kind(
        denies=policy.get("deny") is True,
        has_rate="rate" in policy,
        has_quota="quota" in policy,
        quota_of_requests=isinstance(quota, Mapping) and "requests" in quota,
        mechanism=str(policy.get("mechanism", "work")),
        counts=str(policy.get("count", "work")),
        learns=policy.get("charge") == "learned",
    )


def unknown(defaults: Mapping[str, Any], known: AbstractSet[str]) -> list[str]:
    """The fields that no policy has, or that each has to have for itself."""
    return [str(field) for field in defaults if field not in known or field in NOT_DEFAULTS]
