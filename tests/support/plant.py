"""A bucket under load in virtual time: the model of the scripts and the controller's own steps, request by request.

Demand is a multiple of the limit and comes at random; requests last a while and report their work when they end, or as
they go. What is judged is the work of admitted requests, whenever they end, as a share of the limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

from limiter.model.bucket.operations import Acquire, Charge, Settle, Want
from limiter.model.control import kept_state
from limiter.model.control.cycle_step import State, control_params, step
from limiter.model.control.policy_memory import PolicyMemory
from limiter.model.control.stewardship import Steer, steer_bucket
from limiter.model.ledger.ledger import Ledger
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy

CYCLE_US = 100_000
TTL_US = 86_400_000_000

Cost = Callable[[float, Random], float]
"""The work of a request at a time (s)."""


def constant(work: float) -> Cost:
    return lambda _at_s, _draw: work


def uniform(mean: float) -> Cost:
    return lambda _at_s, draw: 2 * mean * draw.random()


def pareto(mean: float) -> Cost:
    """Of shape 1.5, cut at a hundred means."""
    return lambda _at_s, draw: mean * min(draw.paretovariate(1.5), 300.0) / 2.884530


@dataclass
class Load:
    """What callers ask of a bucket."""

    cost: Cost
    mean: float
    """Work of a request, on average."""
    duration_s: float = 0.1
    demand: float = 3.0
    """As a multiple of the limit."""
    progress: int = 0
    """How often a request reports its work before it ends."""
    lost: float = 0.0
    """Share of the callers that never settle."""
    descriptors: Sequence[dict[str, str]] = ({},)
    """One is drawn for each request."""


@dataclass
class Plant:
    """One bucket of a policy, and the controller that steers it."""

    policy: dict[str, Any]
    load: Load
    seed: int = 1
    restart_s: float = 0.0
    """How often another controller takes over, from what was kept."""
    partitions: int = 1
    policy_work: float = 0.0
    now_us: int = 0
    admitted: list[tuple[float, float]] = field(default_factory=list)
    """Time (s) and work in units of the limit of each request that was admitted."""
    caps: list[float] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy = read_policy({"name": "p", "match": {}, **self.policy})
        self.limit, self.control = Limit(policy, partitions=self.partitions), control_params(policy)
        self.ledger, self.state, self.draw = Ledger(), State(), Random(self.seed)
        self.known_us, self.count, self.restarted_us = 0, 0, 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.committed = self.limit.terms.committed / self.partitions
        self._next_request()

    @property
    def record(self) -> Any:
        return self.ledger.records["p"]

    def run(self, seconds: float) -> None:
        """Let this time pass."""
        until_us = self.now_us + round(seconds * 1e6)
        while self.now_us < until_us:
            end_us = (self.now_us // CYCLE_US + 1) * CYCLE_US
            while self.events and self.events[0][0] <= end_us:
                self.now_us, _, event = heappop(self.events)
                event()
            self.now_us = end_us
            self._cycle()

    def share(self, *, from_s: float) -> float:
        """Work admitted from a time on, as a share of the limit."""
        work = sum(work for at_s, work in self.admitted if at_s > from_s)
        return work / (self.committed * (self.now_us / 1e6 - from_s))

    def _at(self, at_us: int, event: Callable[[], None]) -> None:
        self.count += 1
        heappush(self.events, (at_us, self.count, event))

    def _next_request(self) -> None:
        rate = self.load.demand * self.committed / self.load.mean
        self._at(self.now_us + 1 + round(self.draw.expovariate(rate) * 1e6), self._ask)

    def _ask(self) -> None:
        self._next_request()
        limit, now_us = self.limit, self.now_us
        descriptor = self.draw.choice(self.load.descriptors)
        weight = limit.weight(descriptor)
        counted = weight if limit.weighs_requests else 1.0
        minimum = limit.minimums[Criticality.CRITICAL]
        want = Want("p", limit.params(now_us), minimum, limit.charge * weight, limit.how_unsaid, counted)
        (answer,) = self.ledger.acquire([Acquire((want,))], now_us)
        if not answer.granted:
            return
        work = self.load.cost(now_us / 1e6, self.draw)
        self.admitted.append((now_us / 1e6, work * weight))
        if self.load.lost and self.draw.random() < self.load.lost:
            return
        bucket = answer.buckets[0]
        self.count += 1
        settle = Settle(
            reservation=str(self.count),
            charges=(Charge("p", bucket.charge, weight, in_requests=bucket.in_requests),),
            work=work,
            acquired_us=now_us,
            deadline_us=now_us + TTL_US,
        )
        steps = self.load.progress + 1
        for number in range(1, steps + 1):
            part = settle if number == steps else settle.but(work=work * number / steps, final=False)
            at_us = now_us + round(self.load.duration_s * 1e6 * number / steps)
            self._at(at_us, lambda part=part: self._settle(part))  # type: ignore[misc]

    def _settle(self, settle: Settle) -> None:
        self.ledger.settle([settle], self.now_us)
        if settle.final:
            del self.ledger.tombstones[settle.reservation]

    def _cycle(self) -> None:
        now_us = self.now_us
        if self.restart_s and now_us - self.restarted_us >= self.restart_s * 1e6:
            self.restarted_us = now_us
            kept = kept_state.unpack(kept_state.pack(self.state, []))
            assert kept is not None
            self.state = kept.state
        if self.ledger.touched:
            self.ledger.touched.clear()
            self.ledger.epoch += 1
            self.state, moved = step(
                self.state,
                self.record,
                self.control,
                now_us=now_us,
                since_us=self.known_us,
                memory=PolicyMemory(work=self.policy_work),
            )
            self.rules.append(moved.reason.rule if moved.reason else "")
            row = Steer("p", self.limit.params(now_us), moved.cap, moved.charge, moved.requests_for)
            if not row.only_keeps:
                steer_bucket(self.record, row, now_us)
        self.known_us = now_us
        if "p" in self.ledger.records:
            self.caps.append(self.record.rate)
