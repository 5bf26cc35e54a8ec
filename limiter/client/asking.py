"""Requests for admission, as the program makes them: their options, and those who wait for room."""

from __future__ import annotations

import asyncio
import ssl
import time
import warnings
from collections.abc import Callable, Coroutine, Generator, Mapping
from math import isfinite
from types import TracebackType
from typing import Any, Literal, SupportsFloat, TypedDict

from limiter.client.adaptive import AdaptiveThrottle
from limiter.client.grants import Grant
from limiter.client.lease.leasing import Key, key_of
from limiter.client.lease.slices import CRITICALITIES
from limiter.client.request_context import entered_ns
from limiter.client.retry_budget import RetryBudget
from limiter.client.service_away import Away
from limiter.client.throttled import Refused, Throttled

NOT_ASKED_YET = (
    "acquire has asked nothing yet: write `async with gate.acquire(…) as grant` or `grant = await gate.acquire(…)`, "
    "and with Headgate.sync `with gate.acquire(…) as grant` or `grant = gate.acquire(…).now()`"
)


class AcquireOptions(TypedDict, total=False):
    """Options of `acquire` that a middleware or a decorator passes on as they are."""

    namespace: str | None
    expected_latency_ms: float | None
    ttl_ms: int | None
    on_refused: Refused | None
    wait_s: float | None
    deadline_ms: float | None


class CallOptions(AcquireOptions, total=False):
    """Every option of `acquire`."""

    criticality: str | None


class GateOptions(TypedDict, total=False):
    """Every option of `Headgate`."""

    api_key: str | None
    namespace: str
    on_refused: Refused
    wait_s: float
    unavailable: Away
    local: Literal["off", "auto"]
    deadline_ms: float
    repeat: bool
    adaptive: AdaptiveThrottle | bool
    retries: RetryBudget | None
    target_by: str
    settles_max: int
    connections_max: int
    tls: ssl.SSLContext | None
    report_load: bool | Mapping[str, Any]


class Asked:
    """One request for admission, as the caller made it."""

    __slots__ = ("attempt", "body", "by_s", "descriptor", "entered_ns", "is_counted", "is_first_in_line", "key",
                 "namespace", "on_refused", "wait_s")  # fmt: skip

    def __init__(
        self,
        descriptor: Mapping[str, str],
        namespace: str,
        body: dict[str, Any],
        *,
        by_s: float,
        on_refused: Refused,
        wait_s: float,
    ) -> None:
        self.descriptor = descriptor
        self.namespace = namespace
        self.body = body
        self.by_s = by_s
        self.on_refused = on_refused
        self.wait_s = wait_s
        self.key: Key = key_of(namespace, descriptor)
        entered = entered_ns()
        self.entered_ns = time.monotonic_ns() if entered is None else entered
        self.attempt = 1
        self.is_counted = False
        """It has been counted as a request, which happens once however often it asks."""
        self.is_first_in_line = False
        """It asks for room that was promised."""


class Line:
    """Those who wait for room under one descriptor: the first asks, the others stand behind it."""

    __slots__ = ("lock", "refusal", "waiting")

    def __init__(self, refusal: Throttled) -> None:
        self.lock = asyncio.Lock()
        self.refusal = refusal
        """The latest one."""
        self.waiting = 0


class Acquiring:
    """The result of `acquire`: `await` it for a grant, or use it as `async with`, which settles by itself.

    One that nobody awaits asks nothing, and a program that goes on would work without a limit: it warns.
    """

    __slots__ = ("_acquire", "_grant", "is_used")

    def __init__(self, acquire: Callable[[], Coroutine[Any, Any, Grant]]) -> None:
        self._acquire = acquire
        self._grant: Grant | None = None
        self.is_used = False

    def __await__(self) -> Generator[Any, None, Grant]:
        return self.grant().__await__()

    def grant(self) -> Coroutine[Any, Any, Grant]:
        """Ask, and return the grant."""
        self.is_used = True
        return self._acquire()

    def __bool__(self) -> bool:
        raise TypeError(NOT_ASKED_YET)

    def __del__(self) -> None:
        if not self.is_used:
            warnings.warn(NOT_ASKED_YET, RuntimeWarning, stacklevel=2)

    async def __aenter__(self) -> Grant:
        self._grant = await self.grant()
        return self._grant

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._grant is not None:
            self._grant.end(error)


def check_asked(descriptor: object, work: object, criticality: str | None) -> None:
    """Refuse at once what the service could only answer with a mistake of the program."""
    if not isinstance(descriptor, Mapping):
        raise TypeError(f'a descriptor is a mapping such as {{"service": "orders"}}, not {descriptor!r}')
    if work is not None and (
        isinstance(work, str | bytes) or not isinstance(work, SupportsFloat) or not isfinite(work)
    ):
        raise ValueError(f"work is a number, not {work!r}")
    if criticality is not None and criticality not in CRITICALITIES:
        raise ValueError(f"criticality {criticality!r} is none of {', '.join(CRITICALITIES)}")


def check_bounds(*, wait_s: float, deadline_ms: float, settles_max: int, connections_max: int) -> None:
    if not (wait_s >= 0 and deadline_ms > 0 and settles_max >= 1 and connections_max >= 1):
        raise ValueError("deadline_ms is above 0, wait_s at least 0, settles_max and connections_max at least 1")
