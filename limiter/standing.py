"""How the store stands with this node: whether to ask it, and what its silence means. Acquires and settles share it.

no answer in time           it failed: after a few times it is only probed (limiter/model/breaker.py)
busy, shunned, no memory    it did not fail: more was asked than it can do, or nothing was asked, or it said so (S8)
"""

from __future__ import annotations

import random
import time

from limiter.model.breaker import Breaker
from limiter.model.tally import Unanswered
from limiter.store.errors import StoreBusy, StoreOutOfMemory, StoreShunned, StoreUnavailable


class Standing:
    """The breaker of a node, with a clock and draws."""

    def __init__(self) -> None:
        self.breaker = Breaker()

    def allows(self, now_s: float) -> bool:
        """Whether to ask the store now."""
        return self.breaker.allows(now_s)

    def answered(self) -> None:
        """It did."""
        self.breaker.succeed()

    def unanswered(self, error: StoreUnavailable) -> Unanswered:
        """It did not: why."""
        if isinstance(error, StoreShunned):
            return "breaker"
        if isinstance(error, StoreBusy):
            return "busy"
        if isinstance(error, StoreOutOfMemory):
            return "out_of_memory"
        self.breaker.fail(time.monotonic(), random.random())  # noqa: S311
        return "deadline"
