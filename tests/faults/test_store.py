"""F-S1, F-S4, F-S6, F-S7, F-S11: a store that forgets, dies, moves or is written to by others (promises 1 and 2)."""

import asyncio
import math
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from limiter.model.bucket.bucket import Flags, Params, fresh
from limiter.model.bucket.in_flight import Slots
from limiter.model.bucket.lending import LendTerms, Lent
from limiter.model.bucket.operations import Acquire, AcquireStatus, Charge, Idempotency, Settle, SettleStatus
from limiter.model.overload.shedding import Shedding
from limiter.store import keys, layout
from limiter.store.batcher import CALL_LIFETIME_US
from limiter.store.buckets import Buckets
from limiter.store.call_layout import CallExpired
from limiter.store.keys import Slot
from limiter.store.link.connect import open_link
from limiter.store.store_errors import StoreUnavailable
from tests.support.nodes import PATIENT_S, Watched, node, until
from tests.support.operations import (
    BUCKET,
    NO_REFILL,
    START_US,
    acquire,
    ask,
    done,
    look,
    record_of,
    reserve,
    settle,
    work_terms,
)
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Cluster, Server, await_replication, running
from tests.support.stores import ACQUIRE, SETTLE, ScriptStore

SLOT = Slot()
CAPACITY = 1e6
# No refill to speak of: the units missing from such a bucket are those that were taken.
TERMS = work_terms(rate=NO_REFILL, capacity=CAPACITY)
CALLERS = 16


class Load:
    """Callers that acquire one unit and settle it with three, over and over, and count their answers."""

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.granted = 0
        self.settled = 0
        self.stopping = False

    async def caller(self, number: int) -> None:
        while not self.stopping:
            answer = await self.buckets.acquire(SLOT, ask(TERMS, charge=1), timeout_s=PATIENT_S)
            assert answer.granted
            self.granted += 1
            settled = await self.buckets.settle(
                SLOT,
                Settle(
                    reservation=f"{number}.{self.granted}",
                    charges=(Charge(BUCKET, 1.0, 1.0, TERMS),),
                    work=3.0,
                    acquired_us=answer.now_us,
                    deadline_us=answer.now_us + 60_000_000,
                ),
                timeout_s=PATIENT_S,
            )
            assert settled.status is SettleStatus.SETTLED
            self.settled += 1

    async def go_on(self, *, calls: int = 200) -> None:
        """Let it run for a while, as counted by what it gets done."""
        goal = self.settled + calls
        await until(lambda: self.settled >= goal, within_s=PATIENT_S)

    def check(self, store: ScriptStore) -> None:
        """The callers' answers agree with the store, to the unit."""
        record = record_of(store)
        assert (record.admitted, record.settles) == (self.granted, self.settled)
        assert (record.work_charged, record.work_settled) == (self.granted, 3 * self.settled)
        assert CAPACITY - record.balance == 3 * self.settled


@asynccontextmanager
async def under_load(buckets: Buckets) -> AsyncIterator[Load]:
    """Load while the block runs; every caller must come through it without an error."""
    load = Load(buckets)
    async with asyncio.TaskGroup() as callers:
        for number in range(CALLERS):
            callers.create_task(load.caller(number))
        try:
            await load.go_on()
            yield load
            await load.go_on()
        finally:
            load.stopping = True


# F-S1: forgotten scripts, restarts


async def test_f_s1_script_flush_under_load_is_invisible(server: Server) -> None:
    async with node(server.url) as buckets, under_load(buckets) as load:
        for _ in range(20):
            server.command("SCRIPT FLUSH SYNC")
            await load.go_on(calls=20)
    load.check(ScriptStore(server, SLOT))


