"""The right to scrape, and the numbers of a real node."""

import asyncio
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.routes.metrics import named_policies as named
from limiter.api_keys import new_key
from limiter.engine.engine import open_engine
from limiter.metrics import catalogue
from limiter.model.bucket.bucket import fresh
from limiter.model.policy.limit import Limit
from limiter.model.policy.policy_set import Namespace
from limiter.model.policy.reading import read_policy
from limiter.settings import Settings
from limiter.store import inspect
from limiter.store.inspect import SlotLook
from tests.support import eventually
from tests.support.command import HEADGATE, environment, run_headgate
from tests.support.live import LiveApi, Wire, ask, live
from tests.support.nodes import until
from tests.support.scraping import POLICIES, scrape
from tests.support.servers import Server, free_port, running


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    file = tmp_path / "policies.yaml"
    file.write_text(POLICIES)
    return file


@pytest.fixture(params=["fast", "plain"])
def node(valkey: Server, policies: Path, request: pytest.FixtureRequest) -> Iterator[LiveApi]:
    with live(valkey.url, policies, lane=request.param) as api:
        yield api


def test_decisions_work_and_answers_are_counted(node: LiveApi) -> None:
    with node.client() as client:
        reservation = client.post("/v1/acquire", json=ask("c1", "each", work=4)).json()["reservation"]
        client.post("/v1/acquire", json=ask("c1", "each", work=9, dry_run=True))
        client.post("/v1/settle", json={"reservation": reservation, "work": 6})
        client.post("/v1/settle", json={"reservation": reservation, "work": 6})
        client.post("/v1/acquire", json=ask("c1", "each", work=4))
        client.post("/v1/acquire", json=ask("c1", "each"))
        client.post("/v1/acquire", json=ask("c1", "nobody"))
        client.post("/v1/acquire", json={})
        client.head("/healthz")
        client.get("/docs")
        shown = scrape(client)
    decisions = {labels: value for labels, value in shown.values("headgate_decisions_total").items() if value}
    assert decisions == {
        (("decision", "granted"), ("reason", "none")): 3,
        (("decision", "refused"), ("reason", "work")): 1,
    }
    assert shown.value("headgate_work_admitted_total") == 8
    assert shown.value("headgate_work_settled_total") == 6
    assert shown.value("headgate_work_corrected_total", direction="debited") == 2
    assert shown.value("headgate_dry_runs_total") == 1
    assert shown.value("headgate_uncovered_requests_total", namespace_known="true") == 1
    assert shown.value("headgate_uncovered_requests_total", namespace_known="false") == 0
    assert shown.value("headgate_settles_total", outcome="duplicate") == 1
    answers = {
        (labels[0][1], labels[1][1]): value for labels, value in shown.values("headgate_http_requests_total").items()
    }
    assert answers == {
        ("/v1/acquire", "200"): 4,
        ("/v1/acquire", "429"): 1,
        ("/v1/acquire", "422"): 1,
        ("/v1/settle", "200"): 2,
        ("/healthz", "200"): 1,
        ("/docs", "200"): 1,
    }
    assert shown.value("headgate_store_call_operations_sum", operation="acquire") == 4
    assert shown.value("headgate_store_call_seconds_count", operation="settle") == 2


def test_a_request_that_is_not_understood_is_counted_without_a_route(node: LiveApi) -> None:
    with Wire(node) as wire:
        wire.send(b"nonsense\r\n\r\n")
        wire.receive_all()
    with node.client() as client:
        client.get("/v1/policies/../secret")
        shown = scrape(client)
    assert shown.value("headgate_http_requests_total", route="none", status="400") == 1
    assert shown.value("headgate_http_requests_total", route="none", status="404") == 1


