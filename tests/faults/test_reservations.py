"""F-R1 to F-R13 and F-R16: what happens to a reservation when callers and nodes die, repeat themselves or lie (B2)."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import permutations

import pytest

from limiter.model.bucket.operations import (
    LATE_US,
    Acquire,
    AcquireAnswer,
    AcquireStatus,
    Charge,
    Idempotency,
    Settle,
    SettleAnswer,
    SettleStatus,
    Want,
)
from limiter.model.bucket.reservation import Reservation, Signer, taken_by
from limiter.store.buckets import Buckets
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from limiter.store.store_errors import StoreUnavailable
from tests.support.nodes import PATIENT_S, Watched, node, until
from tests.support.operations import (
    BUCKET,
    HOUR_US,
    NO_REFILL,
    S_US,
    START_US,
    acquire,
    ask,
    done,
    look,
    progress,
    quota_terms,
    record_of,
    reserve,
    reserved,
    settle,
    work_terms,
)
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.stores import ScriptStore

# No refill to speak of: the units missing from such a bucket are those that were taken.
TERMS = work_terms(rate=NO_REFILL, capacity=1024, debt_max=100)
SLOT = Slot()


@pytest.fixture
def store(server: Server) -> ScriptStore:
    """The scripts, on each kind of server in turn."""
    return ScriptStore(server, SLOT)


def keyed(operation: Acquire, *, key: str = "order-17", fingerprint: bytes = b"f" * 16, memo: bytes = b"") -> Acquire:
    return operation.but(idempotency=Idempotency(key, fingerprint, memo))


def test_f_r1_a_client_that_dies_stays_charged_at_its_estimate(store: ScriptStore) -> None:
    reserve(store, ask(TERMS, charge=7))
    long_gone_us = START_US + HOUR_US
    acquire(store, ask(TERMS, charge=0), long_gone_us)
    assert look(store, TERMS, long_gone_us) == pytest.approx(1024 - 7)
    record = record_of(store)
    assert (record.admitted - 1, record.settles, record.work_charged) == (1, 0, 7), "one admitted, none settled"


def test_f_r2_the_same_settle_twice_moves_nothing(store: ScriptStore) -> None:
    reservation = reserve(store, ask(TERMS, charge=2))
    first = settle(store, done(reservation, 9))
    before = store.record(BUCKET), store.tombstone("r1")
    again = settle(store, done(reservation, 9))
    assert (first.status, again.status) == (SettleStatus.SETTLED, SettleStatus.DUPLICATE)
    assert again.but(status=first.status) == first, "the same numbers"
    assert (store.record(BUCKET), store.tombstone("r1")) == before


def test_f_r2_the_same_settle_twice_in_one_batch_moves_nothing(store: ScriptStore) -> None:
    reservation = reserve(store, ask(TERMS, charge=2))
    answers = store.settle([done(reservation, 9)] * 3, START_US)
    assert [answer.status for answer in answers] == [SettleStatus.SETTLED] + [SettleStatus.DUPLICATE] * 2
    assert (record_of(store).settles, look(store, TERMS)) == (1, 1024 - 9)


def test_f_r3_a_second_settle_with_another_amount_is_a_conflict_and_moves_nothing(store: ScriptStore) -> None:
    reservation = reserve(store, ask(TERMS, charge=2))
    first = settle(store, done(reservation, 9))
    before = store.record(BUCKET), store.tombstone("r1")
    for other in (0, 8, 10, 1e9):
        answer = settle(store, done(reservation, other))
        assert answer.status is SettleStatus.CONFLICT
        assert answer.but(status=first.status) == first, "the first result is shown"
    assert (store.record(BUCKET), store.tombstone("r1")) == before


def test_f_r4_more_work_after_the_deadline_is_debited(store: ScriptStore) -> None:
    reservation = reserve(store, ask(TERMS, charge=2))
    answer = settle(store, done(reservation, 9), reservation.deadline_us + S_US)
    assert (answer.status, answer.late, answer.buckets[0].adjusted) == (SettleStatus.SETTLED, True, 7)
    assert record_of(store).balance == pytest.approx(1024 - 9)


def test_f_r4_a_settle_at_the_deadline_is_not_late(store: ScriptStore) -> None:
    reservation = reserve(store, ask(TERMS, charge=9))
    answer = settle(store, done(reservation, 2), reservation.deadline_us)
    assert (answer.late, answer.buckets[0].adjusted) == (False, -7)


def test_f_r5_less_work_after_the_deadline_refunds_nothing(store: ScriptStore) -> None:
    reservation = reserve(store, ask(TERMS, charge=9))
    answer = settle(store, done(reservation, 2), reservation.deadline_us + 1)
    assert (answer.status, answer.late, answer.buckets[0].adjusted) == (SettleStatus.SETTLED, True, 0)
    assert record_of(store).balance == pytest.approx(1024 - 9)
    assert record_of(store).work_settled == 2
    again = settle(store, done(reservation, 2), reservation.deadline_us + 2)
    assert (again.status, again.late) == (SettleStatus.DUPLICATE, True)


def test_f_r5_after_the_grace_a_reservation_is_gone(store: ScriptStore) -> None:
    """Its tombstone may be forgotten by then, so even a first settle must not count."""
    reservation = reserve(store, ask(TERMS, charge=9))
    before = store.record(BUCKET)
    answer = settle(store, done(reservation, 900), reservation.deadline_us + LATE_US + 1)
    assert answer.status is SettleStatus.GONE
    assert (store.record(BUCKET), store.tombstone("r1")) == (before, None)


def test_f_r6_a_foreign_token_names_no_reservation() -> None:
    """One answer for all of them, and no bucket or tombstone to write to. Every bit: tests/model/bucket."""
    ours = Signer(b"ours")
    taken = (taken_by(Charge(BUCKET, 2.0)),)
    reservation = Reservation(
        id=b"0" * 12, namespace="default", partition=0, acquired_us=1, deadline_us=2, expected_ms=0.0, taken=taken
    )
    token = ours.sign(reservation)
    assert ours.open(token) == reservation
    unknown, foreign, truncated, forged = "unknown", Signer(b"theirs").sign(reservation), token[:-4], "B" + token[1:]
    assert {ours.open(other) for other in (unknown, foreign, truncated, forged, "")} == {None}


@pytest.mark.parametrize("charge", [2, 2000])
def test_f_r7_an_acquire_repeated_with_its_key_is_decided_once(store: ScriptStore, charge: float) -> None:
    """Granted or refused, the decision stands, with the memo of the first."""
    request = ask(quota_terms(1024, (0, 2 * START_US)), charge=charge)
    first = acquire(store, keyed(request, memo=b"first"))
    assert first.granted == (charge == 2)
    before = store.record(BUCKET)
    again = acquire(store, keyed(request, memo=b"second"), START_US + S_US)
    assert again == first.but(memo=b"first")
    assert store.record(BUCKET) == before


def test_f_r7_a_key_repeated_in_one_batch_is_decided_once(store: ScriptStore) -> None:
    requests = [keyed(ask(TERMS), memo=memo) for memo in (b"first", b"second", b"third")]
    first, *others = store.acquire(requests, START_US)
    assert others == [first.but(memo=b"first")] * 2
    assert look(store, TERMS) == 1022


def test_f_r7_a_refusal_stands_even_when_tokens_are_back(store: ScriptStore) -> None:
    terms = work_terms(rate=100, capacity=50)
    acquire(store, ask(terms, charge=50))
    assert not acquire(store, keyed(ask(terms))).granted
    assert not acquire(store, keyed(ask(terms)), START_US + S_US).granted
    assert acquire(store, keyed(ask(terms), key="order-18"), START_US + S_US).granted


def test_f_r8_a_key_with_other_parameters_is_a_conflict_and_debits_nothing(store: ScriptStore) -> None:
    acquire(store, keyed(ask(TERMS)))
    before = store.record(BUCKET)
    answer = acquire(store, keyed(ask(TERMS, charge=3), fingerprint=b"g" * 16))
    assert (answer.status, answer.buckets) == (AcquireStatus.CONFLICT, ())
    assert store.record(BUCKET) == before


def test_f_r9_work_far_above_the_estimate_is_debited_to_the_bound_and_counted(store: ScriptStore) -> None:
    reservation = reserve(store, ask(TERMS, charge=2))
    answer = settle(store, done(reservation, 5000))
    assert (answer.buckets[0].balance, answer.buckets[0].uncollected) == (-100, 5000 - 1124)
    assert (record_of(store).balance, record_of(store).uncollected) == (-100, 5000 - 1124)


def test_f_r9_a_final_word_below_the_progress_takes_back_the_uncollected_first(store: ScriptStore) -> None:
    """Work that was never collected cannot be refunded."""
    reservation = reserve(store, ask(TERMS, charge=2))
    settle(store, progress(reservation, 5000))
    answer = settle(store, done(reservation, 1000))
    assert answer.buckets[0].balance == pytest.approx(24)
    assert record_of(store).uncollected == 0


def test_f_r10_no_work_is_a_full_refund_and_never_more_than_capacity(store: ScriptStore) -> None:
    terms = work_terms(rate=100, capacity=50)
    reservation = reserve(store, ask(terms, charge=50))
    assert settle(store, done(reservation, 0)).buckets[0].balance == 50
    second = reserve(store, ask(terms, charge=50), name="r2")
    assert settle(store, done(second, 0), START_US + S_US).buckets[0].balance == 50, "it was full again already"


@pytest.mark.parametrize("order", list(permutations([64, 128, 192])))
def test_f_r12_progress_repeated_or_reordered_counts_by_its_highest_mark(
    store: ScriptStore, order: tuple[int, ...]
) -> None:
    reservation = reserve(store, ask(TERMS, charge=1))
    for work in order + order:
        answer = settle(store, progress(reservation, work))
    assert (answer.work, answer.buckets[0].adjusted) == (192, 191)
    assert (look(store, TERMS), record_of(store).work_settled) == (1024 - 192, 192)
    settle(store, done(reservation, 192))
    assert settle(store, progress(reservation, 500)).status is SettleStatus.DUPLICATE, "after the final word"
    assert (look(store, TERMS), record_of(store).settles) == (1024 - 192, 1)


def test_f_r13_when_one_of_several_policies_refuses_none_is_debited(store: ScriptStore) -> None:
    names = [f"p{number}:a" for number in range(8)]
    empty = names[5]
    acquire(store, ask(TERMS, bucket=empty, charge=1024))
    answer = acquire(store, Acquire(tuple(Want(name, TERMS, 1, 2) for name in names)))
    assert answer.status is AcquireStatus.REFUSED
    assert [look(store, TERMS, bucket=name) for name in names] == [0 if name == empty else 1024 for name in names]


# Over the network: nodes that die, callers that leave


async def warm(buckets: Buckets) -> None:
    """Have the scripts loaded and a connection open, so that the next reply is the one that matters."""
    answer = await buckets.acquire(SLOT, ask(TERMS, bucket="warm:", charge=0), timeout_s=PATIENT_S)
    await buckets.settle(SLOT, settled_at(answer, "warm:"), timeout_s=PATIENT_S)


def settled_at(answer: AcquireAnswer, bucket: str, *, name: str = "warm", work: float = 0.0) -> Settle:
    return Settle(
        reservation=name,
        charges=(Charge(bucket, answer.buckets[0].charge, 1.0, TERMS),),
        work=work,
        acquired_us=answer.now_us,
        deadline_us=answer.now_us + 60 * S_US,
    )


async def lose_an_answer(server: Server, operation: Acquire) -> None:
    """A node that is cut off for good after the store applied its call, before the answer."""
    async with Proxy(server.port) as proxy, node(proxy.url) as dying:
        await warm(dying)
        await proxy.refuse()
        proxy.drop_next_reply(and_reset_all=True)
        with pytest.raises(StoreUnavailable):
            await dying.acquire(SLOT, operation, timeout_s=0.2)


async def test_f_r11_another_node_repeats_with_the_key_and_finds_the_decision(server: Server) -> None:
    await lose_an_answer(server, keyed(ask(TERMS), memo=b"the first node's reservation"))
    async with node(server.url) as other:
        answer = await other.acquire(SLOT, keyed(ask(TERMS), memo=b"the second's"), timeout_s=PATIENT_S)
    assert (answer.granted, answer.memo) == (True, b"the first node's reservation")
    record = record_of(ScriptStore(server, SLOT))
    assert (record.admitted, record.work_charged) == (1, 2), "one debit"


async def test_f_r11_without_a_key_the_estimate_stays_charged(server: Server) -> None:
    await lose_an_answer(server, ask(TERMS))
    record = record_of(ScriptStore(server, SLOT))
    assert (record.admitted, record.work_charged, record.settles) == (1, 2, 0), "as in F-R1"


CALLERS = 300


def caller(number: int) -> Acquire:
    """Each caller has a bucket of its own size, to tell its answer from another's."""
    terms = replace(TERMS, capacity=1000.0 + number)
    return ask(terms, bucket=f"caller:{number}")


