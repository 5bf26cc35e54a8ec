"""Denials, requests that are counted, and a rate beside a quota: over HTTP, in both lanes."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.live import Lane, live
from tests.support.servers import Server, running

POLICIES = """
policies:
  - {name: no-robots, match: {agent: "robot*"}, deny: true}
  - {name: plan, match: {customer: "*"}, per: [customer], rate: 0.000001, capacity: 2, count: requests,
     quota: {work: 100, period: year}}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One of its own: these policies cover everybody."""
    with running("valkey", tmp_path_factory.mktemp("kinds-store")) as server:
        yield server


@pytest.fixture
def client(store: Server, tmp_path: Path, lane: Lane) -> Iterator[httpx.Client]:
    file = tmp_path / "policies.yaml"
    file.write_text(POLICIES)
    with live(store.url, file, lane=lane) as api, api.client() as client:
        yield client


def test_w17_a_denial_is_a_403_that_names_its_policy(client: httpx.Client, customer: str) -> None:
    asked = {"descriptor": {"agent": "robot-7", "customer": customer}}
    for dry_run in (False, True):
        answer = client.post("/v1/acquire", json=asked | {"dry_run": dry_run})
        assert answer.status_code == 403
        assert answer.headers["content-type"] == "application/problem+json"
        assert "retry-after" not in answer.headers
        body = answer.json()
        assert (body["status"], body["granted"], body["policy"]) == (403, False, "no-robots")
        assert (body["reason"], body["retry"], body["limits"]) == ("denied", "never", [])
    batch = client.post("/v1/batch", json={"operations": [{"op": "acquire", **asked}]}).json()
    assert (batch["results"][0]["status"], batch["results"][0]["reason"]) == (403, "denied")
    clean = client.post("/v1/acquire", json={"descriptor": {"customer": customer}}).json()
    assert [limit["balance"] for limit in clean["limits"]] == pytest.approx([1, 99]), "the denials took nothing"
    metrics = client.get("/metrics").text
    assert 'headgate_decisions_total{decision="refused",reason="denied"} 2.0' in metrics


def test_w16_p12_an_answer_shows_the_rate_and_the_quota_of_a_policy(client: httpx.Client, customer: str) -> None:
    asked = {"descriptor": {"customer": customer}, "work": 30}
    granted = client.post("/v1/acquire", json=asked).json()
    assert [(limit["policy"], limit["mechanism"]) for limit in granted["limits"]] == [
        ("plan", "requests"),
        ("plan", "quota"),
    ]
    settled = client.post("/v1/settle", json={"reservation": granted["reservation"], "work": 40}).json()
    assert [limit["balance"] for limit in settled["limits"]] == pytest.approx([1, 60])
    assert client.post("/v1/acquire", json=asked | {"work": 1}).status_code == 200
    refused = client.post("/v1/acquire", json=asked | {"work": 1})
    assert (refused.status_code, refused.json()["reason"], refused.json()["policy"]) == (429, "request_rate", "plan")
    buckets = client.get("/v1/buckets", params={"policy": "plan", "contains": customer}).json()["buckets"]
    shown = sorted((bucket["policy"], bucket["mechanism"]) for bucket in buckets)
    assert shown == [("plan", "quota"), ("plan", "requests")]
