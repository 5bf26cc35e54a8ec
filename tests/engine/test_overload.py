"""Overload control through the decider: classes, expectations, and the answers to callers."""

import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from limiter.engine.breaker import FAILURES_MAX
from limiter.engine.decider import Decider
from limiter.engine.fallback import throttles
from limiter.model.bucket.bucket import HISTOGRAM_STEPS, Record
from limiter.model.bucket.contract import AcquireRequest, Decision, Granted, Refused, SettleRequest
from limiter.model.bucket.reservation import Signer
from limiter.model.control.stewardship import Steer, SteerStatus
from limiter.model.overload.shedding import CLASS_NUMBERS, Shedding, ShedOrder, State
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.reading import read_policy_set
from limiter.store import keys
from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import Link, open_link
from limiter.store.steering import Steering
from tests.support.nodes import Watched
from tests.support.servers import Server

CLASSES = list(Criticality)
SHEDDABLE = Criticality.SHEDDABLE
EXPECTATIONS = {
    "expected_latency_ms": 200,
    "expected_by": {"client": {"batch": 60_000}, "operation": {"report": 5000}, "type": {"bulk": 900}},
}


class Node:
    """A node and a controller on one store."""

    def __init__(self, link: Link) -> None:
        self.decider = Decider(Buckets(link), Signer(b"a secret of the tests"), deadline_s=5)
        self._steering = Steering(link)

    def enforce(self, *policies: dict[str, Any]) -> None:
        self.decider.enforce(read_policy_set({"policies": list(policies)}))

    async def acquire(self, criticality: Criticality | None = None, *, key: str | None = None, **more: Any) -> Decision:
        descriptor = {"service": "orders"} | more.pop("descriptor", {})
        request = AcquireRequest(descriptor, criticality=criticality, **more)
        return await self.decider.acquire(request, idempotency_key=key)

    async def order(self, order: ShedOrder, policy: str = "orders") -> None:
        """Set overload control of the policy's bucket, which is made by a request."""
        await self.acquire()
        limit = self.decider.planner.find("default", policy)
        lease = await self._steering.take(Slot())
        assert limit is not None
        assert lease is not None
        row = Steer(policy, limit.params(1_790_000_000_000_000), overload=order)
        assert await self._steering.steer(Slot(), lease, [row]) == [SteerStatus.DONE]

    async def record(self, policy: str = "orders") -> Record:
        return (await self._steering.records(Slot(), [policy]))[policy]

    async def shedding(self, policy: str = "orders") -> Shedding:
        known = (await self.record(policy)).shedding
        assert known is not None
        return known

    async def serve(self, latency_ms: float, **more: Any) -> None:
        grant = granted(await self.acquire(**more))
        await self.decider.settle(SettleRequest(grant.reservation, 1, latency_ms=latency_ms))


@pytest.fixture
async def node(valkey: Server) -> AsyncIterator[Node]:
    link = await open_link(valkey.url)
    yield Node(link)
    await link.aclose()


def orders(**more: Any) -> dict[str, Any]:
    return {
        "name": "orders",
        "match": {"service": "orders"},
        "rate": 1e6,
        "overload": {"expectations": EXPECTATIONS},
    } | more


def granted(decision: Decision) -> Granted:
    assert isinstance(decision, Granted), decision
    return decision


def refused(decision: Decision) -> Refused:
    assert isinstance(decision, Refused), decision
    return decision


@pytest.mark.parametrize(
    ("descriptor", "requested_ms", "expected_ms"),
    [
        ({}, None, 200),
        ({"operation": "report"}, None, 5000),
        ({"client": "batch", "operation": "report"}, None, 60_000),
        ({"type": "bulk"}, None, 900),
        ({"operation": "other"}, None, 200),
        ({}, 50, 50),
        ({"client": "batch"}, 50, 50),
        ({"operation": "report"}, 0, 0),
    ],
)
async def test_q1_the_request_s_expectation_wins_over_the_policy_s_default_for_client_operation_and_type(
    node: Node, descriptor: dict[str, str], requested_ms: float | None, expected_ms: float
) -> None:
    node.enforce(orders())
    await node.serve(expected_ms, descriptor=descriptor, expected_latency_ms=requested_ms)
    assert (await node.record("orders")).missed == 0
    await node.serve(math.nextafter(expected_ms, math.inf), descriptor=descriptor, expected_latency_ms=requested_ms)
    assert (await node.record("orders")).missed == 1


