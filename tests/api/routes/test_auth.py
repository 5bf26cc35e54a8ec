"""The rights of each role (F-H3, F-H4), the same in both lanes; and the keys themselves."""

import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest

from api.data.auth import Doorkeeper, Unauthenticated
from limiter.api_keys import FORM, KeyEntry, KeyEntryError, Principal, new_key, read_keys
from limiter.settings import SettingsError
from tests.support.live import Lane, LiveApi, ask, live
from tests.support.servers import Server

KEYS = {
    name: new_key(name, role, namespace)
    for name, role, namespace in [
        ("shop", "caller", None),
        ("eyes", "viewer", None),
        ("boss", "admin", None),
        ("tenant", "caller", "tenant1"),
        ("tenant-boss", "admin", "tenant1"),
    ]
}
ENTRIES = ", ".join(entry for _, entry in KEYS.values())
CLASSES = "critical_plus, critical, sheddable_plus, sheddable"
EMPTY = "entry 1 (a): the hash is of an empty key, which would admit everybody"
BLANK = "is blank; entries are separated by one comma each, with none at the end"
LEASE = {"descriptor": {"service": "lent", "customer": "c"}, "holder": "7f3d1c0a95"}
POLICY = {"match": {"x": "y"}, "rate": 1}


@pytest.fixture(scope="module", params=["fast", "plain"])
def guarded(request: pytest.FixtureRequest, store: Server, policies: Path) -> Iterator[LiveApi]:
    lane: Lane = request.param
    with live(store.url, policies, lane=lane, api_keys=ENTRIES) as api:
        yield api


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name][0]}"}


def send(api: LiveApi, name: str, method: str, path: str, document: Any = None) -> int:
    with api.client(headers=headers(name)) as client:
        return client.request(method, path, json=document).status_code


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", "Basic BOSS", "BOSS", "Bearer \xe9", "Bearer BOSSx", "Bearer BOS"],
)
@pytest.mark.parametrize("path", ["/v1/acquire", "/v1/settle", "/v1/batch", "/v1/policies/x/rollback"])
def test_without_a_known_key_nothing_is_done(guarded: LiveApi, path: str, authorization: str | None) -> None:
    """F-H3"""
    key = KEYS["boss"][0]
    told = (authorization or "").replace("BOSS", key).replace("BOS", key[:-1]).encode("latin-1")
    sent = {} if authorization is None else {b"Authorization": told}
    with guarded.client() as client:
        answer = client.post(path, content=b"nonsense", headers=sent)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="headgate"'
    assert answer.json()["reason"] == "unauthenticated"


def test_a_known_key_opens(guarded: LiveApi, customer: str) -> None:
    assert send(guarded, "shop", "POST", "/v1/acquire", ask(customer)) == 200
    assert send(guarded, "boss", "POST", "/v1/acquire", ask(customer)) == 200
    with guarded.client(headers={"authorization": f"bearer  {KEYS['shop'][0]}"}) as client:
        assert client.post("/v1/acquire", json=ask(customer)).status_code == 200


