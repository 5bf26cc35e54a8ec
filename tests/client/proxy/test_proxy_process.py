"""`headgate proxy` as a process: what reaches the service, and what becomes of clients when either side dies (G7)."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate import Headgate, Throttled
from limiter.cli.proxy_metrics import ALL
from tests.support import eventually
from tests.support.command import run_headgate
from tests.support.live import live
from tests.support.proxies import RecordingNode, proxied, proxy_process, recording_node, silent_node
from tests.support.scraping import scrape
from tests.support.servers import Server, free_port

ROOT = Path(__file__).resolve().parents[3]
POLICIES = """
policies:
  - {name: slow, match: {service: slow}, per: [customer], rate: 1/d, capacity: 100, max_debt: 100}
  - {name: lent, match: {service: lent}, per: [customer], rate: 10000, capacity: 10000, local: {allowed: true}}
  - {name: drained, match: {service: drained}, rate: 1/d, capacity: 1}
"""


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    path = tmp_path / "policies.yaml"
    path.write_text(POLICIES)
    return path


@pytest.fixture
def node() -> Iterator[RecordingNode]:
    with recording_node() as found:
        yield found


def ask(service: str = "slow", customer: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"descriptor": {"service": service, "customer": customer}, **fields}


def balance(base: str, customer: str = "c1") -> float:
    """What is left in the slow bucket, without spending."""
    answer = httpx.post(f"{base}/v1/acquire", json=ask(customer=customer, work=0, dry_run=True), trust_env=False)
    (limit,) = answer.json()["limits"]
    return float(limit["balance"])


def test_a_request_that_claims_no_class_gets_the_proxy_s_default(node: RecordingNode) -> None:
    with proxied(node.base) as proxy, proxy.client() as client:
        client.post("/v1/acquire", json=ask())
        client.post("/v1/acquire", json=ask(criticality="critical"))
        client.post("/v1/batch", json={"operations": [{"op": "acquire", **ask()}]})
    assert [one["criticality"] for one in node.operations] == ["sheddable_plus", "critical", "sheddable_plus"]


def test_a_client_s_key_is_passed_on_and_others_get_one_of_the_proxy(node: RecordingNode) -> None:
    with proxied(node.base) as proxy, proxy.client() as client:
        client.post("/v1/acquire", json=ask(), headers={"idempotency-key": "order-17"})
        client.post("/v1/batch", json={"operations": [{"op": "acquire", **ask(), "idempotency_key": "order-18"}]})
        client.post("/v1/acquire", json=ask())
    keys = [one["idempotency_key"] for one in node.operations]
    assert keys[:2] == ["order-17", "order-18"]
    assert len(keys[2]) == 24


def test_the_service_sees_the_proxy_s_key_and_clients_need_theirs(node: RecordingNode) -> None:
    with proxied(node.base, api_key="hg_own", client_key="hg_theirs") as proxy, proxy.client() as client:
        refused = client.post("/v1/acquire", json=ask())
        wrong = client.post("/v1/acquire", json=ask(), headers={"authorization": "Bearer hg_own"})
        taken = client.post("/v1/acquire", json=ask(), headers={"authorization": "Bearer hg_theirs"})
    assert [one.status_code for one in (refused, wrong, taken)] == [401, 401, 200]
    assert refused.headers["www-authenticate"]
    assert node.authorizations == {"Bearer hg_own"}


def test_a_key_that_the_service_refuses_is_no_fault_of_the_client(node: RecordingNode) -> None:
    problem = {"type": "about:blank", "title": "Unauthorized", "status": 401, "detail": "", "reason": "unauthenticated"}
    node.answers.append((401, problem))
    with proxied(node.base) as proxy, proxy.client() as client:
        answer = client.post("/v1/acquire", json=ask())
    assert (answer.status_code, answer.json()["reason"]) == (503, "proxy_key")


def test_an_answer_without_a_decision_is_asked_once_more_for_a_first_attempt_only(node: RecordingNode) -> None:
    busy = {"type": "about:blank", "title": "Busy", "detail": "", "reason": "node_busy", "retry": "now",
            "retry_after_ms": 10, "status": 503}  # fmt: skip
    with proxied(node.base) as proxy, proxy.client() as client:
        node.answers.append((503, busy))
        assert client.post("/v1/acquire", json=ask()).status_code == 200
        node.answers.append((503, busy))
        assert client.post("/v1/acquire", json=ask(attempt=2)).status_code == 503
    assert [one.get("attempt", 1) for one in node.operations] == [1, 2, 2]


def test_a_service_that_refuses_everything_is_asked_for_little(node: RecordingNode) -> None:
    refusal = {"type": "about:blank", "title": "", "granted": False, "reason": "overload", "retry": "after",
               "retry_after_ms": 10, "limits": [], "status": 429}  # fmt: skip
    node.answers.extend([(429, refusal)] * 1000)
    with proxied(node.base) as proxy, proxy.client() as client:
        answers = [client.post("/v1/acquire", json=ask()) for _ in range(300)]
    reasons = Counter(answer.json()["reason"] for answer in answers)
    assert {answer.status_code for answer in answers} == {429}
    assert reasons["adaptive"] > 150
    assert len(node.operations) == reasons["overload"]


def test_what_is_known_to_be_refused_is_not_asked(valkey: Server, policies: Path) -> None:
    with live(valkey.url, policies) as api, proxied(api.base) as proxy, proxy.client() as client:
        assert client.post("/v1/acquire", json=ask("drained")).status_code == 200
        answers = [client.post("/v1/acquire", json=ask("drained")) for _ in range(20)]
        shown = scrape(client)
        asked, known = (
            shown.value("headgate_proxy_acquires_total", where=where, decision="refused")
            for where in ("service", "known")
        )
    assert {answer.status_code for answer in answers} == {429}
    assert {answer.json()["policy"] for answer in answers} == {"drained"}
    assert known >= 10
    assert asked + known == 20


def test_a_repeated_key_is_asked_even_where_a_refusal_is_known(valkey: Server, policies: Path) -> None:
    with live(valkey.url, policies) as api, proxied(api.base) as proxy, proxy.client() as client:
        key = {"idempotency-key": "job-1"}
        first = client.post("/v1/acquire", json=ask("drained"), headers=key)
        for _ in range(3):
            assert client.post("/v1/acquire", json=ask("drained")).status_code == 429
        again = client.post("/v1/acquire", json=ask("drained"), headers=key)
    assert (again.status_code, again.json()["reservation"]) == (200, first.json()["reservation"])


@pytest.mark.slow
def test_a_proxy_that_is_killed_and_started_again_debits_nobody_twice(valkey: Server, policies: Path) -> None:
    with live(valkey.url, policies) as api, proxy_process(api.base) as proxy:
        tokens = {}
        with proxy.client() as client:
            for number in range(5):
                key = {"idempotency-key": f"job-{number}"}
                answer = client.post("/v1/acquire", json=ask(customer=f"c{number}", work=10), headers=key)
                tokens[number] = answer.json()["reservation"]
        proxy.kill()
        proxy.start()
        with proxy.client() as client:
            for number in range(5):  # the clients did not hear, and ask again
                key = {"idempotency-key": f"job-{number}"}
                answer = client.post("/v1/acquire", json=ask(customer=f"c{number}", work=10), headers=key)
                assert answer.json()["reservation"] == tokens[number]
            assert balance(api.base) == pytest.approx(90, abs=0.1)
            settle = {"reservation": tokens[1], "work": 4}
            assert client.post("/v1/settle", json=settle).json()["adjusted"] == -6.0
            proxy.kill()
            proxy.start()
        with proxy.client() as client:
            assert client.post("/v1/settle", json=settle).json()["duplicate"]
        assert balance(api.base) == pytest.approx(96, abs=0.1)


@pytest.mark.slow
def test_a_reservation_of_the_proxy_s_lease_is_unknown_after_a_restart_and_keeps_its_charge(
    valkey: Server, policies: Path
) -> None:
    with live(valkey.url, policies) as api, proxy_process(api.base, "--local", "auto") as proxy:
        with proxy.client() as client:
            token = from_the_lease(client)
        proxy.kill()
        proxy.start()
        with proxy.client() as client:
            answer = client.post("/v1/settle", json={"reservation": token, "work": 1})
    assert (answer.status_code, answer.json()["reason"]) == (404, "unknown_reservation")


def from_the_lease(client: httpx.Client) -> str:
    """Ask until the proxy decides by itself; the token of that grant."""

    def asked() -> str | None:
        token = str(client.post("/v1/acquire", json=ask("lent", work=2)).json()["reservation"])
        return token if token.startswith("proxy.") else None

    found = eventually(asked, within_s=20.0, what="the proxy leases what is asked for often")
    assert found is not None
    return found


def test_what_is_asked_for_often_is_decided_by_a_lease_and_settled_at_the_proxy(valkey: Server, policies: Path) -> None:
    with live(valkey.url, policies) as api, proxied(api.base, is_auto=True) as proxy, proxy.client() as client:
        token = from_the_lease(client)
        settle = {"reservation": token, "work": 5}
        first, again = (client.post("/v1/settle", json=settle).json() for _ in range(2))
        assert (first["work"], first["adjusted"], first["duplicate"]) == (5.0, 3.0, False)
        assert (again["work"], again["adjusted"], again["duplicate"]) == (5.0, 3.0, True)
        other = client.post("/v1/settle", json={**settle, "work": 6})
        assert (other.status_code, other.json()["first"]["work"]) == (409, 5.0)
        keyed = client.post("/v1/acquire", json=ask("lent"), headers={"idempotency-key": "k"})
        assert not keyed.json()["reservation"].startswith("proxy."), "a process that may die must not remember keys"


async def test_the_client_library_calls_a_proxy_as_it_calls_a_node(valkey: Server, policies: Path) -> None:
    with live(valkey.url, policies) as api, proxied(api.base) as proxy:
        async with Headgate(proxy.base, deadline_ms=10_000) as gate:
            async with gate.acquire({"service": "slow", "customer": "c1"}, work=10) as grant:
                grant.settle(work=30)
            async with gate.lease({"service": "lent", "customer": "c1"}) as lease:
                assert lease.try_acquire(1)
            assert await gate.flush() == 0
            await gate.acquire({"service": "drained"}, work=1)
            with pytest.raises(Throttled, match="drained"):
                await gate.acquire({"service": "drained"}, work=1)
        assert balance(api.base) == pytest.approx(70, abs=0.1)


def test_leases_are_given_back_when_the_proxy_ends_in_order(valkey: Server, policies: Path) -> None:
    with (
        live(valkey.url, policies) as api,
        proxied(api.base, is_auto=True, weight=4.0) as proxy,
        api.client() as to_node,
    ):
        with proxy.client() as client:
            from_the_lease(client)
        (lease,) = to_node.get("/v1/leases").json()["leases"]
        assert lease["weight"] == 4.0, "it stands for many"
        proxy.stop()
        assert not to_node.get("/v1/leases").json()["leases"]


def test_another_node_takes_over_and_nobody_is_debited_twice(valkey: Server, policies: Path) -> None:
    with live(valkey.url, policies) as first, live(valkey.url, policies) as second:
        with proxied(f"{first.base},{second.base}") as proxy, proxy.client() as client:
            for number in range(10):
                assert client.post("/v1/acquire", json=ask(work=2)).status_code == 200
                if number == 4:
                    first.stop()
        assert balance(second.base) == pytest.approx(80, abs=0.1)


def test_a_proxy_stays_ready_when_its_nodes_go_away_and_says_so(valkey: Server, policies: Path) -> None:
    with live(valkey.url, policies) as api, proxied(api.base, deadline_s=0.3) as proxy, proxy.client() as client:
        assert client.post("/v1/acquire", json=ask()).status_code == 200
        assert client.get("/readyz").json()["warnings"] == []
        api.stop()

        def warnings() -> list[str]:
            assert client.post("/v1/acquire", json=ask()).status_code == 503
            answer = client.get("/readyz")
            assert answer.status_code == 200
            return list(answer.json()["warnings"])

        assert eventually(warnings) == ["no node of the service answers"]


def test_when_all_nodes_are_away_clients_are_told_within_the_deadline() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with (
        silent_node() as silent,
        proxied(f"{silent},{gone}", deadline_s=0.3) as proxy,
        proxy.client() as client,
        ThreadPoolExecutor(8) as threads,
    ):
        began_s = time.monotonic()
        operations = {"operations": [{"op": "acquire", **ask()}, {"op": "settle", "reservation": "r", "work": 1}]}
        calls = [("/v1/acquire", ask()), ("/v1/settle", {"reservation": "r", "work": 1}), ("/v1/batch", operations)]
        answers = list(threads.map(lambda call: client.post(call[0], json=call[1]), calls))
        assert time.monotonic() - began_s < 0.3 + 5.0
        assert client.get("/readyz").status_code == 503, "no node has answered yet"
        assert client.get("/healthz").status_code == 200
    assert [answer.status_code for answer in answers] == [503, 503, 200]
    told = [*(answer.json() for answer in answers[:2]), *answers[2].json()["results"]]
    assert {(one["status"], one["reason"], one["retry"]) for one in told} == {(503, "unavailable", "after")}


def test_more_than_the_queue_holds_is_refused_at_once_and_the_load_shows_it() -> None:
    with (
        silent_node() as silent,
        proxied(silent, queue_max=5, deadline_s=3.0) as proxy,
        proxy.client() as client,
        ThreadPoolExecutor(25) as threads,
    ):
        before = client.get("/load").json()
        sent = [threads.submit(client.post, "/v1/acquire", json=ask()) for _ in range(20)]
        eventually(lambda: client.get("/load").json()["waiting"] == 5)
        full = client.get("/load").json()
        answers = [one.result() for one in sent]
    assert before["waiting"] == 0
    assert full["waiting"] == 5
    assert full["load"] == 1.0
    reasons = Counter(answer.json()["reason"] for answer in answers)
    assert reasons == {"proxy_busy": 15, "unavailable": 5}
    refused = next(answer for answer in answers if answer.json()["reason"] == "proxy_busy")
    assert (refused.status_code, refused.json()["retry"]) == (503, "after")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.elapsed.total_seconds() < 3.0


def test_the_metrics_are_those_of_the_catalogue_and_the_page_lists_them(node: RecordingNode) -> None:
    with proxied(node.base) as proxy, proxy.client() as client:
        client.post("/v1/acquire", json=ask())
        shown = {family.name: (family.type, family.documentation) for family in scrape(client).families}
    assert shown == {definition.family: (definition.kind, definition.help) for definition in ALL}
    page = (ROOT / "docs" / "proxy.md").read_text()
    for definition in ALL:
        labels = ", ".join(f"`{label}`" for label in definition.labels)
        assert f"| `{definition.name}` | {definition.kind} | {labels} | {definition.help} |" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--upstream", "a:8080"], "--upstream: the address of a node looks like http://127.0.0.1:8080, not 'a:8080'"),
        (["--upstream", ","], "--upstream: name at least one node of the service, such as http://127.0.0.1:8080"),
        (
            ["--upstream", "http://a:1", "--host", "0.0.0.0"],
            (
                "--host is '0.0.0.0', which others can reach, and there is no --client-key: everybody could spend what "
                "the proxy's API key may. Set HEADGATE_PROXY_CLIENT_KEY, or listen on 127.0.0.1"
            ),
        ),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_listens(options: list[str], message: str) -> None:
    done = run_headgate("proxy", *options)
    assert (done.returncode, done.stderr) == (2, f"headgate: {message}\n")


def test_a_port_that_is_taken_is_said(node: RecordingNode) -> None:
    port = node.base.rpartition(":")[2]
    done = run_headgate("proxy", "--upstream", "http://127.0.0.1:1", "--port", port)
    assert done.returncode == 2
    assert "choose another --host or --port" in done.stderr
