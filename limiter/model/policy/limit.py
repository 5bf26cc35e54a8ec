"""A policy resolved to numbers: what the hot path goes by.

charge   = the caller's estimate · weight, or the policy's charge · weight, or what was learned (W4, W12)
minimum  = the policy's, moved by the reserve of the request's class (W11)
share    = the part of the limit that one node on its own holds; what a partition holds is up to the store
expected = the request's own word, or the policy's default for its client, operation or type (Q1)
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
from limiter.model.bucket.operations import COVERED, LEARNED
from limiter.model.numbers import NUMBER_MAX
from limiter.model.overload.expectations import ExpectationParams, expected_ms
from limiter.model.overload.retries import RetryMeter
from limiter.model.policy.choices import Admit, Count, Mechanism, OnStoreFailure
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.kinds import rate_per_s, seconds
from limiter.model.policy.period import window_us
from limiter.model.policy.policy import Policy

QUOTA_MARK = "+quota"
"""Stands behind the policy's name in the names of a quota's buckets: no policy can be called so. A rate and a quota
under one name have buckets of their own, and each keeps its own when the other comes or goes."""


class Limit:
    """A policy's rate or quota, ready to be asked. Without I/O and without a clock: a quota's window is for a given
    time."""

    __slots__ = (
        "bucket", "charge", "counts", "expectations", "how_estimated", "how_unsaid", "is_known", "is_plain",
        "key", "learned", "listens", "mechanism", "minimums", "name", "on_store_failure", "per", "period", "rated",
        "rated_by", "rated_codes", "request_max", "retries", "shadow", "sheds", "terms", "weighs_requests", "weights",
        "zone",
    )  # fmt: skip

    def __init__(self, policy: Policy, *, partitions: int = 1) -> None:
        assert policy.rate is None or policy.quota is None, "a policy with both has two limits"
        self.name = policy.name
        self.bucket = bucket_prefix(policy)
        """What the names of its buckets begin with."""
        self.key = (policy.namespace, policy.name)
        self.retries = RetryMeter()
        self.per = tuple(policy.per)
        self.shadow = policy.shadow
        self.on_store_failure: OnStoreFailure = policy.without_store
        self.is_known = self.on_store_failure is OnStoreFailure.KNOWN
        """Whether a node remembers its balances, to go on from them without the store (F-S14)."""
        self.period = policy.quota.span if policy.quota else None
        self.zone = ZoneInfo(policy.quota.timezone) if policy.quota else None
        self.is_plain = self.period is None and not self.shadow
        """Whether what is told of its buckets depends on their records alone: no calendar, and it has a say."""
        self.mechanism: Literal["work", "requests", "auto", "quota"] = "quota" if policy.quota else _mechanism(policy)
        self.counts = policy.count is Count.REQUESTS
        """Whether each request takes one token times its weight, whatever its work (W16)."""
        self.learned = policy.charge == "learned"
        self.charge = policy.learning.initial if policy.charge == "learned" else policy.charge
        covered = COVERED if policy.admit is Admit.COVERED and policy.quota is None else 0
        self.how_estimated, self.how_unsaid = covered, covered | (LEARNED if self.learned else 0)
        """How the bucket is asked (`limiter.model.bucket.operations`), with an estimate by the caller and without."""
        self.request_max = policy.request_max
        """The largest estimate that is admitted (W13)."""
        self.weights = {name: dict(table) for name, table in policy.weights.items()}
        self.weighs_requests = bool(self.weights) and not self.counts and self.mechanism in ("requests", "auto")
        """Whether a request counts by its weight while the bucket counts requests (W16)."""
        self.sheds = policy.overload is not None
        """Whether the policy has overload control."""
        self.listens = policy.overload is not None and policy.overload.utilisation is not None
        """Whether it goes by what services report of their load (G5)."""
        self.expectations = _expectations(policy)
        self.terms = divided(_terms(policy), partitions)
        self.minimums = _minimums(policy, self.terms)
        self.rated_by, self.rated = _rated(policy, partitions)
        """The dimension whose listed values have a rate of their own, and their limits (P12); None without any."""
        self.rated_codes: dict[str, Limit] | None = None
        """The same by what the values are in the names of buckets, once somebody has asked."""

    def weight(self, descriptor: Mapping[str, str]) -> float:
        """How many units of this limit one unit of work is; what is not listed weighs 1."""
        weight = 1.0
        for name, table in self.weights.items():
            weight *= table.get(descriptor.get(name, ""), 1.0)
        return min(weight, NUMBER_MAX)

    def default_expected_ms(self, descriptor: Mapping[str, str]) -> float:
        """How soon this policy expects an answer where the request does not say; NaN if it has no word on it."""
        return math.nan if self.expectations is None else expected_ms(None, descriptor, self.expectations)

    def params(self, now_us: int) -> Params:
        """The terms at a time."""
        if self.period is None or self.zone is None:
            return self.terms
        terms = self.terms
        if not terms.window_start_us <= now_us < terms.window_end_us:
            # Kept: the same window is asked for until it ends.
            start_us, end_us = window_us(now_us, self.period, self.zone)
            self.terms = terms = replace(terms, window_start_us=start_us, window_end_us=end_us)
        return terms


def _rated(policy: Policy, partitions: int) -> tuple[str | None, dict[str | None, Limit]]:
    """Keys of the same rate share a limit: there are many keys, and few plans to choose from."""
    for dimension, table in policy.rates.items():
        limits = {rate: Limit(policy.at(rate), partitions=partitions) for rate in set(table.values())}
        return dimension, {value: limits[rate] for value, rate in table.items()}
    return None, {}


def bucket_prefix(policy: Policy) -> str:
    """What the names of the buckets of a rate, or of a quota, begin with."""
    return policy.name if policy.quota is None else policy.name + QUOTA_MARK


def policy_of(bucket: str) -> str:
    """The policy that a bucket's name begins with."""
    return limit_of(bucket).removesuffix(QUOTA_MARK)


