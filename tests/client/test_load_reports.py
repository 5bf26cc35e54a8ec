"""Load of a process, on both event loops and in threads, with real work."""

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from limiter.client.load_reports import (
    LoadMeter,
    LoadReporter,
    Processors,
    Sample,
    Threads,
    find_processors,
    own_wait_s,
    tasks_ready,
)
from tests.support import eventually, eventually_async
from tests.support.live import POLICIES, live
from tests.support.servers import running

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
Main = Callable[[], Awaitable[None]]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Runs a coroutine on each kind of loop."""

    def run(main: Main) -> None:
        async def awaited() -> None:
            await main()

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(awaited())

    return run


class Sent:
    """Reports that were sent."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, path: str, body: dict[str, Any]) -> None:
        self.reports.append((path, body))

    def last(self, name: str) -> float:
        load: float = self.reports[-1][1]["signals"][name] if self.reports else -1.0
        return load

    async def until(self, name: str, wanted: Callable[[float], bool]) -> None:
        async def seen() -> bool:
            return bool(self.reports) and wanted(self.last(name))

        await eventually_async(seen, within_s=30, what=f"{name}, last {self.reports[-1:]}")


def reporter(send: Callable[[str, dict[str, Any]], Awaitable[object]], **options: Any) -> LoadReporter:
    """A reporter that does not let a test wait."""
    return LoadReporter(send, **{"interval_s": 0.05, "smoothing_s": 0.3} | options)


def test_g5_loads_are_per_processor_and_per_second() -> None:
    meter = LoadMeter(processors=2)
    meter.sample(0.0, Sample(cpu_s=100.0, threads_s=50.0))
    assert meter.loads() == {}
    meter.sample(4.0, Sample(cpu_s=104.0, threads_s=62.0))
    assert meter.loads() == {"cpu": pytest.approx(0.5), "executor": pytest.approx(1.5)}


def test_g5_loads_are_smoothed_exponentially() -> None:
    meter = LoadMeter(processors=1, smoothing_s=3.0)
    meter.sample(0.0, Sample(queue_age_s=0.0))
    for step in range(1, 31):
        meter.sample(step / 10, Sample(queue_age_s=1.0))
    assert meter.loads()["queue_age_s"] == pytest.approx(0.632, abs=0.001)


def test_g5_the_executor_is_as_loaded_as_its_tightest_part() -> None:
    meter = LoadMeter(processors=4)
    for second in range(2):
        meter.sample(second, Sample(loop_cpu_s=0.75 * second, tasks_ready=3, threads_s=2.0 * second))
    assert meter.loads() == {"executor": pytest.approx(3.75)}
    locked = LoadMeter(processors=4)
    for second in range(2):
        locked.sample(second, Sample(threads_s=2.0 * second, lock_waiters=5.0))
    assert locked.loads() == {"executor": pytest.approx(5.0)}


def test_what_is_not_read_each_time_is_averaged_over_the_time_between() -> None:
    meter = LoadMeter(processors=1)
    for tenth in range(21):
        meter.sample(tenth / 10, Sample(threads_s=0.3 * tenth if tenth % 10 == 0 else None, lock_waiters=0.0))
    assert meter.loads() == {"executor": pytest.approx(3.0)}


def test_readings_that_cannot_be_are_left_out() -> None:
    meter = LoadMeter(processors=1)
    for now_s, age_s in ((0.0, 1.0), (1.0, float("nan")), (2.0, -5.0), (3.0, float("inf")), (1.0, 1.0)):
        meter.sample(now_s, Sample(queue_age_s=age_s, cpu_s=10.0 - now_s))
    assert meter.loads() == {"queue_age_s": 1.0, "cpu": 0.0}


