"""Many reports of load on many partitions beside decisions: reports wait their turn, decisions do not."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import GIVE_UP_S, Lane, LiveApi, live
from tests.support.servers import Server, running

POLICIES = """
namespaces: {wide: {partitions: 1024, partition_by: [customer]}}
policies:
  - {name: crowd, namespace: wide, match: {service: crowd}, rate: 1000000, overload: {utilisation: {}}}
"""
REPORT = {"namespace": "wide", "policy": "crowd", "signals": {"cpu": 0.5}}
REPORTS = 60
DEADLINE_MS = 1000


@pytest.fixture(scope="module")
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("valkey", tmp_path_factory.mktemp("reports")) as server:
        yield server


@pytest.fixture
def api(own_store: Server, tmp_path: Path, lane: Lane) -> Iterator[LiveApi]:
    file = tmp_path / "policies.yaml"
    file.write_text(POLICIES)
    with live(own_store.url, file, lane=lane, deadline_ms=DEADLINE_MS) as api:
        yield api


def report(api: LiveApi, number: int) -> Any:
    with api.client() as client:
        return client.post("/v1/signals", json=REPORT | {"source": f"host-{number}"}, timeout=3 * GIVE_UP_S)


def test_reports_on_a_thousand_partitions_leave_decisions_undegraded(api: LiveApi) -> None:
    """Issue: 60 keyless reports made 131 of 132 decisions degraded. Each is 1,024 calls to the store."""
    with ThreadPoolExecutor(REPORTS) as threads, api.client() as client:
        answers = [threads.submit(report, api, number) for number in range(REPORTS)]
        degraded: list[bool] = []
        while not all(answer.done() for answer in answers) or len(degraded) < 50:
            body = {"namespace": "wide", "descriptor": {"service": "crowd", "customer": f"c{len(degraded)}"}}
            degraded.append(client.post("/v1/acquire", json=body).json()["degraded"])
    statuses = Counter(answer.result().status_code for answer in answers)
    assert degraded.count(True) == 0, f"of {len(degraded)}; reports: {statuses}"
    assert set(statuses) <= {202, 503}
    assert statuses[202] >= 4, "some are taken, the others told to come back"
    busy = next((answer.result() for answer in answers if answer.result().status_code == 503), None)
    if busy is not None:
        assert (busy.json()["reason"], "retry-after" in busy.headers) == ("node_busy", True)


def test_a_report_that_was_taken_is_in_every_partition(api: LiveApi, own_store: Server) -> None:
    own_store.client().flushall()
    taken = report(api, 1)
    assert (taken.status_code, taken.json()["partitions"]) == (202, 1024)
    assert len(own_store.client().keys("hg:{wide/*}:u:crowd")) == 1024
