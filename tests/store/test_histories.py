"""Generated histories: the scripts on real servers agree with the model bit for bit (promise 1).

Each history runs twice on the server, in a slot each: once as the scripts are, with their short way where the call is
plain, and once without it.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from limiter.model.bucket import lending
from limiter.model.bucket.block import BlockTerms
from limiter.model.bucket.bucket import KIND, RECORD_FLAGS, Flags, Params
from limiter.model.bucket.in_flight import InFlightTerms
from limiter.model.bucket.leases import LeaseAsk, LeaseKind, LeaseWant
from limiter.model.bucket.lending import LendStatus, LendTerms, Part, Row, Said
from limiter.model.bucket.operations import (
    COVERED,
    KEYED,
    LATE_US,
    LEARNED,
    REFUSING,
    TOO_LARGE,
    Acquire,
    BucketAnswer,
    Idempotency,
    Lot,
    Settle,
    Verdict,
    Want,
)
from limiter.model.control.stewardship import Lease, Steer
from limiter.model.ledger.ledger import Ledger
from limiter.model.overload.shedding import CLASSES, OverloadTerms, ShedOrder, State
from limiter.model.overload.signals import Report, add
from limiter.model.policy.period import Period, window_us
from limiter.store import call_layout, keys, layout
from limiter.store.keys import Slot
from limiter.store.leases import lease_layout
from tests.support.operations import charge_of
from tests.support.servers import Cluster, Server
from tests.support.stores import LEASE_MS, ScriptStore

# Each bucket starts with these terms; a change of policy may make them anything else.
BUCKETS = {
    "reads:a": Flags.NONE,
    "reads:b": Flags.NONE,
    "writes:a": Flags.SHADOW | Flags.HISTOGRAM,
    "month:a": Flags.QUOTA,
    "rps:a": Flags.COUNTS_REQUESTS | Flags.HISTOGRAM,
    "auto:a": Flags.AUTO | Flags.HISTOGRAM,
    "wide:a": Flags.AUTO | Flags.DIVIDED,
    "wide:b": Flags.DIVIDED,
    "shed:a": Flags.OVERLOAD | Flags.HISTOGRAM,
    "shed:b": Flags.OVERLOAD | Flags.COUNTS_REQUESTS,
    "shed:c": Flags.OVERLOAD | Flags.IN_FLIGHT,
    "open:a": Flags.IN_FLIGHT,
    "open:b": Flags.IN_FLIGHT | Flags.DIVIDED,
    "learn:a": Flags.LEARNS,
    "learn:b": Flags.LEARNS | Flags.AUTO | Flags.REFUNDS,
    "refund:a": Flags.REFUNDS,
    "block:a": Flags.BLOCK,
    "block:b": Flags.BLOCK | Flags.OVERLOAD | Flags.DIVIDED,
    "rps:b": Flags.COUNTS_REQUESTS,
    "hits:a": Flags.QUOTA | Flags.COUNTS_REQUESTS,
    "watch:a": Flags.SHADOW,
    "lend:a": Flags.LENDS,
    "lend:b": Flags.LENDS | Flags.COUNTS_REQUESTS | Flags.IN_FLIGHT,
    "lend:c": Flags.LENDS | Flags.QUOTA,
    "lend:d": Flags.LENDS | Flags.DIVIDED | Flags.OVERLOAD,
}
PLAIN = ["reads:a", "reads:b", "month:a", "rps:b", "hits:a", "watch:a"]
"""Where the scripts take the short way, until a change of policy makes something else of them."""
LEASES = {"one": ["lend:a"], "two": ["lend:a"], "three": ["lend:a", "lend:b"], "four": ["lend:c"],
          "five": ["lend:a", "lend:c", "lend:d"]}  # fmt: skip
"""Holders, and the buckets that each has slices of."""
SOURCES = ["host-1", "host-2", "\u2603 and 'more'"]
STEERED = [
    *BUCKETS,
    "rps:a",
    "rps:b",
    "rps:b",
    "auto:a",
    "auto:a",
    "wide:a",
    "wide:a",
    "wide:b",
    "wide:b",
    "shed:a",
    "shed:b",
    "shed:c",
    "shed:c",
    "learn:a",
    "learn:b",
    "learn:b",
]
"""The controller has most to do with those that it may flip, give a share, or have refuse."""
OWNERS = [b"first", b"second"]
UTC = ZoneInfo("UTC")

# Numbers that people write, and numbers that show a different order of operations in the last bit.
amounts = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 3.0, 64.0]),
    st.integers(0, 200).map(float),
    st.floats(0, 1e3, allow_subnormal=False),
    st.floats(0, 1e6, allow_subnormal=False),
)
rates = st.one_of(st.sampled_from([1.0, 10.0, 100.0]), st.floats(1e-3, 1e3, allow_subnormal=False))
capacities = st.one_of(st.sampled_from([1.0, 50.0, 100.0]), st.floats(1, 1e5, allow_subnormal=False))
minimums = st.one_of(st.sampled_from([1.0, 0.0, -10.0, -1e9]), st.floats(-1e3, 1e3, allow_subnormal=False))
durations_us = st.one_of(
    st.integers(1, 3_000_000),
    st.sampled_from([1, 10_000_000, 60_000_000, 90_000_000, 86_400_000_000, 366 * 86_400_000_000]),
    st.sampled_from([-200_000, -1_000_000, -1_000_001, -3_600_000_000]),
)
flags = st.sampled_from(
    [
        Flags(bits) | shadow
        for bits in range(RECORD_FLAGS + 1)
        for shadow in (Flags.NONE, Flags.SHADOW)
        if not (bits & Flags.AUTO and bits & (KIND | Flags.LENDS)) and not bits & ~RECORD_FLAGS
    ]
)
blocks = st.builds(
    BlockTerms,
    after=st.sampled_from([1.0, 2.0, 5.0]),
    in_us=st.sampled_from([1e6, 60e6, 86_400e6]),
    for_us=st.sampled_from([1e6, 600e6, 30 * 86_400e6]),
)
overloads = st.builds(
    OverloadTerms,
    targets_ms=st.sampled_from([(0.0,) * 4, (0.0, 1.0, 30.0, 5000.0)]),
    limit_initial=st.sampled_from([0.0, 0.5, 2.0, 100.0]),
)
places = st.builds(
    InFlightTerms,
    limit=st.sampled_from([0.0, 1.0, 2.0, 3.5, 20.0]),
    length_us=st.sampled_from([0.0, 0.0, 1e6, 10e6]),
    in_work=st.booleans(),
)
ttls_us = st.sampled_from([0, 1_000, 1_000_000, 60_000_000, 86_400_000_000])
lends = st.builds(
    LendTerms,
    bound=st.sampled_from([0.0, 0.0, 10.0]),
    need=st.sampled_from([1.0, 4.0]),
    lease_us=st.sampled_from([3e6, 3e6, 10e6]),
)
weights = st.sampled_from([1.0, 1.0, 1.0, 3.0, 0.5, 0.0])
attempts = st.sampled_from([1, 1, 1, 2, 3])
learn_ids = st.sampled_from([0, 1, 2, 3, 4_000_000_000])
units = st.sampled_from([0.0, 0.0, 0.0, 2048.0, 3.0, -7.0])
asked = st.sampled_from([0, 0, 0, LEARNED, TOO_LARGE, COVERED, LEARNED | COVERED])


@st.composite
def params(draw: st.DrawFn, flags: Flags) -> Params:
    """A policy's terms, with any numbers a policy may hold. A quota's window is filled in by each call."""
    committed = draw(rates)
    return Params(
        flags=flags,
        committed=committed,
        cap=draw(rates),
        capacity=draw(capacities),
        burst=draw(st.one_of(st.sampled_from([0.0, 3.0, 50.0]), capacities)),
        burst_s=draw(st.sampled_from([0.0, 0.1, 1.0])),
        debt_max=draw(amounts),
        settle_threshold=draw(st.sampled_from([0.0, 0.0, 2.0, -0.1])),
        refund_threshold=draw(st.sampled_from([0.0, 5.0, -0.5])),
        stop_debt=draw(st.sampled_from([math.inf, 10.0])),
        window_end_us=1,
        partitions=draw(st.integers(2, 4)) if Flags.DIVIDED in flags else 1,
        block=draw(blocks) if Flags.BLOCK in flags else None,
        overload=draw(overloads),
        in_flight=draw(places),
        lending=draw(lends) if Flags.LENDS in flags else None,
    )


reported = st.dictionaries(st.sampled_from(["cpu", "executor", "queue_age"]), amounts, min_size=1)

# Values that only a broken controller would set.
senseless = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300])


shares = st.one_of(st.sampled_from([0.0, 0.25, 1.0]), st.floats(0, 1), senseless)
class_rates = st.one_of(st.sampled_from([0.0, 0.0, 0.05, 1.0, 5000.0]), rates, senseless)
orders = st.builds(
    ShedOrder,
    quality=shares,
    state=st.sampled_from([*State, 4.0, math.nan]),
    lent_for_us=st.sampled_from([10_000_000, 1_000_000, 60_000_000, 0, -1, 60_000_001]),
    response_ms=st.one_of(st.sampled_from([0.0, 30.0, 1000.0]), senseless),
    refused_shares=st.tuples(*[shares] * len(CLASSES)),
    rates=st.tuples(*[class_rates] * len(CLASSES)),
    limits=st.tuples(*[st.one_of(st.sampled_from([0.0, 1.0, 2.5]), senseless)] * len(CLASSES)),
)
class_numbers = st.integers(0, len(CLASSES) - 1)
lots = st.builds(
    Lot,
    class_numbers,
    st.one_of(st.sampled_from([0.0, 0.25]), st.floats(0, 1, exclude_max=True)),
    st.sampled_from([math.nan, math.nan, 0.0, 30.0, 5000.0, -math.inf]),
)


@st.composite
def steers(draw: st.DrawFn, bucket: str, terms: Params) -> Steer:
    """The values that the controller sets for one bucket."""
    return Steer(
        bucket,
        terms,
        cap=draw(st.one_of(st.none(), rates, rates, senseless)),
        charge=draw(st.one_of(st.none(), amounts, senseless)),
        requests_for=draw(st.one_of(st.none(), amounts, st.just(1e6), st.just(0.0), senseless)),
        share=draw(st.one_of(st.none(), st.floats(0.01, 1), st.floats(0.01, 1), senseless)),
        share_for_us=draw(st.sampled_from([1_000_000, 10_000_000, 100_000_000, 3_600_000_000, 0, 4_000_000_000])),
        state=draw(st.sampled_from([None, b"", b"state\0of\nmind"])),
        overload=draw(st.one_of(st.none(), orders)),
        charges=draw(st.lists(st.tuples(learn_ids, st.one_of(amounts, senseless)), max_size=3).map(tuple)),
        lasts=draw(st.booleans()),
    )


class History(RuleBasedStateMachine):
    """Applies each step to the scripts and to the model, and compares everything there is."""

    server: Server | Cluster
    restarts: bool
    restarted: int = 0

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if isinstance(self.server, Cluster):
            self.server.flush()
        else:
            self.server.client().flushall()
        self.scripts = ScriptStore(self.server, Slot("history", 0))
        self.general = ScriptStore(self.server, Slot("general", 0), general=True)
        self.model = Ledger()
        self.now_us = 1_790_000_000_000_000
        self.params = {bucket: data.draw(params(kind)) for bucket, kind in BUCKETS.items()}
        self.periods = dict.fromkeys(BUCKETS, Period.MINUTE)
        self.reservations: list[Settle] = []
        self.leases: list[Lease] = []
        self._take(OWNERS[0])
        self.made = 0
        self.restart_at = 2
        self.reports: tuple[Report, ...] = ()

    @rule(data=st.data(), size=st.integers(1, 4))
    def acquire(self, data: st.DataObject, size: int) -> None:
        terms = self._terms(data)
        self._acquire([self._operation(data, terms) for _ in range(size)])

    @rule(data=st.data(), size=st.integers(1, 6))
    def acquire_plainly(self, data: st.DataObject, size: int) -> None:
        terms = self._terms(data)
        self._acquire([self._plain_operation(data, terms) for _ in range(size)])

    def _acquire(self, operations: list[Acquire]) -> None:
        self.made += 1
        flush_id = b"acquire-%d" % self.made
        found = self.model.acquire(operations, self.now_us)
        for store in (self.scripts, self.general):
            answers = store.acquire(operations, self.now_us, flush_id=flush_id)
            assert repr(answers) == repr(found)
            assert repr(store.acquire(operations, self.now_us, flush_id=flush_id)) == repr(found), "a repeat"
        for operation, answer in zip(operations, found, strict=True):
            if answer.granted and not operation.dry_run and not answer.memo:
                self._reserve(operation, answer.buckets)

    def _terms(self, data: st.DataObject) -> dict[str, Params]:
        """A bucket has one set of terms a call. Now and then a node has the wrong window of a quota."""
        off_us = data.draw(st.sampled_from([0, 0, 0, 0, 0, 86_400_000_000]))
        windows = {name: window_us(self.now_us + off_us, period, UTC) for name, period in self.periods.items()}
        return {
            name: replace(params, window_start_us=windows[name][0], window_end_us=windows[name][1])
            if params.is_quota
            else params
            for name, params in self.params.items()
        }

    def _plain_operation(self, data: st.DataObject, terms: dict[str, Params]) -> Acquire:
        names = data.draw(st.lists(st.sampled_from(PLAIN), min_size=1, max_size=3, unique=True))
        charges = st.one_of(amounts, st.sampled_from([0.0, 1.0, 2.0]))
        wants = (Want(name, terms[name], data.draw(minimums), data.draw(charges), data.draw(asked)) for name in names)
        return Acquire(tuple(wants), attempt=data.draw(attempts))

    def _operation(self, data: st.DataObject, terms: dict[str, Params]) -> Acquire:
        names = data.draw(st.lists(st.sampled_from(list(BUCKETS)), min_size=1, max_size=3, unique=True))
        wants = tuple(self._want(data, name, terms[name], data.draw(learn_ids)) for name in names)
        if data.draw(st.sampled_from([False] * 7 + [True])):
            refusing = st.sampled_from([0, REFUSING])
            told = tuple(Want(name, terms[name], 0.0, 0.0, data.draw(refusing)) for name in names)
            return Acquire(told, requests=float(data.draw(st.integers(1, 200))), told=True)
        dry_run = data.draw(st.sampled_from([False, False, False, True]))
        idempotency = None
        if not dry_run and data.draw(st.sampled_from([False, False, True])):
            idempotency = Idempotency(
                key=data.draw(st.sampled_from(["k1", "k2", "k3"])),
                fingerprint=data.draw(st.sampled_from([b"a" * 16, b"b" * 16])),
                memo=b"memo-%d" % len(names),
            )
        lot = data.draw(st.one_of(st.none(), lots, lots))
        return Acquire(
            wants,
            dry_run=dry_run,
            idempotency=idempotency,
            lot=lot,
            ttl_us=data.draw(ttls_us),
            attempt=data.draw(attempts),
        )

    def _want(self, data: st.DataObject, name: str, terms: Params, learn_id: int) -> Want:
        how = data.draw(asked)
        # What is learned by values is asked with their id.
        keyed = KEYED if learn_id and how & LEARNED else 0
        minimum, charge, weight = data.draw(minimums), data.draw(amounts), data.draw(weights)
        return Want(name, terms, minimum, charge, how | keyed, weight, learn_id if keyed else 0)

    def _reserve(self, operation: Acquire, answers: Sequence[BucketAnswer]) -> None:
        taken = tuple(
            charge_of(want, answer)
            for want, answer in zip(operation.wants, answers, strict=True)
            if answer.verdict is Verdict.DEBITED
        )
        if taken:
            name = f"r{len(self.reservations)}"
            self.reservations.append(
                Settle(
                    reservation=name,
                    charges=taken,
                    work=0.0,
                    acquired_us=self.now_us,
                    deadline_us=self.now_us + (operation.ttl_us or 60_000_000),
                    class_number=0 if operation.lot is None else operation.lot.class_number,
                )
            )

    @rule(data=st.data(), lease=st.sampled_from(list(LEASES)))
    def lend(self, data: st.DataObject, lease: str) -> None:
        terms = self._terms(data)
        if not all(terms[name].lending for name in LEASES[lease]):
            return
        row = self.model.rows.get(lease)
        number = 1.0 if row is None else row.number + data.draw(st.sampled_from([1, 1, 1, 1, 1, 0, -1]))
        before = lending.Used() if row is None else row.used
        ask = LeaseAsk(
            lease,
            max(1.0, number),
            tuple(self._lease_want(data, name, terms[name], row, i) for i, name in enumerate(LEASES[lease])),
            taken=data.draw(st.sampled_from([number - 1, number - 1, number - 2])),
            weight=data.draw(st.sampled_from([1.0, 1.0, 3.0])),
            used=lending.Used(*(sum_ + data.draw(amounts) for sum_ in before)),
            kind=data.draw(st.sampled_from([LeaseKind.RENEW] * 6 + [LeaseKind.RETURN] * 2 + [LeaseKind.REVOKE])),
        )
        found = self.model.lend(ask, self.now_us)
        for store in (self.scripts, self.general):
            assert repr(store.lend(ask, self.now_us)) == repr(found)
        if found.status is LendStatus.RETURNED:
            ended = self.model.rows[lease]
            assert ended.is_revoked if ask.kind is LeaseKind.REVOKE else ended.is_closed

    def _lease_want(self, data: st.DataObject, name: str, terms: Params, row: Row | None, i: int) -> LeaseWant:
        part = Part() if row is None else row.parts[i]
        ask = Said(
            held=data.draw(st.one_of(st.just(part.rate), st.floats(0, 1), st.integers(0, 20).map(float))),
            wanted=data.draw(st.one_of(st.just(-1.0), amounts)),
            debt=data.draw(st.one_of(st.just(0.0), st.just(part.given), amounts)),
            moved=float(terms.window_end_us) if terms.is_quota else part.moved,
        )
        weight, refused = data.draw(st.sampled_from([1.0, 1.0, 2.0])), data.draw(amounts)
        return LeaseWant(name, terms, ask, weight, refused, data.draw(st.booleans()))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), size=st.integers(1, 3))
    def settle(self, data: st.DataObject, size: int) -> None:
        terms = self._terms(data)
        operations = [self._settle(data, terms) for _ in range(size)]
        if any(0 <= left_us < 10_000_000 for left_us in self._lefts_us(operations)):
            return  # the server's own clock would end the tombstone before the history's does
        self.made += 1
        flush_id = b"settle-%d" % self.made
        found = self.model.settle(operations, self.now_us)
        for store in (self.scripts, self.general):
            assert repr(store.settle(operations, self.now_us, flush_id=flush_id)) == repr(found)
            assert repr(store.settle(operations, self.now_us, flush_id=flush_id)) == repr(found), "a repeat"

    def _settle(self, data: st.DataObject, terms: dict[str, Params]) -> Settle:
        reserved = data.draw(st.sampled_from(self.reservations))
        weight = data.draw(st.sampled_from([1.0, 1.0, 0.5, 3.0]))
        expected_ms = data.draw(st.sampled_from([math.nan, math.nan, 0.0, 5000.0, -math.inf]))
        return Settle(
            reservation=reserved.reservation,
            charges=tuple(
                charge.but(
                    weight=weight,
                    params=terms[charge.bucket],
                    expected_ms=expected_ms,
                    learn_id=data.draw(learn_ids),
                    unit=data.draw(units),
                )
                for charge in reserved.charges
            ),
            work=self._work(data, reserved.charges[0].charge),
            acquired_us=reserved.acquired_us,
            deadline_us=reserved.deadline_us,
            final=data.draw(st.booleans()),
            requests=data.draw(st.sampled_from([1.0, 1.0, 1.0, 3.0, 0.5])),
            latency_ms=data.draw(st.one_of(st.sampled_from([math.nan, 0.0, 0.125, 30.0, 1e9]), st.floats(0, 1e5))),
            expected_ms=data.draw(st.sampled_from([math.nan, 30.0])),
            class_number=reserved.class_number,
            late_us=data.draw(st.sampled_from([LATE_US, LATE_US, 0, 3_600_000_000])),
            is_uncounted=data.draw(st.sampled_from([False, False, False, True])),
        )

    def _lefts_us(self, operations: Sequence[Settle]) -> Iterator[float]:
        """The time for which each reservation may still be settled. Progress in the same call may renew it from now
        on."""
        renewed: set[str] = set()
        for operation in operations:
            mark = self.model.tombstones.get(operation.reservation)
            deadline_us = operation.deadline_us if mark is None else mark.deadline_us
            yield deadline_us + operation.late_us - self.now_us
            if operation.reservation in renewed:
                yield operation.late_us
            renewed.add(operation.reservation)

    def _work(self, data: st.DataObject, charge: float) -> float:
        """Around what was charged: refunds, small differences and overruns alike; or anything."""
        factor = data.draw(st.sampled_from([0.0, 0.5, 0.95, 1.0, 1.05, 2.0, math.nan]))
        return data.draw(amounts) if math.isnan(factor) else charge * factor

    @rule(by_us=durations_us)
    def step_the_clock(self, by_us: int) -> None:
        self.now_us += by_us

    @rule(bucket=st.sampled_from(list(BUCKETS)), data=st.data(), mechanism_too=st.booleans())
    def change_a_policy(self, bucket: str, data: st.DataObject, mechanism_too: bool) -> None:
        kind = data.draw(flags) if mechanism_too else self.params[bucket].flags
        before, self.params[bucket] = self.params[bucket], data.draw(params(kind))
        if data.draw(st.booleans()):  # only the number of partitions, or the mechanism, and all else as before
            drawn = self.params[bucket]
            self.params[bucket] = replace(
                before,
                flags=kind,
                partitions=drawn.partitions,
                block=drawn.block,
                overload=drawn.overload,
                in_flight=drawn.in_flight,
                refund_threshold=drawn.refund_threshold,
                lending=drawn.lending,
            )
        self.periods[bucket] = data.draw(st.sampled_from(Period))

    @rule(owner=st.sampled_from(OWNERS), ended=st.sampled_from(["still held", "given back", "over"]))
    def change_the_owner(self, owner: bytes, ended: str) -> None:
        """Another controller comes, before or after the lease has ended."""
        if ended == "over":
            self.model.lease = None
            self.scripts.end_lease()
            self.general.end_lease()
        elif ended == "given back":
            self.model.release(OWNERS[0])
            self.scripts.release(OWNERS[0])
            self.general.release(OWNERS[0])
        self._take(owner)

    def _take(self, owner: bytes) -> None:
        taken = self.model.take(owner, LEASE_MS)
        assert self.scripts.take(owner, LEASE_MS) == self.general.take(owner, LEASE_MS) == taken
        if taken is not None:
            self.leases.append(taken)

    def _lease(self, data: st.DataObject) -> Lease:
        """Mostly the lease that holds now, sometimes any that ever held."""
        if self.model.lease is None or data.draw(st.sampled_from([False, False, False, True])):
            return data.draw(st.sampled_from(self.leases))
        return self.model.lease

    @rule(data=st.data(), count=st.sampled_from([1, 2, 100]))
    def sample(self, data: st.DataObject, count: int) -> None:
        lease = self._lease(data)
        # The buckets of one call are listed in no particular order: here the others follow the scripts.
        self.model.touched = self.scripts.touched()
        self.general.order_touched(self.model.touched)
        expected = self.model.sample(lease, count)
        found = None if expected is None else list(dict.fromkeys(expected))
        assert self.scripts.sample(lease, count) == self.general.sample(lease, count) == found

    @rule(data=st.data(), names=st.lists(st.sampled_from(STEERED), min_size=1, max_size=4, unique=True))
    def steer(self, data: st.DataObject, names: list[str]) -> None:
        terms, lease = self._terms(data), self._lease(data)
        rows = [data.draw(steers(name, terms[name])) for name in names]
        found = self.model.steer(lease, rows, self.now_us)
        for store in (self.scripts, self.general):
            assert store.steer(lease, rows, self.now_us) == found
            if found is not None:
                assert store.steer(lease, rows, self.now_us) == found, "a repeat changes nothing more"

    @rule(source=st.sampled_from(SOURCES), loads=reported)
    def report_load(self, source: str, loads: dict[str, float]) -> None:
        report = Report(keys.source_digest(source), float(self.now_us), loads)
        self.reports = add(self.reports, report)
        assert self.scripts.report("shed", source, loads, self.now_us) == len(self.reports)
        raw = self.scripts.signals("shed")
        assert raw is not None
        assert call_layout.unpack_reports(raw) == self.reports

    @rule(bucket=st.sampled_from(list(BUCKETS)))
    def forget_a_record(self, bucket: str) -> None:
        """The key of a bucket expires, while reservations on it are still open."""
        self.model.records.pop(bucket, None)
        for store in (self.scripts, self.general):
            store.client.delete(keys.bucket(store.prefix, bucket))

    @rule()
    def forget_the_scripts(self) -> None:
        self.scripts.client.script_flush()

    @precondition(lambda self: self.restarts and self.made >= self.restart_at)
    @rule(hard=st.booleans())
    def restart_the_server(self, hard: bool) -> None:
        assert isinstance(self.server, Server)
        self.restart_at = self.made + 4
        self.server.restart(hard=hard)
        type(self).restarted += 1

    @invariant()
    def every_record_agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        for store in (self.scripts, self.general):
            kept = self._kept(store.prefix)
            for key, found in zip(kept, store.values(list(kept)), strict=True):
                assert found == kept[key], key
        assert sorted(self.scripts.touched()) == sorted(self.general.touched()) == sorted(self.model.touched)

    def _kept(self, prefix: bytes) -> dict[bytes, bytes | None]:
        """What the model keeps, by the keys of a store."""
        model = self.model
        records = {name: layout.pack_record(record) for name, record in model.records.items()}
        return {
            **{keys.bucket(prefix, name): records.get(name) for name in BUCKETS},
            **{keys.state(prefix, name): model.states.get(name) for name in BUCKETS},
            **{keys.lease_row(prefix, name): lease_layout.pack_row(row) for name, row in model.rows.items()},
            **{keys.tombstone(prefix, name): layout.pack_tombstone(mark) for name, mark in model.tombstones.items()},
        }


def run_history(
    server: Server | Cluster,
    *,
    restarts: bool = False,
    examples: int = int(os.environ.get("HISTORIES", "250")),
    steps: int = 40,
) -> type[History]:
    machine = type("Machine", (History,), {"server": server, "restarts": restarts})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine


@pytest.mark.slow
def test_the_scripts_agree_with_the_model(server: Server) -> None:
    run_history(server)


@pytest.mark.slow
def test_the_scripts_agree_with_the_model_on_a_cluster(cluster: Cluster) -> None:
    run_history(cluster, examples=60)


@pytest.mark.slow
def test_the_scripts_agree_with_the_model_across_restarts(durable: Server) -> None:
    """F-S1, F-S12: everything acknowledged is in the append-only file, and means the same after a restart."""
    machine = run_history(durable, restarts=True, examples=20)
    assert machine.restarted > 0


def test_a_record_is_kept_until_it_would_be_full_and_a_while_longer(server: Server) -> None:
    scripts, model, now_us = ScriptStore(server), Ledger(), 1_790_000_000_000_000
    terms = Params(committed=2.0, capacity=1000.0, debt_max=500.0)
    operation = Acquire((Want("reads:a", terms, 1.0, 1200.0),))
    scripts.acquire([operation], now_us)
    model.acquire([operation], now_us)
    key, needed_s = keys.bucket(scripts.prefix, "reads:a"), 600 + 600
    assert needed_s * 1000 < scripts.client.pttl(key) <= (needed_s + 61) * 1000
    assert model.records["reads:a"].kept_until_s == now_us // 1_000_000 + needed_s + 60


def test_an_expiry_is_moved_about_once_a_minute(server: Server) -> None:
    """It is also moved at once if the bucket is needed for much longer, or for much less time."""
    scripts, now_us = ScriptStore(server), 1_790_000_000_000_000
    terms = Params(committed=100.0, capacity=100.0, debt_max=1e6)
    want, key = Want("reads:a", terms, -1e9, 1.0), keys.bucket(scripts.prefix, "reads:a")
    expiries = []
    for second in range(0, 200, 10):
        scripts.acquire([Acquire((want,))], now_us + second * 1_000_000)
        written = scripts.record("reads:a")
        assert written is not None
        # Not the key's own expiry: that is in the server's time, which hardly moves between these calls.
        expiries.append(layout.unpack_record(written).kept_until_s)
    assert 3 <= len(set(expiries)) <= 5
    left_ms = scripts.client.pttl(key)
    scripts.acquire([Acquire((want.but(charge=100_000.0),))], now_us + 200_000_000)
    assert scripts.client.pttl(key) > left_ms + 900_000, "until its debt is repaid"
    raw = scripts.record("reads:a")
    assert raw is not None
    record = layout.unpack_record(raw)
    record.balance = 100.0
    scripts.client.set(key, layout.pack_record(record), keepttl=True)
    scripts.acquire([Acquire((want,))], now_us + 200_000_000)
    assert scripts.client.pttl(key) <= 661_000
