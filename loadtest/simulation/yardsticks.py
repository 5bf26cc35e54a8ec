"""Yardsticks: laws that others use. For caps, one that nothing steers; for overload control, gates.

StaticCap    requests per second as somebody who knew the mean cost beforehand would have set them

Everyone     no control at all
OnOff        refuse everybody while the last second was bad, nobody while it was not
Fixed        a limit on what is in flight that somebody set
Published    S2 and S3 to the letter, with exact percentiles: rates by additive increase, multiplicative decrease
Gradient     a limit on what is in flight: limit · long-term mean response time ÷ the present one, and some room
Vegas        a limit on what is in flight: the queue is limit · (1 − shortest response time ÷ the present one)

The last two move once a second, on at least ten answers, as their best-known implementations do, and know no target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from loadtest.simulation.steered import CRITICAL, CYCLE_S, Ticket

GRANTED = object()
BURST_S = 0.1
"""Of a static cap: so much of a second may gather."""


class StaticCap:
    """A cap that stays: tokens at a rate, a tenth of a second's worth at once."""

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self._burst = max(1.0, BURST_S * cap)
        self._tokens = self._burst
        self._at_s = 0.0

    def ask(self, now_s: float, class_number: int = 1, partition: int = 0, *, weight: float = 1.0) -> Ticket | None:
        """One token for each, whatever its weight."""
        return self.ask_many(now_s, 1, partition)

    def ask_many(self, now_s: float, asked: int, partition: int = 0) -> Ticket | None:
        """As many as there are whole tokens."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._at_s) * self.cap)
        self._at_s = max(self._at_s, now_s)
        granted = min(asked, math.floor(self._tokens))
        if not granted:
            return None
        self._tokens -= granted
        return Ticket(round(now_s * 1e6), 1.0, in_requests=True, class_number=1, partition=partition, requests=granted)

    def settle(
        self, now_s: float, ticket: Ticket, work: float, *, latency_s: float = 0.0, squares: float = 0.0
    ) -> None:
        """Nothing is learned."""

    def report(self, now_s: float, ticket: Ticket, work: float) -> None:
        """Nothing is learned."""

    def look(self, now_s: float) -> None:
        """Nothing is steered."""

    def standing(self) -> tuple[float, float, bool]:
        """As it was set."""
        return self.cap, 1.0, True


class Everyone:
    """No control."""

    def __init__(self) -> None:
        self.overloaded = False

    def ask(self, now_s: float, class_number: int) -> object | None:
        """All go ahead."""
        return GRANTED

    def settle(self, now_s: float, ticket: object, latency_s: float, *, failed: bool) -> None:
        """Nothing is learned."""

    def look(self, now_s: float) -> None:
        """Nothing is steered."""


class OnOff(Everyone):
    """Everybody or nobody, by whether more than a share of the last second's answers was late."""

    def __init__(self, target_s: float, *, allowed: float, interval_s: float = 1.0) -> None:
        super().__init__()
        self._target_s, self._allowed = target_s, allowed
        self._every = round(interval_s / CYCLE_S)
        self._cycles = self._answered = self._late = 0

    def ask(self, now_s: float, class_number: int) -> object | None:
        """Nobody while it is overloaded."""
        return None if self.overloaded else GRANTED

    def settle(self, now_s: float, ticket: object, latency_s: float, *, failed: bool) -> None:
        """Count."""
        self._answered += 1
        self._late += latency_s > self._target_s or failed

    def look(self, now_s: float) -> None:
        """Judge an interval."""
        self._cycles += 1
        if self._cycles % self._every == 0:
            self.overloaded = self._late > self._allowed * max(1, self._answered)
            self._answered = self._late = 0


