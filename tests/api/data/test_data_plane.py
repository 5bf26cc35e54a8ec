"""The contract of acquire, settle and batch, the same in both lanes."""

from typing import Any

import httpx
import pytest

from tests.support.live import LiveApi, ask, without_id

REFUSED_FIELDS = [
    "type", "title", "status", "detail", "granted", "policy", "reason", "retry", "retry_after_ms", "limits",
    "violated-policies",
]  # fmt: skip


def acquire(client: httpx.Client, customer: str, service: str = "slow", **fields: Any) -> httpx.Response:
    return client.post("/v1/acquire", json=ask(customer, service, **fields))


def test_a_grant_is_what_the_contract_says(client: httpx.Client, customer: str) -> None:
    answer = acquire(client, customer, "orders", work=3)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == [
        "granted", "reservation", "charged", "expires_in_ms", "limits", "overloaded", "quality", "degraded", "covered",
    ]  # fmt: skip
    assert body.pop("reservation")
    limits = [{"policy": "reads", "mechanism": "work", "balance": 47.0, "capacity": 50.0, "rate": 100.0}]
    assert body == {
        "granted": True, "charged": 3.0, "expires_in_ms": 60_000, "limits": limits,
        "overloaded": False, "quality": 1.0, "degraded": False, "covered": True,
    }  # fmt: skip
    assert answer.headers["ratelimit"] == '"reads";r=47;t=1'
    assert answer.headers["ratelimit-policy"] == '"reads";q=100;w=1'


def test_a_refusal_is_what_the_contract_says(client: httpx.Client, customer: str) -> None:
    assert acquire(client, customer, "orders", work=45).status_code == 200
    settle(client, acquire(client, customer, "orders", work=1).json()["reservation"], work=155)
    answer = acquire(client, customer, "orders", work=10)
    assert answer.status_code == 429
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert list(body) == REFUSED_FIELDS
    assert body["type"] == "https://iana.org/assignments/http-problem-types#quota-exceeded"
    assert (body["status"], body["granted"], body["policy"], body["reason"]) == (429, False, "reads", "work")
    assert body["retry"] == "after"
    assert 0 < body["retry_after_ms"] <= 2000
    assert body["violated-policies"] == ["reads"]
    assert body["limits"][0]["passed"] is False
    # A debt shows as nothing left, and coming back is never told to be earlier than it is repaid.
    assert answer.headers["ratelimit"].startswith('"reads";r=0;t=')
    repaid_s = int(answer.headers["ratelimit"].rpartition("=")[2])
    assert int(answer.headers["retry-after"]) >= max(repaid_s, body["retry_after_ms"] / 1000)


