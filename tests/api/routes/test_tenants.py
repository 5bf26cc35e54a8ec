"""Tenants who manage their own namespaces, side by side: one's names neither block nor reveal another's (P12)."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.routes.policies.editing import OVERTAKEN_MAX
from limiter.api_keys import new_key
from limiter.model.policy.policy_log import Logged
from limiter.model.policy.reading import read_namespace, read_policy
from limiter.store import keys
from limiter.store.policies.policy_layout import pack_logged
from limiter.store.policies.policy_store import PolicyStore
from tests.support.live import Lane, LiveApi, live, without_id
from tests.support.servers import Server

KEYS = {
    name: new_key(name, "admin", namespace)
    for name, namespace in [("boss", None), ("one", "tenant-one"), ("two", "tenant-two")]
}
ENTRIES = ", ".join(entry for _, entry in KEYS.values())
POLICY: dict[str, Any] = {"match": {"x": "y"}, "rate": 1}
RACES = 150

_numbers = count(1)


@pytest.fixture(scope="module", params=["fast", "plain"])
def api(request: pytest.FixtureRequest, store: Server, policies: Path) -> Iterator[LiveApi]:
    lane: Lane = request.param
    with live(store.url, policies, lane=lane, api_keys=ENTRIES) as api:
        yield api


@pytest.fixture
def name() -> str:
    return f"shared-{next(_numbers)}"


def client(api: LiveApi, key: str) -> httpx.Client:
    return api.client(headers={"Authorization": f"Bearer {KEYS[key][0]}"})


@pytest.fixture
def one(api: LiveApi) -> Iterator[httpx.Client]:
    with client(api, "one") as found:
        yield found


@pytest.fixture
def two(api: LiveApi) -> Iterator[httpx.Client]:
    with client(api, "two") as found:
        yield found


@pytest.fixture
def boss(api: LiveApi) -> Iterator[httpx.Client]:
    with client(api, "boss") as found:
        yield found


def at_once(*calls: Callable[[], httpx.Response]) -> list[httpx.Response]:
    """The answers to calls that begin together."""
    gate = threading.Barrier(len(calls))

    def begin(call: Callable[[], httpx.Response]) -> httpx.Response:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(begin, calls))


def test_two_admins_who_put_one_name_at_once_do_not_overwrite_each_other(
    one: httpx.Client, two: httpx.Client, name: str
) -> None:
    """F-P12"""
    for number in range(RACES):
        path = f"/v1/policies/{name}-{number}"
        mine, theirs = at_once(
            lambda path=path: one.put(path, json=POLICY | {"rate": 1}),  # type: ignore[misc]
            lambda path=path: two.put(path, json=POLICY | {"rate": 2}),  # type: ignore[misc]
        )
        assert (mine.status_code, theirs.status_code) == (201, 201)
    for key, rate, namespace in ((one, 1, "tenant-one"), (two, 2, "tenant-two")):
        listed = key.get("/v1/policies").json()["policies"]
        ours = [policy for policy in listed if policy["name"].startswith(f"{name}-")]
        assert len(ours) == RACES
        assert {(policy["rate"], policy["namespace"]) for policy in ours} == {(rate, namespace)}


def test_many_puts_of_one_name_at_once_all_succeed_and_one_of_them_is_last(boss: httpx.Client, name: str) -> None:
    """F-P6: without a condition nobody loses; the log has every one of them, each on what was there before."""
    path, many = f"/v1/policies/{name}", 3 * (OVERTAKEN_MAX + 1)
    answers = at_once(*(lambda rate=rate: boss.put(path, json=POLICY | {"rate": rate}) for rate in range(1, many + 1)))
    assert {answer.status_code for answer in answers} == {200, 201}
    history = boss.get(f"{path}/history").json()["history"]
    assert sorted(entry["after"]["rate"] for entry in history) == list(range(1, many + 1))
    for newer, older in pairwise(history):
        assert newer["before"] == older["after"]
    assert boss.get(path).json()["rate"] == history[0]["after"]["rate"]


def test_a_patch_that_was_overtaken_keeps_what_the_other_changed(
    boss: httpx.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-P6"""
    path = f"/v1/policies/{name}"
    boss.put(path, json=POLICY)
    put, others = PolicyStore.put, iter([{"description": "by another"}])

    async def overtaken(store: PolicyStore, policy: Any, **options: Any) -> int:
        for other in others:
            await put(store, policy.model_copy(update={"rate": 1.0, **other}), who="another", expected=None)
        return await put(store, policy, **options)

    monkeypatch.setattr(PolicyStore, "put", overtaken)
    patched = boss.patch(path, json={"rate": 9})
    assert (patched.status_code, patched.json()["rate"], patched.json()["description"]) == (200, 9, "by another")