def test_named_policies_are_shown_as_they_stand(node: LiveApi) -> None:
    with node.client() as client:
        client.post("/v1/acquire", json=ask("c1", "month", work=250))
        shown = scrape(client)
    assert shown.value("headgate_policy_balance", policy="month") == 750
    assert shown.value("headgate_policy_capacity", policy="month") == 1000
    assert not shown.values("headgate_policy_committed_work_per_second", policy="month")
    assert shown.value("headgate_policy_balance", policy="learning") == 100_000, "never used: full"
    assert shown.value("headgate_policy_cap_requests_per_second", policy="capped") > 0
    assert shown.value("headgate_policy_throttle_multiplier", policy="guarded") == 0, "where it begins"
    assert not shown.values("headgate_policy_class_rate_requests_per_second"), "nothing was measured yet"
    assert not shown.values("headgate_policy_balance", policy="each"), "one for each customer is none here"
    assert shown.value("headgate_unsteered_partitions") == 1, "no controller runs here"


def test_as_many_policies_as_are_shown_are_bounded(
    valkey: Server, policies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named, "POLICIES_MAX", 3)
    with live(valkey.url, policies) as api, api.client() as client:
        shown = scrape(client)
    assert len(shown.values("headgate_policy_balance")) == 3
    assert shown.value("headgate_policies_not_shown") == 3