async def test_q1_each_policy_has_its_own_default(node: Node) -> None:
    patient = orders(name="patient", overload={"expectations": {"expected_latency_ms": 10_000}})
    node.enforce(orders(), patient, orders(name="plain", overload=None))
    await node.serve(1000)
    missed = [(await node.record(name)).missed for name in ("orders", "patient")]
    assert missed == [1, 0]
    assert (await node.record("plain")).missed == 0


async def test_q4_of_g4_s_classes_the_lower_are_refused_and_a_request_without_one_has_the_default(node: Node) -> None:
    node.enforce(orders())
    await node.order(ShedOrder(refused_shares=(0.0, 0.0, 1.0, 1.0)))
    granted_to = [isinstance(await node.acquire(criticality), Granted) for criticality in CLASSES]
    assert granted_to == [True, True, False, False]
    granted(await node.acquire())
    assert (await node.shedding()).refused == [0, 0, 1, 1]


async def test_g4_one_field_meets_reserves_ranks_and_classes(node: Node) -> None:
    """W11's reserve, Q4's rank and S3's rate, each refusing the class that the one field names."""
    node.enforce(orders(rate=1e-6, capacity=100, reserve={"sheddable": "50%"}))
    await node.order(ShedOrder(refused_shares=(0, 0, 1.0, 0), rates=(0, 1e-6, 0, 0)))
    granted(await node.acquire(SHEDDABLE, work=50))
    assert refused(await node.acquire(SHEDDABLE)).reason == "work"
    assert refused(await node.acquire(Criticality.SHEDDABLE_PLUS)).reason == "overload"
    granted(await node.acquire(Criticality.CRITICAL))
    assert refused(await node.acquire(Criticality.CRITICAL)).reason == "overload"
    granted(await node.acquire(Criticality.CRITICAL_PLUS))


async def test_g6_where_half_of_a_class_or_more_is_refused_there_is_no_use_in_retrying(node: Node) -> None:
    node.enforce(orders())
    await node.order(ShedOrder(state=State.OVERLOADED, refused_shares=(0, 0, 0, 1.0)))
    answer = refused(await node.acquire(SHEDDABLE))
    assert (answer.reason, answer.retry, answer.retry_after_ms) == ("overload", "never", 0)
    assert answer.overloaded
    assert answer.policy == "orders"
    assert answer.detail == "orders: overloaded; 100 % of the requests of this class are refused"
    assert [limit.passed for limit in answer.limits] == [False]


async def test_g6_else_to_come_back_in_about_a_second_not_all_at_once(node: Node) -> None:
    node.enforce(orders())
    await node.order(ShedOrder(refused_shares=(0, 0, 0, 0.25)))
    answers = [await node.acquire(SHEDDABLE) for _ in range(200)]
    waits = [answer.retry_after_ms for answer in answers if isinstance(answer, Refused)]
    assert all(isinstance(answer, Granted) or answer.retry == "after" for answer in answers)
    assert 20 < len(waits) < 100
    assert all(500 <= wait_ms <= 1500 for wait_ms in waits)
    assert len(set(waits)) > len(waits) / 2


async def test_g6_a_class_at_its_rate_learns_when_its_next_token_comes(node: Node) -> None:
    node.enforce(orders())
    await node.order(ShedOrder(rates=(0, 0, 0, 0.05)))
    granted(await node.acquire(SHEDDABLE))
    answer = refused(await node.acquire(SHEDDABLE))
    assert (answer.retry, 10_000 <= answer.retry_after_ms <= 30_000) == ("after", True)
    assert "0.05 requests per second" in answer.detail


async def test_g6_many_retries_make_it_never(node: Node) -> None:
    node.enforce(orders())
    await node.order(ShedOrder(rates=(0, 0, 0, 1e-3)))
    answers = [await node.acquire(SHEDDABLE, attempt=2) for _ in range(40)]
    assert refused(answers[-1]).retry == "never"