async def test_f_r16_callers_cancelled_mid_acquire_leave_nothing_behind(valkey: Server) -> None:
    before = asyncio.all_tasks()
    async with Proxy(valkey.port) as proxy, node(proxy.url) as buckets:
        await warm(buckets)
        proxy.mode = "stall"
        seen = proxy.requests
        callers = [
            asyncio.create_task(buckets.acquire(SLOT, caller(number), timeout_s=PATIENT_S)) for number in range(CALLERS)
        ]
        await until(lambda: proxy.requests > seen)  # some are on their way, some still wait
        for task in callers[::2]:
            task.cancel()
        proxy.mode = "pass"
        answers = await asyncio.gather(*callers, return_exceptions=True)
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
        for number in range(1, CALLERS, 2):
            answer = answers[number]
            assert isinstance(answer, AcquireAnswer)
            assert (answer.granted, answer.buckets[0].capacity) == (True, 1000 + number)
        await assert_in_step(buckets)
        assert buckets.acquires._lanes == {}
    assert asyncio.all_tasks() == before


async def test_f_r16_callers_cancelled_mid_settle_leave_nothing_behind(valkey: Server) -> None:
    before = asyncio.all_tasks()
    async with Proxy(valkey.port) as proxy, node(proxy.url) as buckets:
        await warm(buckets)
        granted = await asyncio.gather(
            *(buckets.acquire(SLOT, caller(number), timeout_s=PATIENT_S) for number in range(CALLERS))
        )
        settles = [
            settled_at(answer, f"caller:{number}", name=f"r{number}", work=5.0) for number, answer in enumerate(granted)
        ]
        proxy.mode = "stall"
        seen = proxy.requests
        callers = [asyncio.create_task(buckets.settle(SLOT, one, timeout_s=PATIENT_S)) for one in settles]
        await until(lambda: proxy.requests > seen)
        for task in callers[::2]:
            task.cancel()
        proxy.mode = "pass"
        answers = await asyncio.gather(*callers, return_exceptions=True)
        for number in range(1, CALLERS, 2):
            answer = answers[number]
            assert isinstance(answer, SettleAnswer)
            assert (answer.status, answer.buckets[0].capacity) == (SettleStatus.SETTLED, 1000 + number)
        # A cancelled caller asks again, and is counted once whether or not its first settle got through.
        again = await asyncio.gather(*(buckets.settle(SLOT, one, timeout_s=PATIENT_S) for one in settles[::2]))
        assert {answer.status for answer in again} <= {SettleStatus.SETTLED, SettleStatus.DUPLICATE}
        store = ScriptStore(valkey, SLOT)
        for number in range(CALLERS):
            assert record_of(store, f"caller:{number}").balance == 1000 + number - 5
        await assert_in_step(buckets)
        assert buckets.settles._lanes == {}
    assert asyncio.all_tasks() == before