def test_parts_of_a_divided_limit_add_up(valkey: Server, tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(
        "namespaces: {default: {partitions: 4, partition_by: [customer]}}\n"
        "policies: [{name: all, match: {}, rate: 1/d, capacity: 100, charge: 5}]\n"
    )
    with live(valkey.url, file) as api, api.client() as client:
        assert client.post("/v1/acquire", json=ask("c1")).status_code == 200
        shown = scrape(client)
    assert shown.value("headgate_policy_balance", policy="all") == pytest.approx(95, abs=0.1)
    assert shown.value("headgate_policy_capacity", policy="all") == 100
    assert shown.value("headgate_unsteered_partitions") == 4


def test_of_parts_that_do_not_add_up_the_worst_is_shown() -> None:
    policy = read_policy({"name": "guarded", "rate": 1, "overload": {"response_time": {}}})
    states = []
    for quality, rate, overloaded in ((0.5, 20.0, 1.0), (1.0, 30.0, 0.0)):
        limit = Limit(policy, partitions=2)
        record = fresh(limit.terms, 1_790_000_000_000_000)
        assert record.shedding is not None
        record.shedding.quality, record.shedding.state = quality, 3 * overloaded
        record.shedding.rates[1] = rate
        states.append((("default", "guarded"), limit, record, None))
    shown = {reading.definition: reading.values for reading in named._readings(states)}
    assert shown[catalogue.POLICY_QUALITY] == {("default", "guarded"): 0.5}
    assert shown[catalogue.POLICY_OVERLOADED] == {("default", "guarded"): 1.0}
    assert shown[catalogue.POLICY_STATE] == {("default", "guarded"): 3.0}
    assert shown[catalogue.POLICY_CLASS_RATE] == {("default", "guarded", "critical"): 50.0}, "rates add up"


def test_without_the_store_a_scrape_says_so_in_time(tmp_path: Path, policies: Path) -> None:
    with (
        running("valkey", tmp_path / "store") as server,
        live(server.url, policies, deadline_ms=50) as api,
        api.client() as client,
    ):
        assert scrape(client).value("headgate_store_up") == 1
        server.stop()
        eventually(lambda: scrape(client).value("headgate_store_up") == 0, what="the store is seen to be away")
        for _ in range(8):
            client.post("/v1/acquire", json=ask("c1", "each"))
        shown = scrape(client)
    assert not shown.values("headgate_policy_balance")
    assert shown.value("headgate_breaker_open") == 1
    assert shown.value("headgate_store_unanswered_total", operation="acquire", reason="deadline") >= 5
    assert shown.value("headgate_degraded_decisions_total", decision="granted") == 8


async def test_f_s17_a_scrape_that_a_change_of_policies_overlaps_is_complete(
    valkey: Server, policies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-S17: it went on by the plan of the scrape after it, which had other slots."""
    held, release = asyncio.Event(), asyncio.Event()
    looks = inspect.look_at_slot

    async def look_at_slot(*args: Any, **more: Any) -> SlotLook:
        held.set()
        await release.wait()
        return await looks(*args, **more)

    engine = await open_engine(Settings(policies=policies, deadline_ms=2000), valkey.url)
    await engine.start()
    try:
        shown = named.NamedPolicies(engine)
        monkeypatch.setattr(named, "look_at_slot", look_at_slot)
        first = asyncio.create_task(shown.read())
        await held.wait()
        monkeypatch.setattr(named, "look_at_slot", looks)
        await engine.store.put_namespace("other", Namespace(partitions=3, partition_by=["customer"]), who="a test")
        await engine.store.put(
            read_policy({"name": "new", "namespace": "other", "rate": 7, "charge": "learned"}), who="t"
        )
        await until(lambda: any(policy.name == "new" for policy in engine.policies.policies))
        second = await shown.read()
        release.set()
        before, after = (
            {labels for reading in read for labels in reading.values if reading.definition is catalogue.POLICY_BALANCE}
            for read in (await first, second)
        )
    finally:
        await engine.stop()
    assert before == {("default", name) for name in ("learning", "capped", "month", "guarded", "timed", "lent")}
    assert after == before | {("other", "new")}


def test_f_s17_scrapes_are_complete_while_policies_and_namespaces_change(node: LiveApi) -> None:
    """F-S17: 90 of 1,249 such scrapes were a 500."""
    stop = threading.Event()

    def change() -> None:
        with node.client() as client:
            number = 0
            while not stop.is_set():
                number += 1
                spread = {"partitions": 1 + number % 5, "partition_by": ["customer"]}
                assert client.put("/v1/namespaces/moving", json=spread).status_code < 300
                policy = {"name": "moved", "namespace": "moving", "match": {}, "rate": 5, "charge": "learned"}
                assert client.put("/v1/policies/moved", json=policy).status_code < 300
                assert client.delete("/v1/policies/moved", params={"namespace": "moving"}).status_code < 300

    def scrape_often() -> list[int]:
        with node.client() as client:
            return [client.get("/metrics").status_code for _ in range(40)]

    with ThreadPoolExecutor(5) as pool:
        changing = pool.submit(change)
        statuses = [status for done in [pool.submit(scrape_often) for _ in range(4)] for status in done.result()]
        stop.set()
        changing.result()
    assert statuses == [200] * 160


KEYS = [new_key(name, role, space) for name, role, space in [
    ("a", "admin", None), ("v", "viewer", None), ("c", "caller", None), ("bound", "viewer", "tenant1"),
]]  # fmt: skip


@pytest.mark.parametrize(("key", "status"), [(None, 401), (0, 200), (1, 200), (2, 403), (3, 403)])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_key_is_needed_as_soon_as_there_are_keys(
    valkey: Server, policies: Path, key: int | None, status: int, is_open: bool
) -> None:
    entries = ",".join(entry for _, entry in KEYS)
    with live(valkey.url, policies, api_keys=entries, metrics_open=is_open) as api, api.client() as client:
        headers = {} if key is None else {"authorization": f"Bearer {KEYS[key][0]}"}
        assert client.get("/metrics", headers=headers).status_code == (200 if is_open else status)


@contextmanager
def controller(url: str, port: int) -> Iterator[None]:
    given = environment(redis_url=url, metrics_port=port)
    with subprocess.Popen([*HEADGATE, "controller"], env=given, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert "steers every" in process.stdout.readline()
            yield
            process.terminate()
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


def test_a_controller_by_itself_shows_its_own(valkey: Server) -> None:
    port = free_port()
    with (
        controller(valkey.url, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client,
    ):
        shown = scrape(client)
    kinds = {family.name.removeprefix("headgate_").partition("_")[0] for family in shown.families}
    assert kinds == {"controller", "info"}


def test_a_controller_s_port_that_is_taken_is_named(valkey: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_headgate("controller", redis_url=valkey.url, metrics_port=port)
    fault = f"cannot listen on 127.0.0.1 port {port} (Address already in use)"
    message = f"headgate: {fault}: set HEADGATE_HOST or HEADGATE_METRICS_PORT\n"
    assert (ended.returncode, ended.stderr) == (2, message)
