"""The probe times calls that are answered and calls that are not."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from limiter.engine.policy_file import load_policy_file
from loadtest import probe
from loadtest.probe import Asker, Probed, Times
from tests.support import eventually
from tests.support.servers import free_port


class Node(BaseHTTPRequestHandler):
    """A node that grants, and cannot reach its store when it has to settle."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"reservation": "r1"}' if self.path == "/v1/acquire" else b"{}"
        self.send_response(200 if self.path == "/v1/acquire" else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Node) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def asked(address: str, times: int) -> list[Probed]:
    found: list[Probed] = []
    asker = Asker(address, found.append)
    for _ in range(times):
        asker.ask("t0")
    asker.close()
    return found


def test_each_call_is_timed_whatever_its_answer(address: str) -> None:
    found = asked(address, 2)
    assert [one.status for one in found] == [200, 503, 200, 503]
    assert all(0 < one.latency_ms < 5000 for one in found)


def test_a_node_that_is_not_there_is_asked_again() -> None:
    assert [one.status for one in asked(f"http://127.0.0.1:{free_port()}", 2)] == [0, 0]


def test_a_process_of_its_own_asks_until_the_block_ends(address: str, tmp_path: Path) -> None:
    file = tmp_path / "probed.jsonl"
    with probe.probing(file, [address, address]):
        eventually(lambda: file.exists() and len(probe.read(file)) >= 8, within_s=30)
    found = probe.read(file)
    assert {one.node for one in found} == {address}
    assert probe.read(file) == found, "it has ended"


def test_times_are_what_they_are() -> None:
    times = Times.of([float(ms) for ms in range(1, 1001)], late_ms=990.0)
    assert (times.count, times.late, times.slowest_ms) == (1000, 10, 1000.0)
    assert times.percentiles_ms == {50: 501.0, 99: 991.0, 99.9: 1000.0}
    assert Times.of([], late_ms=1.0).slowest_ms == 0.0


def test_its_policy_is_one(tmp_path: Path) -> None:
    (tmp_path / "policies.yaml").write_text("policies:\n" + probe.policy())
    load_policy_file(tmp_path / "policies.yaml")