@pytest.mark.parametrize("hard", [False, True], ids=["stopped", "killed"])
async def test_f_s1_a_restart_under_load_is_invisible(durable: Server, hard: bool) -> None:
    """With its append-only file, and callers that can wait a little: nothing lost, nothing debited twice."""
    async with node(durable.url) as buckets, under_load(buckets) as load:
        await asyncio.to_thread(durable.restart, hard=hard)
    load.check(ScriptStore(durable, SLOT))


class Losing(Watched):
    """A link that loses the replies of its next calls, after the store has run them."""

    losses = 0

    async def call(self, key: bytes, *command: bytes | str | float, timeout_s: float) -> Any:
        reply = await super().call(key, *command, timeout_s=timeout_s)
        if self.losses:
            self.losses -= 1
            raise StoreUnavailable("connection reset")
        return reply


@pytest.mark.parametrize("losses", [1, 2, 5])
async def test_f_s1_a_call_is_sent_again_until_it_is_answered(valkey: Server, losses: int) -> None:
    """A server that is killed takes every connection with it, one after the other: a retry may find the next one."""
    async with aclosing(Losing(await open_link(valkey.url))) as link:
        buckets = Buckets(link)
        await buckets.acquire(SLOT, ask(TERMS, bucket="warm:"), timeout_s=PATIENT_S)
        link.losses = losses
        answer = await buckets.acquire(SLOT, ask(TERMS, charge=2), timeout_s=PATIENT_S)
    assert (answer.granted, answer.buckets[0].balance) == (True, CAPACITY - 2), "debited once"


# F-S4: lost replies, late copies


@pytest.mark.parametrize("received", [0, 1, 20])
async def test_f_s4_a_connection_reset_mid_reply_debits_once(server: Server, received: int) -> None:
    async with Proxy(server.port) as proxy, node(proxy.url) as buckets:
        await buckets.acquire(SLOT, ask(TERMS, bucket="warm:"), timeout_s=PATIENT_S)
        seen = proxy.requests
        proxy.cut_after_reply_bytes(received)
        answer = await buckets.acquire(SLOT, ask(TERMS, charge=2), timeout_s=PATIENT_S)
        assert (answer.granted, answer.buckets[0].balance) == (True, CAPACITY - 2)
        assert proxy.requests == seen + 2, "one retry"
    assert record_of(ScriptStore(server, SLOT)).admitted == 1


async def test_f_s4_every_reply_lost_once_under_load_debits_once(valkey: Server) -> None:
    async with Proxy(valkey.port) as proxy, node(proxy.url) as buckets, under_load(buckets) as load:
        for _ in range(20):
            proxy.drop_next_reply()
            await load.go_on(calls=20)
    load.check(ScriptStore(valkey, SLOT))


async def test_f_s4_a_copy_held_back_by_the_network_and_delivered_later_debits_nothing(valkey: Server) -> None:
    """The first copy is held, the retry on another connection answers, then the first one arrives after all."""
    async with Proxy(valkey.port) as proxy, node(proxy.url) as buckets:
        await buckets.acquire(SLOT, ask(TERMS, bucket="warm:"), timeout_s=PATIENT_S)
        proxy.mode = "hold"
        seen = proxy.requests
        asking = asyncio.create_task(buckets.acquire(SLOT, ask(TERMS, charge=2), timeout_s=1.0))
        await until(lambda: proxy.requests == seen + 1)
        proxy.mode = "pass"  # for the retry; what is held stays held
        answer = await asking
        assert answer.granted
        assert proxy.requests == seen + 2
        called = commands(valkey)
        proxy.release_held()
        await until(lambda: commands(valkey) > called)
    record = record_of(ScriptStore(valkey, SLOT))
    assert (record.admitted, CAPACITY - record.balance) == (1, 2)


def commands(server: Server) -> int:
    """The number of script calls that the server has run."""
    stats = server.client().info("commandstats")
    assert isinstance(stats, dict)
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


