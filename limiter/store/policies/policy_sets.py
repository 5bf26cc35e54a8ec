"""Apply a whole set of policies for its owner: what changes, and what stays because another owner holds it (P12).

entry              effect
missing            made, and owned
own, differs       changed
another owner's    stays as it is: the set is refused, or applied without it; or the entry is taken over
own, not in set    removed, with `prune`
damaged            as if missing, if not even its owner can be read
without owner      from before there were owners: the applier's if it equals the set, otherwise the API's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_log import Change
from limiter.model.policy.policy_set import Namespace, PolicySet
from limiter.model.policy.reading import dump
from limiter.model.steps import Steps
from limiter.store.policies.policy_entries import (
    API,
    ENTRIES_AT_ONCE,
    Kept,
    Place,
    differs,
    namespace_place,
    place_of,
    policy_place,
    standing,
    text_of,
)

FOREIGN_SHOWN_MAX = 10

OnForeign = Literal["refuse", "keep", "take_over"]
"""How to treat entries that differ from the set and belong to another owner: refuse the set, keep them, or take them
over."""


class Foreign(NamedTuple):
    """An entry that an applied set would change, but that another owner holds."""

    place: Place
    owner: str
    revision: int

    def __str__(self) -> str:
        return f"{self.place} differs from the store, where {self.how}"

    @property
    def how(self) -> str:
        """The owner and the revision, for messages."""
        by = "it was changed over the API" if self.owner == API else f"{self.owner!r} applied it"
        return f"{by} at revision {self.revision}"


class OwnedByOthers(Exception):
    """A set that would overwrite entries of other owners was not applied (P12): 409."""

    def __init__(self, foreign: Sequence[Foreign]) -> None:
        told = "; ".join(map(str, foreign[:FOREIGN_SHOWN_MAX]))
        more = len(foreign) - FOREIGN_SHOWN_MAX
        super().__init__(f"nothing was applied: {told}" + (f"; and {more} more" if more > 0 else ""))
        self.foreign = foreign


class AppliedSet(NamedTuple):
    """The result of applying a set: the revision of the whole, and the entries made, changed, removed or left."""

    revision: int
    made: list[Place]
    changed: list[Place]
    removed: list[Place]
    foreign: list[Foreign]
    """Entries that differ and were left as they are, because another owner holds them."""

    @property
    def is_nothing(self) -> bool:
        """True if nothing had to change."""
        return not (self.made or self.changed or self.removed)


@dataclass(slots=True)
class SetPlan:
    """The changes that bring a set into force, each only if its entry is still the one that was compared."""

    puts: list[Change] = field(default_factory=list)
    removals: list[Change] = field(default_factory=list)
    made: list[Place] = field(default_factory=list)
    changed: list[Place] = field(default_factory=list)
    foreign: list[Foreign] = field(default_factory=list)

    @property
    def changes(self) -> list[Change]:
        """All changes, for one call."""
        return [*self.puts, *self.removals]

    def applied(self, revision: int) -> AppliedSet:
        """Return the result of these changes."""
        removed = [place_of(change.entry) for change in self.removals]
        return AppliedSet(revision, self.made, self.changed, removed, self.foreign)

    def judge(self, place: Place, text: bytes, raw: bytes | None, *, owner: str, take_over: bool) -> None:
        """Compare one wanted entry with the stored one, and plan the change."""
        if raw is None:
            self.made.append(place)
            self.puts.append(Change(place.entry, text, expected=0))
            return
        kept, is_other = standing(raw), differs(raw, text)
        is_own = kept.owner == owner or not kept.revision or (not kept.owner and (owner == API or not is_other))
        if is_other and not is_own and not take_over:
            self.foreign.append(Foreign(place, kept.owner or API, kept.revision))
        elif is_other or (kept.owner != owner and (is_own or take_over)):
            self.changed.append(place)
            # What differs only in the order of its fields is not worth another text.
            self.puts.append(Change(place.entry, text if is_other else kept.text, expected=kept.revision))


def texts_of(policy_set: PolicySet) -> Steps[dict[Place, bytes]]:
    """Return the set as stored texts."""
    wanted = {}
    for number, (place, part) in enumerate(parts_of(policy_set).items()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        wanted[place] = text_of(part, place)
    return wanted


def parts_of(policy_set: PolicySet) -> dict[Place, Policy | Namespace]:
    """Return the policies and namespaces of a set by their places."""
    parts: dict[Place, Policy | Namespace] = {}
    for policy in policy_set.policies:
        parts[policy_place(policy.namespace, policy.name)] = policy
    for name, namespace in policy_set.namespaces.items():
        parts[namespace_place(name)] = namespace
    return parts


def plan_set(
    wanted: Mapping[Place, bytes],
    raws: Mapping[str, bytes],
    *,
    owner: str,
    prune: bool,
    take_over: bool,
    within: str | None,
) -> Steps[SetPlan]:
    """Compare a set with the stored entries; `within` is the only namespace in which entries are removed."""
    plan = SetPlan()
    for number, (place, text) in enumerate(wanted.items()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        plan.judge(place, text, raws.get(place.entry), owner=owner, take_over=take_over)
    for number, (entry, raw) in enumerate(raws.items() if prune else ()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        place = place_of(entry)
        kept = standing(raw)
        is_own = (kept.owner or API) == owner
        if is_own and place not in wanted and within in (None, place.namespace):
            plan.removals.append(Change(entry, b"", expected=kept.revision))
    return plan


def foreign_steps(policy_set: PolicySet, kept: Mapping[Place, Kept], owner: str) -> Steps[list[Foreign]]:
    """Return the entries that differ from a set and belong to another owner."""
    found = []
    for number, (place, part) in enumerate(parts_of(policy_set).items()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        one = kept.get(place)
        if one is None or isinstance(one.part, str) or one.owner == owner or dump(one.part) == dump(part):
            continue
        found.append(Foreign(place, one.owner or API, one.revision))
    return found
