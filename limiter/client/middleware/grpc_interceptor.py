"""Interceptor for servers of grpc.aio: asks before a method's handler runs, settles by how it ended.

    limits = HeadgateInterceptor(gate, descriptor={"service": "shop", "operation": "{path}"})
    server = grpc.aio.server(interceptors=[limits])

Rules are those of the other middlewares: the path is the method's full name (`/shop.Orders/Get`), headers are metadata.

    RESOURCE_EXHAUSTED  over a limit           trailing metadata: headgate-retry, headgate-retry-after-ms, and
    PERMISSION_DENIED   denied                 grpc-retry-pushback-ms, which gRPC's own retry policies obey: how long to
    UNAVAILABLE         nobody could decide    wait, -1 for never
    UNAVAILABLE         a layer below refused  headgate-retry: never (G6)

Handlers find the grant by `headgate.present_grant()`. They have to be coroutine functions or asynchronous generators.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from time import monotonic_ns
from typing import Any, Literal, NoReturn, Unpack

import grpc
import grpc.aio

from limiter.client.gate import Headgate
from limiter.client.grants import Grant, outcome_of
from limiter.client.middleware.measured_work import MeasuredWork, working_under
from limiter.client.middleware.refusal_answer import throttled_in
from limiter.client.middleware.request_rules import (
    AcquireOptions,
    DescriptorRule,
    EdgeRule,
    IncomingRequest,
    RequestRules,
    WorkRule,
    within_bounds,
)
from limiter.client.request_context import enter, entered_ns
from limiter.client.throttled import OVER_LIMIT, Throttled

CODES = {OVER_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED, 403: grpc.StatusCode.PERMISSION_DENIED}
OUTCOMES = {
    grpc.StatusCode.CANCELLED.value[0]: "cancelled",
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: "timeout",
    grpc.StatusCode.UNKNOWN.value[0]: "error",
    grpc.StatusCode.INTERNAL.value[0]: "error",
    grpc.StatusCode.UNAVAILABLE.value[0]: "error",
    grpc.StatusCode.DATA_LOSS.value[0]: "error",
}
"""Outcomes of codes that are the service's own failures; the others are its callers' mistakes."""
TIME_ON_THE_WAY = 0.25
"""Part of the time spent here that a call may have spent on its way, so that its caller ended it that much earlier."""
HANDLERS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class GrpcRequest(IncomingRequest):
    """A call as rules see it."""

    method = "GRPC"

    def __init__(self, path: str, context: Any) -> None:
        self.raw = context
        self.path = path
        self._metadata = context.invocation_metadata() or ()

    @property
    def client(self) -> str | None:  # type: ignore[override]
        """Return the peer without its port."""
        kind, _, address = self.raw.peer().partition(":")
        host = address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else address
        return host.strip("[]") or None

    @property
    def route(self) -> str | None:
        return self.path

    def header(self, name: str) -> str | None:
        value = next((value for known, value in self._metadata if known == name.lower()), None)
        return value.decode("latin-1") if isinstance(value, bytes) else value


class HeadgateInterceptor(grpc.aio.ServerInterceptor):
    """Limits the calls of a server; arguments as those of the ASGI middleware. `settle` measures neither bytes nor CPU
    time."""

    def __init__(
        self,
        gate: Headgate,
        *,
        descriptor: DescriptorRule,
        work: WorkRule = None,
        settle: Literal["latency"] | Callable[[GrpcRequest, MeasuredWork], float | None] | None = None,
        edge: EdgeRule = None,
        criticality: str | None = None,
        **acquire: Unpack[AcquireOptions],
    ) -> None:
        if settle not in ("latency", None) and not callable(settle):
            raise ValueError(f"settle is latency, a function or None, not {settle!r}")
        self._gate = gate
        self._rules = RequestRules(descriptor, work=work, edge=edge, criticality=criticality, options=acquire)
        self._settle = settle

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Return the method's handler, which asks first."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = (handler.request_streaming, handler.response_streaming)
        function = {
            (False, False): handler.unary_unary,
            (False, True): handler.unary_stream,
            (True, False): handler.stream_unary,
            (True, True): handler.stream_stream,
        }[kind]
        is_generator = inspect.isasyncgenfunction(function)
        if not is_generator and not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} is a handler without await, which HeadgateInterceptor does not limit")
        limit = self._streamed if is_generator else self._answered
        return HANDLERS[kind](
            limit(function, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _answered(self, function: Any, path: str) -> Any:
        """Return the handler of a method that answers once, or writes its answers itself."""

        async def answered(message: Any, context: Any) -> Any:
            request = GrpcRequest(path, context)
            with enter(monotonic_ns(), criticality=self._rules.class_of(request)):
                work = await self._ask(request, context)
                try:
                    with working_under(work.grant):
                        answer = await function(message, context)
                except BaseException as error:
                    await _failed(work, context, error)
                    raise
                work.end(_outcome(context))
                return answer

        return answered

    def _streamed(self, function: Any, path: str) -> Any:
        """Return the handler of a method that yields its answers."""

        async def streamed(message: Any, context: Any) -> AsyncIterator[Any]:
            request = GrpcRequest(path, context)
            with enter(monotonic_ns(), criticality=self._rules.class_of(request)):
                work = await self._ask(request, context)
                try:
                    with working_under(work.grant):
                        async with aclosing(function(message, context)) as answers:
                            async for answer in answers:
                                yield answer
                                work.sent(0, more=True)
                except BaseException as error:
                    await _failed(work, context, error)
                    raise
                work.end(_outcome(context))

        return streamed

    async def _ask(self, request: GrpcRequest, context: Any) -> MeasuredWork:
        """Return the granted work; a refusal ends the call."""
        try:
            grant = await self._grant(request)
        except Throttled as refusal:
            await _refuse(context, refusal)
        return MeasuredWork(grant, request, self._settle)

    async def _grant(self, request: GrpcRequest) -> Grant | None:
        asked = self._rules.asks(request)
        if asked is None:
            return None
        work, descriptor = asked
        if inspect.isawaitable(descriptor):
            descriptor = await descriptor
        if not descriptor:
            return None
        return await self._gate.acquire(within_bounds(descriptor), work, **self._rules.options)


async def _refuse(context: Any, refusal: Throttled) -> NoReturn:
    retry = "never" if refusal.retry == "never" else "after"
    trailing: list[tuple[str, str]] = [("headgate-retry", retry)]
    if retry == "never":
        trailing.append(("grpc-retry-pushback-ms", "-1"))
    elif refusal.retry_after_ms is not None:
        after_ms = str(round(refusal.retry_after_ms))
        trailing += [("headgate-retry-after-ms", after_ms), ("grpc-retry-pushback-ms", after_ms)]
    code = CODES.get(refusal.status, grpc.StatusCode.UNAVAILABLE)
    await context.abort(code, str(refusal), tuple(trailing))
    raise AssertionError("abort raises")


async def _failed(work: MeasuredWork, context: Any, error: BaseException) -> None:
    """Settle a call that an exception ended; a refusal from below is passed on as one that is not to be repeated."""
    if isinstance(error, grpc.aio.AbortError):
        work.end(_outcome(context))
    elif isinstance(error, asyncio.CancelledError):
        work.end("timeout" if _is_out_of_time(context) else "cancelled")
    else:
        work.end(outcome_of(error))
        if throttled_in(error) is not None:
            trailing = (("headgate-retry", "never"), ("grpc-retry-pushback-ms", "-1"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a service that this one needs has refused", trailing)


def _is_out_of_time(context: Any) -> bool:
    """Return whether a cancelled call has used up its time. The caller's clock runs ahead by the way here."""
    left_s, began_ns = context.time_remaining(), entered_ns()
    if left_s is None or began_ns is None:
        return False
    return bool(left_s <= TIME_ON_THE_WAY * (monotonic_ns() - began_ns) / 1e9)


def _outcome(context: Any) -> str:
    """Return the outcome that the call's code says."""
    code = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return OUTCOMES.get(number, "ok")