def test_f_s4_the_same_call_again_finds_its_first_reply(server: Server) -> None:
    store = ScriptStore(server, SLOT)
    call = ACQUIRE.call(store.prefix, b"flush", [ask(TERMS)], now_us=START_US, expires_us=START_US + CALL_LIFETIME_US)
    first = server.command("EVAL", ACQUIRE.source, *call)
    before = store.record(BUCKET)
    later = ACQUIRE.call(store.prefix, b"flush", [ask(TERMS)], now_us=START_US + 1_000_000, expires_us=0)
    assert server.command("EVAL", ACQUIRE.source, *later) == first
    assert store.record(BUCKET) == before


def test_f_s4_a_copy_that_outlived_its_reply_does_nothing(server: Server) -> None:
    """The exact case: the reply is gone, the copy comes after its expiry. An acquire and a settle alike."""
    store = ScriptStore(server, SLOT)
    reservation = reserve(store, ask(TERMS, charge=2))
    before = store.record(BUCKET)
    expired = {"now_us": START_US + 1, "expires_us": START_US}
    held = ACQUIRE.call(store.prefix, b"held", [ask(TERMS)], **expired)
    with pytest.raises(CallExpired) as late:
        ACQUIRE.answers(server.command("EVAL", ACQUIRE.source, *held), [ask(TERMS)])
    assert late.value.now_us == START_US + 1
    settles = [done(reservation, 9)]
    held = SETTLE.call(store.prefix, b"held", settles, **expired)
    with pytest.raises(CallExpired):
        SETTLE.answers(server.command("EVAL", SETTLE.source, *held), settles)
    assert (store.record(BUCKET), store.tombstone("r1")) == (before, None)
    assert server.command("EXISTS", keys.reply(store.prefix, b"held")) == 0


def test_f_s4_a_reply_outlives_every_copy_of_its_call(server: Server) -> None:
    store = ScriptStore(server, SLOT)
    store.acquire([ask(TERMS)], START_US, flush_id=b"flush")
    kept_ms = server.client().pttl(keys.reply(store.prefix, b"flush"))
    assert kept_ms > CALL_LIFETIME_US / 1000 * 1.5


async def test_f_s4_every_call_of_a_node_carries_an_expiry_even_its_first(valkey: Server) -> None:
    """Otherwise a copy of it, held back for longer than its reply lives, would debit a second time."""
    async with aclosing(Watched(await open_link(valkey.url))) as link:
        buckets = Buckets(link)
        for _ in range(2):
            await buckets.acquire(SLOT, ask(TERMS), timeout_s=PATIENT_S)
    assert all(expires_us > 0 for _, expires_us, _ in link.heads), link.heads


# F-S6: a demoted primary


@contextmanager
def pair(directory: Path) -> Iterator[tuple[Server, Server]]:
    """A primary and its replica."""
    config = {"repl-diskless-sync-delay": "0"}
    with (
        running("valkey", directory / "first", config=config) as primary,
        running("valkey", directory / "second", config=config) as replica,
    ):
        replica.command("REPLICAOF", HOST, primary.port)
        await_replication(replica)
        yield primary, replica


async def test_f_s6_a_demoted_primary_behind_an_address_is_left_for_the_new_one(tmp_path: Path) -> None:
    """FAILOVER loses nothing; the connections that are still open find a replica, and read READONLY from it."""
    with pair(tmp_path) as (old, new):
        async with Proxy(old.port) as address, node(address.url) as buckets, under_load(buckets) as load:
            old.command("FAILOVER", "TO", HOST, new.port)
            await until(lambda: new.command("ROLE")[0] == b"master")
            await until(lambda: turned_away(old) > 0)
            address.target_port = new.port
        load.check(ScriptStore(new, SLOT))
        assert b"slave" in old.command("ROLE")


