"""Request ids: back to whoever sent one, and wherever something went wrong."""

import json
import logging
import re
from typing import Any

import httpx
import pytest

from api.data.answer import JSON, PROBLEM, Answer
from api.data.request_ids import identified
from tests.support.live import LiveApi, Wire, ask, request

MADE = re.compile(r"[0-9a-f]{32}")


def acquire(client: httpx.Client, customer: str, sent: str | None = None, **fields: Any) -> httpx.Response:
    headers = {} if sent is None else {"x-request-id": sent}
    return client.post("/v1/acquire", json=ask(customer, **fields), headers=headers)


def test_a_grant_carries_none_unless_one_was_sent(client: httpx.Client, customer: str) -> None:
    assert "x-request-id" not in acquire(client, customer, work=1).headers
    assert acquire(client, customer, "trace/1:2", work=1).headers["x-request-id"] == "trace/1:2"


def test_a_refusal_is_a_decision_too(client: httpx.Client, customer: str) -> None:
    acquire(client, customer, work=20)
    refused = acquire(client, customer), acquire(client, customer, "mine")
    assert [answer.status_code for answer in refused] == [429, 429]
    assert [answer.headers.get("x-request-id") for answer in refused] == [None, "mine"]
    assert all("request_id" not in answer.json() for answer in refused)


@pytest.mark.parametrize("path", ["/v1/acquire", "/v1/settle", "/v1/batch", "/nothing", "/v1/policies/nobody"])
def test_a_problem_names_the_request(client: httpx.Client, path: str) -> None:
    method = "GET" if path in ("/nothing", "/v1/policies/nobody") else "POST"
    made = client.request(method, path, json={})
    sent = client.request(method, path, json={}, headers={"x-request-id": "mine"})
    assert made.json()["request_id"] == made.headers["x-request-id"]
    assert MADE.fullmatch(made.json()["request_id"])
    assert sent.json()["request_id"] == sent.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("sent", ["", " ", "a b", 'a"b', "é", "x" * 129, "-a", "a\\b", "{}"])
def test_an_id_that_is_not_sane_is_not_repeated(api: LiveApi, sent: str) -> None:
    headers = [("Content-Type", "application/json"), ("x-request-id", sent)]
    with Wire(api) as wire:
        wire.send(request(body=b"{}", headers=headers))
        (reply,) = wire.receive()
    assert reply.status == 422
    assert MADE.fullmatch(reply.json["request_id"])
    assert reply.header("x-request-id") == reply.json["request_id"]


def test_bytes_that_are_no_request_get_an_id_too(api: LiveApi) -> None:
    with Wire(api) as wire:
        wire.send(b"nonsense\r\n\r\n")
        (reply,) = wire.receive_all()
    assert MADE.fullmatch(reply.json["request_id"])


@pytest.mark.parametrize(("sent", "expected"), [(b"mine", "mine"), (None, MADE.pattern)])
def test_a_failure_of_ours_is_logged_under_the_id(
    caplog: pytest.LogCaptureFixture, sent: bytes | None, expected: str
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = identified(Answer(500, PROBLEM, b'{"status":500}', ValueError("why")), sent)
    (record,) = caplog.records
    assert re.fullmatch(expected, record.__dict__["request_id"])
    assert record.exc_info is not None
    assert json.loads(answer.body) == {"status": 500, "request_id": record.__dict__["request_id"]}
    assert answer.error is None


def test_a_failure_within_a_batch_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = identified(Answer(200, JSON, b'{"results":[]}', ValueError("why")), None)
    assert len(caplog.records) == 1
    assert answer.body == b'{"results":[]}'
    assert b"x-request-id: " in answer.head
