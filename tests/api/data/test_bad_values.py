"""FAULTS V and N over HTTP: each a 4xx in valid JSON that names the field, the same in both lanes."""

import json

import httpx
import pytest

from tests.support.bad_values import BAD_DESCRIPTORS, REFUSED_FIELDS, WITH
from tests.support.live import LiveApi, ask, exchange, request


@pytest.mark.parametrize(("fields", "field", "found", "allowed"), [row[1:] for row in REFUSED_FIELDS],
                         ids=[f"{row[0]}-{row[2]}-{row[3][:12]}" for row in REFUSED_FIELDS])  # fmt: skip
def test_a_bad_value_is_named(api: LiveApi, fields: bytes, field: str, found: str, allowed: str) -> None:
    """F-V1 to F-V6"""
    reply = exchange(api, request(body=WITH % fields))[0]
    assert reply.status == 422
    assert reply.header("content-type") == "application/problem+json"
    assert reply.json["errors"] == [{"field": field, "found": found, "allowed": allowed}]
    assert reply.json["detail"] == f"{field}: found {found}; allowed: {allowed}"


@pytest.mark.parametrize(("descriptor", "field", "found", "allowed"), BAD_DESCRIPTORS)
def test_a_bad_descriptor_is_named(api: LiveApi, descriptor: bytes, field: str, found: str, allowed: str) -> None:
    """F-N3 to F-N6"""
    reply = exchange(api, request(body=b'{"descriptor":%b}' % descriptor))[0]
    assert reply.status == 422
    assert {"field": field, "found": found, "allowed": allowed} in reply.json["errors"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"", "the body is not JSON: expecting value at character 0"),
        (b"{", "the body is not JSON: expecting property name enclosed in double quotes at character 1"),
        (b'{"descriptor":{"a":"b"}} x', "the body is not JSON: extra data at character 25"),
        (b'{"descriptor":{"a":"\xff"}}', "the body is not UTF-8: byte 20 is invalid"),
        (b"\xef\xbb\xbf{}", "the body is not JSON: expecting value at character 0"),
        (b'{"x":' + b"[" * 200_000, '"x": nested more than 32 levels deep'),
        (b"[" * 200_000, "the body is nested more than 32 levels deep"),
        (b'{"descriptor":' * 70_000, '"descriptor": nested more than 32 levels deep'),
        (b'{"a":"\n"}', "the body is not JSON: invalid control character at character 6"),
    ],
)
def test_a_body_that_is_no_json_is_refused_with_the_place(api: LiveApi, body: bytes, detail: str) -> None:
    """F-V5"""
    reply = exchange(api, request(body=body))[0]
    assert (reply.status, reply.json["detail"]) == (400, detail)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 415),
        ([("Content-Type", "application/json")], 200),
        ([("Content-Type", "Application/JSON; charset=UTF-8")], 200),
        ([("Content-Type", "application/json;charset=latin-1")], 415),
        ([("Content-Type", "text/plain")], 415),
        ([("Content-Type", "application/x-www-form-urlencoded")], 415),
        ([("Content-Type", "application/jsonp")], 415),
        ([("Content-Type", "")], 415),
        ([("Content-Type", "application/json"), ("Content-Encoding", "gzip")], 415),
        ([("Content-Type", "application/json"), ("Content-Encoding", "identity")], 200),
        ([("Content-Encoding", "identity")], 415),
    ],
)
def test_only_json_is_taken(api: LiveApi, headers: list[tuple[str, str]], status: int, customer: str) -> None:
    """F-V5"""
    reply = exchange(api, request(body=ask(customer), headers=headers, typed=False))[0]
    assert reply.status == status


def test_an_unknown_field_is_named_with_those_there_are(client: httpx.Client) -> None:
    answer = client.post("/v1/acquire", json={"descriptor": {"a": "b"}, "werk": 3})
    problem = answer.json()["errors"][0]
    assert (answer.status_code, problem["field"], problem["found"]) == (422, "werk", "a field that is not known")
    assert problem["allowed"].startswith("descriptor, namespace, work, ")


def test_every_problem_is_listed_at_once(client: httpx.Client) -> None:
    answer = client.post("/v1/settle", json={"work": -1, "final": "yes"})
    assert [problem["field"] for problem in answer.json()["errors"]] == ["reservation", "work", "final"]
    assert answer.json()["detail"].endswith("it is required (and 2 more)")


ODD_TEXTS = ["{a}", "a:b", "%3A", "a/b", "a\nb\r\nX-Evil: 1", "\0", "\u202e", "\u0000}:{", "é", "😀", ""]


def test_odd_names_and_values_are_served_and_never_collide(client: httpx.Client, customer: str) -> None:
    """F-N1 to F-N3, F-N5, F-H5"""
    for number, text in enumerate(ODD_TEXTS):
        body = {"descriptor": {"service": "slow", "customer": customer + text}, "work": 10}
        answer = client.post("/v1/acquire", json=body)
        assert answer.status_code == 200, f"number {number} has a bucket of its own"
        assert "x-evil" not in answer.headers
        named = client.post("/v1/acquire", json={"descriptor": {text or "x": "y"}, "namespace": text})
        assert named.status_code == 200


def test_odd_text_comes_back_escaped(api: LiveApi) -> None:
    """F-H5, F-N3"""
    evil = "a\r\nSet-Cookie: x\r\n\r\n<html>\u202e"
    body = json.dumps({"descriptor": {"a": "b"}, evil: 1}).encode()
    headers = [("Content-Type", "application/json"), ("Idempotency-Key", "k\te\xe9y")]
    reply = exchange(api, request(body=body, headers=headers))[0]
    assert reply.status == 422
    assert reply.header("set-cookie") is None
    assert "\u202e" not in reply.body.decode()
    assert evil[:3] in json.loads(reply.json["errors"][0]["field"][1:-1])
