"""A proxy answers as a node does: the same bodies, headers and statuses, for requests of every kind (G7)."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from limiter.model.policy.criticality import Criticality
from tests.support.live import POLICIES, live
from tests.support.proxies import proxied
from tests.support.servers import running

JSON = {"content-type": "application/json"}
HEADERS = ("content-type", "ratelimit", "ratelimit-policy", "headgate-retry", "allow", "idempotency-replayed")
NUMBER = r"-?\d[\d.e+-]*"
NAMES_OF_ONE_CALL = ("reservation", "request_id")


class Pair(NamedTuple):
    """A node, and a proxy in front of it."""

    node: httpx.Client
    proxy: httpx.Client


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    (directory / "policies.yaml").write_text(POLICIES)
    with (
        running("valkey", directory) as store,
        live(store.url, directory / "policies.yaml") as api,
        proxied(api.base, default_criticality=Criticality.CRITICAL) as proxy,
        api.client() as to_node,
        proxy.client() as to_proxy,
    ):
        yield Pair(to_node, to_proxy)


def alike(one: Any, other: Any) -> bool:
    """Equal, but for the names of one call, and for what time has added meanwhile."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(
            name in NAMES_OF_ONE_CALL or alike(one[name], other[name]) for name in one
        )
    if isinstance(one, str) and isinstance(other, str):
        return re.sub(NUMBER, "0", one) == re.sub(NUMBER, "0", other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3)
    if type(one) is int and type(other) is int:
        return math.isclose(one, other, rel_tol=1e-3)
    return type(one) is type(other) and one == other


def check(to_node: httpx.Response, to_proxy: httpx.Response) -> None:
    assert to_proxy.status_code == to_node.status_code, to_proxy.text
    told = [{name: answer.headers.get(name) for name in HEADERS} for answer in (to_node, to_proxy)]
    assert told[0] == told[1]
    if "retry-after" in to_node.headers:
        assert math.isclose(int(to_node.headers["retry-after"]), int(to_proxy.headers["retry-after"]), rel_tol=1e-3)
    else:
        assert "retry-after" not in to_proxy.headers
    if to_node.content:
        assert alike(to_node.json(), to_proxy.json()), f"{to_node.text}\n{to_proxy.text}"


def ask(service: str, who: str, **fields: Any) -> dict[str, Any]:
    return {"descriptor": {"service": service, "operation": "read", "customer": who}, **fields}


ACQUIRES: dict[str, list[dict[str, Any]]] = {
    "granted": [{"service": "slow", "work": 3}],
    "granted, and its class claimed": [{"service": "slow", "work": 3, "criticality": "sheddable"}],
    "granted by two policies": [{"service": "limited", "work": 3}],
    "refused for work": [{"service": "slow", "work": 20}, {"service": "slow", "work": 1}],
    "refused for requests": [{"service": "hits"}] * 4,
    "refused as too large": [{"service": "limited", "work": 41}],
    "refused for places": [{"service": "places", "work": 1}] * 3,
    "overload is watched": [{"service": "busy", "work": 1}],
    "uncovered": [{"service": "nobody"}],
    "a dry run": [{"service": "slow", "work": 3, "dry_run": True}],
    "another attempt": [{"service": "slow", "work": 1, "attempt": 2}],
    "another namespace": [{"service": "x", "namespace": "tenant1", "work": 1}],
    "negative work": [{"service": "slow", "work": -1}],
    "an unknown field": [{"service": "slow", "wrok": 1}],
    "an unknown class": [{"service": "slow", "criticality": "vital"}],
}


@pytest.mark.parametrize("name", ACQUIRES)
def test_acquires_are_answered_the_same(pair: Pair, name: str) -> None:
    for body in ACQUIRES[name]:
        service, fields = body["service"], {key: it for key, it in body.items() if key != "service"}
        answers = [
            client.post("/v1/acquire", json=ask(service, f"{who}-{name}", **fields))
            for who, client in zip("np", pair, strict=True)
        ]
        check(*answers)


MALFORMED: dict[str, tuple[bytes, dict[str, str]]] = {
    "not JSON": (b"{bad", JSON),
    "nothing": (b"", JSON),
    "a list": (b"[]", JSON),
    "no descriptor": (b"{}", JSON),
    "a name twice": (b'{"descriptor": {"a": "b", "a": "c"}}', JSON),
    "half a surrogate": (b'{"descriptor": {"a": "\\ud800"}}', JSON),
    "another type": (b'{"descriptor": {"a": "b"}}', {"content-type": "text/plain"}),
    "compressed": (b'{"descriptor": {"a": "b"}}', JSON | {"content-encoding": "gzip"}),
    "a key with a space": (b'{"descriptor": {"a": "b"}}', JSON | {"idempotency-key": "a b"}),
    "too long": (b'{"descriptor": {"a": "' + b"b" * 1_100_000 + b'"}}', JSON),
}


