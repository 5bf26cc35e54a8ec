"""Which calls are plain: the scripts are cut off behind their plain case, and say so where it does not do."""

from dataclasses import replace
from secrets import token_bytes
from typing import Any

import pytest
from redis.exceptions import ResponseError

from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.operations import COVERED, LEARNED, REFUSING, Acquire, Idempotency, Lot, Settle, Want
from limiter.store.scripts import AcquireScript, SettleScript, load_script
from tests.support.operations import (
    S_US,
    START_US,
    ask,
    done,
    progress,
    quota_terms,
    request_terms,
    reserve,
    work_terms,
)
from tests.support.servers import Server
from tests.support.stores import ScriptStore

WORK = work_terms(rate=10.0)
CAPPED = request_terms(cap=10.0, burst=3.0)
QUOTA = quota_terms(100, (START_US - S_US, START_US + 3600 * S_US))


def cut_off(name: str) -> str:
    source = load_script(name).decode()
    # Where a constant was declared its line is empty, so the text before is whole.
    return source[: source.index("--[[ record:")] + "\nreturn redis.error_reply('GENERAL')"


def is_plain(store: ScriptStore, script: AcquireScript | SettleScript, operations: Any) -> bool:
    call = script.call(store.prefix, token_bytes(12), operations, now_us=START_US + S_US)
    try:
        store.client.execute_command("EVAL", cut_off(script.name), *call)
    except ResponseError as error:
        if "GENERAL" in str(error):
            return False
        raise
    return True


def several(*terms: Params) -> Acquire:
    return Acquire(tuple(Want(f"b{number}:", each, 1.0, 2.0) for number, each in enumerate(terms)))


ACQUIRES: dict[str, list[Acquire]] = {
    "one bucket": [ask(WORK)],
    "several buckets": [several(WORK, QUOTA, CAPPED, replace(WORK, flags=Flags.SHADOW))],
    "a hot bucket": [ask(WORK)] * 5,
    "a refusal": [ask(WORK, minimum=1e6)],
    "attempts": [ask(WORK).but(attempt=2), ask(WORK).but(attempt=3), ask(WORK).but(attempt=2)],
    "a learned charge, covered": [ask(WORK, how=LEARNED | COVERED)],
    "refusals that are told": [ask(WORK), Acquire((Want("reads:a", WORK, 0.0, 0.0, REFUSING),), 9.0, told=True)],
}
OTHER_ACQUIRES: dict[str, list[Acquire]] = {
    "a dry run": [ask(WORK).but(dry_run=True)],
    "an idempotency key": [ask(WORK).but(idempotency=Idempotency("k", b"f" * 16, b""))],
    "overload control": [ask(replace(WORK, flags=Flags.OVERLOAD)).but(lot=Lot(1, 0.5))],
    "open reservations": [ask(replace(WORK, flags=Flags.IN_FLIGHT)).but(ttl_us=1_000_000)],
    "a divided limit": [ask(replace(WORK, flags=Flags.DIVIDED, partitions=2))],
    "weights": [Acquire((Want("b:", CAPPED, 1.0, 2.0, 0, 3.0),))],
    "a window that is over": [ask(quota_terms(100, (START_US - 2, START_US - 1)))],
    "more than can be collected": [ask(work_terms(debt_max=1.0), minimum=-1e9, charge=1e3)],
}


@pytest.mark.parametrize("seen", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("case", ACQUIRES)
def test_most_acquires_are_plain(valkey: Server, case: str, seen: bool) -> None:
    store = ScriptStore(valkey)
    if seen:
        store.acquire(ACQUIRES[case], START_US)
    assert is_plain(store, AcquireScript(), ACQUIRES[case])


@pytest.mark.parametrize("case", OTHER_ACQUIRES)
def test_other_acquires_are_not_and_nothing_is_written(valkey: Server, case: str) -> None:
    store = ScriptStore(valkey)
    assert not is_plain(store, AcquireScript(), [ask(WORK, bucket="other:"), *OTHER_ACQUIRES[case]])
    assert store.record("other:") is None


def test_an_acquire_under_a_changed_policy_is_not_plain_once(valkey: Server) -> None:
    store, changed = ScriptStore(valkey), ask(replace(WORK, capacity=60.0))
    store.acquire([ask(WORK)], START_US)
    assert not is_plain(store, AcquireScript(), [changed])
    store.acquire([changed], START_US)
    assert is_plain(store, AcquireScript(), [changed])


def settles(store: ScriptStore, terms: Params) -> Settle:
    return reserve(store, ask(terms))


@pytest.mark.parametrize("terms", [WORK, CAPPED, QUOTA], ids=["work", "requests", "quota"])
def test_most_settles_are_plain(valkey: Server, terms: Params) -> None:
    store = ScriptStore(valkey)
    reservation = settles(store, terms)
    assert is_plain(store, SettleScript(), [progress(reservation, 1.0)])
    assert is_plain(store, SettleScript(), [done(reservation, 5.0)])


def test_a_repeated_settle_is_not_plain(valkey: Server) -> None:
    store = ScriptStore(valkey)
    reservation = settles(store, WORK)
    store.settle([done(reservation, 5.0)], START_US)
    assert not is_plain(store, SettleScript(), [done(reservation, 5.0)])
