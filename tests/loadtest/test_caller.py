"""A user honours refusals, keeps to its budget, and fails over without asking twice."""

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from loadtest.locust.attempts import Attempt
from loadtest.locust.caller import SETTLE_TRIES_MAX, SHUN_S, Answer, Caller
from loadtest.locust.draws import Ask
from loadtest.locust.retry_pause import retry_pause_s

ASK = Ask(tenant="t1", operation="write", criticality="critical", estimate=4.0, cost=10.0)
GRANTED = Answer(200, b'{"granted":true,"reservation":"r1","charged":4.0,"degraded":false}')
SETTLED = Answer(200, b'{"work":10.0,"adjusted":6.0}')
AWAY = Answer(503, b'{"reason":"store_unavailable"}')
GONE = Answer(0, failure="connection refused")


def refused(**more: Any) -> Answer:
    return Answer(429, json.dumps({"reason": "work", "retry": "after", "retry_after_ms": 120, **more}).encode())


@dataclass
class Script:
    """Answers in order, and everything that was done."""

    answers: list[Answer]
    sent: list[tuple[str, str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)
    told: list[Attempt] = field(default_factory=list)
    now_s: float = 1000.0

    def caller(self, *nodes: str) -> Caller:
        return Caller(nodes or ("a",), self.send, self.told.append, Random(3), self.sleep, now_s=lambda: self.now_s)

    def send(self, node: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        self.sent.append((node, path, json.loads(body), headers))
        return self.answers.pop(0)

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_a_grant_is_worked_and_settled() -> None:
    script = Script([GRANTED, SETTLED])
    script.caller().request(ASK)
    assert [path for _, path, *_ in script.sent] == ["/v1/acquire", "/v1/settle"]
    assert script.sent[0][2]["work"] == 4.0
    assert script.sent[1][2] == {"reservation": "r1", "work": 10.0}
    assert [one.work for one in script.told] == [4.0, 6.0], "the charge, then the correction"
    assert script.told[1].settle_lag_ms == 0.0


def test_a_refusal_is_asked_again_when_it_says_and_with_the_next_attempt_number() -> None:
    script = Script([refused(), refused(retry_after_ms=500), GRANTED, SETTLED])
    script.caller().request(ASK)
    assert script.slept_s[:2] == [0.12, 0.5]
    assert [body["attempt"] for _, path, body, _ in script.sent if path == "/v1/acquire"] == [1, 2, 3]
    assert len({headers["Idempotency-Key"] for *_, headers in script.sent[:3]}) == 3, "each is a question of its own"
    assert [one.demanded for one in script.told[:3]] == [10.0, 0.0, 0.0]
    assert [one.is_retry for one in script.told[:3]] == [False, True, True]


def test_the_header_counts_where_the_body_does_not_say() -> None:
    script = Script([Answer(429, b'{"retry":"after","reason":"work"}', retry_after="2"), GRANTED, SETTLED])
    script.caller().request(ASK)
    assert script.slept_s[0] == 2.0


def test_never_means_never() -> None:
    script = Script([refused(retry="never", retry_after_ms=None)])
    script.caller().request(ASK)
    assert script.slept_s == []
    assert [one.reason for one in script.told] == ["work"]


def test_three_attempts_are_all() -> None:
    script = Script([refused(), refused(), refused()])
    script.caller().request(ASK)
    assert len(script.told) == 3


def test_no_answer_goes_to_another_node_under_the_same_key_and_the_dead_one_is_shunned() -> None:
    script = Script([GONE, GRANTED, SETTLED, GRANTED, SETTLED])
    caller = script.caller("a", "b", "c")
    caller.request(ASK)
    (first, *_, key), (second, *_, same_key) = script.sent[:2]
    assert first != second
    assert key == same_key
    assert [one.is_final for one in script.told[:2]] == [False, False]
    assert script.told[0].is_failed
    script.now_s -= 0.5 * SHUN_S
    caller.request(ASK)
    assert first not in {node for node, *_ in script.sent[1:]}


def test_a_request_fails_if_no_node_answers() -> None:
    script = Script([GONE, AWAY])
    script.caller("a", "b").request(ASK)
    assert [one.is_final for one in script.told] == [False, True]
    assert [one.reason for one in script.told] == ["connection refused", "503 store_unavailable"]


def test_a_settle_is_tried_until_it_is_answered_and_its_lag_counts_all_of_it() -> None:
    script = Script([GRANTED, AWAY, GONE, SETTLED])
    script.caller("a", "b").request(ASK)
    assert script.told[-1].settle_lag_ms == pytest.approx(500.0)
    assert [one.is_final for one in script.told[1:3]] == [False, False]


def test_settles_end_some_time() -> None:
    script = Script([GRANTED] + [AWAY] * SETTLE_TRIES_MAX)
    script.caller().request(ASK)
    assert script.answers == []
    assert script.told[-1].is_final


def test_retries_stay_within_a_tenth_of_the_requests() -> None:
    script = Script([refused()] * 2000)
    caller = script.caller()
    for _ in range(1000):
        caller.request(ASK)
    assert 1000 + 100 <= len(script.sent) <= 1000 + 100 + 3


@pytest.mark.parametrize(
    ("retry", "retry_after_ms", "header", "pause_s"),
    [("after", 120.0, "1", 0.12), ("after", None, "3", 3.0), ("after", None, None, None), ("never", 120.0, "1", None)],
)
def test_how_long_a_refused_user_waits(
    retry: str, retry_after_ms: float | None, header: str | None, pause_s: float | None
) -> None:
    assert retry_pause_s(retry, retry_after_ms=retry_after_ms, retry_after_header=header) == pause_s
