"""Grants: permission to work now, settled afterwards with what the work really cost.

A grant is settled once. Used as a context manager, it settles by itself: with the work that was reported, or with its
charge; an exception, a timeout or a cancellation says so by its outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Annotated, Any, Protocol, Self, TypeVar

import msgspec

from limiter.client.calls import Calls, Settlement
from limiter.client.lease import holder
from limiter.client.node_pool import NoAnswer
from limiter.model.numbers import NUMBER_MAX

T = TypeVar("T")

OUTCOME_MAX = 64
"""Characters that the service takes."""


class Settler(Protocol):
    """The part of the library that hears what became of a grant."""

    @property
    def stopped(self) -> bool: ...

    def progress(self, work: float) -> None: ...

    def settle(self, work: float, outcome: str, latency_ms: float) -> None: ...


class Grant:
    """Permission to work. Falsy only if the request was refused and the caller asked to go on all the same."""

    __slots__ = ("_entered_ns", "_is_settled", "_outcome_work", "_settler", "charged", "covered", "degraded", "limits",
                 "local", "quality", "refusal", "state")  # fmt: skip

    def __init__(
        self,
        settler: Settler,
        charged: float,
        entered_ns: int,
        *,
        answer: Mapping[str, Any] | None = None,
        local: bool = False,
        refusal: Exception | None = None,
    ) -> None:
        answer = answer or {}
        self._settler = settler
        self._entered_ns = entered_ns
        self._is_settled = False
        self._outcome_work: float | None = None
        self.charged = charged
        """Work that was debited at once."""
        self.quality: float = answer.get("quality", 1.0)
        """How good an answer the service should give, from 1 (full) to 0, while it is overloaded."""
        self.state: str | None = answer.get("state")
        """`calm`, `degraded`, `recovering` or `overloaded`; None where no policy controls overload."""
        self.degraded: bool = answer.get("degraded", False)
        """Decided without the store, or without the service."""
        self.covered: bool = answer.get("covered", True)
        """False if no policy covers the request: often a misspelt dimension or namespace."""
        self.limits: list[dict[str, Any]] = answer.get("limits", [])
        """Every limit that applied, with what is left of it."""
        self.local = local
        """Decided in this process, by a lease."""
        self.refusal = refusal
        """Why the request was refused, if the caller goes on all the same (`on_refused="degrade"` or a function)."""

    def __bool__(self) -> bool:
        return self.refusal is None

    @property
    def stopped(self) -> bool:
        """True once the service has asked this work to stop: its debt has passed the bound that the policy names."""
        return self._settler.stopped

    @property
    def settled(self) -> bool:
        return self._is_settled

    def progress(self, work: float) -> None:
        """Report the work done so far, all of it. Often is fine: what goes out is limited; the deadline is renewed."""
        work = checked_work(work)
        if not self._is_settled:
            self._outcome_work = work if self._outcome_work is None else max(work, self._outcome_work)
            self._settler.progress(work)

    def settle(self, work: float | None = None, *, outcome: str = "ok", latency_ms: float | None = None) -> None:
        """Report what the work really cost; without `work`, what was reported last, else the charge. Once: a second
        call does nothing. Returns at once; the settle is sent within 100 ms, and again until it is answered."""
        if work is not None:
            work = checked_work(work)
        if latency_ms is not None:
            latency_ms = checked_number("latency_ms", latency_ms)
        if len(outcome) > OUTCOME_MAX:
            raise ValueError(f"outcome is a text of at most {OUTCOME_MAX} characters, not {outcome!r}")
        if self._is_settled:
            return
        self._is_settled = True
        if work is None:
            work = self.charged if self._outcome_work is None else self._outcome_work
        if latency_ms is None:
            latency_ms = (time.monotonic_ns() - self._entered_ns) / 1e6
        self._settler.settle(work, outcome, latency_ms)

    async def stream(self, source: AsyncIterable[T], *, work: Callable[[T], float]) -> AsyncIterator[T]:
        """Pass on what a source yields, count its work, report progress, and settle when it ends, breaks or is dropped.

        Ends early once the service asks to stop (`grant.stopped` says so afterwards). A reader that leaves is settled
        with what it was given.
        """
        done, outcome = self._outcome_work or 0.0, "cancelled"
        try:
            async for item in source:
                done += work(item)
                self.progress(done)
                yield item
                if self.stopped:
                    break
            outcome = "ok"
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self.settle(done, outcome=outcome)
            if (close := getattr(source, "aclose", None)) is not None:
                await close()  # a source that was not read to its end may hold a connection

    def stream_sync(self, source: Iterable[T], *, work: Callable[[T], float]) -> Iterator[T]:
        """The same for a source without await."""
        done, outcome = self._outcome_work or 0.0, "cancelled"
        try:
            for item in source:
                done += work(item)
                self.progress(done)
                yield item
                if self.stopped:
                    break
            outcome = "ok"
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self.settle(done, outcome=outcome)
            if (close := getattr(source, "close", None)) is not None:
                close()

    def end(self, error: BaseException | None) -> None:
        """Settle by how the work ended."""
        self.settle(outcome="ok" if error is None else outcome_of(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)


class GrantAnswer(msgspec.Struct):
    """The part of a grant that this library reads."""

    reservation: str
    charged: float = 0.0
    expires_in_ms: Annotated[float, msgspec.Meta(gt=0)] = 60_000
    quality: float = 1.0
    state: str | None = None
    degraded: bool = False
    covered: bool = True
    limits: list[dict[str, Any]] = []


def check_grant(status: int, answer: Mapping[str, Any]) -> None:
    """Raise NoAnswer for a grant that nobody could settle: no node of the service has sent it."""
    if status == 200:
        try:
            msgspec.convert(answer, GrantAnswer)
        except msgspec.ValidationError as error:
            raise NoAnswer(was_sent=True, why=f"an answer that is no grant: {error}") from None


def grant_by(answer: Mapping[str, Any], calls: Calls, entered_ns: int) -> Grant:
    """Return the grant that an answer of the service gives."""
    settlement = Settlement(answer["reservation"], answer.get("expires_in_ms", 60_000) / 1000)
    return Grant(ByReservation(calls, settlement), answer.get("charged", 0.0), entered_ns, answer=answer)


def checked_work(work: float) -> float:
    """Return work as a number that the service takes: a settle that it refused later would be lost."""
    return checked_number("work", work)


def plain_number(value: float) -> float:
    """Return a number of any kind (of numpy, a Decimal) as Python's own, which alone can be sent."""
    return value if type(value) in (int, float) else float(value)


