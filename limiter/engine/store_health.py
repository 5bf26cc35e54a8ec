"""Circuit breaker shared by acquire and settle: whether to ask the store, and how to treat a missing answer.

no answer in time    the store failed: after a few times it is only probed (limiter/engine/breaker.py)
out of memory        the store answered: acquires go without it, settles go on (F-S8, F-S15)
busy                 nothing was sent, because more waits than the store can do; the next operation probes instead
shunned              nothing was sent, because the breaker is open
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from limiter.engine.breaker import Breaker
from limiter.model.tally import Unanswered
from limiter.store.store_errors import StoreBusy, StoreOutOfMemory, StoreShunned, StoreUnavailable


class StoreHealth:
    """A node's breaker, with a clock and draws."""

    def __init__(self, on_recovery: Callable[[], None] = lambda: None) -> None:
        self.breaker = Breaker()
        self._on_recovery = on_recovery

    def allows(self, now_s: float) -> bool:
        """True if the store may be asked now."""
        return self.breaker.allows(now_s)

    def answered(self) -> None:
        """Record that the store answered."""
        breaker = self.breaker
        if breaker.failures or breaker.is_open:
            if breaker.is_open:
                self._on_recovery()
            breaker.succeed()

    def unanswered(self, error: StoreUnavailable) -> Unanswered:
        """Classify why an operation was not applied, and record it in the breaker."""
        if isinstance(error, StoreShunned):
            return "breaker"
        if isinstance(error, StoreBusy):
            self.breaker.forgo()
            return "busy"
        if isinstance(error, StoreOutOfMemory):
            self.answered()
            return "out_of_memory"
        self.breaker.fail(time.monotonic(), random.random())  # noqa: S311
        return "deadline"