def test_a_patch_that_is_always_overtaken_is_a_412(
    boss: httpx.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rates = f"/v1/policies/{name}", count(2)
    boss.put(path, json=POLICY)
    put = PolicyStore.put

    async def overtaken(store: PolicyStore, policy: Any, **options: Any) -> int:
        await put(store, policy.model_copy(update={"rate": float(next(rates))}), who="another")
        return await put(store, policy, **options)

    monkeypatch.setattr(PolicyStore, "put", overtaken)
    assert boss.patch(path, json={"description": "mine"}).status_code == 412
    assert boss.put(path, json=POLICY | {"rate": 1000}).json()["rate"] == 1000, "a put says: whatever is there"


def test_a_bound_key_always_says_which_revision_it_replaces(
    one: httpx.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-P12: nothing that it was not shown, however often it is overtaken."""
    path, rates = f"/v1/policies/{name}", count(2)
    first = int(one.put(path, json=POLICY).headers["etag"].strip('"'))
    put, delete, rollback = PolicyStore.put, PolicyStore.delete, PolicyStore.rollback
    sent: list[int | None] = []

    async def overtake(store: PolicyStore) -> None:
        other = read_policy(POLICY | {"name": name, "namespace": "tenant-one", "rate": next(rates)})
        await put(store, other, who="another")

    async def overtaken_put(store: PolicyStore, policy: Any, **options: Any) -> int:
        await overtake(store)
        sent.append(options["expected"])
        return await put(store, policy, **options)

    async def overtaken_delete(store: PolicyStore, *where: str, **options: Any) -> int:
        await overtake(store)
        sent.append(options["expected"])
        return await delete(store, *where, **options)

    async def overtaken_rollback(store: PolicyStore, *where: Any, **options: Any) -> tuple[Any, int]:
        await overtake(store)
        sent.append(options["expected"])
        return await rollback(store, *where, **options)

    monkeypatch.setattr(PolicyStore, "put", overtaken_put)
    monkeypatch.setattr(PolicyStore, "delete", overtaken_delete)
    monkeypatch.setattr(PolicyStore, "rollback", overtaken_rollback)
    assert one.put(path, json=POLICY | {"rate": 1000}).status_code == 412
    assert one.delete(path).status_code == 412
    assert one.post(f"{path}/rollback", json={"revision": first}).status_code == 412
    assert (len(sent), None in sent) == (3 * (OVERTAKEN_MAX + 1), False)
    assert 1 < one.get(path).json()["rate"] < 1000


def test_a_bound_key_says_which_revision_of_its_namespace_it_replaces(
    one: httpx.Client, boss: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-P12"""
    path, partitions = "/v1/namespaces/tenant-one", count(2)
    one.put(path, json={"partitions": 1})
    put, delete = PolicyStore.put_namespace, PolicyStore.delete_namespace

    async def overtake(store: PolicyStore) -> None:
        other = read_namespace("tenant-one", {"partitions": next(partitions), "partition_by": ["x"]})
        await put(store, "tenant-one", other, who="another")

    async def overtaken_put(store: PolicyStore, *what: Any, **options: Any) -> int:
        await overtake(store)
        return await put(store, *what, **options)

    async def overtaken_delete(store: PolicyStore, *where: str, **options: Any) -> int:
        await overtake(store)
        return await delete(store, *where, **options)

    monkeypatch.setattr(PolicyStore, "put_namespace", overtaken_put)
    monkeypatch.setattr(PolicyStore, "delete_namespace", overtaken_delete)
    assert one.put(path, json={"partitions": 1}).status_code == 412
    assert one.delete(path).status_code == 412
    assert one.get(path).json()["partitions"] > 1
    assert boss.delete(path).status_code == 204, "who is bound to none says: whatever is there"
    monkeypatch.undo()
    one.delete(path)


def test_what_went_between_two_tenants_is_shown_to_neither(
    one: httpx.Client, two: httpx.Client, boss: httpx.Client, store: Server, name: str
) -> None:
    """P12: an older version let a policy change its namespace; before and after are of different tenants."""
    before, after = (json.dumps(POLICY | {"name": name, "namespace": f"tenant-{which}"}) for which in ("one", "two"))
    revision = boss.get("/v1/policies").json()["revision"]
    logged = pack_logged(Logged(revision, 1, "put", "boss", f"p:{name}", before.encode(), after.encode(), ""))
    store.client().lpush(keys.policy_history(f"p:{name}"), logged)
    store.client().lpush(keys.POLICIES_AUDIT, logged)
    for tenant, own in ((one, "tenant-one"), (two, "tenant-two")):
        tenant.put(f"/v1/policies/{name}", json=POLICY)
        (shown,) = tenant.get(f"/v1/policies/{name}/history").json()["history"]
        assert shown["after"]["namespace"] == own, "only what was put just now"
        changes = tenant.get("/v1/audit?limit=1000").json()["changes"]
        assert {change["namespace"] for change in changes if change["name"] == name} == {own}
    assert any(change["namespace"] is None for change in boss.get("/v1/audit?limit=1000").json()["changes"])


def test_one_tenant_s_names_are_invisible_to_another(
    one: httpx.Client, two: httpx.Client, boss: httpx.Client, name: str
) -> None:
    """P12: the same answers whether or not another tenant has the name."""
    for path in (f"/v1/policies/{name}", f"/v1/policies/{name}/history"):
        before = two.get(path)
        one.put(f"/v1/policies/{name}", json=POLICY)
        after = two.get(path)
        assert (before.status_code, without_id(before.json())) == (after.status_code, without_id(after.json()))
        assert after.status_code == 404
    for answer in (
        two.delete(f"/v1/policies/{name}"),
        two.patch(f"/v1/policies/{name}", json={"rate": 5}),
        two.post(f"/v1/policies/{name}/rollback", json={"revision": 1}),
    ):
        assert (answer.status_code, answer.json()["reason"]) == (404, "no_such_policy")
    assert two.put(f"/v1/policies/{name}", json=POLICY, headers={"If-None-Match": "*"}).status_code == 201
    everything = "".join(two.get(path).text for path in ("/v1/policies", "/v1/audit?limit=1000", "/v1/namespaces"))
    assert "tenant-one" not in everything
    assert f"tenant-two/{name}" in everything
    assert {
        (change["namespace"], change["name"]) for change in boss.get("/v1/audit", params={"limit": 2}).json()["changes"]
    } == {("tenant-one", name), ("tenant-two", name)}
    only = boss.get("/v1/audit", params={"limit": 1000, "namespace": "tenant-one"}).json()["changes"]
    assert {change["namespace"] for change in only if change["name"] == name} == {"tenant-one"}


def test_a_policy_of_a_tenant_limits_that_tenant_alone(one: httpx.Client, two: httpx.Client, name: str) -> None:
    policy = {"match": {"only": name}, "rate": "1/d", "capacity": 1, "overload": {"utilisation": {}}}
    one.put(f"/v1/policies/{name}", json=policy)
    two.put(f"/v1/policies/{name}", json=policy | {"capacity": 5})
    capacities: dict[str, float] = {}
    for key, namespace in ((one, "tenant-one"), (two, "tenant-two")):
        ask = {"namespace": namespace, "descriptor": {"only": name}}
        while namespace not in capacities:
            for limit in key.post("/v1/acquire", json=ask).json()["limits"]:
                if limit["policy"] == name:
                    capacities[namespace] = limit["capacity"]
        (bucket,) = key.get("/v1/buckets", params={"policy": name}).json()["buckets"]
        assert (bucket["namespace"], bucket["policy"], bucket["bucket"]) == (namespace, name, name)
        report = {"namespace": namespace, "policy": name, "source": "h", "signals": {"cpu": 0.1}}
        assert key.post("/v1/signals", json=report).status_code == 202
    assert capacities == {"tenant-one": 1.0, "tenant-two": 5.0}
    one.delete(f"/v1/policies/{name}")
    assert two.get(f"/v1/policies/{name}").status_code == 200


def test_the_namespace_is_the_query_s_or_the_body_s_or_the_key_s(
    one: httpx.Client, boss: httpx.Client, name: str
) -> None:
    path = f"/v1/policies/{name}"
    assert one.put(path, json=POLICY).json()["namespace"] == "tenant-one"
    assert "namespace" not in boss.put(path, json=POLICY).json(), "default, as it was put"
    assert boss.put(path, json=POLICY | {"namespace": "tenant-two"}).json()["namespace"] == "tenant-two"
    assert boss.put(f"{path}?namespace=tenant-3", json=POLICY).json()["namespace"] == "tenant-3"
    differ = boss.put(f"{path}?namespace=tenant-3", json=POLICY | {"namespace": "tenant-two"})
    (problem,) = differ.json()["errors"]
    assert (differ.status_code, problem["field"], problem["found"]) == (422, "namespace", '"tenant-two"')
    seen = {ns: boss.get(path, params={"namespace": ns}).status_code for ns in ("tenant-one", "tenant-3", "tenant-4")}
    assert seen == {"tenant-one": 200, "tenant-3": 200, "tenant-4": 404}
    assert boss.delete(f"{path}?namespace=tenant-3").status_code == 204
    assert boss.get(path).status_code == 200


@pytest.mark.parametrize(
    "query", ["namespace=", "namespace=a%20b", "namespace=a&namespace=b", "namespace=%00", "namespace=a/b"]
)
def test_a_bad_namespace_in_a_query_is_named(boss: httpx.Client, query: str) -> None:
    for method, path in (("GET", "/v1/policies"), ("GET", "/v1/policies/x"), ("DELETE", "/v1/policies/x")):
        answer = boss.request(method, f"{path}?{query}")
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "namespace")


# PATCH


def test_a_patch_replaces_what_it_names_and_keeps_the_rest(boss: httpx.Client, name: str) -> None:
    """P12, RFC 7396"""
    path = f"/v1/policies/{name}"
    whole = {"match": {"a": "b", "ip": None}, "weights": {"operation": {"read": 1, "write": 3}}, "rate": 1}
    boss.put(path, json=whole)
    change = {"rate": "60/m", "weights": {"operation": {"read": None, "list": 2}}, "match": {"c": "d"}}
    patched = boss.patch(path, json=change, headers={"Content-Type": "application/merge-patch+json"})
    expected = {
        "name": name, "match": {"a": "b", "ip": None, "c": "d"}, "rate": "60/m",
        "weights": {"operation": {"write": 3, "list": 2}},
    }  # fmt: skip
    assert (patched.status_code, patched.json()) == (200, expected)
    read = boss.get(path)
    assert (read.json(), read.headers["etag"]) == (expected, patched.headers["etag"])
    assert boss.get(f"{path}/history").json()["history"][0]["action"] == "patch"


@pytest.mark.parametrize(
    ("patch", "status", "field"),
    [
        ({"rate": -1}, 422, "rate"),
        ({"rate": None}, 422, "rate"),
        ({"colour": "red"}, 422, "colour"),
        ({"name": "other"}, 422, "name"),
        ({"namespace": "other"}, 404, None),
        ({"namespace": 7}, 422, "namespace"),
        ([], 422, ""),
        ("text", 422, ""),
        (None, 422, ""),
    ],
)
def test_a_bad_patch_is_refused_and_the_policy_stays(
    boss: httpx.Client, name: str, patch: Any, status: int, field: str | None
) -> None:
    """F-P2"""
    path = f"/v1/policies/{name}"
    boss.put(path, json=POLICY)
    refused = boss.patch(path, json=patch) if patch is not None else boss.patch(path, content=b"null", headers=JSON)
    assert refused.status_code == status
    if field is not None:
        assert refused.json()["errors"][0]["field"] == field
    assert boss.get(path).json() == {"name": name, **POLICY}


JSON = {"Content-Type": "application/json"}


def test_a_patch_heeds_conditions(boss: httpx.Client, name: str) -> None:
    """F-P6"""
    path = f"/v1/policies/{name}"
    tag = boss.put(path, json=POLICY).headers["etag"]
    assert boss.patch(path, json={"rate": 2}, headers={"If-Match": tag}).status_code == 200
    assert boss.patch(path, json={"rate": 3}, headers={"If-Match": tag}).status_code == 412
    assert boss.get(path).json()["rate"] == 2


# Whole sets


def applied(answer: httpx.Response) -> dict[str, list[str]]:
    assert answer.status_code == 200, answer.text
    rows = answer.json()
    return {
        kind: sorted(f"{row['namespace']}/{row['name']}" for row in rows[kind])
        for kind in ("made", "changed", "removed", "kept")
        if rows[kind]
    }


def test_a_set_is_applied_whole_for_its_owner(boss: httpx.Client, name: str) -> None:
    """P12"""
    owner, a, b = f"ci-{name}", f"{name}-a", f"{name}-b"
    both = {"policies": [POLICY | {"name": a}, POLICY | {"name": b, "namespace": "tenant-3"}], "owner": owner}
    assert applied(boss.post("/v1/policies/apply", json=both | {"dry_run": True})) == {
        "made": [f"default/{a}", f"tenant-3/{b}"]
    }
    assert boss.get(f"/v1/policies/{a}").status_code == 404, "a dry run"
    assert applied(boss.post("/v1/policies/apply", json=both)) == {"made": [f"default/{a}", f"tenant-3/{b}"]}
    assert applied(boss.post("/v1/policies/apply", json=both)) == {}
    assert boss.get(f"/v1/policies/{a}").headers["headgate-owner"] == owner
    boss.patch(f"/v1/policies/{a}", json={"rate": 7})
    less = {"policies": [POLICY | {"name": a}], "owner": owner, "prune": True}
    refused = boss.post("/v1/policies/apply", json=less)
    assert (refused.status_code, refused.json()["reason"]) == (409, "owned_by_others")
    assert f"policy default/{a} differs from the store, where it was changed over the API" in refused.json()["detail"]
    assert boss.get(f"/v1/policies/{b}?namespace=tenant-3").status_code == 200, "nothing was applied"
    seen = applied(boss.post("/v1/policies/apply", json=less | {"dry_run": True}))
    assert seen == {"removed": [f"tenant-3/{b}"], "kept": [f"default/{a}"]}
    taken = applied(boss.post("/v1/policies/apply", json=less | {"take_over": True}))
    assert taken == {"changed": [f"default/{a}"], "removed": [f"tenant-3/{b}"]}
    assert boss.get(f"/v1/policies/{a}").json()["rate"] == 1


def test_a_bad_set_changes_nothing(boss: httpx.Client, name: str) -> None:
    """F-P2"""
    bad = {"policies": [POLICY | {"name": f"{name}-good"}, POLICY | {"name": f"{name}-bad", "rate": "often"}]}
    for path in ("/v1/policies/check", "/v1/policies/apply"):
        refused = boss.post(path, json=bad)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "rate")
        assert f"policy '{name}-bad'" in refused.json()["detail"]
    assert boss.get(f"/v1/policies/{name}-good").status_code == 404
    twice = {"policies": [POLICY | {"name": name}, POLICY | {"name": name}]}
    assert boss.post("/v1/policies/check", json=twice).status_code == 422
    apart = {"policies": [POLICY | {"name": name}, POLICY | {"name": name, "namespace": "tenant-3"}]}
    assert boss.post("/v1/policies/check", json=apart).json() == {"ok": True, "warnings": []}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"owner": ""}, "owner"), ({"owner": 7}, "owner"), ({"owner": "a b"}, "owner"), ({"prune": "yes"}, "prune"),
        ({"take_over": 1}, "take_over"), ({"dry_run": None}, "dry_run"), ({"colour": 1}, "colour"),
        ({"policies": {}}, "policies"), ([], ""), (7, ""),
    ],
)  # fmt: skip
def test_a_body_that_is_no_set_is_refused_by_field(boss: httpx.Client, body: Any, field: str) -> None:
    for path in ("/v1/policies/check", "/v1/policies/apply"):
        refused = boss.post(path, json=body)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, field)


