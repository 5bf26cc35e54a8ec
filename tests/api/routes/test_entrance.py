"""Checks that come before the rest of a request is read: a key (F-H3), no other site, JSON (F-H15); in both lanes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.data import decode
from limiter.api_keys import new_key
from tests.support.lanes import CUSTOMER, send_to_both
from tests.support.live import Lane, LiveApi, Reply, Wire, ask, exchange, live, request, statuses
from tests.support.servers import Server

KEY, ENTRY = new_key("boss", "admin")
CALLER, CALLER_ENTRY = new_key("shop", "caller")
BOSS = ("Authorization", f"Bearer {KEY}")
SHOP = ("Authorization", f"Bearer {CALLER}")
CROSS = ("Sec-Fetch-Site", "cross-site")
WRITES = [
    ("POST", "/v1/acquire"),
    ("POST", "/v1/settle"),
    ("POST", "/v1/batch"),
    ("POST", "/v1/signals"),
    ("PUT", "/v1/policies/gate"),
    ("PATCH", "/v1/policies/gate"),
    ("DELETE", "/v1/policies/gate"),
    ("POST", "/v1/policies/apply"),
    ("POST", "/v1/policies/check"),
    ("POST", "/v1/policies/gate/rollback"),
    ("PUT", "/v1/namespaces/gate"),
    ("DELETE", "/v1/namespaces/gate"),
]
VIEWER, VIEWER_ENTRY = new_key("eyes", "viewer")
EYES = ("Authorization", f"Bearer {VIEWER}")
READS = ["/v1/buckets?limit=x", "/v1/controller?partition=-1", "/v1/audit?limit=x", "/v1/policies", "/v1/namespaces"]


@pytest.fixture(scope="module", params=["fast", "plain"])
def guarded(request: pytest.FixtureRequest, store: Server, policies: Path) -> Iterator[LiveApi]:
    lane: Lane = request.param
    with live(
        store.url, policies, lane=lane, api_keys=f"{ENTRY},{CALLER_ENTRY},{VIEWER_ENTRY}", body_timeout_s=1.0
    ) as api:
        yield api


def ask_once(api: LiveApi, raw: bytes) -> Reply:
    return exchange(api, raw)[0]


BODIES = [b"{", b"[1]", b'{"work":-1}', b"x" * 100_000, b"\xff", b""]


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_a_key_is_asked_for_before_the_body_is_looked_at(guarded: LiveApi, method: str, path: str) -> None:
    """422 never comes before 401, and neither do 400, 403, 413 and 415"""
    for body in BODIES:
        for headers in ([], [CROSS], [("Content-Type", "text/plain")], [("Content-Encoding", "gzip")]):
            assert ask_once(guarded, request(path, body, method=method, headers=headers)).status == 401
    assert ask_once(guarded, request(path, b"x" * 1_048_577, method=method)).status == 401
    twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    assert ask_once(guarded, request(path, b"{", method=method, headers=twice)).status == 401


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_a_body_is_not_waited_for_without_a_key(guarded: LiveApi, method: str, path: str) -> None:
    """F-H12: each connection of anybody's would keep a megabyte for as long as a body may take to come."""
    raw = request(path, b"{" + b" " * 200_000, method=method)
    for sent in (raw[:-1], raw[: len(raw) // 2], raw[: raw.index(b"\r\n\r\n") + 5]):
        with Wire(guarded) as wire:
            wire.send(sent)
            assert statuses(wire.receive()) == [401]


@pytest.mark.parametrize("path", ["/v1/acquire", "/v1/settle", "/v1/batch"])
def test_a_body_is_not_waited_for_that_is_no_json(api: LiveApi, path: str) -> None:
    """F-H12, F-H15"""
    with Wire(api) as wire:
        wire.send(request(path, b"{}", headers=[("Content-Type", "text/plain")])[:-1])
        assert statuses(wire.receive()) == [415]


def test_a_body_is_waited_for_with_a_key(guarded: LiveApi) -> None:
    """Also if its head is one that was read before."""
    raw = request(body=ask("patient", work=0), headers=[SHOP])
    with Wire(guarded) as wire:
        for _ in range(3):
            wire.send(raw[:-5], raw[-5:])
            assert statuses(wire.receive()) == [200]


@pytest.mark.parametrize("path", READS)
def test_a_key_and_its_right_are_asked_for_before_parameters_are_looked_at(guarded: LiveApi, path: str) -> None:
    """422 never comes before 401, and never before 403"""
    assert ask_once(guarded, request(path, method="GET")).status == 401
    assert ask_once(guarded, request(path, method="GET", headers=[SHOP])).status == 403
    assert ask_once(guarded, request(path, method="GET", headers=[BOSS])).status in (200, 422)


def test_a_right_is_asked_for_before_the_body_is_looked_at(guarded: LiveApi) -> None:
    """F-H4"""
    for method, path in WRITES[WRITES.index(("PUT", "/v1/policies/gate")) :]:
        assert ask_once(guarded, request(path, b"{", method=method, headers=[SHOP])).status == 403


def test_a_viewer_may_ask_whether_a_set_is_valid(guarded: LiveApi) -> None:
    for path, status in (("/v1/policies/check", 200), ("/v1/policies/apply", 403)):
        assert ask_once(guarded, request(path, {"policies": []}, headers=[EYES])).status == status


def test_a_merge_patch_has_a_type_of_its_own(guarded: LiveApi) -> None:
    for kind, status in (("application/merge-patch+json", 404), ("application/json", 404), ("text/plain", 415)):
        raw = request("/v1/policies/none", {}, method="PATCH", headers=[BOSS, ("Content-Type", kind)])
        assert ask_once(guarded, raw).status == status
    put = request(
        "/v1/policies/none", {}, method="PUT", headers=[BOSS, ("Content-Type", "application/merge-patch+json")]
    )
    assert ask_once(guarded, put).status == 415


def test_every_route_but_the_open_ones_asks_for_a_key_first(guarded: LiveApi) -> None:
    """The routes come from the application, so that a new one is tested without being listed here."""
    with guarded.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
        told = {
            (method.upper(), path): client.request(method, path.replace("{name}", "%20"), params={"limit": "x"})
            for path, methods in paths.items()
            for method in methods
        }
    answers = {route: answer.status_code for route, answer in told.items()}
    assert set(WRITES) <= {(method, path.replace("{name}", "gate")) for method, path in answers}
    for method, path in (("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/load")):
        assert answers.pop((method, path)) == 200
    assert set(answers.values()) == {401}, answers


@pytest.mark.parametrize(("method", "path"), WRITES)
@pytest.mark.parametrize("site", ["cross-site", "Cross-Site", " cross-site "])
def test_a_page_of_another_site_changes_nothing(api: LiveApi, method: str, path: str, site: str) -> None:
    """F-H15: where no keys are set"""
    reply = ask_once(api, request(path, b"{}", method=method, headers=[("Sec-Fetch-Site", site)]))
    assert (reply.status, reply.json["reason"]) == (403, "cross_site")
    assert reply.header("content-type") == "application/problem+json"


def test_a_page_of_another_site_changes_nothing_with_a_key_either(guarded: LiveApi) -> None:
    """F-H15"""
    for method, path in WRITES:
        reply = ask_once(guarded, request(path, b"{}", method=method, headers=[BOSS, CROSS]))
        assert (reply.status, reply.json["reason"]) == (403, "cross_site")


def test_a_known_head_of_another_site_is_still_refused(api: LiveApi, customer: str) -> None:
    """F-H15: the fast lane remembers heads."""
    body = ask(customer, work=0)
    for headers, status in [((), 200), ((CROSS,), 403)] * 3:
        assert ask_once(api, request(body=body, headers=headers)).status == status


@pytest.mark.parametrize("site", ["same-origin", "same-site", "none", ""])
def test_pages_of_this_origin_and_programs_are_served(api: LiveApi, customer: str, site: str) -> None:
    """F-H15: the page at /docs, a browser's address bar"""
    reply = ask_once(api, request(body=ask(customer), headers=[("Sec-Fetch-Site", site)]))
    assert reply.status == 200


def test_another_site_may_link_here(api: LiveApi) -> None:
    assert ask_once(api, request("/v1/policies", method="GET", headers=[CROSS])).status == 200


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_a_body_without_a_type_is_refused(api: LiveApi, method: str, path: str) -> None:
    """F-H15: a form in a page of another site can send such a body without asking first."""
    reply = ask_once(api, request(path, b"{}", method=method, typed=False))
    assert (reply.status, reply.json["reason"]) == (415, "content_type")
    assert reply.json["detail"].startswith("Content-Type: found none; allowed: application/json")
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert ask_once(api, head + b"2\r\n{}\r\n0\r\n\r\n").status == 415


@pytest.mark.parametrize("path", [path for method, path in WRITES if method == "POST"])
def test_a_post_without_a_body_needs_a_type_too(api: LiveApi, path: str) -> None:
    """F-H15"""
    assert ask_once(api, request(path, typed=False)).status == 415


def test_a_removal_without_a_body_needs_no_type(client: httpx.Client) -> None:
    for path in ("/v1/policies/none", "/v1/namespaces/none"):
        assert client.delete(path).status_code == 404


HAND_MADE = [
    request(body=ask(CUSTOMER.decode()), typed=False),
    request(body=b"", typed=False),
    request(body=ask(CUSTOMER.decode()), headers=[CROSS]),
    request(body=ask(CUSTOMER.decode()), headers=[CROSS], typed=False),
    request(body=ask(CUSTOMER.decode()), headers=[("Sec-Fetch-Site", "same-origin"), CROSS]),
    request(body=ask(CUSTOMER.decode()), headers=[("Idempotency-Key", "é")]),
    request(body=ask(CUSTOMER.decode()), headers=[("Idempotency-Key", "a b")]),
    request("/v1/acquire?" + "a&" * 200, ask(CUSTOMER.decode())),
]


@pytest.mark.parametrize("raw", HAND_MADE, ids=range(len(HAND_MADE)))
def test_both_lanes_agree_on_it(both: dict[Lane, LiveApi], raw: bytes) -> None:
    send_to_both(both, raw)


# Idempotency keys

ODD_KEYS = ["é", "k\u00e9y", "Ã©", "日本", "a b", " a", "a\tb", "\x7f", "a\u00a0", "a\n"]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_an_idempotency_key_that_could_be_read_in_two_ways_is_refused(
    api: LiveApi, client: httpx.Client, customer: str, key: str
) -> None:
    """Its bytes are different text in UTF-8 and in Latin-1: in a header and in a batch it would be two keys."""
    operation = {"op": "acquire", **ask(customer), "idempotency_key": key}
    (result,) = client.post("/v1/batch", json={"operations": [operation]}).json()["results"]
    assert (result["status"], result["errors"][0]["field"]) == (422, "idempotency_key")
    assert result["errors"][0]["allowed"].startswith("1 to 255 visible ASCII characters")
    if key.strip() != key:
        return  # a header has no space at its ends
    for encoded in {key.encode(), key.encode("latin-1", "replace").replace(b"?", b"\xff")}:
        raw = request(body=ask(customer), headers=[("Idempotency-Key", "KEY")]).replace(b"KEY", encoded)
        reply = ask_once(api, raw)
        if encoded == b"\x7f":
            assert reply.status in (400, 422)  # it is no HTTP
            continue
        assert (reply.status, reply.json["errors"][0]["field"]) == (422, "Idempotency-Key")


@pytest.mark.parametrize("key", ["order-17", '"quoted"', "!~", "k" * 255, "a:b/c=d,e;f"])
def test_the_same_key_in_a_header_and_in_a_batch_is_the_same_key(client: httpx.Client, customer: str, key: str) -> None:
    key = customer + key[len(customer) :] if len(key) > 200 else customer + key
    alone = client.post("/v1/acquire", json=ask(customer, work=1), headers={"Idempotency-Key": key})
    operation = {"op": "acquire", **ask(customer, work=1), "idempotency_key": key}
    (result,) = client.post("/v1/batch", json={"operations": [operation]}).json()["results"]
    assert result["reservation"] == alone.json()["reservation"]


@pytest.mark.parametrize("key", ["", "k" * 256, *ODD_KEYS, "order-17", "~"])
def test_a_header_takes_the_keys_that_a_batch_takes(key: str) -> None:
    def taken(read: Any) -> bool:
        try:
            return not isinstance(read(), list) or isinstance(read()[0], decode.AcquireOperation)
        except decode.BadRequest:
            return False

    operation = {"op": "acquire", "descriptor": {"a": "b"}, "idempotency_key": key}
    body = json.dumps({"operations": [operation]}).encode()
    in_header = taken(lambda: decode.idempotency_key(key.encode()))
    assert in_header == taken(lambda: decode.batch(body)) or key.strip() != key


def test_a_long_query_is_refused(api: LiveApi) -> None:
    """F-H10: each parameter costs the same, however short it is."""
    few, many = "&".join(["a"] * 100), "&".join(["a"] * 101)
    assert ask_once(api, request(f"/healthz?{few}", method="GET")).status == 200
    reply = ask_once(api, request(f"/healthz?{many}", method="GET"))
    assert (reply.status, reply.json["reason"]) == (431, "head_too_long")
