"""F-T1 to F-T5: clocks that step, clocks that are wrong, and buckets that nobody asked for a year (promise 6)."""

import math
import time
from itertools import count
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limiter.engine.decider import Decider
from limiter.engine.operation import Operation
from limiter.engine.shape import Shape
from limiter.model.bucket.bucket import STEP_BACK_MAX_US, TTL_MAX_S
from limiter.model.bucket.contract import AcquireRequest, Granted
from limiter.model.bucket.reservation import Signer
from limiter.model.ledger.ledger import Ledger
from limiter.model.policy.period import Period, window_us
from limiter.model.policy.reading import read_policy_set
from limiter.store import keys
from limiter.store.buckets import Buckets
from limiter.store.clock import GUESS_MIN_US
from limiter.store.keys import Slot
from tests.support.nodes import PATIENT_S, node
from tests.support.operations import (
    BUCKET,
    DAY_US,
    HOUR_US,
    MS_US,
    NO_REFILL,
    S_US,
    START_US,
    acquire,
    ask,
    done,
    look,
    quota_terms,
    reserve,
    settle,
    work_terms,
)
from tests.support.servers import Server
from tests.support.stores import Decides, ScriptStore

TERMS = work_terms(rate=100, capacity=50)
TOUCH = ask(TERMS, minimum=-math.inf, charge=0)
UTC = ZoneInfo("UTC")
YEAR_US = 366 * DAY_US


@pytest.fixture(params=["model", "valkey", "redis7"])
def ledger(request: pytest.FixtureRequest) -> Decides:
    """The model, then the scripts on each kind of server."""
    return Ledger() if request.param == "model" else ScriptStore(request.getfixturevalue(request.param))


def balances(ledger: Decides, *times_us: int) -> list[float]:
    """The balance at each time in turn, each seen by a request that counts and costs nothing."""
    return [acquire(ledger, TOUCH, now_us).buckets[0].balance for now_us in times_us]


def test_f_t1_back_200_ms_gives_no_credit(ledger: Decides) -> None:
    acquire(ledger, ask(TERMS, charge=50))
    back_us = START_US - 200 * MS_US
    assert balances(ledger, back_us, back_us + 100 * MS_US, START_US) == [0, 0, 0], "time that was credited before"
    assert balances(ledger, START_US + 100 * MS_US) == [10]


def test_f_t1_a_settle_during_the_step_gets_no_credit_either(ledger: Decides) -> None:
    reservation = reserve(ledger, ask(TERMS, charge=50))
    assert settle(ledger, done(reservation, 50), START_US - 200 * MS_US).buckets[0].balance == 0
    assert balances(ledger, START_US) == [0]


def test_f_t2_after_an_hour_back_a_bucket_starts_from_the_new_time_without_credit(ledger: Decides) -> None:
    acquire(ledger, ask(TERMS, charge=50))
    back_us = START_US - HOUR_US
    assert balances(ledger, back_us) == [0]
    assert balances(ledger, back_us + 100 * MS_US) == [10], "it refills from there, and is not frozen for an hour"


def test_f_t2_debt_survives_the_step(ledger: Decides) -> None:
    acquire(ledger, ask(TERMS, charge=80))
    assert balances(ledger, START_US - HOUR_US) == [-30]


def test_f_t3_forward_an_hour_and_corrected_costs_one_capacity_at_most(ledger: Decides) -> None:
    acquire(ledger, ask(TERMS, charge=50))
    assert balances(ledger, START_US + HOUR_US) == [50], "one capacity"
    acquire(ledger, ask(TERMS, charge=50), START_US + HOUR_US)
    assert balances(ledger, START_US + S_US) == [0], "the correction is no second one"
    assert balances(ledger, START_US + S_US + 100 * MS_US) == [10], "and freezes nothing"


def test_f_t3_a_quota_survives_forward_and_corrected(ledger: Decides) -> None:
    """The clock shows tomorrow and is put right: at most one more quota, and none is given for coming back."""
    today = quota_terms(100, window_us(START_US, Period.DAY, UTC))
    tomorrow = quota_terms(100, window_us(START_US + DAY_US, Period.DAY, UTC))
    assert acquire(ledger, ask(today, charge=100)).granted
    assert acquire(ledger, ask(tomorrow, charge=70), START_US + DAY_US).granted
    assert look(ledger, today, START_US + S_US) == 30
    assert acquire(ledger, ask(today, charge=30), START_US + S_US).granted
    assert not acquire(ledger, ask(today, charge=1), START_US + 2 * S_US).granted
    assert acquire(ledger, ask(tomorrow, charge=100), START_US + DAY_US).granted, "and tomorrow begins once more"