def settle(client: httpx.Client, reservation: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/settle", json={"reservation": reservation, **fields})


def test_a_settle_is_what_the_contract_says(client: httpx.Client, customer: str) -> None:
    reservation = acquire(client, customer, work=3).json()["reservation"]
    answer = settle(client, reservation, work=5, latency_ms=34.5, outcome="ok")
    assert answer.status_code == 200
    body = answer.json()
    assert list(body) == [
        "work", "adjusted", "uncollected", "stop", "duplicate", "late", "expires_in_ms", "limits",
    ]  # fmt: skip
    assert {name: body[name] for name in list(body)[:7]} == {
        "work": 5.0, "adjusted": 2.0, "uncollected": 0.0, "stop": False, "duplicate": False, "late": False,
        "expires_in_ms": 0,
    }  # fmt: skip
    assert body["limits"][0]["balance"] == pytest.approx(5, abs=0.1)


def test_the_same_settle_again_changes_nothing(client: httpx.Client, customer: str) -> None:
    """F-R2"""
    reservation = acquire(client, customer, work=3).json()["reservation"]
    first, second = (settle(client, reservation, work=5).json() for _ in range(2))
    assert (second["work"], second["adjusted"], second["duplicate"]) == (5.0, first["adjusted"], True)


def test_another_settle_is_refused_and_shows_the_first(client: httpx.Client, customer: str) -> None:
    """F-R3"""
    reservation = acquire(client, customer, work=3).json()["reservation"]
    settle(client, reservation, work=5)
    answer = settle(client, reservation, work=6)
    assert answer.status_code == 409
    assert answer.json()["reason"] == "settled_otherwise"
    assert answer.json()["first"]["work"] == 5.0


@pytest.mark.parametrize("token", ["", "x", "AVol" * 40, "\u00e9", "a" * 131_072])
def test_a_reservation_that_is_none_gets_the_same_answer(client: httpx.Client, token: str) -> None:
    """F-R6"""
    answer = settle(client, token, work=1)
    assert answer.status_code == 404
    assert without_id(answer.json()) == without_id(settle(client, "another", work=1).json())


def test_an_idempotency_key_gives_the_same_decision(client: httpx.Client, customer: str) -> None:
    """F-R7, F-R8"""
    headers = {"Idempotency-Key": f"key-{customer}"}
    first = client.post("/v1/acquire", json=ask(customer, work=3), headers=headers)
    again = client.post("/v1/acquire", json=ask(customer, work=3), headers=headers)
    assert again.json()["reservation"] == first.json()["reservation"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    other = client.post("/v1/acquire", json=ask(customer, work=4), headers=headers)
    assert (other.status_code, other.json()["reason"]) == (409, "idempotency_conflict")
    assert acquire(client, customer, dry_run=True).json()["limits"][0]["balance"] == pytest.approx(7, abs=0.1)


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_an_idempotency_key_out_of_bounds_is_named(client: httpx.Client, customer: str, key: str) -> None:
    answer = client.post("/v1/acquire", json=ask(customer), headers={"Idempotency-Key": key})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Idempotency-Key"


def test_a_dry_run_says_what_would_be_and_charges_nothing(client: httpx.Client, customer: str) -> None:
    for _ in range(3):
        answer = acquire(client, customer, work=3, dry_run=True).json()
        assert answer["limits"][0]["balance"] >= 10 - 3
    assert acquire(client, customer, work=100, dry_run=True).status_code in (200, 429)


def test_request_rate_and_quota_are_reasons_of_refusals(client: httpx.Client, customer: str) -> None:
    answers = [acquire(client, customer, "hits") for _ in range(5)]
    assert answers[-1].json()["reason"] == "request_rate"
    over = client.post("/v1/acquire", json={"descriptor": {"plan": "a", "customer": customer}, "work": 2000})
    assert over.json()["reason"] == "quota"
    assert over.headers["ratelimit-policy"].startswith('"allowance";q=1000;w=')


def test_a_shadow_policy_is_shown_and_refuses_nothing(client: httpx.Client, customer: str) -> None:
    """P11"""
    body = {"descriptor": {"trial": "x", "customer": customer}, "work": 1}
    answers = [client.post("/v1/acquire", json=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[-1].json()["limits"][0]["shadow"] is True
    assert answers[-1].json()["limits"][0]["passed"] is False
    assert "ratelimit" not in answers[-1].headers


def test_a_request_that_no_policy_covers_is_approved(client: httpx.Client) -> None:
    """P7"""
    answer = client.post("/v1/acquire", json={"descriptor": {"nobody": "knows"}})
    assert (answer.status_code, answer.json()["limits"]) == (200, [])


def test_a_batch_answers_each_operation_as_its_own_call_would(client: httpx.Client, customer: str) -> None:
    reservation = acquire(client, customer, work=1).json()["reservation"]
    operations = [
        {"op": "acquire", **ask(customer, work=2)},
        {"op": "settle", "reservation": reservation, "work": 1},
        {"op": "settle", "reservation": "nonsense", "work": 1},
        {"op": "acquire", **ask(customer, work=-2)},
        {"op": "acquire", **ask(customer, "hits"), "idempotency_key": f"batch-{customer}"},
        {"op": "acquire", **ask(customer, "hits"), "idempotency_key": f"batch-{customer}"},
        {"op": "dance"},
        7,
    ]
    answer = client.post("/v1/batch", json={"operations": operations})
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [result["status"] for result in results] == [200, 200, 404, 422, 200, 200, 422, 422]
    assert results[4]["reservation"] == results[5]["reservation"]
    assert list(results[0])[:3] == ["status", "granted", "reservation"]
    alone = client.post("/v1/acquire", json=ask(customer, work=-2))
    assert results[3] == without_id(alone.json())
    assert results[2] == without_id(settle(client, "nonsense", work=1).json())


def test_an_empty_batch_has_no_results(client: httpx.Client) -> None:
    assert client.post("/v1/batch", json={"operations": []}).json() == {"results": []}


def test_a_batch_of_a_thousand_is_answered_in_order(client: httpx.Client, customer: str) -> None:
    operations = [{"op": "acquire", **ask(f"{customer}-{number}", work=number % 5)} for number in range(1000)]
    results = client.post("/v1/batch", json={"operations": operations}).json()["results"]
    assert [result["charged"] for result in results] == [float(number % 5) for number in range(1000)]


def test_an_over_long_batch_is_refused(client: httpx.Client, customer: str) -> None:
    """F-H2"""
    operations = [{"op": "acquire", **ask(customer)}] * 1001
    answer = client.post("/v1/batch", json={"operations": operations})
    assert (answer.status_code, answer.json()["detail"]) == (413, "operations: found 1001; allowed: at most 1000")
    assert acquire(client, customer, work=1).json()["limits"][0]["balance"] == 9.0  # nothing was charged


def test_a_batch_that_is_none_names_what_is_wrong(client: httpx.Client) -> None:
    for document, field in [([], ""), ({}, "operations"), ({"operations": 3}, "operations"), ({"x": 1}, '"x"')]:
        answer = client.post("/v1/batch", json=document)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == field


def test_paths_with_a_query_are_served_too(client: httpx.Client, api: LiveApi, customer: str) -> None:
    assert client.post("/v1/acquire?trace=1", json=ask(customer)).status_code == 200
