"""Backends in virtual time: what is admitted comes back after a while, as late as the load makes it.

Fifo      c workers and one queue in the order of arrival
Sharing   c processors shared equally by all that are in: each request goes at min(1, c / n)
Slowing   response time = base + slope · excess of the rate over the capacity (Q7)
Delay     a time that no load changes: endless capacity

A backend may stand still (`pauses`: stretches in which no work is done, a hang or a collection of garbage), change its
speed, and answer some requests much later (outliers). `admit` takes a request, `next_s` says when the next one is done,
`pop` returns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from random import Random
from typing import NamedTuple, Protocol

from loadtest.simulation.distributions import Draw

Pauses = Sequence[tuple[float, float]]
"""Stretches (from and to, seconds) in which no work is done, in order, none overlapping."""

Speed = Callable[[float], float]
"""How fast the workers are at a time (s), 1 is as the service time says."""


class Done(NamedTuple):
    """A request that came back."""

    at_s: float
    since_s: float
    ticket: object


class Backend(Protocol):
    """Works on the requests that are let in."""

    next_s: float
    """When the next request is done; infinite while there is none."""

    def admit(self, now_s: float, ticket: object) -> None:
        """Take a request."""

    def pop(self) -> Done:
        """The request that is done next."""


class Rest:
    """Working time: a clock that stands still in pauses. `worked` turns time into it, `at` turns it back."""

    def __init__(self, pauses: Pauses = ()) -> None:
        self._pauses = tuple(pauses)

    def worked(self, now_s: float) -> float:
        """How much working time has passed by now."""
        lost_s = 0.0
        for from_s, to_s in self._pauses:
            if now_s <= from_s:
                break
            lost_s += min(now_s, to_s) - from_s
        return now_s - lost_s

    def at(self, worked_s: float) -> float:
        """When so much working time will have passed."""
        now_s = worked_s
        for from_s, to_s in self._pauses:
            if now_s < from_s:
                break
            now_s += to_s - from_s
        return now_s


def every(period_s: float, length_s: float, until_s: float, *, first_s: float | None = None) -> Pauses:
    """Pauses of a length, one in each period."""
    begins = []
    at_s = period_s if first_s is None else first_s
    while at_s < until_s:
        begins.append((at_s, at_s + length_s))
        at_s += period_s
    return begins


class Pending:
    """Requests whose end is known, the soonest first."""

    def __init__(self) -> None:
        self.next_s = math.inf
        self._heap: list[tuple[float, int, float, object]] = []
        self._count = 0

    def pop(self) -> Done:
        """The request that is done next."""
        done_s, _, since_s, ticket = heappop(self._heap)
        self.next_s = self._heap[0][0] if self._heap else math.inf
        return Done(done_s, since_s, ticket)

    def _push(self, done_s: float, since_s: float, ticket: object) -> None:
        self._count += 1
        heappush(self._heap, (done_s, self._count, since_s, ticket))
        self.next_s = self._heap[0][0]


class Fifo(Pending):
    """c workers, one queue in order of arrival."""

    def __init__(
        self,
        workers: int,
        service: Draw,
        seed: int,
        *,
        pauses: Pauses = (),
        speed: Speed | None = None,
        outliers: float = 0.0,
        outlier_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._chance = Random(f"backend {seed}")  # noqa: S311
        self._free_s = [0.0] * workers
        self._service, self._speed, self._rest = service, speed, Rest(pauses)
        self._paused = bool(pauses)
        self._outliers, self._outlier_s = outliers, outlier_s

    def admit(self, now_s: float, ticket: object) -> None:
        """Take a request: who is free first works on it."""
        at_s = self._rest.worked(now_s) if self._paused else now_s
        free_s = self._free_s[0]
        start_s = max(free_s, at_s)
        took_s = self._service(self._chance)
        if self._speed is not None:
            took_s /= self._speed(start_s)
        heapreplace(self._free_s, start_s + took_s)
        done_s = start_s + took_s
        if self._outliers and self._chance.random() < self._outliers:
            done_s += self._outlier_s
        if self._paused:
            done_s = self._rest.at(done_s)
        self._push(done_s, now_s, ticket)


class Sharing:
    """c processors shared equally by all that are in. Time is kept as the service that each of them has had."""

    def __init__(self, processors: int, service: Draw, seed: int, *, pauses: Pauses = ()) -> None:
        self.next_s = math.inf
        self._chance = Random(f"backend {seed}")  # noqa: S311
        self._processors, self._service, self._rest = processors, service, Rest(pauses)
        self._heap: list[tuple[float, int, float, object]] = []
        self._count = 0
        self._had_s = self._now_s = 0.0

    def admit(self, now_s: float, ticket: object) -> None:
        """Take a request: all that are in go slower."""
        self._advance(self._rest.worked(now_s))
        self._count += 1
        heappush(self._heap, (self._had_s + self._service(self._chance), self._count, now_s, ticket))
        self._foresee()

    def pop(self) -> Done:
        """The request that is done next."""
        self._advance(self._now_s + (self._heap[0][0] - self._had_s) / self._pace())
        had_s, _, since_s, ticket = heappop(self._heap)
        self._had_s = max(self._had_s, had_s)
        done_s = self._rest.at(self._now_s)
        self._foresee()
        return Done(done_s, since_s, ticket)

    def _pace(self) -> float:
        return min(1.0, self._processors / len(self._heap)) if self._heap else 1.0

    def _advance(self, worked_s: float) -> None:
        if worked_s > self._now_s:
            self._had_s += (worked_s - self._now_s) * self._pace()
            self._now_s = worked_s

    def _foresee(self) -> None:
        if not self._heap:
            self.next_s = math.inf
            return
        left_s = max(0.0, self._heap[0][0] - self._had_s) / self._pace()
        self.next_s = self._rest.at(self._now_s + left_s)


class Delay(Pending):
    """A time that no load changes; `longer` adds to it at a time (a slow dependency)."""

    def __init__(
        self,
        service: Draw,
        seed: int,
        *,
        outliers: float = 0.0,
        outlier_times: float = 10.0,
        longer: Callable[[float], float] | None = None,
        pauses: Pauses = (),
    ) -> None:
        super().__init__()
        self._chance = Random(f"backend {seed}")  # noqa: S311
        self._service, self._longer, self._rest = service, longer, Rest(pauses)
        self._outliers, self._times = outliers, outlier_times

    def admit(self, now_s: float, ticket: object) -> None:
        """Take a request."""
        took_s = self._took_s(now_s)
        if self._outliers and self._chance.random() < self._outliers:
            took_s *= self._times
        self._push(self._rest.at(self._rest.worked(now_s) + took_s), now_s, ticket)

    def _took_s(self, now_s: float) -> float:
        took_s = self._service(self._chance)
        return took_s if self._longer is None else took_s + self._longer(now_s)


class Slowing(Delay):
    """Can do `capacity` a second; beyond that every answer takes longer in proportion to the excess (Q7)."""

    SLICES = 10

    def __init__(
        self,
        noise: Draw,
        seed: int,
        *,
        capacity: float = 3000.0,
        base_s: float = 0.170,
        slope_s: float = 0.0001,
        outliers: float = 0.0,
        pauses: Pauses = (),
    ) -> None:
        super().__init__(noise, seed, outliers=outliers, pauses=pauses)
        self._capacity, self._base_s, self._slope_s = capacity, base_s, slope_s
        self._counts = [0] * (self.SLICES + 1)
        self._slice = -1
        self._total = 0

    def _took_s(self, now_s: float) -> float:
        excess = max(0.0, self._rate(now_s) - self._capacity)
        return (self._base_s + self._slope_s * excess) * self._service(self._chance)

    def _rate(self, now_s: float) -> float:
        """Requests in the second before now, the oldest slice in part."""
        slices, counts = self.SLICES, self._counts
        at = now_s * slices
        number = int(at)
        if number != self._slice:
            for old in range(max(self._slice + 1, number - slices), number + 1):
                self._total -= counts[old % (slices + 1)]
                counts[old % (slices + 1)] = 0
            self._slice = number
        counts[number % (slices + 1)] += 1
        self._total += 1
        if number < slices:
            return self._total / max(now_s, 0.05)
        return self._total - counts[(number + 1) % (slices + 1)] * (at - number)
