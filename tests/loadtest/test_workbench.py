"""The workbench is no second truth: its shortcuts agree with the reference, its worlds with arithmetic."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev
from typing import Any

import pytest

from limiter.model.bucket.bucket import Record
from limiter.model.bucket.operations import Acquire, Charge, Lot, Settle, Want
from limiter.model.ledger.ledger import Ledger
from limiter.model.policy.criticality import Criticality
from limiter.model.policy.limit import Limit
from limiter.model.policy.reading import read_policy
from loadtest.simulation.backends import Backend, Delay, Fifo, Rest, Sharing, Slowing, every
from loadtest.simulation.distributions import (
    COSTS,
    Draw,
    bimodal,
    constant,
    exponential,
    poisson,
    spread,
    tailed,
    uniform,
)
from loadtest.simulation.flow import Flow, Users, World, steady
from loadtest.simulation.gates import Guarded
from loadtest.simulation.service import Closed, Traffic
from loadtest.simulation.service import World as ServiceWorld
from loadtest.simulation.steered import BEGIN_US, BUCKET, CLASSES, CRITICAL, TTL_US, MemorySlot, Steered, Ticket
from loadtest.simulation.yardsticks import Everyone, Fixed, Gradient, OnOff, Published, StaticCap, Vegas

SEEDS = range(5)  # a failing case is named for its seed


def numbers(record: Record | None) -> dict[str, float]:
    """All plain numbers of a record."""
    assert record is not None
    values = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    return {name: value for name, value in values.items() if isinstance(value, float)}


# Shortcuts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mechanism", ["requests", "work", "auto"])
def test_asking_for_many_is_asking_for_each(mechanism: str, seed: int) -> None:
    chance = Random(seed)
    document = {"rate": 100, "mechanism": mechanism, "charge": 3}
    together, apart = Steered(document), Steered(document)
    now_s = 0.0
    for _ in range(200):
        now_s += chance.expovariate(20)
        asked = chance.randrange(1, 12)
        granted = together.ask_many(now_s, asked)
        each = [apart.ask(now_s) for _ in range(asked)]
        assert (granted.requests if granted else 0) == sum(ticket is not None for ticket in each)
        assert numbers(together.record()) == pytest.approx(numbers(apart.record()), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_settling_many_is_settling_each(seed: int) -> None:
    chance = Random(seed)
    document = {"rate": 10, "capacity": "100s", "charge": 2}
    together, apart = Steered(document), Steered(document)
    for second in range(20):
        many = together.ask_many(float(second), 10)
        each = [ticket for ticket in (apart.ask(float(second)) for _ in range(10)) if ticket is not None]
        assert many is not None
        assert len(each) == many.requests
        works = [chance.uniform(0, 4) for _ in each]
        together.settle(second + 0.5, many, sum(works), squares=sum(work * work for work in works))
        for ticket, work in zip(each, works, strict=True):
            apart.settle(second + 0.5, ticket, work)
    first, second_ = together.record(), apart.record()
    assert first is not None
    assert second_ is not None
    for name in ("work_settled", "work_squared", "settles", "balance"):
        assert getattr(first, name) == pytest.approx(getattr(second_, name), rel=1e-9)


class _Plainly:
    """One bucket with overload control in the reference itself, without any shortcut."""

    def __init__(self, overload: dict[str, Any], seed: int) -> None:
        limit = Limit(read_policy({"name": BUCKET, "rate": 1e9, "overload": overload}))
        self.params = limit.params(BEGIN_US)
        self.wants = [Want(BUCKET, self.params, limit.minimums[c], limit.charge, limit.how_unsaid) for c in CLASSES]
        self.ledger = Ledger()
        self.chance = Random(f"draws {seed}")
        self.count = 0

    def ask(self, now_us: int, number: int) -> bool:
        operation = Acquire((self.wants[number],), ttl_us=TTL_US, lot=Lot(number, self.chance.random()))
        return self.ledger.acquire([operation], now_us)[0].granted

    def settle(self, now_us: int, number: int, acquired_us: int, latency_ms: float) -> None:
        self.count += 1
        charge = Charge(BUCKET, 1.0, params=self.params)
        deadline_us = acquired_us + TTL_US
        settle = Settle(
            reservation=str(self.count),
            charges=(charge,),
            work=1.0,
            acquired_us=acquired_us,
            deadline_us=deadline_us,
            latency_ms=latency_ms,
            class_number=number,
        )
        self.ledger.settle([settle], now_us)


@pytest.mark.parametrize("seed", SEEDS)
def test_deciding_fast_is_deciding_by_the_reference(seed: int) -> None:
    """Every decision, and at the end every number of the record."""
    overload = {"response_time": {"target_ms": 500, "initial": 3}}
    chance, fast, slow = Random(seed), Steered({"rate": 1e9, "overload": overload}, seed=seed), _Plainly(overload, seed)
    open_tickets: list[tuple[Ticket, int]] = []
    now_us = 0
    for _ in range(2000):
        now_us += chance.randrange(1, 40_000)
        now_s = now_us / 1e6
        if chance.random() < 0.6:
            number = chance.randrange(4)
            ticket = fast.ask(now_s, number)
            assert slow.ask(BEGIN_US + int(now_s * 1e6), number) == (ticket is not None)
            if ticket is not None:
                open_tickets.append((ticket, number))
        elif open_tickets:
            ticket, number = open_tickets.pop(chance.randrange(len(open_tickets)))
            latency_s = chance.uniform(0, 1)
            fast.settle(now_s, ticket, 1.0, latency_s=latency_s)
            slow.settle(BEGIN_US + int(now_s * 1e6), number, ticket.acquired_us, latency_s * 1000)
    fast.count_turned_away(BEGIN_US + now_us)
    found, owed = fast.record(), slow.ledger.records[BUCKET]
    assert found is not None
    assert found.shedding is not None
    assert owed.shedding is not None
    assert (found.shedding.asked, found.shedding.refused) == (owed.shedding.asked, owed.shedding.refused)
    assert sum(owed.shedding.refused) > 50
    assert (found.shedding.timed, found.shedding.late) == (owed.shedding.timed, owed.shedding.late)
    assert (found.requests, found.admitted, found.balance) == (owed.requests, owed.admitted, owed.balance)
    assert found.slots == owed.slots


def test_a_slot_in_memory_is_the_reference() -> None:
    assert issubclass(MemorySlot, Ledger)


# Controllers, stores


def flow(**more: Any) -> Flow:
    terms: dict[str, Any] = {"seconds": 30.0, "demand": steady(300.0), "cost": steady(1.0), "duration_s": 0.05}
    return Flow(**{**terms, **more})


def test_one_seed_one_result() -> None:
    first, again, other = (
        World(
            flow(shape="pareto", durations="exponential"), Steered({"rate": 100, "mechanism": "requests"}), seed
        ).run()
        for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_a_controller_that_stops_in_order_leaves_what_it_knows() -> None:
    limited = Steered({"rate": 100, "mechanism": "requests"})
    World(flow(seconds=20.0), limited, 1).run()
    (kept,) = limited.store.slots[0].states.values()
    limited.end()
    limited.begin()
    limited.ask(20.01)
    limited.look(20.1)
    assert limited.store.slots[0].states[BUCKET] == kept or len(limited.store.slots[0].states[BUCKET]) > 50


def test_while_the_store_is_away_nobody_is_admitted_and_the_controller_goes_on_afterwards() -> None:
    points = World(flow(store_lost=((10.0, 15.0),)), Steered({"rate": 100, "mechanism": "requests"}), 1).run()
    assert not any(point.admitted for point in points if 10.1 < point.at_s < 15.0)
    assert sum(point.work for point in points if point.at_s > 20) == pytest.approx(1000, rel=0.1)


def test_a_limit_divided_over_partitions_follows_demand_and_never_exceeds_the_limit() -> None:
    limited = Steered({"rate": 400, "mechanism": "work", "charge": "learned"}, partitions=4)
    points = World(flow(demand=steady(2000.0), partitions=lambda _: (0.7, 0.1, 0.1, 0.1)), limited, 1).run()
    shares = [record.share for record in map(limited.record, range(4)) if record is not None]
    limited.close()
    assert shares[0] > 0.5
    assert sum(shares) <= 1
    assert sum(point.work for point in points if point.at_s > 20) == pytest.approx(4000, rel=0.05)


def test_users_ask_only_while_they_are_not_served() -> None:
    points = World(flow(users=Users(count=10, retry_s=0.1), duration_s=2.0), Steered({"rate": 1e6}), 1).run()
    assert sum(point.admitted for point in points) <= 30 / 2 * 10 + 10


def test_lost_settles_keep_what_was_charged() -> None:
    limited = Steered({"rate": 100, "charge": 1})
    World(flow(lost=1.0), limited, 1).run()
    record = limited.record()
    assert record is not None
    assert record.settles == 0
    assert record.admitted > 2000


def test_progress_is_reported_and_counts_once() -> None:
    limited = Steered({"rate": 1e6, "charge": 1})
    World(flow(demand=steady(2.0), cost=steady(10.0), duration_s=5.0, reports_s=1.0, seconds=40.0), limited, 3).run()
    record = limited.record()
    assert record is not None
    assert record.work_settled >= 10 * record.settles
    assert record.work_squared == pytest.approx(100 * record.settles)


# Distributions and backends


@pytest.mark.parametrize(
    ("draw", "variation"),
    [
        (constant(3.0), 0.0),
        (uniform(3.0), 0.577),
        (bimodal(3.0), 2.7),
        (exponential(3.0), 1.0),
        (spread(3.0, 0.5), 0.5),
        (COSTS["halves"](3.0), 0.289),
    ],
)
def test_a_distribution_has_its_mean_and_its_variation(draw: Draw, variation: float) -> None:
    chance = Random(1)
    drawn = [draw(chance) for _ in range(40_000)]
    assert fmean(drawn) == pytest.approx(3.0, rel=0.03)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(variation, abs=0.05)


@pytest.mark.parametrize("draw", [COSTS["pareto"](3.0), tailed(3.0)])
def test_heavy_tails_have_their_mean(draw: Draw) -> None:
    chance = Random(2)
    assert fmean(draw(chance) for _ in range(200_000)) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("mean", [0.3, 20.0, 500.0])
def test_counts_are_poissons(mean: float) -> None:
    chance = Random(3)
    counts = [poisson(mean, chance) for _ in range(5000)]
    assert fmean(counts) == pytest.approx(mean, rel=0.06)
    assert pstdev(counts) == pytest.approx(math.sqrt(mean), rel=0.06)


def through(backend: Backend, arrivals: Sequence[float]) -> list[tuple[float, float]]:
    """When each request came and how long it took, in the order of answers."""
    found = []
    for at_s in arrivals:
        while backend.next_s <= at_s:
            done = backend.pop()
            found.append((done.since_s, done.at_s - done.since_s))
        backend.admit(at_s, None)
    while backend.next_s < math.inf:
        done = backend.pop()
        found.append((done.since_s, done.at_s - done.since_s))
    return found


def arrivals(rate: float, seconds: float, seed: int = 1) -> list[float]:
    chance, at_s, found = Random(seed), 0.0, []
    while at_s < seconds:
        at_s += chance.expovariate(rate)
        found.append(at_s)
    return found


@pytest.mark.parametrize("make", [lambda: Fifo(1, exponential(0.1), 1), lambda: Sharing(1, exponential(0.1), 1)])
def test_a_queue_of_one_worker_waits_as_the_textbook_says(make: Callable[[], Backend]) -> None:
    """M/M/1 at half load: the mean response time is service / (1 − load), in order or shared."""
    took = [took_s for _, took_s in through(make(), arrivals(5.0, 8000.0))]
    assert fmean(took) == pytest.approx(0.2, rel=0.05)


def test_shared_processors_slow_everybody_down() -> None:
    assert [took_s for _, took_s in through(Sharing(1, constant(1.0), 1), [0.0, 0.0])] == pytest.approx([2.0, 2.0])
    assert [took_s for _, took_s in through(Sharing(2, constant(1.0), 1), [0.0, 0.0])] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("make", [Fifo, Sharing])
def test_no_work_is_done_in_a_pause(make: Callable[..., Backend]) -> None:
    found = through(make(1, constant(1.0), 1, pauses=((0.5, 3.0),)), [0.0, 1.0])
    assert found[0] == pytest.approx((0.0, 3.5 if make is Fifo else found[0][1]))
    assert found[-1][0] + found[-1][1] == pytest.approx(4.5)


def test_a_clock_with_pauses_goes_there_and_back() -> None:
    rest = Rest(every(10.0, 1.0, 100.0))
    times = [0.0, 9.9, 11.0, 25.0, 99.0]
    assert [rest.at(rest.worked(now_s)) for now_s in times] == pytest.approx(times)
    assert rest.worked(10.7) == pytest.approx(10.0)
    assert all(after >= before for before, after in pairwise([rest.worked(now_s / 7) for now_s in range(300)]))


def test_a_backend_slows_down_with_the_excess() -> None:
    """Q7: 170 ms, and 0.1 ms more for each request a second above 3000."""
    took = through(Slowing(constant(1.0), 1), arrivals(5000.0, 5.0))
    assert fmean(took_s for at_s, took_s in took if at_s > 2) == pytest.approx(0.37, rel=0.03)
    assert fmean(took_s for _, took_s in through(Slowing(constant(1.0), 1), arrivals(2000.0, 5.0))) == pytest.approx(
        0.17
    )


def test_a_delay_knows_no_load() -> None:
    took = [took_s for _, took_s in through(Delay(constant(0.5), 1, outliers=0.1), arrivals(1000.0, 2.0))]
    assert sorted(set(map(lambda took_s: round(took_s, 6), took))) == [0.5, 5.0]  # noqa: C417


# Yardsticks


def seen(gate: Any, rate: float = 100.0, seconds: int = 60) -> Any:
    """Ten workers of 0.2 s, 50 per second."""
    traffic = Traffic(rates=lambda _: (0.0, rate, 0.0, 0.0))
    return ServiceWorld(traffic, gate, Fifo(10, exponential(0.2), 1), 1, seconds, 1.0).run()


def test_without_control_the_queue_grows_without_bound() -> None:
    assert seen(Everyone()).percentile_s(50, 60) > 20


def test_a_fixed_limit_holds_by_littles_law() -> None:
    found = seen(Fixed(40))
    assert found.served(20, 60) == pytest.approx(50, rel=0.05)
    assert fmean(latency for second in found.latencies_s[20:60] for latency in second) == pytest.approx(0.8, rel=0.05)


def test_a_throttle_that_is_on_or_off_oscillates() -> None:
    found = seen(OnOff(1.0, allowed=0.1))
    assert found.wobble(20, 60) > 0.5


@pytest.mark.parametrize("gate", [Gradient(), Vegas(1)])
def test_adaptive_limits_keep_the_backend_busy(gate: Any) -> None:
    assert seen(gate).served(20, 60) == pytest.approx(50, rel=0.05)


def test_the_published_rules_come_down_from_their_highest_rate() -> None:
    found = seen(Published(1.0), seconds=120)
    assert found.admitted_rate(0, 5) > 90
    assert found.admitted_rate(60, 120) < 50


def test_a_static_cap_admits_what_it_says() -> None:
    points = World(flow(), StaticCap(50.0), 1).run()
    assert sum(point.admitted for point in points) == pytest.approx(1500, rel=0.01)


def test_users_of_a_closed_loop_think_and_wait() -> None:
    """A hundred users who think for 2 s and are served in 0.2 s ask about 45 times per second."""
    traffic = Traffic(closed=Closed(users=lambda _: 100))
    found = ServiceWorld(traffic, Everyone(), Delay(constant(0.2), 1), 1, 60, 1.0).run()
    assert found.served(20, 60) == pytest.approx(100 / 2.2, rel=0.05)


def test_the_product_is_a_gate_like_any_other() -> None:
    found = seen(Guarded({"response_time": {"target_ms": 1000}}, seed=1), rate=25.0)
    assert found.refused_share(0, 60, CLASSES.index(Criticality.CRITICAL)) == 0
    assert found.refused_share(0, 60, CRITICAL) == 0
