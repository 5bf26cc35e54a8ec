"""A service that answers as a test tells it, and keeps what it was sent: for what a real node does not do on demand."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Self

import msgspec
from aiohttp import web

Operation = Mapping[str, Any]
Decided = tuple[int, dict[str, Any]]

BUSY = (503, {"reason": "node_busy", "retry": "now"})


def granted(number: int, operation: Operation, **fields: Any) -> Decided:
    """The answer to an acquire that is admitted."""
    plain = {
        "granted": True, "reservation": f"r{number}", "charged": operation.get("work", 1.0), "expires_in_ms": 60_000,
        "limits": [], "overloaded": False, "quality": 1.0, "degraded": False, "covered": True,
    }  # fmt: skip
    return 200, plain | fields


def settled(operation: Operation, **fields: Any) -> Decided:
    """The answer to a settle."""
    return 200, {"work": operation["work"], "stop": False, "duplicate": False} | fields


def refused(reason: str = "work", *, retry: str = "after", retry_after_ms: float = 10, **fields: Any) -> Decided:
    """The answer to an acquire that is over a limit."""
    return 429, {"granted": False, "policy": "reads", "reason": reason, "retry": retry,
                 "retry_after_ms": retry_after_ms} | fields  # fmt: skip


class ScriptedService:
    """One node. `decide` answers each acquire, `correct` each settle; `open` cleared: calls wait for their answers."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.decide: Callable[[int, Operation], Decided] = granted
        self.correct: Callable[[Operation], Decided] = settled
        self.whole: Decided | None = None
        """The answer to every call, whatever it asks."""
        self.others: Callable[[str, Operation], Decided] = lambda path, _: (404, {"detail": path})
        self.open = asyncio.Event()
        self.open.set()
        self.calls: list[list[Operation]] = []
        self.bytes_most = 0
        self.connections: set[Any] = set()
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.url = ""

    @property
    def acquires(self) -> list[Operation]:
        return [one for call in self.calls for one in call if one["op"] == "acquire"]

    @property
    def settles(self) -> list[Operation]:
        return [one for call in self.calls for one in call if one["op"] == "settle"]

    @property
    def finals(self) -> list[Operation]:
        return [one for one in self.settles if one.get("final", True)]

    def release(self) -> None:
        """Answer all calls that wait; from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.open.set)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=10_000_000)
        app.router.add_post("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open.set()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.bytes_most = max(self.bytes_most, len(raw))
        self.connections.add(request.transport)
        body, path = msgspec.json.decode(raw), request.path
        if path == "/v1/batch":
            operations = body["operations"]
        elif path in ("/v1/acquire", "/v1/settle"):
            operations = [{"op": path.rpartition("/")[2], **body}]
            if (key := request.headers.get("idempotency-key")) is not None:
                operations[0]["idempotency_key"] = key
        else:
            await self.open.wait()
            return _response(self.others(path, body))
        self.calls.append(operations)
        await self.open.wait()
        if self.whole is not None:
            return _response(self.whole)
        answers = [self._answer(one) for one in operations]
        if path != "/v1/batch":
            return _response(answers[0])
        return _response((200, {"results": [{"status": status, **answer} for status, answer in answers]}))

    def _answer(self, operation: Operation) -> Decided:
        if operation["op"] == "settle":
            return self.correct(operation)
        return self.decide(next(self._numbers), operation)


def _response(decided: Decided) -> web.Response:
    status, body = decided
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
