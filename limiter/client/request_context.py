"""Facts about the request that is being worked on: its criticality (G4) and when it entered this service.

They live in context variables. Asyncio tasks and `asyncio.to_thread` take them along by themselves; other threads do
with `carry(function)`, executors with `CarryingExecutor`.

    with enter(criticality=from_header(value)):     at the entrance: what the caller said
        with criticality("sheddable"):              inside: lowers, or keeps what is lower already
        with raised("critical_plus"):               raises; counted in `raises`

`criticality` and `raised` are decorators as well, of functions and of coroutine functions.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import wraps
from time import monotonic_ns
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from limiter.client.lease.slices import CRITICALITIES

CRITICALITY_HEADER = "Headgate-Criticality"

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_RANKS = {name: rank for rank, name in enumerate(CRITICALITIES)}


class _Known(NamedTuple):
    """A class, and the one that stands again when its block ends."""

    name: str | None
    outer: _Known | None


_criticality: ContextVar[_Known | None] = ContextVar("headgate_criticality", default=None)
_entered_ns: ContextVar[int | None] = ContextVar("headgate_entered_ns", default=None)


class Raises:
    """Counts of explicit raises, by the class before (None: none was known) and after."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str | None, str]] = Counter()

    def count(self, before: str | None, after: str) -> None:
        with self._lock:
            self._counts[before, after] += 1

    def counts(self) -> dict[tuple[str | None, str], int]:
        """Return a copy of the counts."""
        with self._lock:
            return dict(self._counts)

    def total(self) -> int:
        with self._lock:
            return self._counts.total()


raises = Raises()
"""Raises of this process."""


def current() -> str | None:
    """Return the class of the present request, or None if nobody has named one."""
    known = _criticality.get()
    return None if known is None else known.name


def from_header(value: str | bytes | None) -> str | None:
    """Return the class that a `Headgate-Criticality` header names, or None if it names none."""
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    name = (value or "").strip().lower()
    return name if name in _RANKS else None


class criticality:  # noqa: N801 (used like a function)
    """Context manager and decorator: the class inside, unless it is already lower. Without a class yet, sets it."""

    def __init__(self, name: str) -> None:
        if name not in _RANKS:
            raise ValueError(f"criticality {name!r} is none of {', '.join(CRITICALITIES)}")
        self._name = name

    def _inside(self, present: str | None) -> str:
        """Return the class that holds inside the block."""
        return self._name if present is None or _RANKS[self._name] > _RANKS[present] else present

    def __enter__(self) -> None:
        known = _criticality.get()
        _criticality.set(_Known(self._inside(None if known is None else known.name), known))

    def __exit__(self, *_: object) -> None:
        # The outer class is in the variable, not in this object, so that tasks and threads may share one.
        known = _criticality.get()
        _criticality.set(None if known is None else known.outer)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function!r} is a generator: use `with` inside it, or around the loop that reads it")
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("F", awaited)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", called)


class raised(criticality):  # noqa: N801 (used like a function)
    """Context manager and decorator: the class inside, even above the present one; counted in `raises` where it is."""

    def _inside(self, present: str | None) -> str:
        if present is not None and _RANKS[self._name] >= _RANKS[present]:
            return present
        raises.count(present, self._name)
        return self._name


def entered_ns() -> int | None:
    """Return when the present request entered this service, on the monotonic clock; None outside of a request."""
    return _entered_ns.get()


class Entered:
    """The entrance of a request; leaving its block restores what was known before."""

    __slots__ = ("_before_ns",)

    def __init__(self, before_ns: int | None) -> None:
        self._before_ns = before_ns

    def __enter__(self) -> None:
        """Do nothing: `enter` has set everything."""

    def __exit__(self, *_: object) -> None:
        known = _criticality.get()
        _criticality.set(None if known is None else known.outer)
        _entered_ns.set(self._before_ns)


def enter(now_ns: int | None = None, *, criticality: str | None = None) -> Entered:
    """Note that a request enters now, with the class its caller named: also a higher one than that around it.

    A plain call suffices where each request has a task or context of its own. Threads that serve one request after
    another use `with enter(...)`.
    """
    if criticality is not None and criticality not in _RANKS:
        raise ValueError(f"criticality {criticality!r} is none of {', '.join(CRITICALITIES)}")
    before_ns = _entered_ns.get()
    _entered_ns.set(monotonic_ns() if now_ns is None else now_ns)
    _criticality.set(_Known(criticality, _criticality.get()))
    return Entered(before_ns)


def carry(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function bound to a copy of the present context: `threading.Thread(target=carry(work))`."""
    context = copy_context()

    @wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        # A copy for each call: a context cannot be entered by two threads at once.
        return context.copy().run(function, *args, **kwargs)

    return carried


class CarryingExecutor(ThreadPoolExecutor):
    """A thread pool whose functions run in a copy of the context of the code that submits them."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Submit a call, as ThreadPoolExecutor does."""
        return super().submit(carry(fn), *args, **kwargs)
