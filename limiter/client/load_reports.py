"""Load of this process, measured and reported to `POST /v1/signals` (G5).

    executor      loop:    tasks ready to run + share of time that the loop's thread runs
                  threads: Δ(time running or ready to run) / Δt / processors, or the number of those that want the
                           interpreter's lock, whichever is more
    loop_delay_s  how late the loop comes to a task whose time has come
    cpu           Δ(CPU time) / Δt / processors; of the container, where it has a limit
    queue_age_s   age of the oldest item, by a function of the application's

    smoothed += (1 - e^(-t / smoothing_s)) · (sample - smoothed)

`executor` is meant to have the target 1.0 in a policy: as much is ready to run as can run at once.

Tasks are asked whether they wait for something that is not done, which is the same on asyncio's own loop and on uvloop;
callbacks that belong to no task show in `loop_delay_s` alone. A thread that waits for the interpreter's lock sleeps, as
far as the system knows; but a thread that wakes up has to wait for it as well, about a switch interval for each thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

SIGNALS_PATH = "/v1/signals"
SAMPLE_S = 0.1
COST_SHARE = 0.01
"""Counting ready tasks takes time; more than this share of the loop's is not spent on it."""
SEND_S = 5.0
"""A report is given up after this time, or after the interval if that is longer."""
TIMER_S = 0.001
"""Timers of loops are this exact."""

logger = logging.getLogger("headgate.load")

Send = Callable[[str, dict[str, Any]], Awaitable[object]]
QueueAge = Callable[[], float | None]


class Sample(NamedTuple):
    """Readings at one moment: sums since some beginning, and values of now; None where there is nothing to read."""

    cpu_s: float | None = None
    threads_s: float | None = None
    """Time that all threads ran or were ready to run."""
    loop_cpu_s: float | None = None
    """CPU time of the loop's thread."""
    tasks_ready: int | None = None
    lock_waiters: float | None = None
    """Threads that want the interpreter's lock."""
    loop_delay_s: float | None = None
    queue_age_s: float | None = None


class LoadMeter:
    """Smoothed loads by their names, out of samples. Pure: time is an argument."""

    def __init__(self, *, processors: float, smoothing_s: float = 3.0) -> None:
        self._processors = processors
        self._smoothing_s = smoothing_s
        self._sums: dict[str, tuple[float, float]] = {}
        self._smoothed: dict[str, tuple[float, float]] = {}
        """For each value, when it was last sampled and its average."""

    def sample(self, now_s: float, sample: Sample) -> None:
        """Take one sample; a sum counts from its second reading on."""
        threads, cpu = (self._rate(now_s, name, getattr(sample, name)) for name in ("threads_s", "cpu_s"))
        running = self._rate(now_s, "loop_cpu_s", sample.loop_cpu_s)
        self._smooth(now_s, "threads", None if threads is None else threads / self._processors)
        self._smooth(now_s, "cpu", None if cpu is None else cpu / self._processors)
        self._smooth(now_s, "running", running)
        for name in ("tasks_ready", "lock_waiters", "loop_delay_s", "queue_age_s"):
            self._smooth(now_s, name, getattr(sample, name))

    def loads(self) -> dict[str, float]:
        """Return the signals that a report tells."""
        known = {name: average for name, (_, average) in self._smoothed.items()}
        loads = {name: known[name] for name in ("cpu", "loop_delay_s", "queue_age_s") if name in known}
        executor = [known[name] for name in ("threads", "lock_waiters") if name in known]
        if "tasks_ready" in known:
            executor.append(known["tasks_ready"] + known.get("running", 0.0))
        return loads | ({"executor": max(executor)} if executor else {})

    def _rate(self, now_s: float, name: str, value: float | None) -> float | None:
        """Return how fast a sum has grown since its last reading."""
        if value is None:
            return None
        before_s, before = self._sums.get(name, (now_s, value))
        if now_s <= before_s:
            self._sums.setdefault(name, (now_s, value))
            return None
        self._sums[name] = (now_s, value)
        return max(0.0, value - before) / (now_s - before_s)

    def _smooth(self, now_s: float, name: str, value: float | None) -> None:
        if value is None or not 0 <= value < math.inf:
            return
        before_s, average = self._smoothed.get(name, (now_s, value))
        weight = 1 - math.exp(min(0.0, before_s - now_s) / self._smoothing_s)
        self._smoothed[name] = (now_s, average + weight * (value - average))


