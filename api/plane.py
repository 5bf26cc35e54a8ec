"""The data plane: a request's bytes in, its answer out. Both lanes call this and nothing else.

headers, body ── who? ──► decode ──► engine ──► render ──► answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from api import decode, render
from api.answer import Answer
from api.auth import Doorkeeper, Principal, check_namespace, read_keys
from api.decode import AcquireOperation, BadRequest, Operation, SettleOperation
from limiter.model.contract import AcquireRequest, Decision, Settled, SettleRequest
from limiter.settings import Settings

PORTION = 128
PORTIONS_AT_ONCE = 4


class Decides(Protocol):
    """What the data plane needs of the engine."""

    async def acquire(self, request: AcquireRequest, *, idempotency_key: str | None = None) -> Decision:
        """May this request go ahead?"""
        ...

    async def settle(self, request: SettleRequest, *, namespace: str | None = None) -> Settled:
        """Correct what was charged."""
        ...


class Headers(NamedTuple):
    """The headers that mean something here; None where there is none."""

    authorization: bytes | None = None
    content_type: bytes | None = None
    content_encoding: bytes | None = None
    idempotency_key: bytes | None = None


class Plane:
    """Answers acquires, settles and batches."""

    def __init__(self, engine: Decides, settings: Settings) -> None:
        self.engine = engine
        self.doorkeeper = Doorkeeper(read_keys(settings.api_keys))
        self.renderer = render.Renderer(settings.rate_limit_headers)
        self._turns = asyncio.Semaphore(PORTIONS_AT_ONCE)
        self.paths = {b"/v1/acquire": self.acquire, b"/v1/settle": self.settle, b"/v1/batch": self.batch}

    async def acquire(self, headers: Headers, body: bytes) -> Answer:
        """`POST /v1/acquire`."""
        try:
            principal = self._admit(headers)
            key = headers.idempotency_key
            idempotency_key = None if key is None else decode.idempotency_key(key)
            return self.renderer.decision(await self._acquire(principal, decode.acquire(body), idempotency_key))
        except Exception as error:
            return render.failure(error)

    async def settle(self, headers: Headers, body: bytes) -> Answer:
        """`POST /v1/settle`."""
        try:
            principal = self._admit(headers)
            return await self._settle(principal, decode.settle(body))
        except Exception as error:
            return render.failure(error)

    async def batch(self, headers: Headers, body: bytes) -> Answer:
        """`POST /v1/batch`."""
        try:
            principal = self._admit(headers)
            operations = decode.batch(body)
            answers: list[Answer] = []
            for at in range(0, len(operations), PORTION):
                answers += await self._portion(principal, operations[at : at + PORTION])
            return render.batch(answers)
        except Exception as error:
            return render.failure(error)

    def _admit(self, headers: Headers) -> Principal:
        principal = self.doorkeeper.admit(headers.authorization, "use")
        decode.check_json(headers.content_type, headers.content_encoding)
        return principal

    async def _portion(self, principal: Principal, operations: Sequence[Operation | BadRequest]) -> list[Answer]:
        """Some operations at once, so that they share calls to the store.

        Portions take turns. All that the node has at once would spend their deadlines waiting for each other.
        """
        async with self._turns:
            return await asyncio.gather(*[self._operation(principal, operation) for operation in operations])

    async def _operation(self, principal: Principal, operation: Operation | BadRequest) -> Answer:
        try:
            if type(operation) is AcquireOperation:
                key = operation.idempotency_key
                return render.decision_body(await self._acquire(principal, operation, key))
            if type(operation) is SettleOperation:
                return await self._settle(principal, operation)
            assert isinstance(operation, BadRequest)
            return render.failure(operation)
        except Exception as error:
            return render.failure(error)

    async def _acquire(self, principal: Principal, request: AcquireRequest, key: str | None) -> Decision:
        if principal.namespace is not None:
            check_namespace(principal, request.namespace)
        return await self.engine.acquire(request, idempotency_key=key)

    async def _settle(self, principal: Principal, request: SettleRequest) -> Answer:
        return render.settled(await self.engine.settle(request, namespace=principal.namespace))
