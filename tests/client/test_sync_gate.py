"""The client for code without await: threads, forks, the end of the process."""

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headgate import Headgate, SyncHeadgate, Throttled, criticality
from tests.support import eventually
from tests.support.askers import Spent
from tests.support.live import LiveApi
from tests.support.scripted_service import ScriptedService, refused

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gate(node: LiveApi) -> Iterator[SyncHeadgate]:
    with Headgate.sync(node.base) as gate:
        yield gate


@contextmanager
def scripted() -> Iterator[ScriptedService]:
    """A service on a loop of its own, for tests that block."""
    loop, service = asyncio.new_event_loop(), ScriptedService()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(service.__aenter__(), loop).result(10)
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(service.__aexit__(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_request_is_granted_and_settled(gate: SyncHeadgate, customer: str, spent: Spent) -> None:
    descriptor = {"service": "ledger", "customer": customer}
    with gate.acquire(descriptor, work=3) as grant:
        grant.settle(5)
    grant = gate.acquire(descriptor, work=3).now()
    grant.progress(4)
    grant.settle(7)
    with pytest.raises(LookupError), gate.acquire(descriptor, work=2):
        raise LookupError
    assert gate.flush() == 0
    assert spent("ledger", customer) == 14
    assert gate.counts()["granted"] == 3


def test_eight_threads_share_one_client(gate: SyncHeadgate, customer: str, spent: Spent) -> None:
    def work(_: int) -> None:
        for _ in range(50):
            with gate.acquire({"service": "ledger", "customer": customer}, work=1) as grant:
                grant.progress(1.5)
                grant.settle(2)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert gate.flush() == 0
    assert spent("ledger", customer) == 800
    assert gate.counts()["calls"] < 900, "acquires of all threads go together, and settles with them"


def test_the_class_of_the_callers_thread_is_sent() -> None:
    with scripted() as service, Headgate.sync(service.url) as gate:
        with criticality("sheddable_plus"):
            gate.acquire({"service": "a"}).now()
        gate.acquire({"service": "a"}).now()
    assert [one.get("criticality") for one in service.acquires] == ["sheddable_plus", None]


def test_a_function_for_refusals_runs_on_the_callers_thread() -> None:
    with scripted() as service:
        service.decide = lambda *_: refused()
        seen: list[tuple[str, threading.Thread]] = []

        def note(refusal: Throttled) -> None:
            seen.append((refusal.reason, threading.current_thread()))

        with Headgate.sync(service.url, on_refused=note, adaptive=False) as gate:
            assert not gate.acquire({"service": "a"}).now()
            with pytest.raises(Throttled):
                gate.acquire({"service": "a"}, on_refused="raise").now()

            async def later(refusal: Throttled) -> None:
                note(refusal)

            with gate.acquire({"service": "a"}, on_refused=later) as grant:
                assert not grant
        assert seen[0] == ("work", threading.main_thread())
        assert seen[1][1] is not threading.main_thread()


def test_the_clients_own_thread_does_not_wait_for_itself(gate: SyncHeadgate) -> None:
    async def ask() -> None:
        gate.acquire({"service": "ledger"}).now()

    with pytest.raises(RuntimeError, match="the client's own thread"):
        gate.wait_for(ask())


def test_f_r16_an_interrupted_caller_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted() as service, Headgate.sync(service.url) as gate:
        gate.acquire({"service": "a"}).now().settle()
        gate.flush()
        service.open.clear()
        wait = concurrent.futures.Future.result

        def interrupted(future: Any, timeout: float | None = None) -> Any:
            monkeypatch.setattr(concurrent.futures.Future, "result", wait)
            eventually(lambda: len(service.acquires) == 2)
            raise KeyboardInterrupt

        monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gate.acquire({"service": "a"}, work=9).now()
        service.release()
        eventually(lambda: [one["work"] for one in service.finals][1:] == [0.0])


def test_closing_wakes_those_who_wait() -> None:
    with scripted() as service:
        service.decide = lambda *_: refused(retry_after_ms=60_000)
        gate = Headgate.sync(service.url, on_refused="wait", wait_s=600, adaptive=False)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: gate.acquire({"service": "a"}).now())
            eventually(lambda: service.acquires)
            eventually(lambda: gate.inner.parts().lines)
            gate.close()
            with pytest.raises(Throttled):
                waiting.result(20)
        service.decide = ScriptedService().decide
        assert gate.acquire({"service": "a"}).now(), "it opens again"
        gate.close()


def test_a_source_without_await_is_streamed(gate: SyncHeadgate, customer: str, spent: Spent) -> None:
    with gate.acquire({"service": "ledger", "customer": customer}, work=1) as grant:
        assert list(grant.stream_sync(["ab", "cd"], work=len)) == ["ab", "cd"]
    gate.flush()
    assert spent("ledger", customer) == 4


def test_threads_share_a_lease(gate: SyncHeadgate, customer: str) -> None:
    with gate.lease({"service": "lent", "customer": customer}) as lease:

        def work(_: int) -> int:
            granted = 0
            for _ in range(200):
                found = lease.try_acquire(0.01)
                if found:
                    found.settle(0.01)  # type: ignore[union-attr]
                    granted += 1
            return granted

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(work, range(8))) == 1600
        assert lease.used()["settles"] == 1600