class Threads:
    """Time that the threads of this process run or are ready to run, as Linux counts it."""

    def __init__(self, folder: Path = Path("/proc/self/task")) -> None:
        self._folder = folder
        self._known_ns: dict[str, int] = {}
        self._sum_ns = 0

    def read_s(self) -> float | None:
        """Return the sum over all threads, also those that have ended; None where the system does not count it."""
        found: dict[str, int] = {}
        try:
            for thread in os.listdir(self._folder):  # noqa: PTH208 (names are enough)
                try:
                    ran_ns, waited_ns, _ = (self._folder / thread / "schedstat").read_text().split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                found[thread] = int(ran_ns) + int(waited_ns)
        except (OSError, ValueError):
            return None
        if not found:
            return None
        self._sum_ns += sum(max(0, total - self._known_ns.get(thread, 0)) for thread, total in found.items())
        self._known_ns = found
        return self._sum_ns / 1e9


def own_wait_s(path: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Return how long this thread was ready to run and did not, because of other processes and threads."""
    try:
        return int(path.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def has_lock() -> bool:
    """Return False on an interpreter without a global lock."""
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is None or bool(is_enabled())


class Processors(NamedTuple):
    """Processors that this process may use, and the file that counts their use by the container, if it has a limit."""

    number: float
    usage: Path | None = None

    def cpu_s(self) -> float:
        """Return the CPU time of the container if it has a limit, else of this process."""
        if self.usage is not None:
            try:
                text = self.usage.read_text()
                if self.usage.name == "cpu.stat":
                    return int(text.split("usage_usec", 1)[1].split(None, 1)[0]) / 1e6
                return int(text) / 1e9
            except (OSError, ValueError, IndexError):
                pass
        return time.process_time()


def find_processors(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup"), *, count: int | None = None
) -> Processors:
    """Return the processors of this process: those it may run on, or its container's limit if that is less."""
    if count is None:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    folders = [root, root / "cpu", root / "cpu,cpuacct"]
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                folders.insert(0, root / controllers / path.lstrip("/"))
    except (OSError, ValueError):
        pass
    for folder in folders:
        limit = _limit(folder)
        if limit is not None and limit < count:
            files = [folder / name for name in ("cpu.stat", "cpuacct.usage")]
            return Processors(limit, next(filter(_counts, files), None))
    return Processors(float(count))


def _limit(folder: Path) -> float | None:
    """Return how many processors a cgroup may use, of version 2 or 1; None without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        limit = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return limit if 0 < limit < math.inf else None


def _counts(path: Path) -> bool:
    try:
        return path.name != "cpu.stat" or "usage_usec" in path.read_text() if path.exists() else False
    except OSError:
        return False


def tasks_ready(loop: asyncio.AbstractEventLoop) -> int:
    """Return how many other tasks of the running loop wait for nothing but their turn."""
    own = asyncio.current_task(loop)
    ready = 0
    for task in asyncio.all_tasks(loop):
        # Both of asyncio's kinds of task have it; a foreign kind without it is not counted.
        waits_for = getattr(task, "_fut_waiter", own)
        if task is not own and waits_for is not own and (waits_for is None or waits_for.done()):
            ready += 1
    return ready


class Readings:
    """Reads what there is to read of this process, on the running loop."""

    def __init__(self, of: Literal["loop", "threads"], processors: Processors) -> None:
        self.processors = processors
        self._threads = Threads() if of == "threads" else None
        self._own_wait_s = 0.0

    def read(self, late_s: float, *, with_threads: bool = True) -> Sample:
        """Return a sample. `late_s`: how late the last pause ended. Threads cost a file each; few samples have them."""
        common = Sample(cpu_s=self.processors.cpu_s(), loop_delay_s=late_s)
        if self._threads is None:
            ready = tasks_ready(asyncio.get_running_loop())
            return common._replace(loop_cpu_s=time.thread_time(), tasks_ready=ready)
        waited_s = own_wait_s()
        waiters = max(0.0, late_s - (waited_s - self._own_wait_s)) / sys.getswitchinterval() if has_lock() else None
        self._own_wait_s = waited_s
        # A loop that does nothing else is late by the lock alone.
        return common._replace(
            threads_s=self._threads.read_s() if with_threads else None, lock_waiters=waiters, loop_delay_s=None
        )

    async def pause(self, seconds: float) -> float:
        """Wait, and return how much longer than that it took."""
        if self._threads is not None:
            self._own_wait_s = own_wait_s()
        began_s = time.monotonic()
        await asyncio.sleep(seconds)
        return max(0.0, time.monotonic() - began_s - seconds - TIMER_S)


class LoadReporter:
    """Reports the load of this process every second, on its own, until it is stopped; it raises nothing.

    `of="loop"` measures the running event loop, for applications that serve their requests on it. `of="threads"` is for
    those whose threads serve them, while the reporter runs on a loop that does nothing else. Without `policy` the
    report is for all policies of the namespace, with `key` for one bucket.
    """

    def __init__(
        self,
        send: Send,
        *,
        of: Literal["loop", "threads"] = "loop",
        policy: str | None = None,
        key: Mapping[str, str] | None = None,
        namespace: str | None = None,
        source: str | None = None,
        queue_age_s: QueueAge | None = None,
        interval_s: float = 1.0,
        smoothing_s: float = 3.0,
        processors: Processors | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        if key is not None and policy is None:
            raise ValueError("a report for one key names its policy")
        self._send = send
        self._of = of
        self._target = {"policy": policy, "key": None if key is None else dict(key), "namespace": namespace}
        self._source = source
        self._queue_age_s = queue_age_s
        self._interval_s = interval_s
        self._smoothing_s = smoothing_s
        self._processors = processors
        self._draw = draw
        self._task: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self.meter = LoadMeter(processors=1.0)
        self.sent = self.failures = 0
        """Counts of reports that were sent, and that could not be sent or measured."""
        self._warned: set[str] = set()

    def start(self) -> None:
        """Begin to measure and report, in a task of the running loop."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="headgate load reports")

    async def stop(self) -> None:
        """End; a report that is under way is given up."""
        tasks = [task for task in (self._task, self._sending) if task is not None]
        self._task = self._sending = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _run(self) -> None:
        # Here and not before: after a fork a child is a source of its own.
        self._readings = Readings(self._of, self._processors or find_processors())
        self.meter = LoadMeter(processors=self._readings.processors.number, smoothing_s=self._smoothing_s)
        source = self._source or f"{socket.gethostname()}-{os.getpid()}"
        report_s = time.monotonic() + self._draw() * self._interval_s
        late_s, is_first = 0.0, True
        while True:
            now_s, cpu_s = time.monotonic(), time.thread_time()
            # Sums say nothing before their second reading.
            is_due, is_first = now_s >= report_s and not is_first, False
            try:
                sample = self._readings.read(late_s, with_threads=is_due)
                self.meter.sample(now_s, sample._replace(queue_age_s=self._queue_age()))
                if is_due:
                    # Processes that have started together do not report together.
                    report_s = now_s + self._interval_s * (0.8 + 0.4 * self._draw())
                    self._report(source)
            except Exception as error:
                self._failed("measured", error)
            spent_s = time.thread_time() - cpu_s
            late_s = await self._readings.pause(min(self._interval_s, max(SAMPLE_S, spent_s / COST_SHARE)))

    def _report(self, source: str) -> None:
        signals = self.meter.loads()
        if not signals or (self._sending is not None and not self._sending.done()):
            return
        body = {name: value for name, value in self._target.items() if value is not None}
        self._sending = asyncio.get_running_loop().create_task(
            self._deliver(body | {"source": source, "signals": signals}), name="headgate load report"
        )

    async def _deliver(self, body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(max(SEND_S, self._interval_s)):
                await self._send(SIGNALS_PATH, body)
        except Exception as error:
            self._failed("reported", error)
        else:
            self.sent += 1
            self._warned.discard("reported")

    def _queue_age(self) -> float | None:
        """Return the age of the oldest item, 0 if there is none; None without a function, or if it fails."""
        if self._queue_age_s is None:
            return None
        try:
            return self._queue_age_s() or 0.0
        except Exception as error:
            self._failed("measured", error)
            return None

    def _failed(self, step: str, error: Exception) -> None:
        """Count a failure, and warn of the first one of its kind."""
        self.failures += 1
        if step not in self._warned:
            self._warned.add(step)
            logger.warning("load cannot be %s: %r; will try again every %g s", step, error, self._interval_s)
