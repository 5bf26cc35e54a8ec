"""A policy resolved to numbers, as the hot path uses it.

charge   = the caller's estimate · weight, or the policy's charge · weight, or the learned one (W4, W12)
minimum  = the policy's, moved by the reserve of the request's class (W11)
share    = the part of the limit that one node on its own holds; a partition's share is decided by the store
expected = the request's own value, or the policy's default for its client, operation or type (Q1)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal
from zoneinfo import ZoneInfo

from limiter.model.bucket.admission import class_minimum
from limiter.model.bucket.block import BlockTerms
from limiter.model.bucket.bucket import BURST_MAX_S, RATE_MAX, Flags, Params
from limiter.model.bucket.in_flight import InFlightTerms
from limiter.model.bucket.lending import LendTerms
from limiter.model.bucket.operations import COVERED, KEYED, LEARNED
from limiter.model.numbers import LEAST, NUMBER_MAX
from limiter.model.overload.expectations import ExpectationParams, expected_ms
from limiter.model.overload.overload_block import CountedIn, ResponseRules
from limiter.model.overload.shedding import OverloadTerms
from limiter.model.policy.choices import Admit, Count, Mechanism, OnStoreFailure
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.kinds import rate_per_s, seconds
from limiter.model.policy.period import window_us
from limiter.model.policy.policy import Policy

QUOTA_MARK = "+quota"
"""Follows the policy's name in the names of a quota's buckets: no policy's name can contain it. A rate and a quota
under one name have separate buckets, and each keeps its own when the other is added or removed."""


class Limit:
    """A policy's rate or quota, ready to be asked; without I/O and clock. A quota's window is for a given time."""

    __slots__ = (
        "bucket", "charge", "counts", "draw_by", "expectations", "how_estimated", "how_unsaid", "is_known", "is_plain",
        "key", "learn_by", "learned", "lends", "listens", "mechanism", "minimums", "name", "on_store_failure",
        "outcomes", "per", "period", "rated", "rated_by", "rated_codes", "request_max", "shadow", "sheds", "terms",
        "unit", "weighs_requests", "weights", "zone",
    )  # fmt: skip

    def __init__(self, policy: Policy, *, partitions: int = 1) -> None:
        assert policy.rate is None or policy.quota is None, "a policy with both has two limits"
        self.name = policy.name
        self.bucket = bucket_prefix(policy)
        """The prefix of its buckets' names."""
        self.key = (policy.namespace, policy.name)
        self.per = tuple(policy.per)
        self.shadow = policy.shadow
        self.lends = policy.local.allowed
        """True if holders of leases may decide by themselves, each on its part (B8)."""
        self.on_store_failure: OnStoreFailure = policy.without_store
        self.is_known = self.on_store_failure is OnStoreFailure.KNOWN
        """True if a node remembers its balances, to continue from them without the store (F-S14)."""
        self.period = policy.quota.span if policy.quota else None
        self.zone = ZoneInfo(policy.quota.timezone) if policy.quota else None
        self.is_plain = self.period is None and not self.shadow
        """True if the answer depends on the bucket's record alone: no calendar, not in shadow."""
        self.mechanism: Literal["work", "requests", "auto", "quota"] = "quota" if policy.quota else _mechanism(policy)
        self.counts = policy.count is Count.REQUESTS
        """True if each request takes one token times its weight, whatever its work (W16)."""
        self.learned = policy.learns
        self.charge = policy.learning.initial if policy.learns else policy.fixed_charge
        covered = COVERED if policy.admit is Admit.COVERED and policy.quota is None else 0
        learned = LEARNED | (KEYED if policy.learn_by else 0) if self.learned else 0
        self.how_estimated, self.how_unsaid = covered, covered | learned
        """How the bucket is asked (`limiter.model.bucket.operations`), with an estimate by the caller and without."""
        self.request_max = policy.request_max
        """The largest estimate that is admitted (W13)."""
        self.weights = {name: dict(table) for name, table in policy.weights.items()}
        is_capped = self.mechanism in ("requests", "auto")
        self.weighs_requests = bool(self.weights) and not self.counts and (is_capped or self.learned)
        """True if a request counts by its weight: under a cap of requests (W16), or to learn before weights (W15)."""
        self.learn_by = tuple(policy.learn_by) if self.learned else ()
        """The dimensions by whose values the charge is learned separately (W15)."""
        self.unit = policy.unit
        """The caller's measure per unit of work (W19), as `limiter.model.bucket.operations.Charge.unit`."""
        self.sheds = policy.overload is not None
        """True if the policy has overload control."""
        self.draw_by = () if policy.overload is None else tuple(policy.overload.draw_by)
        """The dimensions whose values decide, instead of chance, whom overload control refuses (S13)."""
        self.outcomes = frozenset(() if policy.overload is None else policy.overload.outcomes)
        """Outcomes of a settle that count as a late answer (Q8)."""
        self.listens = policy.overload is not None and policy.overload.utilisation is not None
        """True if it uses the load that services report (G5)."""
        self.expectations = _expectations(policy)
        self.terms = divided(_terms(policy), partitions)
        self.minimums = _minimums(policy, self.terms)
        self.rated_by, self.rated = _rated(policy, partitions)
        """The dimension whose listed values have a rate of their own, and their limits (P12); None without any."""
        self.rated_codes: dict[str, Limit] | None = None
        """The same by the encoded values in the names of buckets, made at first use."""

    def weight(self, descriptor: Mapping[str, str]) -> float:
        """Return the units of this limit per unit of work; values that are not listed weigh 1."""
        weight = 1.0
        for name, table in self.weights.items():
            weight *= table.get(descriptor.get(name, ""), 1.0)
        return min(weight, NUMBER_MAX)

    def expected_ms(self, requested_ms: float | None, descriptor: Mapping[str, str], criticality: Criticality) -> float:
        """How soon an answer is expected: by the request as far as this policy lets it, or by the policy (Q1, Q12).

        NaN if neither has a word on it.
        """
        if self.expectations is not None:
            return expected_ms(requested_ms, descriptor, self.expectations, criticality)
        return math.nan if requested_ms is None else requested_ms

    def params(self, now_us: int) -> Params:
        """Return the terms at a time."""
        if self.period is None or self.zone is None:
            return self.terms
        terms = self.terms
        if not terms.window_start_us <= now_us < terms.window_end_us:
            # Cached: the same window is used until it ends.
            start_us, end_us = window_us(now_us, self.period, self.zone)
            self.terms = terms = replace(terms, window_start_us=start_us, window_end_us=end_us)
        return terms


