"""Virtual time: requests come, are decided, do their work and report it; the controller looks every cycle."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Literal, NamedTuple

from limiter.model.control.cycle import State, step
from limiter.model.policy.choices import Mechanism
from loadtest.simulation.buckets import Bucket
from loadtest.simulation.workloads import COMMITTED, Workload

CYCLE_US = 100_000
LATENCY_S = (0.02, 0.08)
"""A request takes between these to do its work and report it."""
RETRY_AFTER_S = (0.05, 0.2)


class Point(NamedTuple):
    """One bucket in one cycle."""

    at_s: float
    offered: float
    """Work of the requests that came for the first time."""
    admitted: float
    """Work of the requests that were admitted."""
    requests: int
    refused: int
    cap: float
    """Requests a second; for a bucket that counts work, NaN."""
    charge: float
    counts_requests: bool
    rule: str


@dataclass(slots=True)
class Run:
    """All that happened: the points of each tenant, and when how much work was admitted."""

    workload: Workload
    mechanism: Mechanism
    points: dict[str, list[Point]]
    admissions: dict[str, list[tuple[float, float]]]
    """Time (s) and work."""


class _Request(NamedTuple):
    tenant: str
    work: float
    attempt: int


class _Report(NamedTuple):
    tenant: str
    work: float
    charged: float
    in_requests: bool


@dataclass(slots=True)
class _Tally:
    offered: float = 0.0
    admitted: float = 0.0
    requests: int = 0
    refused: int = 0


@dataclass(slots=True)
class _Tenant:
    bucket: Bucket
    state: State = field(default_factory=State)
    known_us: int = 0
    """Until when it is known that nobody has touched the bucket since it was read."""
    is_unread: bool = False
    """Whether it was touched and that sample got lost."""
    tally: _Tally = field(default_factory=_Tally)
    points: list[Point] = field(default_factory=list)
    admissions: list[tuple[float, float]] = field(default_factory=list)


def simulate(workload: Workload, mechanism: Mechanism, *, seed: int = 1, committed: float = COMMITTED) -> Run:
    """One workload under one mechanism."""
    return _World(workload, mechanism, seed, committed).run()


class _World:
    def __init__(self, workload: Workload, mechanism: Mechanism, seed: int, committed: float) -> None:
        self._workload, self._mechanism = workload, mechanism
        self._draw, self._lost = Random(seed), Random(seed)  # noqa: S311
        names = sorted({stream.tenant for stream in workload.streams})
        self._tenants = {name: _Tenant(Bucket(mechanism, committed)) for name in names}
        self._events: list[tuple[int, int, _Request | _Report | Literal["cycle"]]] = []
        self._count = 0

    def run(self) -> Run:
        workload = self._workload
        for stream in workload.streams:
            # Each stream has its own draws, so that all mechanisms meet the same requests.
            for at_s, work in stream.arrivals(workload.duration_s, Random(self._draw.random())):  # noqa: S311
                self._at(at_s, _Request(stream.tenant, work, 1))
        for cycle in range(1, round(workload.duration_s * 1e6 / CYCLE_US) + 1):
            self._at(cycle * CYCLE_US / 1e6, "cycle")
        while self._events:
            now_us, _, event = heappop(self._events)
            if now_us > workload.duration_s * 1e6:
                break
            self._happen(event, now_us)
        tenants = self._tenants.items()
        points = {name: tenant.points for name, tenant in tenants}
        return Run(workload, self._mechanism, points, {name: tenant.admissions for name, tenant in tenants})

    def _at(self, at_s: float, event: _Request | _Report | Literal["cycle"]) -> None:
        self._count += 1
        heappush(self._events, (round(at_s * 1e6), self._count, event))

    def _happen(self, event: _Request | _Report | Literal["cycle"], now_us: int) -> None:
        if event == "cycle":
            self._cycle(now_us)
        elif isinstance(event, _Request):
            self._ask(event, now_us)
        elif isinstance(event, _Report):
            bucket = self._tenants[event.tenant].bucket
            bucket.settle(event.charged, in_requests=event.in_requests, work=event.work, now_us=now_us)

    def _ask(self, request: _Request, now_us: int) -> None:
        tenant = self._tenants[request.tenant]
        tally, now_s = tenant.tally, now_us / 1e6
        tally.requests += 1
        tally.offered += request.work if request.attempt == 1 else 0.0
        granted = tenant.bucket.acquire(now_us)
        if granted is not None:
            tally.admitted += request.work
            tenant.admissions.append((now_s, request.work))
            report = _Report(request.tenant, request.work, granted.charge, granted.in_requests)
            self._at(now_s + self._draw.uniform(*LATENCY_S), report)
            return
        tally.refused += 1
        if request.attempt <= self._workload.retries:
            again = request._replace(attempt=request.attempt + 1)
            self._at(now_s + self._draw.uniform(*RETRY_AFTER_S), again)

    def _cycle(self, now_us: int) -> None:
        from_s, to_s = self._workload.paused
        is_awake = not from_s <= now_us / 1e6 < to_s
        for tenant in self._tenants.values():
            is_lost = self._lost.random() < self._workload.lost
            rule = self._look(tenant, now_us, is_lost=is_lost) if is_awake else ""
            tenant.points.append(_point(tenant, now_us, rule))
            tenant.tally = _Tally()

    def _look(self, tenant: _Tenant, now_us: int, *, is_lost: bool) -> str:
        """One bucket's cycle; the rule that was applied to its cap, if any."""
        bucket = tenant.bucket
        if not bucket.was_touched():
            tenant.known_us = tenant.known_us if tenant.is_unread else now_us
            return ""
        tenant.is_unread = is_lost
        if is_lost:
            return ""
        tenant.state, moved = step(tenant.state, bucket.record, bucket.control, now_us=now_us, since_us=tenant.known_us)
        tenant.known_us = now_us
        bucket.steer(moved, now_us)
        return moved.reason.rule if moved.reason else ""


def _point(tenant: _Tenant, now_us: int, rule: str) -> Point:
    record, tally = tenant.bucket.record, tenant.tally
    counts_requests = tenant.bucket.counts_requests
    return Point(
        now_us / 1e6,
        tally.offered,
        tally.admitted,
        tally.requests,
        tally.refused,
        record.rate if record and counts_requests else float("nan"),
        record.charge if record else 0.0,
        counts_requests,
        rule,
    )
