"""Leases in a real store: records of before convert, damage is left as it is, and what is revoked ends (B8)."""

from dataclasses import replace

import pytest

from limiter.model.bucket.bucket import Flags, Params
from limiter.model.bucket.leases import LeaseAsk, LeaseKind, LeaseWant
from limiter.model.bucket.lending import LendStatus, LendTerms, Said
from limiter.model.bucket.operations import Acquire, AcquireStatus, Want
from limiter.store import keys, layout
from limiter.store.clock import time_us
from limiter.store.keys import Slot
from limiter.store.leases.lease_layout import unpack_row
from limiter.store.leases.lease_store import lease_id, slot_of
from tests.support.operations import START_US
from tests.support.servers import Server
from tests.support.stores import ScriptStore

PLAIN = Params(committed=100.0, capacity=100.0, debt_max=1000.0)
LENDS = replace(PLAIN, flags=Flags.LENDS, lending=LendTerms())
S_US = 1_000_000


def ask(number: float, terms: Params = LENDS, kind: LeaseKind = LeaseKind.RENEW, **said: float) -> LeaseAsk:
    return LeaseAsk("one", number, (LeaseWant("limit", terms, Said(**said)),), taken=number - 1, kind=kind)


def plain(store: ScriptStore, terms: Params, now_us: int, work: float = 1.0) -> float:
    """Acquire beside the leases; the balance afterwards."""
    (answer,) = store.acquire([Acquire((Want("limit", terms, 0.0, work),))], now_us)
    assert answer.status is AcquireStatus.GRANTED
    return answer.buckets[0].balance


def test_a_record_without_the_trailer_begins_to_lend_where_it_stands(valkey: Server) -> None:
    store = ScriptStore(valkey)
    assert plain(store, PLAIN, START_US, 40.0) == 60.0
    answer = store.lend(ask(1.0), START_US)
    assert answer.status is LendStatus.LENT
    (one,) = answer.slices
    assert one.balance + one.tokens == pytest.approx(60.0)
    raw = store.record("limit")
    assert raw is not None
    record = layout.read_record(raw)
    assert record is not None
    assert record.lent is not None
    assert record.lent.capacity == pytest.approx(one.part)


def test_f_l5_a_policy_that_lends_no_more_waits_for_what_is_lent(valkey: Server) -> None:
    store = ScriptStore(valkey)
    (one,) = store.lend(ask(1.0), START_US).slices
    left = plain(store, PLAIN, START_US, 0.0)
    assert left == pytest.approx(100.0 - one.tokens)
    for step in range(1, 6):
        left = plain(store, PLAIN, START_US + step * S_US, 0.0)
    assert left == 100.0
    raw = store.record("limit")
    assert raw is not None
    assert len(raw) == 179, "the record is plain again"


def test_f_s11_a_damaged_row_or_record_is_answered_and_left_as_it_is(valkey: Server) -> None:
    store = ScriptStore(valkey)
    row, bucket = keys.lease_row(store.prefix, "one"), keys.bucket(store.prefix, "limit")
    for key, noise in ((row, b"noise"), (bucket, b"noise")):
        store.client.set(key, noise)
        assert store.lend(ask(1.0), START_US).status is LendStatus.CORRUPT
        assert store.client.get(key) == noise
        store.client.delete(key)
    store.client.rpush(row, b"a list")
    assert store.lend(ask(1.0), START_US).status is LendStatus.CORRUPT
    assert store.client.lrange(row, 0, -1) == [b"a list"]


def test_a_revoked_lease_is_lent_nothing_more_and_gives_back_what_it_has(valkey: Server) -> None:
    store = ScriptStore(valkey)
    (one,) = store.lend(ask(1.0), START_US).slices
    before = store.record("limit")
    revoke = LeaseAsk("one", 0.0, (), kind=LeaseKind.REVOKE)
    assert store.lend(revoke, START_US).status is LendStatus.RETURNED
    assert store.lend(revoke, START_US).status is LendStatus.CLOSED
    assert store.record("limit") == before, "what is lent ends with its lease"
    raw = store.lease_row("one")
    assert raw is not None
    kept = unpack_row(raw)
    assert kept is not None
    assert kept.is_revoked
    assert store.lend(ask(2.0), START_US).status is LendStatus.CLOSED
    back = store.lend(ask(3.0, kind=LeaseKind.RETURN, held=one.tokens)._replace(taken=1.0), START_US)
    assert back.status is LendStatus.RETURNED
    assert back.slices[0].balance == pytest.approx(100.0)


def test_nothing_is_revoked_that_nobody_holds(valkey: Server) -> None:
    store = ScriptStore(valkey)
    assert store.lend(LeaseAsk("none", 0.0, (), kind=LeaseKind.REVOKE), START_US).status is LendStatus.UNKNOWN


def test_a_bucket_that_was_forgotten_lends_again(valkey: Server) -> None:
    store = ScriptStore(valkey)
    store.lend(ask(1.0), START_US)
    store.client.delete(keys.bucket(store.prefix, "limit"))
    answer = store.lend(ask(2.0, held=1.0), START_US + S_US)
    assert answer.status is LendStatus.LENT
    assert answer.slices[0].rate + plain(store, LENDS, START_US + S_US, 0.0) <= 200.0


def test_f_l4_a_lease_is_known_and_listed_by_the_buckets_own_time(valkey: Server) -> None:
    """A clock that has leapt, or gone back, while parts were lent: own time is far from the server's ever after."""
    store = ScriptStore(valkey)
    minute = replace(LENDS, lending=LendTerms(lease_us=60e6))
    now_us = time_us(store.client.time())
    for step, second in ((-7200, 1.0), (7200, 2.0), (0, 3.0)):  # the last time is the server's own, as nodes send none
        asked = ask(second, minute)
        assert store.lend(asked, now_us + step * S_US if step else 0).status is LendStatus.LENT
    left_ms = store.client.pttl(keys.lease_row(store.prefix, "one"))
    assert 60_000 <= left_ms <= 68_000
    (entry,) = store.client.zrange(keys.leases(store.prefix), 0, -1, withscores=True)
    assert 59e6 <= entry[1] - now_us <= 70e6


@pytest.mark.parametrize(
    ("lease", "slot"), [("3-ab12", Slot("x", 3)), ("x-ab", None), ("3", None), ("3-", None), ("99999-ab", None)]
)
def test_an_id_says_its_partition(lease: str, slot: Slot | None) -> None:
    assert slot_of("x", lease) == slot


def test_another_holder_or_bucket_is_another_lease() -> None:
    slot = Slot("x", 2)
    ids = {lease_id(slot, "a", ["b"]), lease_id(slot, "b", ["b"]), lease_id(slot, "a", ["c"])}
    ids |= {lease_id(slot, "a", ["b", "c"]), lease_id(slot, "a\nb", ["c"])}
    assert len(ids) == 5
    assert all(slot_of("x", found) == slot for found in ids)
