"""Answers: headers from limits, rounding that never says too early, and nothing that could end a header."""

import math

import msgspec
import pytest

from api.data import render
from api.data.answer import header
from api.data.rate_limit_headers import HeaderSet, lines
from limiter.engine.request_errors import NotDecided
from limiter.model.bucket.contract import Granted, LimitState, Refused

WORK = LimitState("reads", "work", 47.2, 50.0, 100.0, window_s=0.5, reset_ms=28.0)
DEBT = LimitState("reads", "work", -150.0, 50.0, 100.0, passed=False, window_s=0.5, reset_ms=1510.0)
QUOTA = LimitState("monthly", "quota", 10.0, 1000.0, 0.0, window_s=2_592_000.0, reset_ms=86_400_001.0)
SHADOW = LimitState("trial", "work", 0.0, 1.0, 1.0, shadow=True, passed=False)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            "draft",
            (
                'ratelimit: "reads";r=47;t=1, "monthly";r=10;t=86401\r\n'
                'ratelimit-policy: "reads";q=100;w=1, "monthly";q=1000;w=2592000\r\n'
            ),
        ),
        ("legacy", "ratelimit-limit: 1000\r\nratelimit-remaining: 10\r\nratelimit-reset: 86401\r\n"),
        ("x", "x-ratelimit-limit: 1000\r\nx-ratelimit-remaining: 10\r\nx-ratelimit-reset: 86401\r\n"),
        ("none", ""),
    ],
)
def test_each_set_of_headers(headers: HeaderSet, expected: str) -> None:
    assert lines((WORK, QUOTA, SHADOW), headers).decode() == expected


def test_the_older_sets_tell_of_the_limit_that_refused() -> None:
    assert lines((QUOTA, DEBT), "x").startswith(b"x-ratelimit-limit: 100\r\nx-ratelimit-remaining: 0\r\n")


def test_a_debt_shows_as_nothing_left() -> None:
    assert lines((DEBT,), "draft").startswith(b'ratelimit: "reads";r=0;t=2\r\n')


def refused(**fields: object) -> Refused:
    given = {"policy": "reads", "reason": "work", "retry": "after", "retry_after_ms": 1501, "limits": (DEBT,)}
    return msgspec.convert(given | {"detail": "…"} | fields, Refused)


@pytest.mark.parametrize(("retry_after_ms", "seconds"), [(1, 2), (1510, 2), (2000, 2), (2001, 3), (60_000, 60)])
def test_retry_after_is_rounded_up_and_never_before_the_debt_is_repaid(retry_after_ms: int, seconds: int) -> None:
    answer = render.Renderer().decision(refused(retry_after_ms=retry_after_ms))
    assert dict(answer.headers)[b"retry-after"] == b"%d" % seconds


def test_never_has_no_retry_after() -> None:
    """G6"""
    answer = render.Renderer().decision(refused(retry="never"))
    assert b"retry-after" not in dict(answer.headers)
    assert msgspec.json.decode(answer.body)["retry"] == "never"


def test_a_refusal_names_the_violated_policies_and_not_the_watching_ones() -> None:
    answer = render.Renderer().decision(refused(limits=(DEBT, QUOTA, SHADOW), degraded=True))
    body = msgspec.json.decode(answer.body)
    assert body["violated-policies"] == ["reads"]
    assert body["degraded"] is True
    assert body["limits"][2] == {
        "policy": "trial", "mechanism": "work", "balance": 0.0, "capacity": 1.0, "rate": 1.0,
        "passed": False, "shadow": True,
    }  # fmt: skip


def test_numbers_that_json_has_not_are_left_out() -> None:
    odd = msgspec.structs.replace(WORK, balance=math.inf, capacity=math.nan)
    granted = Granted(reservation="r", charged=1.0, expires_in_ms=1, limits=(odd,))
    body = msgspec.json.decode(render.Renderer("none").decision(granted).body)
    assert (body["limits"][0]["balance"], body["limits"][0]["capacity"]) == (None, None)


def test_a_store_that_is_away_is_503_and_says_when_to_come_back() -> None:
    answer = render.failure(NotDecided("store_unavailable", "away", policy="reads", retry_after_ms=1001))
    body = msgspec.json.decode(answer.body)
    assert answer.status == 503
    assert body["type"].endswith("#temporary-reduced-capacity")
    assert (body["reason"], body["policy"], body["retry_after_ms"]) == ("store_unavailable", "reads", 1001)
    assert dict(answer.headers)[b"retry-after"] == b"2"


def test_a_defect_of_ours_is_500_and_shows_nothing() -> None:
    answer = render.failure(ZeroDivisionError("secret"))
    assert answer.status == 500
    assert b"secret" not in answer.body


@pytest.mark.parametrize("text", ["a\r\nSet-Cookie: x", "a\nb", "\u2028", "\0", "é", "a\tb"])
def test_nothing_ends_a_header(text: str) -> None:
    """F-H5"""
    line = header("x", text)
    assert line.count(b"\r\n") == 1
    assert line.count(b"\n") == 1
    evil = msgspec.structs.replace(WORK, policy=text + '"\\')
    for headers in ("draft", "x"):
        assert lines((evil,), headers).count(b"\n") == {"draft": 2, "x": 3}[headers]
