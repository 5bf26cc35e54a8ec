"""A policy resolved to numbers, and a namespace's division of them over its partitions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limiter.engine.fallback.local import LocalBuckets
from limiter.engine.fallback.remainders import Remainders
from limiter.engine.planner import Planner
from limiter.engine.shape import want
from limiter.model.bucket.admission import part_of_minimum
from limiter.model.bucket.bucket import Flags, fresh
from limiter.model.bucket.decision import refusal
from limiter.model.bucket.operations import Acquire, BucketAnswer, Verdict
from limiter.model.numbers import NUMBER_MAX
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.limit import Limit
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import read_policy, read_policy_set
from limiter.store.buckets import check_acquire
from limiter.store.clock import StoreClock

START_US = 1_790_000_000_000_000
RESERVES = {"sheddable": "50%", "critical_plus": "-20%"}


def limit(**fields: object) -> Limit:
    return Limit(read_policy({"name": "p", "rate": 100, "capacity": 50, **fields}))


def test_a_work_policy_keeps_its_numbers() -> None:
    terms = limit(reserve=RESERVES).terms
    assert (terms.flags, terms.committed, terms.capacity, terms.whole_capacity) == (Flags.NONE, 100, 50, 50)


def test_r6_r7_a_request_policy_has_a_cap_and_a_burst() -> None:
    policy = {"name": "p", "rate": 100, "mechanism": "requests", "burst": "20%", "reserve": RESERVES}
    found = Limit(read_policy(policy))
    terms = found.terms
    assert (terms.flags, terms.committed) == (Flags.COUNTS_REQUESTS, 100)
    assert (terms.cap, terms.burst, terms.burst_s, terms.whole_capacity) == (30, 0, 0.2, 6)
    assert found.minimums[Criticality.SHEDDABLE] == 3, "half of the burst"


def test_r10_an_auto_policy_carries_the_terms_of_both_and_gives_minimums_in_work() -> None:
    found = limit(mechanism="auto", burst=7, reserve=RESERVES)
    assert (found.mechanism, found.terms.flags) == ("auto", Flags.AUTO)
    assert (found.terms.cap, found.terms.burst, found.terms.whole_capacity) == (30, 7, 50)
    assert found.minimums[Criticality.SHEDDABLE] == 25
    assert not fresh(found.terms, START_US).counts_requests


numbers = st.sampled_from([1e-9, 1.0, 1e15, NUMBER_MAX])
amounts = st.builds(lambda number, unit: f"{number:.17g}{unit}", numbers, st.sampled_from(["", "us", "d", "%"]))
timeless = st.builds(lambda number, unit: f"{number:.17g}{unit}", numbers, st.sampled_from(["", "%"]))
reserves = amounts | amounts.map("-{}".format)
shared_fields = {
    "charge": numbers, "settle_threshold": timeless, "minimum": numbers | numbers.map(lambda n: -n),
    "weights": st.fixed_dictionaries({"operation": st.fixed_dictionaries({"read": numbers})}),
}  # fmt: skip
rates = st.fixed_dictionaries(
    {"rate": numbers, "max_work": numbers},
    optional=shared_fields | {
        "capacity": amounts, "burst": amounts, "max_debt": amounts, "stop_debt": amounts,
        "mechanism": st.sampled_from(["work", "requests", "auto"]),
        "steering": st.fixed_dictionaries({"initial": timeless | st.sampled_from(["C", "C/F"])}),
        "reserve": st.fixed_dictionaries({"critical": reserves}),
    },
)  # fmt: skip
quotas = st.fixed_dictionaries(
    {"quota": st.fixed_dictionaries({"work": numbers, "period": st.just("day")})},
    optional=shared_fields | {
        "max_debt": timeless, "stop_debt": timeless, "reserve": st.fixed_dictionaries({"critical": timeless}),
    },
)  # fmt: skip


@given(fields=rates | quotas, work=st.none() | st.just(0.0) | numbers)
def test_whatever_a_policy_may_say_its_limit_can_be_asked(fields: dict[str, object], work: float | None) -> None:
    """A limit that fails would keep every other policy from being in force, or spoil the calls that contain it."""
    try:
        policy = read_policy({"name": "p", **fields})
    except PolicyError:  # never in force: it admits nobody
        return
    found = Limit(policy)
    check_acquire(Acquire((want(found, {"operation": "read"}, work, Criticality.CRITICAL, START_US),)))


def test_a_limit_so_high_that_it_is_none_needs_no_other_number_beside_it() -> None:
    terms = Limit(read_policy({"name": "p", "rate": 1e15, "capacity": "1000d"})).terms
    assert (terms.committed, terms.capacity, terms.debt_max) == (1e15, NUMBER_MAX, NUMBER_MAX)


@pytest.mark.parametrize(
    ("per", "partitions"), [([], 4), (["customer"], 1), (["customer", "ip"], 1), (["ip"], 4)], ids=str
)
def test_r9_a_policy_wider_than_a_partition_is_whole_in_its_terms_and_divided_in_its_buckets(
    per: list[str], partitions: int
) -> None:
    document = {
        "namespaces": {"default": {"partitions": 4, "partition_by": ["customer"]}},
        "policies": [{"name": "p", "rate": 100, "capacity": 50, "per": per, "reserve": RESERVES}],
    }
    _, (found,) = Planner(read_policy_set(document)).cover("default", {"customer": "c1", "ip": "::1"})
    assert (found.terms.committed, found.terms.capacity, found.terms.partitions) == (100, 50, partitions)
    assert (Flags.DIVIDED in found.terms.flags) == (partitions > 1)
    assert found.minimums[Criticality.SHEDDABLE] == 25, "of the whole"
    assert fresh(found.terms, START_US).capacity == 50 / partitions


def test_b3_without_the_store_a_node_holds_its_part_of_a_partitions_part() -> None:
    document = {
        "namespaces": {"default": {"partitions": 4, "partition_by": ["customer"]}},
        "policies": [{"name": "p", "rate": 100, "capacity": 80, "minimum": 8}],
    }
    slot, (found,) = Planner(read_policy_set(document)).cover("default", {})
    asked = want(found, {}, work=1, criticality=Criticality.CRITICAL, now_us=START_US)
    local = LocalBuckets(lambda: 2, Remainders(StoreClock(), lambda: 2))
    (answer,) = local.acquire(slot, [found], [asked], now_us=START_US, dry_run=True)
    assert (answer.verdict, answer.capacity, answer.rate) == (Verdict.PASSED, 10, 12.5)


@pytest.mark.parametrize(
    ("minimum", "part", "capacity", "need"),
    [
        (50, 1, 100, 50),
        (50, 0.25, 25, 12.5),
        (1, 0.25, 25, 1),
        (0.5, 0.25, 25, 0.5),
        (1, 0.1, 0.5, 0.5),  # a part too small for one token asks for all it has
        (2, 0.1, 10, 1),
        (50, 3, 300, 150),
        (1, 3, 300, 1),
        (0, 0.5, 50, 0),
        (-20, 0.5, 50, -10),
        (200, 0.1, 10, 20),  # what could never pass in the whole never will in a part
    ],
)
def test_w11_minimums_in_a_part_of_the_whole(minimum: float, part: float, capacity: float, need: float) -> None:
    assert part_of_minimum(minimum, part=part, capacity=capacity) == need


def test_b1_a_refusal_names_the_minimum_of_its_share() -> None:
    """A quarter holds 12.5 of 50; half of that is asked for, 1.25 are there, and 25 come each second."""
    document = {
        "namespaces": {"default": {"partitions": 4, "partition_by": ["customer"]}},
        "policies": [{"name": "p", "rate": 100, "capacity": 50, "reserve": RESERVES}],
    }
    _, (found,) = Planner(read_policy_set(document)).cover("default", {})
    asked = want(found, {}, work=1, criticality=Criticality.SHEDDABLE, now_us=START_US)
    answer = BucketAnswer(Verdict.BLOCKED, 1.25, 1.0, 25.0, 12.5)
    refused = refusal([found], [asked], [answer], requests=1, now_us=START_US)
    assert refused.retry_after_ms == 200
    assert "needs 6.25" in refused.detail


@pytest.mark.parametrize(("in_requests", "reason"), [(False, "work"), (True, "request_rate")])
def test_r10_an_auto_bucket_is_shown_as_it_counts_now(in_requests: bool, reason: str) -> None:
    found = limit(mechanism="auto")
    asked = want(found, {}, work=1, criticality=Criticality.CRITICAL, now_us=START_US)
    answer = BucketAnswer(Verdict.BLOCKED, 0.0, 1.0, 100.0, 50.0, in_requests)
    refused = refusal([found], [asked], [answer], requests=1, now_us=START_US)
    assert refused.reason == reason
    assert refused.limits[0].mechanism == ("requests" if in_requests else "work")


def test_f_n7_buckets_of_a_node_on_its_own_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are client text: without the store, too, a node must not remember every one it ever heard."""
    monkeypatch.setattr("limiter.engine.fallback.local.BUCKETS_MAX", 3)
    local = LocalBuckets(lambda: 2, Remainders(StoreClock(), lambda: 2))
    for number in range(10):
        document = {"policies": [{"name": "p", "per": ["customer"], "rate": 1 + number}]}
        slot, (found,) = Planner(read_policy_set(document)).cover("default", {"customer": f"c{number}"})
        asked = want(found, {"customer": f"c{number}"}, 1, Criticality.CRITICAL, START_US)
        local.acquire(slot, [found], [asked.but(bucket=f"p:c{number}")], now_us=START_US, dry_run=False)
    assert len(local._ledger.records) == 3
    assert len(local._scaled) <= 3
