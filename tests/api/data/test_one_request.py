"""One request, one limit, over HTTP, the same in both lanes: W5, W13, W14, W17, F-R17, F-R18."""

from typing import Any

import httpx
import pytest

from tests.support import eventually
from tests.support.live import LiveApi, ask


def acquire(client: httpx.Client, customer: str, service: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/acquire", json=ask(customer, service, **fields))


def settle(client: httpx.Client, granted: httpx.Response, work: float, **fields: Any) -> dict[str, Any]:
    assert granted.status_code == 200, granted.text
    body = {"reservation": granted.json()["reservation"], "work": work, **fields}
    answer = client.post("/v1/settle", json=body)
    assert answer.status_code == 200, answer.text
    settled: dict[str, Any] = answer.json()
    return settled


def test_f_r18_charged_is_what_was_debited(client: httpx.Client, customer: str) -> None:
    """rate 6000/m, capacity 30s, max_debt 60s: of an estimate of 19 000 only 9000 can be collected."""
    granted = acquire(client, customer, "tokens", work=19_000)
    assert granted.json()["charged"] == 9000
    settled = settle(client, granted, 19_000)
    # Refill in between could be collected too: the bucket never falls below its debt bound.
    assert settled["uncollected"] == pytest.approx(10_000, abs=1000)
    assert settled["adjusted"] + settled["uncollected"] + 9000 == pytest.approx(19_000)


def test_w5_a_settle_says_what_it_could_not_collect(client: httpx.Client, customer: str) -> None:
    """5000/d, capacity 100: it may owe 100, not a minute's 3.5; what is beyond is said, and not claimed."""
    settled = settle(client, acquire(client, customer, "daily", work=1), 500)
    assert settled["uncollected"] == pytest.approx(300, abs=1)
    assert settled["adjusted"] == pytest.approx(199, abs=1)
    assert settled["work"] == 500
    assert settled["limits"][0]["balance"] == pytest.approx(-100, abs=1)


@pytest.mark.parametrize(("service", "most"), [("bounded", 150), ("limited", 40)])
def test_w13_an_estimate_above_the_bound_is_refused_for_good(
    client: httpx.Client, customer: str, service: str, most: float
) -> None:
    refused = acquire(client, customer, service, work=most + 1)
    body = refused.json()
    assert (refused.status_code, body["reason"], body["retry"]) == (429, "request_too_large", "never")
    assert f"{most:g}" in body["detail"]
    assert "retry-after" not in refused.headers
    assert body["limits"][0]["balance"] == 1000, "nothing was spent, and the balance is told"
    granted = acquire(client, customer, service, work=most)
    assert settle(client, granted, 500)["adjusted"] == 500 - most, "work that was done is debited all the same"


def test_w13_the_bound_is_in_the_policy_s_own_units(client: httpx.Client, customer: str) -> None:
    body = {"descriptor": {"service": "limited", "operation": "write", "customer": customer}}
    assert client.post("/v1/acquire", json=body | {"work": 13}).status_code == 200
    assert client.post("/v1/acquire", json=body | {"work": 14}).json()["reason"] == "request_too_large"


def test_w13_covered_refuses_what_the_balance_does_not_cover(client: httpx.Client, customer: str) -> None:
    never = acquire(client, customer, "covered", work=51).json()
    assert (never["reason"], never["retry"]) == ("work", "never")
    assert acquire(client, customer, "covered", work=30).status_code == 200
    later = acquire(client, customer, "covered", work=30).json()
    assert (later["reason"], later["retry"]) == ("work", "after")
    assert acquire(client, customer, "covered", work=20).status_code == 200


def test_w13_refusals_in_a_batch_are_the_same(client: httpx.Client, customer: str) -> None:
    operations = [{"op": "acquire", **ask(customer, "limited", work=work)} for work in (41, 40)]
    results = client.post("/v1/batch", json={"operations": operations}).json()["results"]
    assert [result["status"] for result in results] == [429, 200]
    assert results[0]["reason"] == "request_too_large"


def test_w14_progress_renews_the_reservation_and_says_until_when(client: httpx.Client, customer: str) -> None:
    granted = acquire(client, customer, "slow", work=5, ttl_ms=20_000)
    first = settle(client, granted, 3, final=False)
    assert 19_000 < first["expires_in_ms"] <= 20_000
    again = settle(client, granted, 3, final=False)
    assert (again["duplicate"], 19_000 < again["expires_in_ms"] <= 20_000) == (True, True)
    last = settle(client, granted, 4)
    assert (last["expires_in_ms"], last["adjusted"], last["late"]) == (0, -1, False)


def test_w14_an_uncovered_reservation_is_renewed_as_well(client: httpx.Client, customer: str) -> None:
    granted = acquire(client, customer, "nobody-covers-this", ttl_ms=20_000)
    assert settle(client, granted, 3, final=False)["expires_in_ms"] == 20_000
    assert settle(client, granted, 3)["expires_in_ms"] == 0


def test_w17_a_key_that_is_refused_too_often_is_blocked(client: httpx.Client, customer: str) -> None:
    """403, for it is not the limit that refuses now; with when the block ends."""
    assert acquire(client, customer, "blocking").status_code == 200
    assert [acquire(client, customer, "blocking").status_code for _ in range(3)] == [429] * 3
    blocked = acquire(client, customer, "blocking")
    body = blocked.json()
    assert (blocked.status_code, body["reason"], body["policy"], body["retry"]) == (403, "blocked", "blocking", "after")
    assert 500_000 < body["retry_after_ms"] <= 600_000
    assert 500 < int(blocked.headers["retry-after"]) <= 600
    assert body["limits"][0]["policy"] == "blocking"
    batch = client.post("/v1/batch", json={"operations": [{"op": "acquire", **ask(customer, "blocking")}]}).json()
    assert (batch["results"][0]["status"], batch["results"][0]["reason"]) == (403, "blocked")
    assert acquire(client, f"another-{customer}", "blocking").status_code == 200


def put(client: httpx.Client, name: str, **policy: Any) -> None:
    answer = client.put(f"/v1/policies/{name}", json=policy)
    assert answer.status_code in (200, 201), answer.text


@pytest.fixture
def several(api: LiveApi, client: httpx.Client, customer: str) -> str:
    """Two limits on one request: one that can collect 110, and one that can collect any amount."""
    put(client, f"small-{customer}", match={"service": customer}, rate="1/d", capacity=100, max_debt=10)
    put(client, f"large-{customer}", match={"service": customer}, rate="1/d", capacity=1000, weights={"op": {"w": 0.5}})
    granted = {"descriptor": {"service": customer}, "dry_run": True}
    eventually(lambda: len(client.post("/v1/acquire", json=granted).json()["limits"]) == 2)
    return customer


@pytest.mark.parametrize("op", ["r", "w"])
@pytest.mark.parametrize("work", [50, 110, 200, 300])
def test_w5_charged_adjusted_and_uncollected_add_up_over_several_policies(
    client: httpx.Client, several: str, op: str, work: float
) -> None:
    granted = client.post("/v1/acquire", json={"descriptor": {"service": several, "op": op}, "work": 200})
    settled = settle(client, granted, work)
    assert granted.json()["charged"] + settled["adjusted"] + settled["uncollected"] == pytest.approx(work)
    assert settled["uncollected"] == pytest.approx(max(0, work - 110), abs=1)


def test_a_shadow_that_blocks_charges_nothing(client: httpx.Client, customer: str) -> None:
    """P11, W17: it has no say, and its answer to a blocked key is a time, not an amount."""
    block = {"after": 1, "in": "5s", "for": "60s"}
    put(client, customer, match={"service": customer}, rate="1/h", capacity=10, shadow=True, block=block)
    ask_for = {"descriptor": {"service": customer}, "work": 6}
    eventually(lambda: client.post("/v1/acquire", json=ask_for | {"dry_run": True}).json()["limits"])
    assert {client.post("/v1/acquire", json=ask_for).json()["charged"] for _ in range(4)} == {0.0}


def test_w13_leaving_out_the_estimate_gets_around_no_bound(client: httpx.Client, customer: str) -> None:
    put(
        client, customer, match={"service": customer}, rate="1/h", capacity=100, charge=10, max_request=50,
        weights={"op": {"w": 20}},
    )  # fmt: skip
    said = {"descriptor": {"service": customer, "op": "w"}, "work": 10}
    eventually(lambda: client.post("/v1/acquire", json=said | {"dry_run": True}).status_code == 429)
    for body in (said, {"descriptor": said["descriptor"]}):
        assert client.post("/v1/acquire", json=body).json()["reason"] == "request_too_large"


@pytest.mark.parametrize("requests", [1, 0, 0.5])
def test_a_settle_is_for_one_request(client: httpx.Client, customer: str, requests: float) -> None:
    """The field was there for leases, which are gone."""
    reservation = acquire(client, customer, "slow").json()["reservation"]
    answer = client.post("/v1/settle", json={"reservation": reservation, "work": 5, "requests": requests})
    assert answer.status_code == 422
    assert answer.json()["detail"] == (
        "requests: found a field that is gone; "
        "allowed: no such field: an acquire is for one request, as leases are gone"
    )