async def test_f_s6_readonly_for_a_while_is_waited_out(tmp_path: Path) -> None:
    """The same server demoted and promoted again: nothing ran in between, and nobody noticed."""
    with pair(tmp_path) as (one, other):
        async with node(one.url) as buckets, under_load(buckets) as load:
            one.command("FAILOVER", "TO", HOST, other.port)
            await until(lambda: other.command("ROLE")[0] == b"master")
            await asyncio.to_thread(await_replication, one)
            refused = turned_away(one)
            await until(lambda: turned_away(one) > refused)
            one.command("REPLICAOF", "NO", "ONE")
        load.check(ScriptStore(one, SLOT))


def turned_away(server: Server) -> int:
    """The number of calls that the server has answered with READONLY."""
    stats = server.client().info("errorstats")
    assert isinstance(stats, dict)
    return int(stats.get("errorstat_READONLY", {}).get("count", 0))


# F-S7: a slot that moves


async def test_f_s7_a_slot_migrated_under_load_changes_no_decision(cluster: Cluster) -> None:
    """Every call names keys that do not exist yet, so a slot on the move answers TRYAGAIN, and callers wait for it."""
    slot = key_slot(SLOT.prefix)
    home = cluster.owner(slot)
    elsewhere = next(node for node in cluster.nodes if node is not home)
    async with node(cluster.url) as buckets, under_load(buckets) as load:
        for target in (elsewhere, home):
            await asyncio.to_thread(cluster.move_slot, slot, target)
            await load.go_on()
    load.check(ScriptStore(cluster, SLOT))


async def test_f_s7_half_a_slot_moved_is_waited_for_and_not_decided_on(cluster: Cluster) -> None:
    """The bucket's record is at the new home already: a decision at the old one would find a full bucket."""
    store, slot = ScriptStore(cluster, SLOT), key_slot(SLOT.prefix)
    acquire(store, ask(TERMS, charge=10))
    home = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not home)
    async with node(cluster.url) as buckets:
        await buckets.acquire(SLOT, ask(TERMS, charge=10), timeout_s=PATIENT_S)
        cluster.begin_move(slot, target)
        home.command("MIGRATE", HOST, target.port, keys.bucket(store.prefix, BUCKET), 0, 5000)
        asking = asyncio.create_task(buckets.acquire(SLOT, ask(TERMS, charge=10), timeout_s=PATIENT_S))
        refused = tried_again(home)
        await until(lambda: tried_again(home) > refused + 2)
        assert not asking.done()
        cluster.move_keys(slot, target)
        cluster.finish_move(slot, target)
        answer = await asking
        assert answer.buckets[0].balance == CAPACITY - 30
    cluster.move_slot(slot, home)


def tried_again(server: Server) -> int:
    """The number of calls that the server has answered with TRYAGAIN."""
    stats = server.client().info("errorstats")
    assert isinstance(stats, dict)
    return int(stats.get("errorstat_TRYAGAIN", {}).get("count", 0))


# F-S11: what is not ours


def altered(terms: Params, **fields: float | Shedding | Slots | Lent) -> bytes:
    """A sound record but for some fields."""
    record = fresh(terms, START_US)
    for name, value in fields.items():
        setattr(record, name, value)
    return layout.pack_record(record)


