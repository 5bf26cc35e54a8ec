"""Locust's users, the shape of their number, and the figures beside Locust's own.

Started by `python -m loadtest.locust`; by hand as docs/loadtest.md says.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import gevent
import msgspec
from gevent.pool import Pool
from locust import FastHttpUser, LoadTestShape, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtest.locust.attempts import Attempt
from loadtest.locust.caller import Answer, Caller
from loadtest.locust.draws import WORKLOADS, Workload
from loadtest.locust.run_tally import Tally
from loadtest.locust.shapes import SHAPES, users_at

TALLY = "headgate_tally"
SHARE_EVERY_S = 1.0
SAY_EVERY_S = 5.0
ANSWER_TIMEOUT_S = 5.0
SPAWN_PER_S = 100
SETTLING_MAX = 2_000
"""Settles under way at once; beyond that users wait for theirs."""


class Figures:
    """This process's tally, the part that was sent to the master, and the file of attempts if one is wanted."""

    def __init__(self) -> None:
        self.total = Tally()
        self._untold = Tally()
        self._late_ms = 0.0
        self._records: BinaryIO | None = None

    def begin(self, *, late_ms: float, records: str) -> None:
        """Set the limit of late answers (ms), and the file for attempts, a line of JSON each."""
        self._late_ms = late_ms
        if records:
            self._records = Path(records).open("wb")  # noqa: SIM115  closed by `end`

    def tell(self, attempt: Attempt) -> None:
        """Count an attempt."""
        self.total.count(attempt, late_ms=self._late_ms)
        self._untold.count(attempt, late_ms=self._late_ms)
        if self._records is not None:
            self._records.write(msgspec.json.encode(attempt) + b"\n")

    def untold(self) -> dict[str, str]:
        """Return what was not sent to the master yet, and count it as sent."""
        told, self._untold = self._untold, Tally()
        return {"tally": msgspec.json.encode(told).decode()}

    def end(self) -> None:
        """Close the file."""
        if self._records is not None:
            self._records.close()


figures = Figures()


settling = Pool(SETTLING_MAX)


@events.init_command_line_parser.add_listener
def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="steady", help="how the number of users goes")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long; 0: the shape's own duration")
    parser.add_argument("--nominal-users", type=int, default=40, help="what the shape's multiples multiply")
    parser.add_argument("--think-ms", type=float, default=100.0, help="mean pause between a user's requests")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed", help="what requests cost")
    parser.add_argument("--zipf", type=float, default=1.1, help="exponent of the tenants' popularity")
    parser.add_argument("--nodes", default="", help="API nodes, separated by commas; empty: --host alone")
    parser.add_argument("--late-ms", type=float, default=200.0, help="an answer is late beyond this")
    parser.add_argument("--limit", type=float, default=0.0, help="work a second that is allowed; for the progress line")
    parser.add_argument("--tally", default="", help="where the figures go at the end (JSON)")
    parser.add_argument("--records", default="", help="where every attempt goes (a line of JSON each)")
    parser.add_argument("--seed", type=int, default=1)


@events.init.add_listener
def _init(environment: Environment, **_: Any) -> None:
    runner = environment.runner
    if isinstance(runner, MasterRunner):
        runner.register_message(TALLY, _hear)
    if isinstance(runner, WorkerRunner):
        gevent.spawn(_share, runner)
    else:
        gevent.spawn(_say, environment)


def _hear(environment: Environment, msg: Any, **_: Any) -> None:
    figures.total.add(msgspec.json.decode(msg.data["tally"], type=Tally))


def _share(runner: WorkerRunner) -> None:
    while True:
        gevent.sleep(SHARE_EVERY_S)
        runner.send_message(TALLY, figures.untold())


def _say(environment: Environment) -> None:
    """Print a line of progress now and then."""
    began_s, limit = time.time(), environment.parsed_options.limit  # type: ignore[union-attr]
    while True:
        gevent.sleep(SAY_EVERY_S)
        second = figures.total.seconds.get(int(time.time()) - 2)
        if second is not None:
            users = environment.runner.user_count if environment.runner else 0
            print(
                f"{time.time() - began_s:5.0f} s  {users:4d} users  {second.granted + second.refused:5d} asks/s, "
                f"{second.refused} refused, {second.failed} failed  work {second.admitted:.0f}/s, limit {limit:g}",
                flush=True,
            )


@events.test_start.add_listener
def _start(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    assert options is not None
    figures.begin(late_ms=options.late_ms, records=options.records)


@events.test_stop.add_listener
def _stop(environment: Environment, **_: Any) -> None:
    # Sent before the worker says that it has stopped, and so received before the master ends.
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.send_message(TALLY, figures.untold())


@events.quitting.add_listener
def _quit(environment: Environment, **_: Any) -> None:
    figures.end()
    options = environment.parsed_options
    if options is not None and options.tally and not isinstance(environment.runner, WorkerRunner):
        Path(options.tally).write_bytes(msgspec.json.encode(figures.total))


class ChosenShape(LoadTestShape):
    """The shape that `--shape` names."""

    def tick(self) -> tuple[int, float] | None:
        """Return the number of users now; None: the run is over."""
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        shape = SHAPES[options.shape]
        duration_s = options.seconds or shape.default_s
        users = users_at(shape, self.get_run_time(), duration_s=duration_s, nominal_users=options.nominal_users)
        return None if users is None else (users, SPAWN_PER_S)


class HeadgateUser(FastHttpUser):
    """Acquires, works, settles, thinks."""

    network_timeout = ANSWER_TIMEOUT_S
    connection_timeout = ANSWER_TIMEOUT_S

    users_made = 0

    def on_start(self) -> None:
        """Set up draws of its own, seeded by its number within its worker."""
        options: Any = self.environment.parsed_options
        HeadgateUser.users_made += 1
        worker = getattr(self.environment.runner, "worker_index", 0)
        self.draws = Random(f"{options.seed}/{worker}/{HeadgateUser.users_made}")  # noqa: S311
        self.workload = Workload(
            tenants=options.tenants, zipf_exponent=options.zipf, operations=WORKLOADS[options.workload]
        )
        self.think_s = options.think_ms / 1000
        nodes = str(options.nodes or self.host).split(",")
        self.caller = Caller(nodes, self._send, figures.tell, self.draws, gevent.sleep, settling.spawn)

    @task
    def request(self) -> None:
        """Carry out one request, and pause for an exponential time."""
        self.caller.request(self.workload.draw(self.draws))
        gevent.sleep(self.draws.expovariate(1 / self.think_s))

    def _send(self, node: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        text, asked_s = body.decode(), time.perf_counter()
        with self.client.post(node + path, data=text, headers=headers, name=path, catch_response=True) as answer:
            latency_ms = 1000 * (time.perf_counter() - asked_s)
            if answer.status_code == 0:
                return Answer(0, failure=_kind(answer.error), latency_ms=latency_ms)
            if answer.status_code == 429:
                answer.success()
            header = answer.headers.get("retry-after") if answer.headers else None
            return Answer(answer.status_code, answer.content or b"", header, "", latency_ms)


def _kind(error: BaseException | None) -> str:
    """Return why there was no answer."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return "connection lost"