def checked_number(name: str, value: float) -> float:
    """Return a number that the service takes."""
    value = plain_number(value)
    if not 0.0 <= value <= NUMBER_MAX:
        raise ValueError(f"{name} is a number from 0 on, at most {NUMBER_MAX:g}, not {value!r}")
    return value


def outcome_of(error: BaseException) -> str:
    """Return the outcome of work that an exception ended."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, asyncio.CancelledError | GeneratorExit | KeyboardInterrupt | SystemExit):
        return "cancelled"
    return "error"


class NoSettler:
    """Nobody needs to know: nothing was charged."""

    stopped = False

    def progress(self, work: float) -> None:
        """Nobody is told."""

    def settle(self, work: float, outcome: str, latency_ms: float) -> None:
        """Nobody is told."""


class ByReservation:
    """The service hears of the work, by way of the calls."""

    __slots__ = ("_calls", "_settlement")

    def __init__(self, calls: Calls, settlement: Settlement) -> None:
        self._calls = calls
        self._settlement = settlement
        calls.keep(settlement)

    @property
    def stopped(self) -> bool:
        return self._settlement.stop

    def progress(self, work: float) -> None:
        self._settlement.work = max(self._settlement.work, work)
        self._calls.progress(self._settlement)

    def settle(self, work: float, outcome: str, latency_ms: float) -> None:
        self._calls.settle(self._settlement, work, outcome, latency_ms)


class ByLease:
    """The lease hears of the work: its slices pay, and its next renewal tells the service."""

    __slots__ = ("_grant",)
    stopped = False

    def __init__(self, grant: holder.Grant) -> None:
        self._grant = grant

    def progress(self, work: float) -> None:
        self._grant.progress(work)

    def settle(self, work: float, outcome: str, latency_ms: float) -> None:
        self._grant.settle(work)
