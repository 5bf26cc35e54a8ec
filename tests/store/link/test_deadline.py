"""Deadlines on a loop that was held up: replies that came meanwhile are read."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from limiter.store.keys import Slot
from limiter.store.link.deadline import Deadline
from limiter.store.store_errors import StoreUnavailable
from tests.support.nodes import node, until
from tests.support.operations import BUCKET, NO_REFILL, ask, work_terms
from tests.support.servers import Server
from tests.support.stores import ScriptStore

SLOT = Slot()
TERMS = work_terms(rate=NO_REFILL, capacity=10_000)
TIMEOUT_S = 0.1
TURNS = 20
"""Turns of the loop that are enough for a call to be sent."""

Runner = Callable[[Coroutine[Any, Any, None]], None]


def hold_up(goes_on: Callable[[], bool]) -> None:
    """Let the loop of this thread stand still."""
    while goes_on():
        pass


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_answer_that_came_while_the_loop_was_held_up_counts(valkey: Server, run: Runner) -> None:
    """The whole process did not get to run: neither the store nor the way to it has failed."""
    store = ScriptStore(valkey, SLOT)

    async def ask_and_be_held_up() -> None:
        async with node(valkey.url) as buckets:
            await buckets.acquire(SLOT, ask(TERMS, bucket="warm:"), timeout_s=5)
            valkey.pause()
            try:
                asked_s = time.monotonic()
                asking = asyncio.create_task(buckets.acquire(SLOT, ask(TERMS), timeout_s=TIMEOUT_S))
                for _ in range(TURNS):
                    await asyncio.sleep(0)
            finally:
                valkey.resume()
            hold_up(lambda: store.record(BUCKET) is None or time.monotonic() < asked_s + 2 * TIMEOUT_S)
            assert (await asking).granted

    run(ask_and_be_held_up())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_store_that_did_not_answer_meanwhile_has_failed(valkey: Server, run: Runner) -> None:
    async def ask_in_vain() -> None:
        async with node(valkey.url) as buckets:
            await buckets.acquire(SLOT, ask(TERMS, bucket="warm:"), timeout_s=5)
            valkey.pause()
            try:
                asking = asyncio.create_task(buckets.acquire(SLOT, ask(TERMS), timeout_s=TIMEOUT_S))
                await asyncio.sleep(0)
                held_up_until_s = time.monotonic() + 2 * TIMEOUT_S
                hold_up(lambda: time.monotonic() < held_up_until_s)
                with pytest.raises(StoreUnavailable):
                    await asking
                assert time.monotonic() - held_up_until_s < 5 * TIMEOUT_S
            finally:
                valkey.resume()

    run(ask_in_vain())


async def test_one_that_was_cancelled_never_expires() -> None:
    expired: list[str] = []
    loop = asyncio.get_running_loop()
    Deadline(loop.time() - 1, lambda: expired.append("kept"))
    Deadline(loop.time() - 1, lambda: expired.append("cancelled at once")).cancel()
    later = Deadline(loop.time() - 1, lambda: expired.append("cancelled while it looked again"))
    await asyncio.sleep(0)
    later.cancel()
    await until(lambda: expired)
    assert expired == ["kept"]