@settings(max_examples=40, deadline=None)
@given(
    at_ms=st.integers(0, 3_000),
    step_us=st.one_of(st.integers(-YEAR_US, YEAR_US), st.integers(-2 * STEP_BACK_MAX_US, 2 * STEP_BACK_MAX_US)),
)
def test_f_t1_to_f_t3_any_one_step_costs_a_capacity_and_a_second_at_most(at_ms: int, step_us: int) -> None:
    """Callers ask for everything every 10 ms, for 3 s and then 3 s more, compared with a right clock."""

    def work_let_in(by_us: int, *, milliseconds: range) -> float:
        ledger, total = Ledger(), 0.0
        for ms in milliseconds:
            now_us = START_US + ms * MS_US + (by_us if ms >= at_ms else 0)
            total += acquire(ledger, ask(TERMS, minimum=1, charge=1), now_us).granted
        return total

    straight = work_let_in(0, milliseconds=range(0, 6_000, 10))
    stepped = work_let_in(step_us, milliseconds=range(0, 6_000, 10))
    assert straight - 101 <= stepped <= straight + 51, "frozen for a second, or full again"


def decider_of(buckets: Buckets) -> Decider:
    """The decider of a node, with a quota of 100 per month."""
    decider = Decider(buckets, Signer(b"a secret of the tests"), deadline_s=PATIENT_S)
    quota = {"work": 100, "period": "month", "timezone": "UTC"}
    decider.enforce(read_policy_set({"policies": [{"name": "monthly", "match": {}, "quota": quota}]}))
    return decider


async def take_10(decider: Decider) -> float:
    """Take ten units, and give the balance that is left."""
    decision = await decider.acquire(AcquireRequest({"customer": "c1"}, work=10))
    assert isinstance(decision, Granted)
    return decision.limits[0].balance


async def test_f_t4_a_node_with_a_wrong_clock_decides_like_any_other(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotas need a calendar: they go by the store's clock, found with one more call at first, and none later."""
    asked_us: list[int] = []
    asks, ask_again = Shape.asks, Operation.ask_again

    def noting(shape: Shape, *asked: Any) -> Any:
        asked_us.append(asked[-1])
        return asks(shape, *asked)

    def noting_again(operation: Operation, now_us: int) -> None:
        asked_us.append(now_us)
        ask_again(operation, now_us)

    monkeypatch.setattr(Shape, "asks", noting)
    monkeypatch.setattr(Operation, "ask_again", noting_again)
    wild_ns = count(0, 10**17)  # years apart at every look
    monkeypatch.setattr(time, "time", lambda: next(wild_ns) / 1e9)
    monkeypatch.setattr(time, "time_ns", lambda: next(wild_ns))
    for _ in range(2):
        async with node(valkey.url) as buckets:
            decider = decider_of(buckets)
            left = [await take_10(decider) for _ in range(3)]
            assert abs(buckets.clock.now_us() - server_now_us(valkey)) < S_US
    monkeypatch.undo()
    assert asked_us[0] == asked_us[4] == GUESS_MIN_US, "a new node only guesses, and not what cannot be"
    assert all(abs(found - server_now_us(valkey)) < 60 * S_US for found in asked_us[1:4] + asked_us[5:])
    assert len(asked_us) == 8
    assert left == [60, 50, 40]


async def test_f_t4_a_node_whose_guess_of_the_window_is_old_asks_again(valkey: Server) -> None:
    """Its last reply was of last month, say: the script answers with its own time and does nothing."""
    async with node(valkey.url) as buckets:
        buckets.clock.observe(server_now_us(valkey) - 40 * DAY_US)
        assert await take_10(decider_of(buckets)) == 90


@pytest.mark.parametrize("wrong_us", [-10 * YEAR_US, -10 * S_US, 10 * S_US, 10 * YEAR_US])
async def test_f_t4_a_wrong_idea_of_the_stores_time_stops_no_call(valkey: Server, wrong_us: int) -> None:
    """Calls carry an expiry by that idea; one that the store finds expired is sent again with the right time."""
    async with node(valkey.url) as buckets:
        buckets.clock.observe(server_now_us(valkey) + wrong_us)
        answer = await buckets.acquire(Slot(), ask(TERMS), timeout_s=PATIENT_S)
        assert answer.granted
        assert abs(buckets.clock.now_us() - server_now_us(valkey)) < S_US


@pytest.mark.parametrize("rate", [100.0, 1e15, 2.0**53])
@pytest.mark.parametrize("years", [1, 100])
def test_f_t5_after_a_year_idle_a_bucket_is_full_and_no_more(ledger: Decides, rate: float, years: int) -> None:
    terms = work_terms(rate=rate, capacity=50)
    acquire(ledger, ask(terms, charge=9_000))
    assert look(ledger, terms, START_US + years * YEAR_US) == 50
    assert acquire(ledger, ask(terms, charge=2), START_US + years * YEAR_US).buckets[0].balance == 48


def test_f_t5_a_debt_that_takes_ages_keeps_its_record_for_a_year_and_no_longer(server: Server) -> None:
    store, terms = ScriptStore(server), work_terms(rate=NO_REFILL, capacity=50)
    acquire(store, ask(terms, charge=9_000))
    kept_ms = server.client().pttl(keys.bucket(store.prefix, BUCKET))
    assert TTL_MAX_S * 1000 - 60_000 < kept_ms <= TTL_MAX_S * 1000 + 61_000


def server_now_us(server: Server) -> int:
    seconds, microseconds = server.command("TIME")
    return int(seconds) * S_US + int(microseconds)
