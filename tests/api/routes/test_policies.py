"""Policies over HTTP: validated, versioned, guarded against lost edits, in force at once."""

from typing import Any

import httpx
import pytest

from tests.support import eventually
from tests.support.live import Lane, LiveApi, ask

POLICY: dict[str, Any] = {"match": {"service": "made"}, "per": ["customer"], "rate": "6000/m", "capacity": "2s"}


@pytest.fixture
def name(client: httpx.Client, customer: str) -> str:
    return f"policy-{customer}"


def put(client: httpx.Client, name: str, document: Any = POLICY, **headers: str) -> httpx.Response:
    return client.put(
        f"/v1/policies/{name}", json=document, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def test_a_policy_reads_back_as_it_was_put(client: httpx.Client, name: str) -> None:
    created = put(client, name)
    assert (created.status_code, created.json()) == (201, {"name": name, **POLICY})
    read = client.get(f"/v1/policies/{name}")
    assert (read.json(), read.headers["etag"]) == (created.json(), created.headers["etag"])
    listed = client.get("/v1/policies").json()
    assert {"namespace": "default", **read.json()} in listed["policies"]
    assert f'"{listed["revisions"][f"default/{name}"]}"' == read.headers["etag"]
    assert listed["owners"][f"default/{name}"] == read.headers["headgate-owner"] == "api"
    assert put(client, name, POLICY | {"rate": 5}).status_code == 200
    assert client.delete(f"/v1/policies/{name}").status_code == 204
    assert client.get(f"/v1/policies/{name}").status_code == 404
    assert client.delete(f"/v1/policies/{name}").status_code == 404


def test_a_policy_is_in_force_in_every_node_within_a_second(both: dict[Lane, LiveApi], customer: str) -> None:
    """P6, W9"""
    with both["plain"].client() as here, both["fast"].client() as there:
        body = {"descriptor": {"live": customer}, "work": 0}
        policy = {"match": {"live": customer}, "rate": 1, "capacity": 10}
        put(here, f"live-{customer}", policy)
        eventually(lambda: there.post("/v1/acquire", json=body).json()["limits"], within_s=1, what="in force there")
        put(here, f"live-{customer}", policy | {"capacity": 20})
        eventually(
            lambda: there.post("/v1/acquire", json=body).json()["limits"][0]["capacity"] == 20,
            within_s=1,
            what="changed there",
        )
        here.delete(f"/v1/policies/live-{customer}")


def test_of_two_editors_the_slower_one_loses(client: httpx.Client, name: str) -> None:
    """F-P6"""
    tag = put(client, name).headers["etag"]
    won = put(client, name, POLICY | {"rate": 1}, If_Match=tag)
    assert won.status_code == 200
    lost = put(client, name, POLICY | {"rate": 2}, If_Match=tag)
    assert (lost.status_code, lost.json()["reason"]) == (412, "revision")
    assert client.get(f"/v1/policies/{name}").json()["rate"] == 1
    gone = client.delete(f"/v1/policies/{name}", headers={"If-Match": tag})
    assert gone.status_code == 412
    assert client.delete(f"/v1/policies/{name}", headers={"If-Match": won.headers["etag"]}).status_code == 204


@pytest.mark.parametrize(
    ("condition", "status"),
    [('"999999"', 412), ("*", 200), ('W/"{tag}"', 412), ('"1", "{tag}"', 200), ("nonsense", 400), ('"x"', 412)],
)
def test_conditions_are_honoured(client: httpx.Client, name: str, condition: str, status: int) -> None:
    tag = put(client, name).headers["etag"].strip('"')
    assert put(client, name, If_Match=condition.replace("{tag}", tag)).status_code == status
    client.delete(f"/v1/policies/{name}")


def test_a_policy_can_be_put_only_if_there_is_none(client: httpx.Client, name: str) -> None:
    assert put(client, name, If_None_Match="*").status_code == 201
    assert put(client, name, If_None_Match="*").status_code == 412
    assert put(client, f"{name}-other", If_Match="*").status_code == 412
    client.delete(f"/v1/policies/{name}")


@pytest.mark.parametrize(
    ("document", "detail"),
    [
        (POLICY | {"capacity": "5 parsecs"}, "capacity: found '5 parsecs'; allowed: "),
        (POLICY | {"rate": -1}, "rate: found -1; allowed: "),
        ({"match": {}}, "allowed: a rate, a quota, both, or deny: true"),
        (POLICY | {"colour": "red"}, "colour: no such field; allowed: "),
        (POLICY | {"name": "other"}, 'name: found "other"; allowed: '),
        ([], "allowed: "),
        (7, "allowed: "),
    ],
)
def test_a_bad_policy_is_refused_and_the_old_one_stays(
    client: httpx.Client, name: str, document: Any, detail: str
) -> None:
    """F-P2"""
    put(client, name)
    refused = put(client, name, document)
    assert (refused.status_code, detail in refused.json()["detail"]) == (422, True), refused.json()
    assert client.get(f"/v1/policies/{name}").json() == {"name": name, **POLICY}
    client.delete(f"/v1/policies/{name}")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"rate":NaN}', 422),
        (b'{"rate":1e400}', 422),
        (b'{"rate":1,"rate":2}', 422),
        (b'{"match":{"a":"\\ud800"},"rate":1}', 422),
        (b'{"rate":' + b"9" * 5000 + b"}", 422),
        (b'{"match":' * 10_000, 400),
    ],
)
def test_a_body_that_is_no_json_is_no_policy(client: httpx.Client, name: str, body: bytes, status: int) -> None:
    answer = client.put(f"/v1/policies/{name}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["status"] == status


@pytest.mark.parametrize("odd", ["%00", "%0d%0aX: y", "a b", "x" * 65, "%F0%9F%98%80", "{x}", ".."])
def test_odd_names_are_refused(client: httpx.Client, odd: str) -> None:
    """F-N1 to F-N4, F-H5"""
    assert client.get(f"/v1/policies/{odd}").status_code in (404, 200)
    answer = client.put(f"/v1/policies/{odd}", json=POLICY)
    assert answer.status_code in (404, 405, 422)
    assert "x" not in answer.headers


def test_history_and_rollback(client: httpx.Client, name: str) -> None:
    """P6"""
    first = int(put(client, name).headers["etag"].strip('"'))
    put(client, name, POLICY | {"rate": 1})
    back = client.post(f"/v1/policies/{name}/rollback", json={"revision": first})
    assert (back.status_code, back.json()) == (200, {"name": name, **POLICY})
    history = client.get(f"/v1/policies/{name}/history").json()["history"]
    assert [(entry["action"], entry["who"]) for entry in history] == [
        ("rollback", "anybody"), ("put", "anybody"), ("put", "anybody"),
    ]  # fmt: skip
    assert history[0]["before"]["rate"] == 1
    assert history[-1]["before"] is None
    assert history[0]["when"].startswith("20")
    assert client.post(f"/v1/policies/{name}/rollback", json={"revision": 10**9}).status_code == 404
    assert client.get("/v1/policies/never-was/history").status_code == 404
    nonsense: Any
    for nonsense in ({}, {"revision": 0}, {"revision": True}, {"revision": "1"}, [], {"revision": 1, "x": 2}):
        assert client.post(f"/v1/policies/{name}/rollback", json=nonsense).status_code == 422
    client.delete(f"/v1/policies/{name}")


def test_of_two_rollbacks_at_once_the_slower_one_loses(client: httpx.Client, name: str) -> None:
    """F-P6"""
    first = put(client, name).headers["etag"]
    second = put(client, name, POLICY | {"rate": 1}).headers["etag"]
    document = {"revision": int(first.strip('"'))}
    put(client, name, POLICY | {"rate": 2})
    lost = client.post(f"/v1/policies/{name}/rollback", json=document, headers={"If-Match": second})
    assert (lost.status_code, lost.json()["reason"]) == (412, "revision")
    assert client.get(f"/v1/policies/{name}").json()["rate"] == 2
    tag = client.get(f"/v1/policies/{name}").headers["etag"]
    won = client.post(f"/v1/policies/{name}/rollback", json=document, headers={"If-Match": tag})
    assert (won.status_code, won.json()) == (200, {"name": name, **POLICY})
    client.delete(f"/v1/policies/{name}")


def test_a_bad_policy_is_explained_field_by_field_and_on_one_line(client: httpx.Client, name: str) -> None:
    """F-P2"""
    refused = put(client, name, POLICY | {"rate": -1, "capacity": "5 parsecs", "colour": "red"}).json()
    assert refused["detail"].startswith(f"policy '{name}', rate: found -1; allowed: ")
    assert refused["detail"].endswith(" (and 2 more)")
    assert "\n" not in refused["detail"]
    rate, capacity, colour = refused["errors"]
    assert (rate["field"], rate["found"]) == ("rate", "-1")
    assert (capacity["field"], capacity["found"]) == ("capacity", "'5 parsecs'")
    assert (colour["field"], "capacity" in colour["allowed"]) == ("colour", True)


def test_the_audit_log_lists_every_change_page_by_page(client: httpx.Client, name: str) -> None:
    """P6"""
    for rate in range(1, 5):
        put(client, name, POLICY | {"rate": rate})
    client.delete(f"/v1/policies/{name}")
    found: list[dict[str, Any]] = []
    cursor = ""
    while len(found) < 5:
        page = client.get("/v1/audit", params={"limit": 2, "cursor": cursor}).json()
        found += [change for change in page["changes"] if change["name"] == name]
        cursor = page["cursor"]
        if not cursor:
            break
    assert [(change["kind"], change["action"], change["who"]) for change in found] == [
        ("policy", "delete", "anybody"), *[("policy", "put", "anybody")] * 4
    ]  # fmt: skip
    assert [change["before"] and change["before"]["rate"] for change in found] == [4, 3, 2, 1, None]
    assert found[0]["revision"] > found[-1]["revision"]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "cursor=!!", "cursor=1", "cursor=%ff"])
