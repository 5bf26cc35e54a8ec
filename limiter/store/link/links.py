"""The three kinds of link: one server, the primary that Sentinel names, the nodes of a Cluster.

Each sends a command once and never repeats one that may have run. Redirects are followed, since they promise that
nothing was executed. After any sign of a failover the address is looked up again in the background.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    RedisSSLContext,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError, RedisError

from limiter.store.link.server_connection import Argument, ServerConnection, pack, was_closed
from limiter.store.link.urls import Address, Target, UrlError
from limiter.store.link.wire import Replied
from limiter.store.store_errors import (
    StoreError,
    StoreOutOfMemory,
    StoreRefused,
    StoreUnavailable,
    StoreUnsupported,
)

LOOKUP_TIMEOUT_S = 0.25  # for one sentinel or cluster node to answer a look-up
LOOKUP_PAUSE_S = 0.1  # between one look-up and the next
LISTEN_TIMEOUT_S = 1.0  # to find a server to subscribe to
MAX_REDIRECTS = 5


class Dialer:
    """Makes server connections with the options of the URL, and without redis-py's own retries and handshakes."""

    def __init__(self, options: Mapping[str, Any], tls: bool, connect_timeout_s: float, max_connections: int) -> None:
        self._options = {
            **options,
            "protocol": 2,  # no handshake to wait for, no push messages, no maintenance notifications
            "driver_info": None,  # no CLIENT SETINFO
            "socket_timeout": None,  # every call brings its own deadline
            "socket_connect_timeout": connect_timeout_s,
        }
        self._max_connections = max_connections
        self._tls = self._load_tls() if tls else None

    def _load_tls(self) -> RedisSSLContext:
        """Read certificates once; redis-py would read them for every connection."""
        try:
            context = SSLConnection(**self._options).ssl_context
            context.get()
        except (OSError, RedisError) as error:
            raise UrlError(f"cannot set up TLS as the store URL says: {error}") from error
        return context

    def __call__(self, address: Address) -> ServerConnection:
        """Return a connection to a TCP port."""
        host, port = address

        def connection() -> AbstractConnection:
            if self._tls is None:
                return Connection(host=host, port=port, **self._options)
            secure = SSLConnection(host=host, port=port, **self._options)
            secure.ssl_context = self._tls
            return secure

        return ServerConnection(f"{host}:{port}", connection, max_connections=self._max_connections)

    def socket(self, path: str) -> ServerConnection:
        """Return a connection to a unix socket."""

        def connection() -> AbstractConnection:
            return UnixDomainSocketConnection(path=path, **self._options)

        return ServerConnection(path, connection, max_connections=self._max_connections)


class ServerLink:
    """One server. A virtual address may move to another server: after READONLY the connections are opened again."""

    def __init__(self, node: ServerConnection) -> None:
        self._node = node

    async def call(self, key: bytes, *command: Argument, timeout_s: float) -> Any:
        try:
            return await self._node.call(pack(*command), deadline_s=_deadline_s(timeout_s))
        except AskError as error:
            raise _cluster_found() from error

    def send(self, key: bytes, packed: bytes, replied: Replied, *, deadline_s: float) -> bool:
        return self._node.send(packed, replied, deadline_s=deadline_s)

    def listen(self, channel: bytes) -> AsyncGenerator[bytes]:
        return self._node.listen(channel)

    async def aclose(self) -> None:
        await self._node.aclose()


