"""Open the store of a URL behind one small interface, and check that it can serve (F-S13)."""

import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from redis.exceptions import NoPermissionError, ResponseError

from limiter.store import keys
from limiter.store.clock import time_us
from limiter.store.link.links import LOOKUP_TIMEOUT_S, ClusterLink, Dialer, SentinelLink, ServerLink
from limiter.store.link.server_connection import Argument
from limiter.store.link.urls import parse
from limiter.store.link.wire import Replied
from limiter.store.store_errors import StoreOutOfMemory, StoreUnsupported

CONNECT_TIMEOUT_S = 1.0
MAX_CONNECTIONS = 16  # per server

PROBE_TIMEOUT_S = 2.0
PROBE_NUMBER = 0.1  # a float64 survives decimal text only with all its digits

# All that the scripts rely on: the shebang, struct, and the server's clock.
PROBE_SCRIPT = """#!lua
local now = redis.call('TIME')
return {struct.pack('<d', struct.unpack('<d', ARGV[1])), now[1], now[2]}
"""

Version = tuple[int, ...]
OLDEST: dict[str, Version] = {"redis": (7, 0), "valkey": (8, 0)}
FORBIDDEN_INSIDE = ("ACL failure", "user executing the script")  # the words of Valkey and of Redis 7.0 within a script
INSTEAD = "or unset HEADGATE_REDIS_URL to use the bundled Valkey"


class Link(Protocol):
    """A link to the store."""

    async def call(self, key: bytes, *command: Argument, timeout_s: float) -> Any:
        """Send `command` once to the server that holds `key`, and return its reply, in bytes.

        Raises `StoreRefused` if it certainly did not run, `StoreUnavailable` if it may have, and redis-py's
        `ResponseError` (`NoScriptError` among them) for an error that the server answered. Takes at most `timeout_s`.
        """
        ...

    def send(self, key: bytes, packed: bytes, replied: Replied, *, deadline_s: float) -> bool:
        """Send a command packed by `server_connection.pack` once and at once, without a coroutine, if connected.

        `replied` receives the reply, or an exception: `StoreUnavailable` if it may have run, `StoreRefused` if it did
        not, or a `ResponseError`, redirects among them. After an exception the sender continues with `call`. Returns
        False without sending if no connection is open. Without a reply by the deadline (loop time) it counts as lost.
        """
        ...

    def listen(self, channel: bytes) -> AsyncGenerator[bytes]:
        """Yield the messages on `channel`, over a connection of its own: an empty one once subscribed, then each.

        Ends only by raising `StoreUnavailable` or `ResponseError`. Close it (`contextlib.aclosing`) to stop. Messages
        can get lost: a listener must also poll now and then.
        """
        ...

    async def aclose(self) -> None: ...


async def open_link(
    url: str, *, connect_timeout_s: float = CONNECT_TIMEOUT_S, max_connections: int = MAX_CONNECTIONS
) -> Link:
    """Return a link to the store of `url` (see `limiter.store.link.urls`). The store need not be up yet."""
    target = parse(url)
    dial = Dialer(target.options, target.tls, connect_timeout_s, max_connections)
    if target.kind == "cluster":
        return ClusterLink(target, dial)
    if target.kind == "sentinel":
        dial_sentinel = Dialer(target.sentinel_options, target.tls, LOOKUP_TIMEOUT_S, max_connections=1)
        return SentinelLink(target, dial, dial_sentinel)
    return ServerLink(dial.socket(target.path) if target.path else dial(target.addresses[0]))


@dataclass(frozen=True)
class ServerFacts:
    """Facts that a server reports of itself."""

    name: Literal["redis", "valkey"]
    version: Version
    now_us: int
    maxmemory_policy: str
    is_out_of_memory: bool = False
    """True if it refuses writes that need memory; it answers, and settles still work."""

    def __str__(self) -> str:
        return f"{self.name.capitalize()} {'.'.join(map(str, self.version))}"


async def probe(link: Link, *, timeout_s: float = PROBE_TIMEOUT_S) -> ServerFacts:
    """Ask the server for its version and run a script; raises `StoreUnsupported` with what to change."""
    info = await _info(link, timeout_s)
    name, version = _identity(info)
    policy = info.get("maxmemory_policy", "unknown")
    try:
        now_us = await _run_script(link, timeout_s)
    except StoreOutOfMemory:  # a script that may write cannot run then; the next probe tries it
        now_us = time_us(await link.call(keys.PROBE, "TIME", timeout_s=timeout_s))
        return ServerFacts(name, version, now_us, policy, is_out_of_memory=True)
    return ServerFacts(name, version, now_us, policy)


async def _info(link: Link, timeout_s: float) -> dict[str, str]:
    try:
        text: bytes = await link.call(keys.PROBE, "INFO", timeout_s=timeout_s)
    except NoPermissionError as error:
        raise _forbidden(error) from error
    except ResponseError as error:
        raise StoreUnsupported(f"the server does not answer INFO ({error}): do not rename it") from error
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _identity(info: dict[str, str]) -> tuple[Literal["redis", "valkey"], Version]:
    """Return product and version. Valkey reports the Redis version that it is compatible with beside its own."""
    name: Literal["redis", "valkey"] = "valkey" if "valkey_version" in info else "redis"
    text = info.get(f"{name}_version", "")
    version = tuple(int(part) for part in text.split(".") if part.isdecimal())
    if version < OLDEST[name]:
        raise StoreUnsupported(
            f"{name.capitalize()} {text or 'of unknown version'} is too old: Headgate needs Redis 7.0 or "
            f"Valkey 8.0, or newer; upgrade the server, {INSTEAD}"
        )
    return name, version


async def _run_script(link: Link, timeout_s: float) -> int:
    number = struct.pack("<d", PROBE_NUMBER)
    try:
        reply: Any = await link.call(keys.PROBE, "EVAL", PROBE_SCRIPT, 0, number, timeout_s=timeout_s)
    except NoPermissionError as error:
        raise _forbidden(error) from error
    except ResponseError as error:
        if any(sign in str(error) for sign in FORBIDDEN_INSIDE):
            raise _forbidden(error) from error
        raise StoreUnsupported(
            f"the server cannot run Lua scripts ({error}): do not rename EVAL, EVALSHA and SCRIPT in its "
            f"configuration, use a server with scripting, {INSTEAD}"
        ) from error
    echoed, seconds, microseconds = reply
    if echoed != number:
        raise StoreUnsupported(f"the server's Lua alters numbers in struct; use another server, {INSTEAD}")
    return int(seconds) * 1_000_000 + int(microseconds)


def _forbidden(error: ResponseError) -> StoreUnsupported:
    return StoreUnsupported(
        f"the store user lacks rights ({error}): grant it what Headgate needs, for example "
        f"ACL SETUSER <user> on {keys.ACL} +@all -@dangerous +info"
    )
