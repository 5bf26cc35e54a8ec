"""FAULTS V and N over HTTP: each a 4xx in valid JSON that names the field, the same in both lanes."""

import json

import httpx
import pytest

from tests.support.live import LiveApi, ask, exchange, request

NUMBER = "a number from 0 to 9007199254740992"
WHOLE_TTL = "a whole number from 1 to 86400000"
NO_LEASE = "no such field: leases broke request limits; lending a part of a limit gets a route of its own"
WITH = b'{"descriptor":{"service":"slow","customer":"c"},%b}'

REFUSED_FIELDS = [
    ("F-V1", b'"work":-1', "work", "-1", NUMBER),
    ("F-V2", b'"work":NaN', "work", "NaN", NUMBER),
    ("F-V2", b'"work":Infinity', "work", "Infinity", NUMBER),
    ("F-V2", b'"work":-Infinity', "work", "-Infinity", NUMBER),
    ("F-V2", b'"work":1e400', "work", "1e400", NUMBER),
    ("F-V2", b'"expected_latency_ms":1e400', "expected_latency_ms", "1e400", NUMBER),
    ("F-V3", b'"work":9007199254740994', "work", "9007199254740994", NUMBER),
    ("F-V3", b'"work":1e300', "work", "1e+300", NUMBER),
    ("F-V3", b'"work":' + b"9" * 5000, "work", "9" * 57 + "...", NUMBER),
    ("F-V4", b'"work":"3"', "work", '"3"', NUMBER),
    ("F-V4", b'"work":true', "work", "true", NUMBER),
    ("F-V4", b'"attempt":true', "attempt", "true", "a whole number from 1 to 1000"),
    ("F-V4", b'"attempt":1.5', "attempt", "1.5", "a whole number from 1 to 1000"),
    ("F-V4", b'"dry_run":1', "dry_run", "1", "true or false"),
    ("F-V5", b'"lease":true', "lease", "a field that is gone", NO_LEASE),
    ("F-V5", b'"lease":false', "lease", "a field that is gone", NO_LEASE),
    ("F-V5", b'"work":1,"work":1', "work", "it more than once", "each name once"),
    ("F-V6", b'"ttl_ms":0', "ttl_ms", "0", WHOLE_TTL),
    ("F-V6", b'"ttl_ms":-5', "ttl_ms", "-5", WHOLE_TTL),
    ("F-V6", b'"ttl_ms":315360000000', "ttl_ms", "315360000000", WHOLE_TTL),
    ("F-V6", b'"ttl_ms":null', "ttl_ms", "null", WHOLE_TTL),
    ("G4", b'"criticality":"vital"', "criticality", '"vital"', "critical_plus, critical, sheddable_plus, sheddable"),
    ("F-N4", b'"namespace":"' + b"n" * 10_000 + b'"', "namespace", '"' + "n" * 56 + "...",
     "Unicode text of at most 1024 characters"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "found", "allowed"), [row[1:] for row in REFUSED_FIELDS],
                         ids=[f"{row[0]}-{row[2]}-{row[3][:12]}" for row in REFUSED_FIELDS])  # fmt: skip
def test_a_bad_value_is_named(api: LiveApi, fields: bytes, field: str, found: str, allowed: str) -> None:
    """F-V1 to F-V6"""
    reply = exchange(api, request(body=WITH % fields))[0]
    assert reply.status == 422
    assert reply.header("content-type") == "application/problem+json"
    assert reply.json["errors"] == [{"field": field, "found": found, "allowed": allowed}]
    assert reply.json["detail"] == f"{field}: found {found}; allowed: {allowed}"


TEXT = "Unicode text of at most 1024 characters"
NAMES = "names that are Unicode text of 1 to 64 characters"
SOME = "an object of 1 to 32 names with their values"
BAD_DESCRIPTORS = [
    (b'{"a":"\\ud800"}', "descriptor.a", '"\\ud800"', TEXT),
    (b'{"\\udc00":"a"}', "descriptor", 'the name "\\udc00"', NAMES),
    (b'{"":"a"}', "descriptor", 'the name ""', NAMES),
    (b'{"a":"' + b"x" * 10_000 + b'"}', "descriptor.a", '"' + "x" * 56 + "...", TEXT),
    (b'{"' + b"x" * 65 + b'":"a"}', "descriptor", 'the name "' + "x" * 56 + "...", NAMES),
    (json.dumps({f"d{number}": "x" for number in range(33)}).encode(), "descriptor", "33 names", SOME),
    (b"{}", "descriptor", "0 names", SOME),
    (b"[]", "descriptor", "[]", SOME),
    (b'{"a":{"b":"c"}}', "descriptor.a", '{"b": "c"}', TEXT),
    (b'{"a":1}', "descriptor.a", "1", TEXT),
    (b'{"a":"x","a":"y"}', "descriptor.a", "it more than once", "each name once"),
    (b'{"a":"x","\\u0061":"y"}', "descriptor.a", "it more than once", "each name once"),
    (b'{"a:b":"x","a:b":"y"}', 'descriptor["a:b"]', "it more than once", "each name once"),
]


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
        (b'{"descriptor":{"a":"\xff"}}', "the body is not UTF-8: byte 20 cannot be"),
        (b"\xef\xbb\xbf{}", "the body is not JSON: expecting value at character 0"),
        (b'{"x":' + b"[" * 200_000, '"x": nested more than 32 levels deep'),
        (b"[" * 200_000, "the body is nested more than 32 levels deep"),
        (b'{"descriptor":' * 70_000, '"descriptor": nested more than 32 levels deep'),
        (b'{"a":"\n"}', "the body is not JSON: invalid control character at character 6"),
    ],
)
def test_what_is_no_json_is_said_to_be_none(api: LiveApi, body: bytes, detail: str) -> None:
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


def test_every_problem_is_told_at_once(client: httpx.Client) -> None:
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
