"""Generated histories: the scripts on real servers agree with the model bit for bit (promise 1)."""

import math
from collections.abc import Iterator
from pathlib import Path
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

from limiter.model.bucket import Flags, Params, ttl_ms
from limiter.model.ledger import Ledger
from limiter.model.operations import SETTLE_GRACE_US, Acquire, Charge, Idempotency, Settle, Verdict, Want
from limiter.model.period import Period, window_us
from limiter.store import keys, layout
from limiter.store.keys import Slot
from tests.support.servers import Cluster, Server, running
from tests.support.stores import ScriptStore

BUCKETS = ["reads:a", "reads:b", "writes:a", "month:a", "rps:a"]
UTC = ZoneInfo("UTC")

# Numbers that people write, and numbers that show a different order of operations in the last bit.
amounts = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 3.0, 64.0]),
    st.integers(0, 200).map(float),
    st.floats(0, 1e6, allow_nan=False, allow_subnormal=False),
)
positive = st.one_of(st.sampled_from([1.0, 10.0, 50.0, 100.0]), st.floats(1e-3, 1e6, allow_subnormal=False))
minimums = st.one_of(st.sampled_from([1.0, 0.0, -10.0, 25.0]), st.floats(-1e3, 1e3, allow_subnormal=False))
durations_us = st.one_of(
    st.integers(0, 1_000_000),
    st.sampled_from([1, 10_000_000, 3_600_000_000, 86_400_000_000, 366 * 86_400_000_000]),
    st.sampled_from([-1, -200_000, -1_000_000, -1_000_001, -3_600_000_000]),
)


@st.composite
def params(draw: st.DrawFn, now_us: int) -> Params:
    """A policy's terms: any mechanism, any numbers a policy may hold."""
    flags = draw(
        st.sampled_from(
            [Flags.NONE, Flags.NONE, Flags.COUNTS_REQUESTS, Flags.QUOTA, Flags.QUOTA | Flags.COUNTS_REQUESTS]
        )
    )
    flags |= draw(st.sampled_from([Flags.NONE, Flags.NONE, Flags.SHADOW]))
    flags |= draw(st.sampled_from([Flags.NONE, Flags.NONE, Flags.HISTOGRAM]))
    committed = draw(positive)
    start_us, end_us = window_us(now_us, draw(st.sampled_from(Period)), UTC) if Flags.QUOTA in flags else (0, 0)
    return Params(
        flags=flags,
        committed=committed,
        rate=draw(positive) if Flags.COUNTS_REQUESTS in flags else committed,
        capacity=draw(positive),
        burst_s=draw(st.sampled_from([0.0, 0.1, 1.0])),
        debt_max=draw(amounts),
        settle_threshold=draw(st.sampled_from([0.0, 0.0, 2.0, -0.1])),
        stop_debt=draw(st.sampled_from([math.inf, 10.0])),
        window_start_us=start_us,
        window_end_us=end_us,
    )