def test_probes_and_documents_need_no_key(guarded: LiveApi) -> None:
    with guarded.client() as client:
        for path in ("/healthz", "/readyz", "/load", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("name", "method", "path", "document"),
    [
        ("eyes", "POST", "/v1/acquire", ask("c")),
        ("eyes", "POST", "/v1/batch", {"operations": []}),
        ("eyes", "PUT", "/v1/policies/x", POLICY),
        ("eyes", "DELETE", "/v1/policies/x", None),
        ("shop", "GET", "/v1/policies", None),
        ("shop", "GET", "/v1/buckets", None),
        ("shop", "GET", "/v1/controller", None),
        ("shop", "PUT", "/v1/policies/x", POLICY),
        ("tenant", "POST", "/v1/acquire", ask("c")),
        ("tenant-boss", "PUT", "/v1/policies/x", POLICY | {"namespace": "default"}),
        ("tenant-boss", "PUT", "/v1/policies/x?namespace=default", POLICY),
        ("tenant-boss", "PATCH", "/v1/policies/x?namespace=default", {}),
        ("tenant-boss", "GET", "/v1/policies?namespace=default", None),
        ("tenant-boss", "GET", "/v1/policies/reads?namespace=default", None),
        ("tenant-boss", "DELETE", "/v1/policies/reads?namespace=default", None),
        ("tenant-boss", "GET", "/v1/policies/reads/history?namespace=default", None),
        ("tenant-boss", "POST", "/v1/policies/reads/rollback?namespace=default", {"revision": 1}),
        ("tenant-boss", "POST", "/v1/policies/apply", {"policies": [POLICY | {"name": "x", "namespace": "default"}]}),
        ("tenant-boss", "POST", "/v1/policies/apply?namespace=default", {}),
        ("tenant-boss", "POST", "/v1/policies/apply", {"namespaces": {"default": {}}}),
        ("tenant-boss", "GET", "/v1/namespaces?namespace=default", None),
        ("tenant-boss", "GET", "/v1/audit?namespace=default", None),
        ("tenant-boss", "GET", "/v1/buckets?namespace=default", None),
        ("tenant-boss", "GET", "/v1/controller?namespace=default", None),
        ("eyes", "POST", "/v1/leases", LEASE),
        ("shop", "GET", "/v1/leases", None),
        ("shop", "DELETE", "/v1/leases/0-ab12", None),
        ("eyes", "DELETE", "/v1/leases/0-ab12", None),
        ("tenant", "POST", "/v1/leases", LEASE),
        ("tenant-boss", "GET", "/v1/leases?namespace=default", None),
        ("tenant-boss", "DELETE", "/v1/leases/0-ab12?namespace=default", None),
        ("shop", "POST", "/v1/policies/check", {}),
        ("eyes", "POST", "/v1/policies/apply", {}),
        ("eyes", "PATCH", "/v1/policies/x", {}),
    ],
)
def test_a_key_opens_no_more_than_its_role(
    guarded: LiveApi, name: str, method: str, path: str, document: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """F-H4"""
    logging.getLogger().addHandler(caplog.handler)
    assert send(guarded, name, method, path, document) == 403
    told = [record.getMessage() for record in caplog.records if record.name == "headgate.audit"]
    assert any(line.startswith(f"refused: key {name} (") for line in told), "it leaves a trace"


def test_viewers_view_and_admins_manage(guarded: LiveApi) -> None:
    assert send(guarded, "eyes", "GET", "/v1/policies") == 200
    assert send(guarded, "eyes", "GET", "/v1/buckets") == 200
    assert send(guarded, "eyes", "GET", "/v1/controller") == 200
    assert send(guarded, "boss", "PUT", "/v1/policies/made-by-boss", POLICY) in (200, 201)
    assert send(guarded, "boss", "DELETE", "/v1/policies/made-by-boss") == 204


def test_a_tenant_s_key_neither_renews_nor_sees_leases_of_another_namespace(guarded: LiveApi) -> None:
    """F-H4: who has the signed lease of another namespace has it for nothing."""
    with guarded.client(headers=headers("shop")) as client:
        lent = client.post("/v1/leases", json=LEASE | {"holder": token_hex(8)}).json()
    renewal = {"lease": lent["lease"], "number": 2, "taken": 1, "slices": []}
    assert send(guarded, "tenant", "POST", "/v1/leases/renew", renewal) == 404
    assert send(guarded, "tenant", "POST", "/v1/leases/return", renewal) == 404
    assert send(guarded, "shop", "POST", "/v1/leases/renew", renewal) == 200
    assert send(guarded, "tenant-boss", "DELETE", f"/v1/leases/{lent['id']}") == 404
    assert send(guarded, "boss", "DELETE", f"/v1/leases/{lent['id']}") == 200
    with guarded.client(headers=headers("tenant-boss")) as client:
        assert client.get("/v1/leases").json() == {"leases": []}


def test_a_tenant_s_key_reaches_its_namespace_only(guarded: LiveApi, customer: str) -> None:
    own = {"op": "acquire", **ask(customer), "namespace": "tenant1"}
    with guarded.client(headers=headers("tenant")) as client:
        results = client.post("/v1/batch", json={"operations": [own, own | {"namespace": "default"}]}).json()["results"]
        assert [result["status"] for result in results] == [200, 403]
        mine = client.post("/v1/settle", json={"reservation": results[0]["reservation"], "work": 1})
        assert mine.status_code == 200
        with guarded.client(headers=headers("shop")) as other:
            foreign = other.post("/v1/acquire", json=ask(customer)).json()["reservation"]
        assert client.post("/v1/settle", json={"reservation": foreign, "work": 1}).status_code == 404


def test_a_tenant_s_admin_sees_and_changes_its_own_policies(guarded: LiveApi) -> None:
    with guarded.client(headers=headers("tenant-boss")) as client:
        assert {policy["name"] for policy in client.get("/v1/policies").json()["policies"]} == {"tenant"}
        assert client.get("/v1/policies/reads").status_code == 404
        assert client.get("/v1/policies/reads/history").status_code == 404
        assert client.delete("/v1/policies/reads").status_code == 404
        answer = client.put("/v1/policies/tenant-own", json=POLICY | {"namespace": "tenant1"})
        assert answer.status_code in (200, 201)
        assert client.delete("/v1/policies/tenant-own").status_code == 204


def test_a_revoked_key_opens_nothing(store: Server, policies: Path, lane: Lane, customer: str) -> None:
    """F-H3"""
    with live(store.url, policies, lane=lane, api_keys=KEYS["boss"][1]) as api:
        assert send(api, "boss", "POST", "/v1/acquire", ask(customer)) == 200
        assert send(api, "shop", "POST", "/v1/acquire", ask(customer)) == 401


def test_others_are_not_let_in_without_keys(store: Server, policies: Path) -> None:
    with pytest.raises(SettingsError, match="which others can reach, and there are no API keys"):
        live(store.url, policies, host="0.0.0.0").__enter__()


def test_with_keys_others_are_let_in(store: Server, policies: Path) -> None:
    with live(store.url, policies, host="0.0.0.0", api_keys=ENTRIES) as api:
        assert httpx.get(f"http://127.0.0.1:{api.port}/healthz", trust_env=False).status_code == 200


def test_a_new_key_is_random_and_its_entry_does_not_hold_it() -> None:
    key, entry = new_key("shop", "caller", "tenant1")
    assert key != new_key("shop", "caller")[0]
    assert key.startswith("hg_")
    assert len(key) > 40
    assert key not in entry
    (read,) = read_keys(entry)
    assert (read.principal.name, read.principal.role, read.principal.namespace) == ("shop", "caller", "tenant1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shop", f"entry 1 does not have the form {FORM}"),
        ("a:caller:0:b:c:d", f"entry 1 does not have the form {FORM}"),
        (f"a:caller:{'0' * 64},a b:caller:00", "entry 2: the name must be 1 to 64 letters, digits, '.', '_' or '-'"),
        ("a:owner:00", "entry 1 (a): the role must be one of caller, viewer, admin"),
        ("a:caller:00", "entry 1 (a): the hash must be 64 hexadecimal digits, the SHA-256 of the key"),
        (f"a:caller:{'0' * 64}:x y", "entry 1 (a): the namespace must be a name"),
        (f"a:caller:{'0' * 64}:", "entry 1 (a): the namespace must be a name"),
        (f"a:caller:{'0' * 64}::vip", f"entry 1 (a): max_criticality must be one of {CLASSES}"),
        (f"a:viewer:{'0' * 64}::critical",
         "entry 1 (a): a viewer makes no requests, so max_criticality has no effect"),
        (f"a:caller:{'0' * 64},b:admin:{'0' * 64}", "'a' and 'b' have the same hash; each needs a key of its own"),
        (f"a:admin:{hashlib.sha256(b'').hexdigest()}", EMPTY),
        (f"a:admin:{hashlib.sha256(b' ').hexdigest()}", EMPTY),
        (f"a:admin:{hashlib.sha256(chr(10).encode()).hexdigest()}", EMPTY),
        (f"a:admin:{hashlib.sha256(b' ' + bytes([13, 10])).hexdigest()}", EMPTY),
        (" ", f"entry 1 {BLANK}"),
        (",", f"entry 1 {BLANK}"),
        (" , ", f"entry 1 {BLANK}"),
        ("\n", f"entry 1 {BLANK}"),
        (f"a:caller:{'0' * 64},", f"entry 2 {BLANK}"),
        (f"a:caller:{'0' * 64}, ,b:caller:{'1' * 64}", f"entry 2 {BLANK}"),
        (f"a:caller:{'0' * 64},a:admin:{'1' * 64}", "the name 'a' occurs twice; each key needs its own"),
    ],
)  # fmt: skip
def test_a_bad_entry_is_named(text: str, message: str) -> None:
    """F-H16: also a blank entry, the hash of an empty key, and one hash under two names. No message shows a hash."""
    with pytest.raises(KeyEntryError) as refused:
        read_keys(text)
    assert str(refused.value) == message
    assert not re.search("[0-9a-f]{32}", str(refused.value))


@pytest.mark.parametrize("authorization", [None, b"", b"Bearer", b"Bearer ", b"Bearer  \t", b"Basic x", b"bearer \n"])
def test_an_empty_key_never_matches_an_entry(authorization: bytes | None) -> None:
    """F-H16"""
    entry = KeyEntry(Principal("everybody", "admin"), hashlib.sha256(b"").digest())
    with pytest.raises(Unauthenticated):
        Doorkeeper([entry]).identify(authorization)


def test_a_highest_class_is_read_with_and_without_a_namespace() -> None:
    """Q12"""
    for namespace in (None, "tenant1"):
        _, entry = new_key("jobs", "caller", namespace, "sheddable_plus")
        (read,) = read_keys(entry)
        assert (read.principal.namespace, read.principal.max_criticality) == (namespace, "sheddable_plus")
    with pytest.raises(KeyEntryError):
        new_key("jobs", "caller", None, "vip")


def test_no_entries_are_no_keys() -> None:
    assert read_keys("") == []
