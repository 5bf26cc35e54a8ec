"""Overload control of one bucket, as the controller holds it between cycles: what it knows, and why (Q, S, G5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from limiter.model.bucket.bucket import Record
from limiter.model.control.kept_state import REASONS_MAX, KeptState
from limiter.model.overload import overload_control
from limiter.model.overload.overload_control import Note, OverloadParams, OverloadState
from limiter.model.overload.shedding import ShedOrder
from limiter.model.overload.signals import Report


class Guard:
    """One bucket's controllers of overload."""

    __slots__ = ("notes", "state")

    def __init__(self, kept: KeptState | None) -> None:
        self.state = OverloadState() if kept is None else overload_control.unpack_state(kept.overload)
        self.notes: deque[Note] = deque(() if kept is None else kept.notes, REASONS_MAX)

    @property
    def due_us(self) -> float:
        """When it must be looked at again, whether anybody touched the bucket or not."""
        return overload_control.due_us(self.state)

    def reconsider(self) -> None:
        """The policy's block is another: begin by it at the next step."""
        self.state = overload_control.reconsidered(self.state)

    def step(
        self, record: Record, reports: Sequence[Report], params: OverloadParams, *, now_us: float, since_us: float
    ) -> ShedOrder | None:
        """One cycle: what to set in the record, where that differs."""
        self.state, order, reasons = overload_control.step(
            self.state, record, reports, params, now_us=now_us, since_us=since_us
        )
        if reasons:
            self.notes.extend(overload_control.note(reason, now_us) for reason in reasons)
        return order
