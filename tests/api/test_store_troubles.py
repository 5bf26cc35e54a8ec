"""F-S8, F-S10: every node warns of a store that lost its policies or is out of memory; no answer shows its address."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from limiter.api_keys import new_key
from limiter.store import keys
from tests.support import eventually
from tests.support.command import run_headgate
from tests.support.live import LANES, Lane, LiveApi, ask, live
from tests.support.scraping import scrape
from tests.support.servers import Server, running

POLICIES = "policies: [{name: filed, match: {service: slow}, per: [customer], rate: 1/d, capacity: 10, max_debt: 100}]"
MADE = {"name": "made", "namespace": "tenant1", "match": {}, "rate": 5}
KEYS = {name: new_key(name, role, space) for name, role, space in [
    ("a", "admin", None), ("v", "viewer", None), ("bound", "admin", "tenant1"), ("other", "admin", "tenant2"),
]}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "policies.yaml"
    path.write_text(POLICIES)
    return path


@pytest.fixture
def nodes(valkey: Server, file: Path) -> Iterator[list[LiveApi]]:
    """Two that have a policy of the file and one made over the API."""
    with ExitStack() as stack:
        found = [stack.enter_context(live(valkey.url, file, lane=lane)) for lane in LANES]
        with found[0].client() as client:
            assert client.put("/v1/policies/made", params={"namespace": "tenant1"}, json=MADE).status_code == 201
        for node in found:
            eventually(lambda node=node: knows_both(node), what="both policies are in force")  # type: ignore[misc]
        yield found


def knows_both(node: LiveApi) -> bool:
    return policies(node) == 2


def policies(node: LiveApi) -> float:
    with node.client() as client:
        return scrape(client).value("headgate_policies")


def warnings(node: LiveApi) -> list[str]:
    with node.client() as client:
        found: list[str] = client.get("/readyz").json()["warnings"]
        return found


def losses(node: LiveApi) -> list[str]:
    return [warning for warning in warnings(node) if "lost its policies" in warning]


@pytest.mark.slow
def test_f_s10_every_node_warns_of_a_loss_until_it_is_acknowledged(
    valkey: Server, file: Path, nodes: list[LiveApi], caplog: pytest.LogCaptureFixture
) -> None:
    """One poll of eight warned, and policies made over the API were gone without a word."""
    valkey.client().flushall()
    for node in nodes:
        eventually(lambda node=node: losses(node), what="the loss is told")  # type: ignore[misc]
    with nodes[0].client() as client:
        eventually(lambda: scrape(client).value("headgate_policies") == 1, what="the file is put back")
        eventually(lambda: valkey.client().exists(keys.POLICIES_LOSS), what="the loss is kept")
        shown = client.get("/v1/store/loss").json()
        assert shown["lost"]
        assert shown["loss"]["policies"] == [{"namespace": "tenant1", "name": "made"}], "the file's own are put back"
        assert shown["loss"]["revision_before"] > shown["loss"]["revision_after"]
        assert scrape(client).value("headgate_store_loss") == 1
    assert "tenant1/made" in caplog.text, "the log names them"
    for _ in range(8):
        assert all(len(losses(node)) == 1 and "made over the API" in losses(node)[0] for node in nodes)
        assert not any("tenant1" in losses(node)[0] for node in nodes), "anybody may read warnings"
    with live(valkey.url, file) as late, late.client() as client:
        assert losses(late) == losses(nodes[0]), "a node that starts later tells the same"
        assert client.post("/v1/store/loss/acknowledge", json={}).json() == {"acknowledged": True}
        assert client.post("/v1/store/loss/acknowledge", json={}).json() == {"acknowledged": False}
        seen = client.get("/v1/store/loss").json()
        assert (seen["lost"], seen["acknowledged"]["who"]) == (False, "anybody")
        for node in (late, *nodes):
            eventually(lambda node=node: not losses(node), what="nobody warns any more")  # type: ignore[misc]
        assert scrape(client).value("headgate_store_loss") == 0
    assert not valkey.client().exists(keys.POLICIES_LOSS)


def test_f_s10_policies_that_a_second_flush_removed_are_named_too(valkey: Server, nodes: list[LiveApi]) -> None:
    for _ in range(2):
        valkey.client().flushall()
        for node in nodes:
            eventually(lambda node=node: losses(node), what="the loss is told")  # type: ignore[misc]
        eventually(lambda: valkey.client().exists(keys.POLICIES_LOSS), what="the loss is kept")
    with nodes[1].client() as client:
        assert client.get("/v1/store/loss").json()["loss"]["policies"] == [{"namespace": "tenant1", "name": "made"}]


def test_f_s10_a_second_loss_before_the_acknowledgement_is_named_too(valkey: Server, nodes: list[LiveApi]) -> None:
    """F-S10: only the first was named, and acknowledging it cleared both."""
    valkey.client().flushall()
    for node in nodes:
        eventually(lambda node=node: losses(node), what="the loss is told")  # type: ignore[misc]
    with nodes[0].client() as client:
        eventually(lambda: valkey.client().exists(keys.POLICIES_LOSS), what="the loss is kept")
        for name in ("two", "three"):
            assert client.put(f"/v1/policies/{name}", json={"name": name, "rate": 1}).status_code == 201
        for node in nodes:
            eventually(lambda node=node: policies(node) == 3, what="they are in force")  # type: ignore[misc]
        valkey.client().flushall()
        told = "lost its policies 2 times, first at"
        for node in nodes:
            eventually(lambda node=node: told in losses(node)[0], what="both are told")  # type: ignore[misc]

        def times_kept() -> object:
            return client.get("/v1/store/loss").json().get("loss", {}).get("times")

        eventually(lambda: times_kept() == 2, what="both are kept")
        shown = client.get("/v1/store/loss").json()["loss"]
        assert [policy["name"] for policy in shown["policies"]] == ["three", "two", "made"]
        assert (shown["times"], shown["more"]) == (2, 0)
        assert shown["when"] <= shown["last"]
        assert "3 made over the API are gone" in losses(nodes[0])[0]
        assert client.post("/v1/store/loss/acknowledge", json={}).json() == {"acknowledged": True}
        for node in nodes:
            eventually(lambda node=node: not losses(node), what="nobody warns any more")  # type: ignore[misc]
        assert client.get("/v1/store/loss").json()["acknowledged"]["loss"] == shown


def test_f_s10_an_older_copy_is_a_loss_too(valkey: Server, nodes: list[LiveApi]) -> None:
    copy = valkey.command("DUMP", keys.POLICIES_CURRENT)
    with nodes[0].client() as client:
        assert client.put("/v1/policies/newer", json={"name": "newer", "rate": 1}).status_code == 201
        eventually(lambda: scrape(client).value("headgate_policies") == 3, what="it is in force")
        valkey.command("RESTORE", keys.POLICIES_CURRENT, 0, copy, "REPLACE")
        eventually(lambda: losses(nodes[0]), what="the loss is told")
        eventually(lambda: client.get("/v1/store/loss").json()["lost"], what="the loss is kept")
        assert client.get("/v1/store/loss").json()["loss"]["policies"] == [{"namespace": "default", "name": "newer"}]


@pytest.mark.slow
def test_f_s10_the_command_line_shows_and_acknowledges_it(valkey: Server, nodes: list[LiveApi]) -> None:
    assert run_headgate("store", "loss", redis_url=valkey.url).returncode == 0
    valkey.client().flushall()
    eventually(lambda: valkey.client().exists(keys.POLICIES_LOSS), what="the loss is kept")
    told = run_headgate("store", "loss", redis_url=valkey.url)
    assert (told.returncode, "gone: tenant1/made" in told.stdout) == (1, True)
    assert run_headgate("store", "acknowledge", redis_url=valkey.url).stdout == "acknowledged\n"
    assert run_headgate("store", "acknowledge", redis_url=valkey.url).stdout == "there is nothing to acknowledge\n"
    for node in nodes:
        eventually(lambda node=node: not losses(node), what="nobody warns any more")  # type: ignore[misc]


def test_f_s10_only_an_admin_of_all_namespaces_acknowledges(valkey: Server, file: Path) -> None:
    entries = ",".join(entry for _, entry in KEYS.values())
    with live(valkey.url, file, api_keys=entries) as api, api.client() as client:

        def headers(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {KEYS[name][0]}"}

        made = client.put("/v1/policies/made", params={"namespace": "tenant1"}, json=MADE, headers=headers("a"))
        assert made.status_code == 201
        eventually(lambda: scraped(client, headers("a")) == 2, what="both are in force")
        valkey.client().flushall()
        eventually(lambda: valkey.client().exists(keys.POLICIES_LOSS), what="the loss is kept")
        path = "/v1/store/loss/acknowledge"
        assert client.get("/v1/store/loss").status_code == 401
        assert client.post(path, json={}).status_code == 401
        for name in ("v", "bound", "other"):
            assert client.post(path, json={}, headers=headers(name)).status_code == 403, name
        named = {name: client.get("/v1/store/loss", headers=headers(name)).json()["loss"]["policies"] for name in KEYS}
        both = [{"namespace": "tenant1", "name": "made"}]
        assert named == {"a": both, "v": both, "bound": both, "other": []}, "a bound key sees its own"
        assert client.post(path, json={}, headers=headers("a")).json() == {"acknowledged": True}


def scraped(client: httpx.Client, headers: dict[str, str]) -> float:
    lines = client.get("/metrics", headers=headers).text.splitlines()
    return float(next(line for line in lines if line.startswith("headgate_policies ")).split()[1])


@pytest.mark.parametrize("lane", LANES)
def test_f_s8_out_of_memory_is_called_so(valkey: Server, file: Path, lane: Lane) -> None:
    """`/readyz` said that the store does not answer."""
    with live(valkey.url, file, lane=lane) as api, api.client() as client:
        granted = client.post("/v1/acquire", json=ask("c1", work=1)).json()
        valkey.client().config_set("maxmemory", 1)
        try:
            eventually(lambda: warnings(api), what="it is told")
            (warning,) = warnings(api)
            assert warning.startswith("the store is out of memory: acquires are decided without it")
            shown = scrape(client)
            assert shown.value("headgate_store_out_of_memory") == 1
            assert shown.value("headgate_store_up") == 1
            assert client.post("/v1/acquire", json=ask("c1", work=1)).json()["degraded"]
            settled = client.post("/v1/settle", json={"reservation": granted["reservation"], "work": 2})
            assert settled.status_code == 200
            with live(valkey.url, file, lane=lane) as late:  # it starts all the same: nothing has to be written
                assert warnings(late) == [warning]
        finally:
            valkey.client().config_set("maxmemory", 0)
        eventually(lambda: not warnings(api), what="it is over")
        assert scrape(client).value("headgate_store_out_of_memory") == 0


@pytest.mark.parametrize("lane", LANES)
def test_the_address_of_the_store_is_shown_in_the_log_alone(
    tmp_path: Path, file: Path, lane: Lane, capfd: pytest.CaptureFixture[str]
) -> None:
    with running("valkey", tmp_path / "store") as server:
        with live(server.tcp_url, file, lane=lane) as api, api.client() as client:
            server.stop()
            bodies = [
                client.get("/v1/policies").text,
                client.put("/v1/policies/x", json={"name": "x", "rate": 1}).text,
                client.get("/v1/buckets").text,
                client.get("/v1/audit").text,
                client.get("/v1/store/loss").text,
                client.get("/v1/controller").text,
                client.post("/v1/acquire", json=ask("c1")).text,
            ]
            eventually(lambda: warnings(api), what="it is told")
            bodies.append(client.get("/readyz").text)
        with live(server.tcp_url, file, lane=lane) as early, early.client() as client:
            reasons = client.get("/readyz")
            assert reasons.status_code == 503
            bodies.append(reasons.text)
    for body in bodies:
        assert str(server.port) not in body
        assert "127.0.0.1" not in body
    assert sum("store_unavailable" in body for body in bodies) >= 5
    assert f"127.0.0.1:{server.port}" in capfd.readouterr().err, "the log says where"


SECRET = "policies: [{name: secret-contract, namespace: tenant-acme, match: {}, rate: 1}]"


@pytest.mark.parametrize("lane", LANES)
def test_differences_from_the_file_are_not_named_without_a_key(
    valkey: Server, tmp_path: Path, lane: Lane, capfd: pytest.CaptureFixture[str]
) -> None:
    """`/readyz` named tenants and their policies to anybody."""
    path = tmp_path / "policies.yaml"
    path.write_text(SECRET)
    with live(valkey.url, path, lane=lane) as api, api.client() as client:
        changed = {"name": "secret-contract", "namespace": "tenant-acme", "match": {}, "rate": 2}
        put = client.put("/v1/policies/secret-contract", params={"namespace": "tenant-acme"}, json=changed)
        assert put.status_code == 200
        eventually(lambda: warnings(api), what="the difference is told")
        (warning,) = warnings(api)
        assert warning.startswith("1 entry of the policy file differs from the store")
        assert "headgate policies diff" in warning
        assert "headgate policies apply --take-over" in warning
        assert not any(name in client.get("/readyz").text for name in ("acme", "contract"))
        owners = client.get("/v1/policies", params={"namespace": "tenant-acme"}).json()["owners"]
        assert owners == {"tenant-acme/secret-contract": "api"}, "whoever has a key sees who owns it"
    assert "policy tenant-acme/secret-contract in the file differs from the store" in capfd.readouterr().err


@pytest.mark.parametrize("lane", LANES)
def test_the_words_of_the_server_are_shown_in_the_log_alone(
    valkey: Server, file: Path, lane: Lane, capfd: pytest.CaptureFixture[str]
) -> None:
    """F-S11: the server's own words, with what anybody wrote at our key, went out as they came."""
    with live(valkey.url, file, lane=lane) as api, api.client() as client:
        valkey.client().set(keys.POLICIES_CURRENT, "foreign")
        with live(valkey.url, file, lane=lane) as late, late.client() as other:
            answers = [other.get("/readyz"), client.get("/v1/policies"), client.get("/v1/audit")]
            answers.append(client.put("/v1/policies/x", json={"name": "x", "rate": 1}))
        valkey.client().delete(keys.POLICIES_CURRENT)
    for answer in (answers[0], answers[1], answers[3]):
        assert answer.status_code == 503
        assert "the store answers with an error; the log of the node says which" in answer.json()["detail"]
    assert not any(word in answer.text for answer in answers for word in ("WRONGTYPE", "wrong kind", "hg:"))
    assert "wrong kind of value" in capfd.readouterr().err, "the log says it"
