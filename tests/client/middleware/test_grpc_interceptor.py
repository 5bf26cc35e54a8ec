"""The interceptor on a real server of grpc.aio, before a real Headgate."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from headgate import Headgate, Throttled, present_grant
from headgate.grpc import HeadgateInterceptor
from limiter.client.request_context import current
from tests.support import eventually, eventually_async
from tests.support.live import LiveApi
from tests.support.servers import free_port
from tests.support.settles import Settled

PAGES = {"service": "pages", "customer": "header:x-customer"}
INNER = {"service": "inner", "customer": "header:x-customer"}


async def echo(message: bytes, context: Any) -> bytes:
    return message


async def criticality(message: bytes, context: Any) -> bytes:
    return str(current()).encode()


async def settle(message: bytes, context: Any) -> bytes:
    present_grant().settle(work=int(message))
    return b""


async def fail(message: bytes, context: Any) -> bytes:
    raise ValueError("broken")


async def abort(message: bytes, context: Any) -> bytes:
    await context.abort(grpc.StatusCode[message.decode()], "as asked")
    return b""


async def set_code(message: bytes, context: Any) -> bytes:
    context.set_code(grpc.StatusCode[message.decode()])
    return b""


async def below(message: bytes, context: Any) -> bytes:
    raise Throttled(reason="work", policy="secret-policy-of-below")


async def hang(message: bytes, context: Any) -> bytes:
    await asyncio.Event().wait()
    return b""


async def count(message: bytes, context: Any) -> AsyncIterator[bytes]:
    for number in range(int(message)):
        yield b"%d" % number


async def write(message: bytes, context: Any) -> None:
    for number in range(int(message)):
        await context.write(b"%d" % number)


async def endless(message: bytes, context: Any) -> AsyncIterator[bytes]:
    while True:
        yield str(current()).encode()
        await asyncio.sleep(0)


async def collect(messages: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([message async for message in messages])


async def chat(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


def plain(message: bytes, context: Any) -> bytes:
    return message


METHODS: dict[str, Any] = {
    **{one.__name__: grpc.unary_unary_rpc_method_handler(one)
       for one in (echo, criticality, settle, fail, abort, set_code, below, hang, plain)},
    **{one.__name__: grpc.unary_stream_rpc_method_handler(one) for one in (count, write, endless)},
    "collect": grpc.stream_unary_rpc_method_handler(collect),
    "chat": grpc.stream_stream_rpc_method_handler(chat),
}  # fmt: skip


class Stub:
    """Calls of one customer."""

    def __init__(self, channel: grpc.aio.Channel, customer: str) -> None:
        self._channel = channel
        self._customer = customer

    def call(self, method: str, message: Any = b"", *, timeout: float = 20.0, **metadata: str) -> Any:
        handler: Any = METHODS.get(method, METHODS["echo"])
        kind = ["unary", "stream"]
        kinds = f"{kind[handler.request_streaming]}_{kind[handler.response_streaming]}"
        headers = [("x-customer", self._customer), *((name.replace("_", "-"), text) for name, text in metadata.items())]
        return getattr(self._channel, kinds)(f"/shop.Pages/{method}")(message, metadata=headers, timeout=timeout)

    async def failure(self, method: str, message: Any = b"", **options: Any) -> tuple[grpc.StatusCode, dict[str, str]]:
        """Return the code and the trailing metadata of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await self.call(method, message, **options)
        trailing = {str(name): str(value) for name, value in failed.value.trailing_metadata()}
        return failed.value.code(), trailing


@pytest.fixture
def serving(headgate: LiveApi, customer: str) -> Callable[..., Any]:
    @asynccontextmanager
    async def serve(descriptor: Any = PAGES, gate: Headgate | None = None, **rules: Any) -> AsyncIterator[Stub]:
        async with gate or Headgate(headgate.base) as opened:
            server = grpc.aio.server(interceptors=[HeadgateInterceptor(opened, descriptor=descriptor, **rules)])
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("shop.Pages", METHODS),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    yield Stub(channel, customer)
            finally:
                await server.stop(None)

    return serve


Serving = Callable[..., Any]


async def test_a_refused_call_is_told_when_to_come_again(serving: Serving) -> None:
    async with serving(work={"/shop.Pages/criticality": 0, "*": 11}) as stub:
        assert await stub.call("echo", b"hello") == b"hello"
        code, trailing = await stub.failure("echo")
        assert await stub.call("criticality") == b"None", "it is not asked for"
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailing["headgate-retry"] == "after"
    assert int(trailing["headgate-retry-after-ms"]) > 60_000
    assert trailing["grpc-retry-pushback-ms"] == trailing["headgate-retry-after-ms"]


