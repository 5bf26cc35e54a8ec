"""Connections that are made to cost: they do not recurse, do not pile up, and do not stay (F-H11 to F-H14, F-H17)."""

import logging
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from api.data import request_limits as limits
from api.transport.guard import UPGRADES_MAX, WAITING_BYTES_MAX
from limiter.api_keys import new_key
from tests.support import eventually
from tests.support.fleet import Process
from tests.support.live import HOST, Lane, LiveApi, Wire, ask, chunked, exchange, live, request, statuses
from tests.support.servers import Server, free_port

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
UNTYPED = b"POST /v1/batch HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
"""Refused at once, with an answer that is longer than itself."""
READ_MAX_BYTES = 262_144
"""The most bytes of one read from a socket."""


@pytest.mark.parametrize("path", ["/healthz", "/v1/acquire"])
def test_many_upgrades_in_a_row_are_ignored_one_by_one_and_too_many_end_the_connection(
    api: LiveApi, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F-H11"""
    with caplog.at_level(logging.WARNING):
        replies = exchange(api, UPGRADE.replace(b"/healthz", path.encode()) * 50)
        assert len(replies) == 51
        assert {reply.status for reply in replies} == ({200} if path == "/healthz" else {200, 405})
        # So many that it is closed: with what it still sends unread, the last answers may be lost on their way.
        with Wire(api) as wire:
            wire.send(UPGRADE.replace(b"/healthz", path.encode()) * 1200)
            assert len(wire.receive_all()) <= UPGRADES_MAX + 1
            assert wire.closed
    assert not caplog.records


def test_an_upgrade_with_a_body_is_served_with_it(api: LiveApi, customer: str) -> None:
    """F-H11: whether it comes at once or in pieces, with a length or in chunks."""
    wish = b"Connection: upgrade\r\nUpgrade: h2c\r\n"
    body = request(body=ask(customer, work=1)).partition(b"\r\n\r\n")[2]
    for whole in (request(body=body), chunked(body[:9], body[9:])):
        offer = whole.replace(b"Host: x\r\n", b"Host: x\r\n" + wish)
        assert statuses(exchange(api, offer * 3)) == [200, 200, 200, 200]
        pieces = [bytes([byte]) for byte in offer]
        assert statuses(exchange(api, *pieces)) == [200, 200]


@contextmanager
def process(store: Server, policies: Path, lane: Lane) -> Iterator[tuple[int, int]]:
    """A node as a process of its own: its port and its id."""
    port = free_port()
    node = Process("api", redis_url=store.url, policies=policies, port=port, fast_lane=lane == "fast")
    try:
        yield port, node.running.pid
    finally:
        node.end()


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("one", [HEALTH, b"GET / HTTP/1.1\r\nHost:\r\n\r\n", UPGRADE, b"\r\n\r\n" + HEALTH, UNTYPED])
def test_requests_in_a_row_take_no_more_memory_than_their_bytes(
    store: Server, policies: Path, lane: Lane, one: bytes
) -> None:
    """F-H12: 20 connections that send as many small requests as are taken, and read no answer."""
    connections = 20
    with process(store, policies, lane) as (port, pid):
        opened = [socket.create_connection((HOST, port)) for _ in range(connections)]
        before = memory_bytes(pid)
        highest = 0
        row = one * (READ_MAX_BYTES // len(one))
        for _ in range(20):
            for connection in opened:
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.send(row)
            highest = max(highest, memory_bytes(pid) - before)
        eventually(lambda: _is_healthy(port), what="it still answers others")
        highest = max(highest, memory_bytes(pid) - before)
        for connection in opened:
            connection.close()
    # Each keeps what one read brought beyond what may wait, and its answers, up to where writing pauses.
    assert highest < connections * 2 * (WAITING_BYTES_MAX + READ_MAX_BYTES)


def _is_healthy(port: int) -> bool:
    with socket.create_connection((HOST, port)) as connection:
        connection.sendall(HEALTH)
        connection.settimeout(10)
        return connection.recv(100).startswith(b"HTTP/1.1 200")


def test_many_requests_in_a_row_are_all_answered_in_order(api: LiveApi) -> None:
    """F-H12, F-H6"""
    paths = [b"/healthz", b"/nowhere", b"/v1/acquire"]
    row = b"".join(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % paths[number % 3] for number in range(3000))
    replies = exchange(api, row)
    assert statuses(replies) == [200, 404, 405] * 1000 + [200]


@pytest.mark.parametrize("seed", range(4))
def test_requests_of_all_kinds_in_a_row_and_in_pieces_are_answered_in_order(
    api: LiveApi, seed: int, customer: str
) -> None:
    """F-H12, F-H6: wherever the pieces end, and whatever the bodies hold."""
    draw = random.Random(seed)
    body = request(body=ask(customer, work=0)).partition(b"\r\n\r\n")[2]
    evil = b"\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n0\r\n\r\n"
    kinds: list[tuple[bytes, int]] = [
        (HEALTH, 200),
        (UPGRADE, 200),
        (b"\r\n\r\n" + HEALTH, 200),
        (request("/nowhere", evil), 404),
        (request("/v1/policies/x", evil, method="PUT"), 400),
        (request(body=body), 200),
        (chunked(body[:5], body[5:]), 200),
        (chunked(b"\r\n\r\n", evil, end=b"0;x=y\r\nTrailing: \r\n\r\n"), 400),
        (request("/v1/settle", b"{}"), 422),
    ]
    for _ in range(20):
        row = [draw.choice(kinds) for _ in range(draw.randrange(1, 30))]
        raw = b"".join(one for one, _ in row)
        cuts = sorted(draw.randrange(len(raw) + 1) for _ in range(draw.randrange(30)))
        parts = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        replies = exchange(api, *parts)
        assert statuses(replies) == [*(status for _, status in row), 200], f"seed {seed}"


def test_a_client_that_only_half_closed_gets_every_answer(api: LiveApi) -> None:
    """F-H12, F-H6: also to what still waits when it closes; what is not whole is dropped."""
    for rest in (b"", b"\r\n\r\n", b"GET /heal", request(body=b"{}")[:-1]):
        with Wire(api) as wire:
            wire.send(HEALTH * 200 + rest)
            wire.socket.shutdown(socket.SHUT_WR)
            replies = wire.receive_all()
        assert statuses(replies)[:200] == [200] * 200
        assert len(replies) == 200


@pytest.mark.parametrize("blank", [b"\r\n\r\n", b"\r\n", b"\n", b"\r", b"\r\n" * 1000])
@pytest.mark.parametrize("before", [b"", HEALTH, request(body=ask("blank", work=0))], ids=["first", "plain", "fast"])
def test_empty_lines_and_silence_are_an_idle_connection(
    store: Server, policies: Path, lane: Lane, blank: bytes, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-H13"""
    monkeypatch.setattr("api.server.KEEP_ALIVE_S", 1)
    with live(store.url, policies, lane=lane) as api, Wire(api) as wire:
        wire.send(before, blank)
        assert statuses(wire.receive_all()) == ([200] if before else [])


def test_empty_lines_for_ever_do_not_keep_a_connection(
    store: Server, policies: Path, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-H13"""
    monkeypatch.setattr("api.server.KEEP_ALIVE_S", 1)
    with live(store.url, policies, lane=lane) as api, Wire(api) as wire:
        wire.socket.settimeout(0.05)
        give_up_s = time.monotonic() + 15
        while _is_open(wire.socket):
            assert time.monotonic() < give_up_s


def _is_open(connection: socket.socket) -> bool:
    """Send another empty line; whether the server still listens."""
    try:
        connection.sendall(b"\r\n")
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_a_request_after_empty_lines_is_served(api: LiveApi, customer: str) -> None:
    """F-H13"""
    one = request(body=ask(customer, work=1))
    assert statuses(exchange(api, b"\r\n\r\n" + one, b"\r\n", one, b"\r\n" * 3 + HEALTH)) == [200] * 4


@pytest.mark.parametrize("name", ["Authorization", "authorization", "Content-Type", "X-Request-Id", "Host"])
def test_trailers_are_no_headers(store: Server, policies: Path, lane: Lane, name: str) -> None:
    """F-H14"""
    key, entry = new_key("boss", "admin")
    values = {"authorization": f"Bearer {key}", "content-type": "text/plain"}
    trailer = f"{name}: {values.get(name.lower(), 'trailing')}\r\n".encode()
    policy = b'{"rate":1}'
    with live(store.url, policies, lane=lane, api_keys=entry) as api:
        for path in (b"/v1/policies/trailing", b"/v1/acquire"):
            method = b"PUT" if b"policies" in path else b"POST"
            head = b"%b %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: %b\r\n" % (
                method, path, name.encode(),
            )  # fmt: skip
            head += b"Content-Type: application/json\r\n"
            replies = exchange(api, head + b"\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(policy), policy, trailer))
            assert statuses(replies) == [401, 200]
            assert replies[0].header("x-request-id") != "trailing"
        with api.client(headers={"Authorization": f"Bearer {key}"}) as client:
            assert client.get("/v1/policies/trailing").status_code == 404


@pytest.mark.parametrize(
    ("trailers", "answer"),
    [(b"X: y\r\n" * 5000, 431), (b"X: " + b"y" * 200_000, 431), (b";x" * 200_000, 400)],
    ids=["many", "long", "no trailer"],
)
def test_trailers_are_bounded_like_headers(api: LiveApi, trailers: bytes, answer: int) -> None:
    """F-H14"""
    replies = exchange(api, chunked(b"{}", end=b"0\r\n" + trailers), last=b"")
    assert statuses(replies) in ([answer], [])  # none: it was lost in the flood
    endless = exchange(api, chunked(end=b"0" + b";x" * 200_000), last=b"")
    assert statuses(endless) in ([431], [])


def test_a_body_in_too_many_chunks_is_refused(api: LiveApi) -> None:
    """F-H10: each chunk costs the same, however small it is."""
    (reply,) = exchange(api, chunked(*[b" "] * (limits.CHUNKS_MAX + 1)), last=b"")
    assert (reply.status, reply.json["reason"], reply.header("connection")) == (413, "too_long", "close")
    blank = b"\r\n\r\n" * (2 * limits.CHUNKS_MAX)
    assert statuses(exchange(api, chunked(blank), last=b"")) == [413]


@pytest.mark.parametrize("path", ["/v1/acquire", "/v1/settle", "/v1/batch", "/healthz"])
@pytest.mark.parametrize("length", [b"Content-Length: 0\r\n", b""])
def test_connection_close_without_a_body_closes(api: LiveApi, path: str, length: bytes) -> None:
    """F-H17"""
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n" % path.encode()
    for _ in range(2):  # the second one is known
        (reply,) = exchange(api, head + length + b"\r\n")
        assert (reply.status, reply.header("connection")) == (405 if path == "/healthz" else 400, "close")