def test_a_tenant_s_set_stays_in_its_namespace(
    one: httpx.Client, two: httpx.Client, boss: httpx.Client, name: str
) -> None:
    """F-P12"""
    owner = f"ci-{name}"
    for key in (one, two, boss):
        assert key.post("/v1/policies/apply", json={"policies": [POLICY | {"name": name}], "owner": owner}).is_success
    assert applied(one.post("/v1/policies/apply", json={"policies": [], "owner": owner, "prune": True})) == {
        "removed": [f"tenant-one/{name}"]
    }
    assert two.get(f"/v1/policies/{name}").status_code == 200
    confined = {"policies": [POLICY | {"name": name, "namespace": "tenant-two"}]}
    refused = boss.post("/v1/policies/apply?namespace=default", json=confined)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "namespace")
    assert applied(boss.post("/v1/policies/apply", json={"owner": owner, "prune": True})) == {
        "removed": [f"default/{name}", f"tenant-two/{name}"]
    }


def test_defaults_hold_in_a_set_and_lead_no_tenant_astray(one: httpx.Client, boss: httpx.Client, name: str) -> None:
    """P12, F-P12"""
    rows = {"defaults": {"rate": 5, "match": {"x": name}, "namespace": "tenant-two"}, "policies": [{"name": name}]}
    assert one.post("/v1/policies/apply", json=rows).status_code == 403
    assert applied(boss.post("/v1/policies/apply", json=rows)) == {"made": [f"tenant-two/{name}"]}
    own = {"defaults": {"rate": 5, "match": {"x": name}}, "policies": [{"name": name}]}
    assert applied(one.post("/v1/policies/apply", json=own)) == {"made": [f"tenant-one/{name}"]}
    assert one.get(f"/v1/policies/{name}").json() == {
        "name": name, "namespace": "tenant-one", "match": {"x": name}, "rate": 5
    }  # fmt: skip


def test_sets_and_single_edits_at_once_lose_nothing(boss: httpx.Client, name: str) -> None:
    """F-P6"""
    rows = [POLICY | {"name": f"{name}-{number}"} for number in range(20)]
    answers = at_once(
        *(lambda n=n: boss.post("/v1/policies/apply", json={"policies": rows, "owner": f"o-{name}"}) for n in range(3)),
        *(lambda n=n: boss.put(f"/v1/policies/{name}-put-{n}", json=POLICY) for n in range(8)),
    )
    assert {answer.status_code for answer in answers} <= {200, 201}
    listed = boss.get("/v1/policies").json()["revisions"]
    assert sum(key.startswith(f"default/{name}-") for key in listed) == 28
