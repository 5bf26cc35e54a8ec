"""One process of hostile clients: `python -m loadtest.campaign.attacker <orders>`; writes what it found as JSON.

Every case comes from a generator seeded with the campaign's seed, the attacker's number and the case's number. What was
sent in a case that went wrong is kept with it, since reservations in it may have come from answers.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import msgspec

from loadtest.campaign import documents, wire
from loadtest.campaign.operations import Described, acquire, batch, change, settle
from loadtest.campaign.wire import request

CONNECTIONS = 6
PAUSE_S = 0.02
GIVE_UP_S = 30.0
"""Without a byte: an answer to thousands of requests may take longer on a busy machine."""
TOKENS_MAX = 400
IDLE_MAX = 40
SENT_KEPT_BYTES = 200_000
FINDINGS_MAX = 50
LAST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

_STATUS = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [A-Z]")
_FAILED_INSIDE = re.compile(rb'"status":(5\d\d)')
"""An operation of a batch that failed: the batch itself is a 200."""
_REASON = re.compile(rb'"reason":"(\w+)"')
_TOKEN = re.compile(rb'"reservation":"([A-Za-z0-9_-]{20,4000})"')
BUSY = frozenset({"node_busy", "store_unavailable", "record_damaged"})
"""Documented reasons of a 503: a busy node, a store that does not answer in time, what attackers did to their own."""


class Orders(msgspec.Struct):
    """What an attacker is told."""

    ports: list[int]
    keys: dict[str, str]
    seed: str
    number: int
    seconds: float
    report: str


class Finding(msgspec.Struct):
    """Something that should not have happened."""

    case: str
    kind: str
    port: int
    problem: str
    sent: str
    """Base64."""
    got: str


class Report(msgspec.Struct):
    """What an attacker did and found."""

    cases: int = 0
    statuses: dict[int, int] = {}
    kinds: dict[str, int] = {}
    reasons_503: dict[str, int] = {}
    slowest_s: float = 0.0
    findings: list[Finding] = []


class Attacker:
    """A few connections at a time, each with one case after the other."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        with urlopen(f"http://127.0.0.1:{orders.ports[0]}/openapi.json", timeout=30) as answer:
            self._described = Described(msgspec.json.decode(answer.read()))
        self._tokens: list[str] = []
        self._idle: list[asyncio.StreamWriter] = []
        self._cases = 0
        self._statuses: Counter[int] = Counter()
        self._kinds: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._slowest_s = 0.0
        self._findings: list[Finding] = []

    async def run(self) -> Report:
        """Attack until the time is over."""
        end_s = time.monotonic() + self._orders.seconds
        await asyncio.gather(*(self._attack(end_s) for _ in range(CONNECTIONS)))
        for writer in self._idle:
            writer.close()
        return Report(
            self._cases, dict(self._statuses), dict(self._kinds), dict(self._reasons), self._slowest_s, self._findings
        )

    async def _attack(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            self._cases += 1
            case = f"{self._orders.seed}.{self._orders.number}.{self._cases}"
            draw = Random(case)  # noqa: S311
            kind, raw = self._case(draw)
            self._kinds[kind] += 1
            await self._send(case, kind, raw, draw)
            await asyncio.sleep(draw.random() * PAUSE_S)

    def _case(self, draw: Random) -> tuple[str, bytes]:
        keys = self._orders.keys
        key = draw.choice([*keys.values(), None])
        path = draw.choice(["/v1/acquire", "/v1/settle", "/v1/batch"])
        kinds: dict[str, tuple[float, Any]] = {
            "described": (6, lambda: self._described.request(draw, self._tokens, keys)),
            "acquire": (2, lambda: self._post(draw, "/v1/acquire", acquire(draw))),
            "settle": (2, lambda: self._post(draw, "/v1/settle", settle(draw, self._tokens))),
            "batch": (0.5, lambda: self._post(draw, "/v1/batch", batch(draw, self._tokens))),
            "change": (1, lambda: change(draw, keys["admin"])),
            "heavy": (0.7, lambda: request("POST", draw.choice(wire.PATHS), documents.heavy(draw), key=key)),
            "heavy-put": (0.3, lambda: request("PUT", "/v1/policies/fuzz-1", documents.heavy(draw), key=keys["admin"])),
            "broken": (1, lambda: request("POST", path, draw.choice(documents.BROKEN), key=key)),
            "noise": (1, lambda: wire.noise(draw)),
            "soup": (2, lambda: wire.soup(draw)),
            "head": (3, lambda: wire.odd_head(draw, documents.written(draw, acquire(draw)), key)),
            "chunked": (2, lambda: wire.chunked(draw, path, documents.written(draw, acquire(draw)), key)),
            "pipeline": (
                0.3,
                lambda: wire.pipeline(draw, [self._described.request(draw, self._tokens, keys) for _ in range(9)]),
            ),
        }
        kind = draw.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        return kind, kinds[kind][1]()

    def _post(self, draw: Random, path: str, body: Any) -> bytes:
        headers = [("Idempotency-Key", draw.choice(["k1", "k2", "k3"]))] if draw.random() < 0.2 else []
        return request("POST", path, documents.written(draw, body), *headers, key=self._orders.keys["caller"])

    async def _send(self, case: str, kind: str, raw: bytes, draw: Random) -> None:
        port = draw.choice(self._orders.ports)
        manner = draw.choices(["whole", "pieces", "abandoned", "reset", "idle", "unread"], [10, 4, 1, 1, 0.3, 0.5])[0]
        try:
            async with asyncio.timeout(GIVE_UP_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except (OSError, TimeoutError) as error:
            self._found(case, kind, port, f"cannot connect: {error!r}", raw, b"")
            return
        began_s = time.monotonic()
        got = b""
        try:
            got = await self._converse(reader, writer, raw, manner, draw)
        except TimeoutError:
            self._found(case, kind, port, f"neither a byte nor closed for {GIVE_UP_S:g} s ({manner})", raw, got)
        except OSError:
            pass  # closed while we sent: its right
        self._slowest_s = max(self._slowest_s, time.monotonic() - began_s)
        self._judge(case, kind, port, raw, got)

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes, manner: str, draw: Random
    ) -> bytes:
        if manner == "idle" and len(self._idle) < IDLE_MAX:
            writer.write(draw.choice([b"", b"\r\n\r\n", raw[: draw.randrange(len(raw) + 1)]]))
            self._idle.append(writer)
            return b""
        try:
            if manner == "pieces":
                for _ in range(draw.randrange(1, 5)):
                    cut = draw.randrange(len(raw) + 1)
                    writer.write(raw[:cut])
                    raw = raw[cut:]
                    await asyncio.sleep(0)
            writer.write(raw if manner not in ("abandoned", "reset") else raw[: draw.randrange(len(raw) + 1)])
            if manner in ("abandoned", "reset"):
                return await self._abandon(writer, manner)
            if manner == "unread":
                await asyncio.sleep(draw.random())
                return b""
            if draw.random() < 0.5:
                writer.write(LAST)
            writer.write_eof()
            return await _read_all(reader)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _abandon(self, writer: asyncio.StreamWriter, manner: str) -> bytes:
        if manner == "reset":
            found: socket.socket | None = writer.get_extra_info("socket")
            if found is not None:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.sleep(0.01)
        writer.transport.abort()
        return b""

    def _judge(self, case: str, kind: str, port: int, raw: bytes, got: bytes) -> None:
        self._statuses.update(int(found[1]) for found in _STATUS.finditer(got))
        failed = [found for found in _STATUS.finditer(got) if found[1] >= b"500"] + [*_FAILED_INSIDE.finditer(got)]
        for found in failed:
            reason = _REASON.search(got, found.end(), found.end() + 2_000)
            told = reason[1].decode() if reason else "none"
            if found[1] == b"503":
                self._reasons[told] += 1
            if found[1] != b"503" or told not in BUSY:
                self._found(case, kind, port, f"status {found[1].decode()}, reason {told}", raw, got)
        for token in _TOKEN.findall(got)[:3]:
            if len(self._tokens) < TOKENS_MAX:
                self._tokens.append(token.decode())
            else:  # old ones stay among them
                self._tokens[hash(token) % TOKENS_MAX] = token.decode()

    def _found(self, case: str, kind: str, port: int, problem: str, raw: bytes, got: bytes) -> None:
        if len(self._findings) < FINDINGS_MAX:
            sent = base64.b64encode(raw[:SENT_KEPT_BYTES]).decode()
            at = max(got.find(b"HTTP/1.1 5"), got.find(b'"status":5') - 300)
            shown = got[max(0, at) : max(0, at) + 2_000].decode("utf-8", "replace")
            self._findings.append(Finding(case, kind, port, problem, sent, shown))


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while part := await asyncio.wait_for(reader.read(1 << 18), GIVE_UP_S):
        parts.append(part)
    return b"".join(parts)


def main(orders: str) -> None:
    """Attack as ordered, and write the report."""
    told = msgspec.json.decode(orders, type=Orders)
    report = asyncio.run(Attacker(told).run())
    Path(told.report).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(sys.argv[1])
