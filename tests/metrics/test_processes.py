"""Several processes, one answer: nothing is lost, nothing goes back, nothing gathers."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from limiter.metrics import catalogue, processes
from limiter.metrics.exposition import encode, families
from limiter.metrics.processes import Shelf, bury, merged
from limiter.metrics.readings import Reading, plain
from limiter.model.tally import Histogram
from tests.support import eventually
from tests.support.command import children, started_headgate
from tests.support.scraping import Scrape, scrape
from tests.support.servers import Server, free_port


def histogram(*values: float) -> Histogram:
    made = Histogram((1, 2))
    for value in values:
        made.observe(value)
    return made


def shelf(directory: Path, pid: int, *readings: Reading) -> Shelf:
    made = Shelf(directory, lambda: readings, pid=pid)
    made.flush()
    made.close()
    return made


def readings(*, count: float = 0, nodes: float = 0, up: float = 1, owned: float = 0) -> list[Reading]:
    return [
        plain(catalogue.DRY_RUNS, count),
        plain(catalogue.NODES, nodes),
        plain(catalogue.STORE_UP, up),
        plain(catalogue.OWNED, owned),
        Reading(catalogue.CALL_OPERATIONS, {("acquire",): histogram(*[1.5] * int(count), 9)}),
    ]


def shown(directory: Path) -> Scrape:
    return Scrape(merged(directory))


def test_counters_and_histograms_add_up_and_gauges_as_they_are_defined(tmp_path: Path) -> None:
    shelf(tmp_path, 1, *readings(count=2, nodes=4, up=1, owned=3))
    shelf(tmp_path, 2, *readings(count=3, nodes=5, up=0, owned=4))
    found = shown(tmp_path)
    assert found.value("headgate_dry_runs_total") == 5
    assert found.value("headgate_nodes") == 5
    assert found.value("headgate_store_up") == 0
    assert found.value("headgate_controller_owned_partitions") == 7
    buckets = found.values("headgate_store_call_operations_bucket", operation="acquire")
    assert list(buckets.values()) == [0, 5, 7]
    assert found.value("headgate_store_call_operations_count", operation="acquire") == 7
    assert found.value("headgate_store_call_operations_sum", operation="acquire") == 25.5


def test_one_process_by_itself_shows_the_same_as_through_files(tmp_path: Path) -> None:
    own = readings(count=2, nodes=4, owned=3)
    shelf(tmp_path, 1, *own)
    direct = {
        (name, tuple(sorted(labels.items()))): value for name, labels, value in Scrape([*families(own)]).samples()
    }
    through = {(name, tuple(sorted(labels.items()))): value for name, labels, value in shown(tmp_path).samples()}
    assert direct == through


def test_values_are_absolute_so_leaving_them_twice_changes_nothing(tmp_path: Path) -> None:
    made = shelf(tmp_path, 1, *readings(count=2))
    made.flush()
    made.close()
    assert shown(tmp_path).value("headgate_dry_runs_total") == 2


def test_the_counters_of_a_dead_process_stay_and_its_gauges_go(tmp_path: Path) -> None:
    for pid in range(1, 20):
        shelf(tmp_path, pid, *readings(count=2, owned=1))
        bury(tmp_path, pid)
    shelf(tmp_path, 1, *readings(count=1, owned=1))  # the number of a process may come again
    found = shown(tmp_path)
    assert found.value("headgate_dry_runs_total") == 19 * 2 + 1
    assert found.value("headgate_controller_owned_partitions") == 1
    assert found.value("headgate_store_call_operations_count", operation="acquire") == 19 * 3 + 2
    assert {path.name for path in tmp_path.glob("*_gone.db")} == {"counter_gone.db", "histogram_gone.db"}
    assert len(list(tmp_path.iterdir())) == 2 + 5, "files do not gather"


def test_burying_a_process_without_files_is_harmless(tmp_path: Path) -> None:
    bury(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


async def test_a_last_flush_comes_with_the_end(tmp_path: Path) -> None:
    numbers = readings(count=1)
    task = asyncio.create_task(Shelf(tmp_path, lambda: numbers, pid=1).run())
    await asyncio.sleep(0)
    numbers = readings(count=7)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert shown(tmp_path).value("headgate_dry_runs_total") == 7


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_both_formats_can_be_had(accept: str) -> None:
    body, content_type = encode(families(readings(count=3)), accept)
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    assert b"headgate_dry_runs_total 3.0\n" in body
    assert body.endswith(b"# EOF\n") == bool(accept)


@pytest.fixture
def node(valkey: Server, tmp_path: Path) -> Iterator[tuple[int, httpx.Client]]:
    """Two workers: the supervisor's pid, and a client."""
    port = free_port()
    with (
        started_headgate("api", port=port, workers=2, redis_url=valkey.url) as (process, printed),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client,
    ):
        assert printed[0].startswith("headgate ")
        yield process.pid, client


def test_any_worker_answers_for_all_and_counters_survive_their_worker(node: tuple[int, httpx.Client]) -> None:
    supervisor, client = node
    uncovered = "headgate_uncovered_requests_total"
    asked = 0
    workers = children(supervisor)
    for _ in range(40):  # each on a connection of its own, so that both workers get some
        answer = client.post("/v1/acquire", json={"descriptor": {"service": "any"}}, headers={"connection": "close"})
        assert answer.status_code == 200
        asked += 1
    for _ in range(4):
        eventually(
            lambda: scrape_anew(client).value(uncovered, namespace_known="false") == asked,
            what="within about a second all is seen",
        )
    assert scrape_anew(client).value("headgate_http_requests_total", route="/v1/acquire", status="200") == asked
    os.kill(workers[0], signal.SIGKILL)
    eventually(lambda: len(children(supervisor)) == 2 and workers[0] not in children(supervisor))
    assert scrape_anew(client).value(uncovered, namespace_known="false") == asked


def scrape_anew(client: httpx.Client) -> Scrape:
    """Scrape over a new connection, which either worker may accept."""
    with httpx.Client(base_url=client.base_url, timeout=20, trust_env=False) as once:
        return scrape(once)


def test_flushing_happens_about_once_a_second() -> None:
    assert 0.5 <= processes.FLUSH_S <= 2
