"""Refusing costs in proportion to what was sent, whatever it is (F-H10)."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from api.data import decode, json_text
from api.data.decode import BadRequest
from api.data.render import failure
from api.routes import responses
from limiter.model.policy.problems import PolicyError
from limiter.model.policy.reading import read_namespace, read_policy
from tests.support.hostile import BODIES, Make
from tests.support.live import LiveApi, Reply, Wire, request, statuses

KB, MB = 1_000, 1_000_000
CPU_MAX_S = 0.5
"""For a megabyte: it takes less than a tenth of a second where nothing else runs."""
ANSWER_MAX_BYTES = 600_000


def refuse_policy(body: bytes) -> object:
    return read_policy(responses.checked(body))


def refuse_namespace(body: bytes) -> object:
    return read_namespace("n", responses.checked(body))


def refuse_batch(body: bytes) -> object:
    operations = decode.batch(body)
    return [failure(operation) for operation in operations if isinstance(operation, BadRequest)]


DECODERS: dict[str, Callable[[bytes], object]] = {
    "acquire": decode.acquire,
    "settle": decode.settle,
    "batch": refuse_batch,
    "signals": decode.signals,
    "policy": refuse_policy,
    "namespace": refuse_namespace,
}


def cpu_s(read: Callable[[bytes], object], body: bytes) -> float:
    """The least of three times, without what others on the machine did meanwhile."""
    taken_s = []
    for _ in range(3):
        began_s, answer_bytes = time.thread_time(), 0
        try:
            read(body)
        except (BadRequest, PolicyError) as error:
            answer_bytes = len(failure(error).body)
        taken_s.append(time.thread_time() - began_s)
        assert answer_bytes < ANSWER_MAX_BYTES
        if taken_s[-1] < CPU_MAX_S / 10:
            break
    return min(taken_s)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", BODIES)
def test_the_cost_of_refusing_grows_in_proportion(kind: str, decoder: str) -> None:
    """F-H10: ten times the bytes take about ten times as long, not a hundred times."""
    taken_s = []
    for size in (10 * KB, 100 * KB, MB):
        taken_s.append(cpu_s(DECODERS[decoder], BODIES[kind](size)))
        assert taken_s[-1] < CPU_MAX_S, f"{size} bytes"
    assert taken_s[-1] < 40 * taken_s[-2] + CPU_MAX_S / 10


@pytest.mark.slow
def test_the_largest_of_each_route_are_still_refused_quickly() -> None:
    """F-H10: just within every bound on the number of values, where each of them is looked at."""
    for kind, make in BODIES.items():
        for decoder, size in {"batch": 450 * KB, "policy": 130 * KB}.items():
            assert cpu_s(DECODERS[decoder], make(size)) < CPU_MAX_S, (kind, decoder)


def test_a_batch_names_few_problems_but_one_for_each_operation() -> None:
    """F-H10"""
    wrong = {"op": "acquire", "descriptor": {"a": "b"}, **{f"x{number}": 1 for number in range(30)}}
    found = decode.batch(json.dumps({"operations": [wrong] * 1000}).encode())
    told = [len(problem.problems) for problem in found if isinstance(problem, decode.Invalid)]
    assert (len(told), told[0], told[-1]) == (1000, 20, 1)
    assert sum(told) < 1250


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * MB, '"' + "x" * 56 + "..."),
        ("x" * 58, '"' + "x" * 58 + '"'),
        ("x" * 59, '"' + "x" * 56 + "..."),
        ("é" * MB, ('"' + "\\u00e9" * 10)[:57] + "..."),
        ([["x" * MB] * 100] * 1000, '[["' + "x" * 54 + "..."),
        ({"a": [1, {"b": None}]}, '{"a": [1, {"b": null}]}'),
        ([1] * MB, ("[" + "1, " * 20)[:57] + "..."),
        (json_text.Odd("1" * MB), "1" * 57 + "..."),
        (None, "null"),
    ],
)
def test_a_value_is_shown_by_its_beginning(value: object, text: str) -> None:
    assert json_text.shown(value) == text


@pytest.mark.parametrize(
    ("body", "field", "found", "allowed"),
    [
        (b'{"match":{"a":[1,{"b c":NaN}]}}', "match.a[1].b c", "NaN", "a finite number"),
        (b'{"match":{"a":[1,{"b":1e999}]}}', "match.a[1].b", "1e999", "a finite number"),
        (b'[{"a":{"\\udc00":1}}]', "[0].a", '"\\udc00"', "Unicode text"),
        (b'{"a":[[],["\\ud800"]]}', "a[1][0]", '"\\ud800"', "Unicode text"),
        (b'{"a":{"b":1,"c":2,"b":1}}', "a", '"b"', "each name once"),
        (b'{"' + b"x" * 100_000 + b'":[NaN]}', '"' + "x" * 56 + "...[0]", "NaN", "a finite number"),
    ],
)
def test_an_unsound_part_of_a_document_is_named(body: bytes, field: str, found: str, allowed: str) -> None:
    with pytest.raises(decode.Invalid) as refused:
        responses.checked(body)
    (problem,) = refused.value.problems
    assert (problem.field, problem.found, problem.allowed) == (field, found, allowed)


ROUTES = [
    ("POST", "/v1/acquire", MB),
    ("POST", "/v1/settle", MB),
    ("POST", "/v1/batch", MB),
    ("POST", "/v1/signals", MB),
    ("PUT", "/v1/policies/hostile", 120 * KB),
    ("PATCH", "/v1/policies/hostile", 120 * KB),
    ("POST", "/v1/policies/apply", MB),
    ("POST", "/v1/policies/check", MB),
    ("PUT", "/v1/namespaces/hostile", 120 * KB),
    ("POST", "/v1/policies/hostile/rollback", 120 * KB),
    ("POST", "/v1/nowhere", MB),
]


@pytest.mark.parametrize("kind", BODIES)
def test_others_are_answered_while_a_body_is_refused(api: LiveApi, kind: str) -> None:
    """F-H10: on every route, in both lanes."""
    replies: list[Reply] = []
    sender = threading.Thread(target=lambda: replies.extend(_send_to_all_routes(api, BODIES[kind])))
    slowest_s = 0.0
    with Wire(api) as other:
        sender.start()
        while sender.is_alive():
            began_s = time.monotonic()
            other.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert statuses(other.receive()) == [200]
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        sender.join()
    assert len(replies) == len(ROUTES)
    told = [reply.status for reply in replies if not reply.body.startswith(b'{"results"')]  # each operation has its own
    assert all(400 <= status < 500 for status in told), told
    assert slowest_s < 3


def _send_to_all_routes(api: LiveApi, make: Make) -> list[Reply]:
    replies: list[Reply] = []
    for method, path, size in ROUTES:
        with Wire(api) as wire:
            wire.send(request(path, make(size), method=method))
            replies += wire.receive()
    return replies


def documents_of(count: int) -> dict[str, Any]:
    return {"rate": 1, "match": {}, **{f"field{number}": 1 for number in range(count)}}


def test_a_policy_with_many_mistakes_lists_the_first(api: LiveApi) -> None:
    """F-H10"""
    with api.client() as client:
        answer = client.put("/v1/policies/many", json=documents_of(5000))
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == 100


def test_a_policy_that_is_too_long_is_refused(api: LiveApi) -> None:
    """F-H10"""
    with api.client() as client:
        answer = client.put("/v1/policies/long", json={"rate": 1, "description": "x" * responses.DOCUMENT_BYTES_MAX})
    assert (answer.status_code, answer.json()["reason"]) == (413, "too_long")
