"""Leases over HTTP, in both lanes: numbered, signed, safe to repeat, and refused by name where a policy lends nothing
(B8, P9)."""

from typing import Any
from uuid import uuid4

import httpx
import pytest

from limiter.client.lease.holder import Grant, Lease
from tests.support import eventually


def first(client: httpx.Client, customer: str, **fields: Any) -> httpx.Response:
    """Ask for a lease."""
    body = {"descriptor": {"service": "lent", "customer": customer}, "holder": uuid4().hex} | fields
    return client.post("/v1/leases", json=body)


def renewal(answer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    held = [{"policy": one["policy"], "held": one["share"]} for one in answer["slices"]]
    number = answer["number"]
    return {"lease": answer["lease"], "number": number + 1, "taken": number, "slices": held} | fields


def balance_of(client: httpx.Client, customer: str) -> float:
    """What the bucket itself has left."""
    found = client.post("/v1/acquire", json={"descriptor": {"service": "lent", "customer": customer}, "dry_run": True})
    return float(found.json()["limits"][0]["balance"])


def test_a_holder_is_lent_a_part_of_the_limit(client: httpx.Client, customer: str) -> None:
    answer = first(client, customer, work_rate=10)
    assert answer.status_code == 200, answer.text
    lent = answer.json()
    assert (lent["number"], lent["expires_in_ms"], lent["renew_in_ms"]) == (1, 3000, 1000)
    (one,) = lent["slices"]
    assert (one["policy"], one["mechanism"], one["counts_requests"]) == ("lent", "work", False)
    assert 0.1 <= one["share"] < 1
    assert one["rate"] == pytest.approx(100 * one["share"])
    assert 0 < one["tokens"] <= one["capacity"] <= 96
    assert one["minimums"]["critical"] == 1.0
    assert "overload" not in lent
    assert balance_of(client, customer) == pytest.approx(100 - one["tokens"], abs=1.0)


def test_f_l3_the_same_request_again_is_answered_the_same(client: httpx.Client, customer: str) -> None:
    holder = uuid4().hex
    one, again = (first(client, customer, holder=holder).json() for _ in range(2))
    assert one["slices"] == again["slices"]
    second, repeated = (client.post("/v1/leases/renew", json=renewal(one)).json() for _ in range(2))
    assert second["slices"] == repeated["slices"]
    assert second["number"] == 2


def test_f_l3_an_older_number_changes_nothing(client: httpx.Client, customer: str) -> None:
    holder = uuid4().hex
    one = first(client, customer, holder=holder).json()
    assert client.post("/v1/leases/renew", json=renewal(one, number=5)).status_code == 200
    answer = client.post("/v1/leases/renew", json=renewal(one, number=4))
    assert (answer.status_code, answer.json()["reason"]) == (409, "lease_outdated")
    answer = first(client, customer, holder=holder)
    assert (answer.status_code, answer.json()["reason"]) == (409, "lease_outdated")


def test_f_l6_what_is_given_back_can_be_used_at_once_and_only_once(client: httpx.Client, customer: str) -> None:
    one = first(client, customer).json()
    tokens = one["slices"][0]["tokens"]
    back = {"lease": one["lease"], "number": 2, "taken": 1, "slices": [{"policy": "lent", "tokens": tokens}]}
    answer = client.post("/v1/leases/return", json=back)
    assert (answer.status_code, answer.json()) == (200, {"id": one["id"], "returned": True})
    assert balance_of(client, customer) == pytest.approx(100, abs=1.0)
    assert client.post("/v1/leases/return", json=back).json()["returned"] is False
    answer = client.post("/v1/leases/renew", json=renewal(one, number=3))
    assert (answer.status_code, answer.json()["reason"]) == (409, "lease_closed")


def test_f_l6_debt_comes_back_with_a_return(client: httpx.Client, customer: str) -> None:
    one = first(client, customer).json()
    back = {"lease": one["lease"], "number": 2, "taken": 1, "slices": [{"policy": "lent", "debt": 500}]}
    assert client.post("/v1/leases/return", json=back).status_code == 200
    assert balance_of(client, customer) < -300


def test_f_l6_what_a_policy_lent_comes_back_when_it_lends_no_more(client: httpx.Client, customer: str) -> None:
    """Renewals are refused by then; debt still counts."""
    name = f"brief-{uuid4().hex[:8]}"
    policy = {"match": {"service": name}, "rate": 100, "local": {"allowed": True}}
    assert client.put(f"/v1/policies/{name}", json=policy).status_code == 201
    one = eventually(lambda: _lent(client, {"service": name}), what="the policy is in force")
    assert client.patch(f"/v1/policies/{name}", json={"local": {"allowed": False}}).status_code == 200
    body = renewal(one)
    eventually(lambda: client.post("/v1/leases/renew", json=body).status_code == 403, what="it lends no more")
    back = {"lease": one["lease"], "number": 1000, "taken": 1, "slices": [{"policy": name, "debt": 500}]}
    answer = client.post("/v1/leases/return", json=back)
    assert (answer.status_code, answer.json()["returned"]) == (200, True)
    asked = client.post("/v1/acquire", json={"descriptor": {"service": name}, "dry_run": True})
    assert asked.json()["limits"][0]["balance"] < -300


def _lent(client: httpx.Client, descriptor: dict[str, str]) -> Any:
    answer = client.post("/v1/leases", json={"descriptor": descriptor, "holder": uuid4().hex})
    return answer.json() if answer.status_code == 200 else None


def test_a_policy_that_lends_nothing_is_named(client: httpx.Client, customer: str) -> None:
    answer = first(client, customer, descriptor={"service": "lent", "customer": customer, "kept": "x"})
    assert answer.status_code == 403
    assert (answer.json()["reason"], answer.json()["policy"]) == ("local_not_allowed", "kept")


def test_nothing_is_lent_where_no_policy_covers(client: httpx.Client) -> None:
    answer = client.post("/v1/leases", json={"descriptor": {"service": "nobody"}, "holder": "h"})
    assert (answer.status_code, answer.json()["reason"]) == (403, "uncovered")


@pytest.mark.parametrize("token", ["x", "AmnKZ2V4YW1wbGU", "é"])
def test_a_forged_lease_is_unknown(client: httpx.Client, token: str) -> None:
    answer = client.post("/v1/leases/renew", json={"lease": token, "number": 2})
    assert (answer.status_code, answer.json()["reason"]) == (404, "lease_unknown")


def test_a_reservation_is_no_lease_and_a_lease_no_reservation(client: httpx.Client, customer: str) -> None:
    lease = first(client, customer).json()["lease"]
    assert client.post("/v1/settle", json={"reservation": lease, "work": 1}).status_code == 404
    granted = client.post("/v1/acquire", json={"descriptor": {"service": "lent", "customer": customer}}).json()
    answer = client.post("/v1/leases/renew", json={"lease": granted["reservation"], "number": 2})
    assert answer.status_code == 404


def test_a_renewal_of_a_lease_that_the_store_does_not_know_is_unknown(client: httpx.Client, customer: str) -> None:
    one = first(client, customer).json()
    other = first(client, customer).json()
    assert one["lease"] != other["lease"]
    back = {"lease": one["lease"], "number": 7, "taken": 1}
    assert client.post("/v1/leases/return", json=back).status_code == 200
    answer = client.post("/v1/leases/renew", json=renewal(one, number=8))
    assert answer.status_code == 409


@pytest.mark.parametrize(
    ("field", "value", "found", "allowed"),
    [
        ("holder", "", '""', "Unicode text of 1 to 128 characters"),
        ("weight", 0.5, "0.5", "a number from 1 to 1000000"),
        ("work_rate", -1, "-1", "a number from 0 to 9007199254740992"),
        ("slices", 3, "3", "a list of at most 255 objects"),
        ("slices[0].held", -2, "-2", "a number from 0 to 9007199254740992"),
        ("slices[0].policy", None, "", "Unicode text of 1 to 64 characters; it is required"),
    ],
)
def test_a_wrong_field_is_named(
    client: httpx.Client, customer: str, field: str, value: Any, found: str, allowed: str
) -> None:
    fields: dict[str, Any] = {field: value}
    if field.startswith("slices["):
        fields = {"slices": [{"held": value, "policy": "lent"} if field.endswith("held") else {"held": 1}]}
    answer = first(client, customer, **fields)
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"field": field, "found": found, "allowed": allowed}]