@contextmanager
def busy(loop: asyncio.AbstractEventLoop, count: int) -> Iterator[None]:
    """Tasks that always want their turn, beside some that wait."""
    never = asyncio.Event()

    async def spin() -> None:
        while True:  # noqa: ASYNC110 (nothing to wait for)
            await asyncio.sleep(0)

    tasks = [loop.create_task(spin()) for _ in range(count)]
    tasks += [loop.create_task(wait(never)) for _ in range(3)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def wait(event: asyncio.Event) -> None:
    await event.wait()


def test_g5_tasks_that_wait_for_their_turn_alone_are_ready(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with busy(loop, 7):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert tasks_ready(loop) == 7
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert tasks_ready(loop) == 0

    run(main)


def test_g5_a_busy_loop_reports_its_tasks_and_an_idle_one_next_to_none(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        sent = Sent()
        async with reporter(sent):
            with busy(asyncio.get_running_loop(), 7):
                await sent.until("executor", lambda load: 7 < load < 8.1)
            await sent.until("executor", lambda load: load < 0.5)

    run(main)


def test_g5_a_loop_that_comes_late_reports_by_how_much(run: Callable[[Main], None]) -> None:
    """Callbacks without a task are not counted; they show here."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        is_over = False

        def block() -> None:
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000)
            if not is_over:
                loop.call_soon(block)

        sent = Sent()
        async with reporter(sent):
            block()
            await sent.until("loop_delay_s", lambda delay_s: delay_s > 0.03)
            is_over = True
            await sent.until("loop_delay_s", lambda delay_s: delay_s < 0.02)

    run(main)


@contextmanager
def threads(count: int, work: Callable[[], object]) -> Iterator[None]:
    """Threads that do this over and over."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()

    running = [threading.Thread(target=repeat) for _ in range(count)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in running:
            thread.join()


DATA = bytes(1 << 20)


def without_lock() -> None:
    hashlib.sha256(DATA)


def test_g5_threads_that_want_the_lock_are_reported_although_they_sleep() -> None:
    """With Python's lock one of eight runs, and no more than one is ready to, as far as the system knows."""

    async def main() -> None:
        sent = Sent()
        async with reporter(sent, of="threads"):
            with threads(8, lambda: sum(range(1000))):
                await sent.until("executor", lambda load: load > 2)
            await sent.until("executor", lambda load: load < 1)
        assert "loop_delay_s" not in sent.reports[-1][1]["signals"]

    asyncio.run(main())


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count it")
def test_g5_threads_that_run_or_are_ready_to_are_counted_by_the_system() -> None:
    counted = Threads()
    with threads(3, without_lock):
        before_s, began_s = counted.read_s(), time.monotonic()
        assert before_s is not None

        def rate() -> float:
            return ((counted.read_s() or 0.0) - before_s) / (time.monotonic() - began_s)

        # A wait counts when it ends, so the first readings on a busy machine may be low; this thread waits as well.
        eventually(lambda: time.monotonic() > began_s + 0.3 and 2.2 < rate() < 4.2, within_s=30)
    assert own_wait_s() >= 0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count it")
def test_g5_threads_that_need_no_lock_are_reported_per_processor() -> None:
    async def main() -> None:
        sent = Sent()
        async with reporter(sent, of="threads", processors=Processors(2.0)):
            with threads(6, without_lock):
                await sent.until("executor", lambda load: 2 < load < 4)

    asyncio.run(main())


def test_threads_that_end_stay_in_the_sum(tmp_path: Path) -> None:
    for thread, text in (("1", "1000000000 500000000 7"), ("2", "2000000000 0 7")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    counted = Threads(tmp_path)
    assert counted.read_s() == 3.5
    (tmp_path / "2" / "schedstat").unlink()
    (tmp_path / "1" / "schedstat").write_text("1500000000 500000000 8")
    assert counted.read_s() == 4.0


def test_a_system_that_does_not_count_threads_gives_no_reading(tmp_path: Path) -> None:
    assert Threads(tmp_path / "missing").read_s() is None
    assert Threads(tmp_path).read_s() is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("strange")
    assert Threads(tmp_path).read_s() is None
    assert own_wait_s(tmp_path / "1" / "schedstat") == 0.0


@pytest.mark.parametrize(
    ("files", "own", "number", "cpu_s"),
    [
        ({"cpu.max": "150000 100000", "cpu.stat": "usage_usec 2500000\nuser_usec 1"}, "0::/", 1.5, 2.5),
        ({"a/b/cpu.max": "50000 100000", "a/b/cpu.stat": "usage_usec 7000000"}, "0::/a/b", 0.5, 7.0),
        ({"cpu.max": "max 100000", "cpu.stat": "usage_usec 2500000"}, "0::/", 8, None),
        ({"cpu.max": "1600000 100000", "cpu.stat": "usage_usec 2500000"}, "0::/", 8, None),
        ({"cpu,cpuacct/x/cpu.cfs_quota_us": "200000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
          "cpu,cpuacct/x/cpu.stat": "nr_periods 0", "cpu,cpuacct/x/cpuacct.usage": "3000000000"},
         "5:memory:/y\n4:cpu,cpuacct:/x", 2, 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/", 8, None),
        ({"cpu.max": "strange"}, "strange", 8, None),
        ({}, "", 8, None),
    ],
)  # fmt: skip
def test_g5_processors_are_those_of_the_container(
    tmp_path: Path, files: dict[str, str], own: str, number: float, cpu_s: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    found = find_processors(tmp_path, tmp_path / "own", count=8)
    assert found.number == number
    if cpu_s is None:
        assert found.usage is None
        assert found.cpu_s() <= os.times().user + os.times().system + 1
    else:
        assert found.cpu_s() == cpu_s


def test_processors_of_this_process_are_found() -> None:
    found = find_processors()
    assert 0 < found.number <= (os.cpu_count() or 1)
    assert found.cpu_s() > 0
    assert Processors(1.0, Path("/nowhere/cpu.stat")).cpu_s() > 0, "falls back on the process"


async def test_g5_a_report_names_what_it_is_for() -> None:
    for target in ({}, {"policy": "crowd"}, {"policy": "busy", "key": {"customer": "c1"}, "namespace": "edge"}):
        sent = Sent()
        async with reporter(sent, queue_age_s=lambda: None, **target):
            await sent.until("queue_age_s", lambda age_s: age_s == 0)
        path, body = sent.reports[-1]
        assert path == "/v1/signals"
        assert body.keys() == {"source", "signals", *target}
        assert {name: body[name] for name in target} == target
        assert body["source"].endswith(f"-{os.getpid()}")
        assert body["signals"].keys() == {"cpu", "executor", "loop_delay_s", "queue_age_s"}
    with pytest.raises(ValueError, match="names its policy"):
        reporter(sent, key={"customer": "c1"})


async def test_g5_reports_go_on_after_failures_and_raise_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()
    tries = 0

    async def send(path: str, body: dict[str, Any]) -> None:
        nonlocal tries
        tries += 1
        if tries <= 5:
            raise ConnectionRefusedError("nobody is there")
        await sent(path, body)

    with caplog.at_level(logging.WARNING, "headgate.load"):
        async with reporter(send, source="host-1") as reports:
            await sent.until("cpu", lambda load: load >= 0)
    assert reports.failures == 5
    assert reports.sent >= 1
    assert [record.getMessage() for record in caplog.records] == [
        "load cannot be reported: ConnectionRefusedError('nobody is there'); will try again every 0.05 s"
    ]


async def test_a_queue_that_cannot_be_read_costs_its_own_signal_alone(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()

    def age_s() -> float:
        raise KeyError("queue")

    async with reporter(sent, queue_age_s=age_s) as reports:
        await sent.until("cpu", lambda load: load >= 0)
    assert "queue_age_s" not in sent.reports[-1][1]["signals"]
    assert reports.failures > 0
    assert len([record for record in caplog.records if record.name == "headgate.load"]) == 1


async def test_a_report_that_hangs_holds_up_no_measuring_and_is_not_sent_twice() -> None:
    under_way = 0
    ages: list[float] = []

    async def send(path: str, body: dict[str, Any]) -> None:
        nonlocal under_way
        under_way += 1
        await asyncio.Event().wait()

    def age_s() -> float:
        ages.append(1.0)
        return 1.0

    async def many_samples() -> bool:
        return under_way > 0 and len(ages) > 20

    before = asyncio.all_tasks()
    async with reporter(send, queue_age_s=age_s) as reports:
        await eventually_async(many_samples, within_s=30)
    assert under_way == 1
    assert reports.sent == 0
    assert asyncio.all_tasks() == before, "stopping ends the report that hangs as well"


async def test_a_reporter_starts_once_stops_at_once_and_starts_again() -> None:
    sent = Sent()
    reports = reporter(sent)
    await reports.stop()
    for _ in range(2):
        reports.start()
        reports.start()
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "headgate load reports"]) == 1
        seen = len(sent.reports)
        await eventually_async(partial(grown, sent, seen), within_s=30)
        await reports.stop()
        await reports.stop()


async def grown(sent: Sent, seen: int) -> bool:
    return len(sent.reports) > seen


async def test_g5_processes_that_start_together_do_not_report_together() -> None:
    """The first report comes after a random part of the interval."""
    early, late = Sent(), Sent()
    async with (
        LoadReporter(late, interval_s=3600, draw=lambda: 0.99),
        LoadReporter(early, interval_s=3600, draw=lambda: 0.0),
    ):
        await eventually_async(partial(grown, early, 0), within_s=30)
    assert len(early.reports) == 1
    assert late.reports == []


def test_g5_the_service_takes_the_reports(tmp_path: Path) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(POLICIES)

    async def main(base: str) -> list[Any]:
        answers = []
        async with httpx.AsyncClient(base_url=base, trust_env=False) as client:

            async def send(path: str, body: dict[str, Any]) -> None:
                answer = await client.post(path, json=body)
                answers.append((answer.raise_for_status().status_code, answer.json()["bucket"]))

            async def both() -> bool:
                return len(set(answers)) == 2

            async with reporter(send, queue_age_s=lambda: 0.5), reporter(send, policy="crowd", source="host-1"):
                await eventually_async(both, within_s=30)
        return answers

    with running("valkey", tmp_path) as store, live(store.url, file) as api:
        assert set(asyncio.run(main(api.base))) == {(202, "*"), (202, "crowd")}
