"""Functions that ask before they run: `@gate.limited({"service": "search", "customer": "{customer}"}, work=5)`.

For functions, coroutine functions and generators of both kinds; those without await need `Headgate.sync(…)`, the others
`Headgate(…)`. The function runs under the grant, which `headgate.present_grant()` returns, except in generators.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, closing
from functools import wraps
from time import monotonic_ns
from typing import Any, Literal, TypeVar, Unpack, cast

from limiter.client.asking import AcquireOptions
from limiter.client.gate import Headgate
from limiter.client.grants import Grant
from limiter.client.middleware.cost import cpu_cost, cpu_time_of
from limiter.client.middleware.measured_work import working_under
from limiter.client.middleware.request_rules import Descriptor, checked_options, within_bounds
from limiter.client.sync_gate import SyncHeadgate
from limiter.client.throttled import Throttled

F = TypeVar("F", bound=Callable[..., Any])

ResultSettle = Literal["latency", "cpu"] | Callable[[Any], float] | None


class LimitedOptions(AcquireOptions, total=False):
    """Options of `limited`, as the clients' methods of that name take them."""

    settle: ResultSettle
    each: Callable[[Any], float] | None
    fallback: Callable[..., Any] | None


def limited(
    gate: Headgate | SyncHeadgate,
    descriptor: Mapping[str, str] | Callable[..., Descriptor],
    work: float | Callable[..., float] | None = None,
    *,
    settle: ResultSettle = None,
    each: Callable[[Any], float] | None = None,
    fallback: Callable[..., Any] | None = None,
    **acquire: Unpack[AcquireOptions],
) -> Callable[[F], F]:
    """Return a decorator for functions that may run as often as the service grants.

    `descriptor` is a mapping whose values may name arguments (`"{customer}"`, `"{order.customer}"`), or a function of
    the arguments; `work` is a number or a function of the arguments. `settle` is "latency", "cpu", or a function of the
    result; `each` gives the work of one item of a generator, which is reported as items are read. `fallback` is called
    in place of a refused function, with the same arguments; without it, `Throttled` is raised. Further options go to
    `gate.acquire`.
    """
    if settle not in ("latency", "cpu", None) and not callable(settle):
        raise ValueError(f"settle is latency, cpu, a function of the result or None, not {settle!r}")

    def decorate(function: F) -> F:
        terms = _Terms(function, descriptor, work, acquire)
        is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if is_generator and settle is not None:
            raise TypeError(f"{function!r} is a generator: `each` gives the work of its items")
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        if is_async != isinstance(gate, Headgate):
            raise TypeError(f"{function!r} needs {'Headgate(…)' if is_async else 'Headgate.sync(…)'}, not {gate!r}")
        wrap: Any = (_streamed if is_generator else _awaited) if is_async else _yielded if is_generator else _called
        return cast("F", wrap(gate, function, terms, each if is_generator else settle, fallback))

    return decorate


class _Terms:
    """Descriptor and work of a function's calls."""

    def __init__(
        self,
        function: Callable[..., Any],
        descriptor: Mapping[str, str] | Callable[..., Descriptor],
        work: float | Callable[..., float] | None,
        options: AcquireOptions,
    ) -> None:
        self._descriptor = descriptor
        self._work = work
        self._signature = inspect.signature(function)
        self._names_arguments = isinstance(descriptor, Mapping) and any("{" in value for value in descriptor.values())
        self._options = checked_options(options)

    def asks(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of `acquire` for one call."""
        work = self._work(*args, **kwargs) if callable(self._work) else self._work
        descriptor = within_bounds(self._described(*args, **kwargs))
        return {"descriptor": descriptor, "work": work, **self._options}

    def _described(self, *args: Any, **kwargs: Any) -> Descriptor:
        if callable(self._descriptor):
            return self._descriptor(*args, **kwargs)
        if not self._names_arguments:
            return self._descriptor
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: value.format_map(bound.arguments) for name, value in self._descriptor.items()}


def _awaited(gate: Headgate, function: Any, terms: _Terms, settle: ResultSettle, fallback: Any) -> Any:
    @wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        try:
            grant = await gate.acquire(**terms.asks(*args, **kwargs))
        except Throttled:
            if fallback is None:
                raise
            instead = fallback(*args, **kwargs)
            return await instead if inspect.isawaitable(instead) else instead
        began_ns = monotonic_ns()
        with grant, working_under(grant):
            if settle == "cpu":
                result, cpu_ms = await cpu_time_of(function(*args, **kwargs))
            else:
                result, cpu_ms = await function(*args, **kwargs), 0.0
            _settle(grant, settle, result, began_ns, cpu_ms)
            return result

    return awaited


def _called(gate: SyncHeadgate, function: Any, terms: _Terms, settle: ResultSettle, fallback: Any) -> Any:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            grant = gate.acquire(**terms.asks(*args, **kwargs)).now()
        except Throttled:
            if fallback is None:
                raise
            return fallback(*args, **kwargs)
        began_ns = monotonic_ns()
        with grant, working_under(grant):
            with cpu_cost() as cost:
                result = function(*args, **kwargs)
            _settle(grant, settle, result, began_ns, cost.ms)
            return result

    return called


def _settle(grant: Grant, settle: ResultSettle, result: Any, began_ns: int, cpu_ms: float) -> None:
    if settle == "latency":
        grant.settle((monotonic_ns() - began_ns) / 1e6)
    elif settle == "cpu":
        grant.settle(cpu_ms)
    elif settle is not None:
        grant.settle(settle(result))


def _streamed(gate: Headgate, function: Any, terms: _Terms, each: Callable[[Any], float] | None, fallback: Any) -> Any:
    @wraps(function)
    async def streamed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        try:
            grant = await gate.acquire(**terms.asks(*args, **kwargs))
        except Throttled:
            if fallback is None:
                raise
            async with aclosing(fallback(*args, **kwargs)) as instead:
                async for item in instead:
                    yield item
            return
        # `with grant` settles what the stream has not: without `each`, the charge stands.
        with grant:
            async with aclosing(function(*args, **kwargs)) as source:
                items: Any = source if each is None else grant.stream(source, work=each)
                async with aclosing(items):
                    async for item in items:
                        yield item

    return streamed


def _yielded(
    gate: SyncHeadgate, function: Any, terms: _Terms, each: Callable[[Any], float] | None, fallback: Any
) -> Any:
    @wraps(function)
    def yielded(*args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            grant = gate.acquire(**terms.asks(*args, **kwargs)).now()
        except Throttled:
            if fallback is None:
                raise
            yield from fallback(*args, **kwargs)
            return
        with grant, closing(function(*args, **kwargs)) as source:
            items: Any = source if each is None else grant.stream_sync(source, work=each)
            with closing(items):
                yield from items

    return yielded
