"""Overload control over HTTP, with a node and a controller of their own: who hangs, who fails, and who is gone."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support.fleet import Process, Visitors, api, controllers
from tests.support.nodes import until
from tests.support.servers import Server

DESCRIPTOR = {"service": "orders"}
PATIENT_MS = 3000  # nothing here is about a slow store


@asynccontextmanager
async def guarded(valkey: Server, folder: Path, **overload: Any) -> AsyncIterator[tuple[Visitors, Process, str]]:
    """Callers of a node, the only controller, and where the node is."""
    file = folder / "policies.json"
    policy = {"name": "guarded", "match": {}, "rate": 1_000_000, "overload": overload}
    file.write_text(json.dumps({"policies": [policy]}))
    with api(valkey.url, file, deadline_ms=PATIENT_MS) as node, controllers(valkey.url, lease_ms=1000) as start:
        _, process = start()
        visitors = Visitors(node)
        try:
            yield visitors, process, node
        finally:
            visitors.leave()


async def state(visitors: Visitors, **settled: Any) -> str:
    """Ask once, and settle as said, or never; the state as the answer tells it."""
    status, answer = await visitors.acquire(descriptor=DESCRIPTOR)
    if status == 200 and settled:
        await visitors.settle(answer, **settled)
    await visitors.wait_a_turn()
    return str(answer["state"])


@pytest.mark.slow
async def test_f_p10_q11_without_the_only_controller_throttles_end_and_readyz_warns(
    valkey: Server, tmp_path: Path
) -> None:
    """F-P10: M = 100, and the controller is killed: everybody was refused for ever, and nothing said so."""
    async with guarded(valkey, tmp_path, expectations={"initial": 100}) as (visitors, controller, node):

        async def answered(status: int, within_s: float) -> None:
            async with asyncio.timeout(within_s):
                while (await visitors.acquire(descriptor=DESCRIPTOR))[0] != status:
                    pass

        await answered(429, within_s=20)
        assert not _warned(node)
        controller.running.send_signal(signal.SIGKILL)
        await answered(200, within_s=30)
        await until(lambda: _warned(node), within_s=40)


def _warned(node: str) -> bool:
    with urlopen(f"{node}/readyz", timeout=10) as answer:
        warnings: list[str] = json.load(answer)["warnings"]
    return any("no controller has been heard of" in warning for warning in warnings)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ideal", "damped"])
async def test_f_p11_q8_a_backend_that_hangs_is_overloaded_not_calm(valkey: Server, tmp_path: Path, mode: str) -> None:
    """Requests are admitted, and nothing settles."""
    async with guarded(valkey, tmp_path, expectations={"mode": mode, "expected_latency_ms": 100}) as (visitors, _, _):
        async with asyncio.timeout(30):
            while await state(visitors) != "overloaded":
                pass
        assert visitors.granted >= 20


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ideal", "damped"])
async def test_q8_fast_errors_are_an_overload_where_the_policy_counts_them(
    valkey: Server, tmp_path: Path, mode: str
) -> None:
    terms = {"mode": mode, "expected_latency_ms": 500}
    async with guarded(valkey, tmp_path, expectations=terms, outcomes=["error"]) as (visitors, _, _):
        for _ in range(200):
            assert await state(visitors, latency_ms=20, outcome="ok") == "calm"
        async with asyncio.timeout(30):
            while await state(visitors, latency_ms=20, outcome="error") != "overloaded":
                pass


@pytest.mark.slow
async def test_q12_one_caller_in_ten_that_expects_an_answer_at_once_gets_nobody_refused(
    valkey: Server, tmp_path: Path
) -> None:
    """Answers take 20 ms, and the policy says that nobody expects less than 100."""
    terms = {"mode": "damped", "expected_latency_ms": 200, "expected_min_ms": 100, "interval_s": 0.5, "window_s": 2}
    async with guarded(valkey, tmp_path, expectations=terms) as (visitors, _, _):
        for number in range(300):
            hasty = {"expected_latency_ms": 0} if number % 10 == 0 else {}
            status, answer = await visitors.acquire(descriptor=DESCRIPTOR, **hasty)
            assert status == 200
            assert answer["state"] == "calm"
            await visitors.settle(answer, latency_ms=20)
            await visitors.wait_a_turn()