SOUND = altered(TERMS)
SHEDS = replace(TERMS, flags=Flags.OVERLOAD)
COUNTS = replace(TERMS, flags=Flags.IN_FLIGHT)
LENDS = replace(TERMS, flags=Flags.LENDS, lending=LendTerms())
WITH_HISTOGRAM = altered(replace(TERMS, flags=Flags.HISTOGRAM))
CORRUPT: dict[str, bytes] = {
    "empty": b"",
    "a counter": b"17",
    "short": SOUND[:-1],
    "long": SOUND + b"\0",
    "another version": b"\3" + SOUND[1:],
    "the version before": b"\1" + SOUND[1:],
    "a NaN balance": altered(TERMS, balance=math.nan),
    "a balance above capacity": altered(TERMS, balance=CAPACITY + 1),
    "endless debt": altered(TERMS, balance=-math.inf),
    "a NaN capacity": altered(TERMS, capacity=math.nan),
    "no capacity": altered(TERMS, capacity=0.0, balance=0.0),
    "endless capacity": altered(TERMS, capacity=math.inf, balance=math.inf),
    "a NaN rate": altered(TERMS, balance=0.0, rate=math.nan),
    "an endless rate": altered(TERMS, balance=0.0, rate=math.inf),
    "a negative rate": altered(TERMS, balance=0.0, rate=-1e12),
    "no time": altered(TERMS, updated_us=math.nan),
    "a histogram that its flags deny": bytes([SOUND[0], 0]) + WITH_HISTOGRAM[2:],
    "flags that promise a histogram": bytes([SOUND[0], Flags.HISTOGRAM]) + SOUND[2:],
    "a class refused more than wholly": altered(
        SHEDS, shedding=Shedding(refused_shares=[0, 0, 0, 1.5], lent_until_us=1.0)
    ),
    "a class limited to no number": altered(SHEDS, shedding=Shedding(rates=[0, math.nan, 0, 0], lent_until_us=1.0)),
    "more than the best quality": altered(SHEDS, shedding=Shedding(quality=2.0, lent_until_us=1.0)),
    "half an overload": altered(SHEDS, shedding=Shedding(state=0.5, lent_until_us=1.0)),
    "a limit that is no number": altered(SHEDS, shedding=Shedding(limits=[0, 0, math.nan, 0])),
    "lent until no time": altered(SHEDS, shedding=Shedding(lent_until_us=math.inf)),
    "fewer than none in flight": altered(COUNTS, slots=Slots(present=-1.0, start_us=1.0, before_us=1.0)),
    "a slot that began after the one behind it": altered(COUNTS, slots=Slots(start_us=1.0, before_us=2.0)),
    "a slot of no length": altered(COUNTS, slots=Slots(start_us=1.0, before_us=1.0, length_us=math.nan)),
    "more than all lent": altered(LENDS, lent=Lent(capacity=1.5)),
    "no number of a rate lent": altered(LENDS, lent=Lent(rate=math.nan)),
    "lent for ever": altered(LENDS, lent=Lent(until_us=math.inf)),
    "a time of its own that is none": altered(LENDS, lent=Lent(shift_us=-math.inf)),
    "a book that is cut off": altered(LENDS)[:-1],
    "a book of more ends than it has": altered(LENDS)[:-49] + b"\1" + bytes(48),
    "flags that promise lending": bytes([SOUND[0], 0, 2]) + SOUND[3:],
    "flags that promise overload control": bytes([SOUND[0], Flags.OVERLOAD]) + SOUND[2:],
    "noise": bytes(range(256))[: len(SOUND)],
}
OTHER = "other:b"


def put_foreign(server: Server, key: bytes, kind: str) -> None:
    if kind == "hash":
        server.command("HSET", key, "field", "value")
    else:
        server.command("RPUSH", key, "element")


def assert_only_the_other_is_served(store: ScriptStore, key: bytes) -> None:
    """A batch with a broken bucket in it: its operations are answered CORRUPT and leave the bytes alone."""
    before = store.client.dump(key)
    both = Acquire((*ask(TERMS, bucket=OTHER).wants, *ask(TERMS).wants))
    now_us = START_US + 1_000_000
    answers = store.acquire([ask(TERMS), ask(TERMS, bucket=OTHER), both], now_us)
    corrupt = AcquireStatus.CORRUPT
    assert [answer.status for answer in answers] == [corrupt, AcquireStatus.GRANTED, corrupt]
    settles = [
        Settle(
            reservation=f"r-{name}",
            charges=(Charge(name, 2.0, 1.0, TERMS),),
            work=5.0,
            acquired_us=START_US,
            deadline_us=START_US + 60_000_000,
        )
        for name in (BUCKET, OTHER)
    ]
    found = store.settle(settles, now_us)
    assert [answer.status for answer in found] == [SettleStatus.CORRUPT, SettleStatus.SETTLED]
    assert store.client.dump(key) == before, "untouched"
    assert store.tombstone(f"r-{BUCKET}") is None, "and can be settled once it is repaired"
    assert look(store, TERMS, now_us, bucket=OTHER) == CAPACITY - 5


