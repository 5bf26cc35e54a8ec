"""Bytes that nobody should send to the fast lane: no hang, no 5xx, nothing left behind."""

import random
import socket
from contextlib import suppress

import pytest

from tests.support import eventually
from tests.support.live import HOST, Lane, LiveApi, Reply, Wire, ask, exchange, request, statuses

TOKENS = [
    b"POST /v1/acquire HTTP/1.1\r\n", b"POST /v1/settle HTTP/1.1\r\n", b"POST /v1/batch HTTP/1.1\r\n", b"GET /",
    b"\r\n", b"\r\n\r\n", b"\n", b"Host: x\r\n", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n",
    b"Content-Length: 18446744073709551616\r\n", b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n",
    b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"{}",
    b'{"descriptor":{"a":"b"}}', b"\x00", b"\xff" * 10, b":", b" ", b"HTTP/1.1", b"Authorization: Bearer x\r\n",
    b'{"operations":[', b"]}", b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\nContent-Length: 24\r\n\r\n",
    b'{"descriptor":{"a":"b"}}', b"CONNECT x:1 HTTP/1.1\r\n\r\n", b"x" * 1000,
]  # fmt: skip


def noise(draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return draw.randbytes(draw.randrange(1, 300))
    raw = b"".join(draw.choice(TOKENS) for _ in range(draw.randrange(1, 12)))
    if draw.random() < 0.5:
        raw = request(body=ask("fuzz", work=0)) + raw
    return raw


def replies_to(api: LiveApi, raw: bytes, draw: random.Random) -> list[Reply]:
    with Wire(api) as wire:
        for _ in range(draw.randrange(1, 4)):
            cut = draw.randrange(len(raw) + 1)
            wire.send(raw[:cut])
            raw = raw[cut:]
        wire.send(raw)
        with suppress(OSError):  # closed already
            wire.socket.shutdown(socket.SHUT_WR)
        return wire.receive_all()  # fails if the server does not close within its time


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_answered_or_closed(both: dict[Lane, LiveApi], seed: int) -> None:
    api = both["fast"]
    draw = random.Random(seed)
    before = api.tasks()
    for _ in range(250):
        replies = replies_to(api, noise(draw), draw)
        assert all(100 <= reply.status < 500 for reply in replies), statuses(replies)
    eventually(lambda: api.tasks() <= before, what="no task is left over")
    eventually(lambda: connections(api) == 0, what="no connection is left over")
    assert statuses(exchange(api, request(body=ask("after")))) == [200, 200]


def connections(api: LiveApi) -> int:
    """The number of connections that the kernel has open to the server."""
    with open("/proc/net/tcp", encoding="ascii") as table:  # noqa: PTH123
        port = f"0100007F:{api.port:04X}"
        return sum(1 for line in table if line.split()[1] == port and line.split()[3] == "01")


def test_many_idle_and_half_open_connections_do_no_harm(both: dict[Lane, LiveApi]) -> None:
    api = both["fast"]
    opened = [socket.create_connection((HOST, api.port)) for _ in range(200)]
    for number, connection in enumerate(opened):
        connection.sendall(b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\nX-Slow: "[: number % 45])
    assert statuses(exchange(api, request(body=ask("meanwhile")))) == [200, 200]
    for connection in opened:
        connection.close()
    eventually(lambda: connections(api) == 0, what="all closed")
