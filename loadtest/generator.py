"""Load on one URL from this machine: keep-alive connections that ask without pause, with random customers.

Uses `wrk` if it is installed, which takes the least of the machine for itself; otherwise connections of asyncio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from random import Random
from urllib.parse import urlsplit

import httptools
import uvloop

CUSTOMERS = 100_000

WRK_SCRIPT = """
local batch, customers = {batch}, {customers}
local thread = 0
function setup(t) thread = thread + 1; t:set("seed", thread) end
function init() math.randomseed(seed * 7919) end
local function one(op)
  return '{{' .. op .. '"descriptor":{{"service":"orders","operation":"read","customer":"c'
    .. math.random(customers) .. '"}},"work":2}}'
end
local headers = {{["Content-Type"] = "application/json"}}
function request()
  if batch == 1 then return wrk.format("POST", nil, headers, one('')) end
  local operations = {{}}
  for at = 1, batch do operations[at] = one('"op":"acquire",') end
  return wrk.format("POST", nil, headers, '{{"operations":[' .. table.concat(operations, ",") .. ']}}')
end
"""

_UNITS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}


@dataclass
class Load:
    """The result of a run."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int


def run(url: str, *, connections: int, seconds: float, batch: int = 1, customers: int = CUSTOMERS) -> Load:
    if shutil.which("wrk"):
        return _wrk(url, connections=connections, seconds=seconds, batch=batch, customers=customers)
    command = [
        sys.executable, "-m", "loadtest.generator", url, "--connections", str(connections),
        "--seconds", str(seconds), "--batch", str(batch), "--customers", str(customers),
    ]  # fmt: skip
    return Load(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def _wrk(url: str, *, connections: int, seconds: float, batch: int, customers: int) -> Load:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(WRK_SCRIPT.format(batch=batch, customers=customers))
        script.flush()
        duration = f"{max(1, round(seconds))}s"
        command = ["wrk", "-t1", f"-c{connections}", f"-d{duration}", "--latency", "-s", script.name, url]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", told)
    broken = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", told)
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", told)
    assert rate is not None, told
    errors = (int(failed[1]) if failed else 0) + sum(map(int, broken.groups() if broken else ()))
    return Load(float(rate[1]), _percentile(told, 50), _percentile(told, 99), errors)


def _percentile(told: str, percent: int) -> float:
    found = re.search(rf"\b{percent}%\s+([0-9.]+)(us|ms|s|m)\b", told)
    assert found is not None, told
    return float(found[1]) * _UNITS[found[2]]


class _Connection(asyncio.Protocol):
    """Asks, waits for the answer, asks again."""

    def __init__(self, load: _Generator) -> None:
        self._load = load
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._asked_s = time.perf_counter()
        self._transport.write(self._load.request())  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Take a part of an answer."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Count an answer, and send the next request."""
        self._load.took_s.append(time.perf_counter() - self._asked_s)
        if self._parser.get_status_code() != 200:
            self._load.errors += 1
        if not self._load.over:
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it as an error: connections should not end."""
        self._load.errors += not self._load.over


class _Generator:
    """Many connections."""

    def __init__(self, url: str, batch: int, customers: int) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self._batch, self._customers = batch, customers
        self._draw = Random(1)  # noqa: S311  the same in every run
        self._head = f"POST {parts.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        self.took_s: list[float] = []
        self.errors = 0
        self.over = False

    def request(self) -> bytes:
        if self._batch == 1:
            body = self._one("")
        else:
            body = '{"operations":[' + ",".join([self._one('"op":"acquire",') for _ in range(self._batch)]) + "]}"
        return f"{self._head}{len(body)}\r\n\r\n{body}".encode()

    def _one(self, op: str) -> str:
        customer = self._draw.randrange(self._customers)
        return f'{{{op}"descriptor":{{"service":"orders","operation":"read","customer":"c{customer}"}},"work":2}}'

    async def run(self, connections: int, seconds: float) -> Load:
        loop = asyncio.get_running_loop()
        opened = [
            await loop.create_connection(lambda: _Connection(self), self.host, self.port) for _ in range(connections)
        ]
        began_s = time.perf_counter()
        self.took_s.clear()
        await asyncio.sleep(seconds)
        took, elapsed_s = sorted(self.took_s), time.perf_counter() - began_s
        self.over = True
        for transport, _ in opened:
            transport.close()
        return Load(len(took) / elapsed_s, _at(took, 0.5), _at(took, 0.99), self.errors)


def _at(took_s: list[float], share: float) -> float:
    return took_s[min(len(took_s) - 1, int(len(took_s) * share))] * 1000 if took_s else 0.0


def main() -> None:
    """Run as a separate program, so that it can have a core of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--customers", type=int, default=CUSTOMERS)
    given = parser.parse_args()
    load = uvloop.run(_Generator(given.url, given.batch, given.customers).run(given.connections, given.seconds))
    print(json.dumps(asdict(load)))


if __name__ == "__main__":
    main()
