"""Which fields of a policy have an effect beside which others. A field without effect is refused by name.

deny                refuses before any bucket is asked: only `match` matters
quota alone         has no rate: nothing refills, and there is nothing to steer or to protect
count: requests     a token per request: no estimate, and no correction by work
mechanism: work     has no cap: nothing to steer, no burst
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

OF_A_DENIAL = frozenset({"deny", "description", "group", "match", "name", "namespace", "shadow"})

OF_A_CAP = frozenset({"burst", "min_work", "steering"})
"""Fields with an effect only in buckets that count requests under a steered cap."""

OF_A_RATE = OF_A_CAP | {"capacity", "count", "mechanism", "overload", "rates"}

OF_THE_RATE = OF_A_RATE | {"admit", "in_flight", "max_debt", "minimum", "rate", "reserve", "stop_debt"}
"""Fields that belong to the rate of a policy that has a rate and a quota."""

OF_WORK = frozenset({"charge", "learn_by", "learning", "round", "settle_threshold", "work_unit"})
"""Fields with an effect only in limits that count work."""


COMBINATIONS_KEPT = 256
"""Of fields, whose fitness is remembered."""


class Kind(NamedTuple):
    """The properties of a policy that decide which of its fields have an effect."""

    denies: bool
    has_rate: bool
    has_quota: bool
    quota_of_requests: bool
    mechanism: str
    counts: str
    learns: bool

    @property
    def steers(self) -> bool:
        """True if there is a cap to steer."""
        return self.has_rate and self.mechanism != "work"

    @property
    def counts_requests(self) -> bool:
        """True if the rate is of requests, whatever their work."""
        return self.has_rate and self.counts == "requests"

    @property
    def counts_work(self) -> bool:
        """True if any of its limits counts work."""
        return (self.has_rate and not self.counts_requests) or (self.has_quota and not self.quota_of_requests)


class _Rule(NamedTuple):
    fields: frozenset[str]
    holds: Callable[[Kind], bool]
    allowed: str


_RULES = (
    _Rule(OF_A_RATE, lambda kind: kind.has_rate or not kind.has_quota, "only beside a rate, not a quota"),
    _Rule(
        frozenset({"count"}),
        lambda kind: kind.mechanism == "work" or not kind.counts_requests,
        "work; requests only beside mechanism: work, as the cap of the others counts requests already",
    ),
    _Rule(OF_WORK, lambda kind: kind.counts_work, "only where work is counted, not requests"),
    _Rule(
        frozenset({"weights"}), lambda kind: kind.has_rate or kind.counts_work, "only beside a rate or a quota of work"
    ),
    _Rule(OF_A_CAP, lambda kind: kind.steers, "only beside mechanism: requests or auto, which have a cap"),
    _Rule(
        frozenset({"capacity"}),
        lambda kind: kind.mechanism != "requests",
        "only where work is counted; with mechanism: requests the burst says how many may gather",
    ),
    _Rule(
        frozenset({"max_request", "max_work"}),
        lambda kind: kind.has_quota or not kind.counts_requests,
        "only where work is counted, not requests",
    ),
    _Rule(frozenset({"learn_by", "learning"}), lambda kind: kind.learns, "only beside charge: learned"),
)


@lru_cache(maxsize=COMBINATIONS_KEPT)
def misplaced(fields: frozenset[str], kind: Kind) -> tuple[tuple[str, str], ...]:
    """The fields without effect, each with what is allowed instead. Policies by the thousand have the same fields."""
    if kind.denies:
        allowed = "nothing of it beside deny: true, which refuses whatever it covers"
        return tuple((field, allowed) for field in sorted(fields - OF_A_DENIAL))
    broken = [rule for rule in _RULES if not rule.holds(kind)]
    return tuple((field, rule.allowed) for rule in broken for field in sorted(fields & rule.fields))
