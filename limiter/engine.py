"""One node's engine: the decider, and what keeps it supplied: the store, the shared secret, policies, the node count.

A node starts without its store and gets along by itself once the store is there (S2, S3): until then it knows the
policies of its file, if one is given, and says in `troubles` what it waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from os import urandom
from typing import Any

from limiter.decider import Decider
from limiter.model.contract import AcquireRequest, Decision, Settled, SettleRequest
from limiter.model.policy import PolicySet
from limiter.model.reservation import Signer
from limiter.policy_file import load_policy_file
from limiter.settings import Settings
from limiter.store.buckets import Buckets
from limiter.store.connect import Link, ServerFacts, open_link, probe
from limiter.store.errors import StoreError
from limiter.store.nodes import NodeRegistry
from limiter.store.policies import PolicyStore, StoredPolicies
from limiter.store.secret import shared_secret

log = logging.getLogger(__name__)

RETRY_S = 0.25
WATCH_S = 1.0
START_WAIT_S = 2.0
STORE_TIMEOUT_S = 2.0
FILE_AUTHOR = "policy file"


class Engine:
    """Decides, and keeps itself up to date in the background."""

    def __init__(self, settings: Settings, link: Link) -> None:
        self.link = link
        self.store = PolicyStore(link)
        self._secret = settings.secret.get_secret_value() if settings.secret else None
        self._file = load_policy_file(settings.policies) if settings.policies else PolicySet()
        buckets = Buckets(link)
        self._buckets = buckets
        self._registry = NodeRegistry(link, buckets.clock)
        # Until the shared secret is known this node signs with its own, and knows what it signed.
        self._decider = Decider(
            buckets,
            Signer(self._secret.encode() if self._secret else urandom(32)),
            deadline_s=settings.deadline_ms / 1000,
            default_criticality=settings.default_criticality,
            refuse_uncovered=settings.uncovered == "refuse",
            nodes=lambda: self._registry.count,
        )
        self._decider.enforce(self._file)
        self._facts: ServerFacts | None = None
        self._waiting_for: str | None = "the store has not been reached yet"
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._revision = 0

    def acquire(self, request: AcquireRequest, *, idempotency_key: str | None = None) -> Coroutine[Any, Any, Decision]:
        """May this request go ahead?"""
        return self._decider.acquire(request, idempotency_key=idempotency_key)

    def settle(self, request: SettleRequest, *, namespace: str | None = None) -> Coroutine[Any, Any, Settled]:
        """Correct what was charged."""
        return self._decider.settle(request, namespace=namespace)

    @property
    def policies(self) -> PolicySet:
        """What is in force here."""
        return self._decider.policies

    @property
    def uncovered(self) -> int:
        """Requests that no policy covered."""
        return self._decider.uncovered

    def troubles(self) -> list[str]:
        """Why this node should get no traffic now; nothing if it may."""
        if self._waiting_for is not None:
            return [self._waiting_for]
        return ["the store does not answer in time"] if self._decider.store_is_shunned else []

    def warnings(self) -> list[str]:
        """What an operator should change (S9)."""
        policy = self._facts.maxmemory_policy if self._facts else "noeviction"
        if policy == "noeviction":
            return []
        return [f"the store's maxmemory-policy is {policy}: it may evict buckets; set it to noeviction"]

    async def start(self) -> None:
        """Begin, and wait a moment for the store; without it start all the same."""
        self._tasks.append(asyncio.create_task(self._supply()))
        with suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await self._ready.wait()
        for warning in self.warnings():
            log.warning("%s", warning)

    async def stop(self) -> None:
        """Finish what is in flight, then end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._buckets.drain()
        await self.link.aclose()

    async def _supply(self) -> None:
        """Get everything from the store, then keep it fresh."""
        while not self._ready.is_set():
            try:
                await self._fetch()
            except StoreError as error:
                self._waiting_for = str(error)
                await asyncio.sleep(RETRY_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.store.watch(self._take))
            group.create_task(self._registry.run())
            group.create_task(self._look_after())

    async def _fetch(self) -> None:
        self._facts = await probe(self.link, timeout_s=STORE_TIMEOUT_S)
        if self._secret is None:
            self._decider.sign_with(Signer(await shared_secret(self.link, None, timeout_s=STORE_TIMEOUT_S)))
        if self._file.policies or self._file.namespaces:
            await self.store.apply(self._file, who=FILE_AUTHOR)
        self._take(await self.store.load())
        self._waiting_for = None
        self._ready.set()

    def _take(self, stored: StoredPolicies) -> None:
        """Let what the store holds be in force; put back what it lost (S10)."""
        if stored.revision < self._revision and self._file.policies:
            log.error("the store lost its policies; putting back those of the file")
            self._tasks.append(asyncio.create_task(self._put_back()))
        self._revision = stored.revision
        self._decider.enforce(stored.policies)

    async def _put_back(self) -> None:
        with suppress(StoreError):
            await self.store.apply(self._file, who=FILE_AUTHOR)

    async def _look_after(self) -> None:
        """Ask the store how it is. With no traffic nobody else would find out that it is back."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self._facts = await probe(self.link, timeout_s=STORE_TIMEOUT_S)
            except StoreError as error:
                log.debug("the store does not answer: %s", error)
            else:
                self._decider.store_answered()


async def open_engine(settings: Settings, url: str) -> Engine:
    """An engine on the store at a URL; PolicyError if the policy file cannot be used (P1)."""
    return Engine(settings, await open_link(url))
