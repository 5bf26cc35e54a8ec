"""Policies that count requests, that deny, and that have a rate and a quota: on a real store."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from limiter.controller.plan import make_plans
from limiter.engine import planner as planning
from limiter.engine.decider import Decider
from limiter.engine.planner import Planner
from limiter.engine.shape import want
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, Refused, SettleRequest
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.reading import read_policy_set
from limiter.store import keys
from limiter.store.buckets import Buckets
from limiter.store.inspect import PageQuery, list_buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from tests.support.servers import Server

CRITICAL = Criticality.CRITICAL

SLOW = 1e-6  # a rate at which nothing refills while a test runs


@pytest.fixture
async def decider(valkey: Server) -> AsyncIterator[Decider]:
    link = await open_link(valkey.url)
    yield Decider(Buckets(link), Signer(b"a secret of the tests"), deadline_s=5)
    await link.aclose()


def enforce(decider: Decider, *policies: dict[str, Any], **more: Any) -> None:
    decider.enforce(read_policy_set({"policies": list(policies), **more}))


def granted(decision: Decision) -> Granted:
    assert isinstance(decision, Granted), decision
    return decision


def refused(decision: Decision) -> Refused:
    assert isinstance(decision, Refused), decision
    return decision


def ask(customer: str = "c1", **more: Any) -> AcquireRequest:
    descriptor = {"customer": customer, **more.pop("descriptor", {})}
    return AcquireRequest(descriptor, **more)


TEN = {"name": "ten", "per": ["customer"], "rate": SLOW, "capacity": 10, "count": "requests"}


async def test_w16_each_request_takes_one_token_whatever_its_work(decider: Decider) -> None:
    enforce(decider, TEN)
    balances = []
    for work in (None, 0.0, 500.0, 1.0):
        grant = granted(await decider.acquire(ask(work=work)))
        (state,) = grant.limits
        assert (state.mechanism, state.capacity) == ("requests", 10.0)
        balances.append(state.balance)
    assert balances == pytest.approx([9, 8, 7, 6])


@pytest.mark.parametrize("work", [0.0, 3.0, 10_000.0])
async def test_w16_a_settle_corrects_nothing(decider: Decider, work: float) -> None:
    enforce(decider, TEN)
    grant = granted(await decider.acquire(ask(work=5)))
    progress = await decider.settle(SettleRequest(grant.reservation, work, final=False))
    assert progress.limits[0].balance == pytest.approx(9)
    settled = await decider.settle(SettleRequest(grant.reservation, work))
    assert settled.limits[0].balance == pytest.approx(9)
    assert (settled.adjusted, settled.stop) == (0.0, False)


async def test_w16_the_eleventh_request_is_refused_by_rate(decider: Decider) -> None:
    enforce(decider, TEN | {"rate": 2})
    for _ in range(10):
        granted(await decider.acquire(ask(work=100)))
    refusal = refused(await decider.acquire(ask(work=0)))
    assert (refusal.policy, refusal.reason, refusal.retry) == ("ten", "request_rate", "after")
    assert 0 < refusal.retry_after_ms <= 500, "two come each second"
    assert "requests" in refusal.detail


CAPPED = {
    "name": "capped", "per": ["customer"], "rate": 2, "mechanism": "requests", "burst": 10, "max_debt": 0,
    "steering": {"initial": "C"}, "weights": {"operation": {"write": 3, "ping": 0}},
}  # fmt: skip


async def test_w16_weights_apply_to_the_tokens_of_a_steered_cap(decider: Decider) -> None:
    enforce(decider, CAPPED)
    balances = []
    for operation in ("read", "write", "ping", "write", "write"):
        grant = granted(await decider.acquire(ask(work=5, descriptor={"operation": operation})))
        balances.append(round(grant.limits[0].balance))
        settled = await decider.settle(SettleRequest(grant.reservation, 5.0))
        assert settled.adjusted == 0
    assert balances == [9, 6, 6, 3, 0]
    write = refused(await decider.acquire(ask(work=5, descriptor={"operation": "write"})))
    assert write.reason == "request_rate"
    assert 1000 < write.retry_after_ms <= 1500, "three tokens, of which two come each second"


async def test_w16_a_refused_write_keeps_no_read_out(decider: Decider) -> None:
    enforce(decider, CAPPED | {"rate": SLOW, "burst": 4, "steering": {"initial": 1e-6, "floor": 1e-6}})
    granted(await decider.acquire(ask(work=5, descriptor={"operation": "write"})))
    refused(await decider.acquire(ask(work=5, descriptor={"operation": "write"})))
    granted(await decider.acquire(ask(work=5, descriptor={"operation": "read"})))


async def test_w16_a_request_weighs_what_its_weights_say(decider: Decider) -> None:
    enforce(decider, TEN | {"weights": {"operation": {"write": 3}}})
    grant = granted(await decider.acquire(ask(descriptor={"operation": "write"}, work=50)))
    assert grant.limits[0].balance == pytest.approx(7)
    settled = await decider.settle(SettleRequest(grant.reservation, 80))
    assert settled.limits[0].balance == pytest.approx(7)


async def test_w16_beside_a_work_limit_only_that_is_charged_and_corrected(decider: Decider) -> None:
    enforce(decider, TEN, {"name": "work", "rate": SLOW, "capacity": 100})
    grant = granted(await decider.acquire(ask(work=20)))
    assert grant.charged == 20
    settled = await decider.settle(SettleRequest(grant.reservation, 50))
    assert settled.adjusted == 30
    assert {state.policy: round(state.balance) for state in settled.limits} == {"ten": 9, "work": 50}


async def test_w16_the_answer_under_an_idempotency_key_stays_one_token(decider: Decider) -> None:
    """Also where the policies are other ones by then, so that only the memo knows what was counted."""
    enforce(decider, TEN)
    granted(await decider.acquire(ask(), idempotency_key="k"))
    enforce(decider, TEN, {"name": "more", "rate": 1})
    replayed = granted(await decider.acquire(ask(), idempotency_key="k"))
    assert (replayed.replayed, replayed.charged) == (True, 0.0)
    settled = await decider.settle(SettleRequest(replayed.reservation, 7))
    assert {state.policy: round(state.balance) for state in settled.limits} == {"ten": 9}


DENIED = {"name": "no-robots", "match": {"agent": "robot*"}, "deny": True}


async def test_w17_deny_refuses_whatever_it_covers_and_nothing_is_consumed(decider: Decider) -> None:
    enforce(decider, DENIED, {"name": "all", "rate": SLOW, "capacity": 10})
    for dry_run in (False, True):
        refusal = refused(await decider.acquire(ask(descriptor={"agent": "robot-7"}, dry_run=dry_run)))
        assert (refusal.policy, refusal.reason, refusal.retry) == ("no-robots", "denied", "never")
        assert (refusal.retry_after_ms, refusal.limits) == (0, ())
    grant = granted(await decider.acquire(ask(descriptor={"agent": "person"})))
    assert grant.limits[0].balance == pytest.approx(9)
    assert decider.decisions.refused["denied"] == 1
    assert decider.decisions.dry_runs == 1


async def test_w17_retries_of_what_is_denied_are_no_retries_at_other_limits(decider: Decider) -> None:
    enforce(decider, DENIED, {"name": "all", "rate": SLOW, "capacity": 10})
    for attempt in range(1, 60):
        refused(await decider.acquire(ask(descriptor={"agent": "robot-7"}, attempt=attempt)))
    granted(await decider.acquire(ask(descriptor={"agent": "person"}, work=100)))
    assert refused(await decider.acquire(ask(descriptor={"agent": "person"}))).retry == "after"


async def test_w17_an_override_of_its_group_lifts_a_denial(decider: Decider) -> None:
    friend = {"name": "friend", "match": {"agent": "robot-7"}, "rate": 1, "group": "robots"}
    enforce(decider, DENIED | {"group": "robots"}, friend)
    assert granted(await decider.acquire(ask(descriptor={"agent": "robot-7"}))).limits[0].policy == "friend"
    assert refused(await decider.acquire(ask(descriptor={"agent": "robot-8"}))).policy == "no-robots"


async def test_p11_a_denial_in_shadow_only_counts(decider: Decider) -> None:
    enforce(decider, DENIED | {"shadow": True}, {"name": "all", "match": {"x": "*"}, "rate": 10})
    grant = granted(await decider.acquire(ask(descriptor={"agent": "robot", "x": "1"})))
    assert [state.policy for state in grant.limits] == ["all"]
    assert granted(await decider.acquire(ask(descriptor={"agent": "robot"}))).limits == ()
    granted(await decider.acquire(ask(descriptor={"agent": "robot"}, dry_run=True)))
    assert (decider.decisions.denied_in_shadow, sum(decider.decisions.uncovered.values())) == (2, 0)


async def test_w17_charges_from_before_a_policy_denied_can_still_be_settled(decider: Decider) -> None:
    enforce(decider, {"name": "p", "rate": SLOW, "capacity": 10})
    grant = granted(await decider.acquire(ask(work=4)))
    enforce(decider, {"name": "p", "deny": True})
    assert (await decider.settle(SettleRequest(grant.reservation, 2))).adjusted == -2


BOTH = {"name": "both", "per": ["customer"], "rate": SLOW, "capacity": 10, "quota": {"work": 100, "period": "year"}}


async def test_p12_a_rate_and_a_quota_are_two_limits_under_one_name(decider: Decider) -> None:
    enforce(decider, BOTH | {"weights": {"operation": {"write": 2}}})
    grant = granted(await decider.acquire(ask(work=4, descriptor={"operation": "write"})))
    assert [(state.policy, state.mechanism, state.capacity, round(state.balance)) for state in grant.limits] == [
        ("both", "work", 10.0, 2),
        ("both", "quota", 100.0, 92),
    ]
    settled = await decider.settle(SettleRequest(grant.reservation, 3))
    assert {state.mechanism: round(state.balance) for state in settled.limits} == {"work": 4, "quota": 94}


async def test_p12_the_reason_of_a_refusal_says_which_of_the_two_it_was(decider: Decider) -> None:
    enforce(decider, BOTH | {"max_debt": 0})
    granted(await decider.acquire(ask(work=10)))
    assert refused(await decider.acquire(ask(work=1))).reason == "work"
    enforce(decider, BOTH | {"capacity": 1000})
    granted(await decider.acquire(ask("c2", work=100)))
    refusal = refused(await decider.acquire(ask("c2", work=1)))
    assert (refusal.policy, refusal.reason) == ("both", "quota")


async def test_p12_a_quota_is_not_handed_out_again_when_a_rate_joins_or_leaves_it(decider: Decider) -> None:
    quota = {"name": "both", "per": ["customer"], "quota": BOTH["quota"]}
    enforce(decider, quota)
    granted(await decider.acquire(ask(work=60)))
    enforce(decider, BOTH)
    assert {state.mechanism: round(state.balance) for state in granted(await decider.acquire(ask(work=5))).limits} == {
        "work": 5,
        "quota": 35,
    }
    enforce(decider, quota)
    assert granted(await decider.acquire(ask(work=5))).limits[0].balance == 30


async def test_p12_the_buckets_of_both_are_found_by_their_policy(decider: Decider, valkey: Server) -> None:
    enforce(decider, BOTH, {"name": "both-of-them", "rate": 1})
    granted(await decider.acquire(ask()))
    link = await open_link(valkey.url)
    page = await list_buckets(link, PageQuery(policy="both"))
    await link.aclose()
    assert sorted(name for name, _ in page.buckets) == ["both+quota:c1", "both:c1"]
    assert [name for name, record in page.buckets if record.is_quota] == ["both+quota:c1"]


def test_p12_the_controller_distinguishes_a_rate_from_a_quota_of_the_same_name() -> None:
    learning = BOTH | {"charge": "learned", "mechanism": "auto"}
    plan = make_plans(read_policy_set({"policies": [learning]}))["default"]
    rate, quota = plan.find("both:c1"), plan.find("both+quota:c1")
    assert rate is not None
    assert quota is not None
    assert (rate.control.cap is not None, rate.limit.mechanism) == (True, "auto")
    assert (quota.control.cap, quota.limit.mechanism) == (None, "quota")
    assert quota.control.learning is not None


async def test_a_group_keeps_both_limits_of_the_policy_that_applies(decider: Decider) -> None:
    enforce(decider, BOTH | {"group": "g", "match": {"customer": "c1"}}, {"name": "z", "group": "g", "rate": 1})
    assert [state.mechanism for state in granted(await decider.acquire(ask())).limits] == ["work", "quota"]
    assert [state.policy for state in granted(await decider.acquire(ask("c2"))).limits] == ["z"]


RATED = {
    "name": "plan",
    "per": ["region", "customer"],
    "rate": SLOW,
    "capacity": 10,
    "rates": {"customer": {"big": 500, "huge": "6000/m", "big, too": 500}},
}


def rated(customer: str, **more: Any) -> AcquireRequest:
    return AcquireRequest({"customer": customer, "region": "e,u"}, **more)


async def test_p12_listed_keys_have_a_rate_of_their_own(decider: Decider) -> None:
    enforce(decider, RATED)
    rates = [granted(await decider.acquire(rated(name))).limits[0].rate for name in ("big", "huge", "big, too", "c1")]
    assert rates == [500.0, 100.0, 500.0, SLOW]


async def test_p12_a_capacity_given_as_time_follows_the_key_s_own_rate(decider: Decider) -> None:
    enforce(decider, RATED | {"rate": 10, "capacity": "2s", "reserve": {"sheddable": "50%"}})
    states = {name: granted(await decider.acquire(rated(name))).limits[0].capacity for name in ("big", "c1")}
    assert states == {"big": 1000.0, "c1": 20.0}
    granted(await decider.acquire(rated("c1", work=11)))
    assert isinstance(await decider.acquire(rated("c1", criticality=Criticality.SHEDDABLE)), Refused)
    granted(await decider.acquire(rated("big", work=11)))
    granted(await decider.acquire(rated("big", criticality=Criticality.SHEDDABLE)))


@pytest.mark.parametrize("customer", ["big", "big, too", "c1"])
async def test_p12_a_settle_restores_a_forgotten_bucket_with_its_key_s_own_terms(
    decider: Decider, valkey: Server, customer: str
) -> None:
    enforce(decider, RATED | {"rate": 10, "capacity": "2s"})
    grant = granted(await decider.acquire(rated(customer, work=1)))
    link = await open_link(valkey.url)
    (name,) = [name for name, _ in (await list_buckets(link, PageQuery(policy="plan"))).buckets]
    await link.call(Slot().prefix, "DEL", keys.bucket(Slot().prefix, name), timeout_s=5)
    await link.aclose()
    settled = await decider.settle(SettleRequest(grant.reservation, 3))
    (state,) = settled.limits
    assert (state.capacity, state.rate) == ((20.0, 10.0) if customer == "c1" else (1000.0, 500.0))


def test_p12_the_controller_steers_each_key_to_its_own_rate() -> None:
    policy = RATED | {"mechanism": "auto", "rate": 10, "steering": {"initial": "C"}}
    policies = read_policy_set({"policies": [policy]})
    plan, planner = make_plans(policies)["default"], Planner(policies)
    for customer, committed in (("big", 500.0), ("huge", 100.0), ("c1", 10.0)):
        asked = want(planner.cover("default", {"customer": customer})[1][0], {"customer": customer}, 1.0, CRITICAL, 0)
        terms, limit = plan.find(asked.bucket), planner.find("default", asked.bucket)
        assert terms is not None
        assert limit is not None
        assert (terms.limit.terms.committed, terms.limit.terms.cap) == (committed, committed)
        assert asked.params == limit.terms == terms.limit.terms


def test_p12_a_name_too_long_to_tell_its_key_has_the_rate_of_all_others() -> None:
    planner = Planner(read_policy_set({"policies": [RATED | {"per": ["region", "customer", "a", "b"], "rate": 7}]}))
    descriptor = {"customer": "big", "region": "r" * 64, "a": "a" * 64, "b": "b" * 64}
    limits = planner.cover("default", descriptor)[1]
    asked = want(limits[0], descriptor, 1.0, CRITICAL, 0)
    assert asked.params.committed == 500
    found = planner.find("default", asked.bucket)
    assert found is not None
    assert found.terms.committed == 7


async def test_p12_an_absent_dimension_is_no_listed_key(decider: Decider) -> None:
    enforce(decider, RATED | {"rates": {"customer": {"": 500}}})
    assert granted(await decider.acquire(AcquireRequest({"region": "eu"}))).limits[0].rate == SLOW
    assert granted(await decider.acquire(rated(""))).limits[0].rate == 500


def test_the_memory_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients make up values, long ones too."""
    monkeypatch.setattr(planning, "SHAPES_KEPT_MAX", 50)
    found = Planner(read_policy_set({"policies": [{"name": "reads", "match": {"customer": "*"}, "rate": 1}]}))
    for number in range(200):
        found.cover("default", {"customer": f"c{number}"})
        found.cover("default", {"customer": f"c{number}" * 100})
    shapes = found._spaces["default"].shapes
    assert 0 < len(shapes) <= 50
    assert max(len(value or "") for values in shapes for value in values) <= planning.VALUES_KEPT_MAX