def test_a_field_that_stands_twice_is_named(client: httpx.Client) -> None:
    body = b'{"descriptor": {"service": "lent"}, "holder": "h", "holder": "g"}'
    answer = client.post("/v1/leases", content=body, headers={"content-type": "application/json"})
    assert answer.json()["errors"] == [{"field": "holder", "found": "it more than once", "allowed": "each name once"}]


def test_the_old_lease_of_an_acquire_names_the_route(client: httpx.Client) -> None:
    answer = client.post("/v1/acquire", json={"descriptor": {"service": "lent"}, "lease": True})
    assert answer.status_code == 422
    assert "POST /v1/leases" in answer.text


def test_a_quota_lends_a_portion_and_a_rate_its_part_in_one_lease(client: httpx.Client, customer: str) -> None:
    descriptor = {"service": "lent", "customer": customer, "pack": "gold"}
    one = first(client, customer, descriptor=descriptor, work_rate=20).json()
    slices = {row["policy"]: row for row in one["slices"]}
    assert slices["portions"]["mechanism"] == "quota"
    assert slices["portions"]["tokens"] == 30.0
    assert slices["portions"]["ends_in_ms"] > 0
    assert slices["lent"]["tokens"] > 0
    spent = [
        {"policy": "portions", "mechanism": "quota", "held": 0, "spent": 30, "period": slices["portions"]["period"]},
        {"policy": "lent", "held": slices["lent"]["share"]},
    ]
    two = client.post("/v1/leases/renew", json=renewal(one, work_rate=20, slices=spent)).json()
    assert {row["policy"]: row for row in two["slices"]}["portions"]["tokens"] == 30.0


