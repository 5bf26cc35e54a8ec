"""The shape of a descriptor: the limits that cover it, and all parts of an acquire that do not depend on its values.

It is made once for all descriptors that no pattern distinguishes, and lives as long as their policies; the matcher
keeps a bounded number (`limiter.model.policy.matching`). An acquire still has to find the names of its buckets, its
class and its charge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, Self

from limiter.model.bucket.learned import learn_id
from limiter.model.bucket.operations import LEARNED, TOO_LARGE, Ask, Want
from limiter.model.bucket.reservation import lone
from limiter.model.ledger.correction import measured
from limiter.model.numbers import NUMBER_MAX
from limiter.model.policy.criticality import Classes, Criticality, lowest
from limiter.model.policy.fields.patterns import Pattern
from limiter.model.policy.limit import Limit
from limiter.store.buckets import BUCKETS_PER_OPERATION_MAX
from limiter.store.keys import TEXT_MAX, bucket_name
from limiter.store.layout import pack_params


class Rule(NamedTuple):
    """One policy: its pattern and its limits. A policy that denies has none."""

    name: str
    match: Mapping[str, Pattern]
    group: str | None
    limits: tuple[Limit, ...]
    denies: bool
    shadow: bool
    classes: Classes


class Shape(tuple[Limit, ...]):
    """The limits that cover a descriptor, by name; none where it is denied, or covered by too many."""

    namespace: bytes
    denied_by: str | None
    """The policy that refuses whatever it covers (W17); None where there is none."""
    too_many: int
    """Number of limits that cover it, if more than one operation can ask; otherwise 0."""
    denied_in_shadow: bool
    """True if a policy in shadow would have denied it."""
    classes: Classes | None
    """How the class of a request is found; None if it is the request's claim, or the node's default."""
    is_plain: bool
    """True if the request is covered and nothing is denied or shed: the store alone decides."""
    sheds: bool
    """True if any of them has overload control."""
    lives: bool
    """True if any of them needs to know how long a reservation lives."""
    weighs: bool
    """True if any of the limits has a cap with weights."""
    asks_alike: bool
    """True if what is asked of the buckets depends only on the class and the estimate."""
    grants_alike: bool
    """True if a grant contains only the charge and the balances."""
    rows: tuple[bytes, ...]
    """The packed parameters of each limit; those with a calendar window are for a given time."""

    def __new__(cls, rules: Iterable[Rule], *, namespace: str = "", default: Criticality | None = None) -> Self:
        """Combine the policies that apply; `default` is the class of their namespace."""
        found = list(rules)
        denied_by = next((rule.name for rule in found if rule.denies and not rule.shadow), None)
        # What is denied, or cannot be decided on, is of no concern to any limit, not even as a retry.
        limits = [limit for rule in found for limit in rule.limits] if denied_by is None else []
        too_many = len(limits) if len(limits) > BUCKETS_PER_OPERATION_MAX else 0
        made = super().__new__(cls, () if too_many else limits)
        made.too_many = too_many
        if too_many:
            found = []
        made.namespace = namespace.encode("utf-8", "surrogatepass")
        made.denied_by = denied_by
        made.denied_in_shadow = any(rule.denies and rule.shadow for rule in found)
        tables = tuple(table for rule in found for table in rule.classes.tables)
        defaults = [rule.classes.default for rule in found if rule.classes.default is not None]
        classes = Classes(tables, lowest(defaults) if defaults else default)
        made.classes = None if classes == Classes() else classes
        made._prepare()
        made.is_plain = bool(made) and not (made.denied_in_shadow or made.sheds or made.weighs or made.lives)
        return made

    def _prepare(self) -> None:
        self.sheds = any(limit.sheds for limit in self)
        self.weighs = any(limit.weighs_requests or limit.learn_by for limit in self)
        self.lives = any(limit.terms.in_flight and not limit.terms.in_flight.length_us for limit in self)
        self.asks_alike = not any(
            limit.weights or limit.counts or limit.rated_by or limit.period or limit.unit for limit in self
        )
        self.grants_alike = not any(
            limit.weights
            or limit.counts
            or limit.shadow
            or limit.sheds
            or limit.expectations
            or limit.period
            or limit.terms.block
            or limit.terms.in_flight
            or limit.learn_by
            for limit in self
        )
        self.rows = tuple(pack_params(limit.terms) for limit in self)
        self.packers: dict[int, Callable[..., bytes]] = {}
        """By the size of a bucket's name; names are bounded (`limiter.store.keys.NAME_MAX`)."""
        self._prefixes = [bucket_name(limit.bucket, ()) + ":" for limit in self]
        by = {limit.per for limit in self}
        self._by = by.pop()[0] if len(by) == 1 and len(self[0].per) == 1 else None
        """The one dimension that all limits are split by; None if there are others."""
        self._unsaid = {criticality: self._asks_unsaid(criticality) for criticality in Criticality}
        self._estimated = {
            criticality: [(limit.how_estimated, limit.minimums[criticality]) for limit in self]
            for criticality in Criticality
        }
        self._request_max = min([limit.request_max for limit in self], default=inf)

    def _asks_unsaid(self, criticality: Criticality) -> tuple[Ask, ...]:
        return tuple(
            (_how(limit, limit.charge, limit.how_unsaid), limit.minimums[criticality], limit.charge) for limit in self
        )

    def buckets(self, descriptor: Mapping[str, str]) -> list[str]:
        """Return the names of the buckets, within their slot."""
        if self._by is not None:
            value = descriptor.get(self._by)
            # Most values are letters and digits, and appear in a name as they are (`limiter.store.keys.encode`).
            if value is not None and value.isalnum() and len(value) <= TEXT_MAX and value.isascii():
                prefixes = self._prefixes
                return [prefixes[0] + value] if len(prefixes) == 1 else [prefix + value for prefix in prefixes]
        return [bucket_name(limit.bucket, [descriptor.get(name) for name in limit.per]) for limit in self]

    def asks(
        self, descriptor: Mapping[str, str], work: float | None, criticality: Criticality, now_us: int
    ) -> tuple[Sequence[bytes], Sequence[Ask]]:
        """Return the rows of parameters at a time of the store's clock, and what is asked of each bucket."""
        if self.asks_alike:
            if work is None:
                return self.rows, self._unsaid[criticality]
            if work <= self._request_max:
                return self.rows, [(how, minimum, work) for how, minimum in self._estimated[criticality]]
        limits = [at_rate(limit, descriptor) for limit in self]
        rows = tuple([pack_params(limit.params(now_us)) for limit in limits])
        return rows, tuple([_ask(limit, descriptor, work, criticality) for limit in limits])

    def packer(self, size: int) -> Callable[..., bytes]:
        """Return the function that packs a reservation of one bucket whose name has this size (`reservation.lone`)."""
        self.packers[size] = packer = lone(len(self.namespace), size).pack
        return packer


