"""Turns: bounded work in progress, first come first served, and an early refusal for those who would wait too long."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from api.data import turns
from api.data.plane import Headers, Plane
from api.data.turns import Turns
from limiter.settings import Settings
from tests.support.nodes import until


class Guest:
    """Asks for a turn of some operations, and remembers what became of it."""

    def __init__(self, given: Turns, size: int) -> None:
        self.state = "waiting"
        self._turns, self._size = given, size
        given.ask(self._begin, self._give_up)

    def _begin(self) -> int:
        self.state = "begun"
        return self._size

    def _give_up(self) -> None:
        self.state = "gone"

    def end(self) -> None:
        self.state = "ended"
        for _ in range(self._size):
            self._turns.done()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Turns]:
    monkeypatch.setattr(turns, "IN_PROGRESS_MAX", 10)
    return Turns


async def test_they_begin_in_order_and_only_while_there_is_room(small: Callable[[float], Turns]) -> None:
    given = small(60.0)
    first, second, third, fourth = (Guest(given, 6) for _ in range(4))
    assert [guest.state for guest in (first, second, third, fourth)] == ["begun", "begun", "waiting", "waiting"]
    first.end()
    assert [guest.state for guest in (third, fourth)] == ["begun", "waiting"]
    second.end()
    assert fourth.state == "begun"


async def test_a_turn_that_began_nothing_takes_no_room(small: Callable[[float], Turns]) -> None:
    given = small(60.0)
    assert [Guest(given, 0).state for _ in range(100)] == ["begun"] * 100


async def test_a_turn_that_waited_too_long_is_refused(small: Callable[[float], Turns]) -> None:
    given = small(0.001)
    busy, waiting = Guest(given, 10), Guest(given, 1)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await until(lambda: loop.time() > began_s + 0.002)
    busy.end()
    assert waiting.state == "gone"
    assert Guest(given, 1).state == "begun", "and the next is served"


async def test_a_turn_that_asks_for_another_while_it_begins_is_counted(small: Callable[[float], Turns]) -> None:
    """A refused batch does so if its connection has the next one waiting."""
    given = small(60.0)
    inner: list[Guest] = []

    def begin() -> int:
        inner.append(Guest(given, 6))
        return 0

    given.ask(begin, lambda: None)
    assert [Guest(given, 6).state, Guest(given, 6).state] == ["begun", "waiting"]


async def test_a_batch_without_a_turn_in_time_is_answered_503(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = Plane(cast("Any", None), Settings())
    monkeypatch.setattr(plane.turns, "ask", lambda begin, too_late: too_late())
    answer = await plane.answer(b"/v1/batch", Headers(content_type=b"application/json"), b'{"operations":[]}')
    assert (answer.status, msgspec.json.decode(answer.body)["reason"]) == (503, "node_busy")
    assert plane.busy_batches == 1
