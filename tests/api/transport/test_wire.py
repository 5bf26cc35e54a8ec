"""HTTP as it comes over the wire: in pieces, in rows, too much, too slow, and odd; the same in both lanes."""

import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from api.data import request_limits as limits
from api.server import bind
from limiter.settings import Settings
from tests.support import eventually
from tests.support.command import environment
from tests.support.dockerfile import healthcheck
from tests.support.live import GIVE_UP_S, HOST, Lane, LiveApi, Wire, ask, chunked, exchange, live, request, statuses
from tests.support.servers import Server, make_certificates

TYPE = b"Content-Type: application/json\r\n"


def test_a_connection_is_kept_and_used_again(api: LiveApi, customer: str) -> None:
    with Wire(api) as wire:
        for number in range(5):
            wire.send(request(body=ask(customer, work=1)))
            (reply,) = wire.receive()
            assert reply.json["limits"][0]["balance"] == pytest.approx(9 - number, abs=0.1)
            assert reply.header("connection") is None


@pytest.mark.parametrize("hosts", [(), ("x", "x"), ("x", "y")], ids=["none", "twice", "two"])
def test_http_1_1_needs_one_host(api: LiveApi, customer: str, hosts: tuple[str, ...]) -> None:
    """RFC 9112, 3.2"""
    lines = b"".join(b"Host: %b\r\n" % host.encode() for host in hosts)
    for one in (request(body=ask(customer)), b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"):
        (reply,) = exchange(api, one.replace(b"Host: x\r\n", lines))
        assert (reply.status, reply.json["reason"], reply.header("connection")) == (400, "host", "close")
    assert exchange(api, b"GET /healthz HTTP/1.0\r\n\r\n")[0].status == 200


def test_two_idempotency_keys_are_none(api: LiveApi, customer: str) -> None:
    headers = [("Content-Type", "application/json"), ("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    reply = exchange(api, request(body=ask(customer), headers=headers))[0]
    assert (reply.status, reply.json["detail"]) == (400, "Idempotency-Key: found it twice; allowed: one")


def test_answers_have_uvicorn_s_own_headers(api: LiveApi, customer: str) -> None:
    reply = exchange(api, request(body=ask(customer)))[0]
    assert [name for name, _ in reply.headers[:2]] == ["date", "server"]
    assert reply.header("server") == "uvicorn"


def test_pipelined_requests_are_answered_in_order(api: LiveApi, customer: str) -> None:
    """F-H6"""
    row = [request(body=ask(f"{customer}-{number}", work=number)) for number in range(10)]
    replies = exchange(api, b"".join(row))
    assert [reply.json["charged"] for reply in replies[:-1]] == [float(number) for number in range(10)]
    assert replies[-1].json == {"status": "ok"}


def test_bad_requests_in_a_row_cost_the_others_nothing(api: LiveApi, customer: str) -> None:
    """F-H6"""
    unknown = request("/v1/settle", body=b'{"reservation":"x","work":1}')
    kinds: list[tuple[bytes | dict[str, Any], int]] = [
        (ask(customer, work=0), 200),
        (b"{", 400),
        (b'{"descriptor":{}}', 422),
        (b"", 400),
    ]
    row = [(request(body=body), status) for body, status in kinds * 5]
    for at in (0, 3, 7, 20):
        row.insert(at, (unknown, 404))
    replies = exchange(api, b"".join([raw for raw, _ in row]))
    assert statuses(replies) == [*(status for _, status in row), 200]


def test_connections_that_end_at_once_keep_no_answer_from_others(api: LiveApi, customer: str) -> None:
    """Answers of one turn of the loop are sent together: F-H9"""
    one = request(body=ask(customer, work=0))
    with Wire(api) as staying:
        for number in range(50):
            with Wire(api) as leaving:
                leaving.send(one * (1 + number % 3))
                staying.send(one)
                leaving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            assert statuses(staying.receive()) == [200]


def test_lanes_change_within_a_row(api: LiveApi, customer: str) -> None:
    """F-H6"""
    health = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    own = request(body=ask(customer, work=1))
    replies = exchange(api, own + own + health + own + request("/v1/nowhere") + own)
    assert statuses(replies) == [200, 200, 200, 200, 404, 200, 200]
    assert replies[2].json == {"status": "ok"}
    assert replies[5].json["limits"][0]["balance"] == pytest.approx(6, abs=0.1)


def test_garbage_after_a_request_is_answered_after_it(api: LiveApi, customer: str) -> None:
    """F-H6"""
    replies = exchange(api, request(body=ask(customer)) + b"\x16\x03\x01 garbage\r\n\r\n", last=b"")
    assert statuses(replies) == [200, 400]
    assert replies[1].header("content-type") == "application/problem+json"
    assert replies[1].header("connection") == "close"


def test_a_request_byte_by_byte_is_served(api: LiveApi, customer: str) -> None:
    whole = request(body=ask(customer))
    assert statuses(exchange(api, *(whole[at : at + 1] for at in range(len(whole))))) == [200, 200]


@pytest.mark.parametrize("cut", [1, 10, 25, 60, -3, -1])
def test_a_request_in_two_pieces_is_served(api: LiveApi, cut: int, customer: str) -> None:
    whole = request(body=ask(customer))
    with Wire(api) as wire:
        wire.send(whole[:cut])
        wire.send(whole[cut:])
        assert statuses(wire.receive()) == [200]


def test_a_large_body_is_served(api: LiveApi, customer: str) -> None:
    body = b" " * (1_048_576 - 200) + request(body=ask(customer)).partition(b"\r\n\r\n")[2]
    assert statuses(exchange(api, request(body=body))) == [200, 200]


@pytest.mark.parametrize("size", [1_048_577, 5_000_000])
def test_an_oversized_body_is_refused_and_the_connection_closed(api: LiveApi, size: int) -> None:
    """F-H1"""
    (reply,) = exchange(api, request(body=b" " * size), last=b"")
    assert (reply.status, reply.header("connection")) == (413, "close")
    assert reply.json["detail"] == "the body is longer than 1048576 bytes"


def test_an_oversized_body_is_refused_before_it_is_sent(api: LiveApi) -> None:
    """F-H1"""
    with Wire(api) as wire:
        wire.send(b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\n" + TYPE + b"Content-Length: 99999999999\r\n\r\n")
        (reply,) = wire.receive()
        assert reply.status == 413


def test_a_chunked_body_is_served(api: LiveApi, customer: str) -> None:
    """F-H1"""
    body = request(body=ask(customer)).partition(b"\r\n\r\n")[2]
    assert statuses(exchange(api, chunked(body[:10], body[10:]))) == [200, 200]


def test_an_oversized_chunked_body_is_refused(api: LiveApi) -> None:
    """F-H1"""
    replies = exchange(api, chunked(*[b" " * 100_000] * 20), last=b"")
    assert statuses(replies) == [413]


def test_a_broken_chunk_is_refused(api: LiveApi) -> None:
    assert statuses(exchange(api, chunked(b"abc", end=b"zz\r\n"), last=b"")) == [400]


def test_both_a_length_and_chunks_are_refused(api: LiveApi) -> None:
    smuggled = (
        b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    assert statuses(exchange(api, smuggled))[0] == 400


@pytest.mark.parametrize(
    "part",
    [
        b"POST /v1/acq",
        b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\nContent-Le",
        b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\n" + TYPE + b"Content-Length: 10\r\n\r\n",
        b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\n" + TYPE + b"Content-Length: 10\r\n\r\n{",
        b"PUT /v1/policies/x HTTP/1.1\r\nHost: x\r\n" + TYPE + b"Content-Length: 10\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_arrive_is_given_up(api: LiveApi, part: bytes) -> None:
    """F-H1: the test's servers wait a second."""
    (reply,) = exchange(api, part, last=b"")
    assert (reply.status, reply.header("connection")) == (408, "close")
    assert reply.json["detail"] == "the request did not arrive in time"


@pytest.mark.parametrize(
    "headers",
    [
        [("X", "y")] * (limits.HEADERS_MAX + 1),
        [("X", "y" * limits.HEAD_BYTES_MAX)],
        [(f"X{number}", "y" * 1000) for number in range(70)],
        [("X", "y" * 3_000_000)],
    ],
    ids=["many", "long", "both", "endless"],
)
def test_too_much_head_is_refused(api: LiveApi, headers: list[tuple[str, str]], customer: str) -> None:
    replies = exchange(api, request(body=ask(customer), headers=headers), last=b"")
    assert statuses(replies)[:1] in ([431], [])  # none: the answer was lost in the flood
    if headers[0][1] == "y":
        assert replies[0].json["reason"] == "head_too_long"


def test_an_endless_url_is_refused(api: LiveApi) -> None:
    assert statuses(exchange(api, b"POST /v1/acquire?" + b"x" * 70_000 + b" HTTP/1.1\r\n", last=b"")) == [431]


def test_as_many_headers_as_allowed_are_taken(api: LiveApi, customer: str) -> None:
    headers = [("X", "y")] * (limits.HEADERS_MAX - 3)
    assert statuses(exchange(api, request(body=ask(customer), headers=headers)))[0] == 200


def test_expect_is_answered_with_continue(api: LiveApi, customer: str) -> None:
    whole = request(body=ask(customer), headers=[("Expect", "100-continue")])
    head, _, body = whole.partition(b"\r\n\r\n")
    with Wire(api) as wire:
        wire.send(head + b"\r\n\r\n")
        assert wire.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.send(body)
        assert statuses(wire.receive()) == [200]


def test_http_1_0_is_answered_and_closed(api: LiveApi, customer: str) -> None:
    (reply,) = exchange(api, request(body=ask(customer), version="1.0"), last=b"")
    assert (reply.status, reply.header("connection")) == (200, "close")


def test_connection_close_is_honoured(api: LiveApi, customer: str) -> None:
    (reply,) = exchange(api, request(body=ask(customer), headers=[("Connection", "close")]), last=b"")
    assert (reply.status, reply.header("connection")) == (200, "close")


def test_nothing_after_connection_close_is_served(api: LiveApi, customer: str) -> None:
    closing = request(body=ask(customer), headers=[("Connection", "close")])
    assert statuses(exchange(api, closing + request(body=ask(customer)), last=b"")) == [200]


def test_a_half_closed_client_gets_its_answers(api: LiveApi, customer: str) -> None:
    row = request(body=ask(customer, work=1)) + request(body=ask(customer, work=2))
    with Wire(api) as wire:
        wire.send(row)
        wire.socket.shutdown(socket.SHUT_WR)
        replies = wire.receive_all()
    assert [reply.json["charged"] for reply in replies] == [1.0, 2.0]


def test_a_half_closed_client_with_half_a_request_is_closed(api: LiveApi, customer: str) -> None:
    with Wire(api) as wire:
        wire.send(request(body=ask(customer))[:-5])
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.receive_all() == []


def test_a_client_that_does_not_read_is_waited_for(
    store: Server, policies: Path, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flow control: answers pile up on neither side, and none is lost."""
    monkeypatch.setattr("api.server.bind", _bind_with_small_buffers)
    operations = [{"op": "settle", "reservation": "x", "work": 1}] * 100
    one, count = request("/v1/batch", {"operations": operations}), 200
    with live(store.url, policies, lane=lane) as api, Wire(api, buffer_bytes=4096) as wire:
        wire.socket.settimeout(0.5)
        sent = 0
        try:
            while sent < count * len(one):
                sent += wire.socket.send((one * 2)[sent % len(one) :][: len(one)])
        except TimeoutError:
            pass  # the server has stopped reading
        assert sent < count * len(one)
        wire.socket.settimeout(GIVE_UP_S)
        replies = wire.receive(sent // len(one))
    assert len(replies) == sent // len(one) > 3
    assert {(reply.status, len(reply.json["results"])) for reply in replies} == {(200, 100)}


UNREAD = request("/v1/batch", {"operations": [{"op": "settle", "reservation": "x", "work": 1}] * 100})
"""Its answer is much longer than itself."""


def test_a_client_that_never_reads_is_dropped(
    store: Server, policies: Path, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-H1: what it was sent is not kept for it for ever."""
    monkeypatch.setattr("api.server.bind", _bind_with_small_buffers)
    with (
        live(store.url, policies, lane=lane, body_timeout_s=0.5) as api,
        Wire(api, buffer_bytes=4096) as wire,
        pytest.raises((ConnectionResetError, BrokenPipeError)),
    ):
        wire.socket.sendall(UNREAD * 200)


@pytest.mark.parametrize("count", [4, 200], ids=["few answers", "more than is kept"])
def test_a_client_that_never_reads_does_not_hold_up_a_shutdown(
    store: Server, policies: Path, lane: Lane, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-H8"""
    monkeypatch.setattr("api.server.bind", _bind_with_small_buffers)
    with live(store.url, policies, lane=lane) as api, Wire(api, buffer_bytes=4096) as wire:
        _ask_and_never_read(wire, count=count)
        began_s = time.monotonic()
        api.stop()
        assert time.monotonic() - began_s < 8


def _ask_and_never_read(wire: Wire, *, count: int) -> None:
    """Send requests, until all are sent or the server takes no more: it has to be stuck, and not merely slow."""
    wire.socket.settimeout(2)
    with suppress(TimeoutError):
        wire.socket.sendall(UNREAD * count)


def _bind_with_small_buffers(settings: Settings) -> list[socket.socket]:
    sockets = bind(settings)
    for bound in sockets:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return sockets


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
def test_other_methods_on_the_data_plane_are_refused(api: LiveApi, method: str) -> None:
    connection = http.client.HTTPConnection(HOST, api.port, timeout=GIVE_UP_S)
    connection.request(method, "/v1/acquire")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["allow"]) == (405, "OPTIONS, POST")
    assert bool(answer.read()) == (method != "HEAD")
    connection.close()


def test_options_lists_the_methods(api: LiveApi) -> None:
    with api.client() as client:
        assert client.options("/v1/acquire").headers["allow"] == "OPTIONS, POST"
        answer = client.options("/v1/policies/x")
        assert (answer.status_code, answer.headers["allow"]) == (204, "DELETE, GET, HEAD, OPTIONS, PATCH, PUT")
        assert client.options("/nowhere").status_code == 404


def test_head_is_get_without_a_body(api: LiveApi) -> None:
    with api.client() as client:
        head, get = client.head("/healthz"), client.get("/healthz")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


def test_an_upgrade_that_is_not_offered_is_no_way_around(api: LiveApi, customer: str) -> None:
    headers = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Content-Type", "application/json")]
    assert statuses(exchange(api, request(body=ask(customer), headers=headers))) == [200, 200]


def test_an_offer_of_http_2_is_ignored(api: LiveApi, customer: str) -> None:
    """Java's client and curl --http2 send this by default."""
    offer = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQA")]
    whole = request(body=ask(customer, work=1), headers=[*offer, ("Content-Type", "application/json")])
    assert statuses(exchange(api, whole + whole)) == [200, 200, 200]
    assert statuses(exchange(api, *(whole[at : at + 50] for at in range(0, len(whole), 50)))) == [200, 200]


def test_connect_is_refused(api: LiveApi) -> None:
    assert statuses(exchange(api, b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n", last=b"")) == [400]


def test_clients_that_go_away_leave_nothing_behind(api: LiveApi, customer: str) -> None:
    """F-H9"""
    before = api.tasks()
    for number in range(50):
        with Wire(api) as wire:
            wire.send(request(body=ask(customer, work=0))[: None if number % 2 else -7])
            # A reset, not an orderly end.
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    eventually(lambda: api.tasks() <= before, what="as many tasks as before")
    assert statuses(exchange(api, request(body=ask(customer)))) == [200, 200]


def test_idle_connections_are_closed(
    store: Server, policies: Path, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.KEEP_ALIVE_S", 1)
    with live(store.url, policies, lane=lane) as api, Wire(api) as silent, Wire(api) as wire:
        wire.send(request(body=ask("idle")))
        assert statuses(wire.receive_all()) == [200]
        assert silent.receive_all() == []


def test_tls_is_served_by_both_lanes(store: Server, policies: Path, lane: Lane, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=str(made.authority))
    with (
        live(store.url, policies, lane=lane, tls_certificate=made.certificate, tls_key=made.key) as api,
        Wire(api, context) as wire,
    ):
        assert api.base.startswith("https://")
        wire.send(request(body=ask("tls", work=1)) + request(body=ask("tls", work=2)))
        assert [reply.json["charged"] for reply in wire.receive(2)] == [1.0, 2.0]
        wire.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + request(body=ask("tls", work=3)))
        assert statuses(wire.receive(2)) == [200, 200]


def test_the_health_check_of_the_image_asks_over_tls_where_the_api_serves_it(
    store: Server, policies: Path, lane: Lane, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path)
    check = [sys.executable, *healthcheck()[1:]]

    def status(**settings: str) -> int:
        given = environment(**settings)
        return subprocess.run(check, env=given, capture_output=True, timeout=30, check=False).returncode

    with live(store.url, policies, lane=lane, tls_certificate=made.certificate, tls_key=made.key) as api:
        port = str(api.port)
        assert status(port=port, tls_certificate=str(made.certificate), tls_key=str(made.key)) == 0
        assert status(host="0.0.0.0", port=port, tls_certificate=str(made.certificate)) == 0
        assert status(port=port) == 1, "in plain text nobody answers"
    assert status(port=port, tls_certificate=str(made.certificate)) == 1, "nobody is there any more"
    assert status(port="tcp://10.0.0.1:8080") == 1


def test_the_access_log_has_a_line_for_each_request_without_its_query(
    store: Server, policies: Path, lane: Lane, capfd: pytest.CaptureFixture[str]
) -> None:
    with live(store.url, policies, lane=lane, access_log=True) as api:
        exchange(api, request(body=ask("logged")), request("/v1/acquire?key=hg_secret&evil=%0a", b"{"))
        exchange(api, request("/v1/%3fkey=x?key=hg_secret", b"{"), b"GET /healthz?hg_secret HTTP/1.0\r\n\r\n", last=b"")
    lines = [line for line in capfd.readouterr().err.splitlines() if "headgate.access" in line]
    told = [re.sub(r"in [0-9.]+ ms", "in time", line.partition("headgate.access: 127.0.0.1:")[2]) for line in lines]
    assert [line.partition(" ")[2].partition(" (request ")[0] for line in told] == [
        "POST /v1/acquire 200 in time",
        "POST /v1/acquire 400 in time: malformed",
        "GET /healthz 200 in time",
        "POST /v1/%3Fkey%3Dx 404 in time: no_such_path",
        "GET /healthz 200 in time",
    ]


def test_the_access_log_names_the_policy_that_refused_and_the_request(
    store: Server, policies: Path, lane: Lane, capfd: pytest.CaptureFixture[str]
) -> None:
    with live(store.url, policies, lane=lane, access_log=True, log_format="json") as api:
        greedy = ask("refused", work=100)
        exchange(api, *[request(body=greedy, headers=(("X-Request-Id", "one"),))] * 2, b"nonsense\r\n\r\n", last=b"")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "headgate.access" in line]
    refused = next(line for line in reversed(lines) if line["path"] == "/v1/acquire")
    odd = next(line for line in lines if line["path"] == "-")
    assert (refused["status"], refused["policy"], refused["request_id"]) == (429, "slow", "one")
    assert refused["duration_ms"] > 0
    assert (odd["method"], odd["status"], odd["reason"]) == ("-", 400, "not_http")
