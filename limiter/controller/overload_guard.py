"""Overload control of one bucket, as the controller holds it between cycles: its state and its reasons (Q, S, G5)."""

from __future__ import annotations

from collections.abc import Sequence

from limiter.model.bucket.bucket import Record
from limiter.model.control.kept_state import REASONS_MAX, KeptState
from limiter.model.overload import overload_control, overload_state
from limiter.model.overload.overload_control import Note
from limiter.model.overload.overload_state import OverloadParams, OverloadState
from limiter.model.overload.shedding import ShedOrder
from limiter.model.overload.signals import Report


class Guard:
    """Overload control of one bucket."""

    __slots__ = ("notes", "state")

    def __init__(self, kept: KeptState | None) -> None:
        self.state = OverloadState() if kept is None else overload_state.unpack_state(kept.overload)
        self.notes: tuple[Note, ...] = () if kept is None else tuple(kept.notes)

    @property
    def due_us(self) -> float:
        """Time of the next step that is due even if the bucket is not used."""
        return overload_control.due_us(self.state)

    def reconsider(self) -> None:
        """Follow a changed `overload` block from the next step on."""
        self.state = overload_control.reconsidered(self.state)

    def step(
        self, record: Record, reports: Sequence[Report], params: OverloadParams, *, now_us: float, since_us: float
    ) -> ShedOrder | None:
        """Run one cycle; return the order for the record, or None if nothing changes."""
        self.state, order, reasons = overload_control.step(
            self.state, record, reports, params, now_us=now_us, since_us=since_us
        )
        if reasons:
            told = (overload_control.note(reason, now_us) for reason in reasons)
            self.notes = (*self.notes, *told)[-REASONS_MAX:]
        return order
