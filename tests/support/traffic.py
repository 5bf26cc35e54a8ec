"""Callers as there are in production: they ask, do their work and report it, at a rate of their own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

from limiter.controller.worker import Controller
from limiter.engine.decider import Decider
from limiter.model.bucket.contract import AcquireRequest, Refused, SettleRequest
from limiter.model.bucket.reservation import Signer
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.policy_set import PolicySet
from limiter.store.buckets import Buckets
from limiter.store.link.connect import Link, open_link
from limiter.store.policies.policy_store import PolicyStore

TICK_S = 0.01


class Traffic:
    """Requests through a decider of its own, on a real store."""

    def __init__(self, link: Link, policies: PolicySet) -> None:
        self.granted = 0
        self.admissions: list[tuple[float, float]] = []
        """When requests were admitted (s), and their work."""
        self.refused = 0
        self.work = 0.0
        self.charged = 0.0
        """The charge of the last request."""
        self._buckets = Buckets(link)
        self.decider = Decider(self._buckets, Signer(b"a secret of the tests"), deadline_s=5, refuse_uncovered=True)
        self.decider.enforce(policies)

    def enforce(self, policies: PolicySet) -> Self:
        """Go by other policies from now on."""
        self.decider.enforce(policies)
        return self

    async def ask(
        self,
        descriptor: Mapping[str, str],
        *,
        work: float,
        namespace: str = "default",
        latency_ms: float | None = None,
        criticality: Criticality | None = None,
    ) -> bool:
        """One request that does some work, if it may, and says that it took so long."""
        request = AcquireRequest(descriptor=dict(descriptor), namespace=namespace, criticality=criticality)
        decision = await self.decider.acquire(request)
        if isinstance(decision, Refused):
            self.refused += 1
            return False
        self.granted += 1
        self.admissions.append((asyncio.get_running_loop().time(), work))
        self.work += work
        self.charged = decision.charged
        await self.decider.settle(SettleRequest(reservation=decision.reservation, work=work, latency_ms=latency_ms))
        return True

    async def do(
        self,
        descriptor: Mapping[str, str],
        work: Callable[[], Awaitable[None]],
        *,
        criticality: Criticality | None = None,
    ) -> bool:
        """One request that does something real, if it may; how long that took, the reservation knows (Q8)."""
        decision = await self.decider.acquire(AcquireRequest(descriptor=dict(descriptor), criticality=criticality))
        if isinstance(decision, Refused):
            self.refused += 1
            return False
        self.granted += 1
        await work()
        await self.decider.settle(SettleRequest(reservation=decision.reservation, work=1.0))
        return True

    async def hold(self, descriptor: Mapping[str, str], *, work: float) -> bool:
        """One request that is never settled; whether it was granted."""
        decision = await self.decider.acquire(AcquireRequest(descriptor=dict(descriptor), work=work))
        return not isinstance(decision, Refused)

    @asynccontextmanager
    async def flowing(
        self, descriptor: Mapping[str, str], *, rate: float, work: Callable[[], float], **more: Any
    ) -> AsyncIterator[None]:
        """Requests at a rate, whatever becomes of them, for as long as the block lasts; `more` is as `ask` takes it."""
        loop = asyncio.get_running_loop()

        async def flow(group: asyncio.TaskGroup) -> None:
            began_s, sent = loop.time(), 0
            while True:
                due = int((loop.time() - began_s) * rate)
                for _ in range(min(due - sent, 100)):  # a machine that was busy elsewhere does not make a flood
                    group.create_task(self.ask(descriptor, work=work(), **more))
                sent = due
                await asyncio.sleep(TICK_S)

        async with asyncio.TaskGroup() as group:
            flowing = group.create_task(flow(group))
            try:
                yield
            finally:
                flowing.cancel()

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        await self._buckets.drain()


@asynccontextmanager
async def traffic(url: str, policies: PolicySet) -> AsyncIterator[Traffic]:
    """Callers of the store at a URL."""
    link = await open_link(url)
    callers = Traffic(link, policies)
    try:
        yield callers
    finally:
        await callers.drain()
        await link.aclose()


@asynccontextmanager
async def steering(
    where: str | Link, policies: PolicySet, *, cycle_ms: int = 100, lease_ms: int = 1000
) -> AsyncIterator[Controller]:
    """A controller in this process, ended in order; the policies are put into the store first."""
    link = await open_link(where) if isinstance(where, str) else where
    await PolicyStore(link).apply(policies, who="test", prune=True)
    controller = Controller(link, cycle_ms=cycle_ms, lease_ms=lease_ms)
    task = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if isinstance(where, str):
            await link.aclose()