def test_requests_are_lent_as_requests_and_places_in_flight_with_them(client: httpx.Client, customer: str) -> None:
    descriptor = {"service": "lent", "customer": customer, "hits": "1"}
    one = first(client, customer, descriptor=descriptor, request_rate=10, work_rate=1000).json()
    assert one["expires_in_ms"] == 2000, "the shortest lease of its policies"
    hits = {row["policy"]: row for row in one["slices"]}["lent-hits"]
    assert hits["counts_requests"] is True
    assert hits["share"] < 1
    places = one["overload"]["in_flight"]["critical"]
    assert 0 < places <= 20 * hits["capacity"] / 50


def test_shadows_are_left_out_of_leases(client: httpx.Client, customer: str) -> None:
    assert [one["policy"] for one in first(client, customer).json()["slices"]] == ["lent"]


def test_leases_are_listed_by_policy_and_holder(client: httpx.Client, customer: str) -> None:
    holder = f"{customer} über"
    one = first(client, customer, holder=holder, weight=3).json()
    (row,) = client.get("/v1/leases", params={"holder": holder}).json()["leases"]
    assert (row["id"], row["holder"], row["weight"], row["number"]) == (one["id"], holder, 3.0, 1)
    assert 0 < row["expires_in_ms"] <= 4100
    assert row["slices"][0]["policy"] == "lent"
    assert row["slices"][0]["share"] == one["slices"][0]["share"]
    listed = client.get("/v1/leases", params={"policy": "lent"}).json()["leases"]
    assert one["id"] in [lease["id"] for lease in listed]
    assert client.get("/v1/leases", params={"policy": "reads"}).json() == {"leases": []}


def test_a_revoked_lease_is_renewed_no_more_and_can_be_given_back(client: httpx.Client, customer: str) -> None:
    one = first(client, customer).json()
    answer = client.delete(f"/v1/leases/{one['id']}")
    assert answer.status_code == 200
    assert 0 < answer.json()["expires_in_ms"] <= 4100
    assert client.delete(f"/v1/leases/{one['id']}").status_code == 409
    answer = client.post("/v1/leases/renew", json=renewal(one))
    assert (answer.status_code, answer.json()["reason"]) == (409, "lease_closed")
    back = {"lease": one["lease"], "number": 3, "taken": 1, "slices": [{"policy": "lent", "tokens": 1}]}
    assert client.post("/v1/leases/return", json=back).json()["returned"] is True


@pytest.mark.parametrize("lease", ["0-abc", "nothing", "9999-00"])
def test_a_lease_that_nobody_holds_cannot_be_revoked(client: httpx.Client, lease: str) -> None:
    answer = client.delete(f"/v1/leases/{lease}")
    assert (answer.status_code, answer.json()["reason"]) == (404, "lease_unknown")


def test_a_holder_of_the_client_s_own_works_on_what_it_is_lent(client: httpx.Client, customer: str) -> None:
    """The holder takes the service's answers as they are, and its sums reach the statistics once."""
    lease = Lease()
    body = {"descriptor": {"service": "lent", "customer": customer}, "holder": uuid4().hex}
    request = lease.request()
    answer = client.post("/v1/leases", json=body | {name: request[name] for name in request.keys() & {"work_rate"}})
    assert lease.take(answer.json())
    for _ in range(10):
        grant = lease.try_acquire(2.0)
        assert isinstance(grant, Grant)
        grant.settle(3.0)
    renewed = client.post("/v1/leases/renew", json={"lease": lease.token, **lease.request()})
    assert renewed.status_code == 200, renewed.text
    assert lease.take(renewed.json())
    answer = client.post("/v1/leases/return", json={"lease": lease.token, **lease.returned()})
    assert answer.json()["returned"] is True
    rows = client.get("/v1/buckets", params={"policy": "lent", "contains": customer}).json()["buckets"]
    (row,) = [row for row in rows if row["bucket"] == f"lent:{customer}"]
    assert (row["requests"], row["admitted"], row["work_charged"], row["work_settled"]) == (10, 10, 20.0, 30.0)