class Lookup:
    """Looks up addresses in the background, once at a time, however many ask for it."""

    def __init__(self, find: Callable[[], Awaitable[None]]) -> None:
        self._find = find
        self._task: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        self._closed = False

    def start(self) -> None:
        """Begin a look-up unless one is under way."""
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(_retrieve)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._not_before_s - loop.time())
        try:
            await self._find()
        finally:
            self._not_before_s = loop.time() + LOOKUP_PAUSE_S

    async def wait(self, *, deadline_s: float) -> None:
        """Wait for the look-up under way, or a new one; raises `StoreRefused` if it fails or takes too long."""
        self.start()
        if self._closed or self._task is None:
            raise StoreRefused("the link is closed")
        task = self._task
        try:
            async with asyncio.timeout_at(deadline_s):
                await asyncio.shield(task)
        except TimeoutError:
            raise StoreRefused("the address of the store could not be looked up in time") from None
        except asyncio.CancelledError:
            if was_closed(task):
                raise StoreRefused("the link is closed") from None
            raise

    async def aclose(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class SentinelLink:
    """The primary of a service, as its sentinels name it.

    Asks them with GET-MASTER-ADDR-BY-NAME, as Sentinel's guide for clients says (redis-py's own `Sentinel` lists all
    services instead), over connections of this package, so that deadlines hold here, too.
    """

    def __init__(self, target: Target, dial: Dialer, dial_sentinel: Dialer) -> None:
        self._service = target.service
        self._dial = dial
        self._sentinels = [dial_sentinel(address) for address in target.addresses]
        self._primary: ServerConnection | None = None
        self._address: Address | None = None
        self._suspect = False
        self._lookup = Lookup(self._find)

    async def call(self, key: bytes, *command: Argument, timeout_s: float) -> Any:
        deadline_s = _deadline_s(timeout_s)
        packed = pack(*command)
        primary = await self._find_primary(timeout_s, deadline_s)
        try:
            return await primary.call(packed, deadline_s=deadline_s)
        except AskError as error:
            raise _cluster_found() from error
        except StoreOutOfMemory:
            raise
        except StoreUnavailable:
            self._suspect = True
            self._lookup.start()
            raise

    def send(self, key: bytes, packed: bytes, replied: Replied, *, deadline_s: float) -> bool:
        """Send at once; see `Link`. Not to a primary that failed a call: `call` asks the sentinels first."""
        if self._primary is None or self._suspect:
            return False
        return self._primary.send(packed, replied, deadline_s=deadline_s)

    async def listen(self, channel: bytes) -> AsyncGenerator[bytes]:
        primary = await self._find_primary(LISTEN_TIMEOUT_S, _deadline_s(LISTEN_TIMEOUT_S))
        try:
            async with aclosing(primary.listen(channel)) as messages:
                async for message in messages:
                    yield message
        except StoreUnavailable:
            self._suspect = True
            self._lookup.start()
            raise

    async def _find_primary(self, timeout_s: float, deadline_s: float) -> ServerConnection:
        if self._primary is None:
            await self._lookup.wait(deadline_s=deadline_s)
        elif self._suspect:
            # Half of the time is for the sentinels: with all of them out of reach, the last known primary is still
            # asked.
            with suppress(StoreRefused):
                await self._lookup.wait(deadline_s=deadline_s - timeout_s / 2)
        assert self._primary is not None
        return self._primary

    async def _find(self) -> None:
        troubles = []
        for sentinel in list(self._sentinels):
            command = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
            try:
                found = await sentinel.call(command, deadline_s=_deadline_s(LOOKUP_TIMEOUT_S))
            except (StoreError, RedisError) as error:
                troubles.append(str(error))
                continue
            if found:
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                await self._adopt((found[0].decode(), int(found[1])))
                return
            troubles.append(f"{sentinel.where} does not know it")
        raise StoreRefused(f"no sentinel named a primary for {self._service}: {'; '.join(troubles)}")

    async def _adopt(self, address: Address) -> None:
        self._suspect = False
        if address != self._address:
            former, self._primary, self._address = self._primary, self._dial(address), address
            if former is not None:
                await former.aclose()

    async def aclose(self) -> None:
        await self._lookup.aclose()
        for node in (*self._sentinels, *([self._primary] if self._primary else [])):
            await node.aclose()


class ClusterLink:
    """The nodes of a Redis Cluster; each command goes to the node that serves its key's slot."""

    def __init__(self, target: Target, dial: Dialer) -> None:
        self._seeds = target.addresses
        self._dial = dial
        self._nodes: dict[Address, ServerConnection] = {}
        self._slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._lookup = Lookup(self._find)
        self._lookups = 0

    async def call(self, key: bytes, *command: Argument, timeout_s: float) -> Any:
        deadline_s = _deadline_s(timeout_s)
        packed = pack(*command)
        address = await self._find_owner(key_slot(key), deadline_s)
        asking = False
        for _ in range(MAX_REDIRECTS):
            try:
                return await self._node(address).call(packed, deadline_s=deadline_s, asking=asking)
            except AskError as redirect:  # MovedError is a subclass
                # A redirect without a host means the node that sent it.
                address = (redirect.host or address[0], redirect.port)
                asking = not isinstance(redirect, MovedError)
                if not asking:
                    self._slots[redirect.slot_id] = address
                    self._lookup.start()
            except StoreOutOfMemory:
                raise
            except StoreUnavailable:
                self._lookup.start()
                raise
        raise StoreRefused(f"redirected {MAX_REDIRECTS} times, last to {address[0]}:{address[1]}")

    def send(self, key: bytes, packed: bytes, replied: Replied, *, deadline_s: float) -> bool:
        address = self._slots[key_slot(key)]
        return address is not None and self._node(address).send(packed, replied, deadline_s=deadline_s)

    async def listen(self, channel: bytes) -> AsyncGenerator[bytes]:
        """Yield messages; see `Link`. Every node receives them; this listens to the one that serves the channel's
        slot."""
        address = await self._find_owner(key_slot(channel), _deadline_s(LISTEN_TIMEOUT_S))
        try:
            async with aclosing(self._node(address).listen(channel)) as messages:
                async for message in messages:
                    yield message
        except StoreUnavailable:
            self._lookup.start()
            raise

    async def _find_owner(self, slot: int, deadline_s: float) -> Address:
        if (address := self._slots[slot]) is None:
            await self._lookup.wait(deadline_s=deadline_s)
            if (address := self._slots[slot]) is None:
                raise StoreRefused(f"no node of the cluster serves slot {slot}")
        return address

    def _node(self, address: Address) -> ServerConnection:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._dial(address)
        return node

    async def _find(self) -> None:
        known = list(dict.fromkeys((*self._nodes, *self._seeds)))
        # Each time another node is asked first: one that is cut off or stalls must not mislead for long.
        self._lookups += 1
        turn = self._lookups % len(known)
        troubles = []
        for address in known[turn:] + known[:turn]:
            try:
                ranges = await self._node(address).call(
                    pack("CLUSTER", "SLOTS"), deadline_s=_deadline_s(LOOKUP_TIMEOUT_S)
                )
            except (StoreError, RedisError) as error:
                troubles.append(str(error))
                continue
            if ranges:
                await self._adopt(ranges, asked=address)
                return
            troubles.append(f"{address[0]}:{address[1]} knows of no slots")
        raise StoreRefused(f"no node of the cluster returned the map of slots: {'; '.join(troubles)}")

    async def _adopt(self, ranges: list[Any], *, asked: Address) -> None:
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            if host == b"?":  # the node does not know it either
                continue
            # An entry without a host means the node that was asked.
            address = (host.decode() if host else asked[0], port)
            slots[first : last + 1] = [address] * (last + 1 - first)
        self._slots = slots
        for gone in self._nodes.keys() - set(slots):
            await self._nodes.pop(gone).aclose()

    async def aclose(self) -> None:
        await self._lookup.aclose()
        for node in self._nodes.values():
            await node.aclose()


def _deadline_s(timeout_s: float) -> float:
    return asyncio.get_running_loop().time() + timeout_s


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve a background task's exception, so that asyncio does not log that nobody did."""
    if not task.cancelled():
        task.exception()


def _cluster_found() -> StoreUnsupported:
    return StoreUnsupported("the store is part of a cluster: use redis+cluster:// in HEADGATE_REDIS_URL")
