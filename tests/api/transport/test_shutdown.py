"""Ending in order (F-H8): no request is answered with an error, none is lost, and the exit status is 0."""

import json
import os
import random
import signal
import socket
import subprocess
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support import eventually
from tests.support.command import children, started_headgate
from tests.support.live import HOST, POLICIES, Lane, LiveApi, Wire, ask, live, request, statuses
from tests.support.servers import Server, free_port


class Load:
    """Clients that ask without pause, and connect again whenever a connection ends, until nobody is there.

    Half of them make a connection for each request, so that there is always somebody at the door.

    What a client has sent and got no answer to is lost, however the connection ended.
    """

    def __init__(self, port: int, clients: int) -> None:
        self.port = port
        self.answered = 0
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        outcomes: Counter[str] = Counter()
        while not outcomes["refused"]:
            try:
                connection = socket.create_connection((HOST, self.port), timeout=10)
            except ConnectionRefusedError:
                outcomes["refused"] += 1
            except OSError as error:
                outcomes[f"not connected: {error!r}"] += 1
            else:
                with connection:
                    self._use(connection, draw, outcomes, keep="close" if number % 2 else "keep-alive")
        with self._lock:
            self.outcomes += outcomes

    def _use(self, connection: socket.socket, draw: random.Random, outcomes: Counter[str], *, keep: str) -> None:
        headers = [("Content-Type", "application/json"), ("Connection", keep)]
        while True:
            try:
                body = ask(f"load-{draw.randrange(1000)}", "orders", work=1)
                raw = self._exchange(connection, request(body=body, headers=headers))
            except OSError as error:
                outcomes[f"lost: {error!r}"] += 1
                return
            outcomes[raw[9:12].decode() if _whole(raw) else f"lost: {raw!r}"] += 1
            self.answered += 1
            if b"connection: close" in raw or not _whole(raw):
                return

    def _exchange(self, connection: socket.socket, asked: bytes) -> bytes:
        connection.sendall(asked)
        raw = b""
        while not _whole(raw):
            data = connection.recv(65_536)
            if not data:
                break
            raw += data
        return raw

    def join(self) -> Counter[str]:
        for thread in self._threads:
            thread.join(30)
        return self.outcomes


def _whole(raw: bytes) -> bool:
    head, end, body = raw.partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"-1") if end else -1
    return len(body) == length


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_under_load_loses_no_request(store: Server, policies: Path, lane: Lane, workers: int) -> None:
    """F-H8"""
    port = free_port()
    settings = {"port": port, "workers": workers, "redis_url": store.url, "policies": policies, "deadline_ms": 2000}
    with started_headgate("api", **settings, fast_lane=lane == "fast") as (process, printed):
        assert printed[0].startswith("headgate "), process.stderr.read() if process.stderr else ""
        load = Load(port, clients=32)
        eventually(lambda: load.answered > 200, what="load is on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        outcomes = load.join()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    # Late connections were refused before any request was read; every request that was read was answered.
    assert outcomes.pop("refused") == 32
    assert set(outcomes) <= {"200", "429"}, outcomes


def test_requests_in_flight_are_answered_and_their_connections_closed(
    store: Server, policies: Path, lane: Lane
) -> None:
    """F-H8"""
    with live(store.url, policies, lane=lane) as api, Wire(api) as early, Wire(api) as late, Wire(api) as idle:
        early.send(request(body=ask("early")))
        assert statuses(early.receive()) == [200]
        late.send(request(body=ask("late"))[:-5])
        api.begin_to_stop()
        eventually(lambda: _refuses(api), what="no new connections")
        # On its way while the door closes: served, and told to go.
        early.send(request(body=ask("early")))
        late.send(request(body=ask("late"))[-5:])
        for wire in (early, late):
            (reply,) = wire.receive_all()
            assert (reply.status, reply.header("connection")) == (200, "close")
        assert idle.receive_all() == []


def _refuses(api: LiveApi) -> bool:
    try:
        socket.create_connection((HOST, api.port), timeout=0.05).close()
    except ConnectionRefusedError:
        return True
    except TimeoutError:  # turned away, but still open for those who are at the door
        return False
    return False


def test_up_brings_its_store_policies_and_a_line_to_try(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(POLICIES)
    port = free_port()
    with started_headgate("up", port=port, data_dir=tmp_path, policies=file) as (process, printed):
        assert printed[1].split()[:2] == ["store", "Valkey"]
        assert printed[2].startswith(f"  api    http://127.0.0.1:{port} (")
        assert "no API keys" in printed[2]
        command = printed[3].removeprefix("  try    ").strip()
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20, check=True)
        head, _, body = ran.stdout.partition("\n\n")
        assert head.startswith("HTTP/1.1 200")
        assert json.loads(body)["limits"][0]["policy"] == "reads"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_a_worker_that_dies_is_replaced(store: Server, policies: Path) -> None:
    port = free_port()
    settings = {"port": port, "workers": 2, "redis_url": store.url, "policies": policies}
    with started_headgate("api", **settings) as (process, _):
        workers = children(process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        eventually(lambda: len(children(process.pid)) == 2 and workers[0] not in children(process.pid))
        for _ in range(10):
            assert httpx.get(f"http://{HOST}:{port}/healthz", trust_env=False).status_code == 200
        process.kill()
        process.wait()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers[1:]), what="workers end too")


def test_a_bad_policy_file_keeps_everything_from_listening(store: Server, tmp_path: Path) -> None:
    """F-P1"""
    file = tmp_path / "policies.yaml"
    file.write_text("policies: [{name: x, rate: fast}]")
    port = free_port()
    with started_headgate("api", port=port, redis_url=store.url, policies=file) as (process, printed):
        assert printed == [""] * 4
        assert process.wait(timeout=20) == 1
        assert process.stderr is not None
        told = process.stderr.read()
    assert told.startswith(f"headgate: {file}: policy 'x', rate: found 'fast'; allowed: ")
    assert told.count("\n") == 1


def test_a_port_in_use_is_said_in_one_line(store: Server) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started_headgate("api", port=port, redis_url=store.url) as (process, _):
            assert process.wait(timeout=20) == 2
            assert process.stderr is not None
            told = process.stderr.read()
    assert told == (
        f"headgate: cannot listen on 127.0.0.1 port {port} (Address already in use): "
        "set HEADGATE_HOST or HEADGATE_PORT\n"
    )


def test_a_node_starts_without_its_store_and_finds_it_later(policies: Path, tmp_path: Path, lane: Lane) -> None:
    """F-S2"""
    server = Server("valkey", tmp_path, {}, port=free_port())
    url = f"redis://{HOST}:{server.port}"
    with live(url, policies, lane=lane) as api, api.client() as client:
        assert client.get("/healthz").status_code == 200
        not_ready = client.get("/readyz")
        assert (not_ready.status_code, not_ready.json()["reason"]) == (503, "not_ready")
        assert not_ready.json()["reasons"]
        away = client.get("/v1/policies")
        assert (away.status_code, away.json()["reason"]) == (503, "store_unavailable")
        assert away.json()["type"].endswith("#temporary-reduced-capacity")
        assert away.headers["retry-after"] == "1"
        granted = client.post("/v1/acquire", json=ask("early"))
        assert (granted.status_code, granted.json()["degraded"]) == (200, True)
        server.start()
        try:
            eventually(lambda: client.get("/readyz").status_code == 200, what="ready")
            eventually(lambda: client.post("/v1/acquire", json=ask("later")).json()["degraded"] is False)
        finally:
            server.stop()
