"""A change of policies beside requests: made in small steps, switched to at once, the newest wins."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from limiter.controller import plan as plan_module
from limiter.controller.plan import make_plans, plan_steps
from limiter.engine import planner as planner_module
from limiter.engine.decider import Decider
from limiter.engine.planner import Planner
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.limit import Limit
from limiter.model.policy.matching import Matcher
from limiter.model.policy.policy import Policy
from limiter.model.policy.policy_set import Namespace, PolicySet
from limiter.model.policy.reading import read_policy
from limiter.model.steps import AT_ONCE, Steps
from limiter.store.buckets import Buckets
from limiter.store.link.connect import open_link

MANY = 2_000
STEP_LIMITS_MAX = AT_ONCE


def policy(number: int, **fields: Any) -> Policy:
    match = {"customer": f"c{number}", "operation": "read*"}
    return read_policy({"name": f"p{number}", "match": match, "rate": 100, **fields})


def policies(*changed: Policy) -> PolicySet:
    """Many policies, of which the first are these."""
    return PolicySet.model_construct(namespaces={}, policies=[*changed, *EVERY[len(changed) :]])


EVERY = [policy(number) for number in range(MANY)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of policies that were resolved."""
    found: list[str] = []

    class Counted(Limit):
        def __init__(self, policy: Policy, *, partitions: int = 1) -> None:
            found.append(policy.name)
            super().__init__(policy, partitions=partitions)

    for module in (planner_module, plan_module):
        monkeypatch.setattr(module, "Limit", Counted)
    return found


def work_of(steps: Steps[Any], made: list[str]) -> Iterator[int]:
    """The number of policies that each step resolved."""
    before = len(made)
    for _ in steps:
        yield len(made) - before
        before = len(made)
    yield len(made) - before


def test_a_plan_of_many_policies_is_made_in_small_steps(made: list[str]) -> None:
    """Issue: a policy change must not stall a node. Counted in policies, not in time."""
    work = list(work_of(Planner.steps(policies(), Planner(PolicySet())), made))
    assert sum(work) == MANY
    assert max(work) <= STEP_LIMITS_MAX
    assert len(work) >= 4 * MANY / AT_ONCE, "the limits, their patterns, how often each is used, where to find them"


def test_a_matcher_of_many_policies_is_made_in_small_steps() -> None:
    assert len(list(Matcher.steps(EVERY, tuple))) >= 3 * MANY / AT_ONCE


def test_a_change_resolves_only_the_policies_that_have_changed(made: list[str]) -> None:
    before = Planner(policies())
    made.clear()
    steps = Planner.steps(policies(policy(0, rate=5), EVERY[1], policy(2, rate=7)), before)
    assert sum(work_of(steps, made)) == 2
    assert made == ["p0", "p2"]


def test_the_counters_of_a_limit_outlive_a_change_of_others() -> None:
    before = Planner(policies())
    after = run(Planner.steps(policies(policy(0, rate=5)), before))
    assert after.find("default", "p1") is before.find("default", "p1")
    assert after.find("default", "p0") is not before.find("default", "p0")


def test_other_namespaces_keep_what_they_remember() -> None:
    tenant = policy(MANY, namespace="tenant1")
    before = Planner(PolicySet.model_construct(namespaces={}, policies=[EVERY[0], tenant]))
    descriptor = {"customer": f"c{MANY}", "operation": "read"}
    covered = before.cover("tenant1", descriptor)
    after = run(Planner.steps(PolicySet.model_construct(namespaces={}, policies=[EVERY[1], tenant]), before))
    assert after.cover("tenant1", descriptor) == covered
    assert after.cover("tenant1", descriptor)[1] is covered[1], "remembered, not searched again"
    assert after.cover("default", {"customer": "c0", "operation": "read"})[1] == ()


def test_another_spread_of_a_namespace_reaches_its_policies() -> None:
    before = Planner(PolicySet.model_construct(namespaces={}, policies=EVERY[:2]))
    spread = {"default": Namespace(partitions=4, partition_by=["customer"])}
    after = run(Planner.steps(PolicySet.model_construct(namespaces=spread, policies=EVERY[:2]), before))
    found = after.find("default", "p0")
    assert found is not None
    assert found.terms.is_divided
    assert len({after.cover("default", {"customer": f"c{number}"})[0] for number in range(50)}) == 4


def test_the_controller_s_plans_are_made_in_small_steps_of_what_has_changed(made: list[str]) -> None:
    steered = [policy(number, charge="learned") for number in range(MANY)]
    before = make_plans(PolicySet.model_construct(namespaces={}, policies=steered))
    made.clear()
    steps = plan_steps(
        PolicySet.model_construct(namespaces={}, policies=[policy(0, charge="learned", rate=5), *steered[1:]]), before
    )
    work = list(work_of(steps, made))
    assert (sum(work), made) == (1, ["p0"])
    assert len(work) >= MANY / AT_ONCE


def run(steps: Steps[Planner]) -> Planner:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Planner = end.value
            return found


def rate_of(decider: Decider) -> float:
    found = decider.planner.find("default", "p0")
    assert found is not None
    return found.terms.committed


@pytest.fixture
async def decider() -> AsyncIterator[Decider]:
    """One that asks no store."""
    link = await open_link("redis://127.0.0.1:1")
    decider = Decider(Buckets(link), Signer(bytes(32)))
    decider.enforce(policies())
    yield decider
    await link.aclose()


async def test_requests_see_the_old_policies_until_the_new_ones_are_ready(
    decider: Decider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limiter.runtime.pauses.STRETCH_S", 0.0)
    seen: list[float] = []
    task = asyncio.create_task(decider.enforce_with_pauses(policies(policy(0, rate=5))))
    while not task.done():
        seen.append(rate_of(decider))
        await asyncio.sleep(0)
    assert len(seen) > 3 * MANY / AT_ONCE, "others had their turn after each step"
    assert set(seen[:-1]) == {100.0}
    assert rate_of(decider) == 5.0


async def test_a_change_that_comes_while_another_is_made_wins(
    decider: Decider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limiter.runtime.pauses.STRETCH_S", 0.0)
    older = asyncio.create_task(decider.enforce_with_pauses(policies(policy(0, rate=5))))
    await asyncio.sleep(0)
    newer = asyncio.create_task(decider.enforce_with_pauses(policies(policy(0, rate=7))))
    await asyncio.gather(older, newer)
    assert rate_of(decider) == 7.0
    late = asyncio.create_task(decider.enforce_with_pauses(policies(policy(0, rate=9))))
    await asyncio.sleep(0)
    decider.enforce(policies(policy(0, rate=11)))
    await late
    assert rate_of(decider) == 11.0