async def test_f_r16_a_call_that_timed_out_never_answers_another(valkey: Server) -> None:
    """Its reply still comes, when the store wakes up: nobody may be listening on that connection then."""
    async with aclosing(Watched(await open_link(valkey.url))) as link:
        buckets = Buckets(link)
        await warm(buckets)
        valkey.pause()
        try:
            early = [buckets.acquire(SLOT, caller(number), timeout_s=0.1) for number in range(10)]
            answers = await asyncio.gather(*early, return_exceptions=True)
            assert all(isinstance(answer, StoreUnavailable) for answer in answers)
            late = [
                asyncio.create_task(buckets.acquire(SLOT, caller(number), timeout_s=PATIENT_S))
                for number in range(10, 20)
            ]
            await until(lambda: link.in_flight > 0)
            for _ in range(10):  # turns of the loop, for the call to be written
                await asyncio.sleep(0)
        finally:
            valkey.resume()
        capacities = [answer.buckets[0].capacity for answer in await asyncio.gather(*late)]
        assert capacities == [1000 + number for number in range(10, 20)]


async def test_f_r16_a_caller_cancelled_at_once_was_never_there(valkey: Server) -> None:
    async with node(valkey.url) as buckets:
        tasks = [asyncio.create_task(buckets.acquire(SLOT, caller(1), timeout_s=PATIENT_S)) for _ in range(10)]
        await asyncio.sleep(0)  # they have asked, and nothing is sent yet
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await buckets.drain()
        assert buckets.acquires._lanes == {}
    assert ScriptStore(valkey, SLOT).record("caller:1") is None


