"""The batcher: group commit, bounds, deadlines, repairs."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import ResponseError

from limiter.model.bucket.operations import Acquire, AcquireAnswer, Charge, Idempotency, Settle, SettleStatus
from limiter.store import batcher, flush
from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from limiter.store.store_errors import StoreBusy, StoreRefused, StoreUnavailable
from tests.support.nodes import PATIENT_S, Watched, node, until
from tests.support.operations import BUCKET, MINUTE_US, NO_REFILL, ask, record_of, work_terms
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.stores import ScriptStore

SLOT = Slot()
TERMS = work_terms(rate=NO_REFILL, capacity=10_000)


@pytest.fixture
async def link(valkey: Server) -> AsyncIterator[Watched]:
    """A way to the store on which calls can be counted and held."""
    link = Watched(await open_link(valkey.url))
    yield link
    link.release()
    await link.aclose()


@pytest.fixture
async def buckets(link: Watched) -> AsyncIterator[Buckets]:
    """A node whose scripts are loaded; its calls are counted from here on."""
    buckets = Buckets(link)
    await acquire(buckets, ask(TERMS, bucket="warm:"))
    link.calls.clear()
    yield buckets
    link.release()
    await asyncio.wait_for(buckets.drain(), timeout=PATIENT_S)


async def acquire(buckets: Buckets, operation: Acquire, *, timeout_s: float = PATIENT_S) -> AcquireAnswer:
    return await buckets.acquire(SLOT, operation, timeout_s=timeout_s)


def start(buckets: Buckets, operation: Acquire, *, timeout_s: float = PATIENT_S) -> asyncio.Task[AcquireAnswer]:
    return asyncio.create_task(acquire(buckets, operation, timeout_s=timeout_s))


async def test_callers_of_one_turn_of_the_loop_share_a_call(buckets: Buckets, link: Watched) -> None:
    answers = await asyncio.gather(*(acquire(buckets, ask(TERMS, charge=1)) for _ in range(100)))
    assert link.names == ["EVALSHA"]
    assert [answer.buckets[0].balance for answer in answers] == [9_999 - number for number in range(100)], "in order"


async def test_callers_that_come_while_calls_are_in_flight_share_the_next(buckets: Buckets, link: Watched) -> None:
    link.hold()
    early = [start(buckets, ask(TERMS))]
    await until(lambda: link.in_flight == 1)
    late = []
    for _ in range(batcher.WORTH_ANOTHER - 1):  # each in a turn of its own
        late.append(start(buckets, ask(TERMS)))
        await asyncio.sleep(0)
    assert len(link.calls) == 1
    link.release()
    await asyncio.gather(*early, *late)
    assert len(link.calls) == 2


async def test_some_callers_at_once_are_worth_another_call(buckets: Buckets, link: Watched) -> None:
    """While the store decides on some, the node works for others; no more than two calls, however many come."""
    link.hold()
    callers = [start(buckets, ask(TERMS))]
    await until(lambda: link.in_flight == 1)
    callers += [start(buckets, ask(TERMS)) for _ in range(batcher.WORTH_ANOTHER)]
    await until(lambda: link.in_flight == 2)
    callers += [start(buckets, ask(TERMS)) for _ in range(flush.OPERATIONS_MAX)]
    await asyncio.sleep(0)
    link.release()
    await asyncio.gather(*callers)
    assert [found for _, _, found in link.heads] == [1, 1, 1], "buckets in each call: all ask of one"
    assert link.in_flight_max == 2


async def test_few_calls_are_in_flight_however_many_ask(buckets: Buckets, link: Watched, valkey: Server) -> None:
    link.hold()
    callers = []
    for number in range(3 * flush.OPERATIONS_MAX):  # each in a turn of its own
        callers.append(start(buckets, ask(TERMS, charge=1, bucket=f"b:{number % 50}")))
        await asyncio.sleep(0)
    await until(lambda: link.in_flight == 2)
    link.release()
    await asyncio.gather(*callers)
    assert link.in_flight_max == 2
    store = ScriptStore(valkey, SLOT)
    assert sum(record_of(store, f"b:{number}").admitted for number in range(50)) == 3 * flush.OPERATIONS_MAX


async def test_a_call_carries_no_more_than_its_share(buckets: Buckets, link: Watched) -> None:
    count = 2 * flush.OPERATIONS_MAX + 1
    await asyncio.gather(*(acquire(buckets, ask(TERMS, bucket=f"b:{number}")) for number in range(count)))
    assert [found for _, _, found in link.heads] == [flush.OPERATIONS_MAX, flush.OPERATIONS_MAX, 1]


async def test_a_bucket_has_one_set_of_terms_a_call(buckets: Buckets, link: Watched) -> None:
    """While a change of policy spreads, callers bring the old terms and the new: each is decided by its own."""
    smaller = work_terms(rate=NO_REFILL, capacity=100)
    requests = [ask(TERMS, charge=1), ask(TERMS, charge=1), ask(smaller, charge=1), ask(TERMS, charge=1)]
    answers = await asyncio.gather(*(acquire(buckets, request) for request in requests))
    assert len(link.calls) == 3
    assert [answer.buckets[0].capacity for answer in answers] == [10_000, 10_000, 100, 10_000]


async def test_several_buckets_have_one_set_of_terms_a_call_too(buckets: Buckets, link: Watched) -> None:
    """Acquires of two buckets, and settles: old terms and new never share a call."""
    smaller = work_terms(rate=NO_REFILL, capacity=100)
    both = [
        Acquire((*ask(terms, bucket="a:", charge=1).wants, *ask(terms, bucket="b:").wants))
        for terms in (TERMS, smaller)
    ]
    first, second = await asyncio.gather(*(acquire(buckets, request) for request in both))
    assert [answer.buckets[0].capacity for answer in (first, second)] == [10_000, 100]
    assert len(link.calls) == 2
    settles = [
        Settle(reservation=f"r{number}", charges=(Charge("a:", 1.0, params=terms),), work=2.0, acquired_us=first.now_us,
               deadline_us=first.now_us + MINUTE_US)
        for number, terms in enumerate((TERMS, smaller))
    ]  # fmt: skip
    answers = await asyncio.gather(*(buckets.settle(SLOT, one, timeout_s=PATIENT_S) for one in settles))
    assert [answer.status for answer in answers] == [SettleStatus.SETTLED] * 2
    assert len({command[3] for command in link.calls}) == 4, "by their ids: a script that is not loaded is sent again"


async def test_an_operation_that_cannot_be_packed_fails_alone(
    buckets: Buckets, link: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take = buckets.acquires._script.take

    def stumble(queue: Any) -> Any:
        if queue and list(queue[0].buckets) == ["odd:"]:
            raise ValueError("odd")
        return take(queue)

    monkeypatch.setattr(buckets.acquires._script, "take", stumble)
    found = await asyncio.gather(
        acquire(buckets, ask(TERMS, bucket="odd:")), acquire(buckets, ask(TERMS)), return_exceptions=True
    )
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], AcquireAnswer)
    assert "cannot be packed" in caplog.text


@pytest.mark.parametrize("reply", [7, b"short"], ids=["a number", "too short"])
async def test_a_reply_on_the_wire_that_is_none_fails_its_call_alone(
    buckets: Buckets, link: Watched, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    def send(key: bytes, packed: bytes, replied: Any, *, deadline_s: float) -> bool:
        asyncio.get_running_loop().call_soon(replied, reply)
        return True

    monkeypatch.setattr(link, "send", send)
    found = await asyncio.gather(acquire(buckets, ask(TERMS)), return_exceptions=True)
    assert isinstance(found[0], Exception)
    monkeypatch.undo()
    assert (await acquire(buckets, ask(TERMS))).granted, "the lane goes on"


async def test_slots_do_not_wait_for_each_other(buckets: Buckets, link: Watched) -> None:
    slots = [Slot("default", number) for number in range(5)]
    await asyncio.gather(*(buckets.acquire(slot, ask(TERMS), timeout_s=PATIENT_S) for slot in slots))
    assert len({str(command[3]).partition("}")[0] for command in link.calls}) == len(link.calls) == 5


async def test_beyond_the_bound_callers_are_turned_away_at_once(
    buckets: Buckets, link: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "WAITING_MAX", 8)
    monkeypatch.setattr(flush, "OPERATIONS_MAX", 8)
    link.hold()
    flying = [start(buckets, ask(TERMS))]
    await until(lambda: link.in_flight == 1)
    waiting = [start(buckets, ask(TERMS)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(StoreRefused, match="too many"):
        await acquire(buckets, ask(TERMS))
    link.release()
    answers = await asyncio.gather(*flying, *waiting)
    assert all(answer.granted for answer in answers), "and who was there already is served"


async def test_an_operation_that_would_come_too_late_is_turned_away_at_once(
    buckets: Buckets, link: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 9: a queue longer than the deadline would make everybody late; a short one keeps goodput up."""
    monkeypatch.setattr(flush, "OPERATIONS_MAX", 8)
    link.hold()
    flying = [start(buckets, ask(TERMS))]
    await until(lambda: link.in_flight == 1)
    buckets.acquires._lanes[SLOT].call_s = 1.0
    waiting = [start(buckets, ask(TERMS)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(StoreBusy, match="too many"):
        await acquire(buckets, ask(TERMS), timeout_s=0.4)
    waiting.append(start(buckets, ask(TERMS), timeout_s=0.6))
    await asyncio.sleep(0)
    link.release()
    answers = await asyncio.gather(*flying, *waiting)
    assert all(answer.granted for answer in answers)


async def test_a_store_that_stalls_is_answered_for_within_the_deadline(valkey: Server) -> None:
    async with Proxy(valkey.port) as proxy, node(proxy.url) as buckets:
        await acquire(buckets, ask(TERMS))
        proxy.mode = "stall"
        started_s = time.monotonic()
        callers = [start(buckets, ask(TERMS), timeout_s=0.2) for _ in range(20)]
        answers = await asyncio.gather(*callers, return_exceptions=True)
        assert time.monotonic() - started_s < 2
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
        assert len({id(answer) for answer in answers}) == 20, "an exception of one's own each"
        proxy.mode = "pass"
        assert (await acquire(buckets, ask(TERMS))).granted, "and goes on by itself"


async def test_each_caller_has_its_own_deadline(buckets: Buckets, link: Watched) -> None:
    link.hold()
    hasty, patient = start(buckets, ask(TERMS), timeout_s=0.02), start(buckets, ask(TERMS))
    with pytest.raises(StoreUnavailable):
        await hasty
    assert not patient.done()
    link.release()
    assert (await patient).granted
    assert len(link.calls) == 1, "they shared a call all the same"


async def test_a_short_deadline_after_long_ones_is_watched_too(buckets: Buckets, link: Watched) -> None:
    """All of the long ones were answered, but their timer still stands."""
    await acquire(buckets, ask(TERMS), timeout_s=PATIENT_S)
    link.hold()
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await acquire(buckets, ask(TERMS), timeout_s=0.02)
    assert time.monotonic() - started_s < PATIENT_S / 2


async def test_an_operation_whose_caller_gave_up_is_not_sent(buckets: Buckets, link: Watched, valkey: Server) -> None:
    link.hold()
    flying = [start(buckets, ask(TERMS))]
    await until(lambda: link.in_flight == 1)
    with pytest.raises(StoreUnavailable):
        await acquire(buckets, ask(TERMS, bucket="late:"), timeout_s=0.02)
    link.release()
    await asyncio.gather(*flying)
    await buckets.drain()
    assert ScriptStore(valkey, SLOT).record("late:") is None


async def test_lanes_are_forgotten_when_idle(buckets: Buckets) -> None:
    """Namespaces are client text: a node must not remember every one it ever heard."""
    asking = (buckets.acquire(Slot(f"tenant-{number}"), ask(TERMS), timeout_s=PATIENT_S) for number in range(300))
    await asyncio.gather(*asking)
    await buckets.drain()
    assert buckets.acquires._lanes == {}
    assert buckets.acquires._tasks == set()


async def test_a_forgotten_script_is_sent_along_with_the_call(buckets: Buckets, link: Watched, valkey: Server) -> None:
    """F-S1."""
    valkey.command("SCRIPT FLUSH SYNC")
    answers = await asyncio.gather(*(acquire(buckets, ask(TERMS, charge=1)) for _ in range(10)))
    assert link.names == ["EVALSHA", "EVAL"]
    assert answers[-1].buckets[0].balance == 9_990
    await acquire(buckets, ask(TERMS))
    assert link.names == ["EVALSHA", "EVAL", "EVALSHA"], "and only with that one"


async def test_drain_waits_for_calls_in_flight_and_operations_behind_them(buckets: Buckets, link: Watched) -> None:
    link.hold()
    callers = [start(buckets, ask(TERMS)) for _ in range(5)]
    await until(lambda: link.in_flight == 1)
    callers += [start(buckets, ask(work_terms(rate=NO_REFILL, capacity=n))) for n in (10, 20, 30)]
    await asyncio.sleep(0)
    draining = asyncio.create_task(buckets.drain())
    done, _ = await asyncio.wait([draining], timeout=0.05)
    assert not done
    link.release()
    await draining
    await asyncio.sleep(0)  # for the callers to take their answers
    assert all(caller.done() for caller in callers)


async def test_drain_waits_for_operations_of_this_turn(buckets: Buckets) -> None:
    """The operation was asked in this very turn of the loop, so it is not in flight yet."""
    caller = start(buckets, ask(TERMS))
    await asyncio.sleep(0)
    await buckets.drain()
    await asyncio.sleep(0)
    assert caller.done()


async def test_nothing_is_left_waiting_when_a_closing_loop_cancels_the_calls(buckets: Buckets, link: Watched) -> None:
    """`asyncio.run` cancels all that still runs at its end; a node's own end comes after that."""
    link.hold()
    before = asyncio.all_tasks()
    flying = [start(buckets, ask(TERMS))]
    await until(lambda: link.in_flight == 1)
    flying.append(start(buckets, ask(work_terms(rate=NO_REFILL, capacity=10))))
    waiting = start(buckets, ask(TERMS))
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - before:
        task.cancel()
    assert (await asyncio.wait([*flying, waiting], timeout=PATIENT_S))[1] == set()
    await asyncio.wait_for(buckets.drain(), timeout=PATIENT_S)
    assert buckets.acquires._lanes == {}


async def test_any_error_reaches_every_operation_that_waits(buckets: Buckets, link: Watched) -> None:
    class Broken:
        async def call(self, *_: object, timeout_s: float) -> Any:
            raise ResponseError("ERR something new")

        def send(self, *_: object, deadline_s: float) -> bool:
            return False

        def listen(self, channel: bytes) -> Any: ...

        async def aclose(self) -> None: ...

    working, link._link = link._link, Broken()
    answers = await asyncio.gather(*(acquire(buckets, ask(TERMS)) for _ in range(5)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["the store answers with an error: ERR something new"] * 5
    assert len({id(answer) for answer in answers}) == 5
    link._link = working
    assert (await acquire(buckets, ask(TERMS))).granted


@pytest.mark.parametrize(
    "wrong",
    [
        Acquire(()),
        Acquire(ask(TERMS).wants * 256),
        ask(TERMS, charge=math.nan),
        ask(TERMS, charge=-1),
        ask(TERMS, minimum=math.inf),
        ask(TERMS).but(requests=0),
        Acquire(ask(TERMS).wants * 2),
        ask(TERMS).but(idempotency=Idempotency("key", b"short", b"")),
        ask(TERMS).but(idempotency=Idempotency("key", b"f" * 16, b""), dry_run=True),
    ],
)
async def test_an_acquire_that_would_spoil_a_batch_never_joins_one(buckets: Buckets, wrong: Acquire) -> None:
    found = await asyncio.gather(acquire(buckets, wrong), acquire(buckets, ask(TERMS)), return_exceptions=True)
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], AcquireAnswer)


@pytest.mark.parametrize(
    ("charges", "work"),
    [
        ((), 1.0),
        ((Charge(BUCKET, 2.0),) * 256, 1.0),
        ((Charge(BUCKET, 2.0),), -1.0),
        ((Charge(BUCKET, 2.0),), math.nan),
        ((Charge(BUCKET, 2.0, 1e300),), 1e300),
    ],
)
async def test_a_settle_that_would_spoil_a_batch_never_joins_one(
    buckets: Buckets, charges: tuple[Charge, ...], work: float
) -> None:
    wrong = Settle(reservation="r1", charges=charges, work=work, acquired_us=0, deadline_us=2**52)
    with pytest.raises(ValueError, match=r"settle|work|weight"):
        await buckets.settle(SLOT, wrong, timeout_s=PATIENT_S)
