"""P7: requests that no policy covers say so, are listed, and are told apart by their namespace, in both lanes."""

from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from limiter.api_keys import new_key
from tests.support.command import run_headgate
from tests.support.live import Lane, LiveApi, ask, exchange, live, request
from tests.support.servers import Server, free_port

_numbers = count(1)


@pytest.fixture
def dimension() -> str:
    """A dimension that nobody else sends."""
    return f"costumer{next(_numbers)}"


def listed(client: httpx.Client, **query: str | int) -> list[dict[str, Any]]:
    answer = client.get("/v1/uncovered", params={"limit": 100, **query})
    assert answer.status_code == 200
    rows: list[dict[str, Any]] = answer.json()["uncovered"]
    return rows


def test_an_acquire_says_whether_a_policy_covers_it(client: httpx.Client, customer: str) -> None:
    covered = client.post("/v1/acquire", json=ask(customer)).json()
    assert covered["covered"] is True
    assert list(covered)[-1] == "covered"
    watched = {"descriptor": {"trial": "t", "customer": customer}}
    assert client.post("/v1/acquire", json=watched).json()["covered"] is True, "a shadow policy covers it too"
    answer = client.post("/v1/acquire", json={"descriptor": {"costumer": customer}}).json()
    assert (answer["granted"], answer["covered"], answer["limits"]) == (True, False, [])


def test_so_does_each_acquire_of_a_batch(client: httpx.Client, customer: str) -> None:
    asked = [{"op": "acquire", **ask(customer)}, {"op": "acquire", "descriptor": {"costumer": customer}}]
    results = client.post("/v1/batch", json={"operations": asked}).json()["results"]
    assert [result["covered"] for result in results] == [True, False]


def test_the_lanes_say_it_in_the_same_bytes(both: dict[Lane, LiveApi]) -> None:
    sent = request(body={"descriptor": {"nobody": "x"}, "dry_run": True})
    fast, plain = (exchange(api, sent)[0].body for api in both.values())
    assert fast == plain
    assert fast.endswith(b'"covered":false}')


def test_a_misspelt_dimension_is_listed_with_the_name_that_was_meant(client: httpx.Client) -> None:
    for number in range(3):
        client.post("/v1/acquire", json={"descriptor": {"servce": "orders", "custmoer": f"c{number}"}})
    (row,) = [row for row in listed(client) if row["dimensions"] == ["custmoer", "servce"]]
    assert row["nearest"] == {"custmoer": "customer", "servce": "service"}
    assert (row["namespace"], row["namespace_known"], row["count"], row["count_error"]) == ("default", True, 3, 0)
    assert row["examples"][0] == {"servce": "orders", "custmoer": "c0"}
    assert 0 < row["first_seen_ms"] <= row["last_seen_ms"]


def test_an_undeclared_namespace_is_marked(client: httpx.Client, dimension: str) -> None:
    client.post("/v1/acquire", json={"namespace": dimension, "descriptor": {"customer": "c1"}})
    (row,) = listed(client, namespace=dimension)
    assert (row["namespace_known"], row["nearest"]) == (False, {})


def test_text_of_clients_is_cut_and_escaped(client: httpx.Client, dimension: str) -> None:
    hostile = "\x1b[2J\u202e<script>" + "x" * 900
    client.post("/v1/acquire", json={"descriptor": {dimension: hostile, "\x00" + dimension: "y"}})
    (row,) = [row for row in listed(client) if dimension in row["dimensions"]]
    assert row["dimensions"] == ["\\x00" + dimension, dimension]
    value = row["examples"][0][dimension]
    assert value.startswith("\\x1b[2J\\u202e<script>")
    assert len(value) < 100


def test_a_flood_of_distinct_descriptors_does_not_grow_the_list(client: httpx.Client) -> None:
    asked = [{"op": "acquire", "descriptor": {f"d{number}": "x"}, "dry_run": True} for number in range(600)]
    client.post("/v1/batch", json={"operations": asked})
    assert len(listed(client)) == 100
    assert len(listed(client, limit=5)) == 5


