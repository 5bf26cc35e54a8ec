"""Applying a whole set of policies for its owner: what has to change, and what is left because another owns it (P12).

not there          made, and owned
own, differs       changed
another's          left as it is: the one who applies is refused, or told; or takes it over
own, not in set    removed, with `prune`
damaged            as if it were not there, where not even its owner can be read
nobody's           from before there were owners: the owner's if it is what the set says, else the API's
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
"""What to do where an applied set differs from what another owns: nothing at all, leave those out, or own them."""


class Foreign(NamedTuple):
    """What an applied set would change, and another owns."""

    place: Place
    owner: str
    revision: int

    def __str__(self) -> str:
        return f"{self.place} differs from the store, where {self.how}"

    @property
    def how(self) -> str:
        """Who made it what it is, and when."""
        by = "it was changed over the API" if self.owner == API else f"{self.owner!r} applied it"
        return f"{by} at revision {self.revision}"


class OwnedByOthers(Exception):
    """A set that would overwrite what others own was not applied (P12): 409."""

    def __init__(self, foreign: Sequence[Foreign]) -> None:
        told = "; ".join(map(str, foreign[:FOREIGN_SHOWN_MAX]))
        more = len(foreign) - FOREIGN_SHOWN_MAX
        super().__init__(f"nothing was applied: {told}" + (f"; and {more} more" if more > 0 else ""))
        self.foreign = foreign


class AppliedSet(NamedTuple):
    """What applying a set came to, or would: the revision of the whole, and what was made, changed, removed or left."""

    revision: int
    made: list[Place]
    changed: list[Place]
    removed: list[Place]
    foreign: list[Foreign]
    """What differs and was left as it is, because another owns it."""

    @property
    def is_nothing(self) -> bool:
        """Whether nothing had to change."""
        return not (self.made or self.changed or self.removed)


@dataclass(slots=True)
class SetPlan:
    """What has to change for a set to be in force."""

    puts: list[Change] = field(default_factory=list)
    removals: list[Change] = field(default_factory=list)
    made: list[Place] = field(default_factory=list)
    changed: list[Place] = field(default_factory=list)
    foreign: list[Foreign] = field(default_factory=list)

    @property
    def changes(self) -> list[Change]:
        """All of them, for one call."""
        return [*self.puts, *self.removals]

    def applied(self, revision: int) -> AppliedSet:
        """What it comes to."""
        removed = [place_of(change.entry) for change in self.removals]
        return AppliedSet(revision, self.made, self.changed, removed, self.foreign)

    def judge(self, place: Place, text: bytes, raw: bytes | None, *, owner: str, take_over: bool) -> None:
        """Take in one entry as it should be, and as it stands."""
        if raw is None:
            self.made.append(place)
            self.puts.append(Change(place.entry, text))
            return
        kept, is_other = standing(raw), differs(raw, text)
        is_own = kept.owner == owner or not kept.revision or (not kept.owner and (owner == API or not is_other))
        if is_other and not is_own and not take_over:
            self.foreign.append(Foreign(place, kept.owner or API, kept.revision))
        elif is_other or (kept.owner != owner and (is_own or take_over)):
            self.changed.append(place)
            # What differs only in the order of its fields is not worth another text.
            self.puts.append(Change(place.entry, text if is_other else kept.text))


def texts_of(policy_set: PolicySet) -> Steps[dict[Place, bytes]]:
    """A set as it would be kept."""
    wanted = {}
    for number, (place, part) in enumerate(parts_of(policy_set).items()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        wanted[place] = text_of(part, place)
    return wanted


def parts_of(policy_set: PolicySet) -> dict[Place, Policy | Namespace]:
    """Everything in a set, by its place."""
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
    """Compare a set with what is kept; `within` is the only namespace in which anything is removed."""
    plan = SetPlan()
    for number, (place, text) in enumerate(wanted.items()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        plan.judge(place, text, raws.get(place.entry), owner=owner, take_over=take_over)
    for number, (entry, raw) in enumerate(raws.items() if prune else ()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        place = place_of(entry)
        is_own = (standing(raw).owner or API) == owner
        if is_own and place not in wanted and within in (None, place.namespace):
            plan.removals.append(Change(entry, b""))
    return plan


def foreign_steps(policy_set: PolicySet, kept: Mapping[Place, Kept], owner: str) -> Steps[list[Foreign]]:
    """Where a set says otherwise than the store, and another owns it there."""
    found = []
    for number, (place, part) in enumerate(parts_of(policy_set).items()):
        if number % ENTRIES_AT_ONCE == 0:
            yield
        one = kept.get(place)
        if one is None or isinstance(one.part, str) or one.owner == owner or dump(one.part) == dump(part):
            continue
        found.append(Foreign(place, one.owner or API, one.revision))
    return found