@pytest.mark.parametrize("kind", ["hash", "list"])
def test_f_s11_a_foreign_type_at_a_bucket_is_left_alone(server: Server, kind: str) -> None:
    store = ScriptStore(server, SLOT)
    key = keys.bucket(store.prefix, BUCKET)
    put_foreign(server, key, kind)
    assert_only_the_other_is_served(store, key)


@pytest.mark.parametrize("raw", CORRUPT.values(), ids=CORRUPT.keys())
def test_f_s11_a_corrupt_record_at_a_bucket_is_left_alone(server: Server, raw: bytes) -> None:
    store = ScriptStore(server, SLOT)
    key = keys.bucket(store.prefix, BUCKET)
    server.command("SET", key, raw)
    assert_only_the_other_is_served(store, key)


@pytest.mark.parametrize("kind", ["hash", "list", "short", "long", "another state"])
def test_f_s11_a_foreign_tombstone_is_left_alone(server: Server, kind: str) -> None:
    store = ScriptStore(server, SLOT)
    broken, sound = reserve(store, ask(TERMS)), reserve(store, ask(TERMS, bucket=OTHER), name="r2")
    key = keys.tombstone(store.prefix, broken.reservation)
    rows = {"short": b"\1", "long": struct.pack("<BBd4d", 1, 0, 0.0, 2, 0, 2, 0)}
    rows["another state"] = struct.pack("<BBd2d", 77, 0, 0.0, 2, 0)
    if kind in rows:
        server.command("SET", key, rows[kind])
    else:
        put_foreign(server, key, kind)
    before, bucket = store.client.dump(key), store.record(BUCKET)
    answers = store.settle([done(broken, 9), done(sound, 9)], START_US)
    assert [answer.status for answer in answers] == [SettleStatus.CORRUPT, SettleStatus.SETTLED]
    assert (store.client.dump(key), store.record(BUCKET)) == (before, bucket)
    assert look(store, TERMS, bucket=OTHER) == CAPACITY - 9


@pytest.mark.parametrize("kind", ["hash", "list", "empty", "cut short", "noise"])
def test_f_s11_a_foreign_decision_at_an_idempotency_key_is_left_alone(server: Server, kind: str) -> None:
    store = ScriptStore(server, SLOT)
    key = keys.idempotency(store.prefix, "order-17")
    fingerprint = b"f" * 16
    rows = {"empty": b"", "cut short": fingerprint, "noise": fingerprint + b"\xff" * 40}
    if kind in rows:
        server.command("SET", key, rows[kind])
    else:
        put_foreign(server, key, kind)
    before = store.client.dump(key)
    broken = ask(TERMS).but(idempotency=Idempotency("order-17", fingerprint, b"memo"))
    answers = store.acquire([broken, ask(TERMS, bucket=OTHER)], START_US)
    assert [answer.status for answer in answers] == [AcquireStatus.CORRUPT, AcquireStatus.GRANTED]
    assert (store.client.dump(key), store.record(BUCKET)) == (before, None)


@pytest.mark.parametrize("which", ["sampling", "touched"])
def test_f_s11_a_foreign_type_at_the_controllers_keys_stops_no_decision(server: Server, which: str) -> None:
    """They are only for the controller: admission must not hang on them, and nothing may be half done."""
    store = ScriptStore(server, SLOT)
    put_foreign(server, getattr(keys, which)(store.prefix), "hash")
    reservation = reserve(store, ask(TERMS))
    assert settle(store, done(reservation, 9)).status is SettleStatus.SETTLED
    assert look(store, TERMS) == CAPACITY - 9