def test_a_bad_question_for_the_audit_log_is_named(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/v1/audit?{query}")
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")


def test_r17_overbooking_is_a_warning_over_rest(client: httpx.Client, name: str) -> None:
    backends = {"db": {"rate": 2000, "policies": [name, f"{name}-2"]}}
    match = {"nobody": name}
    policies = [{"name": name, "match": match, "rate": 1500}, {"name": f"{name}-2", "match": match, "rate": 600}]
    whole = {"namespaces": {"default": {"backends": backends}}, "policies": policies}
    checked = client.post("/v1/policies/check", json=whole)
    assert (checked.status_code, len(checked.json()["warnings"])) == (200, 1)
    assert f"commit 2100 or more ({name} 1500, {name}-2 600)" in checked.json()["warnings"][0]
    for policy in policies:
        client.put(f"/v1/policies/{policy['name']}", json=policy).raise_for_status()
    assert client.get("/v1/policies").json()["warnings"] == []
    client.put("/v1/namespaces/default", json={"backends": backends}).raise_for_status()
    try:
        assert client.get("/v1/policies").json()["warnings"] == checked.json()["warnings"]
        assert client.get("/v1/policies", params={"namespace": "other"}).json()["warnings"] == []
    finally:
        client.delete("/v1/namespaces/default")


def test_a_namespace_is_edited_like_a_policy(client: httpx.Client, name: str) -> None:
    """P6"""
    path, spread = f"/v1/namespaces/{name}", {"partitions": 4, "partition_by": ["customer"]}
    assert client.get(path).json()["reason"] == "no_such_namespace"
    made = client.put(path, json=spread, headers={"If-None-Match": "*"})
    assert (made.status_code, made.json()) == (201, spread)
    tag = made.headers["etag"]
    read = client.get(path)
    assert (read.json(), read.headers["etag"]) == (spread, tag)
    listed = client.get("/v1/namespaces").json()
    assert (listed["namespaces"][name], f'"{listed["revisions"][name]}"') == (spread, tag)
    assert client.get("/v1/policies").json()["namespaces"][name] == spread
    assert client.put(path, json={}, headers={"If-Match": tag}).json() == {"partitions": 1, "partition_by": []}
    lost = client.delete(path, headers={"If-Match": tag})
    assert (lost.status_code, lost.json()["detail"].startswith(f"namespace {name} is at revision ")) == (412, True)
    assert client.delete(path, headers={"If-Match": "*"}).status_code == 204
    assert client.delete(path).status_code == 404
    newest = client.get("/v1/audit", params={"limit": 1}).json()["changes"][0]
    assert (newest["kind"], newest["name"], newest["action"], newest["after"]) == ("namespace", name, "delete", None)


@pytest.mark.parametrize(
    ("name", "document", "field"),
    [
        ("wide", {"partitions": 0}, "partitions"),
        ("wide", {"partitions": 2}, "partition_by"),
        ("wide", {"colour": 1}, "colour"),
        ("wide", [], ""),
        ("no%20name", {}, "namespaces"),
    ],
)
def test_a_bad_namespace_is_refused(client: httpx.Client, name: str, document: Any, field: str) -> None:
    refused = client.put(f"/v1/namespaces/{name}", json=document)
    assert (refused.status_code, [error["field"] for error in refused.json()["errors"]]) == (422, [field])


def test_a_settle_is_honoured_after_its_policy_is_deleted(client: httpx.Client, name: str, customer: str) -> None:
    """F-P3"""
    put(client, name, {"match": {"gone": customer}, "rate": 1, "capacity": 10})
    body = {"descriptor": {"gone": customer}, "work": 5}
    granted = eventually(lambda: _covered(client, body), within_s=2, what="in force")
    assert granted is not None
    client.delete(f"/v1/policies/{name}")
    settled = client.post("/v1/settle", json={"reservation": granted["reservation"], "work": 7})
    assert (settled.status_code, settled.json()["adjusted"]) == (200, 2.0)


def _covered(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any] | None:
    answer: dict[str, Any] = client.post("/v1/acquire", json=body).json()
    return answer if answer["limits"] else None


def test_live_buckets_can_be_looked_at(client: httpx.Client, customer: str) -> None:
    for number in range(5):
        client.post("/v1/acquire", json=ask(f"{customer}.{number}", work=3))
    found: list[dict[str, Any]] = []
    cursor, pages = "", 0
    while cursor or not pages:
        query = {"policy": "slow", "contains": f"{customer}.", "limit": "2", "cursor": cursor}
        page = client.get("/v1/buckets", params=query).json()
        found += page["buckets"]
        cursor, pages = page["cursor"], pages + 1
    assert sorted({bucket["bucket"] for bucket in found}) == [f"slow:{customer}.{number}" for number in range(5)]
    assert found[0]["policy"] == "slow"
    assert found[0]["mechanism"] == "work"
    assert found[0]["balance"] == pytest.approx(7, abs=0.1)
    assert (found[0]["capacity"], found[0]["admitted"]) == (10.0, 1.0)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=1001", "partition=-1", "cursor=!!", "cursor=%ff"])
def test_a_bad_question_for_buckets_is_named(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/v1/buckets?{query}")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


def test_probes_tell_of_the_node(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    ready = client.get("/readyz").json()
    warnings = [warning for warning in ready["warnings"] if "no controller" not in warning]  # none runs here
    assert (ready["status"], warnings) == ("ready", [])
    load = client.get("/load").json()
    assert 0 <= load["load"] <= 1
    assert load["waiting"] >= 0


def test_paths_that_are_none_are_problems(client: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/acquire/", "/v1/policies/", "/favicon.ico", "//v1/acquire", "/v1/%61cquire/x"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["reason"] == "no_such_path"