async def test_s4_q6_answers_carry_the_least_quality_and_any_overload(node: Node) -> None:
    node.enforce(orders(), orders(name="other"), orders(name="watching", shadow=True))
    await node.order(ShedOrder(quality=0.8))
    answer = granted(await node.acquire())
    assert (answer.quality, answer.overloaded) == (0.8, False)
    await node.order(ShedOrder(quality=0.3, state=State.OVERLOADED), "other")
    await node.order(ShedOrder(quality=0.1, state=State.OVERLOADED), "watching")
    answer = granted(await node.acquire())
    assert (answer.quality, answer.overloaded) == (0.3, True)


async def test_a_request_without_overload_control_has_full_quality(node: Node) -> None:
    node.enforce(orders(overload=None))
    answer = granted(await node.acquire())
    assert (answer.quality, answer.overloaded) == (1.0, False)


async def test_p11_a_shadow_policy_refuses_nobody(node: Node) -> None:
    node.enforce(orders(shadow=True))
    await node.order(ShedOrder(refused_shares=(1.0, 1.0, 1.0, 1.0)))
    granted(await node.acquire(SHEDDABLE))
    assert (await node.shedding()).refused[3] == 1


async def test_q6_a_changed_block_reaches_the_live_bucket_at_the_next_request(node: Node) -> None:
    node.enforce(orders())
    await node.order(ShedOrder(refused_shares=(1.0, 1.0, 1.0, 1.0)))
    refused(await node.acquire())
    node.enforce(orders(overload={"response_time": {"percentiles": True}}))
    refused(await node.acquire())
    assert len((await node.record()).histogram) == 4 * HISTOGRAM_STEPS
    node.enforce(orders(overload=None))
    granted(await node.acquire())
    assert (await node.record()).shedding is None


async def test_s3_settles_count_under_the_class_of_their_acquire(node: Node) -> None:
    node.enforce(orders(overload={"response_time": {}}))
    for number, criticality in enumerate(CLASSES):
        for _ in range(number + 1):
            await node.serve(10, criticality=criticality)
    assert (await node.shedding()).timed == [1, 2, 3, 4]


async def test_f_r7_a_repeat_under_its_key_gets_the_same_refusal(node: Node) -> None:
    node.enforce(orders())
    await node.order(ShedOrder(rates=(0, 0, 0, 0.5)))
    granted(await node.acquire(SHEDDABLE))
    first = refused(await node.acquire(SHEDDABLE, key="once"))
    again = refused(await node.acquire(SHEDDABLE, key="once"))
    assert again.replayed
    assert (again.retry_after_ms, again.reason, again.limits) == (first.retry_after_ms, "overload", first.limits)


async def test_f_r7_a_repeat_whose_policies_have_changed_still_settles_by_its_class_and_expectation(node: Node) -> None:
    node.enforce(orders())
    granted(await node.acquire(SHEDDABLE, key="once"))
    node.enforce(orders(), orders(name="new"))
    again = granted(await node.acquire(SHEDDABLE, key="once"))
    await node.decider.settle(SettleRequest(again.reservation, 1, latency_ms=201))
    known = await node.shedding()
    number = CLASS_NUMBERS[SHEDDABLE]
    assert (known.timed[number], (await node.record("orders")).missed) == (1, 1)


async def test_b3_without_the_store_a_node_that_heard_of_no_throttle_refuses_nobody_by_class(node: Node) -> None:
    node.enforce(orders(on_store_failure="local"))
    await node.order(ShedOrder(quality=0.5, state=State.OVERLOADED, refused_shares=(1.0, 1.0, 1.0, 1.0)))
    for number in range(FAILURES_MAX):
        node.decider._store_health.breaker.fail(time.monotonic() + number, 0.5)
    assert node.decider.store_is_shunned
    answer = granted(await node.acquire(SHEDDABLE))
    assert (answer.degraded, answer.quality, answer.overloaded) == (True, 1.0, False)


async def test_a_policy_without_a_block_pays_nothing_for_another_s(valkey: Server) -> None:
    """Not a byte more in its calls or its record, whatever other policies have."""
    plain = orders(name="plain", overload=None)
    calls = []
    for policies in ([plain], [plain, orders(name="other", match={"service": "others"})]):
        valkey.command("FLUSHALL")
        link = Watched(await open_link(valkey.url))
        node = Node(link)
        node.enforce(*policies)
        await node.serve(100)
        link.calls.clear()  # the first ones may have brought the scripts
        await node.serve(100)
        record = valkey.command("GET", keys.bucket(Slot().prefix, "plain"))
        sizes = [[len(part) for part in call if isinstance(part, bytes)] for call in link.calls]
        calls.append((sizes, len(record)))
        await link.aclose()
    assert calls[0] == calls[1]


