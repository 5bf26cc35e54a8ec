"""The product's overload control as a gate: one bucket of a policy with an `overload` block (`steered.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

from loadtest.simulation.steered import CYCLE_S, Steered, Ticket

RATE = 1e9
"""A limit of work that never binds: what is refused, overload control refuses."""


class Guarded:
    """A policy with an `overload` block, in one partition or divided over several."""

    def __init__(
        self,
        overload: Mapping[str, Any],
        *,
        seed: int,
        partitions: int = 1,
        hasty: float = 0.0,
        cycle_s: float = CYCLE_S,
    ) -> None:
        """`hasty` is the share of the requests that claim to expect their answer within a millisecond (Q12)."""
        document = {"rate": RATE, "overload": dict(overload)}
        self.steered = Steered(document, seed=seed, partitions=partitions, cycle_s=cycle_s)
        self._chance = Random(f"callers {seed}")  # noqa: S311
        self._partitions, self._hasty = partitions, hasty

    @property
    def overloaded(self) -> bool:
        """True while callers are told to slow down."""
        return self.steered.overloaded

    def ask(self, now_s: float, class_number: int) -> object | None:
        """Decide on one request."""
        partition = self._chance.randrange(self._partitions) if self._partitions > 1 else 0
        requested_ms = 1.0 if self._hasty and self._chance.random() < self._hasty else None
        return self.steered.ask(now_s, class_number, partition, requested_ms=requested_ms)

    def settle(self, now_s: float, ticket: object, latency_s: float, *, failed: bool) -> None:
        """Report its answer."""
        assert isinstance(ticket, Ticket)
        if failed:  # as a node reports an outcome that the policy counts as missed (Q8)
            ticket = ticket._replace(expected_ms=-math.inf)
        self.steered.settle(now_s, ticket, 1.0, latency_s=latency_s)

    def look(self, now_s: float) -> None:
        """Run the controller's cycle."""
        self.steered.look(now_s)

    def replace_controller(self, *, in_order: bool) -> None:
        """Let another controller take over, from what the last one kept in order or happened to have kept."""
        if in_order:
            self.steered.end()
        self.steered.begin()

    def empty_store(self) -> None:
        """Lose all records and states."""
        self.steered.empty_store()
