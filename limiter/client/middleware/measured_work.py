"""Work while it is done: measured, reported as it grows, settled once with how it ended.

`settle` says how the true work is found:

    None       the charge stands, or the work that the application itself reports
    "latency"  milliseconds from the grant to the end of the answer
    "cpu"      CPU milliseconds of the handler's own steps (`cost` says what belongs to them)
    "bytes"    bytes of the answer's body that were sent
    function   of the request and this object, called at the end; None leaves the charge

A request's latency is measured from where it entered, whatever the work is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic_ns
from typing import Any, Literal, Protocol

from limiter.client.grants import Grant, NoSettler

log = logging.getLogger("headgate")

SettleRule = Literal["latency", "cpu", "bytes"] | Callable[[Any, "MeasuredWork"], float | None] | None
MEASURES = ("latency", "cpu", "bytes")

_present: ContextVar[Grant | None] = ContextVar("headgate_grant", default=None)


def present_grant() -> Grant:
    """Return the grant under which the present code runs, to settle its true work. Where nothing was asked, one that
    nobody hears of."""
    return _present.get() or unasked_grant()


def unasked_grant() -> Grant:
    """Return the grant of a request that is not limited: everything may be done with it, and nobody is told."""
    return Grant(NoSettler(), 0.0, monotonic_ns())


def work_under(grant: Grant) -> None:
    """Make a grant the present one, for the rest of the present context."""
    _present.set(grant)


@contextmanager
def working_under(grant: Grant) -> Iterator[None]:
    """Make a grant the present one for a block."""
    outer = _present.get()
    _present.set(grant)
    try:
        yield
    finally:
        _present.set(outer)


class Cpu(Protocol):
    """CPU time that somebody measures."""

    @property
    def ms(self) -> float: ...


class MeasuredWork:
    """The work of one grant, as far as it has come."""

    __slots__ = ("_began_ns", "_headers", "_is_ended", "_request", "_settle", "cpu", "grant", "sent_bytes", "status")

    def __init__(self, grant: Grant | None, request: Any, settle: SettleRule) -> None:
        """Begin; without a grant, nothing was asked, and nothing is measured."""
        self.grant = unasked_grant() if grant is None else grant
        self._request = request
        self._settle = None if grant is None else settle
        self._began_ns = monotonic_ns()
        self._is_ended = False
        self._headers: list[tuple[str, str]] = []
        self.cpu: Cpu | None = None
        self.sent_bytes = 0
        """Bytes of the body that were sent."""
        self.status: int | None = None
        """Status of the answer, once it has begun."""

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the grant."""
        return (monotonic_ns() - self._began_ns) / 1e6

    @property
    def needs_cpu(self) -> bool:
        return self._settle == "cpu" or callable(self._settle)

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds, where `settle` is "cpu" or a function."""
        return 0.0 if self.cpu is None else self.cpu.ms

    def header(self, name: str) -> str | None:
        """Return a header of the answer."""
        return next((value for known, value in self._headers if known.lower() == name.lower()), None)

    def answered(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Note how the answer begins."""
        self.status, self._headers = status, headers

    def sent(self, count: int, *, more: bool) -> None:
        """Note bytes that were sent, and report progress while there are more to come."""
        self.sent_bytes += count
        if more and (work := self._measured()) is not None:
            self.grant.progress(work)

    def end(self, outcome: str) -> None:
        """Settle, once."""
        if self._is_ended:
            return
        self._is_ended = True
        self.grant.settle(self._true_work(), outcome=outcome)

    def end_by_status(self) -> None:
        """Settle by the status of a complete answer."""
        self.end("ok" if self.status is None else outcome_of_status(self.status))

    def _measured(self) -> float | None:
        if self._settle == "bytes":
            return float(self.sent_bytes)
        if self._settle == "latency":
            return self.elapsed_ms
        return self.cpu_ms if self._settle == "cpu" else None

    def _true_work(self) -> float | None:
        if not callable(self._settle):
            return self._measured()
        try:
            return self._settle(self._request, self)
        except Exception:
            log.exception("the function that settles failed; the charge stands")
            return None


def outcome_of_status(status: int) -> str:
    """Return the outcome that an HTTP status says: the application's failures count, its callers' mistakes do not."""
    return "timeout" if status == 504 else "error" if status >= 500 else "ok"


def check_settle(settle: SettleRule) -> SettleRule:
    if settle is not None and settle not in MEASURES and not callable(settle):
        raise ValueError(f"settle is {', '.join(MEASURES)}, a function or None, not {settle!r}")
    return settle