async def assert_in_step(buckets: Buckets) -> None:
    """Every connection answers what it was asked, not what somebody else was."""
    fresh = [buckets.acquire(SLOT, caller(number), timeout_s=PATIENT_S) for number in range(CALLERS)]
    answers = await asyncio.gather(*fresh)
    assert [answer.buckets[0].capacity for answer in answers] == [1000 + number for number in range(CALLERS)]
    await buckets.drain()


async def test_one_caller_s_bad_value_never_spoils_the_batch_for_others(valkey: Server) -> None:
    """Neither before the call, nor half way through it."""
    async with node(valkey.url) as buckets:
        answer = await buckets.acquire(SLOT, caller(0), timeout_s=PATIENT_S)
        good = reserved(caller(0), answer)
        bad = [
            good.but(reservation="bad", deadline_us=10**22),
            good.but(reservation="bad", deadline_us=-1),
            good.but(reservation="\udc80"),
            good.but(reservation="bad", charges=(good.charges[0].but(weight=-1.0),)),
            good.but(reservation="bad", charges=(good.charges[0].but(bucket="\udc80"),)),
        ]
        tasks = [buckets.settle(SLOT, operation, timeout_s=PATIENT_S) for operation in (good, *bad)]
        first, *others = await asyncio.gather(*tasks, return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert all(isinstance(other, ValueError) for other in others), others
