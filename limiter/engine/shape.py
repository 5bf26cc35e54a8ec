"""The shape of a descriptor: the limits that cover it, and all of an acquire that does not depend on its values.

Made once for all descriptors that no pattern tells apart, and for as long as their policies stand; the matcher keeps a
bounded number (`limiter.model.policy.matching`). What an acquire still has to find is the names of its buckets, its
class and its charge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, Self

from limiter.model.bucket.operations import LEARNED, TOO_LARGE, Want
from limiter.model.bucket.reservation import lone
from limiter.model.numbers import NUMBER_MAX
from limiter.model.policy.criticality import Classes, Criticality, lowest
from limiter.model.policy.fields.patterns import Pattern
from limiter.model.policy.limit import Limit
from limiter.store.flush import Ask
from limiter.store.keys import TEXT_MAX, bucket_name
from limiter.store.layout import pack_params


class Rule(NamedTuple):
    """One policy: what it covers, and its limits. One that denies has none."""

    name: str
    match: Mapping[str, Pattern]
    group: str | None
    limits: tuple[Limit, ...]
    denies: bool
    shadow: bool
    classes: Classes


class Shape(tuple[Limit, ...]):
    """The limits that cover a descriptor, by name; none where it is denied."""

    namespace: bytes
    denied_by: str | None
    """The policy that refuses whatever it covers (W17); None where there is none."""
    denied_in_shadow: bool
    """Whether a policy would have, if it did not only watch."""
    classes: Classes | None
    """How the class of a request is found; None where it is what the request claims, or the node's default."""
    is_plain: bool
    """Whether the store is asked, and that is all: nothing is denied, shed, or covered by nothing."""
    sheds: bool
    """Whether any of them has overload control."""
    weighs: bool
    """Whether any of them has a cap of requests that weighs them."""
    asks_alike: bool
    """Whether what is asked of the buckets depends on nothing but the class and the estimate."""
    grants_alike: bool
    """Whether a grant says no more than what was charged and what is left."""
    rows: tuple[bytes, ...]
    """The parameters of each limit, packed; of those with a calendar window they are for a given time."""

    def __new__(cls, rules: Iterable[Rule], *, namespace: str = "", default: Criticality | None = None) -> Self:
        """Put together what the policies that apply have to say; `default` is the class of their namespace."""
        found = list(rules)
        denied_by = next((rule.name for rule in found if rule.denies and not rule.shadow), None)
        # What is denied is of no concern to any limit, not even as a retry.
        made = super().__new__(cls, [limit for rule in found for limit in rule.limits] if denied_by is None else ())
        made.namespace = namespace.encode("utf-8", "surrogatepass")
        made.denied_by = denied_by
        made.denied_in_shadow = any(rule.denies and rule.shadow for rule in found)
        tables = tuple(table for rule in found for table in rule.classes.tables)
        defaults = [rule.classes.default for rule in found if rule.classes.default is not None]
        classes = Classes(tables, lowest(defaults) if defaults else default)
        made.classes = None if classes == Classes() else classes
        made._prepare()
        made.is_plain = bool(made) and not (
            made.denied_by or made.denied_in_shadow or made.sheds or made.weighs or len(made) > 255
        )
        return made

    def _prepare(self) -> None:
        self.sheds = any(limit.sheds for limit in self)
        self.weighs = any(limit.weighs_requests for limit in self)
        self.asks_alike = not any(limit.weights or limit.counts or limit.rated_by or limit.period for limit in self)
        self.grants_alike = not any(
            limit.weights
            or limit.counts
            or limit.shadow
            or limit.sheds
            or limit.expectations
            or limit.period
            or limit.terms.block
            for limit in self
        )
        self.rows = tuple(pack_params(limit.terms) for limit in self)
        self.packers: dict[int, Callable[..., bytes]] = {}
        """By the size of a bucket's name; names are bounded (`limiter.store.keys.NAME_MAX`)."""
        self._prefixes = [bucket_name(limit.bucket, ()) + ":" for limit in self]
        by = {limit.per for limit in self}
        self._by = by.pop()[0] if len(by) == 1 and len(self[0].per) == 1 else None
        """The one dimension that all of them are split by; None where it is not so simple."""
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
        """The names of the buckets, within their slot."""
        if self._by is not None:
            value = descriptor.get(self._by)
            # Most text is letters and digits, and stands in a name as it is (`limiter.store.keys.encode`).
            if value is not None and value.isalnum() and len(value) <= TEXT_MAX and value.isascii():
                prefixes = self._prefixes
                return [prefixes[0] + value] if len(prefixes) == 1 else [prefix + value for prefix in prefixes]
        return [bucket_name(limit.bucket, [descriptor.get(name) for name in limit.per]) for limit in self]

    def asks(
        self, descriptor: Mapping[str, str], work: float | None, criticality: Criticality, now_us: int
    ) -> tuple[Sequence[bytes], Sequence[Ask]]:
        """The rows of parameters at a time of the store's, and what is asked of each bucket."""
        if self.asks_alike:
            if work is None:
                return self.rows, self._unsaid[criticality]
            if work <= self._request_max:
                return self.rows, [(how, minimum, work) for how, minimum in self._estimated[criticality]]
        limits = [at_rate(limit, descriptor) for limit in self]
        rows = tuple([pack_params(limit.params(now_us)) for limit in limits])
        return rows, tuple([_ask(limit, descriptor, work, criticality) for limit in limits])

    def packer(self, size: int) -> Callable[..., bytes]:
        """What packs a reservation of one bucket whose name has this many bytes (`reservation.lone`)."""
        self.packers[size] = packer = lone(len(self.namespace), size).pack
        return packer


NOTHING = Shape(())


def at_rate(limit: Limit, descriptor: Mapping[str, str]) -> Limit:
    """The limit itself, or that of a key with a rate of its own (P12)."""
    return limit if limit.rated_by is None else limit.rated.get(descriptor.get(limit.rated_by), limit)


def want(
    limit: Limit, descriptor: Mapping[str, str], work: float | None, criticality: Criticality, now_us: int
) -> Want:
    """What a request wants of a limit's bucket, as a value; `work` is the caller's estimate."""
    limit = at_rate(limit, descriptor)
    how, minimum, charge = _ask(limit, descriptor, work, criticality)
    bucket = bucket_name(limit.bucket, [descriptor.get(name) for name in limit.per])
    weight = limit.weight(descriptor) if limit.weighs_requests else 1.0
    return Want(bucket, limit.params(now_us), minimum, charge, how, weight)


def _ask(limit: Limit, descriptor: Mapping[str, str], work: float | None, criticality: Criticality) -> Ask:
    charge, how = (limit.charge, limit.how_unsaid) if work is None or limit.counts else (work, limit.how_estimated)
    if limit.weights:
        charge = min(charge * limit.weight(descriptor), NUMBER_MAX)
    return _how(limit, charge, how), limit.minimums[criticality], charge


def _how(limit: Limit, charge: float, how: int) -> int:
    return how | TOO_LARGE if charge > limit.request_max and not how & LEARNED else how