async def test_a_denied_call_is_forbidden_and_one_that_nobody_decides_unavailable(serving: Serving) -> None:
    async with serving({"service": "banned"}) as stub:
        assert await stub.failure("echo") == (
            grpc.StatusCode.PERMISSION_DENIED,
            {"headgate-retry": "never", "grpc-retry-pushback-ms": "-1"},
        )
    away = Headgate(f"http://127.0.0.1:{free_port()}", unavailable="closed", deadline_ms=100)
    async with serving(gate=away) as stub:
        assert (await stub.failure("echo"))[0] == grpc.StatusCode.UNAVAILABLE


async def test_g6_a_refusal_of_a_layer_below_tells_the_callers_above_not_to_retry(
    serving: Serving, last_settled: Callable[[], Settled]
) -> None:
    async with serving() as stub:
        code, trailing = await stub.failure("below")
    assert code == grpc.StatusCode.UNAVAILABLE
    assert trailing == {"headgate-retry": "never", "grpc-retry-pushback-ms": "-1"}
    assert last_settled().outcome == "error"


async def test_what_the_handler_settles_is_the_debt(serving: Serving, balance: Callable[..., float]) -> None:
    async with serving() as stub:
        await stub.call("settle", b"50")
    assert balance() == pytest.approx(-40, abs=0.1)


@pytest.mark.parametrize(
    ("method", "message", "outcome"),
    [
        ("fail", b"", "error"),
        ("abort", b"INTERNAL", "error"),
        ("abort", b"DEADLINE_EXCEEDED", "timeout"),
        ("abort", b"NOT_FOUND", "ok"),
        ("set_code", b"UNAVAILABLE", "error"),
        ("set_code", b"INVALID_ARGUMENT", "ok"),
    ],
)
async def test_the_status_is_the_outcome(
    method: str, message: bytes, outcome: str, serving: Serving, settled: list[Settled]
) -> None:
    async with serving(INNER) as stub:
        await stub.failure(method, message)
        await eventually_async(lambda: seen(settled))
    assert settled[0].outcome == outcome


async def seen(settled: list[Settled]) -> bool:
    return bool(settled)


async def test_calls_that_are_given_up_are_cancelled_and_those_out_of_time_are_late(
    serving: Serving, settled: list[Settled]
) -> None:
    async with serving(INNER, settle="latency") as stub:
        stream = stub.call("endless", headgate_criticality="critical")
        assert await stream.read() == b"critical"
        stream.cancel()
        await eventually_async(lambda: seen(settled))
        assert (await stub.failure("hang", timeout=1.0))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually_async(lambda: seen(settled[1:]))
    assert [one.outcome for one in settled] == ["cancelled", "timeout"]
    assert all(one.work > 0 for one in settled)


async def test_streams_of_every_kind_pass_and_settle_once(serving: Serving, settled: list[Settled]) -> None:
    async def words() -> AsyncIterator[bytes]:
        for word in (b"a", b"b"):
            yield word

    async with serving(INNER, settle=lambda request, work: 7.0) as stub:
        assert [one async for one in stub.call("count", b"3")] == [b"0", b"1", b"2"]
        assert [one async for one in stub.call("write", b"3")] == [b"0", b"1", b"2"]
        assert await stub.call("collect", words()) == b"ab"
        assert [one async for one in stub.call("chat", words())] == [b"a", b"b"]
    eventually(lambda: len(settled) == 4)
    assert [one[:2] for one in settled] == [(7, "ok")] * 4


async def test_g4_the_class_of_the_metadata_reaches_the_handler(serving: Serving) -> None:
    async with serving(INNER) as stub:
        assert await stub.call("criticality", headgate_criticality="critical_plus") == b"critical_plus"
        assert await stub.call("criticality") == b"None"
    async with serving(INNER, edge={"/shop.Pages/*": "sheddable"}) as stub:
        assert await stub.call("criticality", headgate_criticality="critical_plus") == b"sheddable"


async def test_rules_see_method_metadata_and_peer(serving: Serving) -> None:
    described: list[dict[str, str]] = []

    async def describe(request: Any) -> dict[str, str] | None:
        found = {"route": request.route, "ip": request.client, "customer": request.header("X-Customer")}
        described.append(found)
        return found if len(described) == 1 else None

    async with serving(describe) as stub:
        await stub.call("echo")
        await stub.call("echo")
    assert described[0]["route"] == "/shop.Pages/echo"
    assert described[0]["ip"] == "127.0.0.1"
    assert described[0]["customer"].startswith("customer-")


async def test_methods_that_do_not_exist_and_handlers_without_await_are_not_taken_for_limited_ones(
    serving: Serving, settled: list[Settled]
) -> None:
    async with serving() as stub:
        assert (await stub.failure("nowhere"))[0] == grpc.StatusCode.UNIMPLEMENTED
        assert (await stub.failure("plain"))[0] == grpc.StatusCode.UNKNOWN
    assert not settled
    with pytest.raises(ValueError, match="settle is latency, a function or None"):
        HeadgateInterceptor(Headgate(), descriptor=PAGES, settle="bytes")  # type: ignore[arg-type]
