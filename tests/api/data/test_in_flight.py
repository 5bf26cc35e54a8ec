"""W18 over HTTP: refusals for want of a place, in both lanes alike, and what the bucket's page shows."""

import httpx

from tests.support.lanes import CUSTOMER, normal
from tests.support.live import LANES, Lane, LiveApi, ask, exchange, request


def test_w18_the_third_of_two_places_is_refused_until_one_is_settled(client: httpx.Client, customer: str) -> None:
    body = ask(customer, "places")
    first = client.post("/v1/acquire", json=body).json()
    assert client.post("/v1/acquire", json=body).status_code == 200
    reply = client.post("/v1/acquire", json=body)
    problem = reply.json()
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert (problem["policy"], problem["reason"], problem["retry"]) == ("places", "in_flight", "after")
    assert problem["retry_after_ms"] == 1000
    assert problem["detail"] == "places: all 2 places for open reservations are taken; each settle frees one"
    assert problem["violated-policies"] == ["places"]
    assert "state" not in problem
    settled = client.post("/v1/settle", json={"reservation": first["reservation"], "work": 3})
    assert settled.status_code == 200
    assert client.post("/v1/acquire", json=body).status_code == 200


def test_both_lanes_tell_of_places_alike(both: dict[Lane, LiveApi]) -> None:
    answers = {}
    for lane in LANES:
        customer = f"{lane[0]}-places".ljust(len(CUSTOMER), "x")[: len(CUSTOMER)]
        body = ask(customer, "places")
        batch = request("/v1/batch", {"operations": [{"op": "acquire"} | body]})
        replies = [exchange(both[lane], raw)[0] for raw in (request(body=body), batch, request(body=body), batch)]
        assert [replies[0].status, replies[2].status] == [200, 429]
        answers[lane] = [normal(reply, customer.encode()) for reply in replies[2:]]
    assert answers["fast"] == answers["plain"]


def test_s10_g6_the_bucket_s_page_shows_places_and_attempts(client: httpx.Client, customer: str) -> None:
    body = ask(customer, "places")
    for attempt in (1, 2, 3):
        client.post("/v1/acquire", json=body | {"attempt": attempt})
    (shown,) = client.get("/v1/buckets", params={"policy": "places", "contains": customer}).json()["buckets"]
    assert (shown["in_flight"], shown["second_attempts"], shown["further_attempts"]) == (2, 1, 1)