NOTHING = Shape(())


def at_rate(limit: Limit, descriptor: Mapping[str, str]) -> Limit:
    """Return the limit itself, or that of a key with a rate of its own (P12)."""
    return limit if limit.rated_by is None else limit.rated.get(descriptor.get(limit.rated_by), limit)


def want(
    limit: Limit, descriptor: Mapping[str, str], work: float | None, criticality: Criticality, now_us: int
) -> Want:
    """Return what a request asks of a limit's bucket, as a value; `work` is the caller's estimate."""
    limit = at_rate(limit, descriptor)
    how, minimum, charge = _ask(limit, descriptor, work, criticality)
    bucket = bucket_name(limit.bucket, [descriptor.get(name) for name in limit.per])
    weight = limit.weight(descriptor) if limit.weighs_requests else 1.0
    id_ = learn_id(limit.learn_by, descriptor) if limit.learn_by else 0
    return Want(bucket, limit.params(now_us), minimum, charge, how, weight, id_)


def _ask(limit: Limit, descriptor: Mapping[str, str], work: float | None, criticality: Criticality) -> Ask:
    if work is None or limit.counts:
        charge, how = limit.charge, limit.how_unsaid
    else:
        charge, how = measured(work, limit.unit), limit.how_estimated
    if limit.weights:
        charge = min(charge * limit.weight(descriptor), NUMBER_MAX)
    return _how(limit, charge, how), limit.minimums[criticality], charge


def _how(limit: Limit, charge: float, how: int) -> int:
    return how | TOO_LARGE if charge > limit.request_max and not how & LEARNED else how
