"""What is no answer of a node: nothing was decided by it, nothing is lost by it, and no program breaks on it."""

import asyncio
import copy
import pickle
import threading
from decimal import Decimal
from typing import Any

import pytest

from headgate import Headgate, Misused, Throttled
from limiter.client.calls import Calls
from limiter.client.node_pool import NoAnswer, NodePool
from tests.support.nodes import until
from tests.support.scripted_service import ScriptedService, granted

STRANGE: dict[str, Any] = {
    "a list": (200, []),
    "a number": (200, 7),
    "null": (502, None),
    "a redirect that says nothing of a settle": (302, []),
    "a grant without its reservation": (200, {"granted": True}),
    "a reservation that is no text": (200, {"granted": True, "reservation": 7}),
    "limits that are no list": (200, {"granted": True, "reservation": "r", "limits": {"a": 1}}),
}


@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE)
async def test_a_strange_answer_is_no_decision(service: ScriptedService, answer: Any) -> None:
    service.whole = answer
    async with Headgate(service.url, unavailable="closed", deadline_ms=300) as gate:
        with pytest.raises(Throttled) as refusal:
            await gate.acquire({"service": "a"})
        assert refusal.value.reason == "unavailable"


@pytest.mark.parametrize(
    "answer",
    [
        (200, []),
        (302, []),
        (200, {"results": [7]}),
        (200, {"results": [{"work": 1}]}),
        (401, {"reason": "unauthenticated"}),
        (413, {"reason": "too_long"}),
    ],
    ids=lambda answer: f"{answer[0]} {answer[1]}",
)
async def test_a_settle_outlives_strange_answers(service: ScriptedService, answer: Any) -> None:
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"})
        service.whole = answer
        grant.settle(3)
        await until(lambda: len(service.finals) >= 2)
        service.whole = None
        assert await gate.flush() == 0
        assert gate.counts()["settles_refused"] == 0
    assert service.finals[-1]["work"] == 3


async def test_a_refusal_of_strange_fields_is_a_refusal(service: ScriptedService) -> None:
    service.decide = lambda *_: (429, {"reason": ["work"], "retry": "a\r\nb: c", "retry_after_ms": "soon", "policy": 1})
    async with Headgate(service.url) as gate:
        with pytest.raises(Throttled) as refusal:
            await gate.acquire({"service": "a"})
    found = refusal.value
    assert (found.reason, found.retry, found.retry_after_ms, found.policy) == ("unavailable", "never", None, "")


async def test_a_late_grant_stays_for_the_one_who_repeats_its_key(service: ScriptedService) -> None:
    """A proxy's client asks again under its key and gets this grant: given back, its work would not be counted."""
    pool = NodePool([service.url])
    calls = Calls(pool, settles_max=100, is_repeatable=True)
    try:
        service.open.clear()
        loop = asyncio.get_running_loop()
        asked = [
            calls.ask({"descriptor": {"who": who}}, loop.time() + 0.05, is_kept=who == "kept")
            for who in ("kept", "left")
        ]
        for one in asked:
            with pytest.raises(NoAnswer):
                await one
        service.open.set()
        await until(lambda: service.finals)
        assert await calls.flush(5) == 0
        by_reservation = {one["reservation"] for one in service.finals}
        assert len(by_reservation) == 1
    finally:
        await calls.close()
        await pool.close()


@pytest.mark.parametrize(
    "error",
    [
        Throttled(reason="work", policy="p", retry="after", retry_after_ms=5, body={"limits": []}),
        Misused(422, {"reason": "invalid", "errors": [{"field": "work", "found": "-1"}]}),
    ],
    ids=["Throttled", "Misused"],
)
def test_exceptions_can_be_sent_to_another_process(error: Exception) -> None:
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is type(error)
        assert str(same) == str(error)
        assert vars(same) == vars(error)


async def test_numbers_of_any_kind_are_sent_as_numbers(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"}, work=Decimal(2))  # type: ignore[arg-type]
        grant.settle(Decimal("1.5"))  # type: ignore[arg-type]
        assert await gate.flush() == 0
    assert service.acquires[0]["work"] == 2.0
    assert service.finals[0]["work"] == 1.5


async def test_what_the_service_would_not_take_is_said_to_the_one_who_settles(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        grant = await gate.acquire({"service": "a"})
        for wrong in ({"work": 1e300}, {"latency_ms": float("nan")}, {"latency_ms": -1.0}, {"outcome": "o" * 65}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                grant.settle(**wrong)
        assert not grant.settled


async def test_a_client_on_a_second_running_loop_says_what_to_do(service: ScriptedService) -> None:
    async with Headgate(service.url) as gate:
        await gate.acquire({"service": "a"})
        said: list[BaseException] = []

        def elsewhere() -> None:
            try:
                asyncio.run(gate.acquire({"service": "a"}).grant())
            except RuntimeError as error:
                said.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert "one per loop" in str(said[0])
        assert await gate.acquire({"service": "a"}), "its own loop goes on"


async def test_a_close_that_is_cancelled_leaves_no_connection(service: ScriptedService) -> None:
    gate = Headgate(service.url)
    grant = await gate.acquire({"service": "a"})
    pool = gate.parts().pool
    service.open.clear()
    grant.settle(1)
    closing = asyncio.create_task(gate.close(30))
    await until(lambda: service.finals)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert pool._session is not None
    assert pool._session.closed


async def test_an_endless_answer_is_not_read_to_its_end(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limiter.client.node_pool.ANSWER_MAX", 1000)
    service.decide = lambda number, operation: granted(number, operation, padding="x" * 2000)
    async with Headgate(service.url, unavailable="closed", deadline_ms=300) as gate:
        with pytest.raises(Throttled, match="more than 1000 bytes"):
            await gate.acquire({"service": "a"})