def limit_of(bucket: str) -> str:
    """The `Limit.bucket` that a bucket's name begins with."""
    return bucket.partition(":")[0]


def scaled(terms: Params, share: float) -> Params:
    """The same limit for somebody who holds only a share of it."""
    if share == 1.0:
        return terms
    return replace(
        terms,
        committed=terms.committed * share,
        cap=terms.cap * share,
        capacity=terms.capacity * share,
        burst=terms.burst * share,
        debt_max=terms.debt_max * share,
        stop_debt=terms.stop_debt * share,
    )


def divided(terms: Params, partitions: int) -> Params:
    """The same limit, whole, for buckets that each hold a share of it (R9)."""
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
    if policy.quota is not None:
        return _quota_terms(policy, flags, block)
    assert policy.rate is not None
    rate = rate_per_s(policy.rate)
    stop_debt = math.inf if policy.stop_debt is None else quantity.units(policy.stop_debt, rate=rate)
    burst, burst_s = _burst(policy.burst)
    return Params(
        flags=flags | _COUNTING[policy.mechanism],
        committed=rate,
        cap=_initial_cap(policy, rate),
        capacity=min(policy.held, RATE_MAX),
        burst=burst,
        burst_s=burst_s,
        debt_max=min(policy.debt_max, RATE_MAX),
        stop_debt=stop_debt,
        settle_threshold=_threshold(policy),
        block=block,
    )


def _block(policy: Policy) -> BlockTerms | None:
    if policy.block is None:
        return None
    return BlockTerms(policy.block.after, seconds(policy.block.within) * 1e6, seconds(policy.block.lasts) * 1e6)


def _overload_flags(policy: Policy) -> Flags:
    """Only response times need a histogram."""
    if policy.overload is None:
        return Flags.NONE
    return Flags.OVERLOAD | (Flags.NONE if policy.overload.response_time is None else Flags.HISTOGRAM)


def _expectations(policy: Policy) -> ExpectationParams | None:
    if policy.overload is None or policy.overload.expectations is None:
        return None
    return policy.overload.expectations.params(policy.overload.all_ranks())


def _quota_terms(policy: Policy, flags: Flags, block: BlockTerms | None) -> Params:
    assert policy.quota is not None
    limit = policy.quota.work or policy.quota.requests
    assert limit is not None
    flags |= Flags.QUOTA | (Flags.COUNTS_REQUESTS if policy.quota.requests else Flags.NONE)
    # A quota's debt and stop may be given as shares of the quota.
    return Params(
        flags=flags,
        capacity=limit,
        debt_max=min(policy.debt_max, RATE_MAX),
        stop_debt=math.inf if policy.stop_debt is None else quantity.units(policy.stop_debt, rate=limit),
        settle_threshold=_threshold(policy),
        window_end_us=1,
        block=block,
    )


def _units(value: float | str, *, rate: float) -> float:
    """An amount in units. A policy says numbers within bounds; times at a rate may be beyond, and are held there."""
    return min(quantity.units(value, rate=rate), RATE_MAX)


def _burst(burst: float | str) -> tuple[float, float]:
    """Fixed tokens, and seconds of the cap (R7)."""
    number, unit = quantity.parse(burst)
    return (number, 0.0) if unit == "" else (0.0, min(quantity.units(burst, rate=1.0), BURST_MAX_S))


def _initial_cap(policy: Policy, rate: float) -> float:
    """R6: `C`, `C/F`, a share of C, or requests a second."""
    initial = policy.steering.initial
    if initial == "C":
        return rate
    if initial == "C/F":
        assert policy.max_work is not None
        return min(rate / policy.max_work, RATE_MAX)
    first = _units(initial, rate=rate)
    if "initial" in policy.steering.model_fields_set:
        return first
    return max(first, min(policy.floor, rate / policy.smallest_work))  # the default is no lower than any cap may be


def _threshold(policy: Policy) -> float:
    number, unit = quantity.parse(policy.settle_threshold)
    return -number / 100 if unit == "%" else number


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