# Processes.

Run = Callable[..., str]


@pytest.fixture
def run(node: LiveApi, tmp_path: Path) -> Run:
    """Run a program with `gate`, `descriptor` in a process of its own; its output. Warnings are errors there."""

    def run(customer: str, program: str, *, code: int = 0) -> str:
        head = f"""
import os, sys, time
from headgate import Headgate, Throttled
gate = Headgate.sync({node.base!r})
descriptor = {{"service": "ledger", "customer": {customer!r}}}
"""
        file = tmp_path / "program.py"
        file.write_text(head + program)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", str(file)],
            capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environment,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


def test_the_end_of_the_process_sends_what_waits(run: Run, customer: str, spent: Spent) -> None:
    run(customer, "for _ in range(100): gate.acquire(descriptor, work=1).now().settle(3)")
    assert spent("ledger", customer) == 300


def test_an_exit_inside_a_block_settles(run: Run, customer: str, spent: Spent) -> None:
    run(customer, "with gate.acquire(descriptor, work=1) as grant:\n    grant.progress(5)\n    sys.exit(3)", code=3)
    assert spent("ledger", customer) == 5


def test_f_l7_a_child_goes_on_by_itself(run: Run, customer: str, spent: Spent) -> None:
    """Each process settles what it was granted, once; the parent's connections stay as they were."""
    program = """
before = [gate.acquire(descriptor, work=1).now() for _ in range(20)]
for grant in before[:10]:
    grant.settle(2)
child = os.fork()
for grant in before[10:]:
    grant.settle(3)        # in the child nobody hears of it
for _ in range(50):
    with gate.acquire(descriptor, work=1) as grant:
        grant.settle(4)
assert gate.flush() == 0
if child:
    assert os.waitpid(child, 0)[1] == 0
    with gate.acquire(descriptor, work=1) as grant:
        grant.settle(5)
    print(gate.counts()["call_failures"])
"""
    assert run(customer, program) == "0\n"
    assert spent("ledger", customer) == 10 * 2 + 10 * 3 + 2 * 50 * 4 + 5


def test_f_l7_a_child_takes_leases_of_its_own(run: Run, customer: str) -> None:
    program = """
descriptor["service"] = "lent"
with gate.lease(descriptor) as lease:
    assert lease.try_acquire(0.01)
    child = os.fork()
    if child == 0:
        assert lease.is_foreign
        with gate.lease(descriptor) as own:
            assert own.try_acquire(0.01) and own.token != lease.token
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both")
"""
    assert run(customer, program) == "both\n"


def test_children_of_a_pool_share_the_module_level_client(run: Run, customer: str, spent: Spent) -> None:
    program = """
import multiprocessing
def work(number):
    with gate.acquire(descriptor, work=1) as grant:
        grant.settle(2)
    gate.flush()
    return number
work(0)
with multiprocessing.get_context("fork").Pool(4) as pool:
    assert pool.map(work, range(40)) == list(range(40))
work(0)
"""
    run(customer, program)
    assert spent("ledger", customer) == 84