def _rated(policy: Policy, partitions: int) -> tuple[str | None, dict[str | None, Limit]]:
    """Return limits by rate: keys of the same rate share one, as there are many keys and few rates."""
    for dimension, table in policy.rates.items():
        limits = {rate: Limit(policy.at(rate), partitions=partitions) for rate in set(table.values())}
        return dimension, {value: limits[rate] for value, rate in table.items()}
    return None, {}


def bucket_prefix(policy: Policy) -> str:
    """Return the prefix of the names of a rate's or a quota's buckets."""
    return policy.name if policy.quota is None else policy.name + QUOTA_MARK


def policy_of(bucket: str) -> str:
    """Return the policy of a bucket, from its name."""
    return limit_of(bucket).removesuffix(QUOTA_MARK)


def limit_of(bucket: str) -> str:
    """Return the `Limit.bucket` of a bucket, from its name."""
    return bucket.partition(":")[0]


_OF_THE_STORE = Flags.OVERLOAD | Flags.HISTOGRAM | Flags.IN_FLIGHT | Flags.LENDS


def scaled(terms: Params, share: float) -> Params:
    """The same limit for somebody who holds only a share of it, apart from the store: open reservations and overload
    control are counted there alone, and only there parts are lent."""
    flags = terms.flags & ~_OF_THE_STORE
    if share == 1.0 and flags == terms.flags:
        return terms
    return replace(
        terms,
        flags=flags,
        committed=terms.committed * share,
        cap=terms.cap * share,
        capacity=terms.capacity * share,
        burst=terms.burst * share,
        debt_max=terms.debt_max * share,
        stop_debt=terms.stop_debt * share,
        lending=None,
    )


def divided(terms: Params, partitions: int) -> Params:
    """Return the whole limit for buckets that each hold a share of it (R9)."""
    if partitions == 1:
        return terms
    return replace(terms, flags=terms.flags | Flags.DIVIDED, partitions=partitions)


_MECHANISMS: dict[Mechanism, Literal["work", "requests", "auto"]] = {
    Mechanism.WORK: "work",
    Mechanism.REQUESTS: "requests",
    Mechanism.AUTO: "auto",
}
_COUNTING = {
    Mechanism.WORK: Flags.NONE,
    Mechanism.REQUESTS: Flags.COUNTS_REQUESTS,
    Mechanism.AUTO: Flags.AUTO,
}