@pytest.mark.parametrize(("query", "field"), [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit")])
def test_bad_limits_are_refused_by_name(client: httpx.Client, query: str, field: str) -> None:
    answer = client.get(f"/v1/uncovered?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"].endswith(field)


def test_a_key_sees_its_own_namespace_alone(store: Server, policies: Path) -> None:
    """A bound key sees its namespace alone, a caller nothing."""
    keys = {
        "root": new_key("root", "admin"),
        "tenant": new_key("tenant", "viewer", "tenant1"),
        "caller": new_key("caller", "caller"),
    }
    entries = ",".join(entry for _, entry in keys.values())
    with live(store.url, policies, api_keys=entries) as api, api.client() as client:

        def get(name: str, **query: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {keys[name][0]}"}
            return client.get("/v1/uncovered", params=query, headers=headers)

        for namespace in ("default", "tenant1", "elsewhere"):
            body = {"namespace": namespace, "descriptor": {"costumer": "c1"}}
            client.post("/v1/acquire", json=body, headers={"Authorization": f"Bearer {keys['root'][0]}"})
        assert {row["namespace"] for row in get("root").json()["uncovered"]} == {"default", "elsewhere"}
        assert get("tenant").json() == {"uncovered": []}, "one policy covers everything there"
        assert get("tenant", namespace="elsewhere").status_code == 403
        assert get("caller").status_code == 403
        assert client.get("/v1/uncovered").status_code == 401


@pytest.mark.parametrize("lane", ["fast", "plain"])
def test_where_it_is_refused_the_reason_names_an_undeclared_namespace(
    store: Server, policies: Path, lane: Lane
) -> None:
    with live(store.url, policies, lane=lane, uncovered="refuse") as api, api.client() as client:
        refused = client.post("/v1/acquire", json={"descriptor": {"costumer": "c1"}})
        assert (refused.status_code, refused.json()["reason"]) == (403, "uncovered")
        assert "nobody declared" not in refused.json()["detail"]
        refused = client.post("/v1/acquire", json={"namespace": "ordres", "descriptor": {"customer": "c1"}})
        assert "nobody declared the namespace 'ordres'" in refused.json()["detail"]
        assert len(listed(client)) == 2, "and both are listed"


@pytest.mark.slow
def test_the_command_shows_what_a_node_has_counted(store: Server, policies: Path, tmp_path: Path) -> None:
    key, entry = new_key("viewer", "viewer")
    (tmp_path / "key").write_text(f"{key}\n")
    with live(store.url, policies) as api, api.client() as client:
        nothing = run_headgate("uncovered", "--url", api.base)
        assert nothing.stdout == "a policy covered every request that this process has seen\n"
        for namespace in ("default", "no\x1bbody"):
            client.post("/v1/acquire", json={"namespace": namespace, "descriptor": {"costumer": "\x1b[2J"}})
        shown = run_headgate("uncovered", "--url", api.base).stdout
    assert "costumer: did you mean customer?" in shown
    assert "body (not declared)" in shown
    assert "\x1b" not in shown
    with live(store.url, policies, api_keys=entry) as api:
        refused = run_headgate("uncovered", "--url", api.base)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert refused.stderr.startswith("headgate: the node refused: a known API key is required")
        assert run_headgate("uncovered", "--url", api.base, "--key-file", str(tmp_path / "key")).returncode == 0


def test_the_command_says_where_it_could_not_ask() -> None:
    asked = run_headgate("uncovered", "--url", f"http://127.0.0.1:{free_port()}")
    assert asked.returncode == 1
    assert asked.stderr.startswith("headgate: cannot ask http://127.0.0.1:")
    assert run_headgate("uncovered", "--url", "file:///etc/passwd").returncode == 2