@pytest.mark.parametrize("path", ["/v1/acquire", "/v1/settle", "/v1/batch", "/v1/leases", "/v1/leases/renew"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused_the_same(pair: Pair, name: str, path: str) -> None:
    body, headers = MALFORMED[name]
    check(*[client.post(path, content=body, headers=headers) for client in pair])


def test_settles_are_answered_the_same(pair: Pair) -> None:
    answers: list[list[httpx.Response]] = []
    for who, client in zip("np", pair, strict=True):
        token = client.post("/v1/acquire", json=ask("slow", f"{who}-settles", work=4)).json()["reservation"]
        told = [
            client.post("/v1/settle", json={"reservation": token, "work": work, **fields})
            for work, fields in ((5, {"final": False}), (6, {}), (6, {}), (7, {}))
        ]
        told.append(client.post("/v1/settle", json={"reservation": "no such", "work": 1}))
        told.append(client.post("/v1/settle", json={"reservation": token, "work": "much"}))
        answers.append(told)
    assert [answer.status_code for answer in answers[0]] == [200, 200, 200, 409, 404, 422]
    for to_node, to_proxy in zip(*answers, strict=True):
        check(to_node, to_proxy)


def test_a_repeated_key_gets_the_first_decision_and_another_request_a_conflict(pair: Pair) -> None:
    for who, client in zip("np", pair, strict=True):
        headers = {"idempotency-key": f"{who}-order-17"}
        told = [
            client.post("/v1/acquire", json=ask("slow", f"{who}-keys", work=work), headers=headers)
            for work in (4, 4, 5)
        ]
        assert [answer.status_code for answer in told] == [200, 200, 409]
        assert told[0].json()["reservation"] == told[1].json()["reservation"]
        assert told[2].json()["reason"] == "idempotency_conflict"


def test_batches_are_answered_the_same(pair: Pair) -> None:
    answers = []
    for who, client in zip("np", pair, strict=True):
        operations = [
            {"op": "acquire", **ask("slow", f"{who}-batch", work=3)},
            {"op": "acquire", **ask("slow", f"{who}-batch", work=-3)},
            {"op": "acquire", **ask("limited", f"{who}-batch", work=41), "idempotency_key": f"{who}-batched"},
            {"op": "settle", "reservation": "no such", "work": 1},
            {"op": "stop"},
        ]
        answers.append(client.post("/v1/batch", json={"operations": operations}))
    assert [one["status"] for one in answers[0].json()["results"]] == [200, 422, 429, 404, 422]
    check(*answers)
    check(*[client.post("/v1/batch", json={"operations": []}) for client in pair])
    check(*[client.post("/v1/batch", json={"operations": [{"op": "stop"}] * 1001}) for client in pair])


def test_leases_of_clients_pass_through(pair: Pair) -> None:
    body = {"descriptor": {"service": "lent", "customer": "through"}, "holder": "h" * 32, "work_rate": 10, "weight": 1}
    lease = pair.proxy.post("/v1/leases", json=body)
    assert lease.status_code == 200, lease.text
    back = {"lease": lease.json()["lease"], "number": 2, "taken": 1, "used": {}, "slices": []}
    assert pair.proxy.post("/v1/leases/return", json=back).json()["returned"]
    assert not pair.node.post("/v1/leases/return", json=back).json()["returned"], "it was given back before"


@pytest.mark.parametrize("path", ["/v1/acquire", "/v1/batch", "/healthz", "/load"])
@pytest.mark.parametrize("method", ["OPTIONS", "DELETE"])
def test_other_methods_are_answered_the_same(pair: Pair, path: str, method: str) -> None:
    check(*[client.request(method, path) for client in pair])


def test_a_body_in_chunks_and_a_body_at_once_are_answered_the_same(pair: Pair) -> None:
    content = json.dumps(ask("nobody", "chunks")).encode()
    answers = [client.post("/v1/acquire", content=iter([content[:9], content[9:]]), headers=JSON) for client in pair]
    assert answers[0].status_code == 200
    check(*answers)


def test_management_is_not_served(pair: Pair) -> None:
    answer = pair.proxy.get("/v1/policies")
    assert (answer.status_code, answer.json()["reason"]) == (404, "no_such_path")
    assert "ask a node" in answer.json()["detail"]


def test_probes_and_load_have_the_shape_of_a_node_s(pair: Pair) -> None:
    for path in ("/healthz", "/readyz", "/load"):
        to_node, to_proxy = (client.get(path) for client in pair)
        assert to_node.status_code == to_proxy.status_code == 200
        assert to_node.json().keys() == to_proxy.json().keys()
