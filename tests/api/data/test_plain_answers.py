"""Plain answers are the same bytes that the general way makes of the same values."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.data import plain_answers, render
from api.data.answer import Answer
from api.data.render import Renderer
from limiter.engine.operation import Operation
from limiter.engine.planner import Planner
from limiter.engine.request_errors import NotDecided
from limiter.engine.settler import Correction
from limiter.engine.shape import want
from limiter.model.bucket.contract import AcquireRequest, Granted, SettleRequest
from limiter.model.bucket.decision import plain_refusal, refusal
from limiter.model.bucket.operations import BucketAnswer, Verdict
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.reading import read_policy_set

LONE = {"name": "odd%d-name", "match": {"service": "one"}, "per": ["customer"], "rate": 100}
SEVERAL = [
    {"name": "first", "match": {"service": "three"}, "rate": 100},
    {"name": "second", "match": {"service": "three"}, "rate": 5, "mechanism": "requests"},
    {"name": "third", "match": {"service": "three"}, "rate": 7, "mechanism": "auto"},
]
KINDS = [
    {"name": "tokens", "match": {"service": "tokens"}, "rate": 5, "mechanism": "requests"},
    {"name": "auto", "match": {"service": "auto"}, "rate": 5, "mechanism": "auto"},
    {"name": "covered", "match": {"service": "covered"}, "rate": 5, "admit": "covered", "charge": "learned"},
    {"name": "borrowing", "match": {"service": "borrowing"}, "rate": 5, "minimum": -10},
]
PLANNER = Planner(read_policy_set({"policies": [{**LONE, "name": "lone"}, *SEVERAL, *KINDS]}))

rates = st.floats(1e-12, 2.0**53)
capacities = st.one_of(st.sampled_from([5.0, 100.0, 1.0, 10.0]), st.floats(1e-3, 2.0**53))
balances = st.floats(-(2.0**53), 2.0**53)
amounts = st.floats(0, 2.0**53)
buckets = st.tuples(st.sampled_from([1, 5]), balances, amounts, rates, capacities)


def operation_of(service: str, values: list[Any], charged: float, ttl_ms: int) -> Operation:
    request = AcquireRequest({"service": service, "customer": "c1"}, ttl_ms=ttl_ms)
    slot, shape = PLANNER.cover("default", request.descriptor)
    nobody = cast("Any", None)
    operation = Operation(nobody, request, nobody, None, slot, shape, Criticality.CRITICAL, 0.0)
    operation.values, operation.charged, operation.token, operation.now_us = values, charged, b"a-token", 1_790_000_000
    return operation


@given(bucket=buckets, charged=amounts, ttl_ms=st.integers(1, 86_400_000))
def test_a_grant_of_one_limit_is_the_same_bytes(bucket: Any, charged: float, ttl_ms: int) -> None:
    operation = operation_of("one", [bucket], charged, ttl_ms)
    expected = Renderer().decision(operation.decision())
    assert plain_answers.rendered(operation) == (expected.head, expected.body)
    assert render.decision_body(operation).body == expected.body


@given(several=st.lists(buckets, min_size=3, max_size=3), charged=amounts)
def test_a_grant_of_several_limits_is_the_same_bytes(several: list[Any], charged: float) -> None:
    operation = operation_of("three", several, charged, 60_000)
    expected = Renderer().decision(operation.decision())
    assert plain_answers.rendered(operation) == (expected.head, expected.body)


@given(
    service=st.sampled_from(["one", "tokens", "auto", "covered", "borrowing"]),
    bucket=buckets,
    work=st.one_of(st.none(), amounts),
    never=st.booleans(),
)
def test_a_refusal_is_the_same_bytes(service: str, bucket: Any, work: float | None, never: bool) -> None:
    code, balance, charge, rate, capacity = bucket
    operation = operation_of(service, [bucket], 0.0, 60_000)
    (limit,), descriptor = operation.limits, operation.request.descriptor
    wanted = want(limit, descriptor, work, Criticality.CRITICAL, 1_790_000_000)
    answer = BucketAnswer(Verdict.BLOCKED, balance, charge, rate, capacity, code > 1)
    retried = [wanted.bucket] if never else []
    refused = refusal([limit], [wanted], [answer], requests=1.0, now_us=1_790_000_000, retried=retried)
    plain = plain_refusal(
        limit, limit.terms, (wanted.how, wanted.minimum, wanted.charge), charge, balance, rate, capacity,
        in_requests=code > 1, retried=never,
    )  # fmt: skip
    assert plain.refused() == refused
    expected = Renderer().decision(refused)
    assert plain_answers.refused(plain) == (expected.head, expected.body)


@given(
    amounts=st.tuples(amounts, balances, amounts),
    told=st.tuples(st.booleans(), st.booleans(), st.integers(0, 86_400_000), st.booleans(), st.booleans()),
    bucket=st.tuples(balances, rates, capacities),
)
def test_a_settle_is_the_same_bytes(amounts: Any, told: Any, bucket: Any) -> None:
    nobody = cast("Any", None)
    operation = Correction(nobody, SettleRequest("token", 1.0), nobody, None, 0.0)
    _, operation.limits = PLANNER.cover("default", {"service": "one", "customer": "c1"})
    operation.plain = (*amounts, *told, *bucket, 1_790_000_000)
    expected = render._encode(render._settled(operation.settled()))
    assert plain_answers.settled_body(operation) == expected


def test_the_memory_of_limits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap that is steered has another rate with every cycle, and each key its own."""
    monkeypatch.setattr(plain_answers, "FACES_MAX", 50)
    for number in range(200):
        operation = operation_of("one", [(1, 1.0, 1.0, 1.0 + number, 10.0)], 1.0, 60_000)
        plain_answers.rendered(operation)
        assert len(plain_answers._faces) <= 50


class Place:
    """Takes answers as a connection would."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def take(self, answer: Answer) -> None:
        self.statuses.append(answer.status)

    def take_plain(self, status: int, head: bytes, body: bytes) -> None:
        self.statuses.append(status)


def test_an_answer_that_cannot_be_rendered_costs_no_other_its_own() -> None:
    """It is a defect of ours: a 500, in a batch too."""
    odd, sound = (operation_of("one", [(1, 1.0, 1.0, 1.0, 10.0)], 1.0, 60_000) for _ in range(2))
    odd.values = cast("Any", [])
    odd.place, sound.place = cast("Any", Place()), cast("Any", Place())
    Renderer().answer([odd, sound])
    assert (odd.place.statuses, sound.place.statuses) == ([500], [200])
    assert render.decision_body(odd).status == 500
    odd.outcome = NotDecided("node_busy", "too busy")
    assert render.decision_body(odd).status == 503
    assert Renderer().decision(cast("Any", Granted)).status == 500


def test_a_settle_that_cannot_be_rendered_is_a_defect_of_ours() -> None:
    nobody = cast("Any", None)
    operation = Correction(nobody, SettleRequest("token", 1.0), nobody, None, 0.0)
    operation.plain = nobody
    assert render.settled(operation).status == 500


def test_a_plain_refusal_has_the_headers_that_are_configured() -> None:
    operation = operation_of("one", [(1, 1.0, 1.0, 1.0, 10.0)], 1.0, 60_000)
    (limit,) = operation.limits
    plain = plain_refusal(limit, limit.terms, (0, 1.0, 5.0), 5.0, -3.0, 100.0, 50.0, in_requests=False)
    names = [name for name, _ in Renderer("x").decision(plain).headers]
    assert b"x-ratelimit-limit" in names
    assert b"ratelimit" not in names