def _mechanism(policy: Policy) -> Literal["work", "requests", "auto"]:
    return "requests" if policy.count is Count.REQUESTS else _MECHANISMS[policy.mechanism]


def _terms(policy: Policy) -> Params:
    block = _block(policy)
    flags = (Flags.SHADOW if policy.shadow else Flags.NONE) | _overload_flags(policy)
    flags |= Flags.NONE if block is None else Flags.BLOCK
    flags |= _learning_flags(policy)
    lending = _lending(policy)
    flags |= Flags.NONE if lending is None else Flags.LENDS
    if policy.quota is not None:
        return _quota_terms(policy, flags, block, lending)
    assert policy.rate is not None
    rate = rate_per_s(policy.rate)
    stop_debt = math.inf if policy.stop_debt is None else quantity.units(policy.stop_debt, rate=rate)
    burst, burst_s = _burst(policy)
    return Params(
        flags=flags | _COUNTING[policy.mechanism],
        committed=rate,
        cap=first_cap(policy),
        capacity=min(policy.held, RATE_MAX),
        burst=burst,
        burst_s=burst_s,
        debt_max=min(policy.debt_max, RATE_MAX),
        stop_debt=stop_debt,
        settle_threshold=_thresholds(policy)[0],
        refund_threshold=_thresholds(policy)[1],
        block=block,
        overload=_overload_terms(policy),
        in_flight=_in_flight(policy),
        lending=lending,
    )


def _lending(policy: Policy) -> LendTerms | None:
    """How parts of the limit are lent (B8). A shadow lends nothing: holders of leases do not ask it."""
    local = policy.local
    if not local.allowed or policy.shadow:
        return None
    bound = 0.0 if policy.rate is None else _units(local.bound, rate=rate_per_s(policy.rate))
    return LendTerms(bound, policy.lent_least, local.lease_s * 1e6)


def _block(policy: Policy) -> BlockTerms | None:
    if policy.block is None:
        return None
    return BlockTerms(policy.block.after, seconds(policy.block.within) * 1e6, seconds(policy.block.lasts) * 1e6)


def _overload_flags(policy: Policy) -> Flags:
    """Flags of a record by what it keeps: open reservations, overload control, latencies for a percentile (S7)."""
    flags = Flags.NONE if _in_flight(policy) is None else Flags.IN_FLIGHT
    if policy.overload is None:
        return flags
    timing = policy.overload.response_time
    is_wanted = timing is not None and (timing.percentiles or timing.rules is ResponseRules.PUBLISHED)
    return flags | Flags.OVERLOAD | (Flags.HISTOGRAM if is_wanted else Flags.NONE)


SLOT_MIN_S = 10.0
"""Where response times matter, reservations that nobody settles are in flight for so long at least, and for so many
times the target (S9)."""
SLOT_TARGETS = 8.0

UNSEEN_TIMES = 5.0
"""Until a controller has seen a bucket, so many times `initial` may be in flight (S8)."""


def _in_flight(policy: Policy) -> InFlightTerms | None:
    """How open reservations are counted: by their times to live where they are limited, else by the target."""
    overload = policy.overload
    if policy.in_flight is not None:
        return InFlightTerms(limit=float(policy.in_flight))
    if overload is None or (overload.response_time is None and overload.expectations is None):
        return None
    timing, missing = overload.response_time, overload.expectations
    longest_ms = 0.0 if timing is None else max(timing.targets_by_class())
    if missing is not None:
        tables = [ms for table in missing.expected_by.values() for ms in table.values()]
        longest_ms = max(longest_ms, missing.expected_latency_ms, *tables)
    length_s = max(SLOT_MIN_S, SLOT_TARGETS * longest_ms / 1000)
    return InFlightTerms(0.0, length_s * 1e6, timing is not None and timing.counted_in is CountedIn.WORK)


def _overload_terms(policy: Policy) -> OverloadTerms | None:
    """Terms of the `overload` block that the scripts need."""
    if policy.overload is None:
        return None
    timing = policy.overload.response_time
    if timing is None:
        return OverloadTerms()
    initial = 0.0
    if timing.rules is ResponseRules.IN_FLIGHT and timing.degrade != "only":
        charge = policy.learning.initial if policy.charge == "learned" else policy.charge
        each = charge if timing.counted_in is CountedIn.WORK else 1.0
        initial = UNSEEN_TIMES * timing.initial * max(each, 1.0)
    return OverloadTerms(timing.targets_by_class(), initial)