class History(RuleBasedStateMachine):
    """Applies each step to the scripts and to the model, and compares everything there is."""

    server: Server | Cluster
    restarts: bool

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if isinstance(self.server, Cluster):
            self.server.flush()
        else:
            self.server.client().flushall()
        self.scripts = ScriptStore(self.server, Slot("history", 0))
        self.model = Ledger()
        self.now_us = 1_790_000_000_000_000
        self.params = {bucket: data.draw(params(self.now_us)) for bucket in BUCKETS}
        self.reservations: list[Settle] = []
        self.made = 0

    @rule(data=st.data(), size=st.integers(1, 4))
    def acquire(self, data: st.DataObject, size: int) -> None:
        operations = [self._operation(data) for _ in range(size)]
        self.made += 1
        flush_id = b"acquire-%d" % self.made
        found = self.scripts.acquire(operations, self.now_us, flush_id=flush_id)
        assert repr(found) == repr(self.model.acquire(operations, self.now_us))
        assert repr(self.scripts.acquire(operations, self.now_us, flush_id=flush_id)) == repr(found), "a repeat"
        for operation, answer in zip(operations, found, strict=True):
            if answer.granted and not operation.dry_run and not answer.memo:
                self._reserve(
                    operation, [bucket.charge for bucket in answer.buckets], [b.verdict for b in answer.buckets]
                )

    def _operation(self, data: st.DataObject) -> Acquire:
        names = data.draw(st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=3, unique=True))
        wants = tuple(
            Want(name, self.params[name], data.draw(minimums), data.draw(amounts), data.draw(st.booleans()))
            for name in names
        )
        lease = data.draw(st.sampled_from([False, False, True]))
        dry_run = data.draw(st.sampled_from([False, False, False, True]))
        idempotency = None
        if not dry_run and data.draw(st.sampled_from([False, False, True])):
            idempotency = Idempotency(
                key=data.draw(st.sampled_from(["k1", "k2", "k3"])),
                fingerprint=data.draw(st.sampled_from([b"a" * 16, b"b" * 16])),
                memo=b"memo-%d" % len(names),
            )
        requests = float(data.draw(st.integers(1, 5))) if lease else 1.0
        return Acquire(wants, requests=requests, lease=lease, dry_run=dry_run, idempotency=idempotency)

    def _reserve(self, operation: Acquire, charges: list[float], verdicts: list[Verdict]) -> None:
        taken = tuple(
            Charge(want.bucket, charge, 1.0, want.params)
            for want, charge, verdict in zip(operation.wants, charges, verdicts, strict=True)
            if verdict is Verdict.DEBITED
        )
        if taken:
            name = f"r{len(self.reservations)}"
            self.reservations.append(
                Settle(
                    reservation=name,
                    charges=taken,
                    work=0.0,
                    acquired_us=self.now_us,
                    deadline_us=self.now_us + 60_000_000,
                    requests=operation.requests,
                )
            )

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), size=st.integers(1, 3))
    def settle(self, data: st.DataObject, size: int) -> None:
        operations = [self._settle(data) for _ in range(size)]
        left_us = [operation.deadline_us + SETTLE_GRACE_US - self.now_us for operation in operations]
        if any(0 <= left < 10_000_000 for left in left_us):
            return  # the server's own clock would end the tombstone before the history's does
        self.made += 1
        flush_id = b"settle-%d" % self.made
        found = self.scripts.settle(operations, self.now_us, flush_id=flush_id)
        assert repr(found) == repr(self.model.settle(operations, self.now_us))
        assert repr(self.scripts.settle(operations, self.now_us, flush_id=flush_id)) == repr(found), "a repeat"

    def _settle(self, data: st.DataObject) -> Settle:
        reserved = data.draw(st.sampled_from(self.reservations))
        weight = data.draw(st.sampled_from([1.0, 1.0, 0.5, 3.0]))
        return Settle(
            reservation=reserved.reservation,
            # A bucket has one set of terms a call.
            charges=tuple(
                charge._replace(weight=weight, params=self.params[charge.bucket]) for charge in reserved.charges
            ),
            work=data.draw(amounts),
            acquired_us=reserved.acquired_us,
            deadline_us=reserved.deadline_us,
            final=data.draw(st.booleans()),
            requests=reserved.requests,
            latency_ms=data.draw(st.sampled_from([math.nan, 0.0, 0.125, 33.3, 1e9])),
            expected_ms=data.draw(st.sampled_from([math.nan, 30.0])),
        )

    @rule(by_us=durations_us)
    def step_the_clock(self, by_us: int) -> None:
        self.now_us += by_us

    @rule(bucket=st.sampled_from(BUCKETS), data=st.data())
    def change_a_policy(self, bucket: str, data: st.DataObject) -> None:
        self.params[bucket] = data.draw(params(self.now_us))

    @rule(bucket=st.sampled_from(BUCKETS), charge=amounts, cap=positive)
    def steer(self, bucket: str, charge: float, cap: float) -> None:
        """What the controller will do: write a learned charge, move a cap."""
        record = self.model.records.get(bucket)
        if record is not None:
            record.charge = charge
            if record.counts_requests and not record.is_quota:
                record.rate = cap
            self.scripts.client.set(keys.bucket(self.scripts.prefix, bucket), layout.pack_record(record))

    @rule()
    def sample(self) -> None:
        """What the controller will do: begin a new sampling epoch."""
        self.model.epoch += 1
        self.model.touched.clear()
        self.scripts.client.incr(keys.sampling(self.scripts.prefix))
        self.scripts.client.delete(keys.touched(self.scripts.prefix))

    @rule()
    def forget_the_scripts(self) -> None:
        self.scripts.client.script_flush()

    @precondition(lambda self: self.restarts and self.made % 8 == 7)
    @rule(hard=st.booleans())
    def restart_the_server(self, hard: bool) -> None:
        assert isinstance(self.server, Server)
        self.made += 1
        self.server.restart(hard=hard)

    @invariant()
    def every_record_agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        for bucket in BUCKETS:
            record = self.model.records.get(bucket)
            assert self.scripts.record(bucket) == (None if record is None else layout.pack_record(record)), bucket
        for name, mark in self.model.tombstones.items():
            assert self.scripts.tombstone(name) == layout.pack_tombstone(mark), name
        assert sorted(self.scripts.touched()) == sorted(self.model.touched)


def run_history(server: Server | Cluster, *, restarts: bool = False, examples: int = 60, steps: int = 25) -> None:
    machine = type("Machine", (History,), {"server": server, "restarts": restarts})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
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


def test_the_scripts_agree_with_the_model(server: Server) -> None:
    run_history(server)


def test_the_scripts_agree_with_the_model_on_a_cluster(cluster: Cluster) -> None:
    run_history(cluster, examples=30)


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Server]:
    with running("valkey", tmp_path, config={"appendonly": "yes", "appendfsync": "everysec"}) as server:
        yield server


@pytest.mark.slow
def test_the_scripts_agree_with_the_model_across_restarts(durable: Server) -> None:
    """S1, S12: what was acknowledged is in the append-only file, and means the same after a restart."""
    run_history(durable, restarts=True, examples=20)


def test_a_record_is_kept_until_it_would_be_full_and_a_while_longer(server: Server) -> None:
    scripts, model, now_us = ScriptStore(server), Ledger(), 1_790_000_000_000_000
    terms = Params(committed=2.0, rate=2.0, capacity=1000.0, debt_max=500.0)
    operation = Acquire((Want("reads:a", terms, 1.0, 1200.0),))
    scripts.acquire([operation], now_us)
    model.acquire([operation], now_us)
    kept_ms = scripts.client.pttl(keys.bucket(scripts.prefix, "reads:a"))
    assert ttl_ms(model.records["reads:a"], now_us) == 600_000 + 600_000
    assert 1_190_000 < kept_ms <= 1_200_000
