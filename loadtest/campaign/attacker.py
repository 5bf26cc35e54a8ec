"""One process of hostile clients: `python -m loadtest.campaign.attacker <orders>`; writes its findings as JSON.

Every case comes from a generator seeded with the campaign's seed, the attacker's number and the case's number. The
bytes of a failed case are kept, since reservations in them may have come from answers.
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
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import msgspec

from loadtest.campaign import documents, raw_http
from loadtest.campaign.crafted_requests import Described, acquire, batch, change, largest, settle
from loadtest.campaign.raw_http import request
from loadtest.campaign.silence import Silence, Wait, computed_s

CONNECTIONS = 6
PAUSE_S = 0.02
GIVE_UP_S = 30.0
"""Time without a byte: an answer to thousands of requests may take longer on a busy machine."""
TOKENS_MAX = 400
IDLE_MAX = 40
SENT_KEPT_BYTES = 200_000
FINDINGS_MAX = 50
SLOW_KEPT_BYTES = 2_000
SLOWEST_KEPT = 20
LAST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

_LINE = re.compile(rb"[A-Z]{1,10} [^ \r\n]{1,200}")
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [A-Z]")
_FAILED_INSIDE = re.compile(rb'"status":(5\d\d)')
"""A failed operation of a batch, whose own status is 200."""
_REASON = re.compile(rb'"reason":"(\w+)"')
_TOKEN = re.compile(rb'"reservation":"([A-Za-z0-9_-]{20,4000})"')
BUSY = frozenset({"node_busy", "store_unavailable", "record_damaged"})
"""Documented reasons of a 503: a busy node, a store that does not answer in time, damage that attackers did to their
own buckets."""


class Orders(msgspec.Struct):
    """The orders of an attacker."""

    pids: dict[int, int]
    """The nodes, by the ports they listen on."""
    store_pid: int
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
    """The bytes sent, in base64."""
    got: str


class Slow(msgspec.Struct):
    """A request that a client waited for long."""

    wait: Wait
    case: str
    kind: str
    port: int
    line: str
    """Method and path of what was sent, as far as it has any."""
    sent_bytes: int
    got_bytes: int
    sent: str
    """Base64, its beginning."""

    def __str__(self) -> str:
        took_s, _, computed_s = self.wait
        return (
            f"{1000 * took_s:.0f} ms, in which node and store computed for {1000 * computed_s:.0f} ms: "
            f"case {self.case}, {self.kind}, {self.line or 'no request'}, {self.sent_bytes} bytes, "
            f"answered with {self.got_bytes}"
        )


class Report(msgspec.Struct):
    """The counts and findings of an attacker."""

    cases: int = 0
    statuses: dict[int, int] = {}
    kinds: dict[str, int] = {}
    reasons_503: dict[str, int] = {}
    slowest: list[Slow] = []
    """Of the requests that were sent without a pause and read at once; the slowest first."""
    findings: list[Finding] = []


class Attacker:
    """A few connections at a time, each with one case after another."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._ports = list(orders.pids)
        with urlopen(f"http://127.0.0.1:{self._ports[0]}/openapi.json", timeout=30) as answer:
            self._described = Described(msgspec.json.decode(answer.read()))
        self._tokens: list[str] = []
        self._idle: list[asyncio.StreamWriter] = []
        self._cases = 0
        self._statuses: Counter[int] = Counter()
        self._kinds: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._slowest: list[Slow] = []
        self._findings: list[Finding] = []

    async def run(self) -> Report:
        """Attack until the time is over."""
        end_s = time.monotonic() + self._orders.seconds
        await asyncio.gather(*(self._attack(end_s) for _ in range(CONNECTIONS)))
        for writer in self._idle:
            writer.close()
        slowest = sorted(self._slowest, key=_wait, reverse=True)
        return Report(
            self._cases, dict(self._statuses), dict(self._kinds), dict(self._reasons), slowest, self._findings
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
            "largest": (0.1, lambda: largest(draw, self._tokens, keys)),
            "heavy": (0.7, lambda: request("POST", draw.choice(raw_http.PATHS), documents.heavy(draw), key=key)),
            "heavy-put": (0.3, lambda: request("PUT", "/v1/policies/fuzz-1", documents.heavy(draw), key=keys["admin"])),
            "broken": (1, lambda: request("POST", path, draw.choice(documents.BROKEN), key=key)),
            "noise": (1, lambda: raw_http.noise(draw)),
            "soup": (2, lambda: raw_http.soup(draw)),
            "head": (3, lambda: raw_http.odd_head(draw, documents.written(draw, acquire(draw)), key)),
            "chunked": (2, lambda: raw_http.chunked(draw, path, documents.written(draw, acquire(draw)), key)),
            "pipeline": (
                0.3,
                lambda: raw_http.pipeline(draw, [self._described.request(draw, self._tokens, keys) for _ in range(9)]),
            ),
        }
        kind = draw.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        return kind, kinds[kind][1]()

    def _post(self, draw: Random, path: str, body: Any) -> bytes:
        headers = [("Idempotency-Key", draw.choice(["k1", "k2", "k3"]))] if draw.random() < 0.2 else []
        return request("POST", path, documents.written(draw, body), *headers, key=self._orders.keys["caller"])

    async def _send(self, case: str, kind: str, raw: bytes, draw: Random) -> None:
        port = draw.choice(self._ports)
        manner = draw.choices(["whole", "pieces", "abandoned", "reset", "idle", "unread"], [10, 4, 1, 1, 0.3, 0.5])[0]
        try:
            async with asyncio.timeout(GIVE_UP_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except (OSError, TimeoutError) as error:
            self._found(case, kind, port, f"cannot connect: {error!r}", raw, b"")
            return
        got, silence = b"", Silence(partial(computed_s, self._orders.pids[port], self._orders.store_pid))
        try:
            got = await self._converse(reader, writer, raw, manner, draw, silence)
        except TimeoutError:
            self._found(case, kind, port, f"neither a byte nor closed for {GIVE_UP_S:g} s ({manner})", raw, got)
        except OSError:
            pass  # closed while we sent: its right
        self._judge(case, kind, port, raw, got)
        if silence.longest.took_s:
            line = _LINE.match(raw)
            told = line[0].decode("ascii", "replace") if line else ""
            sent = base64.b64encode(raw[:SLOW_KEPT_BYTES]).decode()
            self._slowest.append(Slow(silence.longest, case, kind, port, told, len(raw), len(got), sent))
            if len(self._slowest) > SLOWEST_KEPT:
                self._slowest.remove(min(self._slowest, key=_wait))

    async def _converse(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        raw: bytes,
        manner: str,
        draw: Random,
        silence: Silence,
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
            return await listen(reader, writer, silence)
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


async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: Silence) -> bytes:
    """Everything that is answered, also while the last bytes are still being sent."""
    writer.transport.set_write_buffer_limits(high=0)
    sending = asyncio.ensure_future(writer.drain())
    sending.add_done_callback(lambda _: silence.begin())
    parts = []
    try:
        while part := await asyncio.wait_for(reader.read(1 << 18), GIVE_UP_S):
            silence.heard(len(part))
            parts.append(part)
        silence.closed()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return b"".join(parts)


def _wait(slow: Slow) -> Wait:
    return slow.wait


def main(orders: str) -> None:
    """Attack as ordered, and write the report."""
    told = msgspec.json.decode(orders, type=Orders)
    report = asyncio.run(Attacker(told).run())
    Path(told.report).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(sys.argv[1])