async def test_s13_a_session_is_admitted_or_refused_as_a_whole_and_one_without_by_chance(node: Node) -> None:
    node.enforce(orders(overload={"expectations": EXPECTATIONS, "draw_by": ["session"]}))
    await node.order(ShedOrder(refused_shares=(0, 0, 0, 0.5)))
    outcomes = {}
    for number in range(40):
        asked = [await node.acquire(SHEDDABLE, descriptor={"session": f"s{number}"}) for _ in range(4)]
        kinds = {type(answer) for answer in asked}
        assert len(kinds) == 1, "one session, one answer"
        outcomes[number] = kinds.pop()
    assert 8 <= sum(kind is Refused for kind in outcomes.values()) <= 32
    alone = {type(await node.acquire(SHEDDABLE)) for _ in range(40)}
    assert alone == {Granted, Refused}


async def test_q12_nobody_expects_less_than_the_policy_lets_anybody_expect(node: Node) -> None:
    node.enforce(orders(overload={"expectations": {"expected_latency_ms": 200, "expected_min_ms": 100}}))
    await node.serve(100, expected_latency_ms=0)
    assert (await node.record()).missed == 0
    await node.serve(101, expected_latency_ms=0)
    assert (await node.record()).missed == 1


@pytest.mark.parametrize(("outcome", "missed"), [("ok", 0), ("error", 1), ("timeout", 1), ("cancelled", 0)])
async def test_q8_outcomes_that_the_policy_lists_count_as_missed_however_fast(
    node: Node, outcome: str, missed: int
) -> None:
    node.enforce(orders(overload={"expectations": EXPECTATIONS, "outcomes": ["error", "timeout"]}))
    grant = granted(await node.acquire(SHEDDABLE))
    await node.decider.settle(SettleRequest(grant.reservation, 1, latency_ms=1, outcome=outcome))
    assert (await node.record()).missed == missed
    assert sum((await node.shedding()).late) == missed


async def test_q8_without_a_latency_the_time_since_the_acquire_counts(node: Node) -> None:
    node.enforce(orders(overload={"expectations": {"expected_latency_ms": 0.1}}))
    grant = granted(await node.acquire(SHEDDABLE))
    await node.decider.settle(SettleRequest(grant.reservation, 1))
    known = await node.shedding()
    assert (sum(known.timed), (await node.record()).missed) == (1, 1)
    assert 0 < known.seconds < 5


async def test_q11_without_its_store_a_node_goes_on_by_the_last_known_share_for_a_while(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.enforce(orders(on_store_failure="open"))
    await node.order(ShedOrder(quality=0.5, state=State.OVERLOADED, refused_shares=(0, 0, 0, 1.0)))
    refused(await node.acquire(SHEDDABLE))
    for number in range(FAILURES_MAX):
        node.decider._store_health.breaker.fail(time.monotonic() + number, 0.5)
    answer = refused(await node.acquire(SHEDDABLE))
    assert (answer.degraded, answer.reason, answer.overloaded, answer.retry) == (True, "overload", True, "after")
    assert granted(await node.acquire()).quality == 1.0, "of critical requests nothing was heard after the order"
    monkeypatch.setattr(throttles, "HELD_S", 0.0)
    assert granted(await node.acquire(SHEDDABLE)).degraded


async def test_s8_answers_tell_state_and_share_where_a_policy_has_overload_control(node: Node) -> None:
    node.enforce(orders())
    assert granted(await node.acquire()).state == "calm"
    await node.order(ShedOrder(state=State.RECOVERING, refused_shares=(0, 0, 0, 1.0)))
    calm = granted(await node.acquire())
    assert (calm.state, calm.overloaded, calm.refused_share) == ("recovering", False, 0.0)
    turned_away = refused(await node.acquire(SHEDDABLE))
    assert (turned_away.state, turned_away.overloaded, turned_away.refused_share) == ("overloaded", True, 1.0)
    node.enforce(orders(overload=None))
    assert granted(await node.acquire()).state is None
