"""Child processes are started again when they end, ever more slowly, and stop when they are asked to."""

import asyncio
import sys

import pytest

from limiter.runtime import children
from tests.support import eventually_async


async def test_a_child_is_started_again_and_the_log_says_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    lives = 0

    async def live() -> str:
        nonlocal lives
        lives += 1
        return f"ended with {lives}"

    keeping = asyncio.create_task(children.keep_running("the sieve", live))
    try:
        await eventually_async(lambda: asyncio.sleep(0, lives >= 3))
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    told = [record.getMessage() for record in caplog.records]
    assert told[:2] == [
        "the sieve ended with 1; it is started again in 0.1 s",
        "the sieve ended with 2; it is started again in 0.2 s",
    ]


async def test_one_that_has_lived_long_enough_is_forgiven_what_went_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(children, "STEADY_S", -1.0)
    lives = 0

    async def live() -> str:
        nonlocal lives
        lives += 1
        return "ended"

    keeping = asyncio.create_task(children.keep_running("the sieve", live))
    try:
        await eventually_async(lambda: asyncio.sleep(0, lives >= 3))
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    assert {record.getMessage() for record in caplog.records} == {"the sieve ended; it is started again in 0.1 s"}


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


async def test_a_child_that_does_not_heed_the_first_signal_is_killed() -> None:
    command = children.bound(sys.executable, "-c", STUBBORN)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    await children.end(process, grace_s=0.05)
    assert process.returncode == -9
    await children.end(process, grace_s=0.05)  # once it has gone there is nothing to do
