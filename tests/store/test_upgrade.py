"""Two versions of the service on one store: records of version 1 are read exactly and rewritten as version 2.

`version_1/` holds the scripts as version 1 sent them. Their calls are packed here, so that they stay what they were.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from limiter.model.bucket.block import BlockTerms
from limiter.model.bucket.bucket import Flags, Params, Record
from limiter.model.bucket.operations import LEARNED, Acquire, AcquireStatus, Settle, SettleStatus, Want
from limiter.model.control.stewardship import Steer, SteerStatus
from limiter.model.ledger.ledger import Ledger
from limiter.model.overload.shedding import LENT_FOR_US, Shedding
from limiter.store import keys, layout
from tests.support.operations import S_US, START_US, acquire, ask, done, quota_terms, reserve, reserved, work_terms
from tests.support.servers import Server
from tests.support.stores import LEASE_MS, ScriptStore

SCRIPTS = Path(__file__).parent / "version_1"
WORK = work_terms(rate=10.0, capacity=50.0)
KINDS = {
    "work": WORK,
    "shadow": replace(WORK, flags=Flags.SHADOW),
    "quota": quota_terms(100, (START_US - S_US, START_US + 3600 * S_US)),
    "requests": replace(WORK, flags=Flags.COUNTS_REQUESTS, cap=5.0, burst=3.0, burst_s=0.5),
    "histogram": replace(WORK, flags=Flags.HISTOGRAM),
    "divided": replace(WORK, flags=Flags.DIVIDED, partitions=3),
    "auto": replace(WORK, flags=Flags.AUTO, cap=5.0, burst=3.0),
    "overload": replace(WORK, flags=Flags.OVERLOAD | Flags.HISTOGRAM),
    "block": work_terms(rate=10.0, block=BlockTerms(after=2, in_us=60e6, for_us=600e6)),
    "everything": replace(
        WORK,
        flags=Flags.HISTOGRAM | Flags.DIVIDED | Flags.AUTO | Flags.OVERLOAD | Flags.BLOCK,
        cap=5.0,
        partitions=2,
        block=BlockTerms(after=2, in_us=60e6, for_us=600e6),
    ),
}


class VersionOne:
    """A node of version 1, as far as the store sees it."""

    def __init__(self, server: Server) -> None:
        self.client = server.client()
        self.prefix = ScriptStore(server).prefix
        self._calls = 0

    def acquire(self, operations: Sequence[Acquire], now_us: int) -> bytes:
        """The raw reply, because only a node of that version knows its meaning."""
        names, rows, packed = list[str](), list[bytes](), b""
        for operation in operations:
            packed += struct.pack("<BBd", 0, len(operation.wants), operation.requests)
            for want in operation.wants:
                number = _number(names, rows, want.bucket, want.params)
                packed += struct.pack("<HBdd", number, want.how, want.minimum, want.charge)
        return self._call("acquire", names, rows, [], packed, now_us)

    def settle(self, operation: Settle, now_us: int) -> bytes:
        names, rows = list[str](), list[bytes]()
        packed = struct.pack(
            "<HBBddddddd", 1, operation.final, len(operation.charges), operation.work, operation.requests,
            operation.latency_ms, operation.expected_ms, operation.acquired_us, operation.deadline_us,
            operation.late_us,
        )  # fmt: skip
        for charge in operation.charges:
            assert charge.params is not None
            number = _number(names, rows, charge.bucket, charge.params)
            packed += struct.pack("<HBdd", number, charge.in_requests, charge.charge, charge.weight)
        return self._call("settle", names, rows, [keys.tombstone(self.prefix, operation.reservation)], packed, now_us)

    def _call(
        self, script: str, names: list[str], rows: list[bytes], others: list[bytes], packed: bytes, now_us: int
    ) -> bytes:
        self._calls += 1
        call = [
            keys.reply(self.prefix, b"version-1-%d" % self._calls),
            keys.sampling(self.prefix),
            keys.touched(self.prefix),
            *(keys.bucket(self.prefix, name) for name in names),
            *others,
        ]
        arguments = [
            struct.pack("<ddH", now_us, 0, len(names)),
            b"".join(rows),
            struct.pack(f"<{len(names)}H", *range(1, len(names) + 1)),
            packed,
        ]
        reply = self.client.eval((SCRIPTS / f"{script}.lua").read_text(), len(call), *call, *arguments)
        assert isinstance(reply, bytes)
        return reply


def _number(names: list[str], rows: list[bytes], bucket: str, terms: Params) -> int:
    if bucket not in names:
        names.append(bucket)
        flags = terms.flags & 127 | (128 if terms.is_shadow else 0)
        row = struct.pack(
            "<B11d", flags, terms.committed, terms.cap, terms.capacity, terms.burst, terms.burst_s, terms.debt_max,
            terms.settle_threshold, terms.stop_debt, terms.window_start_us, terms.window_end_us, terms.partitions,
        )  # fmt: skip
        rows.append(row if terms.block is None else row + struct.pack("<3d", *terms.block))
    return names.index(bucket) + 1


HEAD_SIZE = 9
"""Bytes of the head of a reply: its status and the time."""


def lived(terms: Params) -> list[tuple[str, Acquire | Settle, int]]:
    """Some of everything: grants, refusals, time passing, a settle above its charge, one below it, and progress."""
    big = ask(terms, charge=30.0)
    made = Ledger()
    at_us = [START_US + number * 300_000 for number in range(6)]
    first = reserved(big, acquire(made, big, at_us[0]))
    second = ask(terms, charge=7.3, how=LEARNED, minimum=0.0)
    return [
        ("acquire", big, at_us[0]),
        ("acquire", second, at_us[1]),
        ("acquire", ask(terms, minimum=1e6), at_us[2]),
        ("settle", first.but(work=12.0, final=False), at_us[3]),
        ("settle", first.but(work=41.7, latency_ms=30.0, expected_ms=20.0), at_us[4]),
        ("acquire", big, at_us[5]),
    ]


def live(old: VersionOne, model: Ledger, terms: Params) -> None:
    for name, operation, now_us in lived(terms):
        if isinstance(operation, Acquire):
            old.acquire([operation], now_us)
            model.acquire([operation], now_us)
        else:
            assert name == "settle"
            old.settle(operation, now_us)
            model.settle([operation], now_us)


def but_expiry(record: Record) -> Record:
    """A record of version 1 says nothing of when its key expires, who asked, or how long a throttle is lent; and its
    latencies are counted in coarser steps."""
    known = record.shedding
    if known is not None:
        known = Shedding(
            lent_until_us=record.updated_us + LENT_FOR_US, asked=known.timed, timed=list(known.timed),
            slack_min_ms=known.slack_min_ms, slack_before_ms=known.slack_before_ms,
        )  # fmt: skip
    return replace(record, kept_until_s=0, histogram=[0] * len(record.histogram), shedding=known)


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_version_1_are_read_exactly(valkey: Server, kind: str) -> None:
    old, new, model, terms = VersionOne(valkey), ScriptStore(valkey), Ledger(), KINDS[kind]
    live(old, model, terms)
    raw = new.record("reads:a")
    assert raw is not None
    assert raw[0] == 1
    assert layout.read_record(raw) == but_expiry(model.records["reads:a"])


@pytest.mark.parametrize("script", ["acquire", "settle", "steer"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_script_goes_on_from_version_1_and_writes_version_2(valkey: Server, kind: str, script: str) -> None:
    old, new, model, terms = VersionOne(valkey), ScriptStore(valkey), Ledger(), KINDS[kind]
    live(old, model, terms)
    new.client.persist(keys.bucket(new.prefix, "reads:a"))
    model.records["reads:a"] = but_expiry(model.records["reads:a"])
    now_us = START_US + 2 * S_US
    if script == "acquire":
        operation = ask(terms, charge=3.0)
        assert new.acquire([operation], now_us) == model.acquire([operation], now_us)
    elif script == "settle":
        operation = ask(terms, bucket="reads:b")
        reservation = reserved(operation, acquire(Ledger(), operation, now_us), name="r2")
        moved = tuple(charge.but(bucket="reads:a") for charge in reservation.charges)
        settled = reservation.but(charges=moved, work=5.0)
        assert new.settle([settled], now_us) == model.settle([settled], now_us)
    else:
        leases = new.take(b"owner", LEASE_MS), model.take(b"owner", LEASE_MS)
        assert leases[0] is not None
        assert leases[1] is not None
        row = Steer("reads:a", terms, charge=4.5)
        assert new.steer(leases[0], [row], now_us) == model.steer(leases[1], [row], now_us) == [SteerStatus.DONE]
    raw = new.record("reads:a")
    assert raw is not None
    assert raw[0] == 2
    assert raw == layout.pack_record(model.records["reads:a"])
    assert new.client.pttl(keys.bucket(new.prefix, "reads:a")) > 600_000


def test_a_reservation_of_one_version_is_settled_by_the_other_while_the_record_is_version_1(valkey: Server) -> None:
    old, new = VersionOne(valkey), ScriptStore(valkey)
    operation = ask(WORK, charge=10.0)
    old.acquire([operation], START_US)
    first = reserved(operation, acquire(Ledger(), operation))
    (answer,) = new.settle([first.but(work=4.0)], START_US)
    assert (answer.status, answer.buckets[0].balance) == (SettleStatus.SETTLED, 46.0)
    (again,) = new.settle([first.but(work=4.0)], START_US)
    assert again.status is SettleStatus.DUPLICATE


def test_a_node_of_version_1_answers_that_a_rewritten_bucket_is_damaged_and_changes_nothing(valkey: Server) -> None:
    """Its answer to the caller is a 503 `record_damaged`, for that bucket alone; its other buckets go on."""
    old, new = VersionOne(valkey), ScriptStore(valkey)
    ours, theirs = Want("new:a", WORK, 1.0, 2.0), Want("old:a", WORK, 1.0, 2.0)
    reservation = reserve(new, Acquire((ours,)))
    before = new.record("new:a")
    reply = old.acquire([Acquire((ours,)), Acquire((theirs,))], START_US)
    assert (reply[HEAD_SIZE], reply[HEAD_SIZE + 1]) == (AcquireStatus.CORRUPT, AcquireStatus.GRANTED)
    assert old.settle(done(reservation, 5.0), START_US)[HEAD_SIZE] == SettleStatus.CORRUPT
    assert new.record("new:a") == before
    (settled,) = new.settle([done(reservation, 5.0)], START_US)
    assert settled.status is SettleStatus.SETTLED, "the same settle at a newer node counts"
