"""Renewals that take the short way in the store: which they are, and that they come to what the model says (B8)."""

import os
import random
from dataclasses import replace
from secrets import token_bytes

import pytest
from redis.exceptions import ResponseError

from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.leases import LeaseAsk, LeaseKind, LeaseWant
from limiter.model.bucket.lending import LendTerms, Said, Used
from limiter.model.bucket.operations import Acquire, Want
from limiter.model.ledger.ledger import Ledger
from limiter.store.layout import pack_record
from limiter.store.leases.lease_layout import pack_row
from limiter.store.scripts import LendScript, load_script
from tests.support.operations import S_US, START_US
from tests.support.servers import Server
from tests.support.stores import ScriptStore

SEED = int(os.environ.get("LENDING_SEED", random.randrange(10**6)))
LENDS = Params(flags=Flags.LENDS, committed=100.0, capacity=80.0, debt_max=500.0, lending=LendTerms(10.0, 4.0, 3e6))


def ask(number: float, terms: Params = LENDS, *, lease: str = "one", said: Said | None = None) -> LeaseAsk:
    return LeaseAsk(lease, number, (LeaseWant("limit", terms, said or Said(wanted=20.0)),), taken=number - 1)


def is_plain(store: ScriptStore, asked: LeaseAsk, now_us: int) -> bool:
    source = load_script("lend").decode()
    source = source[: source.index("--[[ record:")] + "\nreturn redis.error_reply('GENERAL')"
    try:
        store.client.execute_command("EVAL", source, *LendScript().call(store.prefix, asked, now_us=now_us))
    except ResponseError as error:
        if "GENERAL" in str(error):
            return False
        raise
    return True


ASKED = {
    "as ever": (ask(2.0), True),
    "the last answer was lost": (ask(3.0)._replace(taken=0.0), True),
    "nothing wanted": (ask(2.0, said=Said(wanted=0.0)), True),
    "debt that it can repay": (ask(2.0, said=Said(wanted=20.0, debt=1.0)), True),
    "debt that it cannot repay": (ask(2.0, said=Said(wanted=20.0, debt=1e6)), False),
    "a repeat": (ask(1.0), False),
    "a first request": (ask(1.0, lease="another"), False),
    "a return": (ask(2.0)._replace(kind=LeaseKind.RETURN), False),
    "a changed policy": (ask(2.0, replace(LENDS, capacity=90.0)), False),
    "a divided limit": (ask(2.0, replace(LENDS, flags=Flags.LENDS | Flags.DIVIDED, partitions=2)), False),
}


@pytest.mark.parametrize("case", ASKED)
def test_renewals_of_one_plain_bucket_take_the_short_way(valkey: Server, case: str) -> None:
    store, (asked, expected) = ScriptStore(valkey), ASKED[case]
    store.lend(ask(1.0), START_US)
    before = store.record("limit")
    assert is_plain(store, asked, START_US + S_US) is expected
    assert (store.record("limit") == before) is not expected, "nothing is written before the general case begins"


def test_the_short_way_comes_to_what_the_model_says(valkey: Server) -> None:
    """Five holders for a minute, with lost answers, debts, clocks that step, plain callers and changed policies."""
    draw, model = random.Random(SEED), Ledger()
    stores = [ScriptStore(valkey), ScriptStore(valkey, general=True)]
    for store in stores:
        store.prefix = b"{" + token_bytes(4).hex().encode() + b"}"
    terms, now_us, taken, used, plain = LENDS, START_US, dict.fromkeys("abcde", 0.0), dict.fromkeys("abcde", Used()), 0
    for _ in range(600):
        now_us += int(draw.choice([0, 1e3, 1e5, 1e5, 2e5, 4e6 * draw.random(), -1e6 * draw.random()]))
        if draw.random() < 0.01:
            now_us += draw.choice([-3_600, 3_600]) * S_US
        if draw.random() < 0.02:
            lending = LendTerms(draw.choice([0.0, 10.0]), 4.0, draw.choice([3e6, 10e6]))
            terms = replace(terms, committed=draw.uniform(20, 200), capacity=draw.uniform(20, 200), lending=lending)
        if draw.random() < 0.3:
            acquire = [Acquire((Want("limit", terms, 0.0, draw.uniform(0, 30)),))]
            answer = model.acquire(acquire, now_us)
            assert all(store.acquire(acquire, now_us) == answer for store in stores)
        lease = draw.choice("abcde")
        row = model.rows.get(lease)
        used[lease] = Used(*(sum_ + draw.choice([0.0, draw.uniform(0, 9)]) for sum_ in used[lease]))
        said = Said(
            draw.random(), draw.choice([-1.0, 0.0, draw.uniform(0, 150)]), draw.choice([0.0, draw.uniform(0, 80)])
        )
        want = LeaseWant("limit", terms, said, draw.choice([1.0, 2.5]), draw.uniform(0, 9), draw.random() < 0.3)
        number = 1.0 if row is None else row.number + draw.choice([1, 1, 1, 1, 1, 0, -1])
        asked = LeaseAsk(lease, max(1.0, number), (want,), taken[lease], draw.choice([1.0, 3.0]), used[lease])
        plain += is_plain_here(model, asked)
        found = model.lend(asked, now_us)
        assert all(repr(store.lend(asked, now_us)) == repr(found) for store in stores), SEED
        taken[lease] = number if draw.random() < 0.8 else taken[lease]
        for store in stores:
            assert store.record("limit") == pack_record(model.records["limit"]), SEED
            assert store.lease_row(lease) == pack_row(model.rows[lease]), SEED
    assert plain > 300


def is_plain_here(model: Ledger, asked: LeaseAsk) -> bool:
    """Whether a renewal may take the short way, as far as its number goes."""
    row = model.rows.get(asked.lease)
    return row is not None and asked.number > row.number