def _expectations(policy: Policy) -> ExpectationParams | None:
    if policy.overload is None or policy.overload.expectations is None:
        return None
    return policy.overload.expectations.params(policy.overload.all_ranks())


def _quota_terms(policy: Policy, flags: Flags, block: BlockTerms | None, lending: LendTerms | None) -> Params:
    assert policy.quota is not None
    limit = policy.quota.work or policy.quota.requests
    assert limit is not None
    flags |= Flags.QUOTA | (Flags.COUNTS_REQUESTS if policy.quota.requests else Flags.NONE)
    # The debt bound and `stop_debt` of a quota may be shares of the quota.
    return Params(
        flags=flags,
        capacity=limit,
        debt_max=min(policy.debt_max, RATE_MAX),
        stop_debt=math.inf if policy.stop_debt is None else quantity.units(policy.stop_debt, rate=limit),
        settle_threshold=_thresholds(policy)[0],
        refund_threshold=_thresholds(policy)[1],
        window_end_us=1,
        block=block,
        in_flight=_in_flight(policy),
        lending=lending,
    )


def _units(value: float | str, *, rate: float) -> float:
    """An amount in units. A policy says numbers within bounds; times at a rate may be beyond, and are held there."""
    return min(quantity.units(value, rate=rate), RATE_MAX)


def _burst(policy: Policy) -> tuple[float, float]:
    """Fixed tokens, and seconds of the cap (R7). An auto bucket holds the same time in either unit (R13)."""
    if policy.mechanism is Mechanism.AUTO and "burst" not in policy.model_fields_set:
        return 0.0, min(policy.held_s, BURST_MAX_S)
    number, unit = quantity.parse(policy.burst)
    return (number, 0.0) if unit == "" else (0.0, min(quantity.units(policy.burst, rate=1.0), BURST_MAX_S))


def first_cap(policy: Policy) -> float:
    """R6: `C`, `C/F`, a share of C, or requests per second. Where F is declared, C/F is the default (R15)."""
    assert policy.rate is not None
    rate = rate_per_s(policy.rate)
    initial, is_given = policy.steering.initial, "initial" in policy.steering.model_fields_set
    if initial == "C":
        return rate
    if initial == "C/F" or (policy.largest_work is not None and not is_given):
        assert policy.largest_work is not None
        return max(LEAST, min(rate / policy.largest_work, RATE_MAX))
    first = _units(initial, rate=rate)
    return first if is_given else max(first, policy.floor)  # the default is no lower than any cap may be


def _thresholds(policy: Policy) -> tuple[float, float]:
    """Return the settle thresholds of debits and of refunds (W6, W19)."""
    given = policy.settle_threshold
    if not isinstance(given, dict):
        return (_threshold(given),) * 2
    return _threshold(given.get("debit", 0.0)), _threshold(given.get("refund", 0.0))


def _threshold(threshold: float | str) -> float:
    number, unit = quantity.parse(threshold)
    return -number / 100 if unit == "%" else number


def _learning_flags(policy: Policy) -> Flags:
    """Weights and `learn_by` need estimates apart (W15), and refunds with a threshold of their own the general way."""
    debit, refund = _thresholds(policy)
    flags = Flags.NONE if debit == refund else Flags.REFUNDS
    return flags | Flags.LEARNS if policy.learns and (policy.weights or policy.learn_by) else flags


def _minimums(policy: Policy, terms: Params) -> dict[Criticality, float]:
    plain = policy.least
    capacity, rate = terms.whole_capacity, terms.cap if terms.counts_requests else terms.committed
    return {
        criticality: class_minimum(plain, _reserve(policy, criticality, capacity=capacity, rate=rate))
        for criticality in Criticality
    }


def _reserve(policy: Policy, criticality: Criticality, *, capacity: float, rate: float) -> float | None:
    """A percentage is of the capacity, a time is at the rate (W11)."""
    reserve = policy.reserve.get(criticality)
    if reserve is None:
        return None
    number, unit = quantity.parse(reserve)
    units = number * capacity / 100 if unit == "%" else quantity.units(reserve, rate=rate)
    return max(-RATE_MAX, min(units, RATE_MAX))
