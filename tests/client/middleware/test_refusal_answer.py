"""Answers to refused requests, for every kind of refusal."""

import json
from typing import Any

import pytest

from limiter.client.middleware.refusal_answer import passed_on_answer, refusal_answer, throttled_in
from limiter.client.throttled import Throttled

LIMIT = {"policy": "reads", "mechanism": "work", "balance": -3.5, "capacity": 50.0, "rate": 100.0, "passed": False}


def told(refusal: Throttled) -> tuple[int, dict[str, str], dict[str, Any]]:
    answer = refusal_answer(refusal)
    return answer.status, dict(answer.headers), json.loads(answer.body)


def test_g6_over_a_limit_the_answer_says_when_to_come_again() -> None:
    quota = {"policy": "monthly", "mechanism": "quota", "balance": 7.0, "capacity": 1000.0, "rate": 0.0}
    shadow = {**LIMIT, "policy": "trial", "shadow": True}
    body = {"type": "urn:x", "title": "Quota Exceeded", "limits": [LIMIT, quota, shadow]}
    refusal = Throttled(
        reason="work", policy="reads", retry="after", retry_after_ms=1200.0, detail="reads is empty", body=body
    )
    status, headers, problem = told(refusal)
    assert status == 429
    assert headers["retry-after"] == "2"
    assert headers["headgate-retry"] == "after"
    assert headers["ratelimit"] == '"reads";r=0;t=2, "monthly";r=7'
    assert headers["ratelimit-policy"] == '"reads";q=100;w=1, "monthly";q=1000'
    assert headers["content-type"] == "application/problem+json"
    assert problem == {
        "type": "urn:x",
        "title": "Quota Exceeded",
        "status": 429,
        "detail": "reads is empty",
        "reason": "work",
        "policy": "reads",
        "retry": "after",
        "retry_after_ms": 1200.0,
    }


def test_a_refusal_for_good_names_no_time() -> None:
    _, headers, _ = told(Throttled(reason="request_too_large", retry="never", retry_after_ms=0.0))
    assert headers["headgate-retry"] == "never"
    assert "retry-after" not in headers
    assert "ratelimit" not in headers, "nothing is known"


def test_a_denied_request_is_forbidden() -> None:
    status, headers, _ = told(Throttled(reason="blocked", status=403, retry="after", retry_after_ms=60_000))
    assert (status, headers["retry-after"]) == (403, "60")


def test_where_nobody_decided_the_service_is_unavailable_and_another_node_is_none_of_the_callers_business() -> None:
    status, headers, problem = told(Throttled(reason="node_busy", status=503, retry="now"))
    assert (status, headers["headgate-retry"], problem["retry"]) == (503, "after", "after")
    assert told(Throttled(reason="internal", status=500))[0] == 503


def test_g6_where_a_layer_below_refused_nobody_above_is_to_retry() -> None:
    answer = passed_on_answer()
    assert answer.status == 503
    assert dict(answer.headers)["headgate-retry"] == "never"
    assert json.loads(answer.body)["reason"] == "refused_below"


def test_a_refusal_is_found_among_the_exceptions_of_a_task_group() -> None:
    refusal = Throttled(reason="work")
    inner = ExceptionGroup("inner", [refusal])
    assert throttled_in(ExceptionGroup("outer", [ValueError(), inner])) is refusal
    assert throttled_in(ValueError()) is None


@pytest.mark.parametrize("name", ['a"b\\c', "naïve\n"])
def test_names_of_policies_cannot_break_headers(name: str) -> None:
    answer = refusal_answer(Throttled(reason="work", body={"limits": [{**LIMIT, "policy": name}]}))
    line = dict(answer.headers)["ratelimit"]
    assert "\n" not in line
    assert line.isascii()