class Fixed(Everyone):
    """So many in flight, whatever happens."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.in_flight = 0

    def ask(self, now_s: float, class_number: int) -> object | None:
        """While there is room."""
        if self.in_flight >= int(self.limit):
            return None
        self.in_flight += 1
        return GRANTED

    def settle(self, now_s: float, ticket: object, latency_s: float, *, failed: bool) -> None:
        """Make room."""
        self.in_flight -= 1


class Adaptive(Fixed):
    """A limit that moves at the end of each window of a second with at least ten answers."""

    WINDOW_S = 1.0
    ANSWERS_MIN = 10
    LIMIT_MAX = 100_000.0

    def __init__(self, initial: float = 20.0) -> None:
        super().__init__(initial)
        self._ends_s, self._sum_s, self._answers, self._most = self.WINDOW_S, 0.0, 0, 0

    def settle(self, now_s: float, ticket: object, latency_s: float, *, failed: bool) -> None:
        """Measure, and move the limit if a window has ended."""
        self._sum_s += latency_s
        self._answers += 1
        self._most = max(self._most, self.in_flight)
        self.in_flight -= 1
        if now_s <= self._ends_s:
            return
        mean_s, answers, most = self._sum_s / self._answers, self._answers, self._most
        self._ends_s, self._sum_s, self._answers, self._most = now_s + self.WINDOW_S, 0.0, 0, 0
        if answers >= self.ANSWERS_MIN:
            self.limit = self.moved(mean_s, most)

    def moved(self, mean_s: float, in_flight: int) -> float:
        """The limit after a window."""
        raise NotImplementedError


class Gradient(Adaptive):
    """The limit follows the ratio of the long-term mean to the present one, with a tolerance of a half."""

    WARM_UP, WINDOW, TOLERANCE, QUEUE, SMOOTHING, LEAST = 10, 600, 1.5, 4.0, 0.2, 20.0

    def __init__(self) -> None:
        super().__init__()
        self._long_s, self._count = 0.0, 0

    def moved(self, mean_s: float, in_flight: int) -> float:
        """Towards limit · gradient + QUEUE; never while the limit is not half used."""
        self._count += 1
        if self._count <= self.WARM_UP:
            self._long_s += (mean_s - self._long_s) / self._count
        else:
            weight = 2 / (self.WINDOW + 1)
            self._long_s = self._long_s * (1 - weight) + mean_s * weight
        long_s = self._long_s
        if long_s / mean_s > 2:  # the long-term mean comes down faster after an overload
            self._long_s *= 0.95
        if in_flight < self.limit / 2:
            return self.limit
        gradient = max(0.5, min(1.0, self.TOLERANCE * long_s / mean_s))
        aimed = self.limit * gradient + self.QUEUE
        moved = self.limit * (1 - self.SMOOTHING) + aimed * self.SMOOTHING
        return max(self.LEAST, min(self.LIMIT_MAX, moved))


class Vegas(Adaptive):
    """The limit keeps a queue of a few, as the shortest response time tells it; that is measured again now and then."""

    PROBE = 30.0

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = Random(f"probes {seed}")  # noqa: S311
        self._shortest_s, self._probes, self._jitter = 0.0, 0, self._chance.uniform(0.5, 1)

    def moved(self, mean_s: float, in_flight: int) -> float:
        """Up while the queue is short, down while it is long."""
        self._probes += 1
        if self._jitter * self.PROBE * self.limit <= self._probes:
            self._jitter, self._probes, self._shortest_s = self._chance.uniform(0.5, 1), 0, mean_s
            return self.limit
        if not self._shortest_s or mean_s < self._shortest_s:
            self._shortest_s = mean_s
            return self.limit
        if in_flight * 2 < self.limit:
            return self.limit
        unit = max(1, int(math.log10(max(1, int(self.limit)))))
        queue = math.ceil(self.limit * (1 - self._shortest_s / mean_s))
        if queue <= unit:
            moved = self.limit + 6 * unit
        elif queue < 3 * unit:
            moved = self.limit + unit
        elif queue > 6 * unit:
            moved = self.limit - unit
        else:
            return self.limit
        return max(1.0, min(self.LIMIT_MAX, moved))


class Tokens:
    """A second's worth at once, one at least."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._held, self._at_s = max(1.0, rate), 0.0

    def take(self, now_s: float) -> bool:
        """One, if there is one."""
        self._held = min(self._held + (now_s - self._at_s) * self.rate, max(1.0, self.rate))
        self._at_s = now_s
        if self._held < 1:
            return False
        self._held -= 1
        return True

    def set(self, rate: float) -> None:
        """Another rate: what is held shrinks with it."""
        self.rate = rate
        self._held = min(self._held, max(1.0, rate))


class _Class:
    def __init__(self, rate: float) -> None:
        self.tokens = Tokens(rate)
        self.latencies_s: list[float] = []
        self.current_s: float | None = None
        self.error = 0.0
        self.since_s = 0.0
        self.low = 0


class Published(Everyone):
    """S2 and S3 with the published parameters."""

    PERCENTILE, NREQ, TIMEOUT_S, ALPHA = 0.9, 100, 1.0, 0.7
    ERR_I, ERR_D, ADJ_I, ADJ_D, C_I = -0.5, 0.0, 2.0, 1.2, -0.1
    RATE_MIN, RATE_MAX, ADJLO_D, LC_THRESH = 0.05, 5000.0, 10.0, 20

    def __init__(self, target_s: float, classes: Sequence[int] = (CRITICAL,)) -> None:
        super().__init__()
        self._target_s = target_s
        self._classes = {number: _Class(self.RATE_MAX) for number in classes}

    def ask(self, now_s: float, class_number: int) -> object | None:
        """While the class has a token."""
        return class_number + 1 if self._classes[class_number].tokens.take(now_s) else None

    def settle(self, now_s: float, ticket: object, latency_s: float, *, failed: bool) -> None:
        """Measure."""
        assert isinstance(ticket, int)
        self._classes[ticket - 1].latencies_s.append(latency_s)

    def look(self, now_s: float) -> None:
        """Each class that has enough samples, or has waited long enough."""
        for number in self._classes:
            known = self._classes[number]
            known.since_s += CYCLE_S
            if len(known.latencies_s) >= self.NREQ or known.since_s >= self.TIMEOUT_S - 1e-9:
                known.since_s = 0.0
                latencies, known.latencies_s = sorted(known.latencies_s), []
                if latencies:
                    self._move(number, latencies)
        self.overloaded = any(known.error > 0 for known in self._classes.values())

    def _move(self, number: int, latencies: Sequence[float]) -> None:
        known = self._classes[number]
        sample_s = latencies[min(len(latencies) - 1, math.ceil(self.PERCENTILE * len(latencies)) - 1)]
        before_s = sample_s if known.current_s is None else known.current_s
        known.current_s = self.ALPHA * before_s + (1 - self.ALPHA) * sample_s
        error = known.error = (known.current_s - self._target_s) / self._target_s
        rate = known.tokens.rate
        lower = [other.tokens for at, other in self._classes.items() if at > number]
        higher = [other for at, other in self._classes.items() if at < number]
        if error > self.ERR_D:
            if any(tokens.rate > self.RATE_MIN for tokens in lower):
                for tokens in lower:
                    tokens.set(max(self.RATE_MIN, tokens.rate / self.ADJLO_D))
            elif lower and known.low < self.LC_THRESH:
                known.low += 1
            else:
                known.tokens.set(max(self.RATE_MIN, rate / self.ADJ_D))
            return
        known.low = 0
        if error < self.ERR_I and not any(other.error > self.ERR_D for other in higher):
            known.tokens.set(min(self.RATE_MAX, rate - (error - self.C_I) * self.ADJ_I))
