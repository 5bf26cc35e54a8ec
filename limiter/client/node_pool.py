"""Connections to the nodes of the service: one pool, keep-alive, failover, a deadline on every call.

A call goes to the node that answered last. A node that refuses connections, breaks one off or does not answer in time
is left alone for a while, twice as long each time, and the call goes on to the next node if that is safe: nothing was
sent, or the call may be repeated.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

AWAY_FIRST_S = 0.1
AWAY_MAX_S = 5.0
AWAY_ALL_S = 0.25
"""Longest pause of a call that waits because every node is away: one that is back is noticed soon."""
KEEP_ALIVE_S = 30.0
JSON = {"content-type": "application/json"}
ANSWER_MAX = 8 * 1024 * 1024
"""Bytes of an answer: the longest batch of a node has a fraction of this."""
FAILURES = (aiohttp.ClientError, OSError, TimeoutError)
TRY_LEAST_S = 0.05
"""A node has at least this time to answer before another is asked."""
NO_TIME = 503
REDIRECTED = 300


class NoAnswer(Exception):
    """No node answered in time."""

    def __init__(self, *, was_sent: bool, why: str) -> None:
        super().__init__(why)
        self.was_sent = was_sent
        """A node may have received the call, and decided."""


class Node:
    """One address of the service."""

    __slots__ = ("_failures", "away_until_s", "url")

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"the address of a node looks like http://127.0.0.1:8080, not {url!r}")
        self.url = url.rstrip("/")
        self._failures = 0
        self.away_until_s = 0.0

    def failed(self, now_s: float) -> None:
        """Leave it alone for a while; the jitter keeps clients from coming back together."""
        pause_s = min(AWAY_MAX_S, AWAY_FIRST_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self.away_until_s = now_s + pause_s * random.uniform(0.5, 1.0)  # noqa: S311

    def answered(self) -> None:
        self._failures, self.away_until_s = 0, 0.0


class Connector(aiohttp.TCPConnector):
    """Connections of one process. A child that forgets its parent's leaves them open: closing them there would tell
    the poller that both share."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pid = os.getpid()

    def __del__(self, *_: Any) -> None:
        if os.getpid() == self._pid:
            super().__del__()


class NodePool:
    """All nodes, as one that answers."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        connections_max: int = 16,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not urls:
            raise ValueError("name at least one node of the service, such as http://127.0.0.1:8080")
        self.nodes = [Node(url) for url in urls]
        random.shuffle(self.nodes)  # so that clients spread over the nodes
        self._headers = JSON | ({} if api_key is None else {"authorization": f"Bearer {api_key}"})
        self._connections_max = connections_max
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self.calls = 0
        self.failures = 0
        self.failure = ""
        """The latest one, until a node answers."""

    def _open(self) -> aiohttp.ClientSession:
        """Return the session of this loop; it is made here because it belongs to a running loop."""
        if self._session is None or self._session.closed:
            connector = Connector(limit=self._connections_max, keepalive_timeout=KEEP_ALIVE_S, ssl=self._tls or True)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(),  # deadlines are ours
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
        return self._session

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        by_s: float,
        is_repeatable: bool,
        first_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Return status and body of the answer; by_s: the deadline, on the monotonic clock; first_s: when somebody
        wants an answer, if that is before: until then there has to be time for another node."""
        was_sent, why = False, "no time was left"
        while (now_s := time.monotonic()) < by_s:
            node, others = self._choose(now_s)
            patience_s = by_s - now_s
            if others and is_repeatable:
                wanted_s = (by_s if first_s is None else first_s) - now_s
                patience_s = min(patience_s, max(TRY_LEAST_S, wanted_s / 2))
            try:
                async with asyncio.timeout(patience_s):
                    status, answer = await self._send(node, path, body, headers)
            except FAILURES as error:
                self.failures += 1
                node.failed(time.monotonic())
                was_sent |= not isinstance(error, aiohttp.ClientConnectorError)
                why = f"{node.url}: {str(error) or type(error).__name__}"
                if was_sent and not is_repeatable:
                    break
                self.failure = why
                now_s = time.monotonic()
                back_s = min(one.away_until_s for one in self.nodes)
                if back_s > now_s:
                    pause_s = min(AWAY_ALL_S, max(AWAY_FIRST_S / 4, back_s - now_s))
                    await asyncio.sleep(min(pause_s, max(0.0, by_s - now_s)))
                continue
            if status == NO_TIME:
                node.failed(time.monotonic())  # the next call goes to another node
            else:
                node.answered()
            self.failure = ""
            return status, answer
        raise NoAnswer(was_sent=was_sent, why=why)

    def _choose(self, now_s: float) -> tuple[Node, bool]:
        """Return the node that is next, and whether there are others; if all are away, the one that comes back
        first."""
        for at, node in enumerate(self.nodes):
            if node.away_until_s <= now_s:
                if at:
                    self.nodes.insert(0, self.nodes.pop(at))  # stay with it
                return node, len(self.nodes) > 1
        return min(self.nodes, key=lambda node: node.away_until_s), len(self.nodes) > 1

    async def _send(self, node: Node, path: str, body: bytes, headers: Mapping[str, str] | None) -> tuple[int, Any]:
        self.calls += 1
        async with self._open().post(node.url + path, data=body, headers=headers, allow_redirects=False) as response:
            raw, status = await _read(response), response.status
        return status, _decoded(status, raw)

    async def post_json(self, path: str, value: object, *, by_s: float) -> tuple[int, Any]:
        """Post a value that may be sent again."""
        return await self.post(path, msgspec.json.encode(value), by_s=by_s, is_repeatable=True)

    async def get(self, path: str, *, by_s: float) -> tuple[int, Any]:
        """Return the answer of any node to a GET."""
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0.0, by_s - time.monotonic())):
            node, _ = self._choose(time.monotonic())
            async with self._open().get(node.url + path, allow_redirects=False) as response:
                return response.status, _decoded(response.status, await _read(response))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer; something that is no node may send without end."""
    parts, length = [], 0
    async for part in response.content.iter_any():
        length += len(part)
        if length > ANSWER_MAX:
            raise aiohttp.ClientPayloadError(f"status {response.status} with a body of more than {ANSWER_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _decoded(status: int, raw: bytes) -> Any:
    """Return the JSON object that every answer of a node is, but for an empty one. All else comes from something
    between client and node, such as a balancer without nodes: it decided nothing."""
    if not raw and status < REDIRECTED:
        return {}
    try:
        answer = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise aiohttp.ClientPayloadError(f"status {status} with a body that is no JSON object")
    return answer
